"""The core dies, hangs or is poisoned under real servers: streams go on with the very tokens, everything else stays right."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from core_builders import POISON, POISON_HANG, POISON_NAN
from disturbance import disturbed, idle, leftovers, poisonous, prompts, some_asks, undisturbed, with_bad_ones
from fake_engine import FakeEngine
from fuzz_requests import BODIES, PLAIN
from fuzzing import fuzz
from headrace.api.app import create_app
from server_driver import ServerProcess, processes_of, until


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[ServerProcess]:
    options = ("--served-model-name", "tiny", "--heartbeat-timeout", "2", "--max-restarts", "1000")
    with ServerProcess(model, *options, builder="core_builders:braked", tmp=tmp_path_factory.mktemp("tmp")) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def sick(model, tmp_path_factory) -> Iterator[ServerProcess]:
    """A server whose model does not bear some tokens."""
    options = ("--served-model-name", "tiny", "--step-timeout", "2", "--max-restarts", "1000")
    tmp = tmp_path_factory.mktemp("sick")
    with ServerProcess(model, *options, builder="core_builders:sensitive", tmp=tmp) as process:
        yield process.wait_ready()


def test_streams_survive_kills_of_the_core(server, times=2):
    asks = some_asks(1, 6)
    want = undisturbed(server, asks)
    before = idle(server)
    got = disturbed(server, asks, lambda pid: os.kill(pid, signal.SIGKILL), 60, times)
    for what, a, b in zip(asks, got, want, strict=True):
        assert a.differs(b) is None, f"{what}: {a.differs(b)}"
    after = idle(server)
    assert after["headrace:engine_restarts_total"] == before["headrace:engine_restarts_total"] + times
    assert after["headrace:engine_poisonous_requests_total"] == 0
    back = [k for k in before if "_total" in k and after[k] < before[k]]
    assert not back, f"counters went back: {back}"
    until(lambda: not list(processes_of(server.process.pid, zombies=True)), 60)
    until(lambda: not leftovers(server), 60)  # the next that stands by is on its way, and has its own until it has connected


def test_a_response_in_the_background_survives_kills_of_the_core(server):
    """Its reader is there again and again; what it says is what is said undisturbed."""
    body = {"model": "tiny", "input": "The water", "max_output_tokens": 150, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    (want,) = server.http.post("/v1/responses", json=body).json()["output"]
    killed: list[int] = []
    with server.braked() as let_go:
        asked = server.http.post("/v1/responses", json={**body, "background": True}).json()
        url = f"/v1/responses/{asked['id']}"
        until(lambda: server.http.get(url).json()["status"] == "in_progress", 60)
        for _ in range(2):
            until(lambda: (pid := server.core()) not in [0, *killed] and server.is_ready() and not killed.append(pid), 60)
            os.kill(killed[-1], signal.SIGKILL)
        assert server.http.get(url).json()["status"] == "in_progress"
        let_go()
        until(lambda: server.http.get(url).json()["status"] not in ("queued", "in_progress"), 60)
    last = server.http.get(url).json()
    assert last["status"] == "incomplete" and last["usage"]["output_tokens"] == 150
    assert last["output"][0]["content"] == want["content"]
    idle(server)


def test_a_core_that_hangs_is_replaced(server):
    asks = some_asks(9, 1)
    want = undisturbed(server, asks)
    got = disturbed(server, asks, lambda pid: os.kill(pid, signal.SIGSTOP), 5, 1)
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(asks)
    assert "no heartbeat" in server.log()
    idle(server)


def test_readiness_follows_the_core_and_health_does_not(server):
    server.wait_ready()
    until(lambda: len(server.children()) == 2, 60)  # one on standby
    (server.tmp / "load").touch()  # until it has been seen
    os.kill(server.core(), signal.SIGKILL)
    until(lambda: server.http.get("/ready").status_code == 503, 60)
    assert server.http.get("/health").status_code == 200
    (server.tmp / "load").unlink()
    # a request that comes meanwhile waits
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "temperature": 0}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    assert server.http.get("/ready").status_code == 200


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_the_request_that_kills_the_core_fails_and_the_rest_go_on(sick, delay):
    good = prompts()
    want = undisturbed(sick, good)
    before = idle(sick)
    failed, got = with_bad_ones(sick, prompts(POISON)[-1:], good, delay)
    assert poisonous(failed[0]), failed
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(good)
    after = idle(sick)
    assert after["headrace:engine_restarts_total"] == before["headrace:engine_restarts_total"] + 2
    assert after["headrace:engine_poisonous_requests_total"] == before["headrace:engine_poisonous_requests_total"] + 1


def test_several_killers_at_once(sick):
    good = prompts()[:2]
    want = undisturbed(sick, good)
    failed, got = with_bad_ones(sick, prompts(POISON, POISON, POISON)[-3:], good, 0.1)
    assert all(map(poisonous, failed)), failed
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(good)
    idle(sick)


def test_nan_fails_one_row_alone(sick):
    good = prompts()
    want = undisturbed(sick, good)
    before = idle(sick)
    failed, got = with_bad_ones(sick, prompts(POISON_NAN, POISON_NAN)[-2:], good, 0.1)
    assert [getattr(f, "status", None) for f in failed] == [500, 500] and "NaN" in str(failed[0])
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(good)
    after = idle(sick)
    assert after["headrace:nan_failures_total"] == before["headrace:nan_failures_total"] + 2
    assert after["headrace:engine_restarts_total"] == before["headrace:engine_restarts_total"]


def test_a_step_that_never_ends(sick):
    good = prompts()[:2]
    want = undisturbed(sick, good)
    began = time.monotonic()
    failed, got = with_bad_ones(sick, prompts(POISON_HANG)[-1:], good, 0.1)
    assert poisonous(failed[0]), failed
    assert time.monotonic() - began > 4 and "one step takes" in sick.log()
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(good)
    idle(sick)


def test_drawn_requests_of_all_kinds_leave_it_as_it_was(server):
    """`benchmarks/fuzz.py` does this with as many as one likes."""
    server.wait_ready()
    fuzzed = asyncio.run(fuzz(int(server.url.rpartition(":")[2]), 300, seed=1))
    assert not fuzzed.faults, "\n".join(fuzzed.faults)
    assert fuzzed.statuses["200"] > 100 and fuzzed.statuses["400"] > 60, fuzzed.statuses
    assert "Traceback" not in server.log()
    idle(server)


def test_every_path_is_drawn():
    app = create_app(FakeEngine(), glass=object())
    assert {route.path for route in app.routes} == {*BODIES, *PLAIN}
