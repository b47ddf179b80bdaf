"""One rank of N alone on a card: what it sends to the others comes back to itself as theirs.

So a step of that rank takes the time that it takes among others, but for the way to them (a link's latency, and what a large
message needs on the link); what it computes has no meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.all_reduce import PushSpace, all_reduce, slots_shape, wire
from headrace.kernels.sample_ranks import WORDS
from headrace.model.shard import Shard


def echo_space(size: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> PushSpace:
    """Of rank 0: where rank r's memory would be is its own, shifted so that the part it sends lies in r's place."""
    slots = torch.empty(slots_shape(size, rows, width), dtype=wire(dtype), device=device)
    step = slots.stride(1) * slots.itemsize
    addresses = [0 if device.type == "meta" else slots.data_ptr() + rank * step for rank in range(size)]
    peers = torch.tensor(addresses, device=device)
    space = PushSpace(0, size, slots, peers, torch.zeros(rows, dtype=torch.int32, device=device))
    space.clear()
    return space


class EchoGroup:
    """A Group."""

    def __init__(self, size: int, rows: int, width: int, dtype: torch.dtype, device: torch.device):
        self.shard = Shard(0, size)
        self._spaces = [echo_space(size, rows, width, dtype, device), echo_space(size, rows, WORDS, torch.float32, device)]

    def prepare(self, rows: int, width: int, dtype: torch.dtype) -> None:
        pass

    def push_space(self, rows: int, width: int, dtype: torch.dtype) -> PushSpace | None:
        return next((space for space in self._spaces if space.takes(rows, width, dtype)), None)

    def sum(self, part: Tensor) -> Tensor:
        space = self.push_space(*part.shape, part.dtype)
        return self.shard.size * part if space is None else all_reduce(part, space)

    def exchange(self, rows: int, width: int, dtype: torch.dtype) -> None:
        return None

    def peer_bytes(self) -> int:
        return 0

    def gather(self, part: Tensor) -> Tensor:
        return part.expand(self.shard.size, *part.shape)

    def share(self, tensor: Tensor) -> None:
        pass
