"""x @ weight.T with narrow weights, for any number of rows: `fast_decode.narrow_gemm` without what surrounds it there."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.launch import capability, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl
from headrace.kernels.narrow import (
    NarrowMatrix,
    add_products,
    arguments,
    bytes_together,
    first_scales,
    packed,
    span_bytes,
    step_scales,
    widen,
)


@jit
def narrow_sums(
    w_ptr, scales_ptr, zeros_ptr, rows, of_row, K,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] float32: rows `of_row` [BLOCK_N] of the weights times the rows of x that `rows` [WIDTH, BLOCK_M] point
    to. With PDL the wait for the kernel before is in here, behind the first scales."""
    FOUR: tl.constexpr = KIND == "int4" or KIND == "fp4"
    PACK: tl.constexpr = 2 if FOUR else 1
    PARTS: tl.constexpr = BLOCK_K // PACK // WIDTH
    IN_RUN: tl.constexpr = 64 // WIDTH if FOUR else 1
    HALVES: tl.constexpr = 2 if FOUR and GROUP > 0 and GROUP < 128 else 1  # with scales of their own
    APART: tl.constexpr = HALVES if GROUP > 0 else 0  # scales of one span
    DTYPE: tl.constexpr = rows.dtype.element_ty
    rb = tl.arange(0, WIDTH)
    weights = w_ptr + of_row[:, None] * (K // PACK) + rb[None, :]
    scales = scales_ptr + of_row // SCALE_ROWS * GROUPS
    s = first_scales(scales, 0, GROUP, GROUPS, PARTS, WIDTH, FOUR)
    z = s
    if ZEROS:
        zeros = zeros_ptr + of_row // SCALE_ROWS * GROUPS
        z = first_scales(zeros, 0, GROUP, GROUPS, PARTS, WIDTH, FOUR)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, K, BLOCK_K):
        next_s, next_z = s, z
        if GROUP > 0:
            next_s = step_scales(scales, k + BLOCK_K, GROUP, GROUPS, PARTS, WIDTH, FOUR)
            if ZEROS == 2:  # all of a row are a few bytes; and operands go to tensor cores straight from what is loaded here
                z = step_scales(zeros, k, GROUP, GROUPS, PARTS, WIDTH, FOUR)
            elif ZEROS:
                next_z = step_scales(zeros, k + BLOCK_K, GROUP, GROUPS, PARTS, WIDTH, FOUR)
        for part in tl.static_range(PARTS):
            column = k + part // IN_RUN * 128 + part % IN_RUN * WIDTH if FOUR else k + part * WIDTH
            at = k // PACK + part * WIDTH
            if EVEN:
                raw = tl.load(weights + at)
                x = tl.load(rows + column)
                high_x = tl.load(rows + column + 64) if FOUR else x
            else:  # bytes past the row's end stand for anything; x is 0 there
                raw = tl.load(weights + at, mask=(at + rb < K // PACK)[None, :], other=0)
                x = tl.load(rows + column, mask=(column + rb < K)[:, None], other=0.0)
                high_x = tl.load(rows + column + 64, mask=(column + 64 + rb < K)[:, None], other=0.0) if FOUR else x
            acc = add_products(
                acc, raw, x, high_x, s[part * APART], s[part * APART + HALVES - 1], z[part * APART],
                z[part * APART + HALVES - 1], KIND, GROUP, ZEROS, DTYPE, ASM, BYTES,
            )  # fmt: skip
        s = next_s
        if ZEROS != 2:
            z = next_z
    if GROUP == 0:
        acc = acc * s[0][:, None]
    return acc


@jit(do_not_specialize=["M"])
def _narrow_gemm(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, M, N, K,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # tiles of rows are neighbours: they read the same weights at about the same time
    rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rb = tl.arange(0, WIDTH)
    of_row = tl.minimum(rn, N - 1).to(tl.int64)
    rows = x_ptr + (rm % M)[None, :].to(tl.int64) * K + rb[:, None]  # rows past M repeat others, each once, unstored
    acc = narrow_sums(
        w_ptr, scales_ptr, zeros_ptr, rows, of_row, K, KIND, GROUP, GROUPS, SCALE_ROWS, ZEROS, ASM, BYTES, WIDTH, BLOCK_M,
        BLOCK_N, BLOCK_K, EVEN, PDL,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + of_row).to(tl.float32)[:, None]
    place = rm[None, :].to(tl.int64) * N + rn[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(rm < M)[None, :] & (rn < N)[:, None])


def takes_many_rows(weight: NarrowMatrix, x: Tensor) -> bool:
    """Whether a product of 65 to 512 rows takes no more time than to widen the matrix and multiply by cuBLAS: int8 by rows, on
    Hopper (an 8B's head on an H200: 0.34, 0.53 and 1.1 ms of 128, 256 and 512 rows, where cuBLAS takes 0.32, 0.45 and 0.82
    with a matrix of bfloat16)."""
    by_row = weight.kind == "int8" and weight.group == 0 and weight.zeros is None
    return by_row and x.dtype == torch.bfloat16 and capability(x.device)[0] == 9


def _tile(rows: int, weight: NarrowMatrix, x: Tensor) -> tuple[int, int, int, int, int]:
    """block_m, block_n, block_k, warps, stages."""
    if rows > 64 and takes_many_rows(weight, x):
        return (128, 64, 128, 4, 3) if rows <= 128 else (256, 128, 64, 8, 4)
    block_m = min(64, max(16, next_power_of_2(rows)))
    return block_m, 64 if x.dtype.itemsize == 2 else 32, 128 if block_m < 64 or packed(weight.kind) == 2 else 64, 4, 3


def narrow_gemm(x: Tensor, weight: NarrowMatrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [M, K] @ weight [N, K].T + bias [N] -> [M, N] in x's dtype, rounded once; `out` [M, N] if it is given."""
    (rows, width), columns = x.shape, weight.shape[0]
    out = x.new_empty(rows, columns) if out is None else out
    if not rows:
        return out
    block_m, block_n, block_k, num_warps, num_stages = _tile(rows, weight, x)
    _narrow_gemm[-(-rows // block_m), -(-columns // block_n)](
        x.contiguous(), bias_ptr=bias, out_ptr=out, M=rows, N=columns, K=width, **arguments(weight, x),
        BYTES=bytes_together(block_n, num_warps, x), WIDTH=span_bytes(weight, block_k), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, HAS_BIAS=bias is not None, EVEN=width % block_k == 0, num_warps=num_warps, num_stages=num_stages,
        **pdl(x),
    )  # fmt: skip
    return out


@jit
def _widen_rows(
    w_ptr, scales_ptr, zeros_ptr, out_ptr, N, K,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    FOUR: tl.constexpr = KIND == "int4" or KIND == "fp4"
    PACK: tl.constexpr = 2 if FOUR else 1
    rn = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = (rn < N)[:, None] & (byte < K // PACK)[None, :]
    of_row = tl.minimum(rn, N - 1)[:, None].to(tl.int64)
    raw = tl.load(w_ptr + of_row * (K // PACK) + byte[None, :], mask=ok, other=0)
    usual = tl.full((1, 1), 0 if ZEROS else 8, tl.uint8)
    low, high = widen(raw, usual, usual, KIND, tl.float32, ASM, 4)
    for half in tl.static_range(PACK):
        column = byte // 64 * 128 + byte % 64 + half * 64 if FOUR else byte
        group = column // GROUP if GROUP > 0 else column * 0
        place = of_row // SCALE_ROWS * GROUPS + tl.minimum(group, GROUPS - 1)[None, :]
        w = (low if half == 0 else high).to(tl.float32)
        if ZEROS:
            w -= tl.load(zeros_ptr + place).to(tl.float32)
        w *= tl.load(scales_ptr + place).to(tl.float32)
        if PDL and half == 0:  # who reads what is overwritten here has ended
            gdc_wait()
            gdc_launch_dependents()
        tl.store(out_ptr + of_row * K + column[None, :], w.to(out_ptr.dtype.element_ty), mask=ok)


def widen_rows(weight: NarrowMatrix, first: int, out: Tensor) -> Tensor:
    """`out` [R, K], a bfloat16, float16 or float32 matrix, becomes rows `first` to `first` + R of the weight; `first` is a
    multiple of its `scale_rows`."""
    rows, width = out.shape
    assert weight.scales is not None and first % weight.scale_rows == 0
    at = first // weight.scale_rows
    given = arguments(weight, out)
    given |= {
        "w_ptr": given["w_ptr"][first:], "scales_ptr": weight.scales[at:],
        "zeros_ptr": None if weight.zeros is None else weight.zeros[at:],
    }  # fmt: skip
    block = 256
    _widen_rows[-(-rows // 4), -(-(width // packed(weight.kind)) // block)](
        out_ptr=out, N=rows, K=width, ROWS=4, BLOCK=block, num_warps=4, **given, **pdl(out)
    )  # fmt: skip
    return out
