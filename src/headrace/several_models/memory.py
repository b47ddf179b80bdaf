"""How much memory models may take together, and how much of it each gets: from their checkpoints' headers, without torch.

A model's share is known before it is loaded; its core divides it by its own memory plan (worker/memory_plan.py) among weights,
KV cache and what a step computes with, and refuses to start if it is too small. So what is loaded never takes more than the sum
of the shares, and the sum never exceeds the budget.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from headrace.config import EngineConfig
from headrace.engine.placement import num_cards
from headrace.errors import CapacityError
from headrace.machine import available_memory
from headrace.model.checkpoint import Checkpoint, resolve_checkpoint
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.formats.tensor_file import FLOATS, TensorEntry
from headrace.native.precision import choose_precision, stored_encodings

GIB = 1 << 30
HOST_SHARE = 0.9  # of the free memory: other programs want some, too
FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# bytes of an element that is kept so, with its share of the scales
KEPT = {
    "F32": 4.0, "F16": 2.0, "BF16": 2.0, "F8": 36 / 32, "Q8_0": 34 / 32, "Q4_1": 20 / 32,
    "Q4_Z": 20 / 32, "Q4_0": 18 / 32, "fp8": 1.01, "int8": 1.01, "int4": 0.54,
}  # fmt: skip


def budget_of(config: EngineConfig, wanted: int | None) -> tuple[int, bool]:
    """Bytes that models may take together, and whether they are a card's. `wanted`: what the operator has said."""
    on_card = config.device != "cpu" and num_cards() > 0
    if wanted is not None:
        return wanted, on_card
    if on_card:
        return int(card_bytes() * config.gpu_memory_utilization), True
    return int(available_memory() * HOST_SHARE), False


def card_bytes() -> int:
    """Of the first card that CUDA sees. No context is made."""
    cuda, device, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.c_size_t(0)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        raise CapacityError("the driver does not say how much memory the card has: give --model-memory-bytes")
    return size.value


def weight_bytes(config: EngineConfig, checkpoint: Checkpoint, on_card: bool) -> int:
    """Of the weights as the engine will hold them, by the headers of their files; those of a draft model too."""
    total = _weight_bytes(config, checkpoint, on_card)
    if config.speculative_model is not None:
        draft = EngineConfig(model=config.speculative_model, local_files_only=config.local_files_only)
        total += _weight_bytes(draft, resolve_checkpoint(draft), on_card)
    return total


def _weight_bytes(config: EngineConfig, checkpoint: Checkpoint, on_card: bool) -> int:
    plan = weight_plan(model_config_from_hf(checkpoint.config))
    by_name = {} if checkpoint.format == "dummy" else checkpoint.tensors()
    elements = sum(
        math.prod(spec.shape) for spec in plan if not spec.optional or any(name in by_name for name, _ in spec.sources)
    )
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
    if checkpoint.quantized_to() and config.quantization != "none":
        return sum(tensor.num_bytes for tensor in tensors)
    made = config.quantization if config.quantization in KEPT else None
    return int(elements * (FLOAT_BYTES.get(config.dtype, 2) if made is None else KEPT[made]))


def _kept_bytes(tensor: TensorEntry, kept_as: str) -> int:
    """Of a tensor that is kept in this format; one that is not a matrix stays in floats."""
    elements = math.prod(tensor.shape)
    if len(tensor.shape) < 2 and tensor.encoding.name in FLOATS:
        return elements * 4
    return int(elements * KEPT[kept_as]) if kept_as in KEPT else tensor.num_bytes


def shares(budget: int, weights: Sequence[int], asked: Sequence[int | None]) -> list[int]:
    """Bytes of each model: what was asked for, else its weights and an even part of what the weights of all leave; where that
    is less than a GiB, as when not all fit at once, at least an eighth of what its own weights leave."""
    even = (budget - sum(weights)) // len(weights)

    def room(weight: int) -> int:
        return even if even >= GIB else max(even, (budget - weight) // 8)

    return [
        min(budget, weight + room(weight)) if wanted is None else wanted for weight, wanted in zip(weights, asked, strict=True)
    ]


def most_at_once(budget: int, sizes: Sequence[int], pinned: Sequence[bool]) -> int:
    """How many models may be in memory at the same time."""
    left, count = budget - sum(size for size, stays in zip(sizes, pinned, strict=True) if stays), sum(pinned)
    for size in sorted(size for size, stays in zip(sizes, pinned, strict=True) if not stays):
        left -= size
        count += left >= 0
    return max(1, count)


def check_room(budget: int, names: Sequence[str], weights: Sequence[int], sizes: Sequence[int], pinned: Sequence[bool]) -> None:
    """Raises CapacityError for what can never be loaded."""
    stay = sum(size for size, stays in zip(sizes, pinned, strict=True) if stays)
    if stay > budget:
        raise CapacityError(f"the pinned models take {stay / GIB:.2f} GiB together, of a budget of {budget / GIB:.2f} GiB")
    for name, weight, size, stays in zip(names, weights, sizes, pinned, strict=True):
        room = budget if stays else budget - stay
        if size > room or weight >= size:
            beside = " beside the pinned models" if stay and not stays else ""
            raise CapacityError(
                f"the model {name} can never be loaded{beside}: its weights (with kv_cache_bytes) take {weight / GIB:.2f} GiB, "
                f"its share is {size / GIB:.2f}, and the room {room / GIB:.2f} of {budget / GIB:.2f} GiB (model-memory-bytes)"
            )
