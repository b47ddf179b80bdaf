"""Which part of each of a model's weights a rank has: rows of what makes heads, inner columns and logits, columns of what adds
them up. So a rank reads and holds what it runs, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.model.config import ModelConfig
from headrace.model.delta_weights import delta_part
from headrace.model.experts_weights import experts_part
from headrace.model.families import weight_plan
from headrace.model.latent_parts import latent_rows
from headrace.model.shard import WHOLE, Shard
from headrace.model.weight_names import Slice, WeightSpec


def parts_of(plan: list[WeightSpec], config: ModelConfig, shard: Shard) -> list[WeightSpec]:
    """The plan of the whole model `config`, cut for a rank; what it has nothing of is left out."""
    if shard.size == 1:
        return plan
    parts = (_part(spec, spec.target.rpartition(".")[2], _config_of(spec, config), shard) for spec in plan)
    return [part for part in parts if part is not None]


def weight_bytes(config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> int:
    """Of all weights that a rank of the whole model `config` may have, before anything is loaded."""
    plan = [spec for spec in weight_plan(config) if not spec.optional]
    parts = parts_of(plan, config, shard)
    return sum(math.prod(part.shape) * (4 if part.exact else dtype.itemsize) for part in parts)


def taken(whole: Tensor, spec: WeightSpec, part: WeightSpec) -> Tensor:
    """What `part` has of the tensor `whole` that `spec` describes."""
    if part.slices is None:
        return whole
    out, row = whole.new_zeros(part.shape), 0
    for name, rows, columns in part.slices:
        first = place_in(spec, name, rows.start)
        found = whole[first : first + len(rows)]
        out[row : row + len(rows)] = found if columns is None else found[:, columns.start : columns.stop]
        row += len(rows)
    return out


def _config_of(spec: WeightSpec, config: ModelConfig) -> ModelConfig:
    layer = spec.target.removeprefix("layers.").partition(".")[0]
    return config.at(int(layer)) if layer.isdigit() else config


def _part(spec: WeightSpec, name: str, config: ModelConfig, shard: Shard) -> WeightSpec | None:
    if config.experts is not None and name.startswith(("experts_", "shared_")):
        return experts_part(spec, name, config.experts, shard)
    if (delta := delta_part(spec, config, shard)) is not None:
        return delta
    heads, inner = _of_heads(config, shard), shard.part(config.intermediate_size)
    if config.latent is not None:
        own = latent_rows(name, config, config.latent, shard)
        if name in ("qkv", "q_b", "kv_b"):
            return spec if own is None else _rows(spec, own)
        heads = own or heads
    match name:
        case "embedding" | "lm_head":
            return _rows(spec, [shard.vocab(config.vocab_size)], shard.vocab_rows(config.vocab_size))
        case "layer_embedding":
            return _rows(spec, [shard.vocab(spec.shape[0])], shard.vocab_rows(spec.shape[0]))
        case "qkv" | "qkv_bias":
            return _rows(spec, [rows for rows in heads if rows.start < spec.shape[0]])  # all but what a layer has not
        case "q_norm" | "k_norm" if config.qk_norm == "full":
            first = config.q_size if name == "k_norm" else 0
            of = heads[1] if name == "k_norm" else heads[0]
            return _rows(spec, [range(of.start - first, of.stop - first)])
        case "gate_up" | "gate_up_bias":
            size = config.intermediate_size
            return _rows(spec, [inner, range(size + inner.start, size + inner.stop)][: 1 + config.gated])
        case "o" | "down":
            columns = heads[0] if name == "o" else inner
            (source, rows), *_ = spec.sources
            return replace(spec, shape=(rows, len(columns)), slices=(Slice(source, range(rows), columns),))
        case "sinks":
            return _rows(spec, [shard.part(config.num_heads)])
        case "o_bias" | "down_bias":  # added once to the sum of all parts
            return spec if shard.rank == 0 else None
    return spec


def _of_heads(config: ModelConfig, shard: Shard) -> list[range]:
    """Rows of the fused projection: of queries, keys and values."""
    size, q, kv = config.head_dim, config.q_size, config.kv_size
    own, kept = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads or 1)
    begins = ((0, own), (q, kept), (q + kv, kept))
    return [range(first + size * heads.start, first + size * heads.stop) for first, heads in begins]


def _rows(spec: WeightSpec, wanted: Sequence[range], num_rows: int | None = None) -> WeightSpec:
    """`wanted` rows of the stacked sources, none of them across two; with zeros behind them up to `num_rows`."""
    begins, slices = begins_of(spec), []
    for rows in wanted:
        name = next(n for n, count in spec.sources if begins[n] <= rows.start <= rows.stop <= begins[n] + count)
        slices.append(Slice(name, range(rows.start - begins[name], rows.stop - begins[name])))
    count = sum(map(len, wanted)) if num_rows is None else num_rows
    return replace(spec, shape=(count, *spec.shape[1:]), slices=tuple(slices))


def begins_of(spec: WeightSpec) -> dict[str, int]:
    """At which row of the stack each source begins."""
    begins, row = {}, 0
    for name, rows in spec.sources:
        begins[name] = row
        row += rows
    return begins


def place_in(spec: WeightSpec, name: str, row: int) -> int:
    """At which row of the stack a source's row lies."""
    begin = 0
    for source, rows, _ in spec.reads:
        if source == name and row in rows:
            return begin + row - rows.start
        begin += len(rows)
    raise ValueError(f"{spec.target} has no row {row} of {name}")
