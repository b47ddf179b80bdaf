"""The weights of models that mix gated delta nets and attention with a gate: where they lie in a checkpoint, and a rank's part.

A delta net's projections take the places of attention's: `qkv` holds queries, keys, values and the gate of the output, `o` what
closes the layer. A gated attention has its gate behind queries, keys and values. In the file such rows may be sorted by head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from headrace.model.config import ModelConfig
from headrace.model.delta_config import DeltaConfig
from headrace.model.shard import Shard
from headrace.model.weight_names import Slice, WeightSpec

_ATTENTION = ("qkv", "q_norm", "k_norm", "o")


def delta_plan(plan: list[WeightSpec], config: ModelConfig) -> list[WeightSpec]:
    """A plan for attention in every layer, changed where a layer is a delta net, or attention has a gate."""
    assert config.delta is not None
    changed: list[WeightSpec] = []
    for spec in plan:
        prefix, _, name = spec.target.rpartition(".")
        layer = int(prefix.partition(".")[2] or -1)
        if layer < 0 or name not in _ATTENTION:
            changed.append(spec)
        elif not config.delta.layers[layer]:
            changed.append(_gated(spec, config) if name == "qkv" and config.attn_gate else spec)
        elif name == "qkv":
            changed += _delta_specs(config.delta, config.hidden_size, layer)
    return changed


def _gated(spec: WeightSpec, config: ModelConfig) -> WeightSpec:
    """In the file each head's queries are followed by their gate."""
    size, (q, _), *others = config.head_dim, *spec.sources
    queries, gates = (
        [Slice(q, range((2 * head + part) * size, (2 * head + part + 1) * size)) for head in range(config.num_heads)]
        for part in (0, 1)
    )
    slices = (*queries, *(Slice(name, range(rows)) for name, rows in others), *gates)
    rows = sum(len(part.rows) for part in slices)
    return replace(spec, shape=(rows, spec.shape[1]), sources=((q, 2 * config.q_size), *others), slices=slices)


def _delta_specs(delta: DeltaConfig, hidden: int, layer: int) -> list[WeightSpec]:
    heads, k, v = delta.value_heads, delta.q_size, delta.v_size
    prefix, target = f"model.layers.{layer}.linear_attn.", f"layers.{layer}."

    def matrix(name: str, rows: int, columns: int, *sources: tuple[str, int], slices: list[Slice] | None = None) -> WeightSpec:
        named = tuple((f"{prefix}{source}.weight", count) for source, count in sources)
        return WeightSpec(target + name, (rows, columns), named, slices=None if slices is None else tuple(slices))

    def exact(name: str, source: str, *shape: int) -> WeightSpec:
        return WeightSpec(target + name, shape, ((prefix + source, shape[0]),), exact=True)

    if delta.by_key_head:
        of_head = (delta.key_dim, delta.key_dim, delta.group * delta.value_dim, delta.group * delta.value_dim)
        qkvz = matrix(
            "qkv", 2 * k + 2 * v, hidden, ("in_proj_qkvz", 2 * k + 2 * v),
            slices=_by_kind(f"{prefix}in_proj_qkvz.weight", of_head, delta.key_heads),
        )  # fmt: skip
        gates = matrix(
            "delta_gates", 2 * heads, hidden, ("in_proj_ba", 2 * heads),
            slices=_by_kind(f"{prefix}in_proj_ba.weight", (delta.group, delta.group), delta.key_heads),
        )  # fmt: skip
    else:
        qkvz = matrix("qkv", 2 * k + 2 * v, hidden, ("in_proj_qkv", 2 * k + v), ("in_proj_z", v))
        gates = matrix("delta_gates", 2 * heads, hidden, ("in_proj_b", heads), ("in_proj_a", heads))
    return [
        qkvz,
        gates,
        exact("delta_conv", "conv1d.weight", delta.channels, 1, delta.kernel),
        exact("delta_decay", "A_log", heads),
        exact("delta_bias", "dt_bias", heads),
        exact("delta_norm", "norm.weight", delta.value_dim),
        matrix("o", hidden, v, ("out_proj", hidden)),
    ]


def _by_kind(name: str, of_head: Sequence[int], heads: int) -> list[Slice]:
    """Rows that lie by head, and within a head by kind, put in the order of kinds."""
    whole = sum(of_head)
    begins = [sum(of_head[:kind]) for kind in range(len(of_head))]
    return [
        Slice(name, range(head * whole + begin, head * whole + begin + count))
        for begin, count in zip(begins, of_head, strict=True)
        for head in range(heads)
    ]


# ---- a rank's part


def delta_part(spec: WeightSpec, config: ModelConfig, shard: Shard) -> WeightSpec | None:
    """What a rank has of a weight; None: of this one it is not said here."""
    if config.delta is None or not spec.target.startswith("layers."):
        return None
    _, layer, name = spec.target.split(".")
    if not config.delta.layers[int(layer)]:
        return _attention_part(spec, config, shard) if name == "qkv" and config.attn_gate else None
    delta = config.delta
    keys, values = shard.part(delta.key_heads), shard.part(delta.value_heads)
    q, v = _scaled(keys, delta.key_dim), _scaled(values, delta.value_dim)
    qkv = [q, _moved(q, delta.q_size), _moved(v, 2 * delta.q_size)]
    match name:
        case "qkv":
            return stacked_rows(spec, [*qkv, _moved(v, delta.channels)])
        case "delta_conv":
            return stacked_rows(spec, qkv)
        case "delta_gates":
            return stacked_rows(spec, [values, _moved(values, delta.value_heads)])
        case "delta_decay" | "delta_bias":
            return stacked_rows(spec, [values])
        case "delta_norm":
            return spec
        case "o":
            (source, rows), *_ = spec.sources
            return replace(spec, shape=(rows, len(v)), slices=(Slice(source, range(rows), v),))
    return None


def _attention_part(spec: WeightSpec, config: ModelConfig, shard: Shard) -> WeightSpec:
    q = _scaled(shard.part(config.num_heads), config.head_dim)
    kv = _scaled(shard.kv_heads(config.num_kv_heads), config.head_dim)
    begins = (config.q_size, config.q_size + config.kv_size, config.q_size + 2 * config.kv_size)
    return stacked_rows(spec, [q, _moved(kv, begins[0]), _moved(kv, begins[1]), _moved(q, begins[2])])


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)


def stacked_rows(spec: WeightSpec, wanted: Iterable[range]) -> WeightSpec:
    """Some rows of what a spec reads, wherever in its sources they lie."""
    slices, count = [], 0
    for rows in wanted:
        count += len(rows)
        begin = 0
        for name, held, columns in spec.reads:
            first, stop = max(rows.start - begin, 0), min(rows.stop - begin, len(held))
            if first < stop:
                slices.append(Slice(name, range(held.start + first, held.start + stop), columns))
            begin += len(held)
    return replace(spec, shape=(count, *spec.shape[1:]), slices=tuple(slices))
