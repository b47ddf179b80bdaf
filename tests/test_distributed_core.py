"""A core on another machine (its host is this one): streams survive its end, however it ends, and strangers get nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from engine_driver import complete
from headrace.config import EngineConfig
from headrace.distributed.core_host import CoreHost
from headrace.distributed.process import Door
from headrace.distributed.remote_core import HostGoneError, RemoteCore
from headrace.engine import supervision
from headrace.engine.client import EngineClient
from headrace.engine.core_supply import StandbySupply
from headrace.engine.supervision import SupervisionConfig
from headrace.engine.wire import Shutdown
from headrace.errors import EngineDeadError, HeadraceError
from headrace.sampling.params import SamplingParams
from server_driver import SRC, alive, processes_of, soon, until

PROMPT = list(range(5, 25))
LENGTH = 400


class Wire:
    """A TCP connection between front and core that can be held up and cut."""

    def __init__(self, address: str):
        self._host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._ends: list[asyncio.StreamWriter] = []
        self._passing: list[asyncio.Future[Any]] = []
        self._uncut, self._flows = True, asyncio.Event()
        self._flows.set()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection(self._host, self._port)
        self._ends += [writer, onward]
        if not self._uncut:
            self.cut()
        self._passing.append(passing := asyncio.gather(self._pass(reader, onward), self._pass(there, writer)))
        await passing

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self._flows.wait()
                writer.write(data)
        writer.close()

    def hold(self) -> None:
        """What is on its way does not arrive."""
        self._flows.clear()

    def cut(self) -> None:
        self._uncut = False
        self._flows.set()
        self._server.close()
        for end in self._ends:
            end.transport.abort()

    async def close(self) -> None:
        self.cut()
        await asyncio.gather(*self._passing, return_exceptions=True)


class Far(CoreHost):
    """A host whose connections can be cut, and which can be lost with all that it started."""

    def __init__(self):
        super().__init__("127.0.0.1")
        self.wires: list[Wire] = []
        self.doors: list[Door] = []
        self.lost = asyncio.Event()
        self.slow = 0.0  # seconds until it says how a process has ended

    async def start(self, *arguments):
        number, door = await super().start(*arguments)
        self.doors.append(door)
        wires = [Wire(door.inbox), Wire(door.outbox)]
        behind = Door(*[await wire.open() for wire in wires], door.public_key)
        self.wires += wires
        return number, behind

    async def wait(self, number: int) -> int:
        ended, lost = asyncio.create_task(super().wait(number)), asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise HostGoneError
            await asyncio.sleep(self.slow)
            return ended.result()
        finally:
            ended.cancel()
            lost.cancel()

    def cut(self, direction: int) -> None:
        """To the cores (what they go on to say is held up: the stream could end before theirs is seen), or from them."""
        for wire in self.wires[1::2]:
            wire.hold()
        for wire in self.wires[direction::2]:
            wire.cut()

    def lose(self) -> None:
        """It goes, and with it what it had started."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.lost.set()
        self.lost = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes.values() if p.returncode is None]


class Front:
    """A client whose cores come from `host`."""

    def __init__(self, model: str, host: Far, builder: str = "headrace.engine.build:build_engine"):
        def supply(context: zmq.asyncio.Context) -> StandbySupply:
            return StandbySupply(partial(RemoteCore.start, context, host, builder, "warning", "text", False))

        config = EngineConfig(model=model, device="cpu", dtype="float32", max_num_seqs=8, num_kv_blocks=256, threads=1)
        self.client = EngineClient(config, SupervisionConfig(heartbeat_timeout=5.0), supplies=supply)
        self.count = 0

    async def stream(self, seed: int, disturb=None) -> list[int]:
        """The tokens of one stream; `disturb` is called in its middle."""
        self.count += 1
        params = complete(SamplingParams(max_tokens=LENGTH, seed=seed, temperature=0.9, ignore_eos=True), eos_token_ids=[2])
        tokens: list[int] = []
        async for news in self.client.generate(f"s{self.count}", PROMPT, params):
            tokens += news.token_ids
            if disturb is not None and len(tokens) >= LENGTH // 4:
                disturb()
                disturb = None
            assert news.finish_reason in (None, "length")
        return tokens

    async def restarted(self, times: int) -> None:
        """A stream that has got all its tokens may end before the end of its core is seen."""
        await soon(lambda: self.client.restarts >= times, 60)
        assert self.client.restarts == times


@pytest.fixture
async def front(model, monkeypatch) -> AsyncIterator[tuple[Front, Far]]:
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    host, before = Far(), set(processes_of(os.getpid(), zombies=True))  # those that other files have left
    front = Front(model, host)
    await front.client.start()
    try:
        async with asyncio.timeout(240):
            await front.client.wait_loaded()
            yield front, host
    finally:
        pids = host.pids
        await front.client.close()
        until(lambda: not any(map(alive, pids)) and set(processes_of(os.getpid(), zombies=True)) <= before, 30)
        for wire in host.wires:
            await wire.close()


async def test_streams_go_on_when_a_core_is_killed_cut_off_or_lost(front, caplog):
    front, host = front
    want = await front.stream(7)
    kill = lambda: os.kill(host.pids[0], signal.SIGKILL)  # noqa: E731
    host.slow = 0.4  # a busy one: what it says decides who is to blame
    assert await front.stream(7, kill) == want
    await front.restarted(1)
    assert "died (exit code -9" in caplog.text
    host.slow = 0.0
    for direction in (0, 1):  # it hears nothing any more, or is not heard: either is its end
        assert await front.stream(7, partial(host.cut, direction)) == want
        await front.restarted(2 + direction)
    assert await front.stream(7, host.lose) == want
    await front.restarted(4)
    assert "its host is gone" in caplog.text and front.client.num_poisonous == 0


async def test_a_core_whose_load_is_always_killed_ends_the_front_with_its_reason(model, tmp_path, monkeypatch):
    (tmp_path / "one_builder.py").write_text("import os\ndef build(config): os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), str(tmp_path)]))
    monkeypatch.setattr(supervision, "SPAWN_BACKOFF", 0.001)
    host = Far()
    front = Front(model, host, "one_builder:build")
    await front.client.start()
    try:
        async with asyncio.timeout(120):
            why = r"3 starts in a row failed; the last: exit code -9, on 127\.0\.0\.1, before its model was loaded"
            with pytest.raises(EngineDeadError, match=why):
                await front.client.wait_loaded()
    finally:
        await front.client.close()
        for wire in host.wires:
            await wire.close()


async def test_strangers_get_nothing_and_disturb_nothing(front, caplog):
    """Without a key, with a wrong one, with the core's own public key, with noise: nobody gets in, the stream is what it was."""
    caplog.set_level(logging.DEBUG)
    front, host = front
    want = await front.stream(7)
    context = zmq.asyncio.Context()
    door = host.doors[0]
    own, other = zmq.curve_keypair(), zmq.curve_keypair()
    try:
        for server_key in (None, other[0], door.public_key.encode()):
            inbox, outbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
            for socket, address in ((inbox, door.inbox), (outbox, door.outbox)):
                socket.linger = 0
                if server_key is not None:
                    socket.curve_serverkey = server_key
                    socket.curve_publickey, socket.curve_secretkey = own
                socket.connect(address)
            ends = msgspec.msgpack.encode(Shutdown())
            sent, heard = asyncio.ensure_future(inbox.send(ends)), asyncio.ensure_future(outbox.recv())
            for address in (door.inbox, door.outbox):
                port = int(address.rpartition(":")[2])
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 4096)
            assert await front.stream(7) == want
            assert not heard.done()
            sent.cancel()
            heard.cancel()
    finally:
        context.destroy(linger=0)
    assert front.client.restarts == 0
    for pid in host.pids:  # nor is a key to be found where others look
        for name in ("cmdline", "environ"):
            assert door.public_key.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert door.public_key not in caplog.text


async def test_a_machine_without_the_model_is_an_error_that_names_both(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    monkeypatch.chdir(Path(model).parent)
    host = Far()
    front = Front(Path(model).name, host)
    monkeypatch.chdir(tmp_path)
    await front.client.start()
    try:
        async with asyncio.timeout(120):
            with pytest.raises(EngineDeadError, match=rf"(?s){Path(model).name}.*on 127\.0\.0\.1"):
                await front.client.wait_loaded()
    finally:
        await front.client.close()


async def test_a_process_that_cannot_listen_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    host = CoreHost("192.0.2.77")
    with pytest.raises(HeadraceError, match=r"192\.0\.2\.77 does not listen"):
        await host.start("k", "a:b", "critical", "text", False)
