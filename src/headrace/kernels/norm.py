"""RMSNorm, alone and fused with the residual add before it, and with the norm of what is added."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.launch import Launcher, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, tl


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., H] / rms(x) * (weight [H] + offset), computed in float32, rounded once to x's dtype."""
    if offset:
        weight = weight.float() + offset
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight.float(), eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0, post: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `add_rms_norm`."""
    if x.dim() > residual.dim():
        x = x.float().sum(0)
    if post is not None:
        x = rms_norm_reference(x, post, eps, offset).to(residual.dtype)
    residual = torch.add(residual, x, alpha=scale).to(residual.dtype)
    return rms_norm_reference(residual, weight, eps, offset), residual


@jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, post_ptr, out_ptr, sum_ptr, eps, offset, scale, x_stride, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr,
    POST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (column < WIDTH) & (row < num_rows)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset  # cold: before the wait
    if POST:
        post = tl.load(post_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + (part * num_rows + row) * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if POST:  # rounded as by a kernel of its own
        x = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / WIDTH + eps) * post
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
    if ADD:
        x = tl.load(residual_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32) + scale * x
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + column, rounded, mask=mask)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + column, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=mask)


_launcher = Launcher(_rms_norm)


@dataclass(frozen=True, slots=True)
class NormTile:
    """Rows and warps of a program."""

    rows: int
    num_warps: int


@functools.cache
def default_tile(width: int) -> NormTile:
    """16 elements a thread, two loads of 16 bytes in bfloat16, or more where the width is no power of two: with a warp for each
    512 of the next one rows of 2,304 take a sixth longer on an H200."""
    return NormTile(1, min(16, max(1, next_power_of_2(width // 512 + 1) // 2)))


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, offset: float,
            scale: float, add: bool, tile: NormTile | None, post: Tensor | None = None) -> None:  # fmt: skip
    rows, width = x.shape[-2:]
    tile, parts = tile or default_tile(width), len(x) if x.dim() == 3 else 1
    _launcher(
        -(-rows // tile.rows), (x, residual, weight, weight if post is None else post, out, total),
        (eps, offset, scale, x.stride(-2)), (rows,), num_warps=tile.num_warps, WIDTH=width,
        BLOCK=next_power_of_2(width), ROWS=tile.rows, PARTS=parts, ADD=add, POST=post is not None,
    )  # fmt: skip


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, tile: NormTile | None = None) -> Tensor:
    """See `rms_norm`; x [T, H] may have strided rows."""
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        _launch(rows, rows, weight, out, out, eps, offset, 1.0, False, tile)
    return out


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0,
    post: Tensor | None = None, *, tile: NormTile | None = None, into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `add_rms_norm`."""
    out, total = (torch.empty_like(residual) for _ in range(2)) if into is None else into
    if residual.shape[0]:
        _launch(x, residual, weight, out, total, eps, offset, scale, True, tile, post)
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm over the last dimension: x [..., H], weight [H] -> [..., H] in x's dtype (Zhang & Sennrich 2019)."""
    return (rms_norm_triton if on_gpu(x) else rms_norm_reference)(x, weight, eps, offset)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0,
    post: Tensor | None = None, *, into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """new_residual = residual + scale * x; returns (RMSNorm(new_residual), new_residual), both [T, H] in x's dtype.

    x [T, H], or [P, T, H], contiguous: parts of a sum. With a weight `post` [H] what is added is RMSNorm(x) by it, rounded to
    x's dtype. `into`: the two that get the result, of which the second may be `residual`.
    """
    if on_gpu(x):
        return add_rms_norm_triton(x, residual, weight, eps, offset, scale, post, into=into)
    found = add_rms_norm_reference(x, residual, weight, eps, offset, scale, post)
    return found if into is None else (into[0].copy_(found[0]), into[1].copy_(found[1]))


@jit(do_not_specialize=["num_rows"])
def _add_normed(
    x_ptr, weight_ptr, total_ptr, factor_ptr, eps, x_stride, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (column < WIDTH) & (row < num_rows)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)  # cold: before the wait
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / WIDTH + eps)
    place = total_ptr + row * WIDTH + column
    total = tl.load(place, mask=mask, other=0.0).to(tl.float32) + x * rstd * weight
    if FACTOR:
        total *= tl.load(factor_ptr).to(tl.float32)
    tl.store(place, total.to(total_ptr.dtype.element_ty), mask=mask)


_adder = Launcher(_add_normed)


def add_normed_reference(total: Tensor, x: Tensor, weight: Tensor, eps: float, factor: Tensor | None = None) -> None:
    """See `add_normed`."""
    total += rms_norm_reference(x, weight, eps)
    if factor is not None:
        total *= factor


def add_normed_triton(total: Tensor, x: Tensor, weight: Tensor, eps: float, factor: Tensor | None = None) -> None:
    """See `add_normed`; rounded once."""
    rows, width = x.shape
    tile = default_tile(width)
    if rows:
        _adder(
            -(-rows // tile.rows), (x, weight, total, weight if factor is None else factor), (eps, x.stride(0)), (rows,),
            num_warps=tile.num_warps, WIDTH=width, BLOCK=next_power_of_2(width), ROWS=tile.rows, FACTOR=factor is not None,
        )  # fmt: skip


def add_normed(total: Tensor, x: Tensor, weight: Tensor, eps: float, factor: Tensor | None = None) -> None:
    """total = (total + RMSNorm(x)) * factor, in place: total, x [T, H], weight [H], factor [1]."""
    (add_normed_triton if on_gpu(x) else add_normed_reference)(total, x, weight, eps, factor)
