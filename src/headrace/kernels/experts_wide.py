"""The second product of many rows' experts by the tensor copy engine (Hopper and newer), of weights that are floats.

What experts_tiles.py does, where both operands are tiles of neighbours in memory: an expert's rows lie in the order of the
sort. The rows are the left operand, so that results lie as they are stored, in the rows' own type: the sum over a token's
experts reads half the bytes.
"""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.experts_sort import Sorted, tile_end, tile_expert, tile_first
from headrace.kernels.launch import TensorDescriptor, capability, gdc_launch_dependents, gdc_wait, jit, pdl, tl
from headrace.kernels.narrow import NarrowMatrix

BLOCK_N, BLOCK_K = 128, 64
STAGES = {64: 4, 128: 3}  # rows of a tile -> steps ahead: measured on an H200


@jit
def _wide_down(
    x_tiles, w_tiles, bias_ptr, order_ptr, tiles_ptr, shares_ptr, out_ptr, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BLOCK_N
    column = n0 + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    expert = tile_expert(tiles_ptr, slot)
    if expert < 0:
        return
    m0, end = tile_first(tiles_ptr, slot), tile_end(tiles_ptr, slot)
    place = m0 + tl.arange(0, BLOCK_M)
    pair = tl.load(order_ptr + tl.minimum(place, end - 1))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):  # past the edges the engine fills in zeros; rows past the expert's last are not stored
        acc = tl.dot(x_tiles.load([m0, k]), w_tiles.load([expert * N + n0, k]).T, acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + tl.minimum(column, N - 1)).to(tl.float32)[None, :]
    y = acc * tl.load(shares_ptr + pair)[:, None]
    at = pair[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=(place < end)[:, None] & (column < N)[None, :])


def takes_wide(x: Tensor, weight: NarrowMatrix, block_m: int) -> bool:
    """Whether the copy engine takes rows like x, of tiles of so many, and the weights; the interpreter plays one."""
    floats = weight.kind == "float" and x.itemsize == 2 and weight.data.shape[1] % 8 == 0
    return floats and block_m in STAGES and capability(x.device)[0] in (0, 9, 10)


def wide_down(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, shares: Tensor, out: Tensor, block_m: int
) -> None:  # fmt: skip
    """x [P, K] in the order of the sort -> out [P, N], what each pair adds; weight [experts * N, K], shares [P]."""
    columns = out.shape[1]
    _wide_down[-(-columns // BLOCK_N), len(pairs.tiles)](
        TensorDescriptor.from_tensor(x, [block_m, BLOCK_K]), TensorDescriptor.from_tensor(weight.data, [BLOCK_N, BLOCK_K]),
        bias, pairs.order, pairs.tiles, shares, out, N=columns, K=x.shape[1], BLOCK_M=block_m, BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K, num_warps=4, num_stages=STAGES[block_m], **pdl(x),
    )  # fmt: skip
