"""Ranks of one core as threads of one process: what a Group of processes or cards does, without either."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.model.shard import Shard


class ThreadGroup:
    """A Group. Ranks that do not call the same, with the same shapes, fail at once."""

    def __init__(self, shard: Shard, meeting: threading.Barrier, table: list[Any]):
        self.shard, self._meeting, self._table = shard, meeting, table
        self.calls = 0

    @classmethod
    def of(cls, size: int) -> list[ThreadGroup]:
        meeting, table = threading.Barrier(size, timeout=60), [None] * size
        return [cls(Shard(rank, size), meeting, table) for rank in range(size)]

    def abort(self) -> None:
        """Nobody waits for this rank any more."""
        self._meeting.abort()

    def _exchange(self, what: str, tensor: Tensor) -> list[Tensor]:
        self.calls += 1
        self._table[self.shard.rank] = what, tensor
        self._meeting.wait()
        said = list(self._table)
        told = [(kind, t.shape, t.dtype) for kind, t in said]
        assert all(t == told[0] for t in told), told
        tensors = [t.clone() for _, t in said]
        self._meeting.wait()  # everybody has read it
        return tensors

    def sum(self, part: Tensor) -> Tensor:
        total, *others = self._exchange("sum", part)
        total = total.float()
        for other in others:
            total = total + other.float()
        return total.to(part.dtype)

    def gather(self, part: Tensor) -> Tensor:
        return torch.stack(self._exchange("gather", part))

    def share(self, tensor: Tensor) -> None:
        first, *_ = self._exchange("share", tensor)
        tensor.copy_(first)


def run_ranks(size: int, run: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What `run` returns on each rank; the first error of any is raised here."""
    groups, results, errors = ThreadGroup.of(size), [None] * size, []

    def on(group: ThreadGroup) -> None:
        try:
            results[group.shard.rank] = run(group)
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=on, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    assert len({group.calls for group in groups}) == 1
    return results
