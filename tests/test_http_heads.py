"""Heads of requests that do not come to an end: bounded in time and in bytes, on fresh connections and on used ones. And clients
that leave with several requests under way, and those that are too many."""

from __future__ import annotations

import asyncio
import contextlib
import resource

import pytest

from fake_engine import FakeEngine
from headrace.api import http_server as module
from headrace.api.app import create_app
from headrace.api.config import ServerConfig
from server_driver import soon

WHOLE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 34\r\n\r\n" + b'{"prompt": "hi", "max_tokens":  3}'
PART = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-a: "


@contextlib.asynccontextmanager
async def listening(monkeypatch, engine: FakeEngine, tls=None, **bounds):
    for name, value in bounds.items():
        monkeypatch.setattr(module, name, value)
    server = module.http_server(create_app(engine, ServerConfig()), "critical", tls)
    server.config.port, server.config.timeout_graceful_shutdown = 0, 1
    task = asyncio.create_task(server._serve())
    await soon(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(size)
    return head


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("part", [b"", PART])
async def test_a_head_that_does_not_come_closes_the_connection(monkeypatch, used, part):
    if used and not part:
        return  # uvicorn's own: a connection that is kept
    async with listening(monkeypatch, FakeEngine(), HEAD_SECONDS=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if used:
            writer.write(WHOLE)
            assert (await answer(reader)).startswith(b"HTTP/1.1 200")
        writer.write(part)
        dripping = asyncio.create_task(drip(writer, bool(part)))  # a byte now and then changes nothing
        with contextlib.suppress(ConnectionResetError):  # by a byte that came just then
            assert await asyncio.wait_for(reader.read(), 20) == b""
        dripping.cancel()
        writer.close()


async def drip(writer: asyncio.StreamWriter, really: bool) -> None:
    with contextlib.suppress(OSError):
        while really:
            writer.write(b"x")
            await asyncio.sleep(0.02)


async def test_a_head_without_an_end_is_cut(monkeypatch):
    async with listening(monkeypatch, FakeEngine(), HEAD_BYTES=100_000) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PART + b"x" * 300_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431")
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_heads_without_an_end_are_bounded_together_and_small_ones_are_not_among_them(monkeypatch):
    part = b"GET /nowhere HTTP/1.1\r\nHost: x\r\nx-a: "
    async with listening(monkeypatch, FakeEngine(), HEADS_BYTES=300_000, SMALL_HEAD=20_000) as port:
        small = await asyncio.open_connection("127.0.0.1", port)
        small[1].write(part)
        for _ in range(3):  # what ends is given back
            large = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for _, writer in large:
                writer.write(part + b"x" * 90_000)
            firsts = [asyncio.create_task(reader.readline()) for reader, _ in large]
            await asyncio.wait(firsts, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            done = [first for first in firsts if first.done()]
            assert len(done) == 1 and done[0].result().startswith(b"HTTP/1.1 431")
            for (_, writer), first in zip(large, firsts, strict=True):
                if not first.done():
                    writer.write(b"\r\n\r\n")  # of 90,000 bytes: more than the application takes
                    assert (await asyncio.wait_for(first, 20)).startswith(b"HTTP/1.1 431")
                writer.close()
        small[1].write(b"x\r\n\r\n")
        assert (await answer(small[0])).startswith(b"HTTP/1.1 404")
        small[1].close()


async def test_answers_and_bodies_take_as_long_as_they_take(monkeypatch):
    async with listening(monkeypatch, FakeEngine(delay=0.3), HEAD_SECONDS=1.0, HEAD_BYTES=200) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE[:70])
        await asyncio.sleep(1.1)
        writer.write(WHOLE[70:])
        assert (await answer(reader)).startswith(b"HTTP/1.1 200")
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n")
        assert (await answer(reader)).startswith(b"HTTP/1.1 404")
        writer.write(b"x" * 4000 + WHOLE)
        assert (await answer(reader)).startswith(b"HTTP/1.1 200")
        writer.close()


OFFER = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 400])
async def test_an_offer_of_another_protocol_is_left_alone_and_the_body_is_read(monkeypatch, pieces):
    """As Java's client makes it, with its first request on a connection."""
    offering = WHOLE.replace(b"Host: x\r\n", b"Host: x\r\n" + OFFER)
    async with listening(monkeypatch, FakeEngine()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE + offering if pieces == 1 else b"")
        parts = [] if pieces == 1 else [offering.partition(b"{")[0], b"{" + offering.partition(b"{")[2]]
        for part in parts if pieces == 2 else [bytes([byte]) for byte in offering] if pieces == 400 else []:
            writer.write(part)
            await asyncio.sleep(0.001)
        for _ in range(2 if pieces == 1 else 1):
            assert (await asyncio.wait_for(answer(reader), 20)).startswith(b"HTTP/1.1 200")
        assert await asyncio.wait_for(reader.read(), 20) == b""  # what else `Connection` says holds
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_older_client_is_sent_no_chunks(monkeypatch, stream):
    body = b'{"prompt": "hi", "max_tokens": 3, "stream": %s}' % (b"true" if stream else b"false")
    async with listening(monkeypatch, FakeEngine()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head, _, said = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert said.startswith(b"data: {") and said.endswith(b"data: [DONE]\n\n") if stream else b"content-length: %d" % len(said) in head


async def test_who_leaves_with_requests_behind_each_other_ends_the_first(monkeypatch):
    engine = FakeEngine(script=lambda ids, params: "lorem ipsum " * 400, delay=0.01)
    async with listening(monkeypatch, engine) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "hi", "max_tokens": 2000}'
        writer.write((b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body) * 2)
        await soon(lambda: len(engine.active) == 1 and engine.yielded > 3)
        writer.transport.abort()
        await soon(lambda: not engine.active)
        assert len(engine.aborted) == 1


async def test_connections_beyond_the_most_are_told_so_and_there_is_room_when_one_goes(monkeypatch, caplog):
    async with listening(monkeypatch, FakeEngine(), room_for_connections=lambda: 2, QUIET_SECONDS=3600.0) as port:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for request in (WHOLE, b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /v1/models HTTP/1.0\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            said = await asyncio.wait_for(reader.read(), 20)
            assert said.startswith(b"HTTP/1.1 503") and b'"code":"too_many_connections"' in said and b"\r\nretry-after: 5" in said
        assert caplog.text.count("2 connections are open") == 1
        for reader, writer in kept:
            writer.write(WHOLE)
            assert (await answer(reader)).startswith(b"HTTP/1.1 200")
        kept[0][1].close()

        async def served() -> bool:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                writer.write(WHOLE)
                return (await answer(reader)).startswith(b"HTTP/1.1 200")
            return False

        while not await asyncio.wait_for(served(), 20):
            await asyncio.sleep(0.01)


async def test_a_connection_that_is_kept_for_nothing_makes_room(monkeypatch):
    """The one that has been so for longest; none that has a request under way, or has sent a part of one."""
    engine = FakeEngine(script=lambda ids, params: "lorem ipsum " * 400, delay=0.01)
    async with listening(monkeypatch, engine, room_for_connections=lambda: 4) as port:
        busy, begun, idle, idler = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, writer in (idler, idle, begun):
            writer.write(WHOLE)
            assert (await answer(reader)).startswith(b"HTTP/1.1 200")
        begun[1].write(PART)
        body = b'{"prompt": "hi", "max_tokens": 2000}'
        busy[1].write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await soon(lambda: len(engine.active) == 1)
        come = []
        for gone in (idler, idle):
            come.append(await asyncio.open_connection("127.0.0.1", port))
            come[-1][1].write(b"GET /ready HTTP/1.1\r\nHost: x\r\n" + b"x-a: b\r\n")  # and is not idle itself
            assert await asyncio.wait_for(gone[0].read(), 20) == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE)
        assert (await asyncio.wait_for(answer(reader), 20)).startswith(b"HTTP/1.1 503")
        begun[1].write(b"b\r\n\r\n")
        assert (await answer(begun[0])).startswith(b"HTTP/1.1") and len(engine.active) == 1


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_a_kept_connection_whose_next_request_comes_at_that_moment_stays(monkeypatch, loops):
    """What the system has of it was not read when there is need of a connection."""
    runner = asyncio.Runner(loop_factory=pytest.importorskip(loops).new_event_loop)

    async def races() -> None:
        async with listening(monkeypatch, FakeEngine(), room_for_connections=lambda: 2) as port:
            kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, writer in kept:
                writer.write(WHOLE)
                assert (await answer(reader)).startswith(b"HTTP/1.1 200")
            connection_made = module.BoundedHeads.connection_made

            def at_that_moment(self, transport) -> None:
                kept[0][1].write(WHOLE)  # goes to the system at once
                connection_made(self, transport)

            monkeypatch.setattr(module.BoundedHeads, "connection_made", at_that_moment)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(kept[1][0].read(), 20) == b""
            writer.write(WHOLE)
            for one in (reader, kept[0][0]):
                assert (await asyncio.wait_for(answer(one), 20)).startswith(b"HTTP/1.1 200")

    with runner:
        runner.run(races())


async def test_who_asks_whether_the_server_lives_is_answered_however_many_there_are(monkeypatch):
    """Also behind those beyond the most that say nothing: the oldest of them goes for each that comes."""
    async with listening(monkeypatch, FakeEngine(), room_for_connections=lambda: 1, BEYOND=2) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET //health/ HTTP/1.1\r\nHost: x\r\n\r\n")
            said = await asyncio.wait_for(reader.read(), 20)
            assert said.startswith(b"HTTP/1.1 200") and b"\r\nconnection: close" in said
        refused = await asyncio.wait_for(silent[1][0].read(), 20)
        assert refused.startswith(b"HTTP/1.1 503") and refused.endswith(b"}") and b'"code":"too_many_connections"' in refused
        for reader, writer in (silent[0], silent[2]):  # the one within the bound, and the youngest beyond it
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await answer(reader)).startswith(b"HTTP/1.1 200")


NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    "soft, hard, raised, room", [(100, 200, 200, 100), (1024, 4096, 4096, 3840), (1024, NONE, 65536, 65280), (99_000, NONE, None, 98_744)]
)
def test_connections_leave_files_for_a_core_that_comes_again(monkeypatch, soft, hard, raised, room):
    asked = []
    monkeypatch.setattr(module.resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(module.resource, "setrlimit", lambda what, limits: asked.append(limits))
    assert module.room_for_connections() == room and asked == ([] if raised is None else [(raised, hard)])


@pytest.mark.parametrize("files", [64, 100, 127, 128, 1024])
async def test_too_few_files_are_told_at_the_start(monkeypatch, caplog, files):
    """And connections leave the server its own, whatever comes."""
    monkeypatch.setattr(module.resource, "getrlimit", lambda what: (files, files))
    async with listening(monkeypatch, FakeEngine()) as port:
        told = [record.getMessage() for record in caplog.records if "ulimit -n" in record.getMessage()]
        if files >= 128:
            assert not told
            return
        assert told == [f"only {files} files may be open (ulimit -n), and so {files // 2} connections: at least 512 are wanted"]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(files)]
        closed = [asyncio.create_task(reader.read()) for reader, _ in silent]
        await soon(lambda: sum(task.done() for task in closed) >= files - files // 2 - files // 8)
