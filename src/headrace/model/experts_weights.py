"""Which tensors of a checkpoint make up a layer's experts, and which of them a rank has: whole experts.

In a family's map of names (weight_names.py), those of experts are tensors rather than modules, with {} for an expert's number:
"mlp.experts.{}.up_proj.weight" is one of its own, "mlp.experts.up_proj[{}]" a part of one that all experts share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from headrace.errors import CheckpointError
from headrace.model.config import ModelConfig
from headrace.model.experts_config import ExpertsConfig
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.shard import Shard
from headrace.model.weight_names import PART, Slice, WeightSpec

_DENSE = ("gate_up", "down", "gate_up_bias", "down_bias")
_APART = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXACT = ("router", "router_bias", "correction", "shared_gate")


def experts_plan(plan: list[WeightSpec], config: ModelConfig, names: Mapping[str, tuple[str, ...]]) -> list[WeightSpec]:
    """`plan`, in which layers with experts have their weights in the place of the MLP's."""
    experts, found = config.experts, []
    assert experts is not None
    for spec in plan:
        _, _, rest = spec.target.partition(".")
        layer, _, name = rest.partition(".")
        if name not in _DENSE or not experts.at(int(layer)):
            found.append(spec)
        elif name == "gate_up":
            found += _of_layer(int(layer), experts, config.hidden_size, names)
    return found


def _of_layer(layer: int, experts: ExpertsConfig, hidden: int, names: Mapping[str, tuple[str, ...]]) -> list[WeightSpec]:
    count, inner, shared = experts.count, experts.inner, experts.shared_inner
    shapes: dict[str, tuple[int, int]] = {"router": (count, hidden)}  # rows, columns; 0: a vector
    if experts.router_bias:
        shapes["router_bias"] = (count, 0)
    if experts.correction:
        shapes["correction"] = (count, 0)
    shapes["experts_gate_up"], shapes["experts_down"] = (2 * inner, hidden), (hidden, inner)
    if experts.biases:
        shapes["experts_gate_up_bias"], shapes["experts_down_bias"] = (2 * inner, 0), (hidden, 0)
    if shared:
        shapes["shared_gate_up"], shapes["shared_down"] = (2 * shared, hidden), (hidden, shared)
        if experts.shared_gate:
            shapes["shared_gate"] = (1, hidden)
    plan = []
    for name, (rows, columns) in shapes.items():
        own = [f"model.layers.{layer}.{tensor}" for tensor in names[name]]
        stacked = [tensor.format(e) for e in range(count) for tensor in own] if name.startswith("experts_") else own
        total = rows * count if name.startswith("experts_") else rows
        sources = tuple((tensor, rows // len(own)) for tensor in stacked)
        shape = (total, columns) if columns else (total,)
        plan.append(WeightSpec(f"layers.{layer}.{name}", shape, sources, exact=name in _EXACT))
    return plan


def one_by_one(plan: list[WeightSpec], names: Collection[str]) -> list[WeightSpec]:
    """`plan` for a file with tensors of such `names`. Gemma 4's own files have a layer's experts in two tensors; those who
    quantize it write a module of each."""
    modules, found = {name.rpartition(".")[0] for name in names}, []
    for spec in plan:
        match = PART.fullmatch(spec.sources[0][0])
        prefix, _, kind = match[1].rpartition(".") if match else ("", "", "")
        own = _APART.get(kind, ())
        if not own or f"{prefix}.0.{own[0]}" not in modules:
            found.append(spec)
            continue
        experts = enumerate(rows for _, rows in spec.sources)
        sources = tuple((f"{prefix}.{e}.{part}.weight", rows // len(own)) for e, rows in experts for part in own)
        found.append(replace(spec, sources=sources))
    return found


def experts_part(spec: WeightSpec, name: str, experts: ExpertsConfig, shard: Shard) -> WeightSpec:
    """What a rank has of a weight whose name begins with experts_ or shared_."""
    if name.startswith("experts_"):
        each = len(spec.sources) // experts.count
        own = shard.part(experts.count)
        sources = spec.sources[own.start * each : own.stop * each]
        shape = (sum(rows for _, rows in sources), *spec.shape[1:])
        return replace(spec, shape=shape, slices=tuple(Slice(tensor, range(rows)) for tensor, rows in sources))
    inner = shard.part(experts.shared_inner)
    if name == "shared_down":
        ((source, rows),) = spec.sources
        return replace(spec, shape=(rows, len(inner)), slices=(Slice(source, range(rows), inner),))
    if name == "shared_gate_up":
        halves = (inner, range(experts.shared_inner + inner.start, experts.shared_inner + inner.stop))
        if len(spec.sources) == 1:
            slices = tuple(Slice(spec.sources[0][0], rows) for rows in halves)
        else:
            slices = tuple(Slice(source, inner) for source, _ in spec.sources)
        return replace(spec, shape=(2 * len(inner), spec.shape[1]), slices=slices)
    return spec


def with_parts(entries: Mapping[str, TensorEntry], plan: list[WeightSpec]) -> dict[str, TensorEntry]:
    """`entries`, of which those that all experts of a layer share are taken apart as the plan names them."""
    parts = [match for spec in plan for name, _ in spec.sources if (match := PART.fullmatch(name)) and match[1] in entries]
    wanted = Counter(match[1] for match in parts)
    found = {name: entry for name, entry in entries.items() if name not in wanted}
    for match in parts:
        whole, name = entries[match[1]], match[0]
        if whole.num_rows != (count := wanted[match[1]]):
            raise CheckpointError(f"{whole.file}: the tensor {match[1]!r} has {whole.num_rows} experts, the config {count}")
        offset = whole.offset + int(match[2]) * whole.row_bytes
        found[name] = replace(whole, name=name, shape=whole.shape[1:], offset=offset, num_bytes=whole.row_bytes)
    return found
