"""Which modules of a model take adapters: those that its checkpoint names and that the decoder's fused products are made of."""

from __future__ import annotations

import re
from typing import NamedTuple

from headrace.model.config import ModelConfig
from headrace.model.families import weight_plan
from headrace.model.weight_names import WeightSpec

PRODUCTS = ("qkv", "q_b", "kv_b", "delta_gates", "o", "gate_up", "down", "shared_gate_up", "shared_down")  # of a layer
EXPERTS = {"experts_gate_up": "gate_up_proj", "experts_down": "down_proj"}  # as Transformers names the parameters of all
_TARGET = re.compile(rf"layers\.\d+\.({'|'.join(PRODUCTS)})")
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # of layers, in text models and in wrappers of them


class Size(NamedTuple):
    """Of a module, or of that one of several experts."""

    outputs: int
    inputs: int
    experts: int = 0  # whose matrices are in one tensor; 0: it is a module by itself


def specs_of(config: ModelConfig) -> list[WeightSpec]:
    """Of the products that take adapters. A file whose heads have tensors of their own in place of kv_b is none of PEFT's."""
    specs = [spec for spec in weight_plan(config) if _TARGET.fullmatch(spec.target)]
    return [spec for spec in specs if not spec.target.endswith(".kv_b") or len(spec.sources) == 1]


def expert_specs(config: ModelConfig) -> list[WeightSpec]:
    """Of the products of experts that tokens choose."""
    return [spec for spec in weight_plan(config) if spec.target.rpartition(".")[2] in EXPERTS]


def plain(name: str) -> str:
    """layers.3.self_attn.q_proj of a module's or tensor's name, whatever stands before its layers."""
    name = name.removesuffix(".weight")
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def together(target: str) -> str:
    """What modules_of calls the parameter of all experts that becomes the product `target`."""
    layer, _, name = target.rpartition(".")
    return f"{layer}.experts.{EXPERTS[name]}"


def num_bytes(config: ModelConfig, slots: int, rank: int, element: int, experts: bool = False) -> int:
    """Of the places of so many adapters for numbers of so many bytes, as kernels.lora.new_pair makes them."""
    filled = max(16, 1 << (rank - 1).bit_length())
    specs = specs_of(config)
    numbers = sum(len(spec.sources) * spec.shape[1] + spec.shape[0] for spec in specs)
    scales = sum(len(spec.sources) for spec in specs)
    count = config.experts.count if experts and config.experts is not None else 0
    for spec in expert_specs(config) if count else ():
        halves = count * halves_of(spec.target)
        numbers += halves * spec.shape[1] + spec.shape[0]
        scales += halves
    return slots * (filled * numbers * element + 4 * scales)


def halves_of(target: str) -> int:
    """Slices of an expert's product, each with an A of its own: gate and up."""
    return 2 if target.endswith("gate_up") else 1


def modules_of(config: ModelConfig, experts: bool = False) -> dict[str, Size]:
    """Name (see `plain`) -> size, of the whole model; `experts`: with those of experts that tokens choose, each by itself and
    all together."""
    found = {plain(name): Size(rows, spec.shape[1]) for spec in specs_of(config) for name, rows in spec.sources}
    if experts and config.experts is not None:
        count = config.experts.count
        for spec in expert_specs(config):
            found |= {plain(name): Size(rows, spec.shape[1]) for name, rows in spec.sources if "[" not in name}
            found[together(spec.target)] = Size(spec.shape[0] // count, spec.shape[1], count)
    return found
