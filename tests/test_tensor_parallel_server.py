"""A server whose core has several ranks: whichever of them is killed, streams go on with their very tokens, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import httpx

from answers import Ask, ask
from server_driver import ServerProcess, alive, processes_of, until
from tiny_models import write_tiny

LONG = {"model": "tiny", "prompt": "The water", "max_tokens": 120, "ignore_eos": True}
ASKS = [
    Ask("/v1/completions", {**LONG, "temperature": 0.0}, True),
    Ask("/v1/completions", {**LONG, "temperature": 1.0, "seed": 5, "n": 2, "logprobs": 2}, True),
    Ask("/v1/completions", {**LONG, "temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.2}, True),
]
SHARED = Path("/dev/shm")
RANKS, HEADS = 4, {"num_attention_heads": 8, "num_key_value_heads": 4}


def test_whichever_rank_is_killed_streams_go_on(tmp_path):
    before, model = set(SHARED.iterdir()), str(write_tiny("llama", tmp_path / "model", **HEADS))
    options = ("--served-model-name", "tiny", "--tensor-parallel-size", str(RANKS), "--max-restarts", "1000", "--step-timeout", "8")
    with ServerProcess(model, *options, builder="core_builders:braked", tmp=tmp_path) as server:
        server.wait_ready()
        want = asyncio.run(answers(server))
        for rank, number in ((3, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)):
            pids = all_of(server)
            got = asyncio.run(answers(server, pids[rank], number))
            assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(ASKS)
            gone(pids)
        log = server.log()
        assert (
            "rank 3 of tensor_parallel_size 4" in log
            and "was killed by SIGKILL; all ranks end" in log
            and "one step takes" in log
        )
        page = server.metrics()
        assert page["headrace:engine_restarts_total"] == 3 and page["headrace:engine_poisonous_requests_total"] == 0
        pids = all_of(server)
        assert server.terminate() == 0
        gone(pids)
    assert not list(tmp_path.glob("headrace-*"))
    until(lambda: not set(SHARED.iterdir()) - before, 20)  # others of this machine have files there, too, for a moment


def all_of(server: ServerProcess) -> list[int]:
    """The processes of the core's ranks, itself the first, when they are there."""

    def found() -> list[int] | None:
        core = server.core()
        pids = [core, *sorted(processes_of(core))] if core and server.is_ready() else []
        return pids if len(pids) == RANKS else None

    return until(found, 60)


def gone(pids: list[int]) -> None:
    until(lambda: not any(map(alive, pids)), 30)


async def answers(server: ServerProcess, victim: int | None = None, number: int = 0) -> list:
    """What all ASKS are answered, while a process gets a signal in their midst."""
    count = 0

    def on_event() -> None:
        nonlocal count
        count += 1
        if count == 24 and victim is not None:
            os.kill(victim, number)
            let_go()

    brake = contextlib.nullcontext() if victim is None else server.braked()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        with brake as let_go:
            found = await asyncio.gather(*(ask(client, what, on_event=on_event) for what in ASKS))
    assert victim is None or count >= 24
    return found
