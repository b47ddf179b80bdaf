"""How many bytes a checkpoint's weights will take, from the headers of its files, without torch."""

from __future__ import annotations

import math

from headrace.config import EngineConfig
from headrace.engine.named_format import without_named_format
from headrace.lora.targets import num_bytes
from headrace.model.checkpoint import MADE, Checkpoint, another, resolve_checkpoint
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.formats.gguf import DECODED
from headrace.model.formats.tensor_file import FLOATS, TensorEntry
from headrace.model.weight_names import made_kind
from headrace.native.precision import choose_precision, stored_encodings

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# bytes of an element that is kept so, with its share of the scales
KEPT = {
    "F32": 4.0, "F16": 2.0, "BF16": 2.0, "F8": 36 / 32, "Q8_0": 34 / 32, "Q4_1": 20 / 32,
    "Q4_Z": 20 / 32, "Q4_0": 18 / 32, "fp8": 1.01, "int8": 1.01, "int4": 0.54,
}  # fmt: skip


def weight_bytes(config: EngineConfig, checkpoint: Checkpoint, on_card: bool) -> int:
    """Of the weights as the engine will hold them, by the headers of their files; those of a draft model, and places of
    adapters, too."""
    total = _weight_bytes(without_named_format(config, checkpoint), checkpoint, on_card)
    if config.takes_adapters:
        element = FLOAT_BYTES.get(config.dtype, 2 if on_card else 4)
        model = model_config_from_hf(checkpoint.config)
        total += num_bytes(model, config.max_loras, config.max_lora_rank, element, config.lora_experts)
    if config.speculative_model is not None:
        draft = another(EngineConfig(local_files_only=config.local_files_only), config.speculative_model)
        total += _weight_bytes(draft, resolve_checkpoint(draft), on_card)
    return total


def _weight_bytes(config: EngineConfig, checkpoint: Checkpoint, on_card: bool) -> int:
    model = model_config_from_hf(checkpoint.config)
    plan, by_name = weight_plan(model), {} if checkpoint.format == "dummy" else checkpoint.tensors()
    if by_name:
        plan = [spec for spec in plan if not spec.optional or any(name in by_name for name, _ in spec.sources)]
    elif checkpoint.ties_head(model.family):
        plan = [spec for spec in plan if not spec.optional]
    elements = sum(math.prod(spec.shape) for spec in plan)
    tensors = list(by_name.values())
    if not on_card:
        native = not config.enforce_eager and config.dtype != "float16"
        if not native or not tensors:  # torch computes in floats
            return elements * FLOAT_BYTES.get(config.dtype, 4)
        encodings = stored_encodings(checkpoint)
        precision = choose_precision(config, encodings)
        if checkpoint.gguf is None and checkpoint.quantized_to():  # its tensors are parts of matrices
            widest = max(KEPT[precision.format_of(encoding)] for encoding in encodings.difference(FLOATS))
            return max(int(elements * widest), sum(tensor.num_bytes for tensor in tensors))
        return sum(_kept_bytes(tensor, precision.format_of(tensor.encoding.name)) for tensor in tensors)
    floats, made = FLOAT_BYTES.get(config.dtype, 2), config.quantization if config.quantization in MADE else None
    if checkpoint.quantized_to() and config.quantization != "none":
        return sum(floats * math.prod(t.shape) if t.encoding.name in DECODED else t.num_bytes for t in tensors)
    kinds = [None if made is None else made_kind(spec, made) for spec in plan]
    return int(sum(math.prod(spec.shape) * (KEPT[kind] if kind else floats) for spec, kind in zip(plan, kinds, strict=True)))


def _kept_bytes(tensor: TensorEntry, kept_as: str) -> int:
    """Of a tensor that is kept in this format; one that is not a matrix stays in floats."""
    elements = math.prod(tensor.shape)
    if len(tensor.shape) < 2 and tensor.encoding.name in FLOATS:
        return elements * 4
    return int(elements * KEPT[kept_as]) if kept_as in KEPT else tensor.num_bytes
