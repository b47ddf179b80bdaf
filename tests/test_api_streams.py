"""The parts of a streamed answer alone: writers that share a stream, readers that are slow or stuck, what ends a request first."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.errors import ClientGone
from headrace.api.lifeline import DeadlinePassed, Lifeline
from headrace.api.sse import COMMENT, EventStream, Ticker
from virtual_clock import Loop


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio", {"loop_factory": Loop}


class Reader:
    """The server's `send`: takes each message after the next of `waits` seconds, and must not be called meanwhile."""

    def __init__(self, waits=()):
        self.waits = iter(waits)
        self.messages: list[dict] = []
        self.busy = False

    async def send(self, message) -> None:
        assert not self.busy, "two writes at once"
        assert not self.messages or self.messages[-1].get("more_body", True), "something was sent after the end"
        self.busy = True
        try:
            await asyncio.sleep(next(self.waits, 0.0))
            self.messages.append(message)
        finally:
            self.busy = False

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)


def stream_to(reader: Reader, on_stuck=lambda: None) -> EventStream:
    return EventStream({}, reader.send, on_stuck)


waits = st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]), max_size=20)


@given(pauses=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=4), min_size=1, max_size=4), waits=waits)
async def test_writers_take_turns(pauses, waits):
    """Each writer's bytes arrive once and in its order, and no write returns before its bytes have been taken."""
    reader = Reader(waits)
    stream = stream_to(reader)

    async def writer(name: int) -> None:
        for n, pause in enumerate(pauses[name]):
            await asyncio.sleep(pause)
            await stream.write(b"<%d.%d>" % (name, n))
            assert b"<%d.%d>" % (name, n) in reader.body

    await asyncio.gather(*(writer(i) for i in range(len(pauses))))
    await stream.end(b"<end>")
    for name, own in enumerate(pauses):
        places = [reader.body.index(b"<%d.%d>" % (name, n)) for n in range(len(own))]
        assert places == sorted(places)
    assert len(reader.body) == 5 * sum(map(len, pauses)) + len(b"<end>") and reader.body.endswith(b"<end>")
    assert [m["type"] for m in reader.messages[:2]] == ["http.response.start", "http.response.body"]
    assert [m["more_body"] for m in reader.messages[1:]][-1] is False


@given(cancelled=st.floats(0.0, 4.0), waits=waits)
async def test_bytes_of_a_cancelled_write_come_first_in_the_next(cancelled, waits):
    reader = Reader(waits)
    stream = stream_to(reader)
    writers = [asyncio.create_task(stream.write(data)) for data in (b"a", b"b")]
    await asyncio.sleep(cancelled)
    for writer in writers:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    await stream.end(b"c")
    assert reader.body == b"abc"


@pytest.mark.parametrize("slow", [0.0, 5.0])
async def test_nothing_follows_the_end(slow):
    """A comment that was due when the end came is not written any more."""
    reader = Reader([0.0, 0.0, slow])
    stream = stream_to(reader)
    await stream.write(b"a")
    end = asyncio.create_task(stream.end(b"z"))
    await asyncio.sleep(0)
    await stream.write(COMMENT)
    await end
    await stream.write(COMMENT)
    assert reader.body == b"az"


async def test_the_end_waits_for_a_comment_under_way():
    reader = Reader([0.0, 5.0])
    stream = stream_to(reader)
    comment = asyncio.create_task(stream.write(COMMENT))
    await asyncio.sleep(1.0)
    await stream.end(b"z")
    assert reader.body == COMMENT + b"z" and comment.done()


@given(interval=st.sampled_from([1.0, 10.0, 100.0]), timeout=st.sampled_from([1.0, 8.0, 600.0]), silence=st.floats(0.0, 50.0))
async def test_a_reader_is_stuck_after_its_time_and_not_before(interval, timeout, silence):
    """Counted from when it began to take nothing: a silence of the engine before that is not the reader's."""
    loop = asyncio.get_running_loop()
    blocked_at = None
    stuck = asyncio.Event()

    class Stuck(Reader):
        async def send(self, message) -> None:
            nonlocal blocked_at
            if message.get("body") == b"last":
                blocked_at = loop.time()
                await stuck.wait()
            await super().send(message)

    stream = stream_to(Stuck(), stuck.set)
    ticker = Ticker(interval, timeout)
    await stream.write(b"first")
    ticker.add(stream)
    await asyncio.sleep(silence)
    await stream.write(b"last")
    waited = loop.time() - blocked_at
    assert timeout <= waited <= timeout + min(interval, timeout, 4.0) / 4 + 1e-6
    ticker.remove(stream)


@given(interval=st.sampled_from([1.0, 10.0, 100.0]), silence=st.floats(0.0, 500.0))
async def test_silence_is_filled_with_comments(interval, silence):
    reader = Reader()
    stream = stream_to(reader)
    ticker = Ticker(interval, 600.0)
    ticker.add(stream)
    await asyncio.sleep(silence)
    ticker.remove(stream)
    await stream.end(b"")
    step = min(interval, 4.0) / 4
    most, fewest = int(silence / interval + 1e-9), int(silence / (interval + step))
    assert fewest <= reader.body.count(COMMENT) <= most


@pytest.mark.parametrize("reasons", [(ClientGone, DeadlinePassed), (DeadlinePassed, ClientGone)])
async def test_the_first_reason_counts(reasons):
    lifeline = Lifeline(lambda: asyncio.sleep(1e9), None)

    async def end() -> None:
        for reason in reasons:
            lifeline.end(reason())

    with pytest.raises(reasons[0]):
        async with lifeline:
            ending = asyncio.create_task(end())
            await asyncio.sleep(10)
    await ending
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize(("gone", "deadline", "reason"), [(1.0, 2.0, ClientGone), (2.0, 1.0, DeadlinePassed), (None, 1.0, DeadlinePassed), (1.0, None, ClientGone)])
async def test_what_comes_first_ends_the_block(gone, deadline, reason):
    async def receive() -> dict:
        await asyncio.sleep(1e9 if gone is None else gone)
        return {"type": "http.disconnect"}

    loop = asyncio.get_running_loop()
    with pytest.raises(reason):
        async with Lifeline(receive, deadline):
            try:
                await asyncio.sleep(1e6)
            finally:
                assert loop.time() == 1.0
                await asyncio.sleep(5)  # what is tidied up meanwhile is not disturbed by the other reason
    assert loop.time() == 6.0


async def test_nothing_reaches_a_block_that_has_ended():
    async def receive() -> dict:
        await asyncio.sleep(2.0)
        return {"type": "http.disconnect"}

    async with Lifeline(receive, 1.0):
        await asyncio.sleep(0.5)
    await asyncio.sleep(5)


async def test_a_cancellation_from_elsewhere_goes_on():
    """The server's shutdown is not taken for a client that has gone, whichever comes first."""
    lifeline = Lifeline(lambda: asyncio.sleep(1e9), None)

    async def block() -> None:
        async with lifeline:
            await asyncio.sleep(1e6)

    task = asyncio.create_task(block())
    await asyncio.sleep(1)
    lifeline.end(ClientGone())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
