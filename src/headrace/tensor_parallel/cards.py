"""The ranks of a core on the cards of one host: few rows meet in memory that all cards see, the rest goes through NCCL.

However a sum travels it has the bits of the parts added in the order of ranks in float32 and rounded once:

    few rows     kernels/all_reduce.py
    two ranks    NCCL's all-reduce: there is one addition, and a + b is b + a; or, where a norm follows that adds up both
                 parts and rounds when the residual has joined, copies that run beside products (copied_parts.py)
    more ranks   each gets a part of everybody's columns (all-to-all), adds them up in order, and gives the sum to all: what a
                 ring moves, 2 (N - 1) / N of the message, but with an order of our own
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.config import prepare_nccl
from headrace.errors import EngineDeadError
from headrace.kernels.all_reduce import PushSpace, all_reduce, ordered_sum, slots_shape, wire
from headrace.kernels.sample_ranks import WORDS, max_rows
from headrace.model.shard import Shard
from headrace.tensor_parallel.card_memory import CardMemory
from headrace.tensor_parallel.copied_parts import CopiedParts
from headrace.tensor_parallel.groups import ProcessGroup, open_store

logger = logging.getLogger(__name__)
# That a card sends at most in one sum, where its whole part goes to each of the others. Of larger parts each card adds up a
# share for all (see above), which is less to send if there are more than two.
PUSH_BYTES = 32 << 20
RELEASE_SECONDS = 60.0  # for which kernels that wait for a dead rank are let go, also those that are still to come
SETTLE_SECONDS = 4.0  # at most until they are let go; after that the process is of no use
ZEROS_BYTES = 4 << 20  # on the host: all places of a space are as many as tens of these


class CardGroup(ProcessGroup):
    """A Group. Its tensors are on this rank's card."""

    def __init__(self, shard: Shard, device: torch.device, store: dist.Store):
        prepare_nccl()
        super().__init__(shard, device, store)
        self._spaces: list[PushSpace] = []
        self._copied: list[CopiedParts] = []
        self._zeros = torch.empty(0, dtype=torch.uint8)  # for `release`, when it may be too late to ask for memory
        sees = all(torch.cuda.can_device_access_peer(device, other) for other in range(shard.size) if other != device.index)
        # the first collective, which also makes NCCL take its memory before ours is planned
        self.sees_all = bool(self.gather(torch.tensor([sees], device=device)).all())
        self._sum_by_nccl(torch.zeros(shard.size, device=device))
        self._end = weakref.finalize(self, self.backend.abort)  # else it complains at its end

    def prepare(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """See Group. The memory stays at its place as long as the group: captured graphs have its address."""
        if not self.sees_all:
            logger.warning("the cards do not see each other's memory: every sum goes through NCCL, decode steps are slow")
            return
        self._zeros = torch.zeros(ZEROS_BYTES, dtype=torch.uint8, pin_memory=True)
        others = self.shard.size - 1
        largest = min(rows, PUSH_BYTES // (others * width * dtype.itemsize))
        self._spaces = [self._meet(largest, width, dtype), self._meet(min(rows, max_rows(self.device)), WORDS, torch.float32)]
        megabytes = sum(space.slots.nbytes for space in self._spaces) / 1e6
        logger.info("sums of up to %d rows meet in memory of all %d cards: %.1f MB", largest, self.shard.size, megabytes)

    def push_space(self, rows: int, width: int, dtype: torch.dtype) -> PushSpace | None:
        return next((space for space in self._spaces if space.takes(rows, width, dtype)), None)

    def exchange(self, rows: int, width: int, dtype: torch.dtype) -> CopiedParts | None:
        if not self.sees_all or self.shard.size != 2:
            return None
        self._copied.append(CopiedParts(self.shard.rank, rows, width, dtype, self.device, self._addresses))
        self._barrier()
        logger.info("sums of up to %d rows go on beside products: %.1f MB", rows, self._copied[-1].nbytes / 1e6)
        return self._copied[-1]

    def peer_bytes(self) -> int:
        return sum(space.slots.nbytes for space in self._spaces) + sum(copied.nbytes for copied in self._copied)

    def sum(self, part: Tensor) -> Tensor:
        if part.dim() == 2:
            space = self.push_space(part.shape[0], part.shape[1], part.dtype)
            if space is not None:
                return all_reduce(part, space)
        return self._sum_by_nccl(part)

    def _sum_by_nccl(self, part: Tensor) -> Tensor:
        if self.shard.size == 2:
            total = part.contiguous()
            self.backend.allreduce([total]).wait()
            return total
        flat = part.reshape(-1)
        each = -(-len(flat) // self.shard.size)
        padded = torch.nn.functional.pad(flat, (0, each * self.shard.size - len(flat)))
        theirs, total = torch.empty_like(padded), torch.empty_like(padded)
        self.backend.alltoall_base(theirs, padded, [], []).wait()
        self.backend._allgather_base(total, ordered_sum(theirs.view(self.shard.size, each))).wait()
        return total[: len(flat)].view(part.shape)

    def _meet(self, rows: int, width: int, dtype: torch.dtype) -> PushSpace:
        """Memory of all ranks, each other's mapped here."""
        rank, size = self.shard.rank, self.shard.size
        shape = slots_shape(size, rows, width)
        memory = CardMemory(math.prod(shape), wire(dtype), self.device)
        peers = torch.tensor(self._addresses(memory), device=self.device)
        turns = torch.zeros(rows, dtype=torch.int32, device=self.device)
        space = PushSpace(rank, size, memory.tensor.view(shape), peers, turns)
        space.clear()
        self._barrier()
        return space

    def _addresses(self, memory: CardMemory) -> list[int]:
        handles = self.gather(torch.tensor(list(memory.handle), dtype=torch.uint8, device=self.device))
        return memory.addresses([bytes(handle) for handle in handles.tolist()])

    def _barrier(self) -> None:
        """Everybody's memory is as it was told to be."""
        torch.cuda.synchronize(self.device)
        self.gather(torch.zeros(1, device=self.device)).tolist()

    def abort(self) -> None:
        """See ProcessGroup; returns at once. NCCL lets go its own kernels first, and then waits until no captured graph has one
        any more: as long as there is an engine. So it is left to a thread that nobody waits for, and not done a second time at
        the interpreter's end, where it would wait behind that thread for ever."""
        self._end.detach()
        threading.Thread(target=_release, args=(weakref.ref(self),), daemon=True).start()
        threading.Thread(target=self.backend.abort, daemon=True).start()

    def settle(self) -> None:
        """See ProcessGroup. Who is told of the death drops what a waiting kernel uses, above all a captured graph. That waits
        for the kernel and holds the interpreter meanwhile, and without it `release` cannot go on."""
        waiting = threading.Thread(target=_synchronize, args=(self.device,), daemon=True)
        waiting.start()
        waiting.join(SETTLE_SECONDS)

    def release(self, stream: torch.cuda.Stream) -> None:
        """Kernels that wait for a dead rank find something in every place; what they give is nobody's any more. Copies from the
        host bring it, which no multiprocessor does: those that wait may leave a kernel no room on any of them."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for space in self._spaces:
                fill_by_copies(space.slots, self._zeros)
            for copied in self._copied:
                copied.release()
            stream.synchronize()


def fill_by_copies(target: Tensor, piece: Tensor) -> None:
    """Copies of `piece` [bytes] uint8 one behind the other over all of a contiguous `target`, the last one cut off."""
    for part in target.view(-1).view(torch.uint8).split(len(piece)):
        part.copy_(piece[: len(part)], non_blocking=True)


def _synchronize(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # of a kernel that failed meanwhile
        torch.cuda.synchronize(device)


def _release(group: weakref.ref[CardGroup]) -> None:
    """As long as there is the group, or all that it could have launched must be done."""
    end, stream = time.monotonic() + RELEASE_SECONDS, None
    while (waiting := group()) is not None and time.monotonic() < end:
        stream = stream or torch.cuda.Stream(waiting.device)
        waiting.release(stream)
        del waiting
        time.sleep(1e-3)


def meet(shard: Shard, device: torch.device, port: int, listening: int | None = None) -> ProcessGroup:
    """The group of this device's ranks, by a store as of `open_store`. Raises EngineDeadError if it cannot be had."""
    kind = CardGroup if device.type == "cuda" else ProcessGroup
    try:
        return kind(shard, device, open_store(port, listening))
    except (RuntimeError, OSError) as error:
        raise EngineDeadError(f"the {shard.size} ranks cannot meet: {_reason(str(error))}") from error


def _reason(said: str) -> str:
    """Of what torch, gloo or NCCL said: what failed, and the last line, where NCCL has the cause."""
    first, *others = [line.strip() for line in said.splitlines() if line.strip()] or ["no reason was given"]
    advice = " (a container has 64 MiB there unless --shm-size or --ipc=host says more)" if "/dev/shm" in said else ""
    return f"{first[:500]}{'; ' + others[-1][:500] if others else ''}{advice}"
