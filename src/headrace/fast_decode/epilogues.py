"""What the small-batch matrix products do around the product: RMSNorm scale, gated activation, soft cap, residual add.

RMSNorm is split between two kernels so that neither needs a pass of its own. The kernel that makes a residual r [M, H] also
stores x = r * norm weight and, per row and output tile, the sum of r^2; the next product computes x @ W.T, which is the
normed product up to one factor a row, and multiplies it by 1 / sqrt(sum / H + eps) (Zhang & Sennrich 2019).
Below: what the product kernels share, and the torch references that say what they compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.activation import activate, soft_cap
from headrace.kernels.launch import jit, next_power_of_2, tl
from headrace.kernels.split import count_part
from headrace.model.weight import Weight, dequantized


class Plan(NamedTuple):
    """How a tile's kernel is launched: its grid, and the arguments that only it has."""

    kernel: Any
    grid: tuple[int, ...]
    own: dict[str, Any]


def split_width(width: int, splits: int, block_k: int) -> int:
    """Elements of K that one split sums: whole steps, the last split may have fewer (or none)."""
    return -(-width // (splits * block_k)) * block_k


def runs_triton(tensor: Tensor) -> bool:
    """Whether the fused decode kernels run as Triton: on a card, or on the CPU in Triton's interpreter (tests)."""
    if tensor.is_cuda:
        return True
    import triton

    return bool(triton.knobs.runtime.interpret)


def sumsq_block(sumsq: Tensor | None, at_least: int) -> int:
    """The power of two that holds a row of sumsq; 0 for none. Coarse: each size is a variant of the kernel."""
    return 0 if sumsq is None else max(at_least, next_power_of_2(sumsq.shape[1]))


@jit
def column_parameters(
    norm_ptr, bias_ptr, rn, N, norm_offset, split,
    BLOCK_N: tl.constexpr, MODE: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The next norm's weights and the bias of columns rn, 0 where there are none: weights, so before the wait."""
    norm = tl.zeros([BLOCK_N], tl.float32)
    if MODE == "residual":
        norm = tl.load(norm_ptr + rn, mask=rn < N, other=0.0).to(tl.float32) + norm_offset
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)
        if MODE == "project" and SPLITS > 1:
            bias = tl.where(split == 0, bias, 0.0)
    return norm, bias


@jit
def finish(
    acc, up_acc, before, out_ptr, residual_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr, norm, bias, rm, rn, M, N, tile, split,
    sumsq_out_tiles, scale, softcap,
    MODE: tl.constexpr, ACTIVATION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """From a tile's sums to what the product gives: see products.py. Axis COLUMNS (0 or 1) of `acc` is that of the columns rn,
    to which norm and bias belong, the other one that of the rows rm; `before` is their residual, if EARLY. Of a tile's splits
    the last one to finish adds up all, in their order."""
    row_ok = rm < M
    place = tl.expand_dims(rm, COLUMNS) * N + tl.expand_dims(rn, 1 - COLUMNS)
    ok = tl.expand_dims(row_ok, COLUMNS) & tl.expand_dims(rn < N, 1 - COLUMNS)
    if MODE == "glu":
        tl.store(out_ptr + place, (activate(acc, ACTIVATION) * up_acc).to(out_ptr.dtype.element_ty), mask=ok)
    elif MODE == "project":
        y = (acc + tl.expand_dims(bias, 1 - COLUMNS)) * scale
        if HAS_SOFTCAP:
            y = soft_cap(y, softcap)
        tl.store(out_ptr + split * M * N + place, y.to(out_ptr.dtype.element_ty), mask=ok)
    else:
        last = True
        if SPLITS > 1:
            # tiles of a split lie together, whole: no masks, and a row of the accumulator is contiguous
            SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
            inner = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
            slab = partials_ptr + tile * (SPLITS * SIZE) + inner
            tl.store(slab + split * SIZE, acc)
            last = count_part(tickets_ptr + tile) == SPLITS - 1
        if last:
            total = acc
            if SPLITS > 1:
                total = tl.load(slab, cache_modifier=".cg")
                for s in tl.static_range(1, SPLITS):
                    total += tl.load(slab + s * SIZE, cache_modifier=".cg")
                tl.store(tickets_ptr + tile, 0)
            old = before
            if not EARLY:
                old = tl.load(residual_ptr + place, mask=ok, other=0.0)
            r = old + scale * (total + tl.expand_dims(bias, 1 - COLUMNS))
            tl.store(residual_ptr + place, r, mask=ok)
            tl.store(out_ptr + place, (r * tl.expand_dims(norm, 1 - COLUMNS)).to(out_ptr.dtype.element_ty), mask=ok)
            tl.store(sumsq_out_ptr + rm * sumsq_out_tiles + tl.program_id(0), tl.sum(r * r, COLUMNS), mask=row_ok)


def rms_factor_reference(sumsq: Tensor | None, width: int, eps: float) -> Tensor | float:
    """[M, tiles] partial sums of squares -> [M, 1] factors; None -> 1."""
    return 1.0 if sumsq is None else torch.rsqrt(sumsq.sum(1, keepdim=True) / width + eps)


def project_reference(
    x: Tensor, weight: Weight, sumsq: Tensor | None, eps: float, bias: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """x [M, K], weight [N, K] -> softcap(scale * (norm factor * x @ weight.T + bias)) [M, N] float32."""
    y = F.linear(x.float(), dequantized(weight, torch.float32)) * rms_factor_reference(sumsq, x.shape[1], eps)
    if bias is not None:
        y = y + bias.float()
    y = y * scale
    return softcap * torch.tanh(y / softcap) if softcap else y


def glu_reference(x: Tensor, weight: Weight, sumsq: Tensor | None, eps: float, kind: str) -> Tensor:
    """x [M, K], weight [2 I, K] (gate rows, then up rows) -> activation(gate) * up [M, I] float32."""
    factor = rms_factor_reference(sumsq, x.shape[1], eps)
    gate, up = (F.linear(x.float(), dequantized(weight, torch.float32)) * factor).chunk(2, 1)
    if kind == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def residual_reference(
    x: Tensor,
    weight: Weight,
    residual: Tensor,
    next_norm: Tensor,
    norm_offset: float,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(r = residual + scale * (x @ weight.T + bias), r * (next_norm + offset), sum of r^2 [M, 1]), all float32."""
    y = F.linear(x.float(), dequantized(weight, torch.float32))
    if bias is not None:
        y = y + bias.float()
    r = residual + scale * y
    return r, r * (next_norm.float() + norm_offset), r.square().sum(1, keepdim=True)
