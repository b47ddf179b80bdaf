"""Compile the Triton kernels for a card that is not there: python tests/compile_kernels.py 90|80 [parts of cases' names].

What the interpreter accepts but the compiler refuses is thus found without a card. Meta tensors stand for the arguments, and
every launch only compiles. Prints a JSON line per kernel: case, kernel, registers, spilled bytes, shared memory, what the
assembler got wrong, which buffer lies elsewhere than the kernel takes it to, and which machine code it is: run in two trees it
says whether a change of a kernel's text changed more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # or machine code would differ by where in a file it comes from
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import torch
from triton._C.libtriton import ir, nvidia, passes

import compile_ahead
import gpu_decode
from echo_group import EchoGroup
from headrace.cache import fp8
from headrace.cache.state_pool import LayerStates
from headrace.fast_decode import products
from headrace.fast_decode import tiles as decode_tiles
from headrace.fast_decode.digit_tile import DigitTile
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.products import glu, project
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.tile_tables import load_tiles
from headrace.fast_decode.warp_gemm import WarpTile
from headrace.kernels import experts_triton, prepare, prompt_rows, tables
from headrace.kernels.activation import act_mul_triton
from headrace.kernels.all_reduce import PushSpace, RowPlace, all_reduce, all_reduce_norm, row_sum, row_sum_tiles, slots_shape
from headrace.kernels.attention_decode import split_attention
from headrace.kernels.attention_prefill import VarlenTile, varlen_attention
from headrace.kernels.delta_layer import DeltaLayer
from headrace.kernels.delta_prompts import plan_chunks
from headrace.kernels.delta_triton import delta_rule_triton
from headrace.kernels.experts_lora import ExpertAdds
from headrace.kernels.folded_tile import FORMS
from headrace.kernels.gather_kv import gather_kv
from headrace.kernels.latent_attention import PartSpace, latent_attention
from headrace.kernels.latent_rows import latent_rope_write_triton
from headrace.kernels.lora import add_lora, group_rows, new_pair
from headrace.kernels.lora_product import members_of, shrink_few
from headrace.kernels.narrow_linear import NarrowProduct
from headrace.kernels.norm import add_normed_triton, add_rms_norm_triton, rms_norm_triton
from headrace.kernels.qkv import qkv_rope_write_triton
from headrace.kernels.sample import add_mask_triton, sample_rows
from headrace.kernels.sample_ranks import WORDS, sample_parts
from headrace.kernels.split import split_space
from headrace.kernels.widen_kv import Widened, widen
from headrace.model.latent_config import LatentConfig
from headrace.model.shard import Shard
from headrace.model.weight import Weight

META = torch.device("meta")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return meta(*shape, dtype=dtype)


def widened_products() -> None:
    """Rings of 4 and 8 bits, and what is folded."""
    for kind in ("int4", "int8"):
        for rows in (8, 32, 64):
            for shape in decode_tiles.product_shapes(gpu_decode.MODELS["8b"]).values():
                tile, out = decode_tiles.narrow_tile(shape, rows, kind), meta(rows, shape.columns)
                weight = gpu_decode.narrow_meta(shape.columns * (2 if shape.gated else 1), shape.width, kind)
                if shape.gated:
                    for form in (tile, replace(tile, block_n=32)):
                        glu(meta(rows, shape.width), weight, out, form, sumsq=meta(rows, 64, dtype=torch.float32), eps=1e-6)
                        both = meta(1, rows, 2 * shape.columns)  # as adapters ask for it
                        project(meta(rows, shape.width), weight, both, form.of_one_kind(), sumsq=meta(rows, 64, dtype=torch.float32), eps=1e-6)
                else:
                    project(meta(rows, shape.width), weight, meta(tile.splits, rows, shape.columns, dtype=torch.float32), tile)
    product = NarrowProduct(gpu_decode.narrow_meta(4096, 12288, "int4"), None)
    for rows in FORMS:
        product(meta(rows, 12288))


def attention(heads: int, kv_heads: int, head_dim: int, *, block: int = 64, dtype=torch.bfloat16, window: int = 0,
              softcap: float = 0.0, tokens: int = 1, tile: VarlenTile | None = None, sinks: bool = False,
              kind: str = "split", narrow: bool = False) -> Callable[[], None]:  # fmt: skip
    def run() -> None:
        cache = meta(1000, block, kv_heads, head_dim, dtype=fp8.DTYPE if narrow else dtype)
        scales = meta(1000, kv_heads, block, dtype=torch.float32) if narrow else None
        q = meta(512, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
        args = (q, cache, cache, meta(512, heads * head_dim, dtype=dtype), ints(257, 64), ints(32), ints(33), ints(32))
        options = {"scale": 0.1, "window": window, "softcap": softcap, "scales": (scales, scales)}
        options["sinks"] = meta(heads, dtype=torch.float32) if sinks else None
        if kind == "gather":
            out = meta(4096, kv_heads, head_dim, dtype=dtype)
            gather_kv(cache, cache, out, out, ints(257, 64), ints(32), ints(33), first_seq=2, num_seqs=3, max_context=4096)
        elif kind == "split":
            workspace = split_space(256, heads, kv_heads, head_dim, META)
            split_attention(*args, workspace, first_seq=0, num_seqs=32, tokens=tokens, max_context=4096, **options)
        else:
            varlen_attention(*args, first_seq=2, num_seqs=3, num_rows=512, max_tokens=512, tile=tile, **options)

    return run


def roles(heads: int, kv_heads: int, head_dim: int, window: int = 0, softcap: float = 0.0) -> Callable[[], None]:
    def run() -> None:
        from headrace.kernels.attention_roles import roles_attention

        cache, q = meta(1000, 64, kv_heads, head_dim), meta(512, heads + 2 * kv_heads, head_dim)[:, :heads]
        roles_attention(
            q, cache, cache, meta(512, heads * head_dim), ints(257, 64), ints(32), ints(33), ints(32), first_seq=2, num_seqs=3,
            num_rows=512, scale=0.1, window=window, softcap=softcap,
        )  # fmt: skip

    return run


def latent(heads: int, block: int = 64) -> Callable[[], None]:
    """Attention over latents of the published sizes, and what writes them; a prompt of one token does not take the tile of a decode."""

    def run() -> None:
        sizes = LatentConfig(512, 64, 128, 128)
        q, cache, out = meta(64, heads, sizes.row), meta(1000, block, 1, sizes.row), meta(64, heads * sizes.rank)
        fused, f32 = meta(64, heads * sizes.query + sizes.row), torch.float32
        latent_rope_write_triton(
            q, fused[:, : -sizes.row], fused[:, -sizes.row :], ints(64), meta(4096, 32, dtype=f32), meta(4096, 32, dtype=f32),
            meta(sizes.rank), cache, ints(64, dtype=torch.int64), sizes,
        )  # fmt: skip
        space = PartSpace.of(64, heads, sizes.rank, META)
        for tokens, where in ((1, space), (8, space), (64, None), (1, None)):
            latent_attention(
                q, cache, out, ints(65, 64), ints(8), ints(9), ints(8), where, rank=sizes.rank, first_seq=0, num_seqs=8,
                num_rows=64, max_tokens=tokens, max_context=4096, scale=0.1,
            )  # fmt: skip

    return run


def widened(heads: int, kv_heads: int, head_dim: int, block: int = 64, window: int = 0) -> Callable[[], None]:
    """An FP8 cache made wide, and attention over that."""

    def run() -> None:
        cache = meta(1000, block, kv_heads, head_dim, dtype=fp8.DTYPE)
        scales = meta(1000, kv_heads, block, dtype=torch.float32)
        q, space = meta(512, heads + 2 * kv_heads, head_dim)[:, :heads], Widened.empty(64, kv_heads, head_dim, torch.bfloat16, META)
        sizes = {"first_seq": 2, "num_seqs": 3, "blocks": 20}
        widen(cache, cache, (scales, scales), space, ints(257, 64), ints(32), ints(33), ints(32), window=window, **sizes)
        varlen_attention(
            q, space.k, space.v, meta(512, heads * head_dim), None, ints(32), ints(33), ints(32), num_rows=512, max_tokens=512,
            scale=0.1, window=window, scales=(space.k_scales, None), **sizes,
        )  # fmt: skip

    return run


def fused(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, norm: bool, rot: int) -> Callable[[], None]:
    def run() -> None:
        x = meta(32, hidden)
        rms_norm_triton(x, meta(hidden), 1e-6)
        add_rms_norm_triton(x, x, meta(hidden), 1e-6)
        add_rms_norm_triton(x, x, meta(hidden), 1e-6, 1.0, 1.0, meta(hidden))
        act_mul_triton(meta(32, 2 * inner), "silu")
        act_mul_triton(meta(32, 2 * inner), "gelu_tanh")
        cache = [meta(1000, 64, kv_heads, head_dim)]
        weight = meta(head_dim) if norm else None
        for keep in (False, True):
            kv = SimpleNamespace(k=cache, v=cache, scales=[(None, None)])
            qkv_rope_write_triton(
                meta(32, (heads + 2 * kv_heads) * head_dim), ints(32), meta(4096, rot // 2, dtype=torch.float32),
                meta(4096, rot // 2, dtype=torch.float32), kv, 0, ints(32, dtype=torch.int64), num_heads=heads,  # type: ignore[arg-type]
                num_kv_heads=kv_heads, head_dim=head_dim, q_norm=weight, k_norm=weight, eps=1e-6, norm_offset=0.0,
                keep=keep,
            )  # fmt: skip

    return run


def gemma4() -> None:
    """What closes a layer, and values made of keys."""
    x, angles = meta(32, 5376), meta(4096, 256, dtype=torch.float32)
    for factor in (None, meta(1)):
        add_normed_triton(x, x, meta(5376), 1e-6, factor)
    kv, weight = SimpleNamespace(k=[meta(1000, 64, 4, 512)], v=[meta(1000, 64, 4, 512)], scales=[(None, None)]), meta(512)
    qkv_rope_write_triton(
        meta(32, 36 * 512), ints(32), angles, angles, kv, 0, ints(32, dtype=torch.int64), num_heads=32, num_kv_heads=4,  # type: ignore[arg-type]
        head_dim=512, q_norm=weight, k_norm=weight, eps=1e-6, norm_offset=0.0, normed_values=True,
    )  # fmt: skip


def rows(count: int) -> Callable[[], None]:
    def run() -> None:
        out = prepare.Rows.empty(count, META)
        parameters = meta(257, 6, dtype=torch.float32), ints(257, len(tables.Int), dtype=torch.int64)
        slots = tables.SlotTables(ints(257, 4097), ints(257, 64), *parameters, ints(257), 64)
        for numbers, box, turn in ((ints(64, 4, 512), ints(64, 3, 512), ints(1)), (ints(4, 512), ints(3, 512), None)):
            prepare.launch(numbers, turn, slots, out)
            for verify in (False, True):
                prepare.launch_publish(ints(count), ints(count).bool(), out, slots, box, turn, verify)
        of_step = prompt_rows.TokenRows.empty(128, count, META)
        prompt_rows.launch_expand(ints(64, prompt_rows.NUMBERS, 2 * count), ints(1), slots, out, of_step)

    return run


def delta(dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    """A gated delta net of Qwen3.5-4B: one decode beside a prompt."""

    def run() -> None:
        f32, width = torch.float32, 8192 + 4096 + 64
        layer = DeltaLayer(16, 32, 128, 128, meta(8192, 4, dtype=f32), *(meta(32, dtype=f32) for _ in range(2)), meta(128, dtype=f32), 1e-6)
        batch = SimpleNamespace(
            positions=ints(201), seq_slots=ints(2), seq_lens=ints(2), query_start=ints(3), query_lens=[1, 200], num_decodes=1, num_verified=0,
            context_bound=0,
        )  # fmt: skip
        captured = SimpleNamespace(**vars(batch) | {"query_lens": [], "num_decodes": 2, "context_bound": 4096})
        rows = meta(201, width, dtype=dtype)
        for ring, behind in (((4, 8192), None), ((13, 8192 + 64), ints(5, 32))):
            kept = LayerStates(meta(5, *ring, dtype=dtype), meta(5, 32, 128, 128, dtype=f32), behind)
            for of in (batch, captured):
                delta_rule_triton(layer, rows, rows[:, 8192 + 4096 :], kept, of, plan_chunks(of))
        many = SimpleNamespace(**vars(batch) | {"query_lens": [1] * 9, "num_decodes": 9, "seq_slots": ints(9)})
        kept = LayerStates(meta(5, 4, 8192, dtype=dtype), meta(5, 32, 128, 128, dtype=f32), None)
        delta_rule_triton(layer, rows[:9], rows[:9, 8192 + 4096 :], kept, many)

    return run


def small_delta() -> None:
    """Prompts in float32 through a gated delta net of heads of 16 and 32."""
    f32, channels = torch.float32, 2 * 2 * 16 + 4 * 32
    layer = DeltaLayer(2, 4, 16, 32, meta(channels, 4, dtype=f32), *(meta(4, dtype=f32) for _ in range(2)), meta(32, dtype=f32), 1e-6)
    batch = SimpleNamespace(
        positions=ints(390), seq_slots=ints(2), seq_lens=ints(2), query_start=ints(3), query_lens=[300, 90], num_decodes=0,
        num_verified=0, context_bound=0,
    )  # fmt: skip
    kept = LayerStates(meta(3, 4, channels, dtype=f32), meta(3, 4, 16, 32, dtype=f32), None)
    delta_rule_triton(layer, meta(390, channels + 128, dtype=f32), meta(390, 8, dtype=f32), kept, batch, plan_chunks(batch))


def slot_tables() -> None:
    """What a step with prefill does to them, in the sizes of two of its requests."""
    four = ints(257, 4097), ints(257, 64), ints(257, 6), ints(257, 2 * len(tables.Int))
    tables.enter_triton(ints(5000), 2, 4096, four)


def adapters(rows: int, rank: int) -> Callable[[], None]:
    """Queries, keys and values of an 8B, and what goes back to its hidden states."""

    def run() -> None:
        groups = group_rows(ints(rows, dtype=torch.int64), 4)
        for sizes, columns in (((4096, 1024, 1024), 4096), ((4096,), 14336)):
            x, pair = meta(rows, columns), new_pair(4, sizes, columns, rank, torch.bfloat16, META)
            add_lora(meta(rows, sum(sizes)), x, pair, groups)
            if rows <= 64:  # of a fused decode step
                low_rank = shrink_few(x, pair, members_of(ints(rows, dtype=torch.int64), 4), ints(32), ints(16))
                weight, out = Weight(meta(sum(sizes), columns)), meta(1, rows, sum(sizes), dtype=torch.float32)
                project(x, weight, out, GemmTile(64, 64, 1, 4, 3, prefetch=1), low_rank=low_rank)

    return run


def sampling() -> None:
    """Every variant of the sampling kernels, for Qwen3's vocabulary; parameters lie as those of 4, 3 and 2 requests do."""
    for rows in (4, 3, 2):
        logits = torch.empty(1, dtype=torch.bfloat16).expand(rows, 151936)
        floats, longs, shorts = torch.zeros(3, rows), torch.zeros(2, rows, dtype=torch.int64), torch.zeros(2, rows).int()
        for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
            sample_rows(
                logits, floats[0], shorts[1], floats[1], floats[2], longs[0], longs[1], shorts[0],
                purpose=0, greedy_eps=1e-5, all_greedy=all_greedy, any_filter=any_filter,
            )  # fmt: skip
    add_mask_triton(meta(4, 151936, dtype=torch.float32), ints(2, 4748), ints(2, dtype=torch.int64))


def push(size: int, hidden: int) -> Callable[[], None]:
    """The all-reduce of `size` ranks, alone and with what closes a part of a layer."""

    def run() -> None:
        space = PushSpace(
            1, size, ints(*slots_shape(size, 64, hidden), dtype=torch.int16), ints(size, dtype=torch.int64), ints(64)
        )
        all_reduce(meta(32, hidden), space)
        f32 = meta(32, hidden, dtype=torch.float32)
        for slabs in (1, 2):
            part = meta(slabs, 32, hidden, dtype=torch.float32)
            all_reduce_norm(part, space, f32, meta(32, hidden), meta(hidden), residual=f32)
            sumsq = meta(32, row_sum_tiles(hidden), dtype=torch.float32)
            row_sum(RowPlace(space, 1), f32, meta(32, hidden), sumsq, meta(hidden), parts=part)
        residual = meta(32, hidden)
        all_reduce_norm(meta(1, 32, hidden), space, meta(32, hidden), meta(32, hidden), meta(hidden), residual=residual)

    return run


def sampling_of_ranks() -> None:
    space = PushSpace(1, 2, ints(*slots_shape(2, 64, WORDS)), ints(2, dtype=torch.int64), ints(64))
    for greedy in (True, False):
        sample_parts(
            meta(4, 75968), 75968, space, meta(4, dtype=torch.float32), ints(4, dtype=torch.int64), ints(4, dtype=torch.int64), ints(4),
            purpose=0, greedy_eps=1e-5, all_greedy=greedy,
        )  # fmt: skip


def decode(
    count: int, table: Callable[..., decode_tiles.TileTable], model: str = "0.6b", ranks: int = 1, narrow: bool = False
) -> Callable[[], None]:
    """A fused decode step of one layer of a Qwen3, or of a rank's part of it."""

    def run() -> None:
        config = Shard(0, ranks).config(replace(gpu_decode.MODELS[model], num_layers=1))
        weights = gpu_decode.random_weights(config, True, META, ranks)
        group = None if ranks == 1 else EchoGroup(ranks, count, config.hidden_size, torch.bfloat16, META)
        fast = FastDecode(config, weights, count, META, table(config), max_model_len=4096, group=group)
        batch = gpu_decode.Input(config, count, 500, 8 * count, META).batch([500] * count)
        kv = gpu_decode.Cache(config, 64, META)
        if narrow:
            scales = meta(64, config.num_kv_heads, 64, dtype=torch.float32)
            kv.k, kv.v, kv.scales = [kv.k[0].to(fp8.DTYPE)], [kv.v[0].to(fp8.DTYPE)], [(scales, scales)]
        fast.forward(batch, kv)

    return run


def in_shared_memory(config) -> decode_tiles.TileTable:
    tiles = decode_tiles.default_tiles(config, 1)
    return {1: replace(tiles, gate_up=GemvTile(2, 1024, 4, 4, shared=2), down=GemvTile(4, 512, 2, 12, shared=6))}


def narrow_products() -> None:
    """One of each way to convert and to scale: the card's own instructions, which the interpreter does not know."""
    shapes = decode_tiles.product_shapes(gpu_decode.MODELS["8b"])
    out, f32 = meta(8, 12288), torch.float32
    gate_up = gpu_decode.narrow_meta(2 * 12288, 4096, "int4")
    products.glu(meta(1, 4096), gate_up, out[:1], decode_tiles.narrow_tile(shapes["gate_up"], 1, "int4"), sumsq=meta(1, 64, dtype=f32), eps=1e-6)
    products.glu(meta(1, 4096), gpu_decode.narrow_meta(2 * 12288, 4096, "int8"), out[:1], decode_tiles.narrow_tile(shapes["gate_up"], 1, "int8"), sumsq=meta(1, 64, dtype=f32), eps=1e-6)
    products.project(meta(8, 4096), gpu_decode.narrow_meta(6144, 4096, "fp8"), meta(1, 8, 6144), WarpTile(16, 8, 8, 2))
    products.project(meta(1, 4096), gpu_decode.narrow_meta(6144, 4096, "int4"), meta(1, 1, 6144), DigitTile(16, 1))
    products.glu(meta(1, 4096), gate_up, out[:1], DigitTile(48, 2, 96), sumsq=meta(1, 64, dtype=f32), eps=1e-6)
    tile = decode_tiles.narrow_tile(shapes["qkv"], 32, "fp8")
    slabs = meta(products.num_splits(tile), 32, 6144, dtype=f32)
    products.project(meta(32, 4096), gpu_decode.narrow_meta(6144, 4096, "fp8"), slabs, tile, sumsq=meta(32, 64, dtype=f32))


def fp8_step(rows: int, cache: bool = False) -> None:
    """A decode step whose activations are FP8, of 8B shape, and the cache, too."""
    device = torch.device("meta")
    config = replace(gpu_decode.MODELS["8b-fp8"], num_layers=2)
    weights = gpu_decode.random_weights(config, False, device, 1, "fp8")
    fast = FastDecode(config, weights, rows, device, max_model_len=4096)
    assert fast.rounds
    kv = gpu_decode.Cache(config, 64, device)
    if cache:
        scales = meta(64, config.num_kv_heads, 64, dtype=torch.float32)
        kv.k, kv.v, kv.scales = ([part.to(fp8.DTYPE) for part in kv.k], [part.to(fp8.DTYPE) for part in kv.v], [(scales, scales)] * 2)
    fast.forward(gpu_decode.Input(config, rows, 500, 8 * rows, device).batch([500] * rows), kv)


def large_products(rows: int) -> None:
    """Those of a card without a copy engine that need most shared memory."""
    config = gpu_decode.MODELS["8b"]
    tiles, x = decode_tiles.default_table(config, copy_engine=False)[rows], meta(rows, config.hidden_size)
    glu(x, Weight(meta(2 * config.intermediate_size, config.hidden_size)), meta(rows, config.intermediate_size), tiles.gate_up,
        sumsq=None, eps=1e-6)  # fmt: skip
    project(x, Weight(meta(config.vocab_size, config.hidden_size)), meta(1, rows, config.vocab_size), tiles.lm_head)


def gated_product(groups: int) -> None:
    from headrace.kernels.gated_roles import launch

    launch(meta(256, 4096), meta(24576, 4096), "silu", meta(256, 12288), groups, 256)


def experts(
    rows: int, form: str = "float", hidden: int = 2048, inner: int = 768, count: int = 128, chosen: int = 8, rank: int = 0
) -> Callable[[], None]:
    """A layer of experts with `rows` rows, from the router on; `rank`: of adapters that some have."""

    def matrix(number: int, width: int) -> Weight:
        if form == "float":
            return Weight(meta(number, width))
        if form == "fp4":
            width = -(-width // 128) * 128
            return Weight(ints(number, width // 2, dtype=torch.uint8), meta(number, width // 32), None, "fp4", 32)
        return Weight(meta(number, width, dtype=fp8.DTYPE), meta(number // 128, width // 128), None, "fp8", 128, 128)

    def run() -> None:
        x = meta(rows, hidden)
        routing = SimpleNamespace(chosen=chosen, score="softmax", renormalize=True, scale=1.0, groups=1, groups_chosen=1)
        router, f32 = meta(count, hidden, dtype=torch.float32), torch.float32
        gpt = {"clamp": 7.0, "gate_up_bias": meta(count * 2 * inner), "down_bias": meta(count * hidden)} if form == "fp4" else {}
        gate_up, down = matrix(count * 2 * inner, hidden), matrix(count * hidden, inner)
        if rows == 1 and not rank:  # as the fused step runs it, where each program chooses for itself
            squares = experts_triton.Squares(meta(1, 64, dtype=f32), hidden, 1e-6)
            joining = experts_triton.Joining(meta(1, hidden, dtype=f32), x, meta(hidden), 1.0, 0.0)
            experts_triton.add_experts(x, squares, router, gate_up, down, routing, joining, count=count, **gpt)
            return
        ids, shares = experts_triton.choose(x, router, None, None, routing)
        adds = None
        if rank:
            pairs = [new_pair(4 * count, *sizes, rank, torch.bfloat16, META) for sizes in (((inner, inner), hidden), ((hidden,), inner))]
            adds = ExpertAdds(*pairs, 4, ints(rows, dtype=torch.int64))
        experts_triton.run_experts(x, gate_up, down, ids, shares, count=count, adds=adds, **gpt)

    return run


GPT_OSS = {"form": "fp4", "hidden": 2880, "inner": 2880, "count": 32, "chosen": 4}


def in_two(config) -> decode_tiles.TileTable:
    tiles = decode_tiles.default_table(config)[256]
    return {256: decode_tiles.with_attention_in_two(tiles)}


CASES: dict[str, Callable[[], None]] = {
    "split 0.6B": attention(16, 8, 128),
    "split 8B": attention(32, 8, 128),
    "split head 256 window softcap": attention(8, 4, 256, window=4096, softcap=50.0),
    "split head 80 block 16": attention(9, 3, 80, block=16),
    "split rows 64": attention(32, 8, 128, tokens=16),
    "varlen 0.6B": attention(16, 8, 128, kind="varlen"),
    "varlen 8B": attention(32, 8, 128, kind="varlen"),
    "varlen pointers": attention(32, 8, 128, kind="varlen", tile=VarlenTile(128, 64, 8, 3, False)),
    "varlen head 256 window softcap": attention(8, 4, 256, kind="varlen", window=4096, softcap=50.0),
    "varlen head 64 block 16": attention(9, 3, 64, block=16, kind="varlen"),
    "varlen float32": attention(9, 3, 64, kind="varlen", dtype=torch.float32),
    "split gpt-oss": attention(64, 8, 64, window=128, sinks=True),
    "varlen gpt-oss": attention(64, 8, 64, kind="varlen", window=128, sinks=True),
    "latent 20 heads": latent(20),
    "latent 16 heads block 16": latent(16, 16),
    "latent 128 heads": latent(128),
    "split head 512": attention(32, 4, 512),
    "split head 512 rows 64": attention(32, 4, 512, tokens=8),
    "split head 512 rows 32": attention(32, 4, 512, tokens=4),
    "varlen head 512": attention(32, 4, 512, kind="varlen"),
    "split head 512 float32": attention(8, 4, 512, dtype=torch.float32),
    "varlen head 512 float32": attention(8, 4, 512, kind="varlen", dtype=torch.float32),
    "gather 8B": attention(32, 8, 128, kind="gather"),
    "rows of a decode step": rows(32),
    "slot tables": slot_tables,
    "delta net": delta(),
    "delta net in float32": delta(torch.float32),
    "small delta net in float32": small_delta,
    "fused 8B": fused(4096, 32, 8, 128, 12288, True, 128),
    "fused 0.6B": fused(1024, 16, 8, 128, 3072, True, 128),
    "Gemma 4": gemma4,
    "fused queries of 512": fused(5376, 32, 0, 512, 21504, True, 512),
    "fused 135M": fused(576, 9, 3, 64, 1536, False, 64),
    "adapters of 32 rows": adapters(32, 16),
    "adapters of 2000 rows": adapters(2000, 128),
    "adapters of 300 rows": adapters(300, 16),
    "sampling": sampling,
    "ranks' sampling": sampling_of_ranks,
    "all-reduce of 2": push(2, 4096),
    "all-reduce of 8": push(8, 4096),
    "all-reduce of 2 wide": push(2, 5120),
    "all-reduce of 4 wide": push(4, 8192),
    "narrow products": narrow_products,
    "decode of 1 row": decode(1, decode_tiles.default_table),
    "ranks' decode of 1 row": decode(1, decode_tiles.default_table, "8b", 2),
    "ranks' decode of 1 row, weights in shared memory": decode(1, in_shared_memory, "8b", 2),
    "ranks' decode of 8 rows": decode(8, decode_tiles.default_table, "8b", 8),
    "decode of 4 rows 8B": decode(4, decode_tiles.default_table, "8b"),
    "products of 64 rows": partial(large_products, 64),
    **{f"experts of {n} rows": experts(n) for n in (1, 32, 256, 1024, 4096)},
    **{f"experts of {n} rows in FP8": experts(n, "fp8") for n in (1, 32, 1024)},
    **{f"experts of {n} rows in FP4": experts(n, **GPT_OSS) for n in (1, 5, 32, 64, 1024)},
    **{f"adapted experts of {n} rows": experts(n, rank=16) for n in (1, 256, 1024, 4096)},
    **{f"adapted experts of {n} rows in FP8": experts(n, "fp8", rank=16) for n in (32, 4096)},
    **{f"adapted experts of {n} rows in FP4": experts(n, **GPT_OSS, rank=64) for n in (32, 1024, 4096)},
    "decode of 8 rows Gemma-2": decode(8, lambda config: gpu_decode.forced(config, "gemm"), "gemma2_2b"),
    "decode of 8 rows ahead": decode(8, lambda config: gpu_decode.forced(config, "ahead")),
}
LARGE = {  # with tiles made for the shared memory of sm_90
    "widened products": widened_products,
    **{f"FP8 step of {n} rows": partial(fp8_step, n) for n in (8, 16, 32, 64)},
    **{f"FP8 step of {n} rows and cache": partial(fp8_step, n, True) for n in (8, 32)},
    "roles 8B": roles(32, 8, 128),
    "roles head 64 window": roles(64, 8, 64, window=4096),
    "roles head 256 window softcap": roles(8, 4, 256, window=4096, softcap=50.0),
    **{f"gate and up of {n} groups": partial(gated_product, n) for n in (2, 3)},
    "decode of 8 rows in rings": decode(8, decode_tiles.default_table),
    **{f"decode of {n} rows in clusters": decode(n, lambda config: load_tiles(config, "NVIDIA H200")) for n in (2, 4, 8, 16, 32)},
    "decode of 32 rows of Gemma-2 in rings": decode(32, decode_tiles.default_table, "gemma2_2b"),
    "decode of 64 rows of Gemma-2 in rings": decode(64, decode_tiles.default_table, "gemma2_2b"),
    "decode of 64 rows in rings": decode(64, lambda config: gpu_decode.forced(config, "ring")),
    "decode of 64 rows": decode(64, decode_tiles.default_table),
    "decode of 64 rows 8B": decode(64, decode_tiles.default_table, "8b"),
    "decode of 100 rows": decode(100, decode_tiles.default_table),
    "decode of 256 rows": decode(256, decode_tiles.default_table),
    "decode of 256 rows in two": decode(256, in_two),
    "decode of 1 row in FP8": decode(1, decode_tiles.default_table, narrow=True),
    "decode of 4 rows in FP8": decode(4, decode_tiles.default_table, narrow=True),
    "two kernels of 256 rows in FP8": decode(256, in_two, narrow=True),
    "split 8B in FP8": attention(32, 8, 128, narrow=True),
    "split head 256 in FP8": attention(8, 4, 256, narrow=True, window=4096, softcap=50.0),
    "varlen 8B in FP8": attention(32, 8, 128, kind="varlen", narrow=True),
    "widened 8B in FP8": widened(32, 8, 128),
    "widened head 80 window in FP8": widened(9, 3, 80, block=16, window=1000),
    "varlen head 256 in FP8": attention(8, 4, 256, kind="varlen", narrow=True, window=4096, softcap=50.0),
    "split gpt-oss in FP8": attention(64, 8, 64, narrow=True, sinks=True),
    "varlen head 24 in FP8": attention(8, 4, 24, kind="varlen", narrow=True),
}


def misplaced(kernel) -> list[str]:
    """Where Triton puts the first buffer of a kernel whose programs form clusters, if it is not where the kernel takes it to lie
    (see kernels/cluster.py)."""
    if kernel.metadata.num_ctas == 1:
        return []
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(kernel.asm["ttgir"])
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)  # as Triton's make_llir has them
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 87)
    manager.run(module, "places")
    found = re.search(r"ttg\.local_alloc[^\n]*allocation\.offset = (\d+)", str(module))
    taken = kernel.src.constants[(kernel.src.fn.arg_names.index("BASE"),)]
    return [] if found is not None and int(found[1]) == taken else [f"at byte {found and found[1]}, not {taken}"]


def main(capability: int, *parts: str) -> None:
    compiled: list = []
    compile_ahead.install(capability, lambda *found: compiled.append(found))
    for name, case in (CASES | (LARGE if capability >= 90 else {})).items():
        if parts and not any(part in name for part in parts):
            continue
        compiled.clear()
        case()
        for kernel_name, kernel in {kernel.hash: (kernel_name, kernel) for kernel_name, kernel in compiled}.values():
            registers, spills = compile_ahead.usage(kernel.asm["cubin"])
            cubin = kernel.asm["cubin"]
            wrong = [*compile_ahead.stack_pointer_taken(cubin), *compile_ahead.overwritten(cubin), *misplaced(kernel)]
            print(json.dumps({"case": name, "kernel": kernel_name, "registers": registers, "spills": spills,
                              "shared": kernel.metadata.shared, "ctas": kernel.metadata.num_ctas, "wrong": wrong,
                              "code": hashlib.sha256(kernel.asm["cubin"]).hexdigest()[:12]}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
