"""The one decoder that every family runs through: token rows in, logits out, keys and values into the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.launch import on_gpu
from headrace.kernels.qkv import rotation_rows
from headrace.model.attention import AttentionBackend
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import DecoderWeights, LayerWeights
from headrace.model.delta_net import join_gates
from headrace.model.experts import mlp_of
from headrace.model.forward import HiddenStateHook
from headrace.model.layer_forms import formed
from headrace.model.linear import Linear, MakeLinear, make_linear
from headrace.model.mixer import Pass, SelfAttention
from headrace.model.mlp import Mlp
from headrace.model.ranks import VocabPart, normed_together
from headrace.model.rare import add_norm, norm, scaled_logits, scaling_queries
from headrace.model.rope import rope_tables
from headrace.model.row_elements import row_elements
from headrace.model.shard import Group
from headrace.model.vocabulary import TokenlessIds, embed
from headrace.sampling.sampler import Choose


class _Layer:
    """A layer's weights in the form that they are run in."""

    def __init__(self, w: LayerWeights, config: ModelConfig, index: int, make: MakeLinear, group: Group | None, offset: float):
        reduce = None if group is None else group.sum
        join_gates(w)
        qkv, o = make(w.qkv, w.qkv_bias, None), make(w.o, w.o_bias, reduce)
        qkv, q_norm, k_norm = normed_together(qkv, w.q_norm, w.k_norm, config, group, offset)
        mixer = SelfAttention(qkv, o, config, index, q_norm, k_norm, offset, w.more.get("sinks"))
        mlp = mlp_of(w, config, index, make, reduce)
        self.mixer, self.mlp = formed(mixer, mlp, w, config, index, make, group)
        self.workspace_bytes = max(part.workspace_bytes for part in (qkv, o, mlp))
        self.input_norm, self.post_attn_norm = w.input_norm, w.post_attn_norm
        self.mlp_norm, self.post_mlp_norm = w.mlp_norm, w.post_mlp_norm


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
        self.layers = [_Layer(w, config.at(i), i, make, group, weights.norm_offset) for i, w in enumerate(weights.layers)]
        self.lm_head = make(weights.lm_head, None, None)
        # rounded to the weights' dtype, as the models were trained
        self.embed_scale = torch.tensor(config.embed_scale, dtype=self.embedding.dtype).item()
        device, length = self.embedding.device, max_model_len or config.max_position
        self.attention = scaling_queries(attention, config, weights.layers, length, device)
        self.vocab = None if group is None else VocabPart(group, config.vocab_size, device)
        kinds = dict.fromkeys(map(config.rope_of, range(config.num_layers)))
        self.rope = {kind: rope_tables(kind, length, device) for kind in kinds}
        self.writing = config.num_layers if config.per_layer is None else config.per_layer.writing
        self.tokenless: TokenlessIds | None = None
        self.hidden_state_hook: HiddenStateHook | None = None
        self.adapters: Any = None  # an AdapterPool: it is told whose the rows are, before the layers
        self.choose: Choose | None = None
        self.logit_columns = config.vocab_size if self.vocab is None else self.vocab.rows
        self._decoded = torch.empty((decode_rows, self.logit_columns), dtype=self.embedding.dtype, device=device)

    def forward(self, batch: ForwardBatch, kv: KVCache, wanted: WantedRows | None = None) -> Tensor:
        """Hidden states [T, H] after the final norm, in the model's dtype; writes the rows' keys and values to `kv`.

        With `wanted` only those rows' hidden states [R, H].
        """
        residual = self.embed(batch.token_ids)
        weight = self.layers[0].input_norm
        normed = residual if weight is None else norm(residual, weight, self.config.norm_eps, self.norm_offset)
        return self.run_layers(normed, residual, batch, kv, wanted)[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int32 -> [T, H]: the residual stream before the first layer."""
        rows_of = embed if self.vocab is None else self.vocab.embed
        return rows_of(token_ids, self.embedding, self.embed_scale)

    def run_layers(
        self, normed: Tensor, residual: Tensor, batch: ForwardBatch, kv: KVCache, wanted: WantedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """From what the first layer reads, and the residual stream (which may be changed in place), both [T, any], to the
        hidden states after the final norm and the residual stream before it [T or R, H]."""
        layers = self.layers
        if self.adapters is not None:
            self.adapters.begin(batch, wanted)
        self.attention.begin(batch, kv)
        shared, positions = Pass(batch, kv, self.attention, batch.positions, self.rope), batch.positions
        if not on_gpu(positions):  # no fused kernel: gather once for all layers
            shared.tables = {kind: rotation_rows(*table, positions) for kind, table in self.rope.items()}
            shared.positions = None
        all_rows = self.hidden_state_hook is not None or self.adapters is not None
        for index, (layer, after) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
            if self.hidden_state_hook is not None:
                self.hidden_state_hook(index, residual, batch)
            last = wanted if index + 1 == (len(layers) if all_rows else self.writing) else None
            if last is not None:  # before keys and values are written: `keeps_own` is for the attention of these rows
                self.attention.begin(last.batch, kv)
            attended = layer.mixer(normed, shared, last)
            if last is not None:
                residual = residual[last.index]
                if not last.batch.num_rows:
                    return residual, residual
            normed, residual = self._add(layer.mixer.out, attended, residual, layer.post_attn_norm, layer.mlp_norm, layer.mlp)
            following, reader = (self.final_norm, None) if after is None else (after.input_norm, after.mixer)
            normed, residual = self._add(layer.mlp, normed, residual, layer.post_mlp_norm, following, reader)
        return normed, residual

    def _add(self, part: Linear | Mlp, x: Tensor, residual: Tensor, post: Tensor | None, following: Tensor | None, reader: Any):
        """Close a part of a layer: norm what it gives (`post`), add it to the residual (which may be changed in place), norm
        the sum for the next part (`following`), as its `reader` takes it. Returns (normed, residual)."""
        config = self.config
        if part.fuses_add and post is None and following is not None and config.residual_scale == 1.0:
            if (halves := part.halves(x.shape[0])) is not None:
                return add_norm(halves(x), residual, following, config.norm_eps, self.norm_offset)
            part.add_to(residual, x)
            return norm(residual, following, config.norm_eps, self.norm_offset), residual
        out = part(x)
        if following is None:
            out = out if post is None else norm(out, post, config.norm_eps, self.norm_offset)
            residual = torch.add(residual, out, alpha=config.residual_scale)
            return residual, residual
        return add_norm(out, residual, following, config.norm_eps, self.norm_offset, config.residual_scale, post, reader)

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
        into = self.lm_head.into
        logits = self.lm_head(hidden) if out is None or into is None else into(out, hidden)
        return self.masked(scaled_logits(logits if logits.is_cuda else logits.float(), self.config))

    def masked(self, logits: Tensor) -> Tensor:
        """`logits`, -inf, in place, where no token is."""
        if self.vocab is not None:
            return self.vocab.mask(logits, self.tokenless)
        return logits if self.tokenless is None else self.tokenless.mask(logits)
