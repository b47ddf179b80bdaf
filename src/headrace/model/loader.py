"""Loads a checkpoint's weights straight into the decoder's fused tensors, on their device and in their dtype.

    worker 0:  file --> buffer 0 --> decode --> target          file --> buffer 0 --> ...
    worker 1:            file --> buffer 1 --> decode --> target          file --> ...

Each worker thread takes the next chunk that is left, so that reading, copying and decoding overlap. The staging buffers,
one per worker and a few megabytes at most on the CPU, pinned for CUDA, are all the host memory that it takes besides the
targets; quantized blocks are decoded on the target's device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.checkpoint import Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import DecoderWeights
from headrace.model.families import weight_plan
from headrace.model.formats.blocks import decode_rows
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.weight_names import IGNORED_SUFFIXES, WeightSpec

_CPU_CHUNK = 1 << 18  # bytes: with what it decodes to, it stays in a core's cache
_DEVICE_CHUNK = 1 << 25  # bytes: long enough for a transfer at full speed


def load_model(
    source: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: bool = False
) -> DecoderWeights:
    """The decoder's weights from `source`, in `dtype` on `device`; random ones if its format is dummy.

    `progress` draws a bar on stderr. Raises CheckpointError that names the tensor and the file: missing, unexpected or
    misshapen tensors, truncated files, missing shards.
    """
    plan = weight_plan(config)
    if source.format == "dummy":
        return DecoderWeights.from_tensors(random_tensors(source, config, plan, dtype, device), config)
    entries = source.tensors()
    plan = _checked_plan(source, plan, entries)
    tensors = load_tensors(plan, entries, dtype, device, progress)
    head, embedding = tensors.get("lm_head"), tensors["embedding"]
    if head is not None and torch.equal(head[0], embedding[0]) and torch.equal(head, embedding):
        del tensors["lm_head"]  # tied, but written out twice
    return DecoderWeights.from_tensors(tensors, config)


def _checked_plan(source: Checkpoint, plan: list[WeightSpec], entries: dict[str, TensorEntry]) -> list[WeightSpec]:
    """As `filled_plan`, after a check that nothing is left over either."""
    present = filled_plan(source.path, plan, entries)
    used = {name for spec in present for name, _ in spec.sources}
    for name in entries.keys() - used:
        if not name.endswith(IGNORED_SUFFIXES):
            raise CheckpointError(f"{entries[name].file}: the tensor {name!r} is unexpected for this architecture")
    untied = source.config.get("tie_word_embeddings") is False
    if untied and "lm_head.weight" not in used:
        raise CheckpointError(f"{source.path}: the tensor 'lm_head.weight' is missing, and the config says it is not tied")
    return present


def filled_plan(path: Path, plan: list[WeightSpec], entries: dict[str, TensorEntry]) -> list[WeightSpec]:
    """The part of `plan` that `entries` can fill. Raises CheckpointError if a tensor is missing or misshapen."""
    present = [spec for spec in plan if not spec.optional or any(name in entries for name, _ in spec.sources)]
    for spec in present:
        for name, rows in spec.sources:
            if (entry := entries.get(name)) is None:
                raise CheckpointError(f"{path}: the tensor {name!r} is missing")
            if entry.shape != (wanted := (rows, *spec.shape[1:])):
                raise CheckpointError(
                    f"{entry.file}: the tensor {entry.name!r} has shape {entry.shape}, the config asks for {wanted}"
                )
    return present


def random_tensors(
    source: Checkpoint, config: ModelConfig, plan: list[WeightSpec], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Weights of a model that was never trained: normal with deviation 0.02, norms around 1; the same at each call."""
    tied = source.config.get("tie_word_embeddings", config.family.startswith("gemma"))
    tensors = {}
    generator = torch.Generator(device)
    for i, spec in enumerate(plan):
        if spec.optional and tied:
            continue
        centre = 1.0 - config.norm_offset if "norm" in spec.target else 0.0
        tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        tensors[spec.target] = tensor.normal_(centre, 0.02, generator=generator.manual_seed(i))
    return tensors


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some rows of one tensor of a file and the rows of the target that they become."""

    entry: TensorEntry
    first_row: int
    num_rows: int
    target: str
    target_row: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.entry.row_bytes


def _chunks(plan: list[WeightSpec], entries: dict[str, TensorEntry], limit: int) -> Iterator[_Chunk]:
    """The plan in pieces of about `limit` bytes: whole rows, whole heads where halves are interleaved."""
    for spec in plan:
        row = 0
        for name, rows in spec.sources:
            entry = entries[name]
            unit = entry.head_dim or 1
            step = max(1, limit // (entry.row_bytes * unit)) * unit
            for first in range(0, rows, step):
                yield _Chunk(entry, first, min(step, rows - first), spec.target, row + first)
            row += rows


def load_tensors(
    plan: list[WeightSpec], entries: dict[str, TensorEntry], dtype: torch.dtype, device: torch.device, progress: bool = False
) -> dict[str, Tensor]:
    """{target: tensor} of a plan that `entries` fill."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    tensors = {spec.target: torch.empty(spec.shape, dtype=dtype, device=device) for spec in plan}
    limit, num_workers = (_CPU_CHUNK, min(torch.get_num_threads(), 8)) if device.type == "cpu" else (_DEVICE_CHUNK, 4)
    chunks = list(_chunks(plan, entries, limit))
    pending = _Pending(chunks)
    with _bar(sum(c.num_bytes for c in chunks), progress) as advance, _single_threaded_ops():
        with ThreadPoolExecutor(num_workers, "headrace-loader") as pool:
            workers = [pool.submit(_Worker(tensors, device, pending.size, advance).run, pending) for _ in range(num_workers)]
            try:
                wait(workers, return_when=FIRST_EXCEPTION)
            finally:
                pending.stop()
        for worker in workers:
            worker.result()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the workers' streams; whoever comes next may use another
    return tensors


class _Pending:
    """The chunks that no worker has taken yet."""

    def __init__(self, chunks: list[_Chunk]):
        self.size = max((chunk.num_bytes for chunk in chunks), default=0)
        self._chunks, self._lock = iter(chunks), threading.Lock()

    def take(self) -> _Chunk | None:
        with self._lock:
            return next(self._chunks, None)

    def stop(self) -> None:
        with self._lock:
            self._chunks = iter(())


class _Worker:
    """Reads chunks into its own staging buffer, decodes them on the device and puts them into the targets."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, size: int, advance: Callable[[int], None]):
        self._tensors, self._device, self._advance = tensors, device, advance
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None  # the last copy out of the buffer

    def run(self, pending: _Pending) -> None:
        with ExitStack() as stack:
            if self._device.type == "cuda":  # a thread's own current device is the first one
                stack.enter_context(torch.cuda.device(self._device))
            files: dict[Path, FileIO] = {}
            while (chunk := pending.take()) is not None:
                try:
                    if (file := files.get(chunk.entry.file)) is None:
                        file = files[chunk.entry.file] = stack.enter_context(chunk.entry.file.open("rb", buffering=0))
                    self._load(chunk, file)
                except OSError as error:
                    raise CheckpointError(f"{chunk.entry.file}: cannot be read: {error}") from error
                self._advance(chunk.num_bytes)

    def _load(self, chunk: _Chunk, file: FileIO) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        staged = self._buffer[: chunk.num_bytes]
        _read_exactly(file, chunk, staged.numpy().data)
        cuda = self._device.type == "cuda"
        raw = staged.to(self._device, non_blocking=cuda)  # elsewhere the copy must be over before the next read
        if cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        target = self._tensors[chunk.target]
        target[chunk.target_row : chunk.target_row + chunk.num_rows].copy_(decode_rows(chunk.entry, raw, chunk.num_rows))


@contextmanager
def _single_threaded_ops() -> Iterator[None]:
    """Threads started inside run each torch operation on themselves alone: they are the parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_exactly(file: FileIO, chunk: _Chunk, view: memoryview) -> None:
    file.seek(chunk.entry.offset + chunk.first_row * chunk.entry.row_bytes)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{chunk.entry.file}: the file ends inside the tensor {chunk.entry.name!r}")
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
