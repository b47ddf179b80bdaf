"""`headrace serve --api-processes 2`: one port, one set of limits and figures; a process dies alone, and none outlives the server."""

from __future__ import annotations

import codecs
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from answers import parse_metrics
from headrace.cli.port import bind
from headrace.engine.socket_pair import PREFIX
from headrace.errors import ParameterError
from server_driver import SRC, ServerProcess, alive, command_of, until
from test_server_life import BRAKED, LONG
from tiny_models import write_tiny

ENDLESS = 60_000  # tokens: a stream that runs for as long as a test needs it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=65536))


def start(model: str, tmp: Path, *options: str, **more) -> ServerProcess:
    always = ("--served-model-name", "tiny", "--api-processes", "2", "--max-num-seqs", "4", "--no-standby")
    return ServerProcess(model, *always, *options, tmp=tmp, **more)


def http_processes(server: ServerProcess) -> list[int]:
    return [pid for pid in server.children() if b"headrace.api_processes.process" in command_of(pid)]


def owner(server: ServerProcess, connection: socket.socket) -> int:
    """The process that answers on a connection: the one that has the other end of it."""
    port = connection.getsockname()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == port:
            for pid in http_processes(server):
                with contextlib.suppress(OSError):  # it has ended
                    for name in os.listdir(f"/proc/{pid}/fd"):
                        with contextlib.suppress(OSError):
                            if os.readlink(f"/proc/{pid}/fd/{name}") == f"socket:[{fields[9]}]":
                                return pid
    return 0


def connected(server: ServerProcess, pid: int) -> http.client.HTTPConnection:
    """A connection which process `pid` answers. One that has just been started takes its own when it has imported all it needs,
    which on a busy machine is many seconds later."""
    host, port = server.url.removeprefix("http://").split(":")
    connections = []
    while True:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.connect()
        if until(lambda c=connection: owner(server, c.sock), 60) == pid:
            break
        connections.append(connection)
    for other in connections:
        other.close()
    return connection


def both_ready(server: ServerProcess) -> list[int]:
    """The two processes, once each says that it is ready: one hears it a moment before the other."""
    pids = until(lambda: len(found := http_processes(server)) == 2 and found, 90)

    def is_ready(pid: int) -> bool:
        connection = connected(server, pid)
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        connection.close()
        return answer.status == 200

    for pid in pids:
        until(lambda pid=pid: is_ready(pid), 90)
    return pids


class Stream(threading.Thread):
    """One stream on a connection of its own, which process `pid` answers; its `text` grows."""

    def __init__(self, server: ServerProcess, pid: int, **more):
        super().__init__(daemon=True)
        self.text, self.error, self.status = "", None, 0
        self.connection, self.body = connected(server, pid), {**LONG, **more}
        self.start()

    def run(self) -> None:
        try:
            self.connection.request("POST", "/v1/completions", json.dumps(self.body), {"content-type": "application/json"})
            response = self.connection.getresponse()
            self.status, decoder = response.status, codecs.getincrementaldecoder("utf-8")()  # a piece may end within a character
            while piece := response.read1(4096):
                self.text += decoder.decode(piece)
        except (OSError, http.client.HTTPException) as e:
            self.error = e

    def begun(self) -> Stream:
        until(lambda: self.text or self.error, 60)
        assert self.text and self.status == 200, self.text
        return self

    def tokens(self) -> str:
        events = [json.loads(line[6:]) for line in self.text.split("\n\n") if line.startswith("data: {")]
        assert self.text.endswith("data: [DONE]\n\n") and self.error is None
        return "".join(c["text"] for e in events for c in e["choices"])


def metrics(server: ServerProcess) -> dict[str, float]:
    """On a connection of its own: one that is kept may be that of a process that has died."""
    return parse_metrics(httpx.get(f"{server.url}/metrics", timeout=60).text)


def counters(server: ServerProcess) -> dict[str, float]:
    return {k: v for k, v in metrics(server).items() if "_total" in k or "_bucket" in k or "_count" in k}


def test_a_process_dies_alone_and_another_takes_its_place(model, tmp_path):
    trace = tmp_path / "trace.json"
    with start(model, tmp_path, "--trace", str(trace), "--log-level", "info", builder=BRAKED) as server:
        one, two = both_ready(server)
        wanted = Stream(server, one)
        wanted.join(60)
        kept = server.http.post("/v1/responses", json={"model": "tiny", "input": "hi", "background": True})
        assert kept.status_code == 400 and kept.json()["error"]["param"] == "background" and "--api-processes" in kept.text
        before = counters(server)
        with server.braked():
            doomed, other = Stream(server, one, n=3, max_tokens=ENDLESS).begun(), Stream(server, two).begun()
            os.kill(one, signal.SIGKILL)
            doomed.join(60)
        assert not doomed.is_alive() and "[DONE]" not in doomed.text
        # what it had asked for is aborted, and the others go on as if nothing had been
        other.join(60)
        assert other.tokens() == wanted.tokens()
        until(lambda: metrics(server)["headrace:num_requests_running"] == 0, 60)
        third = until(lambda: next((p for p in http_processes(server) if p not in (one, two)), 0), 60)
        again = Stream(server, third)
        again.join(60)
        assert again.tokens() == wanted.tokens()
        # figures are the whole server's wherever they are asked for, and never go back
        until(lambda: metrics(server)['headrace:request_success_total{finished_reason="length"}'] >= 3, 60)
        after = counters(server)
        assert all(after[name] >= value for name, value in before.items())
        assert after["headrace:prompt_tokens_total"] == before["headrace:prompt_tokens_total"] * 6
        assert server.terminate() == 0
        log = server.log()
        assert log.count("listening on") == log.count("ready after") == log.count("draining:") == 1 and "Traceback" not in log
        assert after["headrace:http_process_restarts_total"] == 1
        assert log.count("signal 9") == 1 and "3 requests are lost" in log
        assert log.count(" POST /v1/completions 200 ") == 3
    assert not any(map(alive, (one, two, third))) and not list(tmp_path.glob(f"{PREFIX}*"))
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e.get("name") == "decode" and e["ph"] == "b" for e in events) == 6
    assert {e["id"].partition(".")[0] for e in events if e.get("cat") == "request"} == {"0", "1"}


def test_a_process_that_hangs_is_replaced_and_the_limit_holds_over_both(model, tmp_path):
    options = ["--max-num-seqs", "1", "--max-queued-requests", "1", "--heartbeat-timeout", "6"]
    with start(model, tmp_path, *options) as server:
        one, two = both_ready(server)
        streams = [Stream(server, one, max_tokens=ENDLESS).begun()]
        until(lambda: metrics(server)["headrace:num_requests_running"] == 1, 60)  # or it would count as the one that may wait
        streams.append(Stream(server, two, max_tokens=ENDLESS))
        until(lambda: metrics(server)["headrace:num_requests_waiting"] == 1, 60)
        for pid in (one, two):  # one runs, one waits, wherever they came in: that is all
            late = Stream(server, pid)
            late.join(60)
            assert late.status == 429 and "queue_full" in late.text
        server.process.send_signal(signal.SIGSTOP)  # the server's own process: the others say so, and nobody is replaced for it
        until(lambda: httpx.get(f"{server.url}/health", timeout=60).status_code == 503, 60)
        until(lambda: httpx.get(f"{server.url}/ready", timeout=60).status_code == 503, 60)  # another process may answer, which sees it a moment later
        server.process.send_signal(signal.SIGCONT)
        until(lambda: httpx.get(f"{server.url}/health", timeout=60).status_code == 200, 60)
        assert http_processes(server) == [one, two] and not streams[0].error and not streams[1].text
        os.kill(one, signal.SIGSTOP)
        until(lambda: one not in http_processes(server), 60)
        streams[1].begun()
        assert not streams[1].error
        third = until(lambda: next((p for p in http_processes(server) if p != two), 0), 60)
        late = Stream(server, third)
        until(lambda: metrics(server)["headrace:num_requests_waiting"] == 1, 60)  # its place was given back, and taken
        streams[1].connection.sock.shutdown(socket.SHUT_RDWR)
        late.join(60)
        assert late.tokens() and "no sign of life" in server.log()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        until(lambda: not any(map(alive, (two, third))), 60)
        assert not list(tmp_path.glob(f"{PREFIX}*"))


@pytest.mark.parametrize("signals", [1, 2])
def test_signals_drain_all_processes(model, tmp_path, signals):
    with start(model, tmp_path, "--drain-timeout", "600") as server:
        children = both_ready(server)
        core = next(p for p in server.children() if p not in children)
        if signals == 2:
            streams = [Stream(server, pid, n=2, max_tokens=ENDLESS).begun() for pid in children]
            os.kill(core, signal.SIGSTOP)  # it will never end by itself
        else:
            os.kill(core, signal.SIGSTOP)  # until we have looked
            streams = [Stream(server, pid, n=2) for pid in children]
            until(lambda: metrics(server)["headrace:num_requests_waiting"] == 4, 60)
        server.interrupt()
        until(lambda: "draining: 4 requests run, for at most 600 s" in server.log(), 60)
        if signals == 1:
            until(lambda: httpx.get(f"{server.url}/ready", timeout=60).status_code == 503, 60)
            late = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)
            assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
            os.kill(core, signal.SIGCONT)
        else:
            server.interrupt()
        assert server.process.wait(60) == 0
        for stream in streams:
            stream.join(60)
            assert not stream.error
            assert stream.tokens() if signals == 1 else '"code":"shutting_down"' in stream.text
        until(lambda: not any(map(alive, children)), 60)
        assert "Traceback" not in server.log() and not list(tmp_path.glob(f"{PREFIX}*"))


def test_a_killed_server_leaves_no_process_that_starts(model, tmp_path):
    with start(model, tmp_path) as server:
        children = until(lambda: len(found := http_processes(server)) == 2 and found, 60)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        until(lambda: not any(map(alive, children)), 60)
        until(lambda: not list(tmp_path.glob(f"{PREFIX}*")), 60)


def test_a_process_that_never_starts_ends_the_server_with_its_reason(tmp_path):
    directory = Path(write_tiny("llama", tmp_path / "model"))
    with start(str(directory), tmp_path) as server:
        server.wait_ready()
        (directory / "tokenizer.json").unlink()
        os.kill(until(lambda: http_processes(server), 60)[0], signal.SIGKILL)
        assert server.process.wait(120) == 1
        assert "3 starts in a row failed" in server.log() and "tokenizer" in server.log().rpartition("the last:")[2]
        assert not list(tmp_path.glob(f"{PREFIX}*"))


# ---------------------------------------------------------------- the port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_one_port_for_all_and_for_no_other_server(host):
    try:
        listeners = bind(host, 0, 3)
    except ParameterError:
        pytest.skip(f"no {host} here")
    port = listeners[0].getsockname()[1]
    assert {each.getsockname()[:2] for each in listeners} == {(host, port)} and port
    for count in (1, 3):
        with pytest.raises(ParameterError, match=f"{port}.*Address already in use"):
            bind(host, port, count)
    clients = [socket.create_connection((host, port), 5) for _ in range(120)]
    taken = []
    for listener in listeners:
        listener.settimeout(0.2)
        taken.append(0)
        try:
            while listener.accept():
                taken[-1] += 1
        except TimeoutError:
            pass
    assert sum(taken) == len(clients) and min(taken) > 10, taken
    for each in (*clients, *listeners):
        each.close()


@pytest.mark.parametrize("count", ["0", "-1", "65"])
def test_the_number_of_processes_is_checked(count):
    command = [sys.executable, "-m", "headrace.cli", "serve", "--api-processes", count]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "--api-processes" in done.stderr and "[1, 64]" in done.stderr and count in done.stderr
