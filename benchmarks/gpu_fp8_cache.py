"""What an FP8 cache does to each kernel that writes or reads it, beside bfloat16.

    python benchmarks/gpu_fp8_cache.py [--json FILE] [--sweep | --brief] [--compile 12]

One card, one run, CUDA-graph replays on rotating buffers as in gpu_kernels.py; percent are of the bytes (keys, values, scales,
read or written once) over the copy bandwidth measured here, and `speed` is bfloat16's time over FP8's, at the same tokens.
--sweep tries other tiles; --brief is prompts and the fused step alone, with the engine's own tiles. `prompt` in FP8 is what the
engine does with prompts: keys and values are widened first, in the same time.
--compile compiles what will be needed by a pool of processes first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch
import triton
from torch import Tensor

from gpu_decode import MODELS
from gpu_kernels import BF16, BLOCK, DEVICE, DIM, KV_HEADS, graph_micros, rotation
from headrace.cache import fp8
from headrace.fast_decode.attention import AttentionTile, decode_attention
from headrace.fast_decode.attention_reference import HeadShape
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.tiles import default_tiles, with_fp8_cache
from headrace.kernels.attention_decode import SplitTile, split_attention
from headrace.kernels.attention_prefill import VarlenTile, varlen_attention
from headrace.kernels.qkv import qkv_rope_write
from headrace.kernels.split import SplitSpace, split_space
from headrace.kernels.widen_kv import Widened, widen

HEADS = 32
Launches = list[Callable[[], object]]
SIZES = [(1, 1024), (1, 8192), (32, 1024), (32, 8192), (256, 1024), (256, 8192)]
VECTOR = {BF16: 2 * DIM, fp8.DTYPE: DIM + 4}  # bytes of a head's key or value
FUSED_PROGRAMS = {1: 128, 8: 512, 32: 128}  # as the shipped tables have it
SPLIT_TILES = [SplitTile(64, 4, 4), SplitTile(64, 4, 5), SplitTile(64, 2, 4), SplitTile(64, 8, 4)]
FUSED_TILES = [
    AttentionTile(64, 4, 3, early=True), AttentionTile(64, 2, 2, early=True), AttentionTile(64, 4, 4, early=True),
    AttentionTile(128, 4, 2, early=True),
]  # fmt: skip
PROMPTS = [(2, 4096, 4096), (1, 16384, 16384), (1, 16384, 2048)]  # sequences, context, new rows of it
PROMPT_TILES = [None, VarlenTile(64, 64, 4, 2, True), VarlenTile(128, 64, 8, 2, True)]
VARLEN_TILES = [VarlenTile(128, 64, 8, 3, True), VarlenTile(128, 64, 8, 3, False), VarlenTile(64, 64, 4, 2, True)]


def cache(blocks: int, dtype: torch.dtype) -> SimpleNamespace:
    """Like a KVCache of one layer, random."""
    shape = (blocks, BLOCK, KV_HEADS, DIM)
    k, v = (torch.randn(shape, dtype=BF16, device=DEVICE).to(dtype) for _ in range(2))
    pair = tuple(torch.rand((blocks, KV_HEADS, BLOCK), device=DEVICE) for _ in range(2))
    return SimpleNamespace(k=[k], v=[v], scales=[pair if dtype == fp8.DTYPE else (None, None)], block_size=BLOCK)


def tables(seqs: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    width = -(-context // BLOCK)
    order = torch.randperm(seqs * width, device=DEVICE).to(torch.int32).view(seqs, width)
    lens = torch.full((seqs,), context, dtype=torch.int32, device=DEVICE)
    return order, torch.arange(seqs, dtype=torch.int32, device=DEVICE), lens


def caches(seqs: int, context: int, dtype: torch.dtype, copies: int | None) -> list[SimpleNamespace]:
    count = rotation(2 * seqs * context * KV_HEADS * VECTOR[dtype]) if copies is None else copies
    return [cache(seqs * -(-context // BLOCK), dtype) for _ in range(count)]


def split(seqs: int, context: int, dtype: torch.dtype, tile: SplitTile | None, copies: int | None) -> Launches:
    table, slots, lens = tables(seqs, context)
    space = split_space(256, HEADS, KV_HEADS, DIM, DEVICE)
    q = torch.randn((seqs, HEADS, DIM), dtype=BF16, device=DEVICE)
    out = torch.empty((seqs, HEADS * DIM), dtype=BF16, device=DEVICE)
    start = torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE)
    return [
        partial(
            split_attention, q, kv.k[0], kv.v[0], out, table, slots, start, lens, space, first_seq=0, num_seqs=seqs, tokens=1,
            max_context=context, scale=DIM**-0.5, scales=kv.scales[0], tile=tile,
        )
        for kv in caches(seqs, context, dtype, copies)
    ]  # fmt: skip


def fused(
    seqs: int, context: int, dtype: torch.dtype, tile: AttentionTile, copies: int | None, splits: int | None = None
) -> Launches:
    table, slots, lens = tables(seqs, context)
    splits = splits or max(1, min(32, FUSED_PROGRAMS[seqs] // (seqs * KV_HEADS)), -(-context // 4096))
    space = SplitSpace(seqs * splits * HEADS * DIM, seqs * KV_HEADS, DEVICE, lse=seqs * splits * HEADS)
    qkv = torch.randn((1, seqs, (HEADS + 2 * KV_HEADS) * DIM), device=DEVICE)
    angle, norm = torch.rand((context, DIM // 2), device=DEVICE), torch.ones(DIM, dtype=BF16, device=DEVICE)
    place = table[:, -1].long() * BLOCK + BLOCK - 1
    return [
        partial(
            decode_attention, qkv, torch.empty((seqs, HEADS * DIM), dtype=BF16, device=DEVICE), kv, 0, block_tables=table,
            seq_slots=slots, seq_lens=lens, slot_mapping=place, cos=angle.cos(), sin=angle.sin(), q_norm=norm, k_norm=norm,
            heads=HeadShape(HEADS, KV_HEADS, DIM, DIM**-0.5), window=0, num_splits=splits, tile=tile, space=space,
        )
        for kv in caches(seqs, context, dtype, copies)
    ]  # fmt: skip


def varlen(seqs: int, context: int, dtype: torch.dtype, tile: VarlenTile | None, copies: int | None) -> Launches:
    table, slots, lens = tables(seqs, context)
    rows = seqs * context
    start = torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE) * context
    q, out = (torch.randn((rows, HEADS, DIM), dtype=BF16, device=DEVICE) for _ in range(2))
    kv = cache(seqs * -(-context // BLOCK), dtype)
    launch = partial(
        varlen_attention, q, kv.k[0], kv.v[0], out.view(rows, -1), table, slots, start, lens, first_seq=0, num_seqs=seqs,
        num_rows=rows, max_tokens=context, scale=DIM**-0.5, scales=kv.scales[0], tile=tile,
    )  # fmt: skip
    return [launch] * (copies or 3)


def prompt(
    seqs: int, context: int, dtype: torch.dtype, tile: VarlenTile | None, copies: int | None, new: int = 1 << 30
) -> Launches:
    table, slots, lens = tables(seqs, context)
    new, blocks = min(new, context), context // BLOCK
    start = torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE) * new
    q, out = (torch.randn((seqs * new, HEADS, DIM), dtype=BF16, device=DEVICE) for _ in range(2))
    kv, which = cache(seqs * blocks, dtype), {"first_seq": 0, "num_seqs": seqs}
    sizes = {"num_rows": seqs * new, "max_tokens": new, "scale": DIM**-0.5, "tile": tile, **which}
    if dtype == BF16:
        plain = partial(varlen_attention, q, kv.k[0], kv.v[0], out.flatten(1), table, slots, start, lens, **sizes)
        return [plain] * (copies or 3)
    room = Widened.empty(seqs * blocks, KV_HEADS, DIM, BF16, DEVICE)

    def launch() -> None:
        widen(kv.k[0], kv.v[0], kv.scales[0], room, table, slots, start, lens, blocks=blocks, window=0, **which)
        varlen_attention(
            q, room.k, room.v, out.flatten(1), None, slots, start, lens, scales=(room.k_scales, None), blocks=blocks, **sizes
        )

    return [launch] * (copies or 3)


def write(rows: int, _: int, dtype: torch.dtype, tile: None, copies: int | None) -> Launches:
    width, kv = (HEADS + 2 * KV_HEADS) * DIM, cache(-(-rows // BLOCK), dtype)
    angle, norm = torch.rand((8192, DIM // 2), device=DEVICE), torch.ones(DIM, dtype=BF16, device=DEVICE)
    positions, slots = torch.arange(rows, dtype=torch.int32, device=DEVICE) % 8192, torch.randperm(rows, device=DEVICE)
    return [
        partial(
            qkv_rope_write, torch.randn((rows, width), dtype=BF16, device=DEVICE), positions, angle.cos(), angle.sin(), kv, 0,
            slots, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, q_norm=norm, k_norm=norm, eps=1e-6, norm_offset=0.0,
        )
        for _ in range(copies or rotation(rows * width * 2))
    ]  # fmt: skip


Case = tuple[str, Callable, int, int, torch.dtype, object]  # kernel, what makes its launches, sequences or rows, context, ..


def brief() -> Iterator[Case]:
    for dtype in (BF16, fp8.DTYPE):
        for seqs, context, new in PROMPTS:
            for tile in PROMPT_TILES[: len(PROMPT_TILES) if dtype == fp8.DTYPE else 1]:
                yield f"prompt {new}", partial(prompt, new=new), seqs, context, dtype, tile
        yield "varlen", varlen, 2, 4096, dtype, None
        for seqs, context in ((1, 1024), (8, 1024), (32, 4096)):
            model = MODELS["8b"]
            tiles = default_tiles(model, seqs)
            if dtype == fp8.DTYPE and seqs != 8:  # there they are the same
                yield "fused", fused, seqs, context, dtype, tiles.attention
                tiles = with_fp8_cache(tiles, model, seqs)
            splits = FastDecode._num_splits(SimpleNamespace(config=model), tiles, seqs, context)
            yield "fused", partial(fused, splits=splits), seqs, context, dtype, tiles.attention
            yield "fused", fused, seqs, context, dtype, AttentionTile(64, 2, 2, early=True)


def cases(sweep: bool) -> Iterator[Case]:
    for dtype in (BF16, fp8.DTYPE):
        others = sweep and dtype == fp8.DTYPE
        for seqs, context in SIZES:
            yield from (("split", split, seqs, context, dtype, tile) for tile in [None, *(SPLIT_TILES if others else [])])
        for seqs in FUSED_PROGRAMS:
            for context in (1024, 4096):
                yield from (("fused", fused, seqs, context, dtype, t) for t in FUSED_TILES[: len(FUSED_TILES) if others else 2])
        yield from ((f"prompt {new}", partial(prompt, new=new), seqs, context, dtype, None) for seqs, context, new in PROMPTS)
        yield from (("varlen", varlen, 2, 4096, dtype, tile) for tile in [None, *(VARLEN_TILES if others else [])])
        yield from (("write", write, rows, 0, dtype, None) for rows in (1, 32, 256, 8192))


def compile_case(short: bool, index: int) -> None:
    _, make, seqs, context, dtype, tile = list(brief() if short else cases(True))[index]
    if not short:
        seqs, context = 1, 64 if make is write else 1024
    make(seqs, context, dtype, tile, 1)[0]()


def num_bytes(kernel: str, seqs: int, context: int, dtype: torch.dtype) -> float:
    if kernel == "write":
        return seqs * (2 * DIM * (2 * HEADS + 2 * KV_HEADS) + 2 * KV_HEADS * VECTOR[dtype])
    return 2 * seqs * context * KV_HEADS * VECTOR[dtype]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--sweep", action="store_true", help="also other tiles")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="N processes compile all kernels first")
    parser.add_argument("--brief", action="store_true", help="prompts and the fused step alone")
    options = parser.parse_args()
    if options.compile:
        every = brief() if options.brief else cases(True)
        unlike = {(c[0], c[4], c[5], c[2] * options.brief): i for i, c in enumerate(every)}
        with multiprocessing.get_context("spawn").Pool(options.compile) as pool:
            pool.map(partial(compile_case, options.brief), unlike.values(), chunksize=1)
    torch.manual_seed(0)
    source = torch.randn(1 << 30, device=DEVICE)
    copying = partial(torch.empty_like(source).copy_, source)
    copy = 2 * source.nbytes / triton.testing.do_bench(copying, return_mode="median") / 1e6
    del source
    card = torch.cuda.get_device_name(DEVICE)
    print(f"{card}: copy {copy:.0f} GB/s; torch {torch.__version__}")
    rows, best = [], {}
    for kernel, make, seqs, context, dtype, tile in brief() if options.brief else cases(options.sweep):
        launches = make(seqs, context, dtype, tile, None)
        micros = graph_micros(launches)
        del launches
        percent = num_bytes(kernel, seqs, context, dtype) / micros / 1e3 / copy * 100
        rate = f"{percent:5.1f} %"
        if kernel.startswith(("varlen", "prompt")):
            before = context - int((kernel.split()[1:] or [context])[0])
            rate = f"{2 * HEADS * DIM * seqs * (context**2 - before**2) / micros / 1e6:5.0f} TFLOP/s"
        if dtype == BF16:
            best[kernel, seqs, context] = min(micros, best.get((kernel, seqs, context), micros))
        speed = best[kernel, seqs, context] / micros
        kind, named = str(dtype)[6:], "" if tile is None else " ".join(str(x) for x in numbers_of(tile))
        found = {"kernel": kernel, "seqs": seqs, "context": context, "dtype": kind, "tile": named, "us": micros}
        rows.append(found | {"percent": percent, "speed": speed})
        print(f"{kernel:12}{seqs:5} x {context:5} {kind:14} {named:24} {micros:9.2f} us {rate} speed {speed:.2f}", flush=True)
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as f:
            versions = {"torch": torch.__version__, "triton": triton.__version__}
            json.dump({"card": card, **versions, "copy_gbs": copy, "rows": rows}, f, indent=1)


def numbers_of(tile: object) -> list[object]:
    return [getattr(tile, name) for name in tile.__dataclass_fields__]  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
