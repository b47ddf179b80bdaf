"""A server's start and end: busy ports, broken engines, signals of all kinds. Nothing outlives it, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.engine.socket_pair import PREFIX, STALE_SECONDS, remove_stale_directories
from server_driver import SRC, ServerProcess, alive, until

LONG = {"model": "tiny", "prompt": "The water", "max_tokens": 200, "ignore_eos": True, "temperature": 0.0, "stream": True}


BRAKED = "core_builders:braked"  # what happens in mid-answer, or while it loads, happens then on any machine


def start(model: str, tmp: Path, *options: str, **more) -> ServerProcess:
    return ServerProcess(model, "--served-model-name", "tiny", *options, tmp=tmp, **more)


def leftovers(tmp: Path) -> list[Path]:
    return list(tmp.glob(f"{PREFIX}*"))


class Reader(threading.Thread):
    """Reads a long stream; `text` grows."""

    def __init__(self, server: ServerProcess, path: str = "/v1/completions", body: dict | None = None, **more):
        super().__init__(daemon=True)
        self.server, self.path, self.body, self.text, self.error = server, path, body or {**LONG, **more}, "", None
        self.start()
        until(lambda: self.text or self.error, 60)

    def run(self) -> None:
        try:
            with self.server.http.stream("POST", self.path, json=self.body) as response:
                for piece in response.iter_text():
                    self.text += piece
        except Exception as e:
            self.error = e


def test_ready_says_how_far_it_is_and_only_then_takes_requests(model, tmp_path):
    """Loading, compiling by numbers, preparing, ready: each as long as it lasts, and again when a core has died."""
    stages = {"load": "loading", "play": "compiling kernels", **{f"compile-{n}": f"compiling kernels {n} of 2" for n in range(3)},
              "capture": "preparing"}  # fmt: skip

    def held() -> None:
        for name in stages:
            (tmp_path / name).touch()

    def state() -> str:
        answer = server.http.get("/ready")
        assert (answer.status_code == 200) == (answer.json()["state"] == "ready")
        return answer.json()["state"]

    held()
    with start(model, tmp_path, "--max-restarts", "1000", builder="core_builders:prepared") as server:
        for number in range(2):
            for name, words in stages.items():
                until(lambda words=words: state() == words, 60)
                if number == 0:  # afterwards requests wait
                    refused = server.http.post("/v1/completions", json=LONG)
                    assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
                (tmp_path / name).unlink()
            until(lambda: state() == "ready", 60)
            answer = server.http.post("/v1/completions", json={**LONG, "stream": False})
            assert answer.json()["usage"]["completion_tokens"] == 200
            held()
            if number == 0:
                os.kill(server.core(), signal.SIGKILL)
        assert server.http.get("/metrics").status_code == 200 and server.log().count("compiling kernels: 2 of 2") == 2


def test_sigterm_lets_streams_end(model, tmp_path):
    trace, load = tmp_path / "trace.json", tmp_path / "load"
    load.touch()
    with start(model, tmp_path, "--trace", str(trace), "--stats-interval", "0.1", builder=BRAKED) as server, server.braked() as let_go:
        assert server.http.get("/health").status_code == 200 and server.http.get("/ready").status_code == 503
        early = server.http.post("/v1/completions", json=LONG)
        assert early.status_code == 503 and early.json()["error"]["code"] == "loading" and early.headers["retry-after"]
        load.unlink()
        server.wait_ready()
        reader = Reader(server, n=4)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.http.get("/ready").status_code == 503, 60)
        assert server.http.get("/health").status_code == 200
        late = server.http.post("/v1/completions", json=LONG)
        assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
        until(lambda: "tok/s" in server.log(), 60)
        let_go()
        reader.join(60)
        assert reader.error is None and reader.text.endswith("data: [DONE]\n\n") and reader.text.count('"length"') == 4
        assert server.process.wait(60) == 0
        assert not leftovers(tmp_path) and not server.children()
        assert "draining" in server.log()
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e.get("name") == "decode" and e["ph"] == "b" for e in events) == 4
    assert sum(e["ph"] == "X" and e["name"] == "launch" for e in events) >= 200


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_second_signal_ends_at_once_and_readers_are_told_why(model, tmp_path, by_hand):
    with start(model, tmp_path, "--drain-timeout", "600", builder=BRAKED) as server, server.braked():
        stop = server.interrupt if by_hand else server.process.terminate
        server.wait_ready()
        children = server.children()
        reader = Reader(server, n=8)
        os.kill(server.core(), signal.SIGSTOP)  # it will never end by itself
        stop()
        until(lambda: "draining: 8 requests run, for at most 600 s; a second signal (Ctrl-C) ends it at once" in server.log(), 60)
        stop()
        assert server.process.wait(60) == 0  # and not the 600 s
        assert not any(map(alive, children)) and not leftovers(tmp_path)
        reader.join(60)
        assert reader.error is None and reader.text.count('"length"') < 8
        assert '"code":"shutting_down"' in reader.text and "engine_dead" not in reader.text
        assert "8 requests are cut off" in server.log() and "Traceback" not in server.log()


BEHIND = {"model": "tiny", "input": "The water", "max_output_tokens": 200, "ignore_eos": True, "background": True}


def test_sigterm_lets_what_runs_in_the_background_end(model, tmp_path):
    with start(model, tmp_path, "--log-level", "info", builder=BRAKED) as server, server.braked() as let_go:
        server.wait_ready()
        asked = server.http.post("/v1/responses", json=BEHIND).json()
        until(lambda: server.http.get(f"/v1/responses/{asked['id']}").json()["status"] == "in_progress", 60)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "draining: 1 requests run" in server.log(), 60)
        assert server.http.post("/v1/responses", json=BEHIND).status_code == 503
        assert server.http.get(f"/v1/responses/{asked['id']}").json()["status"] == "in_progress"
        let_go()
        assert server.process.wait(60) == 0
        assert f"background {asked['id']} incomplete" in server.log() and "cut off" not in server.log()


def test_what_runs_in_the_background_is_cut_off_as_streams_are(model, tmp_path):
    """With somebody who reads its events, who is told, and with nobody."""
    with start(model, tmp_path, "--drain-timeout", "0.2", builder=BRAKED) as server, server.braked():
        server.wait_ready()
        reader = Reader(server, path="/v1/responses", body={**BEHIND, "stream": True})
        server.process.send_signal(signal.SIGTERM)
        reader.join(60)
        assert reader.error is None and '"code":"shutting_down"' in reader.text and "response.failed" in reader.text
        assert server.process.wait(60) == 0 and "1 requests are cut off" in server.log() and "Traceback" not in server.log()
    with start(model, tmp_path, "--drain-timeout", "0.2", builder=BRAKED) as server, server.braked():
        server.wait_ready()
        server.http.post("/v1/responses", json=BEHIND)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0 and "1 background responses are cut off" in server.log()
        assert "Traceback" not in server.log() and "never retrieved" not in server.log() and not leftovers(tmp_path)


def test_ctrl_c_lets_streams_end(model, tmp_path):
    with start(model, tmp_path, builder=BRAKED) as server, server.braked() as let_go:
        server.wait_ready()
        reader = Reader(server)
        server.interrupt()
        until(lambda: "draining: 1 requests run" in server.log(), 60)
        let_go()
        reader.join(60)
        assert reader.error is None and reader.text.endswith("data: [DONE]\n\n") and reader.text.count('"length"') == 1
        assert server.process.wait(60) == 0 and not server.children() and not leftovers(tmp_path)
        assert "Traceback" not in server.log() and "KeyboardInterrupt" not in server.log()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_terminal_that_closes_lets_streams_end(model, tmp_path, processes):
    """The shell tells all processes of the group, then the kernel does: that is no second signal."""
    heard = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL);"  # also where nohup runs the tests
    options = ("--api-processes", str(processes))
    with start(model, tmp_path, *options, builder=BRAKED, before=heard) as server, server.braked() as let_go:
        server.wait_ready()
        core, reader = server.core(), Reader(server)
        for _ in range(2):
            os.killpg(server.process.pid, signal.SIGHUP)
            until(lambda: "draining: 1 requests run" in server.log(), 60)
        let_go()
        reader.join(60)
        assert reader.error is None and reader.text.endswith("data: [DONE]\n\n") and reader.text.count('"length"') == 1
        assert server.process.wait(60) == 0 and not alive(core) and not leftovers(tmp_path)
        assert "died" not in server.log() and "cut off" not in server.log()


def test_whoever_started_it_by_nohup_keeps_it(model, tmp_path):
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
    with start(model, tmp_path, builder=BRAKED, before=ignored) as server:
        server.wait_ready()
        os.killpg(server.process.pid, signal.SIGHUP)
        assert server.http.get("/ready").status_code == 200
        Reader(server).join(60)
        assert server.terminate() == 0 and "died" not in server.log()


def test_signals_that_were_blocked_where_it_was_started_are_heard(model, tmp_path):
    """Without SIGCHLD no end of a child is seen: a dead core had no successor, and the server no end."""
    blocked = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, signal.SIGTERM));"
    with start(model, tmp_path, before=blocked) as server:
        server.wait_ready()
        core = server.core()
        os.kill(core, signal.SIGKILL)
        until(lambda: server.core() not in (0, core) and server.is_ready(), 60)
        assert server.terminate() == 0 and not server.children()


def test_any_number_of_ctrl_c_ends_it_well(model, tmp_path):
    """While it loads, when the core's own process has hardly begun, too."""
    with start(model, tmp_path, builder=BRAKED) as server, server.braked() as let_go:
        server.wait_ready()
        children, reader = server.children(), Reader(server)
        for _ in range(4):
            server.interrupt()
        let_go()  # those that come together may be one
        assert server.process.wait(60) == 0 and "Traceback" not in server.log()
        until(lambda: not any(map(alive, children)), 60)
        reader.join(60)
    (tmp_path / "load").touch()
    with start(model, tmp_path, builder=BRAKED) as server:
        until(server.children, 60)
        server.interrupt()
        assert server.process.wait(60) == 0
        assert "no request runs" in server.log() and "Traceback" not in server.log() and not leftovers(tmp_path)


def test_no_core_outlives_a_killed_server(model, tmp_path):
    with start(model, tmp_path) as server:
        server.wait_ready()
        children = until(lambda: len(server.children()) == 2 and server.children(), 60)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        until(lambda: not any(map(alive, children)), 60)
        assert not leftovers(tmp_path)


def test_a_killed_server_that_was_loading_leaves_nothing(model, tmp_path):
    (tmp_path / "load").touch()
    with start(model, tmp_path, builder=BRAKED) as server:
        children = until(server.children, 60)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        until(lambda: not any(map(alive, children)), 60)
        until(lambda: not leftovers(tmp_path), 60)


def test_sigterm_while_loading(model, tmp_path):
    (tmp_path / "load").touch()  # nobody waits until that is done
    with start(model, tmp_path, builder=BRAKED) as server:
        until(server.children, 60)
        assert server.terminate() == 0
        assert not leftovers(tmp_path)


def test_too_many_deaths_end_the_server(model, tmp_path):
    with start(model, tmp_path, "--max-restarts", "1", builder=BRAKED) as server, server.braked():
        server.wait_ready()
        reader = Reader(server)
        killed: list[int] = []
        for _ in range(2):  # each time the core that runs now, not the one whose death has not been noticed yet
            until(lambda: (pid := server.core()) not in [0, *killed] and server.is_ready() and not killed.append(pid), 60)
            os.kill(killed[-1], signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "2 deaths of the core" in server.log()
        reader.join(60)
        assert "engine" in reader.text.rpartition('"error"')[2]
        assert not server.children() and not leftovers(tmp_path)


def test_an_engine_that_cannot_start_ends_the_server(model, tmp_path):
    with start(model, tmp_path, builder="broken_builder:broken") as server:
        assert server.process.wait(120) == 1
        assert "no such card" in server.log() and "3 starts in a row" in server.log()
    with start(model, tmp_path, builder="broken_builder:mistaken") as server:
        assert server.process.wait(60) == 1  # a mistake: not tried again
        assert "a card of another kind" in server.log() and "starts in a row" not in server.log()


ONE_SPAWN = """
from headrace.engine.core_process import CoreProcess
spawn, count = CoreProcess.spawn, []
async def once(*args):
    count.append(1)
    if len(count) > 1:
        raise OSError(11, "Resource temporarily unavailable")
    return await spawn(*args)
CoreProcess.spawn = once
"""
HTTP_FAILS = """
import asyncio, uvicorn
async def serve(self, sockets=None):
    raise RuntimeError("no sockets today")
uvicorn.Server.serve = serve
"""


def test_a_core_that_cannot_be_replaced_ends_the_server(model, tmp_path):
    with start(model, tmp_path, "--no-standby", before=ONE_SPAWN, builder=BRAKED) as server, server.braked():
        server.wait_ready()
        reader = Reader(server)
        os.kill(server.core(), signal.SIGKILL)
        assert server.process.wait(60) == 1
        reader.join(60)
        assert '"code":"engine_dead"' in reader.text and reader.error is None
        assert "3 starts in a row failed" in server.log() and "Resource temporarily unavailable" in server.log()
        assert "Traceback" not in server.log() and not leftovers(tmp_path)


def test_an_http_server_that_fails_ends_the_server(model, tmp_path):
    with start(model, tmp_path, before=HTTP_FAILS) as server:
        assert server.process.wait(60) == 1
        assert "the HTTP server has ended: RuntimeError: no sockets today" in server.log()
        assert not server.children() and not leftovers(tmp_path)


def test_a_busy_port_is_an_error_at_once(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "headrace.cli", "serve", model, "--port", port]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and port in done.stderr and "Address already in use; --port 0 takes a free one" in done.stderr


def test_directories_of_the_dead_are_cleaned(tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    old = time.time() - STALE_SECONDS - 60
    names = {f"{PREFIX}{dead.pid}-a": False, f"{PREFIX}{os.getpid()}-b": True, f"{PREFIX}shape-c": True, "other-1-d": True}
    for name in names:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (old, old))
    (tmp_path / f"{PREFIX}{dead.pid}-young").mkdir()
    remove_stale_directories()
    assert {n: (tmp_path / n).exists() for n in names} == names and (tmp_path / f"{PREFIX}{dead.pid}-young").exists()
