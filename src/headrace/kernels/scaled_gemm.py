"""FP8 by FP8 with a scale for each row of both, for some dozens to hundreds of rows on Hopper: as `torch._scaled_mm`, which
does not split the sum over K, so that 32 programs read an 8B's down, at a third of the bandwidth.

A program multiplies block_m rows by block_n rows of the weights, over one of `splits` parts of K; tiles come by the tensor copy
engine (TMA), which fills in zeros past the edges. Of several parts the last one to come adds up all, in their order: a row's
result is the same in all replays, and depends on no other row. What a program multiplies first may be asked for, into the L2
cache, while the small kernel before still rounds the rows: of 72 to 128 rows a step of an 8B takes an H200 1 % less with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.launch import TensorDescriptor, capability, gdc_launch_dependents, gdc_wait, jit, pdl, tl, touch
from headrace.kernels.quantize_rows import Rounded
from headrace.kernels.split import count_part

MOST_ROWS = 256
FILL = 132  # programs that fill a card


@dataclass(frozen=True, slots=True)
class ScaledTile:
    """One program's work, and how many steps of block_k are in flight; `touch`: lines (128 bytes) of each of its rows that are
    asked for early."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    touch: int = 0


@jit(do_not_specialize=["M", "tiles_m"])  # or multiples of 16 would be variants
def _scaled_gemm(
    x_tiles, w_tiles, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, partials_ptr, tickets_ptr, M, N, K, tiles_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOUCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # parts of a sum, then tiles of rows are neighbours: these read the same weights at about the same time
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    m0, n0 = tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N
    steps = tl.cdiv(K, BLOCK_K)
    first, stop = split * steps // SPLITS, (split + 1) * steps // SPLITS
    rm, rn = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    w_scales = tl.load(w_scales_ptr + rn, mask=rn < N, other=0.0)
    if PDL:
        if TOUCH > 0:
            lines = tl.minimum(first * BLOCK_K + tl.arange(0, TOUCH) * 128, K - 1)
            touch(w_ptr + tl.minimum(rn, N - 1)[:, None].to(tl.int64) * K + lines[None, :])
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, stop):
        acc = tl.dot(x_tiles.load([m0, step * BLOCK_K]), w_tiles.load([n0, step * BLOCK_K]).T, acc)
    mask = (rm < M)[:, None] & (rn < N)[None, :]
    place = rm[:, None].to(tl.int64) * N + rn[None, :]
    last = True
    if SPLITS > 1:
        part = M.to(tl.int64) * N
        tl.store(partials_ptr + split * part + place, acc, mask=mask)
        last = count_part(tickets_ptr + tile) == SPLITS - 1
        if last:
            tl.store(tickets_ptr + tile, 0)  # as the next launch wants to find it
            acc = tl.load(partials_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")  # from L2, where the others' are
            for other in tl.static_range(1, SPLITS):
                acc += tl.load(partials_ptr + other * part + place, mask=mask, other=0.0, cache_modifier=".cg")
    if last:
        y = acc * tl.load(x_scales_ptr + rm, mask=rm < M, other=0.0)[:, None] * w_scales[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=mask)


def default_tile(rows: int, columns: int, width: int) -> ScaledTile | None:
    """The fastest of some dozens for an 8B's four matrices on an H200 at 40 to 256 rows; None: where cuBLAS's tiles of 128 by
    128 fill the card it is as fast, of more than 64 rows."""
    if rows <= 64:
        if columns >= 128 * FILL:
            return ScaledTile(64, 128, 128, 1, 4, 3)
        return ScaledTile(64, 64, 128, max(1, min(FILL // -(-columns // 64), width // 4096)), 4, 6)
    if rows > MOST_ROWS or -(-rows // 128) * -(-columns // 128) >= FILL:
        return None
    if rows <= 128:
        return ScaledTile(64, 128, 128, max(1, min(FILL // (2 * -(-columns // 128)), width // 4096)), 4, 5, 4)
    return ScaledTile(128, 64, 128, 1, 4, 6) if 2 * -(-columns // 64) <= FILL else ScaledTile(128, 128, 128, 1, 8, 5)


def takes(device: torch.device) -> bool:
    return TensorDescriptor is not None and capability(device)[0] == 9


class ScaledProduct:
    """x -> x @ weight.T * scales + bias in bfloat16: weight [N, K] e4m3, scales float32 [1, N]."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None):
        self.weight, self.scales, self.bias = weight, scales, bias
        self._tickets = torch.zeros(MOST_ROWS // 64 * -(-weight.shape[0] // 64), dtype=torch.int32, device=weight.device)

    @property
    def workspace_bytes(self) -> int:
        """Of parts of sums, at most."""
        columns, width = self.weight.shape
        tiles = {rows: default_tile(rows, columns, width) for rows in (64, 128, MOST_ROWS)}
        return max(4 * rows * columns * of.splits if of is not None and of.splits > 1 else 0 for rows, of in tiles.items())

    def __call__(self, x: Rounded, tile: ScaledTile, out: Tensor | None = None) -> Tensor:
        rows, (columns, width) = x.rows, self.weight.shape
        if out is None:
            out = x.scales.new_empty((rows, columns), dtype=torch.bfloat16)
        tiles_m = -(-rows // tile.block_m)
        partials = x.scales.new_empty(tile.splits * rows * columns) if tile.splits > 1 else None
        _scaled_gemm[(tile.splits * tiles_m * -(-columns // tile.block_n),)](
            TensorDescriptor.from_tensor(x.values, [tile.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(self.weight, [tile.block_n, tile.block_k]),
            self.weight, x.scales, self.scales, self.bias, out, partials, self._tickets, rows, columns, width, tiles_m,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLITS=tile.splits,
            HAS_BIAS=self.bias is not None, TOUCH=tile.touch, num_warps=tile.num_warps, num_stages=tile.num_stages,
            **pdl(x.values),
        )  # fmt: skip
        return out
