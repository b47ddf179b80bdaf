"""What the small-batch matrix products do around the product: RMSNorm scale, gated activation, soft cap, residual add.

RMSNorm is split between two kernels so that neither needs a pass of its own. The kernel that makes a residual r [M, H] also
stores x = r * norm weight and, per row and output tile, the sum of r^2; the next product computes x @ W.T, which is the
normed product up to one factor a row, and multiplies it by 1 / sqrt(sum / H + eps) (Zhang & Sennrich 2019).
Below: what the product kernels share, and the torch references that say what they compute.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.launch import jit, next_power_of_2, tl


class SplitSpace:
    """Partial sums and tickets of products whose K is split; one serves all products of a step, which run in order."""

    def __init__(self, elements: int, tiles: int, device: torch.device):
        self.partials = torch.empty(elements, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(tiles, dtype=torch.int32, device=device)  # each product leaves them at 0


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
def activate(x, KIND: tl.constexpr):
    """silu, gelu_tanh or gelu of a float32 tensor."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu_tanh":  # 0.5 (1 + tanh u) = sigmoid(2 u); 2 sqrt(2 / pi)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@jit
def soft_cap(x, cap):
    """cap * tanh(x / cap)"""
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)


@jit
def leave_split(acc, slab, ticket_ptr, split, SIZE: tl.constexpr):
    """Store a split's partial sums, SIZE of them, in its place behind `slab` -> how many splits of the tile did so before."""
    tl.store(slab + split * SIZE, acc)
    tl.debug_barrier()  # all threads' stores before the one thread's release
    return tl.atomic_add(ticket_ptr, 1, sem="acq_rel")


@jit
def add_splits(slab, ticket_ptr, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """The sum of all splits, in their order, for the program that came last; the ticket is ready for the next product."""
    total = tl.load(slab, cache_modifier=".cg")
    for s in tl.static_range(1, SPLITS):
        total += tl.load(slab + s * SIZE, cache_modifier=".cg")
    tl.store(ticket_ptr, 0)
    return total


@jit
def update_residual(
    acc, before, residual_ptr, out_ptr, norm, bias, sumsq_out_ptr, sumsq_out_tiles, place, ok, rm, row_ok, scale,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """residual = before + scale * (acc + bias), and what the next product needs: see products.residual.

    The columns of acc, to which bias and norm belong, are its axis COLUMNS (0 or 1), the rows rm the other one.
    """
    r = before + scale * (acc + tl.expand_dims(bias, 1 - COLUMNS))
    tl.store(residual_ptr + place, r, mask=ok)
    tl.store(out_ptr + place, (r * tl.expand_dims(norm, 1 - COLUMNS)).to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(sumsq_out_ptr + rm * sumsq_out_tiles + tl.program_id(0), tl.sum(r * r, COLUMNS), mask=row_ok)


def rms_factor_reference(sumsq: Tensor | None, width: int, eps: float) -> Tensor | float:
    """[M, tiles] partial sums of squares -> [M, 1] factors; None -> 1."""
    return 1.0 if sumsq is None else torch.rsqrt(sumsq.sum(1, keepdim=True) / width + eps)


def project_reference(
    x: Tensor, weight: Tensor, sumsq: Tensor | None, eps: float, bias: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """x [M, K], weight [N, K] -> softcap(scale * (norm factor * x @ weight.T + bias)) [M, N] float32."""
    y = F.linear(x.float(), weight.float()) * rms_factor_reference(sumsq, x.shape[1], eps)
    if bias is not None:
        y = y + bias.float()
    y = y * scale
    return softcap * torch.tanh(y / softcap) if softcap else y


def glu_reference(x: Tensor, weight: Tensor, sumsq: Tensor | None, eps: float, kind: str) -> Tensor:
    """x [M, K], weight [2 I, K] (gate rows, then up rows) -> activation(gate) * up [M, I] float32."""
    gate, up = (F.linear(x.float(), weight.float()) * rms_factor_reference(sumsq, x.shape[1], eps)).chunk(2, 1)
    if kind == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def residual_reference(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    next_norm: Tensor,
    norm_offset: float,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(r = residual + scale * (x @ weight.T + bias), r * (next_norm + offset), sum of r^2 [M, 1]), all float32."""
    y = F.linear(x.float(), weight.float())
    if bias is not None:
        y = y + bias.float()
    r = residual + scale * y
    return r, r * (next_norm.float() + norm_offset), r.square().sum(1, keepdim=True)
