"""Reads the rows of a plan out of a checkpoint's files, chunk by chunk, in threads of which each hands on what it read.

    worker 0:  file --> buffer 0 --> put (decode, pack, copy)          file --> buffer 0 --> ...
    worker 1:            file --> buffer 1 --> put                       file --> ...

Each worker takes the next chunk that is left, so that reading, copying and decoding overlap. The buffers, one per worker and a
few megabytes at most on the CPU, pinned for CUDA, are all the host memory that it takes besides the targets. Files are read,
not mapped: one that is cut short meanwhile is an error and not the end of the process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from io import FileIO
from math import lcm
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.weight_names import WeightSpec


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of one tensor of a file and the rows of the target that they become."""

    entry: TensorEntry
    first_row: int
    num_rows: int
    target: str
    target_row: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.entry.row_bytes

    @property
    def reads(self) -> Iterable[tuple[Chunk, int]]:
        """Itself, at the buffer's beginning."""
        return ((self, 0),)


class Readable(Protocol):
    """What a worker reads at once: some rows of each of a few tensors, and where in its buffer they are to lie."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def reads(self) -> Iterable[tuple[Chunk, int]]: ...


def chunks_of(plan: list[WeightSpec], entries: Mapping[str, TensorEntry], limit: int, unit: int = 1) -> Iterator[Chunk]:
    """The plan in pieces of about `limit` bytes: whole rows, multiples of `unit` of them or to a tensor's end, and whole heads
    where halves are interleaved."""
    for spec in plan:
        row = 0
        for name, rows, columns in spec.reads:
            entry = entries[name] if columns is None else entries[name].columns(columns)
            together = lcm(unit, entry.together)
            step = max(1, limit // (entry.row_bytes * together)) * together
            for first in rows[::step]:
                yield Chunk(entry, first, min(step, rows.stop - first), spec.target, row + first - rows.start)
            row += len(rows)


class ChunkQueue:
    """The chunks that no worker has taken yet."""

    def __init__(self, chunks: Iterable[Readable]):
        waiting = list(chunks)
        self.size = max((chunk.num_bytes for chunk in waiting), default=0)
        self.total = sum(chunk.num_bytes for chunk in waiting)
        self._chunks, self._lock = iter(waiting), threading.Lock()

    def take(self) -> Any:
        with self._lock:
            return next(self._chunks, None)

    def stop(self) -> None:
        with self._lock:
            self._chunks = iter(())


class ChunkWorker(ABC):
    """Reads chunks into its own staging buffer of `size` bytes and puts them where they belong."""

    def __init__(self, size: int, pinned: bool = False):
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def wait_for_buffer(self) -> None:  # noqa: B027  (a hook: most need none)
        """Until the buffer may be written again."""

    @abstractmethod
    def put(self, chunk: Any, staged: Tensor) -> None:
        """`chunk`: as the queue holds them. `staged`: the chunk's bytes, of which the buffer is used again."""

    def run(self, queue: ChunkQueue, advance: Callable[[int], None]) -> None:
        with ExitStack() as stack:
            files: dict[Path, FileIO] = {}
            while (chunk := queue.take()) is not None:
                self.wait_for_buffer()
                staged = self._buffer[: chunk.num_bytes]
                for part, place in chunk.reads:
                    path = part.entry.file
                    try:
                        if (file := files.get(path)) is None:
                            file = files[path] = stack.enter_context(path.open("rb", buffering=0))
                        _read_exactly(file, part, staged[place : place + part.num_bytes].numpy().data)
                    except OSError as error:
                        raise CheckpointError(f"{path}: cannot be read: {error}") from error
                self.put(chunk, staged)
                advance(chunk.num_bytes)


class DeviceWorker(ChunkWorker):
    """One whose bytes go to a device: on a card the next read overlaps the copy of the one before."""

    def __init__(self, size: int, device: torch.device):
        super().__init__(size, pinned=device.type == "cuda")
        self._device = device
        self._copied: torch.cuda.Event | None = None  # the last copy out of the buffer

    def run(self, queue: ChunkQueue, advance: Callable[[int], None]) -> None:
        # a thread's own current device is the first one
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            super().run(queue, advance)

    def wait_for_buffer(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def to_device(self, staged: Tensor) -> Tensor:
        cuda = self._device.type == "cuda"
        raw = staged.to(self._device, non_blocking=cuda)  # elsewhere the copy must be over before the next read
        if cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return raw


def load_chunks(queue: ChunkQueue, make_worker: Callable[[], ChunkWorker], num_workers: int, progress: bool) -> None:
    """Run workers until the queue is empty, or one fails. `progress` draws a bar on stderr."""
    with _bar(queue.total, progress) as advance, _single_threaded_ops():
        with ThreadPoolExecutor(num_workers, "headrace-loader") as pool:
            workers = [pool.submit(make_worker().run, queue, advance) for _ in range(num_workers)]
            try:
                wait(workers, return_when=FIRST_EXCEPTION)
            finally:
                queue.stop()
        for worker in workers:
            worker.result()


@contextmanager
def _single_threaded_ops() -> Iterator[None]:
    """Threads started inside run each torch operation on themselves alone: they are the parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_exactly(file: FileIO, chunk: Chunk, view: memoryview) -> None:
    """All rows at once where they lie one behind the other."""
    entry, at_once = chunk.entry, chunk.entry.row_bytes if chunk.entry.stride else len(view)
    place = entry.offset + chunk.first_row * (entry.stride or entry.row_bytes)
    for begin in range(0, len(view), max(1, at_once)):
        file.seek(place)
        place, done, piece = place + entry.stride, 0, view[begin : begin + at_once]
        while done < at_once:
            count = file.readinto(piece[done:])
            if not count:
                raise CheckpointError(f"{entry.file}: the file ends inside the tensor {entry.name!r}")
            done += count


@contextmanager
def _bar(total: int, enabled: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes on stderr; the yielded function advances it."""
    if not enabled:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda num_bytes: bar.update(task, advance=num_bytes)
