"""Sends drawn requests over many connections, and looks at every answer: no 5xx but documented ones, right ones are 200s, errors are
JSON; after them the server says what it said before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import fuzz_requests
from fuzz_requests import ALONE, NOT_HERE, Drawn, Shot, request

KNOWN = (
    ("/v1/completions", {"model": fuzz_requests.MODEL, "prompt": "the wheel of the mill", "max_tokens": 24, "temperature": 1.0, "seed": 7, "ignore_eos": True}),
    ("/v1/chat/completions", {"model": fuzz_requests.MODEL, "messages": fuzz_requests.HI, "max_tokens": 24, "temperature": 0.0}),
)  # fmt: skip
SECONDS = 120.0  # for one answer


@dataclass
class Fuzzed:
    """What came of it."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def fault(self, what: str, shot: Shot) -> None:
        self.statuses["faults"] += 1
        if len(self.faults) < 50:
            self.faults.append(f"{what}: {shot.path} {shot.data[:1500]!r}")


class Line:
    """A connection that is opened when it is needed."""

    def __init__(self, port: int):
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            with contextlib.suppress(OSError):
                await self.writer.wait_closed()
        self.reader = self.writer = None

    async def send(self, data: bytes, ends: int | None = None) -> None:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)
        self.writer.write(data if ends is None else data[:ends])
        with contextlib.suppress(OSError):  # it may have answered and closed before it has read all
            await self.writer.drain()

    async def answer(self, most: int | None) -> tuple[int, bytes, bytes]:
        """Status, head and body, of which `most` is enough. Raises EOFError where the server has closed first."""
        assert self.reader is not None
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, lower = int(head.split(b" ", 2)[1]), head.lower()
        if status == 100:
            return await self.answer(most)
        if b"transfer-encoding: chunked" in lower:
            body = b""
            while most is None or len(body) < most:
                size = int((await self.reader.readline()).strip() or b"0", 16)
                body += (await self.reader.readexactly(size + 2))[:-2]
                if not size:
                    return status, head, body
            return status, head, body
        [size] = [int(line.split(b":")[1]) for line in lower.split(b"\r\n") if line.startswith(b"content-length:")] or [0]
        return status, head, await self.reader.readexactly(size)


async def say(port: int) -> list[str]:
    """What the server says to the KNOWN requests."""
    line, texts = Line(port), []
    for path, body in KNOWN:
        await line.send(request("POST", path, json.dumps(body).encode()))
        status, _, answer = await asyncio.wait_for(line.answer(None), SECONDS)
        assert status == 200, answer
        choice = json.loads(answer)["choices"][0]
        texts.append(choice["text"] if "text" in choice else choice["message"]["content"])
    await line.close()
    return texts


async def _shoot(line: Line, shot: Shot, fuzzed: Fuzzed) -> None:
    await line.send(shot.data, shot.ends)
    if shot.ends is not None:
        fuzzed.statuses["cut"] += 1
        await line.close()
        return
    try:
        status, head, body = await asyncio.wait_for(line.answer(shot.reads if shot.data[:4] != b"HEAD" else 0), 0.5 if shot.unclear else SECONDS)
    except (EOFError, OSError, TimeoutError) as e:
        await line.close()
        fuzzed.statuses["no answer"] += 1
        if not shot.unclear and (shot.reads is None or isinstance(e, TimeoutError)):  # a strange head may just be hung up on
            fuzzed.fault(f"no answer ({e!r})", shot)
        return
    fuzzed.statuses[str(status)] += 1
    judge(shot, status, head, body, fuzzed)
    if shot.reads is not None or b"connection: close" in head.lower() or shot.data.startswith(b"HEAD") or status == 413:
        await line.close()


def judge(shot: Shot, status: int, head: bytes, body: bytes, fuzzed: Fuzzed) -> None:
    documented = status in (503, 504) or (status == 501 and shot.path.startswith(NOT_HERE))
    if status >= 500 and not documented:
        fuzzed.fault(f"{status} {body[:300]!r}", shot)
    elif shot.right and status != 200:
        fuzzed.fault(f"a right request: {status} {body[:300]!r}", shot)
    elif status >= 400 and b"application/json" in head and body:
        try:
            assert json.loads(body)["error"]
        except (ValueError, KeyError, TypeError, AssertionError):
            fuzzed.fault(f"{status} without an error: {body[:300]!r}", shot)
    elif b"application/json" in head and shot.reads is None and body and not shot.data.startswith(b"HEAD"):
        try:
            json.loads(body)
        except ValueError:
            fuzzed.fault(f"{status}, no JSON: {body[:300]!r}", shot)
    elif shot.right and b"event-stream" in head and b'"error":{' in body:
        fuzzed.fault(f"an error in a stream: {body[-300:]!r}", shot)


async def fuzz(
    port: int, count: int, *, seed: int, lines: int = 16, told: Callable[[int, Fuzzed], None] | None = None, server: Drawn = ALONE
) -> Fuzzed:
    """`told` is called now and then with how many were sent."""
    before, fuzzed, began, sent = await say(port), Fuzzed(), time.monotonic(), 0

    async def one(number: int) -> None:
        nonlocal sent
        rng, line = random.Random(f"{seed}/{number}"), Line(port)
        while sent < count:
            sent += 1
            if told is not None and sent % 500 == 0:
                told(sent, fuzzed)
            await _shoot(line, fuzz_requests.shot(rng, server), fuzzed)
        await line.close()

    await asyncio.gather(*map(one, range(lines)))
    fuzzed.seconds = time.monotonic() - began
    if (after := await say(port)) != before:
        fuzzed.faults.append(f"it said {before}, and says {after}")
    return fuzzed
