"""The decode step of small batches: five kernels a layer, residual in float32, no sum whose order can change.

    embed ->  [ qkv  ->  attention  ->  o + residual  ->  gate_up + activation  ->  down + residual ] x layers  ->  lm_head

What lies between the products (norms, rotary embedding, cache write, activation, residual add) is done inside them, and each
kernel starts to load its weights while the one before it drains (programmatic dependent launch). What it leaves to the next is
in workspace.py. How a product runs at a number of rows is its tile's type (see products.py, tiles.py). Experts take the place
of the last two (experts.py), a gated delta net that of attention (delta.py); where what is added is normed, a kernel does that
(join_normed.py). Nothing is read by the host, so a step can be captured in a CUDA graph. Other steps run through `Decoder`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.fast_decode import digit_tile, widened_tile
from headrace.fast_decode.adapters import Adds, adapted_glu, low_rank
from headrace.fast_decode.attention import AttentionTile, decode_attention
from headrace.fast_decode.attention_reference import HeadShape
from headrace.fast_decode.delta import delta_steps
from headrace.fast_decode.digit_tile import DigitTile
from headrace.fast_decode.embed_residual import embed_residual
from headrace.fast_decode.epilogues import runs_triton
from headrace.fast_decode.experts import join_experts, takes_experts
from headrace.fast_decode.join_normed import join_normed
from headrace.fast_decode.products import RoundedTile, Tile, WidenedTile, glu, num_splits, project, residual
from headrace.fast_decode.ranks import RankParts
from headrace.fast_decode.ring_tile import KEYS, RingAttention, fp8_rings_suit, ring_attention_suits, runs
from headrace.fast_decode.takes import hands_on_fp8, has_copy_engine, kinds_of, usual_kinds
from headrace.fast_decode.tiles import (
    StepTiles,
    TileTable,
    default_table,
    with_attention_in_two,
    with_delta_qkv,
    with_fp8_cache,
    with_ring_attention,
    without,
)
from headrace.fast_decode.warp_gemm import suits
from headrace.fast_decode.workspace import NO_CHUNKS, Chunks, Workspace
from headrace.kernels.activation import gate_rows_triton
from headrace.kernels.attention_decode import SplitTile, split_attention
from headrace.kernels.narrow_linear import few_rows
from headrace.kernels.qkv import qkv_rope_write_triton
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import MATRICES, DecoderWeights, LayerWeights
from headrace.model.delta_net import join_gates
from headrace.model.forward import HiddenStateHook
from headrace.model.rare import rare_parts
from headrace.model.rope import rope_tables
from headrace.model.shard import Group
from headrace.model.weight import Weight

MAX_SPLIT_TOKENS = 4096  # of a context that one attention program may have to read alone
MAX_SPLITS = 32  # unless the context is longer than that many times MAX_SPLIT_TOKENS


class _Run(NamedTuple):
    """What the layers of one step share."""

    batch: ForwardBatch
    kv: KVCache
    adapters: Adds | None
    tiles: StepTiles
    steps: list[StepTiles]  # of each layer, all but the attention
    attention: AttentionTile | SplitTile | RingAttention
    splits: int  # programs that share a sequence's context
    total: Tensor  # the residual stream
    normed: Tensor  # what stands for the norm of it, as layers' products read it
    of_head: Tensor  # and as the head does
    attended: Tensor
    inner: Tensor
    chunks: Chunks


class FastDecode:
    """Runs decode steps of up to `max_rows` sequences (256; 64 without a copy engine) of a model that `supports` accepts.

    `tiles`: a table (see tiles.py) for the kinds of weights that most layers have; None, and for other layers: the defaults.
    Workspaces are sized for the tables' tiles and `max_model_len` tokens a sequence. With a `group`, `config` and `weights` are
    the part of one of its ranks, and logits those of its part of the vocabulary.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, max_rows: int, device: torch.device,
        tiles: TileTable | None = None, *, max_model_len: int | None = None, logits_dtype: torch.dtype = torch.float32,
        group: Group | None = None,
    ):  # fmt: skip
        dtype = weights.embedding.dtype
        for layer in weights.layers:
            join_gates(layer)
        kinds, usual, copy_engine = kinds_of(weights), (usual_kinds(weights), False), has_copy_engine(config, dtype, device)
        self.deltas = delta_steps(config, weights.layers)
        forms = [(of, delta is not None) for of, delta in zip(kinds, self.deltas, strict=True)]
        narrow = [m for layer in weights.layers for name in MATRICES if (m := getattr(layer, name)).kind != "float"]
        warps = all(map(suits, narrow))
        self.rounds = group is None and hands_on_fp8(config, weights)
        of_kinds = dict.fromkeys([usual, *forms])
        on_hopper = runs(weights.embedding)
        widened = on_hopper and all(map(widened_tile.suits, narrow))
        self.tables = {of: default_table(config, copy_engine, *of, warps, self.rounds, widened) for of in of_kinds}
        if tiles is not None:
            digits = on_hopper and all(map(digit_tile.suits, narrow))
            for tile, suit in ((RoundedTile, self.rounds), (DigitTile, digits), (WidenedTile, widened)):
                tiles = tiles if suit else without(tile, tiles, self.tables[usual])
            self.tables[usual] = dict(tiles)
            if (beside := (usual[0], True)) in self.tables:
                self.tables[beside] = with_delta_qkv(tiles, config, copy_engine, *beside, warps, widened)
        self.tiles, self.layer_tables = self.tables[usual], [self.tables[of] for of in forms]
        if not self.supports(config, dtype) or not 1 <= max_rows <= max(self.tiles):
            raise ValueError(f"FastDecode cannot run family {config.family} in {dtype} with {max_rows} rows")
        self.config, self.weights, self.max_rows = config, weights, max_rows
        self.depth: int | None = None  # layers that are run; None: all
        self.embed_scale = torch.tensor(config.embed_scale, dtype=dtype).item()  # as Decoder rounds it
        length = max_model_len or config.max_position
        self.layer_rope = [config.rope_of(layer) for layer in range(config.num_layers)]
        self.rope = {kind: rope_tables(kind, length, device) for kind in dict.fromkeys(self.layer_rope)}
        self.heads = HeadShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.attn_scale, config.attn_softcap,
            config.norm_eps, weights.norm_offset, config.attn_gate,
        )  # fmt: skip
        inner_norms = [w for layer in weights.layers for w in (layer.input_norm, layer.mlp_norm) if w is not None]
        self.norms = [*inner_norms, weights.final_norm]  # in the order in which the residual meets them
        assert len(self.norms) == 2 * config.num_layers + 1
        self.posts = [(layer.post_attn_norm, layer.post_mlp_norm) for layer in weights.layers]
        self.rings = ring_attention_suits(config) and runs(weights.embedding)
        steps = self._all_steps()
        both = [(n, tiles) for n, step in steps for tiles in (step, with_ring_attention(step))]
        both += [(n, replace(step, attention=tile)) for n, step in steps for tile in step.cluster_attention]
        row_splits = max(n * self._num_splits(tiles, n, length) for n, tiles in both)
        self.work = Workspace(config, weights, max_rows, steps, row_splits, logits_dtype, device, rounds=self.rounds)
        self.ranks = None if group is None else self._rank_parts(group, dtype, device)

    @staticmethod
    def supports(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, alone: bool = True) -> bool:
        """Whether this path can run the model, or not `alone` a rank's part of it: norms before each part, of one rank without
        experts also behind it, per-head or no qk-norm, no bias in the MLP, nothing rare but experts (see experts.py), gated
        delta nets and sinks.

        Not float16: x * norm weight is stored before it is divided by the norm, and may exceed 65504.
        """
        return (
            (config.norm_place == "pre" or (config.norm_place == "sandwich" and config.experts is None and alone))
            and config.qk_norm in ("none", "head")
            and not config.mlp_bias
            and set(rare_parts(config)) <= {"a mixture of experts", "gated delta nets", "attention sinks"}
            and takes_experts(config)
            and (config.delta is None or config.delta.on_cards)
            and config.head_dim <= 256
            and config.num_heads % config.num_kv_heads == 0
            and config.num_heads // config.num_kv_heads <= 64
            and dtype in (torch.bfloat16, torch.float32)
        )

    def _rank_parts(self, group: Group, dtype: torch.dtype, device: torch.device) -> RankParts:
        splits = max(num_splits(tile) for _, step in self._all_steps() for tile in (step.o, step.down))
        return RankParts(
            group, self.max_rows, splits, self.config.hidden_size, dtype, device, eps=self.config.norm_eps,
            norm_offset=self.weights.norm_offset,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Bytes of the workspaces and rope tables."""
        tensors = [*self.work.tensors, *(t for pair in self.rope.values() for t in pair)]
        tensors += [] if self.ranks is None else [self.ranks.parts]
        return sum(t.numel() * t.itemsize for t in tensors)

    def tiles_for(self, rows: int, table: TileTable | None = None) -> StepTiles:
        """`table`: of a layer; None: of most layers, whose attention all have."""
        table = self.tiles if table is None else table
        return table[min(n for n in table if n >= rows)]

    def takes_adapters(self, rows: int) -> bool:
        """In steps of so many rows; of more, what would be rounded is as it is here, and slower than where others round it."""
        return self.ranks is None and not (self.rounds and rows > few_rows(self.work.residual.device))

    def _all_steps(self) -> list[tuple[int, StepTiles]]:
        """(rows, tiles) of every step and kind of layer."""
        return [(n, self.tiles_for(n, table)) for table, n in product(self.tables.values(), range(1, self.max_rows + 1))]

    def _layer_steps(self, rows: int, in_two: bool) -> list[StepTiles]:
        """The tiles of each layer; `in_two`: its attention takes no partial sums, as delta nets do not."""
        steps = [self.tiles_for(rows, table) for table in self.layer_tables]
        return [
            with_attention_in_two(step) if in_two or delta is not None else step
            for step, delta in zip(steps, self.deltas, strict=True)
        ]

    def _num_splits(self, tiles: StepTiles, rows: int, context: int) -> int:
        """Programs that share a sequence of up to `context` tokens, so that the card is filled and none has too much. No more
        with an FP8 cache: the workspace is for any."""
        if isinstance(tiles.attention, RingAttention) and tiles.attention.few:
            return tiles.attention.cluster(rows * self.config.num_kv_heads)
        fill = min(MAX_SPLITS, max(1, tiles.attention_programs // (rows * self.config.num_kv_heads)))
        needed = -(-context // MAX_SPLIT_TOKENS)
        step = tiles.attention.keys if isinstance(tiles.attention, SplitTile) else tiles.attention.block_n
        return min(max(fill, needed), max(1, -(-context // step)))

    def forward(
        self, batch: ForwardBatch, kv: KVCache, hook: HiddenStateHook | None = None, adapters: Adds | None = None
    ) -> Tensor:
        """Logits [rows, V] of a batch whose sequences have one row each; writes the rows' keys and values to `kv`.
        Sequences of one slot must be marked `related`. `hook` gets the residual stream in float32.

        A view of a buffer that the next call overwrites. Rows of padding (seq_lens 0, slot_mapping -1) give garbage.
        How far attention is split follows max(batch.context_lens), in a graph the bound that it is captured for.
        """
        rows = batch.num_rows
        if rows != batch.num_seqs or rows > self.max_rows:
            allowed = f"1 to {self.max_rows}, one each"
            raise ValueError(f"FastDecode got {rows} rows of {batch.num_seqs} sequences, allowed: {allowed}")
        run, layers = self._begin(batch, kv, adapters), self.weights.layers[: self.depth]
        squares = self.work.squares(self.work.sumsq_down, rows, run.steps[0].down)
        sums = self._embed(batch.token_ids, run.total, run.normed, squares, run.chunks.normed)
        for index, layer in enumerate(layers):
            if hook is not None:
                hook(index, run.total, batch)
            sums = self._mix(run, index, layer, sums)
            sums = self._feed_forward(run, index, layer, sums, last=index == len(layers) - 1)
        return self._project(
            run.of_head, self.weights.lm_head, self.work.logits, run.tiles.lm_head, sums, None,
            scale=self.config.logit_scale, softcap=self.config.logit_softcap,
        )[0]  # fmt: skip

    def _begin(self, batch: ForwardBatch, kv: KVCache, adapters: Adds | None) -> _Run:
        work, rows, tiles = self.work, batch.num_rows, self._tiles_of(batch, kv)
        steps = self._layer_steps(rows, isinstance(tiles.attention, SplitTile))
        context, attention = max(batch.context_lens), tiles.attention
        splits = self._num_splits(tiles, rows, context)
        if tiles.short_attention is not None and context <= tiles.short_attention.block_n:
            attention, splits = tiles.short_attention, 1
        total, normed, attended, inner = (t[:rows] for t in (work.residual, work.normed, work.attended, work.inner))
        run = _Run(batch, kv, adapters, tiles, steps, attention, splits, total, normed, normed, attended, inner, NO_CHUNKS)
        if adapters is None and self.depth != 0 and self._takes_rounded(steps[0], tiles.attention):
            normed, attended, inner = work.codes(rows)
            return run._replace(normed=normed, attended=attended, inner=inner, chunks=work.chunks(steps[0]))
        return run

    def _mix(self, run: _Run, index: int, layer: LayerWeights, sums: Tensor | None) -> Tensor | None:
        """The attention of a layer, or what is in its place, joins the residual; `sums`, here and returned: of squares of it,
        None where it is normed."""
        work, step, delta, adapters = self.work, run.steps[index], self.deltas[index], run.adapters
        # attention in two kernels takes queries in the model's dtype, as delta nets do
        narrow = delta is not None or isinstance(run.attention, SplitTile)
        buffer = work.qkv.view(run.of_head.dtype) if narrow else work.qkv
        name = f"layers.{index}.qkv"
        more = low_rank(adapters, name, run.normed, layer.qkv, step.qkv)
        qkv = self._project(
            run.normed, layer.qkv, buffer, step.qkv, sums, layer.qkv_bias, low_rank=more, sizes=run.chunks.normed
        )  # fmt: skip
        if adapters is not None and more is None:
            adapters.add_to(name, qkv[0], run.normed, squares=sums, eps=self.config.norm_eps)
        mixed = run.attended
        if delta is None:
            self._attend(qkv, run, index, layer)
        else:
            mixed = delta(qkv[0], run.normed, sums, run.batch, run.kv, adapters)
        squares, following = work.squares(work.sumsq_o, len(run.total), step.o), self.norms[2 * index + 1]
        return self._add(
            mixed, layer.o, run.total, run.normed, squares, following, step.o, layer.o_bias, self.posts[index][0],
            f"layers.{index}.o", adapters, sizes=run.chunks.attended, out_sizes=run.chunks.normed_of_o,
        )  # fmt: skip

    def _feed_forward(self, run: _Run, index: int, layer: LayerWeights, sums: Tensor | None, last: bool) -> Tensor | None:
        """As `_mix`, of a layer's other half."""
        config, work, step, adapters, normed = self.config, self.work, run.steps[index], run.adapters, run.normed
        rows, following = len(run.total), self.norms[2 * index + 2]
        if config.experts is not None and config.experts.at(index):
            assert sums is not None  # several ranks' experts are the general path's
            adds, offset = None if adapters is None else adapters.of_experts(index, rows), self.weights.norm_offset
            return join_experts(config, layer.more, normed, sums, run.total, normed, following, offset, adds)
        inner, more = run.inner, low_rank(adapters, f"layers.{index}.gate_up", normed, layer.gate_up, step.gate_up)
        if adapters is None or more is not None:
            glu(
                normed, layer.gate_up, inner, step.gate_up, sumsq=sums, eps=config.norm_eps, activation=config.activation,
                low_rank=more, sizes=run.chunks.normed_of_o, out_sizes=run.chunks.inner,
            )  # fmt: skip
        else:
            assert sums is not None
            inner = adapted_glu(adapters, index, normed, layer.gate_up, step.gate_up, sums, config)
        return self._add(
            inner, layer.down, run.total, run.of_head if last else normed, work.squares(work.sumsq_down, rows, step.down),
            following, step.down, layer.down_bias, self.posts[index][1], f"layers.{index}.down", adapters,
            sizes=run.chunks.inner, out_sizes=None if last else run.chunks.normed,
        )  # fmt: skip

    def _tiles_of(self, batch: ForwardBatch, kv: KVCache) -> StepTiles:
        """Those of the batch's rows, with the attention that its contexts and the cache want."""
        tiles = self.tiles_for(batch.num_rows)
        if batch.related:  # a row of the one kernel would read what another one is about to write
            return with_attention_in_two(tiles)
        context, rings = max(batch.context_lens), self.rings and kv.k[0].shape[1] == KEYS
        for tile in tiles.cluster_attention if rings and kv.scales[0][0] is None else ():
            if context <= tile.few:
                return replace(tiles, attention=tile)
        if tiles.few_attention is not None and context <= tiles.few_attention.few:
            return replace(tiles, attention=tiles.few_attention)
        if kv.scales[0][0] is not None:
            return with_fp8_cache(tiles, self.config, batch.num_rows, rings and fp8_rings_suit(self.config))
        return with_ring_attention(tiles) if rings else tiles

    def _takes_rounded(self, step: StepTiles, attention: AttentionTile | SplitTile | RingAttention) -> bool:
        """Whether the products of these tiles, and the kernels between them, hand on activations in FP8."""
        one_kernel = isinstance(attention, RingAttention) or (isinstance(attention, AttentionTile) and not attention.few)
        return self.rounds and one_kernel and all(isinstance(getattr(step, name), RoundedTile) for name in MATRICES)

    def _embed(
        self, token_ids: Tensor, total: Tensor, normed: Tensor, sumsq: Tensor, sizes: Tensor | None
    ) -> Tensor | None:
        table, norm, scale = self.weights.embedding, self.norms[0], self.embed_scale
        if self.ranks is None:
            offset = self.weights.norm_offset
            embed_residual(token_ids, table, total, normed, sumsq, norm, scale=scale, norm_offset=offset, sizes=sizes)
            return sumsq
        self.ranks.embed(token_ids, table, total, normed, norm, scale)
        return None  # normed already

    def _add(
        self, x: Tensor, weight: Weight, total: Tensor, normed: Tensor, sumsq: Tensor, norm: Tensor, tile: Tile,
        bias: Tensor | None, post: Tensor | None, name: str, adapters: Adds | None, **sizes: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """The product `name`, normed by `post` if there is one, joins the residual, `total`; `normed`, and the sums of squares
        that are returned (in `sumsq`; None: it is normed), are what the next product needs of it."""
        scale, offset = self.config.residual_scale, self.weights.norm_offset
        more = low_rank(adapters, name, x, weight, tile)
        if post is not None:
            parts = self._project(x, weight, self.work.parts, tile, None, bias, low_rank=more)
            sumsq = sumsq.view(-1)[: len(x), None]
            if adapters is not None and more is None:
                adapters.add_to(name, parts[0], x)
            join_normed(
                parts, post, total, normed, sumsq, norm, eps=self.config.norm_eps, scale=scale, norm_offset=offset
            )  # fmt: skip
            return sumsq
        if adapters is not None and more is None:  # the residual grows before the kernel that takes its squares adds to it
            adapters.add_to(name, total, x, scale=scale)
        if self.ranks is None:
            residual(
                x, weight, total, normed, sumsq, norm, tile, self.work.space, norm_offset=offset, scale=scale, bias=bias,
                low_rank=more, **sizes,
            )  # fmt: skip
        else:
            phase = int(name.endswith("down"))
            return self.ranks.residual(x, weight, total, normed, norm, tile, scale=scale, bias=bias, phase=phase)
        return sumsq

    def _project(
        self, x: Tensor, weight: Weight, buffer: Tensor, tile: Tile, sumsq: Tensor | None, bias: Tensor | None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """RMSNorm(residual), or without `sumsq` x itself, @ weight.T as [splits, rows, columns] in `buffer`."""
        rows, columns, splits = x.shape[-2], weight.shape[0], num_splits(tile)
        out = buffer.view(-1)[: splits * rows * columns].view(splits, rows, columns)
        project(x, weight, out, tile, sumsq=sumsq, eps=self.config.norm_eps, bias=bias, **options)
        return out

    def _attend(self, qkv: Tensor, run: _Run, index: int, layer: LayerWeights) -> None:
        batch, kv, tile = run.batch, run.kv, run.attention
        if isinstance(tile, SplitTile):
            if runs_triton(qkv):
                self._attend_in_two(qkv[0], batch, kv, index, layer, tile)
                return
            tile = AttentionTile()  # of no meaning to the reference
        cos, sin = self.rope[self.layer_rope[index]]
        decode_attention(
            qkv, run.attended, kv, index, block_tables=batch.block_tables, seq_slots=batch.seq_slots,
            seq_lens=batch.seq_lens, slot_mapping=batch.slot_mapping, cos=cos, sin=sin, q_norm=layer.q_norm,
            k_norm=layer.k_norm, heads=self.heads, window=self.config.window(index), num_splits=run.splits,
            tile=tile, space=self.work.space, sinks=layer.more.get("sinks"),
            sizes=run.chunks.attended,
        )  # fmt: skip

    def _attend_in_two(
        self, qkv: Tensor, batch: ForwardBatch, kv: KVCache, index: int, layer: LayerWeights, tile: SplitTile
    ) -> None:
        """`_attend` as one kernel that rotates and writes the cache and one that reads it; gates may lie behind q, k, v."""
        config, rows, width = self.config, qkv.shape[0], self.config.q_size + 2 * self.config.kv_size
        cos, sin = self.rope[self.layer_rope[index]]
        q, _ = qkv_rope_write_triton(
            qkv[:, :width], batch.positions, cos, sin, kv, index, batch.slot_mapping, num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, q_norm=layer.q_norm, k_norm=layer.k_norm,
            eps=config.norm_eps, norm_offset=self.weights.norm_offset,
        )  # fmt: skip
        split_attention(
            q, kv.k[index], kv.v[index], self.work.attended[:rows], batch.block_tables, batch.seq_slots, batch.query_start,
            batch.seq_lens, self.work.space, first_seq=0, num_seqs=rows, tokens=1, max_context=max(batch.context_lens),
            scale=config.attn_scale, window=config.window(index), softcap=config.attn_softcap, scales=kv.scales[index],
            tile=tile, sinks=layer.more.get("sinks"),
        )  # fmt: skip
        if config.attn_gate:
            gate_rows_triton(self.work.attended[:rows], qkv[:, width:])
