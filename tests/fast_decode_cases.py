"""Small models, their random weights and decode batches for the tests of the fused decode step."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.cache import fp8
from headrace.cache.kv_cache import KVCache
from headrace.cache.state_pool import StatePool
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.decoder_weights import MATRICES, DecoderWeights, LayerWeights
from headrace.model.delta_config import DeltaConfig
from headrace.model.experts_config import ExpertsConfig
from headrace.model.weight import Weight
from narrow_cases import narrow

PLAIN = ModelConfig(
    family="llama", vocab_size=90, hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=80, max_position=256, rope=RopeConfig(1e4, 16), attn_scale=0.25,
)  # fmt: skip
CONFIGS = {
    "plain": PLAIN,
    "qwen3": replace(PLAIN, qk_norm="head", head_dim=32, rope=RopeConfig(1e4, 32)),
    "qwen2, window in one layer": replace(PLAIN, qkv_bias=True, o_bias=True, windows=(0, 20), attn_softcap=5.0),
    "granite": replace(PLAIN, residual_scale=0.3, embed_scale=6.0, logit_scale=0.2, attn_scale=0.1, num_kv_heads=1),
    "other activation, offset, partial rotation": replace(
        PLAIN, activation="gelu_tanh", norm_offset=1.0, rope=RopeConfig(1e4, 8), logit_softcap=4.0, num_kv_heads=4
    ),
    "gemma": replace(
        PLAIN, family="gemma3_text", norm_place="sandwich", norm_offset=1.0, qk_norm="head", activation="gelu_tanh", attn_softcap=5.0, logit_softcap=4.0,
        windows=(20, 0), rope_local=RopeConfig(1e3, 16), residual_scale=0.7, o_bias=True,
    ),
    "experts in one layer": replace(
        PLAIN, residual_scale=0.5, norm_offset=1.0,
        experts=ExpertsConfig(6, 2, 24, renormalize=True, correction=True, router_bias=True, biases=True, layers=(True, False)),
    ),
    "gpt-oss": replace(
        PLAIN, qkv_bias=True, o_bias=True, windows=(20, 0), sinks=True,
        experts=ExpertsConfig(6, 2, 24, score="chosen", correction=True, router_bias=True, biases=True, clamp=0.5),
    ),
    "delta net": replace(
        PLAIN, qk_norm="head", norm_offset=1.0, attn_gate=True, head_dim=32, rope=RopeConfig(1e4, 8),
        delta=DeltaConfig(2, 4, 16, 16, 4, layers=(True, False)),
    ),
}  # fmt: skip


def random_weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float | None = None, mean: float = 0.0) -> Tensor:
        scale = shape[-1] ** -0.5 if scale is None else scale
        return (torch.randn(*shape, generator=generator) * scale + mean).to(dtype)

    hidden, q, kv, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size

    def norm(width: int) -> Tensor:
        return draw(width, scale=0.2, mean=1.0 - config.norm_offset)

    def more(of: ExpertsConfig) -> dict[str, Any]:
        return {
            "router": Weight(draw(of.count, hidden).float()), "router_bias": draw(of.count).float(),
            "correction": draw(of.count, scale=0.1).float(),
            "experts_gate_up": Weight(draw(of.count * 2 * of.inner, hidden)),
            "experts_down": Weight(draw(of.count * hidden, of.inner)),
            "experts_gate_up_bias": draw(of.count * 2 * of.inner, scale=0.1),
            "experts_down_bias": draw(of.count * hidden, scale=0.1),
        }  # fmt: skip

    def delta_net(of: DeltaConfig, index: int) -> LayerWeights:
        rows = {"delta_conv": (of.channels, 1, of.kernel), "delta_decay": (of.value_heads,), "delta_bias": (of.value_heads,)}
        return LayerWeights(
            qkv=Weight(draw(of.channels + of.v_size, hidden)), o=Weight(draw(hidden, of.v_size)),
            gate_up=Weight(draw(2 * inner, hidden)), down=Weight(draw(hidden, inner)), input_norm=norm(hidden), mlp_norm=norm(hidden),
            more={name: draw(*shape).float() for name, shape in rows.items()}
            | {"delta_gates": Weight(draw(2 * of.value_heads, hidden)), "delta_norm": draw(of.value_dim, mean=1.0).float()},
        )  # fmt: skip

    def layer(index: int) -> LayerWeights:
        if config.delta is not None and config.delta.layers[index]:
            return delta_net(config.delta, index)
        experts = config.experts if config.experts is not None and config.experts.at(index) else None
        return LayerWeights(
            qkv=Weight(draw(q + 2 * kv + (q if config.attn_gate else 0), hidden)), o=Weight(draw(hidden, q)), gate_up=Weight(draw(2 * inner, hidden)),
            down=Weight(draw(hidden, inner)),
            input_norm=norm(hidden), mlp_norm=norm(hidden),
            post_attn_norm=norm(hidden) if config.norm_place == "sandwich" else None,
            post_mlp_norm=norm(hidden) if config.norm_place == "sandwich" else None,
            q_norm=norm(config.head_dim) if config.qk_norm == "head" else None,
            k_norm=norm(config.head_dim) if config.qk_norm == "head" else None,
            qkv_bias=draw(q + 2 * kv, scale=0.1) if config.qkv_bias else None,
            o_bias=draw(hidden, scale=0.1) if config.o_bias else None,
            more=({} if experts is None else more(experts)) | ({"sinks": draw(config.num_heads).float()} if config.sinks else {}),
        )  # fmt: skip

    return DecoderWeights(
        embedding=draw(config.vocab_size, hidden, scale=1.0), layers=[layer(i) for i in range(config.num_layers)],
        final_norm=norm(hidden), lm_head=Weight(draw(config.vocab_size, hidden)), norm_offset=config.norm_offset,
    )  # fmt: skip


def with_narrow(weights: DecoderWeights, forms: list[tuple[str, str, str, str]], head: str | None = None) -> DecoderWeights:
    """The same with random narrow matrices, a form of `narrow_cases` for each of a layer's (qkv, o, gate_up, down)."""

    def of(form: str, weight: Weight, seed: int) -> Weight:
        made = narrow(form, *weight.shape, seed=seed)
        made.scales = made.scales.float() * weight.shape[1] ** -0.5
        return made

    layers = [
        replace(layer, **{name: of(form, getattr(layer, name), 10 * i + j) for j, (name, form) in enumerate(zip(MATRICES, row, strict=True))})
        for i, (layer, row) in enumerate(zip(weights.layers, forms, strict=True))
    ]
    return replace(weights, layers=layers, lm_head=weights.lm_head if head is None else of(head, weights.lm_head, 99))


def decode_batch(
    config: ModelConfig, lengths: list[int], block_size: int, dtype: torch.dtype = torch.float32
) -> tuple[ForwardBatch, KVCache]:
    """One new token for each sequence, random older keys and values; a length of 0 is a padded row."""
    generator = torch.Generator().manual_seed(1)
    rows, width = len(lengths), -(-max(lengths) // block_size)
    kv = KVCache(config, rows * width + 1, block_size, dtype, torch.device("cpu"))
    for tensor in (*kv.k, *kv.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for tensor in (t for pair in kv.scales for t in pair if t is not None):
        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    if config.delta is not None:
        kv.states = StatePool(config.delta, rows + 2, 0, dtype, torch.device("cpu"))
        for tensor in (kv.states.inputs, kv.states.states):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    slots = torch.randperm(rows + 1, generator=generator)[:rows].int()
    tables = torch.zeros(rows + 2, width, dtype=torch.int32)
    tables[slots.long()] = torch.randperm(rows * width, generator=generator).view(rows, width).int() + 1
    mapping = [
        int(tables[s, (n - 1) // block_size]) * block_size + (n - 1) % block_size if n else -1
        for n, s in zip(lengths, slots.tolist(), strict=True)
    ]
    batch = ForwardBatch(
        token_ids=torch.randint(0, config.vocab_size, (rows,), generator=generator).int(),
        positions=torch.tensor([max(n - 1, 0) for n in lengths], dtype=torch.int32),
        slot_mapping=torch.tensor(mapping), block_tables=tables, seq_slots=slots,
        query_start=torch.arange(rows + 1, dtype=torch.int32), seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_decodes=rows, query_lens=[1] * rows, context_lens=list(lengths),
    )  # fmt: skip
    return batch, kv


def cut(batch: ForwardBatch, rows: int) -> ForwardBatch:
    """Its first rows."""
    names = ("token_ids", "positions", "slot_mapping", "seq_slots", "seq_lens", "context_lens")
    first = {name: getattr(batch, name)[:rows] for name in names}
    return replace(batch, **first, query_start=batch.query_start[: rows + 1], num_decodes=rows, query_lens=[1] * rows)


def moved(thing, device: torch.device, dtype: torch.dtype | None = None):
    """A copy of weights, a batch or a cache with all its tensors on `device`, floating ones in `dtype`."""
    if isinstance(thing, Tensor):
        return thing.to(device, dtype if thing.is_floating_point() and thing.dtype != fp8.DTYPE else None)
    if isinstance(thing, list | tuple):
        return type(thing)(moved(item, device, dtype) for item in thing)
    if isinstance(thing, dict):
        return {name: moved(item, device, dtype) for name, item in thing.items()}
    if isinstance(thing, KVCache):
        thing = copy.copy(thing)
        thing.k, thing.v, thing.scales = (moved(part, device, dtype) for part in (thing.k, thing.v, thing.scales))
        thing.states = moved(thing.states, device, dtype)
        return thing
    if isinstance(thing, StatePool):
        thing = copy.copy(thing)
        thing.inputs, thing.states = moved(thing.inputs, device, dtype), thing.states.to(device, copy=True)
        return thing
    if is_dataclass(thing):
        return replace(thing, **{f.name: moved(getattr(thing, f.name), device, dtype) for f in fields(thing)})
    return thing


def states_of(kv: KVCache) -> tuple[Tensor, ...]:
    """What layers without keys and values remember."""
    return (kv.states.inputs, kv.states.states) if isinstance(kv.states, StatePool) else ()
