"""What a group of cards does at a death, and what is told where there can be none, without cards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from headrace.errors import EngineDeadError
from headrace.model.shard import Shard
from headrace.tensor_parallel import cards, groups


class Backend:
    """Says nothing to anybody; its end waits, as NCCL's does for captured graphs."""

    def __init__(self) -> None:
        self.told, self.may_end, self.ends = threading.Event(), threading.Event(), 0

    def abort(self) -> None:
        self.ends += 1
        self.told.set()
        assert self.may_end.wait(60)

    def allreduce(self, tensors: list[torch.Tensor]) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    def _allgather_base(self, parts: torch.Tensor, part: torch.Tensor) -> SimpleNamespace:
        parts.view(-1, len(part)).copy_(part)
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def backend(monkeypatch) -> Iterator[Backend]:
    backend = Backend()
    monkeypatch.setattr(groups, "_gloo", lambda store, shard: backend)
    monkeypatch.setattr(cards, "prepare_nccl", lambda: None)
    monkeypatch.setattr(cards, "_release", lambda group: None)  # needs streams
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    yield backend
    backend.may_end.set()


def test_nobody_waits_for_a_backend_whose_end_waits(backend: Backend) -> None:
    """Neither who says that a rank has died, nor the interpreter at its end."""
    group = cards.CardGroup(Shard(0, 2), torch.device("cpu"), store=None)
    assert group.sees_all and group._end.alive
    group.abort()
    assert backend.told.wait(60) and not backend.may_end.is_set()
    assert not group._end.alive
    del group
    assert backend.ends == 1


def test_a_group_that_is_dropped_ends_its_backend(backend: Backend) -> None:
    backend.may_end.set()
    group = cards.CardGroup(Shard(0, 2), torch.device("cpu"), store=None)
    del group
    assert backend.ends == 1


def test_a_death_is_told_when_the_card_is_idle(backend: Backend, monkeypatch) -> None:
    """Kernels that wait for the dead rank are let go by a thread that needs the interpreter: nothing is freed before."""
    idle, seen = threading.Event(), []

    def synchronize(device: torch.device) -> None:
        assert idle.wait(60)
        seen.append(device)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    backend.may_end.set()
    group = cards.CardGroup(Shard(0, 2), torch.device("cpu"), store=None)
    threading.Timer(0.2, idle.set).start()
    group.settle()
    assert seen == [torch.device("cpu")]
    idle.clear()
    monkeypatch.setattr(cards, "SETTLE_SECONDS", 0.1)
    group.settle()  # it never is: the process is about to end, and does
    idle.set()


@pytest.mark.parametrize("piece", [1, 6, 48, 1000])
def test_pieces_cover_every_byte_and_no_other(piece: int) -> None:
    memory = torch.full((40,), -1, dtype=torch.int16)
    cards.fill_by_copies(memory[8:32].view(2, 3, 4), torch.zeros(piece, dtype=torch.uint8))
    assert memory.nonzero().flatten().tolist() == [*range(8), *range(32, 40)]


NCCL = """NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error, NCCL version 2.27.3
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: No space left on device (28)"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (NCCL, r"the 2 ranks cannot meet: NCCL error in: .*; Error while .* No space left on device \(28\) \(.*--shm-size"),
        ("Cannot resolve 127.0.0.1 to a (local) address", r"the 2 ranks cannot meet: Cannot resolve 127\.0\.0\.1 to a \(local\) address$"),
    ],
)
def test_why_ranks_do_not_meet_is_told_in_a_line(monkeypatch, said: str, told: str) -> None:
    def fails(store: object, shard: Shard) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(groups, "_gloo", fails)
    monkeypatch.setattr(cards, "open_store", lambda port, listening: None)
    with pytest.raises(EngineDeadError, match=told):
        cards.meet(Shard(0, 2), torch.device("cpu"), 1)
