"""Bodies that are being received: there is a bound on all of them together, and whoever is within it loses nothing."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api import bodies
from headrace.api.bodies import LEAST, SMALL, Bodies
from headrace.api.errors import ApiError
from server_driver import MODEL, FakeEngine, serving

COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


@settings(max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, SMALL, SMALL + 1, LEAST // 8, LEAST // 2])), max_size=40),
    ends=st.sets(st.integers(0, 39)),
)
def test_what_is_held_is_what_is_there_and_never_more_than_may_be(sizes, ends):
    every, open_ = Bodies(1), {}
    for i, (who, count) in enumerate(sizes):
        if who not in open_:
            stack = ExitStack()
            open_[who] = stack, stack.enter_context(every.body())
        stack, body = open_[who]
        before, whole = every.held, body.size + count
        body.reach(body.size)  # what is there already is no more
        room = every.held + count <= (LEAST if whole <= SMALL else LEAST * 3 // 4)
        try:
            body.reach(whole)
            assert room
        except ApiError as error:
            assert not room and every.held == before and error.status == 503 and error.headers["retry-after"] == "5"
        if i in ends:
            open_.pop(who)[0].close()
        assert every.held == sum(body.size for _, body in open_.values()) <= every.most == LEAST
    for stack, _ in open_.values():
        stack.close()
    assert every.held == 0


class Slow:
    """A connection on which one body comes in parts, and then another."""

    def __init__(self, port: int, size: int, announced: bool):
        self._port, self._announced, self._writer = port, announced, None
        self._body = json.dumps(COMPLETION | {"user": "x" * size}).encode()

    async def send(self, last: int, after: str = "close") -> Slow:
        """All but the `last` bytes. `after`: what becomes of the connection."""
        if self._writer is None:
            self.reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        form = f"Content-Length: {len(self._body)}" if self._announced else "Transfer-Encoding: chunked"
        self._writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: {after}\r\n{form}\r\n\r\n".encode())
        self._put(self._body[:-last])
        self._rest = self._body[-last:]
        return self

    def _put(self, data: bytes) -> None:
        self._writer.write(data if self._announced else b"%x\r\n%b\r\n" % (len(data), data))

    def put_rest(self) -> None:
        self._put(self._rest)
        if not self._announced:
            self._writer.write(b"0\r\n\r\n")

    async def finish(self) -> bytes:
        """What is answered, when all has come."""
        self.put_rest()
        said = await self.reader.read()
        self._writer.close()
        return said


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_beyond_the_bound_are_refused_small_ones_come_in_and_nobody_loses(monkeypatch, announced):
    monkeypatch.setattr(bodies, "LEAST", 4 * 2**20)
    async with serving(FakeEngine(), max_body_bytes=2**18) as server:
        every = server.app.state.api.bodies
        slow = [await Slow(server.port, 2**18 - 1000, announced).send(5) for _ in range(12)]
        async with asyncio.timeout(60):
            while every.held < 12 * (2**18 - 2000):
                await asyncio.sleep(0.001)
            held = every.held
            late = await Slow(server.port, 2**18 - 1000, announced).send(5, "keep-alive")
            status, _, rest = (await late.reader.readuntil(b"}}")).partition(b"\r\n")
            while every.held > held:
                await asyncio.sleep(0.001)
            small = await server.client.post("/v1/completions", json=COMPLETION)
            idle = await Slow(server.port, 2**17, True).send(2**17)
            done = await asyncio.gather(*(one.finish() for one in slow))
            assert all(said.startswith(b"HTTP/1.1 200") for said in done), done
            assert (await idle.finish()).startswith(b"HTTP/1.1 200")
            late.put_rest()
            again = await (await late.send(5)).finish()
            while every.held:
                await asyncio.sleep(0.001)
    assert status.startswith(b"HTTP/1.1 503") and b"retry-after: 5" in rest and b'"code":"too_many_bodies"' in rest
    assert small.status_code == 200 and again.startswith(b"HTTP/1.1 200"), "the same connection goes on"


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "hi"}), ("/v1/embeddings", {"input": "hi"}),
    ("/v1/completions", {"prompt": "hi", "use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 4}),
])  # fmt: skip
async def test_a_body_counts_until_its_request_is_admitted(monkeypatch, path, body):
    engine, seen = FakeEngine(), {}
    async with serving(engine, inline_tokenize_chars=0) as server:
        ctx = server.app.state.api

        def watch(owner: object, name: str) -> None:
            inner = getattr(owner, name)

            def watched(*args, **options):
                seen.setdefault(name, set()).add(ctx.bodies.held)
                return inner(*args, **options)

            monkeypatch.setattr(owner, name, watched)

        for owner, name in ((ctx, "encode"), (ctx.limits, "admit"), (engine, "generate"), (engine, "embed")):
            watch(owner, name)
        text = json.dumps({"model": MODEL, "user": "x" * 10_000, **body})
        assert (await server.client.post(path, content=text)).status_code == 200
        assert seen.pop("encode") == seen.pop("admit") == {len(text)} and set().union(*seen.values()) == {0}
        assert ctx.bodies.held == 0
