"""N ranks of the push all-reduce in one process, each with memory of its own: all send, then all receive."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.kernels.all_reduce import PushSpace, all_reduce, all_reduce_norm, slots_shape, wire


def push_spaces(size: int, rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> list[PushSpace]:
    slots = [torch.empty(slots_shape(size, rows, width), dtype=wire(dtype), device=device) for _ in range(size)]
    peers = torch.tensor([tensor.data_ptr() for tensor in slots], device=device)
    spaces = [
        PushSpace(rank, size, slots[rank], peers, torch.zeros(rows, dtype=torch.int32, device=device)) for rank in range(size)
    ]
    for space in spaces:
        space.clear()
    return spaces


def in_halves(call: Callable[[int, str], None], size: int) -> None:
    for half in ("send", "receive"):
        for rank in range(size):
            call(rank, half)


def sum_of_all(parts: list[Tensor], spaces: list[PushSpace]) -> list[Tensor]:
    """What each rank gets."""
    sums: list[Tensor] = [torch.empty(0)] * len(parts)

    def call(rank: int, half: str) -> None:
        sums[rank] = all_reduce(parts[rank], spaces[rank], half=half)

    in_halves(call, len(parts))
    return sums


def norm_of_all(parts: list[Tensor], spaces: list[PushSpace], totals: list[Tensor], outs: list[Tensor], norm: Tensor | None,
                residuals: list[Tensor] | None, **options) -> None:  # fmt: skip
    """Like `all_reduce_norm` on each rank."""

    def call(rank: int, half: str) -> None:
        residual = None if residuals is None else residuals[rank]
        all_reduce_norm(
            parts[rank], spaces[rank], totals[rank], outs[rank], norm, residual=residual, half=half, **options
        )  # fmt: skip

    in_halves(call, len(parts))
