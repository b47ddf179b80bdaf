"""News that its reader's task need not be woken for: each token once and in order, whoever takes it; and by which way it goes out."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import FakeEngine
from headrace.api.http_server import Chunks
from headrace.api.sse import EventStream
from headrace.engine.messages import EngineOutput, EngineRequest
from headrace.engine.streams import Offers, Stream
from headrace.sampling.params import SamplingParams
from server_driver import MODEL, serving

TURN = st.sampled_from(["token", "news", "both", "turn", "reader is busy"])


@given(turns=st.lists(TURN, max_size=40), takes=st.lists(st.booleans(), max_size=40), last=st.integers(0, 2))
def test_a_taker_and_a_reader_get_every_token_once_and_in_order(turns, takes, last):
    seen: list[int] = []
    waiting, wanted, answers = False, iter(range(10**6)), iter(takes)
    by_taker = 0

    def taker(news: EngineOutput) -> bool:
        nonlocal by_taker
        assert waiting and news.finish_reason is None
        if not next(answers, True):
            return False
        by_taker += 1
        seen.extend(news.token_ids)
        return True

    stream = Stream(EngineRequest("r", [1], SamplingParams(), output_ids=[]), Offers(), taker)
    busy = asyncio.Event()

    async def read() -> str | None:
        nonlocal waiting
        while True:
            waiting = True
            news = await stream.next()
            waiting = False
            seen.extend(news.token_ids)
            if news.finish_reason is not None:
                return news.finish_reason
            await busy.wait()

    async def run() -> None:
        busy.set()
        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        for turn in turns:
            if turn in ("token", "both"):
                stream.push_token(next(wanted))
            if turn in ("news", "both"):
                stream.push(EngineOutput("r", [next(wanted), next(wanted)]))
            if turn == "turn":
                busy.set()
                for _ in range(4):
                    await asyncio.sleep(0)
            if turn == "reader is busy":
                busy.clear()
        busy.set()
        stream.push(EngineOutput("r", [next(wanted) for _ in range(last)], finish_reason="stop"))
        assert await reader == "stop"

    asyncio.run(run())
    assert seen == stream.request.output_ids == list(range(next(wanted)))
    if turns[:2] == ["token", "turn"] and takes[:1] != [False]:
        assert by_taker


async def test_what_a_taker_raises_its_reader_gets():
    def taker(news: EngineOutput) -> bool:
        raise ZeroDivisionError

    stream = Stream(EngineRequest("r", [1], SamplingParams(), output_ids=[]), Offers(), taker)
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.push_token(7)
    with pytest.raises(ZeroDivisionError):
        await reader


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": "hi", "n": 2, "stop": ["no such text"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
])  # fmt: skip
async def test_nearly_all_of_a_stream_is_written_without_its_task(monkeypatch, path, body):
    """And is, byte for byte, chunks of HTTP."""
    counts = {"now": 0, "task": 0}
    write, write_now = EventStream.write, Chunks.write

    async def counted(self, data):
        counts["task"] += 1
        await write(self, data)

    def counted_now(self, data):
        counts["now"] += 1
        write_now(self, data)

    monkeypatch.setattr(EventStream, "write", counted)
    monkeypatch.setattr(Chunks, "write", counted_now)
    engine = FakeEngine(script=lambda ids, params: "0123456789" * 20, bursts=1)
    async with serving(engine) as server:
        answer = await server.client.post(path, json={"model": MODEL, "max_tokens": 201, "stream": True, **body})
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert len(events) >= 200 * body.get("n", 1)
    choices = [c for e in events for c in e["choices"] if c["index"] == 0]
    assert "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices) == "0123456789" * 20
    assert counts["now"] > 0.6 * len(events) and counts["now"] + counts["task"] <= len(events) + 2
