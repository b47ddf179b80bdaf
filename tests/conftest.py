"""Without a GPU the Triton kernels run in Triton's interpreter: decided here, before anything imports triton."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton_interpreter

    triton_interpreter.mend()

# A suite says of the same source the same twice. With `--hypothesis-profile=drawn` the examples are others each time.
settings.register_profile("drawn", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # others may have the core meanwhile
settings.register_profile("same", settings.get_profile("drawn"), derandomize=True)
settings.load_profile("same")

gc.disable()  # until all files are imported: it would look through what they are again and again

# a shell starts what it puts into the background deaf to Ctrl-C, and all that the tests start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") != "no":  # this process imports nothing: its workers do
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def begun_anew() -> None:
    """An engine that is closed collects garbage, and would each time look through a million objects of what has been imported, half a
    second long: of all that is there before a file's first test, nothing becomes garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()
    torch.manual_seed(0)  # for what the file makes once


@pytest.fixture(autouse=True)
def of_no_other() -> Iterator[None]:
    """Several workers share a card: none keeps what its last test has freed. And what a test draws without a seed of its own does not
    depend on the files that its worker has had before."""
    torch.manual_seed(0)
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What runs the tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="module")
async def browser(anyio_backend: str) -> AsyncIterator[Any]:
    """Playwright's, of the tests of one file: its loop is theirs, and ends with them."""
    from browser import started

    async with started() as browser:
        yield browser


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny llama that all share who need no other: nobody writes to its directory."""
    from tiny_models import write_tiny

    return str(write_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The embedded model's GGUF: HEADRACE_TEST_SMOLLM2 names it where its package is not installed."""
    from headrace.errors import CheckpointError
    from headrace.model.embedded import embedded_model_path

    try:
        path = os.environ.get("HEADRACE_TEST_SMOLLM2") or str(embedded_model_path())
    except CheckpointError as error:
        pytest.skip(str(error))
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
