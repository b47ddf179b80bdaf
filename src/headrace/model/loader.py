"""Loads a checkpoint's weights straight into the decoder's fused tensors, on their device and in their dtype.

How the file is read is in streaming.py; blocks are decoded on the target's device. Matrices that are held narrow are loaded by
narrow_loader.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.checkpoint import MADE, Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.experts_weights import one_by_one, with_parts
from headrace.model.families import family_of, weight_plan
from headrace.model.families_gemma4 import without_shared
from headrace.model.families_hybrid import QWEN35_MOE, fused_apart
from headrace.model.formats.blocks import decode_rows
from headrace.model.formats.gpt_oss_experts import gpt_oss_sources, is_random_mxfp4, random_mxfp4
from headrace.model.formats.quantized import quantization_of
from headrace.model.formats.quantized_matrix import MatrixSource
from headrace.model.formats.quantized_sources import quantized_sources
from headrace.model.formats.tensor_file import INTEGERS, TensorEntry
from headrace.model.gpt_oss import GPT_OSS
from headrace.model.narrow import compact, fitted, quantized
from headrace.model.narrow_loader import Source, load_matrices, narrow_sources, part_of
from headrace.model.parts import parts_of, taken
from headrace.model.rope_layout import in_halves
from headrace.model.shard import WHOLE, Shard
from headrace.model.streaming import Chunk, ChunkQueue, DeviceWorker, chunks_of, load_chunks
from headrace.model.weight import Weight, dequantized
from headrace.model.weight_names import IGNORED_PREFIXES, IGNORED_SUFFIXES, WeightSpec, drafting_layers, made_kind

logger = logging.getLogger(__name__)
_CPU_CHUNK = 1 << 18  # bytes: with what it decodes to, it stays in a core's cache
_DEVICE_CHUNK = 1 << 25  # bytes: long enough for a transfer at full speed


def load_model(
    source: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: bool = False,
    shard: Shard = WHOLE, quantization: str | None = None, narrow: bool | None = None,
) -> DecoderWeights:  # fmt: skip
    """The decoder's weights from `source`, in `dtype` on `device`; random ones if its format is dummy.

    `config` is the whole model's, and `shard` says which part of it is read.
    quantization: fp8, int8, int4: what becomes of matrices of floats; none: what the file holds narrow becomes floats, too.
    narrow: whether narrow weights are kept so, or decoded when they have been read: by default on a GPU they are.
    `progress` draws a bar on stderr. Raises CheckpointError that names the tensor and the file: missing, unexpected or
    misshapen tensors, truncated files, missing shards.
    """
    plan = plan_of(source, config)
    made = quantization if quantization in MADE else None
    keep = quantization != "none" and (device.type == "cuda" if narrow is None else narrow)
    if source.format == "dummy":
        random = random_weights(source, config, plan, dtype, device, shard, made, keep)
        return DecoderWeights.from_tensors(dict(random), config)
    found = without_shared(with_quantized(source, plan), config)
    entries = {name: in_halves(entry, name, config) for name, entry in found.items()}
    plan = parts_of(checked_plan(source, plan, entries), config, shard)
    tensors = load_weights(plan, narrow_sources(plan, entries, made, keep), dtype, device, keep, progress)
    head, embedding = tensors.get("lm_head"), tensors["embedding"]
    if isinstance(head, Tensor) and isinstance(embedding, Tensor) and _equal(head, embedding):
        del tensors["lm_head"]  # tied, but written out twice
    return DecoderWeights.from_tensors(tensors, config)


def _equal(one: Tensor, other: Tensor) -> bool:
    """The first row tells nearly always."""
    return torch.equal(one[0], other[0]) and torch.equal(one, other)


def plan_of(source: Checkpoint, config: ModelConfig) -> list[WeightSpec]:
    """What makes up the model's weights, as the checkpoint has it."""
    plan = weight_plan(config)
    if source.format == "dummy" or config.experts is None or config.per_layer is None:
        return plan
    return one_by_one(plan, source.tensors())


def with_quantized(source: Checkpoint, plan: list[WeightSpec]) -> dict[str, Source]:
    """The checkpoint's tensors, with one source for those that make up a quantized matrix of `plan`."""
    entries, quantization = source.tensors(), quantization_of(source.config)
    if family_of(source.config) == QWEN35_MOE:
        entries = fused_apart(entries)
    entries = with_parts(entries, plan)
    if family_of(source.config) == GPT_OSS:
        return gpt_oss_sources(entries, plan)
    if quantization is None:
        return _floats_alone(entries, plan)
    matrices = [(name, (rows, spec.shape[1])) for spec in plan if len(spec.shape) == 2 for name, rows in spec.sources]
    found = quantized_sources(entries, quantization, matrices)
    planned = {name for spec in plan for name, _ in spec.sources}
    for name in [name for name in found if name.endswith(".bias") and name not in planned]:
        if isinstance(found.get(name.removesuffix("bias") + "weight"), MatrixSource) and _is_zero(entries[name]):
            del found[name]  # AutoGPTQ wrote one for every layer
    return found


def _floats_alone(entries: Mapping[str, TensorEntry], plan: list[WeightSpec]) -> dict[str, Source]:
    """Raises CheckpointError for integers, of which nothing says what they stand for."""
    for entry in (entries[name] for spec in plan for name, _ in spec.sources if name in entries):
        if entry.encoding.name in INTEGERS:
            why = "and config.json has no quantization_config that says what they stand for: a whole copy, or the floats"
            raise CheckpointError(f"{entry.file}: the tensor {entry.name!r} holds integers ({entry.encoding.name}), {why}")
    return dict(entries)


def _is_zero(entry: TensorEntry) -> bool:
    spec = WeightSpec("vector", entry.shape, ((entry.name, entry.num_rows),))
    return not load_tensors([spec], {entry.name: entry}, torch.float32, torch.device("cpu"))["vector"].any()


def load_weights(
    plan: list[WeightSpec], entries: Mapping[str, Source], dtype: torch.dtype, device: torch.device,
    keep: bool, progress: bool = False,
) -> dict[str, Tensor | Weight]:  # fmt: skip
    """{target: tensor, or narrow weight} of a plan that `entries` fill."""
    plain = {name: entry for name, entry in entries.items() if isinstance(entry, TensorEntry)}
    floats = [spec for spec in plan if all(name in plain for name, _ in spec.sources)]
    tensors: dict[str, Tensor | Weight] = {**load_tensors(floats, plain, dtype, device, progress)}
    if matrices := [spec for spec in plan if spec.target not in tensors]:
        made = load_matrices(matrices, entries, dtype, device, keep, progress)
        tensors |= {target: weight.data if weight.kind == "float" else weight for target, weight in made.items()}
    return tensors


def load_embedding(source: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The embedding alone [V, H]; the plan begins with it."""
    plan = weight_plan(config)[:1]
    if source.format == "dummy":
        return dict(random_tensors(source, config, plan, dtype, device))["embedding"]
    entries = with_quantized(source, plan)
    (embedding,) = load_weights(filled_plan(source.path, plan, entries), entries, dtype, device, False).values()
    assert isinstance(embedding, Tensor)
    return embedding


def checked_plan(source: Checkpoint, plan: list[WeightSpec], entries: Mapping[str, Source]) -> list[WeightSpec]:
    """As `filled_plan`, after a check that nothing is left over either."""
    present = filled_plan(source.path, plan, entries)
    used = {name for spec in present for name, _ in spec.sources}
    drafting = drafting_layers(source.config)
    if any(name.startswith(drafting) for name in entries):
        logger.info("%s: the layers that draft tokens (%s) are left out", source.name, ", ".join(drafting))
    for name in entries.keys() - used:
        if not name.endswith(IGNORED_SUFFIXES) and not name.startswith((*IGNORED_PREFIXES, *drafting)):
            raise CheckpointError(f"{entries[name].file}: the tensor {name!r} is unexpected for this architecture")
    untied = source.config.get("tie_word_embeddings") is False
    if untied and "lm_head.weight" not in used:
        raise CheckpointError(f"{source.path}: the tensor 'lm_head.weight' is missing, and the config says it is not tied")
    return present


def filled_plan(path: Path, plan: list[WeightSpec], entries: Mapping[str, Source]) -> list[WeightSpec]:
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
    tied = source.ties_head(config.family)
    parts = {part.target: part for part in parts_of(plan, config, shard)}
    generator = torch.Generator(device)
    for i, spec in enumerate(plan):
        if (spec.optional and tied) or (part := parts.get(spec.target)) is None:
            continue
        centre = 1.0 - config.norm_offset if "norm" in spec.target else 0.0
        tensor = torch.empty(spec.shape, dtype=torch.float32 if spec.exact else dtype, device=device)
        yield spec.target, taken(tensor.normal_(centre, 0.02, generator=generator.manual_seed(i)), spec, part)


def random_weights(
    source: Checkpoint, config: ModelConfig, plan: list[WeightSpec], dtype: torch.dtype, device: torch.device, shard: Shard,
    made: str | None, keep: bool,
) -> Iterator[tuple[str, Tensor | Weight]]:  # fmt: skip
    """As `random_tensors`, of which matrices become what a file's would; a whole one is there for a moment only."""
    specs = {spec.target: spec for spec in plan}
    parts = {part.target: part for part in parts_of(plan, config, shard)}
    if made is None:
        narrow = [spec for spec in plan if is_random_mxfp4(source.config, spec)]
        for i, spec in enumerate(narrow):
            matrix = random_mxfp4(spec.shape, device, torch.Generator(device).manual_seed(i))
            weight = compact(part_of(matrix, spec, parts[spec.target], dtype), parts[spec.target].shape[0])
            yield spec.target, weight if keep else dequantized(weight, dtype)[:, : spec.shape[1]].contiguous()
        floats = [spec for spec in plan if spec not in narrow]
        yield from random_tensors(source, config, floats, dtype, device, shard)
        return
    for target, tensor in random_tensors(source, config, plan, dtype, device):
        if (part := parts.get(target)) is None:
            continue
        if (kind := made_kind(part, made)) is not None:
            weight = part_of(fitted(quantized(tensor, kind)), specs[target], part, dtype)
            yield target, compact(weight, part.shape[0]) if keep else dequantized(weight, dtype)
        else:
            yield target, taken(tensor, specs[target], part)


def load_tensors(
    plan: list[WeightSpec], entries: Mapping[str, TensorEntry], dtype: torch.dtype, device: torch.device, progress: bool = False
) -> dict[str, Tensor]:
    """{target: tensor} of a plan that `entries` fill."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    dtypes = {spec.target: torch.float32 if spec.exact else dtype for spec in plan}
    tensors = {spec.target: torch.empty(spec.shape, dtype=dtypes[spec.target], device=device) for spec in plan}
    for spec in plan:  # rows that stand for nothing
        tensors[spec.target][sum(len(part.rows) for part in spec.reads) :] = 0
    limit, num_workers = (_CPU_CHUNK, min(torch.get_num_threads(), 8)) if device.type == "cpu" else (_DEVICE_CHUNK, 4)
    queue = ChunkQueue(chunks_of(plan, entries, limit))
    load_chunks(queue, lambda: _ToTensors(tensors, device, queue.size), num_workers, progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the workers' streams; whoever comes next may use another
    return tensors


class _ToTensors(DeviceWorker):
    """Decodes chunks on the device and puts them into the targets."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, size: int):
        super().__init__(size, device)
        self._tensors = tensors

    def put(self, chunk: Chunk, staged: Tensor) -> None:
        rows = decode_rows(chunk.entry, self.to_device(staged), chunk.num_rows)
        self._tensors[chunk.target][chunk.target_row : chunk.target_row + chunk.num_rows].copy_(rows)
