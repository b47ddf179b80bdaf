"""What a product gives is normed before it joins the residual (Gemma-2/3, GLM-4): one kernel of few rows behind the product.

The norm needs whole rows, which no program of the product has. So the product leaves its parts in float32, and a program for
each row adds them up, norms the sum, adds it to the residual, and leaves what the next product needs (see epilogues.py).
"""

from __future__ import annotations

from torch import Tensor

from headrace.fast_decode.epilogues import runs_triton
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl


@jit(do_not_specialize=["slab_stride"])
def _join_normed_kernel(
    parts_ptr, post_ptr, norm_ptr, total_ptr, normed_ptr, sumsq_ptr, slab_stride, eps, scale, norm_offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLABS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # the next product has weights to load, and this kernel leaves it nearly the whole card
        gdc_launch_dependents()
    row = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    ok = r < WIDTH
    post = tl.load(post_ptr + r, mask=ok, other=0.0).to(tl.float32) + norm_offset
    norm = tl.load(norm_ptr + r, mask=ok, other=0.0).to(tl.float32) + norm_offset
    if PDL:
        gdc_wait()
    place = row * WIDTH + r
    total = tl.load(total_ptr + place, mask=ok, other=0.0)
    x = tl.load(parts_ptr + place, mask=ok, other=0.0)
    for j in tl.static_range(1, SLABS):
        x += tl.load(parts_ptr + j * slab_stride + place, mask=ok, other=0.0)
    total += scale * (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * post)
    tl.store(total_ptr + place, total, mask=ok)
    tl.store(normed_ptr + place, (total * norm).to(normed_ptr.dtype.element_ty), mask=ok)
    tl.store(sumsq_ptr + row, tl.sum(total * total, 0))


def join_normed(
    parts: Tensor, post: Tensor, total: Tensor, normed: Tensor, sumsq: Tensor, next_norm: Tensor, *, eps: float, scale: float,
    norm_offset: float,
) -> None:  # fmt: skip
    """total [M, H] float32 += scale * RMSNorm(the sum of parts [splits, M, H] float32) by the weight post [H], in place.

    Also writes normed [M, H] = total * (next_norm + norm_offset) and sumsq [M, 1] float32, the sums of total^2.
    """
    splits, rows, width = parts.shape
    if not runs_triton(parts):
        x = parts.sum(0)
        factor = (x.square().mean(1, keepdim=True) + eps).rsqrt()
        total += scale * (x * factor * (post.float() + norm_offset))
        normed.copy_(total * (next_norm.float() + norm_offset))
        sumsq.copy_(total.square().sum(1, keepdim=True))
        return
    block = next_power_of_2(width)
    _join_normed_kernel[(rows,)](
        parts, post, next_norm, total, normed, sumsq, rows * width, eps, scale, norm_offset, WIDTH=width, BLOCK=block,
        SLABS=splits, num_warps=min(8, max(1, block // 256)), **pdl(parts),
    )  # fmt: skip
