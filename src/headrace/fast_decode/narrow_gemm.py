"""Matrix products of 2 to 256 rows with narrow weights, on the tensor cores: `skinny_gemm.py` with fewer bytes to stream.

The weight's tile is the left operand again, and is widened in registers between shared memory and the tensor cores, which take
their left operand from there; so the same kernel serves many rows, in tiles of `block_m`. Scales of a step are asked for one
step ahead: they come too few at a time for the copies that the tiles make. The order of every sum is fixed, as there.
products.py says what is computed, kernels/narrow.py how bytes become numbers.
"""

from __future__ import annotations

from torch import Tensor

from headrace.fast_decode.epilogues import Plan, column_parameters, finish, split_width
from headrace.fast_decode.skinny_gemm import EARLY_ELEMENTS, GemmTile, load_rows, row_block
from headrace.fast_decode.wide_gemm import SUMSQ_BLOCK, WideTile
from headrace.kernels.launch import capability, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, tl, touch
from headrace.kernels.narrow import (
    add_products,
    arguments,
    bytes_together,
    first_scales,
    packed,
    span_bytes,
    step_columns,
    step_scales,
)
from headrace.model.weight import Weight

LINE = 128  # bytes that `touch` asks for


@jit
def _load_bytes(pointers, ok, at, end, rb, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers + at)
    return tl.load(pointers + at, mask=ok[:, None] & (at + rb < end)[None, :], other=0)


@jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])  # or multiples of 16 would be variants
def _narrow_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, partials_ptr,
    tickets_ptr,
    M, N, K, k_split, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, MODE: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    FOUR: tl.constexpr = KIND == "int4" or KIND == "fp4"
    PACK: tl.constexpr = 2 if FOUR else 1
    PARTS: tl.constexpr = BLOCK_K // PACK // WIDTH
    IN_RUN: tl.constexpr = 64 // WIDTH if FOUR else 1
    HALVES: tl.constexpr = 2 if FOUR and GROUP > 0 and GROUP < 128 else 1  # with scales of their own
    APART: tl.constexpr = HALVES if GROUP > 0 else 0  # scales of one span
    COLUMNS: tl.constexpr = BLOCK_N // 2 if MODE == "glu" else BLOCK_N  # of the output
    if PDL and LINES > 0:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rn = tile * COLUMNS + tl.arange(0, COLUMNS)
    rm = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rb = tl.arange(0, WIDTH)
    # the tile's weight rows; of a gated product half of them are gate rows and half the up rows of the same columns
    rw = tl.arange(0, BLOCK_N)
    row_ok = tile * COLUMNS + rw % COLUMNS < N
    of_row = tl.minimum(tile * COLUMNS + rw % COLUMNS, N - 1).to(tl.int64) + rw // COLUMNS * N
    k_start = split * k_split
    k_end = tl.minimum(k_start + k_split, K)
    end = k_end // PACK
    weights = w_ptr + of_row[:, None] * (K // PACK) + rb[None, :]
    rows = x_ptr + (rm % M)[None, :] * K + rb[:, None]  # rows past M repeat others, each once, unstored
    scales = scales_ptr + of_row // SCALE_ROWS * GROUPS
    if PDL and LINES > 0:  # past the end the last one again
        line = k_start // PACK + tl.arange(0, LINES) * 128
        touch(w_ptr + of_row[:, None] * (K // PACK) + tl.minimum(line, K // PACK - 1)[None, :])
    norm, bias = column_parameters(norm_ptr, bias_ptr, rn, N, norm_offset, split, COLUMNS, MODE, HAS_BIAS, SPLITS)
    s = first_scales(scales, k_start, GROUP, GROUPS, PARTS, WIDTH, FOUR)
    z = s
    if ZEROS:
        zeros = zeros_ptr + of_row // SCALE_ROWS * GROUPS
        z = first_scales(zeros, k_start, GROUP, GROUPS, PARTS, WIDTH, FOUR)
    if PDL:
        gdc_wait()
        if LINES == 0:
            gdc_launch_dependents()
    # what the epilogue reads is asked for now, where it is small: behind the sums' barriers its latency would show
    if SUMSQ_BLOCK > 0:
        rs = tl.arange(0, SUMSQ_BLOCK)
        squares = sumsq_ptr + tl.minimum(rm, M - 1)[:, None] * sumsq_tiles + rs[None, :]
        if BLOCK_M <= 32:
            sumsq = tl.load(squares, mask=(rs < sumsq_tiles)[None, :], other=0.0)
    before = 0.0
    if MODE == "residual" and EARLY:
        place = rm[None, :] * N + rn[:, None]
        before = tl.load(residual_ptr + place, mask=(rm < M)[None, :] & (rn < N)[:, None], other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    for k in range(k_start, k_end, BLOCK_K):
        next_s, next_z = s, z
        if GROUP > 0:
            next_s = step_scales(scales, k + BLOCK_K, GROUP, GROUPS, PARTS, WIDTH, FOUR)
            if ZEROS == 2:  # all of a row are a few bytes; and operands go to tensor cores straight from what is loaded here
                z = step_scales(zeros, k, GROUP, GROUPS, PARTS, WIDTH, FOUR)
            elif ZEROS:
                next_z = step_scales(zeros, k + BLOCK_K, GROUP, GROUPS, PARTS, WIDTH, FOUR)
        for part in tl.static_range(PARTS):
            if FOUR:
                column = k + part // IN_RUN * 128 + part % IN_RUN * WIDTH
            else:
                column = k + part * WIDTH
            raw = _load_bytes(weights, row_ok, k // PACK + part * WIDTH, end, rb, EVEN)
            x = load_rows(rows, column, k_end, rb, EVEN)
            high_x = load_rows(rows, column + 64, k_end, rb, EVEN) if FOUR else x
            acc = add_products(
                acc, raw, x, high_x, s[part * APART], s[part * APART + HALVES - 1], z[part * APART],
                z[part * APART + HALVES - 1], KIND, GROUP, ZEROS, DTYPE, ASM, BYTES,
            )  # fmt: skip
        s = next_s
        if ZEROS != 2:
            z = next_z
    if GROUP == 0:
        acc = acc * s[0][:, None]
    if not EVEN:  # what stands for the numbers 0 of columns past the last may be anything
        acc = tl.where(row_ok[:, None], acc, 0.0)
    if SUMSQ_BLOCK > 0:
        if BLOCK_M > 32:  # early they would take registers from the loop
            sumsq = tl.load(squares, mask=(rs < sumsq_tiles)[None, :], other=0.0)
        total = tl.sum(sumsq, 1)
        for s0 in range(SUMSQ_BLOCK, sumsq_tiles, SUMSQ_BLOCK):
            total += tl.sum(tl.load(squares + s0, mask=(s0 + rs < sumsq_tiles)[None, :], other=0.0), 1)
        acc = acc * tl.rsqrt(total / K + eps)[None, :]
    up_acc = acc
    if MODE == "glu":
        acc, up_acc = tl.split(tl.permute(tl.reshape(acc, (2, COLUMNS, BLOCK_M)), (1, 2, 0)))
    finish(
        acc, up_acc, before, out_ptr, residual_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr, norm, bias, rm, rn, M, N,
        tl.program_id(2) * tl.num_programs(0) + tile, split, sumsq_out_tiles, scale, softcap,
        MODE, ACTIVATION, HAS_SOFTCAP, SPLITS, EARLY, COLUMNS=0,
    )  # fmt: skip


def plan(tile: GemmTile | WideTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None) -> Plan:
    rows, width = x.shape
    columns_of_tile = tile.block_n // (weight.shape[0] // columns)  # a gated weight has two rows for each
    block_m = row_block(rows) if isinstance(tile, GemmTile) else tile.block_m
    block_k = step_columns(weight.kind, tile.block_k)
    steps = split_width(width, tile.splits, block_k) // block_k
    touched = min(getattr(tile, "touch", 0), steps) * block_k // packed(weight.kind) // LINE
    own = {
        "x_ptr": x, "k_split": steps * block_k, **arguments(weight, x), "WIDTH": span_bytes(weight, block_k),
        "BYTES": bytes_together(tile.block_n, tile.num_warps, x), "BLOCK_M": block_m, "BLOCK_K": block_k,
        "SUMSQ_BLOCK": 0 if sumsq is None else SUMSQ_BLOCK, "LINES": next_power_of_2(touched) if touched else 0,
        "EARLY": block_m * tile.block_n <= EARLY_ELEMENTS,
        "EVEN": columns % columns_of_tile == 0 and width % (tile.splits * block_k) == 0,
    }  # fmt: skip
    if tile.num_warps == 8 and capability(x.device)[0] == 9:
        own["maxnreg"] = 128  # two programs to a multiprocessor: one converts while the other multiplies
    return Plan(_narrow_kernel, (-(-columns // columns_of_tile), tile.splits, -(-rows // block_m)), own)
