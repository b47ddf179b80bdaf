"""Loads a checkpoint's weights straight into the decoder's fused tensors, on their device and in their dtype.

How the file is read is in streaming.py; quantized blocks are decoded on the target's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
from headrace.model.parts import parts_of, taken
from headrace.model.shard import WHOLE, Shard
from headrace.model.streaming import Chunk, ChunkQueue, ChunkWorker, chunks_of, load_chunks
from headrace.model.weight_names import IGNORED_SUFFIXES, WeightSpec

_CPU_CHUNK = 1 << 18  # bytes: with what it decodes to, it stays in a core's cache
_DEVICE_CHUNK = 1 << 25  # bytes: long enough for a transfer at full speed


def load_model(
    source: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: bool = False,
    shard: Shard = WHOLE,
) -> DecoderWeights:  # fmt: skip
    """The decoder's weights from `source`, in `dtype` on `device`; random ones if its format is dummy.

    `config` is the whole model's, and `shard` says which part of it is read.
    `progress` draws a bar on stderr. Raises CheckpointError that names the tensor and the file: missing, unexpected or
    misshapen tensors, truncated files, missing shards.
    """
    plan = weight_plan(config)
    if source.format == "dummy":
        return DecoderWeights.from_tensors(dict(random_tensors(source, config, plan, dtype, device, shard)), config)
    entries = source.tensors()
    plan = parts_of(checked_plan(source, plan, entries), config, shard)
    tensors = load_tensors(plan, entries, dtype, device, progress)
    head, embedding = tensors.get("lm_head"), tensors["embedding"]
    if head is not None and torch.equal(head[0], embedding[0]) and torch.equal(head, embedding):
        del tensors["lm_head"]  # tied, but written out twice
    return DecoderWeights.from_tensors(tensors, config)


def load_embedding(source: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The embedding alone [V, H]; the plan begins with it."""
    plan = weight_plan(config)[:1]
    if source.format == "dummy":
        return dict(random_tensors(source, config, plan, dtype, device))["embedding"]
    entries = source.tensors()
    return load_tensors(filled_plan(source.path, plan, entries), entries, dtype, device)["embedding"]


def checked_plan(source: Checkpoint, plan: list[WeightSpec], entries: dict[str, TensorEntry]) -> list[WeightSpec]:
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
    source: Checkpoint, config: ModelConfig, plan: list[WeightSpec], dtype: torch.dtype, device: torch.device,
    shard: Shard = WHOLE,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Weights of a model that was never trained, by target: normal with deviation 0.02, norms around 1; always the same. A
    rank takes its part of each, so that all together have the same model as one."""
    tied = source.config.get("tie_word_embeddings", config.family.startswith("gemma"))
    parts = {part.target: part for part in parts_of(plan, config, shard)}
    generator = torch.Generator(device)
    for i, spec in enumerate(plan):
        if (spec.optional and tied) or (part := parts.get(spec.target)) is None:
            continue
        centre = 1.0 - config.norm_offset if "norm" in spec.target else 0.0
        tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        yield spec.target, taken(tensor.normal_(centre, 0.02, generator=generator.manual_seed(i)), spec, part)


def load_tensors(
    plan: list[WeightSpec], entries: dict[str, TensorEntry], dtype: torch.dtype, device: torch.device, progress: bool = False
) -> dict[str, Tensor]:
    """{target: tensor} of a plan that `entries` fill."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    tensors = {spec.target: torch.empty(spec.shape, dtype=dtype, device=device) for spec in plan}
    for spec in plan:  # rows that stand for nothing
        tensors[spec.target][sum(len(part.rows) for part in spec.reads) :] = 0
    limit, num_workers = (_CPU_CHUNK, min(torch.get_num_threads(), 8)) if device.type == "cpu" else (_DEVICE_CHUNK, 4)
    queue = ChunkQueue(chunks_of(plan, entries, limit))
    load_chunks(queue, lambda: _ToTensors(tensors, device, queue.size), num_workers, progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the workers' streams; whoever comes next may use another
    return tensors


class _ToTensors(ChunkWorker):
    """Decodes chunks on the device and puts them into the targets."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, size: int):
        super().__init__(size, pinned=device.type == "cuda")
        self._tensors, self._device = tensors, device
        self._copied: torch.cuda.Event | None = None  # the last copy out of the buffer

    def run(self, queue: ChunkQueue, advance: Callable[[int], None]) -> None:
        # a thread's own current device is the first one
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            super().run(queue, advance)

    def wait_for_buffer(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def put(self, chunk: Chunk, staged: Tensor) -> None:
        cuda = self._device.type == "cuda"
        raw = staged.to(self._device, non_blocking=cuda)  # elsewhere the copy must be over before the next read
        if cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        target = self._tensors[chunk.target]
        target[chunk.target_row : chunk.target_row + chunk.num_rows].copy_(decode_rows(chunk.entry, raw, chunk.num_rows))
