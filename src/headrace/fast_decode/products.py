"""The matrix products of a fused decode step: what they compute, by the kernel that the tile's type names.

    GemvTile   CUDA cores, one row                           gemv.py
    GemmTile   tensor cores, 2 to 64 rows                    skinny_gemm.py
    RingTile   the same on Hopper, weights by the copy engine ring_gemm.py
    WideTile   tensor cores and copy engine, up to 256 rows  wide_gemm.py
    WarpTile   tensor cores, narrow weights, few rows        warp_gemm.py
    DigitTile  tensor cores' whole numbers on Hopper, 4 bits, weights by the copy engine: one row  digit_gemm.py
    RoundedTile FP8 tensor cores, weights and rows in FP8, 2 to 64 rows  rounded_gemm.py
    WidenedTile tensor cores on Hopper, weights of 4 or 8 bits by the copy engine, up to 64 rows  widened_gemm.py

With narrow weights GemmTile and WideTile are of narrow_gemm.py. Activations in FP8, [M, K] or as pairs [2, M, K], have
`sizes` [chunks, >= M] (see kernels/rounded.py), those that a product leaves `out_sizes`; only RoundedTile takes them.

`sumsq` [M, tiles] float32 are partial sums of squares of the residual that x is made of: the product of RMSNorm(residual) and
the weight is norm factor * x @ weight.T (see epilogues.py). Products of many programs to a column add up by `space`.
`low_rank`: what adapters add to a product of float weights, before the norm factor (kernels/lora_product.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headrace.fast_decode import (
    digit_tile,
    gemv,
    narrow_gemm,
    ring_tile,
    rounded_tile,
    skinny_gemm,
    warp_gemm,
    wide_gemm,
    widened_tile,
)
from headrace.fast_decode.digit_tile import DigitTile
from headrace.fast_decode.epilogues import (
    Plan,
    glu_reference,
    project_reference,
    residual_reference,
    runs_triton,
)
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.ring_tile import RingTile
from headrace.fast_decode.rounded_tile import RoundedTile
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.warp_gemm import WarpTile
from headrace.fast_decode.wide_gemm import WideTile
from headrace.fast_decode.widened_tile import WidenedTile
from headrace.kernels.all_reduce import RowPlace
from headrace.kernels.launch import pdl
from headrace.kernels.lora_product import LowRank
from headrace.kernels.narrow import packed
from headrace.kernels.rounded import keep, numbers
from headrace.kernels.split import SplitSpace
from headrace.model.weight import Weight

Tile = GemvTile | GemmTile | RingTile | WideTile | WarpTile | DigitTile | RoundedTile | WidenedTile
MAX_ROWS: dict[type, int] = {
    GemvTile: gemv.MAX_ROWS, GemmTile: skinny_gemm.MAX_ROWS, RingTile: ring_tile.MAX_ROWS, WideTile: wide_gemm.MAX_ROWS,
    WarpTile: warp_gemm.MAX_ROWS, DigitTile: digit_tile.MAX_ROWS, RoundedTile: rounded_tile.MAX_ROWS,
    WidenedTile: widened_tile.MAX_ROWS,
}  # fmt: skip


def _ring_plan(*arguments: Any, **more: Any) -> Plan:
    from headrace.fast_decode.ring_gemm import plan  # which needs Gluon

    return plan(*arguments, **more)


def _rounded_plan(*arguments: Any, **more: Any) -> Plan:
    from headrace.fast_decode.rounded_gemm import plan

    return plan(*arguments, **more)


def _widened_plan(*arguments: Any) -> Plan:
    from headrace.fast_decode.widened_gemm import plan

    return plan(*arguments)


def _digit_plan(*arguments: Any) -> Plan:
    from headrace.fast_decode.digit_gemm import plan

    return plan(*arguments)


PLAN: dict[type, Callable[..., Plan]] = {
    GemvTile: gemv.plan, GemmTile: skinny_gemm.plan, RingTile: _ring_plan, WideTile: wide_gemm.plan,
    WarpTile: warp_gemm.plan, DigitTile: _digit_plan, RoundedTile: _rounded_plan,
    WidenedTile: _widened_plan,
}  # fmt: skip
NARROW_PLAN: Callable[..., Plan] = narrow_gemm.plan


def num_splits(tile: Tile) -> int:
    return 1 if isinstance(tile, GemvTile) else tile.splits


def _launch(
    mode: str, x: Tensor, weight: Weight, out: Tensor, tile: Tile, *, columns: int, sumsq: Tensor | None = None,
    eps: float = 0.0, bias: Tensor | None = None, scale: float = 1.0, softcap: float = 0.0, activation: str = "silu",
    residual: Tensor | None = None, norm: Tensor | None = None, norm_offset: float = 0.0,
    sumsq_out: Tensor | None = None, space: SplitSpace | None = None, push: RowPlace | None = None,
    low_rank: LowRank | None = None, sizes: Tensor | None = None, out_sizes: Tensor | None = None,
) -> None:  # fmt: skip
    rows, width = x.shape[-2:]
    if not 1 <= rows <= MAX_ROWS[type(tile)]:
        raise ValueError(f"{tile} takes 1 to {MAX_ROWS[type(tile)]} rows, not {rows}")
    if isinstance(tile, DigitTile) and not digit_tile.takes(weight, x, tile, columns):
        tile = tile.otherwise(mode == "glu")
    if isinstance(tile, WarpTile) and not warp_gemm.takes(weight, x, tile):
        tile = tile.otherwise(rows, packed(weight.kind), mode == "glu")
    if isinstance(tile, RingTile) and (low_rank is not None or not ring_tile.takes(weight, x)):
        tile = tile.otherwise(x, mode == "glu")
    if isinstance(tile, WidenedTile) and not widened_tile.takes(weight, x, tile, columns):
        tile = tile.otherwise(mode == "glu")
    if isinstance(tile, RoundedTile) and sizes is None:
        tile = tile.otherwise()
    by_own = weight.kind == "float" or isinstance(tile, GemvTile | WarpTile | DigitTile | RoundedTile | WidenedTile)
    plan = PLAN[type(tile)] if by_own else NARROW_PLAN
    more: dict[str, Any] = {name: given for name, given in (("push", push), ("low_rank", low_rank)) if given is not None}
    if sizes is not None:
        more |= {"sizes": sizes, "out_sizes": out_sizes}
    if isinstance(tile, RingTile) and mode == "residual":
        more["joins"] = True
    kernel, grid, own = plan(tile, x, weight, columns, sumsq, **more)
    if not isinstance(tile, GemvTile | DigitTile):  # of one row
        own |= {
            "M": rows, "K": width, "SPLITS": tile.splits,
            "sumsq_out_tiles": 0 if sumsq_out is None else sumsq_out.shape[1], "num_stages": tile.num_stages,
            "partials_ptr": None if space is None else space.partials,
            "tickets_ptr": None if space is None else space.tickets,
        }  # fmt: skip
    kernel[grid](
        bias_ptr=bias, sumsq_ptr=sumsq, out_ptr=out, residual_ptr=residual, norm_ptr=norm, sumsq_out_ptr=sumsq_out, N=columns,
        sumsq_tiles=0 if sumsq is None else sumsq.shape[1], eps=eps, scale=scale, softcap=softcap, norm_offset=norm_offset,
        BLOCK_N=tile.block_n, MODE=mode, ACTIVATION=activation, HAS_BIAS=bias is not None,
        HAS_SOFTCAP=softcap != 0.0, num_warps=tile.num_warps, **own, **pdl(x),
    )  # fmt: skip


def _runs(x: Tensor, sizes: Tensor | None) -> bool:
    """Whether a kernel does it; otherwise torch."""
    return runs_triton(x) if sizes is None else rounded_tile.runs(x)


def _numbers(x: Tensor, sizes: Tensor | None) -> Tensor:
    return x if sizes is None else numbers(x, sizes)


def project(
    x: Tensor, weight: Weight, out: Tensor, tile: Tile, *, sumsq: Tensor | None = None, eps: float = 0.0,
    bias: Tensor | None = None, scale: float = 1.0, softcap: float = 0.0, low_rank: LowRank | None = None,
    sizes: Tensor | None = None,
) -> None:  # fmt: skip
    """out [splits, M, N] whose sum over the splits is scale * (norm factor * x [M, K] @ weight [N, K].T + bias [N]).

    With one split also soft-capped. Without `sumsq` the norm factor is 1.
    """
    if softcap and num_splits(tile) > 1:
        raise ValueError("a soft cap cannot be applied to partial sums")
    if _runs(x, sizes):
        _launch(
            "project", x, weight, out, tile, columns=weight.shape[0], sumsq=sumsq, eps=eps, bias=bias, scale=scale,
            softcap=softcap, low_rank=low_rank, sizes=sizes,
        )  # fmt: skip
    else:
        out.zero_()[0] = project_reference(_numbers(x, sizes), weight, sumsq, eps, bias, scale, softcap)


def send(x: Tensor, weight: Weight, tile: GemvTile, place: RowPlace, bias: Tensor | None = None) -> None:
    """x [1, K] @ weight [N, K].T + bias [N], a part of a sum, to all ranks: see `row_sum` in kernels/all_reduce.py."""
    _launch("push", x, weight, place.space.slots, tile, columns=weight.shape[0], bias=bias, push=place)


def glu(
    x: Tensor, weight: Weight, out: Tensor, tile: Tile, *, sumsq: Tensor | None, eps: float, activation: str = "silu",
    low_rank: LowRank | None = None, sizes: Tensor | None = None, out_sizes: Tensor | None = None,
) -> None:  # fmt: skip
    """out [M, I] = activation(gate) * up, where gate, up [M, I] are the halves of norm factor * x @ weight [2 I, K].T."""
    if num_splits(tile) > 1:
        raise ValueError("a gated product cannot be split along K")
    if _runs(x, sizes):
        _launch(
            "glu", x, weight, out, tile, columns=weight.shape[0] // 2, sumsq=sumsq, eps=eps, activation=activation,
            low_rank=low_rank, sizes=sizes, out_sizes=out_sizes,
        )  # fmt: skip
    else:
        keep(out, glu_reference(_numbers(x, sizes), weight, sumsq, eps, activation), out_sizes)


def residual(
    x: Tensor, weight: Weight, total: Tensor, normed: Tensor, sumsq_out: Tensor, next_norm: Tensor, tile: Tile,
    space: SplitSpace | None = None, *, norm_offset: float = 0.0, scale: float = 1.0, bias: Tensor | None = None,
    low_rank: LowRank | None = None, sizes: Tensor | None = None, out_sizes: Tensor | None = None,
) -> None:  # fmt: skip
    """total [M, N] float32 += scale * (x [M, K] @ weight [N, K].T + bias), in place.

    Also writes normed [M, N] = total * (next_norm + norm_offset) and sumsq_out [M, cdiv(N, block_n)] float32, the sums of
    total^2 over each tile: what the next product needs to see RMSNorm(total).
    """
    if _runs(x, sizes):
        _launch(
            "residual", x, weight, normed, tile, columns=weight.shape[0], residual=total, norm=next_norm,
            norm_offset=norm_offset, scale=scale, bias=bias, sumsq_out=sumsq_out, space=space, low_rank=low_rank,
            sizes=sizes, out_sizes=out_sizes,
        )  # fmt: skip
    else:
        new, scaled, squares = residual_reference(_numbers(x, sizes), weight, total, next_norm, norm_offset, scale, bias)
        total.copy_(new)
        keep(normed, scaled, out_sizes)
        sumsq_out.zero_()[:, :1] = squares
