"""A tile of weights times one row of x on the CUDA cores, as `fast_decode.gemv` and the experts' kernels for few rows do it:
a step's weights are loaded at once, and eight or sixteen neighbours are summed within the thread that loaded them."""

from __future__ import annotations

from headrace.kernels.launch import jit, tl
from headrace.kernels.narrow_row import load_scales, multiply_add_narrow


@jit
def _load_weights(
    pointers, rk, k: tl.constexpr, rows_ok, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVICT: tl.constexpr
):  # fmt: skip
    if EVEN_N and k + BLOCK_K <= K:
        return tl.load(pointers + k, eviction_policy=EVICT)
    return tl.load(pointers + k, mask=rows_ok[:, None] & (k + rk < K)[None, :], other=0, eviction_policy=EVICT)


@jit
def _multiply_add(
    acc, weights, x_ptr, rk, k: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_K / 8] += weights * x, eight neighbours summed within the thread that loaded them."""
    if k + BLOCK_K <= COLUMNS:
        x = tl.load(x_ptr + k + rk).to(tl.float32)
    else:
        x = tl.load(x_ptr + k + rk, mask=k + rk < COLUMNS, other=0.0).to(tl.float32)
    return acc + tl.sum(tl.reshape(weights * x[None, :], (BLOCK_N, BLOCK_K // 8, 8)), 2)


@jit
def add_step(
    acc, step, x_ptr, rk, k: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc += a step's weights, from byte k of their rows on, times x of COLUMNS numbers."""
    weights, scales, zeros = step
    if KIND == "float":
        acc = _multiply_add(acc, weights.to(tl.float32), x_ptr, rk, k, COLUMNS, BLOCK_N, BLOCK)
    else:
        acc = multiply_add_narrow(acc, weights, scales, zeros, x_ptr, k, COLUMNS, BLOCK_N, BLOCK, KIND, GROUP, ZEROS, ASM)
    return acc


@jit
def load_step(
    pointers, scales_ptr, zeros_ptr, rk, k: tl.constexpr, rn, first, last, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, EVEN_N: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A step's weights of rows `first` to `last`, and of narrow ones scales and zeros for both halves of the bytes. EVICT: how
    long weights stay in the L2 cache, as tl.load has it."""
    FOUR: tl.constexpr = KIND == "int4" or KIND == "fp4"
    weights = _load_weights(pointers, rk, k, rn < last, WIDTH, BLOCK, EVEN_N, EVICT)
    scales = (1.0, 1.0)
    zeros = (8.0, 8.0)
    if GROUP > 0:
        scales = load_scales(scales_ptr, first, last, k, WIDTH, BLOCK_N, BLOCK, GROUP, GROUPS, SCALE_ROWS, FOUR, EVEN_N)
    if ZEROS:
        zeros = load_scales(zeros_ptr, first, last, k, WIDTH, BLOCK_N, BLOCK, GROUP, GROUPS, SCALE_ROWS, FOUR, EVEN_N)
    return weights, scales, zeros
