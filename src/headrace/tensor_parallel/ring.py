"""A ring of frames in shared memory: one writer, several readers, and every reader gets every frame, in order.

    head    [words] uint32, 64 bytes apart: slots written; of each reader the slots read, and the last frame acted on (echo)
    slots   [SLOTS][SLOT_BYTES]: number of the frame, bytes of it from here on, then these bytes as far as they fit

A frame that does not fit into a slot goes on in the next ones, and a long one passes through the ring while it is read: none
is refused, and the memory stays as it is. Who writes waits for the slowest reader. Numbers count frames; a reader that misses
one says so, and is of no use any more. All counters run modulo 2^32.

The memory is a file without a name (memfd): it is gone when the last process that has it is, however that ended.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable

from headrace.errors import HeadraceError
from headrace.tensor_parallel.futex import Futex

SLOTS, SLOT_BYTES = 64, 16 << 10
HEAD = struct.Struct("=II")
ROOM = SLOT_BYTES - HEAD.size  # bytes of a frame in a slot
LINE = 16  # words: each counter has a cache line of its own
MASK = 2**32 - 1
SPIN_SECONDS = 50e-6  # before a reader sleeps: the next step is often that near, and waking up takes as long
LOOK_SECONDS = 0.5  # a sleeper looks whether there is still somebody to wait for
WRITTEN = 0


class RingError(HeadraceError):
    """A frame was lost or torn."""


def ring_bytes(readers: int) -> int:
    return 4 * LINE * (1 + 2 * readers) + SLOTS * SLOT_BYTES


def make_ring(readers: int, first: int = 0) -> int:
    """A file descriptor of a new ring, for one writer and so many readers. `first`: where the counters begin."""
    descriptor = os.memfd_create("headrace-ring")
    os.ftruncate(descriptor, ring_bytes(readers))
    if first:
        words = mmap.mmap(descriptor, ring_bytes(readers))
        for counter in range(1 + 2 * readers):
            struct.pack_into("=I", words, 4 * LINE * counter, first)
    return descriptor


def read_word(reader: int) -> int:
    """Index of the word that counts the slots which this reader has read."""
    return LINE * (1 + 2 * reader)


def echo_word(reader: int) -> int:
    return LINE * (2 + 2 * reader)


class _End:
    """One side of a ring."""

    def __init__(self, descriptor: int, readers: int):
        memory = memoryview(mmap.mmap(descriptor, ring_bytes(readers)))
        self._slots = 4 * LINE * (1 + 2 * readers)
        self._memory, self.futex = memory, Futex(memory[: self._slots])
        self.words = self.futex.words

    def _slot(self, count: int) -> int:
        """Where the slot begins that is the `count`-th to be written."""
        return self._slots + count % SLOTS * SLOT_BYTES


class Writer(_End):
    """`check` is called while it waits, and raises when there is nobody to wait for any more."""

    def __init__(self, descriptor: int, readers: int, check: Callable[[], None]):
        super().__init__(descriptor, readers)
        self._readers, self._check = [read_word(r) for r in range(readers)], check
        self._echoes = [echo_word(r) for r in range(readers)]
        self.number = self._written = self.words[WRITTEN]

    def send(self, frame: bytes) -> int:
        """Give everybody the frame; returns its number. After an exception the ring is of no use any more."""
        number = self.number = (self.number + 1) & MASK
        view = memoryview(frame)
        while True:
            self._wait_for_room()
            at, left = self._slot(self._written), len(view)
            HEAD.pack_into(self._memory, at, number, left)
            piece, view = view[:ROOM], view[ROOM:]
            self._memory[at + HEAD.size : at + HEAD.size + len(piece)] = piece
            self.futex.fence(WRITTEN)
            self._written = (self._written + 1) & MASK
            self.words[WRITTEN] = self._written
            self.futex.wake(WRITTEN)
            if left <= ROOM:
                return number

    def echoes(self) -> list[int]:
        """Of each reader, the number of the last frame that it has acted on."""
        return [self.words[echo] for echo in self._echoes]

    def _wait_for_room(self) -> None:
        for word in self._readers:
            while (self._written - (read := self.words[word])) & MASK >= SLOTS:
                self._check()
                self.futex.wait(word, read, LOOK_SECONDS)


class Reader(_End):
    """`check` as of Writer."""

    def __init__(self, descriptor: int, readers: int, reader: int, check: Callable[[], None]):
        super().__init__(descriptor, readers)
        self._word, self._echo, self._check = read_word(reader), echo_word(reader), check
        self._read = self.words[self._word]
        self.number = self.words[self._echo]

    def receive(self) -> bytes:
        """The next frame. Raises RingError if one was lost."""
        pieces: list[bytes] = []
        expected, missing = (self.number + 1) & MASK, None
        while missing != 0:
            self._wait()
            at = self._slot(self._read)
            number, left = HEAD.unpack_from(self._memory, at)
            if number != expected or (missing is not None and left != missing):
                raise RingError(f"frame {number}, {left} bytes of it, where frame {expected} was expected")
            stop = at + HEAD.size + min(left, ROOM)
            pieces.append(bytes(self._memory[at + HEAD.size : stop]))
            missing = max(0, left - ROOM)
            self.futex.fence(self._word)
            self._read = (self._read + 1) & MASK
            self.words[self._word] = self._read
            self.futex.wake(self._word)
        self.number = expected
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def echo(self) -> None:
        """The last frame has been acted on."""
        self.words[self._echo] = self.number

    def _wait(self) -> None:
        end = time.perf_counter() + SPIN_SECONDS
        while (written := self.words[WRITTEN]) == self._read:
            if time.perf_counter() > end:
                self._check()
                self.futex.wait(WRITTEN, written, LOOK_SECONDS)
        self.futex.fence(self._word)
