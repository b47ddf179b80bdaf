"""Gate and up's product and its activation: one kernel (gated_roles.py) where that takes less time than cuBLAS and another."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.activation import Activation, act_mul
from headrace.kernels.launch import capability, num_multiprocessors, on_gpu, takes_gluon

ROWS = 256  # of x in a tile, whose rows of the weights are 64 for each of its groups
COSTS = {3: 1.0, 2: 0.7}  # of a tile, by its groups; the smaller one reads more for what it multiplies
LEAST_ROWS = 512  # of 256 an 8B's step took 0 to 1 % less by the one kernel, and of 72 2 % more
LEAST_WIDTH = 320  # more than is on its way at once
ACTIVATION = 245  # columns of x that take a product as long as an activation of its own takes
GAIN = 1.02  # at least


def groups_for(rows: int, inner: int, width: int, multiprocessors: int) -> int:
    """Of a program; 0: cuBLAS and a kernel for the activation are as fast.

    cuBLAS is taken for a card that is full to the last wave and saved nothing, which it comes near to: measured on an H200 with
    seven models' shapes this tells where it is slower (benchmarks/results/h200-full-batches.json)."""
    if rows < LEAST_ROWS:
        return 0
    whole = rows * inner * 2 / (ROWS * 192 * multiprocessors)  # waves of full tiles
    waves = {groups: -(-(-(-rows // ROWS) * -(-inner // (32 * groups))) // multiprocessors) for groups in COSTS}
    groups = min(COSTS, key=lambda groups: waves[groups] * COSTS[groups])
    return groups if whole * (1 + ACTIVATION / width) >= GAIN * waves[groups] * COSTS[groups] else 0


def rows_of_forms(inner: int, width: int, most: int, multiprocessors: int) -> list[int]:
    """Rows of a step of at most so many for each form of the kernel that such steps take: the fewest, for more are taken apart
    (mlp.py)."""
    counts = [most, *range(most // ROWS * ROWS, LEAST_ROWS - 1, -ROWS)]
    taken = {groups_for(rows, inner, width, multiprocessors): rows for rows in counts}
    return [rows for groups, rows in taken.items() if groups]


def _groups(x: Tensor, weight: Tensor, kind: Activation) -> int:
    (rows, width), inner = x.shape, len(weight) // 2
    if rows < LEAST_ROWS or kind not in ("silu", "gelu_tanh") or not on_gpu(x) or capability(x.device) != (9, 0):
        return 0
    if x.itemsize != 2 or inner % 8 or width % 8 or width < LEAST_WIDTH or not x.is_contiguous() or not takes_gluon():
        return 0
    return groups_for(rows, inner, width, num_multiprocessors(x.device))


def gated_product(x: Tensor, weight: Tensor, kind: Activation) -> Tensor:
    """act_mul of x @ weight.T: x [T, K], weight [2 I, K] (gate, up) -> [T, I]."""
    groups = _groups(x, weight, kind)
    if not groups:
        return act_mul(torch.mm(x, weight.t()), kind)
    from headrace.kernels.gated_roles import launch

    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    launch(x, weight, kind, out, groups, ROWS)
    return out
