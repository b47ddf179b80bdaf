"""What the ranks of a core say to each other on the device, over torch's process groups: gloo on a CPU, NCCL on cards.

The groups are made directly: no default group, which a process has only one of. Their store is a socket of rank 0's on the
loopback, which ends with it. Parts are gathered and added here, in the order of ranks: what a library's
all-reduce adds first depends on the size of the message.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.kernels.all_reduce import PushSpace
from headrace.model.shard import Exchange, Shard

PIECE_BYTES = 16 << 20  # of each rank's part that is gathered at once for a sum
MEETING_SECONDS = 60.0  # until all are there; each has said before that it is about to come
FOR_EVER = timedelta(days=365)  # that a rank has died is seen by others than its peers


class ProcessGroup:
    """A Group over one of torch's backends."""

    def __init__(self, shard: Shard, device: torch.device, store: dist.Store):
        """Meets the others, in a `store` that they all have. Raises RuntimeError if one does not come."""
        self.shard, self.device, self.store = shard, device, store
        self.backend: Any = _nccl(self.store, shard) if device.type == "cuda" else _gloo(self.store, shard)

    def gather(self, part: Tensor) -> Tensor:
        parts = torch.empty((self.shard.size, *part.shape), dtype=part.dtype, device=part.device)
        if part.numel():
            self.backend._allgather_base(_bytes(parts), _bytes(part.contiguous())).wait()
        return parts

    def sum(self, part: Tensor) -> Tensor:
        flat = part.reshape(-1)
        total = torch.empty_like(flat)
        size = PIECE_BYTES // part.itemsize
        for begin in range(0, len(flat), size):
            piece = flat[begin : begin + size]
            first, *others = self.gather(piece)
            running = first.float()
            for other in others:
                running += other
            total[begin : begin + size] = running
        return total.view(part.shape)

    def prepare(self, rows: int, width: int, dtype: torch.dtype) -> None:
        pass

    def push_space(self, rows: int, width: int, dtype: torch.dtype) -> PushSpace | None:
        return None

    def exchange(self, rows: int, width: int, dtype: torch.dtype) -> Exchange | None:
        return None

    def peer_bytes(self) -> int:
        return 0

    def share(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        whole = tensor.contiguous()
        self.backend.broadcast([_bytes(whole)]).wait()
        if whole is not tensor:
            tensor.copy_(whole)

    def abort(self) -> None:
        """Somebody is gone for good: let go whoever waits for him."""
        self.backend.abort()

    def settle(self) -> None:
        """After `abort`: wait until what runs on the device is done."""


def open_store(port: int, listening: int | None = None) -> dist.Store:
    """Where ranks leave words for each other, at a port of the loopback; `listening`: the socket's descriptor, of rank 0."""
    return dist.TCPStore(
        "127.0.0.1", port, is_master=listening is not None, wait_for_workers=False, master_listen_fd=listening,
        timeout=timedelta(seconds=MEETING_SECONDS),
    )  # fmt: skip


def _bytes(tensor: Tensor) -> Tensor:
    """Of any dtype: they are moved, not computed with."""
    return tensor.view(-1).view(torch.uint8)


def _gloo(store: dist.Store, shard: Shard) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=MEETING_SECONDS)
    group = gloo(dist.PrefixStore("gloo", store), shard.rank, shard.size, options)
    group._set_default_timeout(FOR_EVER)
    return group


def _nccl(store: dist.Store, shard: Shard) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOR_EVER
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), shard.rank, shard.size, options)
