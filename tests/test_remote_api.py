"""The HTTP layer over an engine in another process: a chosen part of its tests, run through real pipes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

import server_driver
from fake_engine import FakeEngine
from remote_app import RemoteApp
from server_driver import Api

__all__ = [name for name in dir() if name.startswith("test_")]


@pytest.fixture(scope="module", autouse=True)
def remote() -> Iterator[None]:
    """All applications of this module's tests are remote ones."""
    context, made = zmq.Context(), []

    def create_app(engine: FakeEngine, config) -> RemoteApp:
        made.append(RemoteApp(engine, config, context))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_driver, "create_app", create_app)
        yield
    for app in made:
        app.close()
    context.destroy(linger=0)


@pytest.fixture(scope="module")
def api(remote) -> Api:
    return Api(FakeEngine())
