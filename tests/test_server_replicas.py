"""A real server with two cores: they share what comes, one's death is nobody else's, and all of it ends without remains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq

from core_builders import POISON
from disturbance import disturbed, idle, leftovers, poisonous, prompts, undisturbed, with_bad_ones
from headrace.cache.events import block_hashes
from server_driver import SRC, ServerProcess, alive, processes_of, until


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[ServerProcess]:
    """Its model does not bear some tokens."""
    options = ("--served-model-name", "tiny", "--heartbeat-timeout", "2", "--max-restarts", "1000", "--data-parallel-size", "2")
    tmp = tmp_path_factory.mktemp("tmp")
    options += ("--kv-events", f"ipc://{tmp}/kv", "--kv-events-topic", "kv@here")
    with ServerProcess(model, *options, builder="core_builders:sensitive", tmp=tmp) as process:
        yield process.wait_ready()


def all_up(server: ServerProcess) -> dict[str, float]:
    """The metrics, when both cores serve and a third process stands by."""

    def page() -> dict[str, float] | None:
        found = server.metrics()
        up = [found.get(f'headrace:core_up{{core="{core}"}}') for core in range(2)]
        return found if up == [1, 1] and len(server.children()) == 3 else None

    return until(page, 60)


def by_core(page: dict[str, float], name: str) -> list[float]:
    return [page[f'headrace:{name}{{core="{core}"}}'] for core in range(2)]


def test_requests_are_shared_and_each_core_has_its_part_of_the_cpu(server):
    all_up(server)
    if hasattr(os, "sched_getaffinity") and len(mine := os.sched_getaffinity(0)) > 1:
        parts = [os.sched_getaffinity(pid) for pid in server.children()[:2]]
        assert not parts[0] & parts[1] and parts[0] | parts[1] == mine
    before = idle(server)
    disturbed(server, prompts(), lambda pid: None, 10, 1)  # none has ended before the last one comes
    after = until(lambda: (page := idle(server))["headrace:engine_steps_total"] == sum(by_core(page, "core_steps_total")) and page, 60)
    computed = [b - a for a, b in zip(by_core(before, "core_scheduled_tokens_total"), by_core(after, "core_scheduled_tokens_total"), strict=True)]
    assert computed[0] > 30 and computed[1] > 30, computed


def test_streams_move_when_a_core_is_killed_and_it_is_ready_all_the_while(server):
    asks = prompts()
    want = undisturbed(server, asks)
    before = all_up(server)
    got = disturbed(server, asks, lambda pid: os.kill(pid, signal.SIGKILL), 10, 1, stays="/ready")
    for what, a, b in zip(asks, got, want, strict=True):
        assert a.differs(b) is None, f"{what}: {a.differs(b)}"
    after = idle(server)
    assert after["headrace:engine_restarts_total"] == before["headrace:engine_restarts_total"] + 1
    assert after["headrace:engine_poisonous_requests_total"] == 0
    back = [k for k in before if "_total" in k and after[k] < before[k]]
    assert not back, f"counters went back: {back}"
    until(lambda: not list(processes_of(server.process.pid, zombies=True)), 60)
    until(lambda: not leftovers(server), 60)  # the next that stands by is on its way, and has its own until it has connected


def test_streams_move_when_a_core_hangs(server):
    asks = prompts()
    want = undisturbed(server, asks)
    all_up(server)
    got = disturbed(server, asks, lambda pid: os.kill(pid, signal.SIGSTOP), 5, 1)
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(asks)
    assert "no heartbeat" in server.log()
    idle(server)


def test_the_request_that_kills_a_core_kills_no_other(server):
    good = prompts()
    want = undisturbed(server, good)
    before = all_up(server)
    failed, got = with_bad_ones(server, prompts(POISON)[-1:], good, 0.1)
    assert poisonous(failed[0]), failed
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(good)
    after = all_up(server)
    restarts = [b - a for a, b in zip(by_core(before, "core_restarts_total"), by_core(after, "core_restarts_total"), strict=True)]
    assert sorted(restarts) == [0, 2]
    assert f"ERROR core {restarts.index(2)}: the engine core fails" in server.log()
    assert after["headrace:engine_poisonous_requests_total"] == before["headrace:engine_poisonous_requests_total"] + 1


def test_what_the_caches_hold_is_published(server):
    """And what is gone with a core."""
    all_up(server)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(f"ipc://{Path(server.errors.name).parent}/kv")
        socket.subscribe("kv@")
        asked: list[list[int]] = []

        def told(kind: str) -> tuple[dict, int] | None:
            while socket.poll(50):
                _, _, data = socket.recv_multipart()
                _, events, rank = msgspec.msgpack.decode(data)
                found = [event for event in events if event["type"] == kind]
                if found:
                    return found[0], rank
            return None

        def stored() -> tuple[dict, int] | None:
            ids = [10 + len(asked), *[30, 31] * 35]
            asked.append(ids)
            body = {"model": "tiny", "prompt": ids, "max_tokens": 1}
            assert httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200
            return told("BlockStored")

        event, rank = until(stored, 60)
        ids, size = event["token_ids"], event["block_size"]
        assert any(ids == prompt[: len(ids)] for prompt in asked) and len(ids) == size * len(event["block_hashes"])
        assert event["block_hashes"] == block_hashes(array("i", ids), size) and event["parent_block_hash"] is None
        assert rank in (0, 1)
        for pid in server.children():  # one of them stands by
            os.kill(pid, signal.SIGKILL)
        cleared: set[int] = set()

        def both() -> bool:
            """One may say so twice: when it ends, and when its successor begins."""
            if (found := told("AllBlocksCleared")) is not None:
                cleared.add(found[1])
            return cleared == {0, 1}

        until(both, 60)


def test_it_ends_with_all_its_processes(server):
    all_up(server)
    children = server.children()
    assert server.terminate() == 0
    assert not any(map(alive, children)) and not leftovers(server)


@pytest.mark.parametrize(("options", "words"), [
    (["--data-parallel-size", "0"], r"--data-parallel-size: got 0, allowed: an integer in \[1, 256\]"),
    (["--data-parallel-size", "3", "--threads", "1"], "--threads: got 1, allowed: at least 3"),
])  # fmt: skip
def test_what_cannot_be_is_said_before_anything_is_started(model, options, words):
    command = [sys.executable, "-m", "headrace.cli", "serve", model, "--port", "0", "--device", "cpu", *options]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and re.search(words, done.stderr) and "listening" not in done.stderr, done.stderr
