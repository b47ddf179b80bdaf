"""Loads a checkpoint's weights straight into the decoder's fused tensors, on their device and in their dtype.

    reader thread:  file --> buffer 0   file --> buffer 1   file --> buffer 0 ...
    this thread:                 buffer 0 --> decode --> target     buffer 1 --> ...

Two staging buffers of a few megabytes (pinned for CUDA) are all the host memory that it takes besides the targets;
quantized blocks are decoded on the target's device.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.blocks import decode_rows
from headrace.model.checkpoint import Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import DecoderWeights
from headrace.model.families import weight_plan
from headrace.model.tensor_file import TensorEntry
from headrace.model.weight_names import IGNORED_SUFFIXES, WeightSpec

_CHUNK_BYTES = {"cpu": 1 << 21, "cuda": 1 << 25}  # of a staging buffer: what the caches hold; what fills a PCIe transfer


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
    tensors = _load_tensors(plan, entries, dtype, device, progress)
    if "lm_head" in tensors and torch.equal(tensors["lm_head"], tensors["embedding"]):
        del tensors["lm_head"]  # tied, but written out twice
    return DecoderWeights.from_tensors(tensors, config)


def _checked_plan(source: Checkpoint, plan: list[WeightSpec], entries: dict[str, TensorEntry]) -> list[WeightSpec]:
    """The part of `plan` that `entries` can fill, after a check that nothing is missing, misshapen or left over."""
    present = [spec for spec in plan if not spec.optional or any(name in entries for name, _ in spec.sources)]
    used: set[str] = set()
    for spec in present:
        for name, rows in spec.sources:
            if (entry := entries.get(name)) is None:
                raise CheckpointError(f"{source.path}: the tensor {name!r} is missing")
            if entry.shape != (rows, *spec.shape[1:]):
                wanted = (rows, *spec.shape[1:])
                raise CheckpointError(
                    f"{entry.file}: the tensor {name!r} has shape {entry.shape}, the config asks for {wanted}"
                )
            used.add(name)
    for name in entries.keys() - used:
        if not name.endswith(IGNORED_SUFFIXES):
            raise CheckpointError(f"{entries[name].file}: the tensor {name!r} is unexpected for this architecture")
    untied = source.config.get("tie_word_embeddings") is False
    if untied and "lm_head.weight" not in used:
        raise CheckpointError(f"{source.path}: the tensor 'lm_head.weight' is missing, and the config says it is not tied")
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


def _load_tensors(
    plan: list[WeightSpec], entries: dict[str, TensorEntry], dtype: torch.dtype, device: torch.device, progress: bool
) -> dict[str, Tensor]:
    chunks = list(_chunks(plan, entries, _CHUNK_BYTES.get(device.type, 1 << 21)))
    shapes = {spec.target: spec.shape for spec in plan}
    tensors: dict[str, Tensor] = {}
    with _Staging(chunks, device) as staging, _bar(sum(c.num_bytes for c in chunks), progress) as advance:
        for chunk, raw in staging:
            if (target := tensors.get(chunk.target)) is None:
                target = tensors[chunk.target] = torch.empty(shapes[chunk.target], dtype=dtype, device=device)
            rows = decode_rows(chunk.entry, raw, chunk.num_rows)
            target[chunk.target_row : chunk.target_row + chunk.num_rows].copy_(rows)
            advance(chunk.num_bytes)
    return tensors


@dataclass(slots=True)
class _Buffer:
    memory: Tensor  # uint8 on the host
    reusable: torch.cuda.Event | None = None  # the copy out of it is done


class _Staging:
    """Iterates over (chunk, its bytes on the device) while a thread reads ahead into the other of two buffers."""

    def __init__(self, chunks: list[_Chunk], device: torch.device):
        self._chunks, self._device = chunks, device
        size = max((c.num_bytes for c in chunks), default=0)
        pinned = device.type == "cuda"
        self._free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()  # None: stop
        self._full: queue.SimpleQueue[_Buffer | BaseException] = queue.SimpleQueue()
        for _ in range(2):
            self._free.put(_Buffer(torch.empty(size, dtype=torch.uint8, pin_memory=pinned)))
        self._thread = threading.Thread(target=self._read_all, name="headrace-loader", daemon=True)

    def __enter__(self) -> _Staging:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._free.put(None)
        self._thread.join()

    def __iter__(self) -> Iterator[tuple[_Chunk, Tensor]]:
        for chunk in self._chunks:
            buffer = self._full.get()
            if isinstance(buffer, BaseException):
                raise buffer
            raw = buffer.memory[: chunk.num_bytes].to(self._device, non_blocking=True)
            if self._device.type == "cuda":
                buffer.reusable = torch.cuda.Event()
                buffer.reusable.record()
            yield chunk, raw
            self._free.put(buffer)

    def _read_all(self) -> None:
        """The thread: fills buffers in the order of the chunks; an error goes to the other side and ends it."""
        files: dict[Path, BinaryIO] = {}
        try:
            for chunk in self._chunks:
                if (buffer := self._free.get()) is None:
                    return
                if buffer.reusable is not None:
                    buffer.reusable.synchronize()
                if (file := files.get(chunk.entry.file)) is None:
                    file = files[chunk.entry.file] = chunk.entry.file.open("rb", buffering=0)
                _read_exactly(file, chunk, buffer.memory.numpy().data[: chunk.num_bytes])
                self._full.put(buffer)
        except OSError as error:
            self._full.put(CheckpointError(f"{chunk.entry.file}: cannot be read: {error}"))
        except BaseException as error:
            self._full.put(error)
        finally:
            for file in files.values():
                file.close()


def _read_exactly(file: BinaryIO, chunk: _Chunk, view: memoryview) -> None:
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda num_bytes: bar.update(task, advance=num_bytes)
