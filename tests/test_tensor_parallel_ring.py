"""The ring: every reader gets every frame, in order and whole, however long, however slow, and wherever the counters stand."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.tensor_parallel.ring import MASK, ROOM, SLOTS, Reader, RingError, Writer, make_ring


class Gone(Exception):
    """What a side's `check` raises when the other is no more."""


def alive() -> None:
    pass


@contextlib.contextmanager
def ring(readers: int, first: int = 0, of_writer: Callable[[], None] = alive, of_reader: Callable[[], None] = alive):
    descriptor = make_ring(readers, first)
    try:
        yield Writer(descriptor, readers, of_writer), [Reader(descriptor, readers, r, of_reader) for r in range(readers)]
    finally:
        os.close(descriptor)


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


SIZES = st.one_of(
    st.integers(0, 300), st.integers(ROOM - 2, ROOM + 2), st.integers(0, 5 * ROOM), st.just((SLOTS + 3) * ROOM + 1)
)


@settings(max_examples=25)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=12), readers=st.integers(1, 3),
    first=st.sampled_from([0, SLOTS - 1, MASK, MASK - 3, MASK - SLOTS]), pauses=st.integers(0, 2**16),
)  # fmt: skip
def test_every_reader_gets_every_frame(sizes, readers, first, pauses):
    frames = [noise(size, i) for i, size in enumerate(sizes)]
    got: list[list[bytes]] = [[] for _ in range(readers)]

    def read(reader: Reader, into: list[bytes], rng: random.Random) -> None:
        for _ in frames:
            if rng.random() < 0.3:
                threading.Event().wait(rng.random() * 1e-3)  # somebody is slow
            into.append(reader.receive())
            reader.echo()

    with ring(readers, first) as (writer, ends):
        arguments = [(end, into, random.Random(pauses + i)) for i, (end, into) in enumerate(zip(ends, got, strict=True))]
        threads = [threading.Thread(target=read, args=a, daemon=True) for a in arguments]
        for thread in threads:
            thread.start()
        numbers = [writer.send(frame) for frame in frames]
        for thread in threads:
            thread.join(30)
        assert got == [frames] * readers
        assert numbers == [(first + 1 + i) & MASK for i in range(len(frames))]
        assert writer.echoes() == [numbers[-1]] * readers


def test_the_writer_waits_for_the_slowest_reader():
    waits = threading.Event()
    with ring(2, of_writer=waits.set) as (writer, (quick, slow)):
        for i in range(SLOTS):
            writer.send(b"%d" % i)
            assert quick.receive() == b"%d" % i
        sender = threading.Thread(target=writer.send, args=(b"last",), daemon=True)
        sender.start()
        assert waits.wait(30), "there is a slot that the slow reader has not read"
        assert sender.is_alive()
        assert slow.receive() == b"0"
        sender.join(30)
        assert quick.receive() == b"last"
        assert [slow.receive() for _ in range(SLOTS)] == [b"%d" % i for i in range(1, SLOTS)] + [b"last"]


def gone() -> None:
    raise Gone


def test_a_reader_whose_writer_is_dead_does_not_wait():
    with ring(1, of_reader=gone) as (writer, (reader,)):
        writer.send(b"a word")
        assert reader.receive() == b"a word"
        with pytest.raises(Gone):
            reader.receive()


def test_a_writer_whose_reader_is_dead_does_not_wait():
    with ring(2, of_writer=gone) as (writer, (reader, _)):
        for _ in range(SLOTS):
            writer.send(b"")
            reader.receive()
        with pytest.raises(Gone):
            writer.send(b"one too many")


def test_a_lost_frame_is_noticed():
    with ring(1) as (writer, (reader,)):
        writer.send(b"first")
        assert reader.receive() == b"first"
        writer.number += 1
        writer.send(b"third")
        with pytest.raises(RingError, match="frame 3, 5 bytes of it, where frame 2 was expected"):
            reader.receive()


def test_a_frame_that_was_given_up_is_noticed():
    """Whoever writes is interrupted in the middle of a long frame, and then goes on with another."""
    with ring(1, of_writer=gone) as (writer, (reader,)):
        with pytest.raises(Gone):
            writer.send(noise(2 * SLOTS * ROOM, 0))
        noticed = []

        def read() -> None:
            try:
                reader.receive()
            except RingError as e:
                noticed.append(str(e))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        while thread.is_alive():
            with contextlib.suppress(Gone):
                writer.send(b"another")
        assert len(noticed) == 1
