"""Which modules of a model take adapters: those that its checkpoint names and that the decoder's fused products are made of."""

from __future__ import annotations

import re

from headrace.model.config import ModelConfig
from headrace.model.families import weight_plan
from headrace.model.weight_names import WeightSpec

PRODUCTS = ("qkv", "q_b", "kv_b", "delta_gates", "o", "gate_up", "down", "shared_gate_up", "shared_down")  # of a layer
_TARGET = re.compile(rf"layers\.\d+\.({'|'.join(PRODUCTS)})")
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # of layers, in text models and in wrappers of them


def specs_of(config: ModelConfig) -> list[WeightSpec]:
    """Of the products that take adapters. A file whose heads have tensors of their own in place of kv_b is none of PEFT's."""
    specs = [spec for spec in weight_plan(config) if _TARGET.fullmatch(spec.target)]
    return [spec for spec in specs if not spec.target.endswith(".kv_b") or len(spec.sources) == 1]


def plain(name: str) -> str:
    """layers.3.self_attn.q_proj of a module's or tensor's name, whatever stands before its layers."""
    name = name.removesuffix(".weight")
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def num_bytes(config: ModelConfig, slots: int, rank: int, element: int) -> int:
    """Of the places of so many adapters for numbers of so many bytes, as kernels.lora.new_pair makes them."""
    filled = max(16, 1 << (rank - 1).bit_length())
    specs = specs_of(config)
    numbers = sum(len(spec.sources) * spec.shape[1] + spec.shape[0] for spec in specs)
    return slots * (filled * numbers * element + 4 * sum(len(spec.sources) for spec in specs))


def modules_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name (see `plain`) -> (outputs, inputs), of the whole model."""
    specs = specs_of(config)
    return {plain(name): (rows, spec.shape[1]) for spec in specs for name, rows in spec.sources}
