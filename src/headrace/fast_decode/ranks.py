"""What joins the residual in a fused decode step where several ranks have parts of it.

One kernel after the product sends this rank's part to all, adds up what comes, and adds the sum to the residual
(kernels/all_reduce.py); the norm is split as on one rank (epilogues.py). Of one row the product's own programs send what they
have. So a layer has seven kernels instead of five. What is looked up joins the residual normed already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.fast_decode.embed_residual import embed_residual
from headrace.fast_decode.epilogues import runs_triton
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.products import Tile, num_splits, project, send
from headrace.kernels.all_reduce import RowPlace, all_reduce_norm, row_sum, row_sum_tiles
from headrace.kernels.norm import rms_norm_reference
from headrace.model.shard import Group
from headrace.model.weight import Weight


class RankParts:
    """Parts of up to `rows` rows, of products that are split along K up to `splits` times."""

    def __init__(
        self, group: Group, rows: int, splits: int, hidden: int, dtype: torch.dtype, device: torch.device, *,
        eps: float, norm_offset: float,
    ):  # fmt: skip
        self.group, self.eps, self.norm_offset = group, eps, norm_offset
        self.push = group.push_space(rows, hidden, dtype)
        self.parts = torch.zeros((splits * rows, hidden), device=device)
        self.unused = torch.zeros(rows, device=device)
        self.sumsq = torch.zeros((rows, row_sum_tiles(hidden)), device=device)

    def embed(self, token_ids: Tensor, table: Tensor, total: Tensor, normed: Tensor, norm: Tensor, scale: float) -> None:
        """As `embed_residual` of all ranks' tables, which are of equal length; but `normed` is RMSNorm(total)."""
        part = self.parts[: len(total)]
        embed_residual(
            token_ids, table, part, normed, self.unused[: len(total), None], norm, scale=scale,
            norm_offset=self.norm_offset, first_id=self.group.shard.rank * len(table),
        )  # fmt: skip
        self._close(part[None], total, normed, norm, None, 1.0)

    def residual(
        self, x: Tensor, weight: Weight, total: Tensor, normed: Tensor, norm: Tensor, tile: Tile, *, scale: float,
        bias: Tensor | None, phase: int,
    ) -> Tensor | None:  # fmt: skip
        """total [M, N] float32 += scale * the sum of all ranks' (x @ weight.T + bias), in place; normed = RMSNorm(total), or
        total * the norm's weight, and then the sums of total^2 are returned. `phase`: of a step's sums 0 and 1 take turns."""
        rows, splits = len(x), num_splits(tile)
        place = None if self.push is None or not runs_triton(x) or rows > self.push.place_rows else RowPlace(self.push, phase)
        parts: Tensor | None = None
        if place is not None and isinstance(tile, GemvTile):
            send(x, weight, tile, place, bias)
        else:
            parts = self.parts[: splits * rows].view(splits, rows, -1)
            project(x, weight, parts, tile, bias=bias)
        if place is None:
            assert parts is not None
            self._close(parts, total, normed, norm, total, scale)
            return None
        sumsq = self.sumsq[:rows]
        row_sum(place, total, normed, sumsq, norm, parts=parts, offset=self.norm_offset, scale=scale)
        return sumsq

    def adds_up(self, rows: int) -> bool:
        """Whether `add_norm` takes so many rows: also of steps that are none of the fused path's."""
        return self.push is not None and rows <= self.push.max_rows

    def add_norm(self, parts: Tensor, residual: Tensor, norm: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(RMSNorm(total), total = residual + scale * the sum of all ranks' parts), [rows, hidden] in the model's dtype; with
        the bits of a sum, an addition and a norm one after the other. parts [slabs, rows, hidden]: their sum is this rank's."""
        assert self.push is not None
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        all_reduce_norm(
            parts, self.push, total, normed, norm, residual=residual, eps=self.eps, offset=self.norm_offset, scale=scale
        )  # fmt: skip
        return normed, total

    def _close(
        self, parts: Tensor, total: Tensor, normed: Tensor, norm: Tensor, residual: Tensor | None, scale: float
    ) -> None:  # fmt: skip
        if self.push is not None and runs_triton(parts):
            all_reduce_norm(
                parts, self.push, total, normed, norm, residual=residual, eps=self.eps, offset=self.norm_offset, scale=scale
            )  # fmt: skip
            return
        y = self.group.sum(parts.sum(0).to(normed.dtype)).float()
        total.copy_(y if residual is None else residual + scale * y)
        normed.copy_(rms_norm_reference(total, norm, self.eps, self.norm_offset))
