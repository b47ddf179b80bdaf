"""Drives the HTTP server: its application called without a network (Api), over a socket of this event loop (serving), or as a
process of its own (ServerProcess), which is watched, whose children are found, and which is ended without remains."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from answers import parse_events, parse_metrics
from fake_engine import FakeEngine
from headrace.api.app import create_app
from headrace.api.config import ServerConfig
from headrace.api.http_server import http_server
from headrace.api.sse import DIRECT

MODEL = "fake/model"
SRC = Path(__file__).parents[1] / "src"
HERE = Path(__file__).parent
LOOP = asyncio.Runner()  # of all that are called without a network
atexit.register(LOOP.close)


class Direct:
    """Before an application: streams may write past `send`, which must not wait."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.send = send
        await self.app({**scope, DIRECT: self}, receive, send)

    def free(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        with contextlib.suppress(StopIteration):
            self.send({"type": "http.response.body", "body": data, "more_body": True}).send(None)


class Api:
    """The application over a fake engine; every call runs to its end."""

    def __init__(self, engine: FakeEngine | None = None, **options: Any):
        self.engine = engine or FakeEngine()
        self.app = create_app(self.engine, ServerConfig(**options))  # type: ignore[arg-type]

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(Direct(self.app))
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
                return await client.request(method, path, **kwargs)

        return LOOP.run(call())

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        if isinstance(body, dict):
            body = {"model": MODEL, **body}
        return self.request("POST", path, json=body, **kwargs)

    def ok(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream; it must be well formed and, but for /v1/responses, end with [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream"
        events = parse_events(response.text)
        if path != "/v1/responses":
            assert events.pop() is None
        return events  # type: ignore[return-value]


# ---------------------------------------------------------------- over a socket


class Served:
    """An application over a fake engine that listens."""

    def __init__(self, app: Any, port: int, engine: FakeEngine):
        self.port, self.engine, self.app, self.limits = port, engine, app, app.state.api.limits
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20)

    async def connect(
        self, path: str, body: dict, headers: str = "", method: str = "POST"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request sent by hand, so that the test decides when to read and when to leave."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**16)
        data = json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer

    async def idle(self) -> None:
        """Everything has been given back."""
        await soon(lambda: not self.engine.active and self.limits.active == 0 and self.limits.unstarted_tokens == 0)


@contextlib.asynccontextmanager
async def serving(engine: Any, glass: Any = None, **options: Any) -> AsyncIterator[Served]:
    async with listening(create_app(engine, ServerConfig(**options), glass=glass), engine) as here:
        yield here


async def after_a_silence(engine: FakeEngine, path: str, body: dict[str, Any], sign: bytes) -> list[dict[str, Any]]:
    """The events of a stream whose engine says nothing until three signs of life have come; comments are no events."""
    engine.gate.clear()
    async with serving(engine, keep_alive_interval=0.02) as server:
        reader, writer = await server.connect(path, body)
        data = b""
        while data.count(sign) < 3:
            data += await asyncio.wait_for(reader.read(2**16), 20)
        engine.gate.set()
        while not data.endswith(b"0\r\n\r\n"):
            data += await asyncio.wait_for(reader.read(2**16), 20)
        writer.close()
    lines = [line for line in data.decode().splitlines() if line.startswith(("data: ", ":"))]
    return [json.loads(line[6:]) for line in lines]


@contextlib.asynccontextmanager
async def listening(app: Any, engine: Any = None) -> AsyncIterator[Served]:
    server = http_server(app, "critical", None)
    server.config.port, server.config.timeout_graceful_shutdown = 0, 1
    task = asyncio.create_task(server._serve())
    await soon(lambda: server.started)
    here = Served(app, server.servers[0].sockets[0].getsockname()[1], engine)
    try:
        yield here
    finally:
        await here.client.aclose()
        server.should_exit = server.force_exit = True
        await task


async def soon(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------- a process


class ServerProcess:
    """`headrace serve` on a free port. `options` are the command line's; `builder` is module:function of an engine for this test,
    importable from tests/; `before` is Python that the server's process runs first."""

    def __init__(
        self, model: str | Path, *options: str, builder: str | None = None, tmp: Path | None = None, before: str = "", checks: bool = True
    ):
        code = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
        if builder is not None:
            code = (
                "import sys; from headrace.cli import parser, serve; p = parser.CommandParser(); serve.add_arguments(p); "
                f"sys.exit(serve.run(p.parse_args(sys.argv[2:]), builder={builder!r}))"
            )
        code = before + code
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SRC}:{HERE}"}
        if tmp is not None:
            environment["TMPDIR"] = str(tmp)
        self.tmp = tmp or Path("/tmp")
        self.errors = open(self.tmp / f"server-{time.monotonic_ns()}.log", "w+b")  # noqa: SIM115
        small = ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16", *(["--debug-checks"] if checks else [])]
        command = [sys.executable, "-c", code, "serve", str(model), "--port", "0", *small, *options]
        self.process = subprocess.Popen(
            command, env=environment, stderr=self.errors, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self.url = self._printed(r"listening on ([^\s\"]+)")
        except BaseException:
            self.kill()
            raise
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def log(self) -> str:
        return Path(self.errors.name).read_text()

    def _printed(self, pattern: str) -> str:
        def seen() -> re.Match[str] | bool | None:
            ended = self.process.poll() is not None  # asked first: what it has printed before its end is there then
            return re.search(pattern, self.log()) or ended

        found = until(seen, 120)
        assert not isinstance(found, bool), self.log()
        return found.group(1)

    def wait_ready(self, seconds: float = 120) -> ServerProcess:
        until(lambda: self.process.poll() is not None or self.is_ready(), seconds)
        assert self.process.poll() is None, self.log()
        return self

    def is_ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def children(self) -> list[int]:
        """Process ids of cores: the running one and, after it, the one on standby."""
        return sorted(processes_of(self.process.pid))

    def core(self) -> int:
        """The process that runs the engine; 0: none does at the moment."""
        return next(iter(self.children()), 0)

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self.http.get("/metrics").text)

    @contextlib.contextmanager
    def braked(self) -> Iterator[Callable[[], None]]:
        """Its steps are slow until this ends, or until what it gives is called; where the `builder` has a brake, and `tmp` is its own."""
        brake = self.tmp / "brake"
        brake.touch()
        try:
            yield partial(brake.unlink, missing_ok=True)
        finally:
            brake.unlink(missing_ok=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        """Ctrl-C at a terminal: all processes of the group get a SIGINT."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self, seconds: float = 30) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if error is not None:  # beside the failure, which alone seldom says why
            print(self.log()[-8000:])
        self.http.close()
        children = self.children()
        self.kill()
        until(lambda: not any(map(alive, children)), 20)
        self.errors.close()


def quiet_port() -> int:
    """A free port for a server that is to be found there later, or again: none that the kernel gives to whoever asks for any, as the
    tests beside this one do."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port := random.randrange(10_000, max(first, 20_000))))
            return port


def processes_of(parent: int, zombies: bool = False) -> Iterator[int]:
    """Its children that live, or that are zombies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(ppid) == parent and (state == "Z") == zombies:
                    yield int(entry.name)


def command_of(pid: int) -> bytes:
    """Its words, none if it is no more."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], Any], seconds: float, every: float = 0.02) -> Any:
    """The condition's first true value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(every)
    return value
