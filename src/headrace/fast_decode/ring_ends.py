"""What a fused step's products in Gluon do around their sums, which such kernels have as [columns, rows]: see epilogues.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.kernels.activation import soft_cap


@gluon.jit
def column_parameters(
    norm_ptr, bias_ptr, rn, ok, norm_offset, split, of_columns: gl.constexpr, BLOCK_N: gl.constexpr, MODE: gl.constexpr,
    HAS_BIAS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """As that of epilogues.py; `ok`: which of the columns there are."""
    norm = gl.full([BLOCK_N], 0.0, gl.float32, of_columns)
    if MODE == "residual":
        norm = gl.load(norm_ptr + rn, mask=ok, other=0.0).to(gl.float32) + norm_offset
    bias = gl.full([BLOCK_N], 0.0, gl.float32, of_columns)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + rn, mask=ok, other=0.0).to(gl.float32)
        if MODE == "project" and SPLITS > 1:
            bias = gl.where(split == 0, bias, 0.0)
    return norm, bias


@gluon.jit
def norm_factors(sumsq, K, eps, flat: gl.constexpr):
    """Of each row, from its sums of squares."""
    return gl.convert_layout(gl.rsqrt(gl.sum(sumsq, 1) / K + eps), gl.SliceLayout(0, flat))


@gluon.jit
def store_projected(y, bias, scale, softcap, out_ptr, place, ok, split, M, N, HAS_SOFTCAP: gl.constexpr):
    y = (y + bias[:, None]) * scale
    if HAS_SOFTCAP:
        y = soft_cap(y, softcap)
    gl.store(out_ptr + split * M * N + place, y.to(out_ptr.dtype.element_ty), mask=ok)


@gluon.jit
def store_joined(
    y, before, bias, norm, scale, residual_ptr, out_ptr, sumsq_out_ptr, sumsq_out_tiles, tile, place, ok, rm, M
):  # fmt: skip
    """The whole sum joins the residual, `before`."""
    r = before + scale * (y + bias[:, None])
    gl.store(residual_ptr + place, r, mask=ok)
    gl.store(out_ptr + place, (r * norm[:, None]).to(out_ptr.dtype.element_ty), mask=ok)
    gl.store(sumsq_out_ptr + rm * sumsq_out_tiles + tile, gl.sum(r * r, 0), mask=rm < M)
