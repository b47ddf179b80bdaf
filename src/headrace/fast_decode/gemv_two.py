"""Matrix products of two rows on the CUDA cores: as `gemv.py` does it for one, each weight taken for both.

So few rows leave the tensor cores nothing to gain, and what these need costs more: weights and rows brought to shared memory,
sums split along K and put together again. Here a program owns BLOCK_N columns over the whole of K, of both rows; a warp or
several share each of them, and all their sums are added up at once, at the end. (Of four rows it was no faster than the tensor
cores on an H200, of eight slower.) products.py says what is computed.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headrace.fast_decode.epilogues import Plan, column_parameters, finish, sumsq_block
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, tl
from headrace.model.weight import Weight

MAX_ROWS = 2


@dataclass(frozen=True, slots=True)
class TwoRowTile:
    """One program's work: block_n columns in steps of block_k; `prefetch` steps' weights are loaded before the wait."""

    block_n: int
    block_k: int
    num_warps: int
    prefetch: int

    splits: ClassVar[int] = 1
    num_stages: ClassVar[int] = 1


@jit
def _load_weights(
    pointers, rk, k: tl.constexpr, ok, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr
):  # fmt: skip
    if EVEN_N and k + BLOCK_K <= K:
        return tl.load(pointers + k)
    return tl.load(pointers + k, mask=ok[:, None] & (k + rk < K)[None, :], other=0.0)


@jit
def _add_step(
    sums, weights, x_ptr, last_row, rk, k: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """sums [BLOCK_N, BLOCK_K / 8] of each row += weights * x, eight neighbours summed within the thread that loaded them."""
    w = weights.to(tl.float32)
    out = ()
    for m in tl.static_range(2):
        row = x_ptr + tl.minimum(m, last_row) * K + k + rk  # of one row it is that one again, unstored
        if k + BLOCK_K <= K:
            x = tl.load(row).to(tl.float32)
        else:
            x = tl.load(row, mask=k + rk < K, other=0.0).to(tl.float32)
        out = out + (sums[m] + tl.sum(tl.reshape(w * x[None, :], (BLOCK_N, BLOCK_K // 8, 8)), 2),)
    return out


@jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])  # or multiples of 16 would be variants
def _two_rows_kernel(
    x_ptr, w_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr,
    M, N, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
    SPLITS: tl.constexpr, MODE: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # at once: the next kernel's weights stream while this one still waits for its input
        gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rn = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    rm = tl.arange(0, 2)
    ok = rn < N
    pointers = w_ptr + rn[:, None].to(tl.int64) * K + rk[None, :]
    up_pointers = pointers + N.to(tl.int64) * K  # the up rows of a gate-up weight
    early = ()
    early_up = ()
    for i in tl.static_range(PREFETCH):
        early = early + (_load_weights(pointers, rk, i * BLOCK_K, ok, K, BLOCK_K, EVEN_N),)
        if MODE == "glu":
            early_up = early_up + (_load_weights(up_pointers, rk, i * BLOCK_K, ok, K, BLOCK_K, EVEN_N),)
    norm, bias = column_parameters(norm_ptr, bias_ptr, rn, N, norm_offset, 0, BLOCK_N, MODE, HAS_BIAS, SPLITS)
    if PDL:
        gdc_wait()
    # what the epilogue reads is asked for now: behind the sums' barriers its latency would show
    if SUMSQ_BLOCK > 0:
        rs = tl.arange(0, SUMSQ_BLOCK)
        squares = sumsq_ptr + tl.minimum(rm, M - 1)[:, None] * sumsq_tiles + rs[None, :]
        sumsq = tl.load(squares, mask=(rs < sumsq_tiles)[None, :], other=0.0)
    before = 0.0
    if MODE == "residual":
        before = tl.load(residual_ptr + rm[None, :] * N + rn[:, None], mask=(rm < M)[None, :] & ok[:, None], other=0.0)
    nothing = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    sums = (nothing, nothing)
    up_sums = (nothing, nothing)
    for i in tl.static_range(STEPS):
        if i < PREFETCH:
            w = early[i]
        else:
            w = _load_weights(pointers, rk, i * BLOCK_K, ok, K, BLOCK_K, EVEN_N)
        sums = _add_step(sums, w, x_ptr, M - 1, rk, i * BLOCK_K, K, BLOCK_N, BLOCK_K)
        if MODE == "glu":
            if i < PREFETCH:
                w = early_up[i]
            else:
                w = _load_weights(up_pointers, rk, i * BLOCK_K, ok, K, BLOCK_K, EVEN_N)
            up_sums = _add_step(up_sums, w, x_ptr, M - 1, rk, i * BLOCK_K, K, BLOCK_N, BLOCK_K)
    acc = tl.sum(tl.join(sums[0], sums[1]), 1)  # [BLOCK_N, rows]
    up_acc = acc
    if MODE == "glu":
        up_acc = tl.sum(tl.join(up_sums[0], up_sums[1]), 1)
    if SUMSQ_BLOCK > 0:
        factor = tl.rsqrt(tl.sum(sumsq, 1) / K + eps)
        acc = acc * factor[None, :]
        if MODE == "glu":
            up_acc = up_acc * factor[None, :]
    finish(
        acc, up_acc, before, out_ptr, residual_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr, norm, bias, rm, rn, M, N,
        tl.program_id(0), 0, sumsq_out_tiles, scale, softcap, MODE, ACTIVATION, HAS_SOFTCAP, SPLITS, True, COLUMNS=0,
    )  # fmt: skip


def plan(tile: TwoRowTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None) -> Plan:
    width = x.shape[1]
    own = {
        "x_ptr": x, "w_ptr": weight.data, "BLOCK_K": tile.block_k,
        "PREFETCH": min(tile.prefetch, -(-width // tile.block_k)), "SUMSQ_BLOCK": sumsq_block(sumsq, 64),
        "EVEN_N": columns % tile.block_n == 0,
    }  # fmt: skip
    return Plan(_two_rows_kernel, (-(-columns // tile.block_n),), own)
