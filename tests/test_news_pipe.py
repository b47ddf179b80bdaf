"""What a core says comes whole, once and in order, whatever its size and whenever it is read; nobody waits for anybody."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.core_process import CoreProcess
from headrace.engine.news_pipe import PipeInlet, PipeOutbox
from headrace.engine.wire import Heartbeat


def pair() -> tuple[PipeInlet, PipeOutbox]:
    ours, theirs = socket.socketpair()
    return PipeInlet(theirs.detach()), PipeOutbox(ours)


def read(outbox: PipeOutbox, count: int) -> list[bytes]:
    found, end = [], time.monotonic() + 20
    while len(found) < count and time.monotonic() < end:
        if (message := outbox.take()) is not None:
            found.append(message)
    return found


sizes = st.one_of(st.integers(0, 40), st.integers(200_000, 700_000))  # a socket holds about 200 KiB


@settings(max_examples=25)
@given(st.lists(st.tuples(sizes, st.booleans()), min_size=1, max_size=12))
def test_messages_of_any_size_come_in_order_whenever_they_are_read(messages):
    inlet, outbox = pair()
    sent, found = [], []
    for i, (size, look) in enumerate(messages):
        sent.append(bytes([i]) * size)
        inlet.send(sent[-1])  # never waits for us
        if look and (message := outbox.take()) is not None:
            found.append(message)
    found += read(outbox, len(sent) - len(found))
    inlet.close()
    assert found == sent and outbox.take() is None and not outbox.ended
    outbox.close()


def test_several_threads_and_a_slow_reader():
    inlet, outbox = pair()
    threads = [threading.Thread(target=lambda t=t: [inlet.send(bytes([t]) * 5000) for _ in range(200)]) for t in range(3)]
    for thread in threads:
        thread.start()
    found = read(outbox, 600)
    for thread in threads:
        thread.join()
    assert sorted(found) == [bytes([t]) * 5000 for t in range(3) for _ in range(200)]
    outbox.close()


def test_the_last_words_are_read_after_the_end_and_nobody_speaks_to_the_dead():
    inlet, outbox = pair()
    inlet.send(b"last")
    inlet._pipe.close()
    assert outbox.take() == b"last" and not outbox.ended
    assert outbox.take() is None
    assert outbox.take() is None and outbox.ended and not outbox.closed
    inlet, outbox = pair()
    outbox.close()
    inlet.send(b"x" * 1_000_000)
    inlet.close()
    assert outbox.closed and not inlet._waiting


async def test_the_loop_rests_when_a_core_is_gone():
    inlet, outbox = pair()
    context, process = zmq.Context(), type("Process", (), {"returncode": None})()
    core = CoreProcess(process, context.socket(zmq.PUSH), outbox, Path("/nowhere"))  # type: ignore[arg-type]
    heard, looks, take = [], [], outbox.take
    outbox.take = lambda: looks.append(1) or take()  # type: ignore[method-assign]
    core.listen(heard.append)
    inlet.send(msgspec.msgpack.encode(Heartbeat(1.0)))
    inlet._pipe.close()
    async with asyncio.timeout(20):
        while not outbox.ended:
            await asyncio.sleep(0.001)
    assert len(heard) == 1
    before = len(looks)
    await asyncio.sleep(0.02)
    assert len(looks) == before
    core.hang_up()
    context.destroy(linger=0)


def test_a_process_that_the_core_starts_does_not_keep_the_pipe_open():
    inlet, outbox = pair()
    assert not os.get_inheritable(inlet._pipe.fileno())
    outbox.close()
