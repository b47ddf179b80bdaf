"""The one decoder that every family runs through: token rows in, logits out, keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.launch import on_gpu
from headrace.kernels.qkv import qkv_rope_write, rotation_rows
from headrace.model.attention import AttentionBackend
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.forward import HiddenStateHook
from headrace.model.linear import Linear, Reduce, make_linear
from headrace.model.mlp import DenseMlp, Mlp
from headrace.model.ranks import NormedQkv, VocabPart
from headrace.model.rare import add_norm, before_rotation, norm, scaling_queries
from headrace.model.rope import rope_tables
from headrace.model.shard import Group
from headrace.model.vocabulary import TokenlessIds, embed
from headrace.model.weight import Weight
from headrace.sampling.sampler import Choose

MATRICES = ("qkv", "o", "gate_up", "down")  # of LayerWeights


@dataclass(slots=True)
class LayerWeights:
    """One layer; the field names are the last part of WeightSpec.target. Matrices are [out, in], fused along out."""

    qkv: Weight  # [q + 2 kv, H]
    o: Weight  # [H, q]
    gate_up: Weight  # [2 I, H]; [I, H] without a gate
    down: Weight  # [H, I]
    input_norm: Tensor | None = None  # [H], or [2 H] of LayerNorm, before attention (pre, sandwich)
    post_attn_norm: Tensor | None = None  # [H], on attention's output (post, sandwich)
    mlp_norm: Tensor | None = None  # [H], before the feed-forward part (pre, sandwich)
    post_mlp_norm: Tensor | None = None  # [H], on the feed-forward part's output (post, sandwich)
    q_norm: Tensor | None = None  # [head_dim] or [q]
    k_norm: Tensor | None = None  # [head_dim] or [kv]
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(slots=True)
class DecoderWeights:
    """All weights; `lm_head` holds `embedding` itself where they are tied.

    `norm_offset` is what remains to be added to every norm weight: the family's offset, or 0 where the loader added it.
    """

    embedding: Tensor  # [V, H]
    layers: list[LayerWeights]
    final_norm: Tensor  # [H]
    lm_head: Weight  # [V, H]
    norm_offset: float = 0.0

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any], config: ModelConfig) -> DecoderWeights:
        """From {WeightSpec.target: tensor}, or weight that is narrow; without "lm_head" the embedding is used."""
        layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
        for target, tensor in tensors.items():
            if target.startswith("layers."):
                _, index, name = target.split(".")
                layers[int(index)][name] = Weight.of(tensor) if name in MATRICES else tensor
        return cls(
            embedding=tensors["embedding"],
            layers=[LayerWeights(**layer) for layer in layers],
            final_norm=tensors["final_norm"],
            lm_head=Weight.of(tensors.get("lm_head", tensors["embedding"])),
            norm_offset=config.norm_offset,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all distinct tensors."""
        held = [getattr(layer, f.name) for layer in self.layers for f in fields(layer)]
        tensors = [self.embedding, self.final_norm, *self.lm_head.tensors]
        for value in held:
            tensors += value.tensors if isinstance(value, Weight) else [] if value is None else [value]
        return sum({t.data_ptr(): t.numel() * t.itemsize for t in tensors}.values())


def row_elements(model: ModelConfig) -> int:
    """Numbers per row at the widest moment of a layer: residual, normed input, qkv, attention output, gate_up, its product."""
    return 2 * model.hidden_size + 2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate_size


MakeLinear = Callable[[Weight, Tensor | None, Reduce | None], Linear]


class _Layer:
    """A layer's weights in the form that they are run in."""

    def __init__(self, w: LayerWeights, config: ModelConfig, make: MakeLinear, group: Group | None, offset: float):
        reduce = None if group is None else group.sum
        self.qkv, self.o = make(w.qkv, w.qkv_bias, None), make(w.o, w.o_bias, reduce)
        gate_up, down = make(w.gate_up, w.gate_up_bias, None), make(w.down, w.down_bias, reduce)
        self.workspace_bytes = max(linear.workspace_bytes for linear in (self.qkv, self.o, gate_up, down))
        self.mlp: Mlp = DenseMlp(gate_up, down, config.intermediate_size, config.activation, config.gated)
        self.input_norm, self.post_attn_norm = w.input_norm, w.post_attn_norm
        self.mlp_norm, self.post_mlp_norm = w.mlp_norm, w.post_mlp_norm
        self.q_norm, self.k_norm = before_rotation(config, w.q_norm), before_rotation(config, w.k_norm)
        if group is not None and w.q_norm is not None and w.k_norm is not None and config.qk_norm == "full":
            self.qkv = NormedQkv(self.qkv, w.q_norm, w.k_norm, config, group, offset)
            self.q_norm = self.k_norm = None


class Decoder:
    """Runs a model (a `Forward`). Keeps no reference to `weights`: where linears are repacked, the caller's copy can be freed.

    `max_model_len` (default: the model's own) is the number of positions; it also fixes the rope tables (see rope.py).
    `make` turns (weight, bias, reduce) into a linear: the place of quantized or device-specific ones. `decode_rows`: logits of
    decode steps of up to so many rows lie in one place; those of each captured size would stay allocated for ever.

    As one of several ranks it has a `group`, and `config` and `weights` are its part. Hidden states are then whole on every
    rank, and logits those of its part of the vocabulary (`vocab`).
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, attention: AttentionBackend, *,
        max_model_len: int | None = None, decode_rows: int = 0, make: MakeLinear = make_linear, group: Group | None = None,
    ):  # fmt: skip
        self.config, self.vocab_size = config, config.vocab_size
        self.dtype = self.cache_dtype = weights.embedding.dtype
        self.embedding, self.final_norm, self.norm_offset = weights.embedding, weights.final_norm, weights.norm_offset
        self.layers = [_Layer(layer, config, make, group, weights.norm_offset) for layer in weights.layers]
        self.lm_head = make(weights.lm_head, None, None)
        # rounded to the weights' dtype, as the models were trained
        self.embed_scale = torch.tensor(config.embed_scale, dtype=self.embedding.dtype).item()
        device, length = self.embedding.device, max_model_len or config.max_position
        self.attention = scaling_queries(attention, config, weights.layers, length, device)
        self.vocab = None if group is None else VocabPart(group, config.vocab_size, device)
        kinds: list[RopeConfig] = [config.rope_of(layer) for layer in range(config.num_layers)]
        self.rope = {kind: rope_tables(kind, length, device) for kind in dict.fromkeys(kinds)}
        self.layer_rope = kinds
        self.tokenless: TokenlessIds | None = None
        self.hidden_state_hook: HiddenStateHook | None = None
        self.choose: Choose | None = None
        columns = config.vocab_size if self.vocab is None else self.vocab.rows
        self._decoded = torch.empty((decode_rows, columns), dtype=self.embedding.dtype, device=device)

    def forward(self, batch: ForwardBatch, kv: KVCache, wanted: WantedRows | None = None) -> Tensor:
        """Hidden states [T, H] after the final norm, in the model's dtype; writes the rows' keys and values to `kv`.

        With `wanted` only those rows' hidden states [R, H].
        """
        residual = self.embed(batch.token_ids)
        normed, weight = residual, self.layers[0].input_norm
        if weight is not None:
            normed = norm(residual, weight, self.config.norm_eps, self.norm_offset)
        return self.run_layers(normed, residual, batch, kv, wanted)[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int32 -> [T, H]: the residual stream before the first layer."""
        if self.vocab is None:
            return embed(token_ids, self.embedding, self.embed_scale)
        rows = self.vocab.embed(token_ids, self.embedding)
        return rows if self.embed_scale == 1.0 else rows.mul_(self.embed_scale)

    def run_layers(
        self, normed: Tensor, residual: Tensor, batch: ForwardBatch, kv: KVCache, wanted: WantedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """From what the first layer reads, and the residual stream (which may be changed in place), both [T, any], to the
        hidden states after the final norm and the residual stream before it [T or R, H]."""
        config, layers = self.config, self.layers
        self.attention.begin(batch, kv)
        positions: Tensor | None = batch.positions
        tables = self.rope
        if positions is not None and not on_gpu(positions):  # no fused kernel: gather once for all layers
            tables = {kind: rotation_rows(*table, positions) for kind, table in tables.items()}
            positions = None
        for index, layer in enumerate(layers):
            if self.hidden_state_hook is not None:
                self.hidden_state_hook(index, residual, batch)
            last = wanted if index + 1 == len(layers) else None
            if last is not None:  # before keys and values are written: `keeps_own` is for the attention of these rows
                self.attention.begin(last.batch, kv)
            cos, sin = tables[self.layer_rope[index]]
            q, own = qkv_rope_write(
                layer.qkv(normed), positions, cos, sin, kv, index, batch.slot_mapping,
                num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
                q_norm=layer.q_norm, k_norm=layer.k_norm, eps=config.norm_eps, norm_offset=self.norm_offset,
                keep=self.attention.keeps_own,
            )  # fmt: skip
            if last is not None:
                batch, q, residual = last.batch, q[last.index], residual[last.index]
                if not batch.num_rows:
                    return residual, residual
            attended = self.attention.attend(
                q, index, kv, batch,
                scale=config.attn_scale, window=config.window(index), softcap=config.attn_softcap, own=own,
            )  # fmt: skip
            normed, residual = self._add(layer.o, attended, residual, layer.post_attn_norm, layer.mlp_norm)
            following = layers[index + 1].input_norm if index + 1 < len(layers) else self.final_norm
            normed, residual = self._add(layer.mlp, normed, residual, layer.post_mlp_norm, following)
        return normed, residual

    def _add(self, part: Linear | Mlp, x: Tensor, residual: Tensor, post: Tensor | None, following: Tensor | None):
        """Close a part of a layer: norm what it gives (`post`), add it to the residual (which may be changed in place), norm
        the sum for the next part (`following`). Returns (normed, residual)."""
        config = self.config
        if part.fuses_add and post is None and following is not None and config.residual_scale == 1.0:
            part.add_to(residual, x)
            return norm(residual, following, config.norm_eps, self.norm_offset), residual
        out = part(x)
        if post is not None:
            out = norm(out, post, config.norm_eps, self.norm_offset)
        if following is None:
            residual = torch.add(residual, out, alpha=config.residual_scale)
            return residual, residual
        return add_norm(out, residual, following, config.norm_eps, self.norm_offset, config.residual_scale)

    def decode(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """See Forward."""
        rows = batch.num_rows
        return self.logits(self.forward(batch, kv), self._decoded[:rows] if rows <= len(self._decoded) else None)

    def activation_bytes(self, max_rows: int) -> int:
        """See Forward. Of a rank: beside a part of a sum are others' parts, and the sum, at most three times as much."""
        summed = 0 if self.vocab is None else 3 * self.config.hidden_size
        return max_rows * (row_elements(self.config) + summed) * self.dtype.itemsize

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """See Forward: of attention, the rope tables, and one product at a time."""
        tables = sum(t.numel() * t.itemsize for pair in self.rope.values() for t in pair)
        product = max(self.lm_head.workspace_bytes, *(layer.workspace_bytes for layer in self.layers))
        return self.attention.workspace_bytes(max_num_seqs) + tables + product

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [R, H] -> logits [R, V], in `out` if it is given: float32 on the CPU, the model's dtype elsewhere. Of a rank
        [R, vocab.rows]."""
        if out is not None and self.lm_head.into is not None:
            logits = self.lm_head.into(out, hidden)
        else:
            logits = self.lm_head(hidden)
        if not logits.is_cuda:
            logits = logits.float()
        if self.config.logit_scale != 1.0:
            logits = logits.mul_(self.config.logit_scale)
        if self.config.logit_softcap:
            cap = self.config.logit_softcap
            logits = logits.div_(cap).tanh_().mul_(cap)
        return self.masked(logits)

    def masked(self, logits: Tensor) -> Tensor:
        """`logits`, -inf, in place, where no token is."""
        if self.vocab is not None:
            return self.vocab.mask(logits, self.tokenless)
        return logits if self.tokenless is None else self.tokenless.mask(logits)
