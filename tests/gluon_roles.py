"""Roles for warps in gluon_interpreter.py: each is a thread, copies come when they like, products read when they are waited for.

What a kernel promises itself by its barriers is kept by chance elsewhere; here a place that is written too soon, or never given
back, is seen: as other numbers, or as a wait that does not end.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from gluon_interpreter import Shared, Value, _copy, _raw

PATIENCE = 20.0  # seconds of a wait


@dataclass
class _Barrier:
    count: int
    pending: int
    bytes: int = 0
    phases: int = 0


@dataclass
class _Sums:
    """Products on their way: of each, when it is waited for."""

    value: torch.Tensor
    pending: list[Callable[[], torch.Tensor]] = field(default_factory=list)


class Roles:
    def __init__(self, seed: int = 0):
        self._changed = threading.Condition()
        self._barriers: dict[int, _Barrier] = {}
        self._stores = threading.local()
        self._random = random.Random(seed)
        self._failed: list[BaseException] = []

    def stand_ins(self, programs: int) -> dict[str, Any]:
        return {
            "language": {
                "num_programs": lambda axis: programs, "where": lambda c, a, b: a if c else b, "warp_specialize": self._specialize,
                "exp": lambda x: Value(torch.exp(x.value)),
            },
            "mbarrier": SimpleNamespace(
                init=self._init, expect=self._expect, wait=self._wait, arrive=self._arrive, MBarrierLayout=lambda: None
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self._load, async_copy_shared_to_global=self._store, store_wait=self._stored
            ),
            "warpgroup_mma": _multiply, "warpgroup_mma_init": lambda x: x if isinstance(x, _Sums) else _Sums(x.value),
            "warpgroup_mma_wait": _wait_for_products,
        }  # fmt: skip

    def _specialize(self, parts: list[tuple[Callable[..., None], tuple]], warps: list[int], registers: list[int]) -> None:
        def play(fn: Callable[..., None], arguments: tuple) -> None:
            self._stores.of = []
            try:
                fn(*arguments)
            except BaseException as error:
                with self._changed:
                    self._failed.append(error)
                    self._changed.notify_all()

        threads = [threading.Thread(target=play, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    # barriers, known by where they are

    def _init(self, barrier: Shared, count: int) -> None:
        self._barriers[barrier.data.data_ptr()] = _Barrier(count, count)

    def _add(self, barrier: Shared, arrivals: int, size: int) -> None:
        with self._changed:
            of = self._barriers[barrier.data.data_ptr()]
            of.pending -= arrivals
            of.bytes += size
            assert of.pending >= 0
            if of.pending == 0 and of.bytes == 0:
                of.pending, of.phases = of.count, of.phases + 1
                self._changed.notify_all()

    def _expect(self, barrier: Shared, size: int, pred: Any = True) -> None:
        if pred:
            self._add(barrier, 1, size)

    def _arrive(self, barrier: Shared) -> None:
        self._add(barrier, 1, 0)

    def _wait(self, barrier: Shared, phase: Any) -> None:
        of, phase = self._barriers[barrier.data.data_ptr()], int(_raw(phase))
        with self._changed:
            if not self._changed.wait_for(lambda: of.phases & 1 != phase or self._failed, PATIENCE):
                raise TimeoutError("a barrier that nobody completes")
            if self._failed:
                raise RuntimeError("another role failed")

    # copies

    def _load(self, tiles: Any, coord: list[Any], barrier: Shared, target: Shared, pred: Any = True) -> None:
        if not pred:
            return
        coord, target.data[...] = [int(_raw(c)) for c in coord], float("nan")

        def arrive() -> None:
            _copy(tiles, coord, barrier, target)
            self._add(barrier, 0, -target.data.numel() * target.data.itemsize)

        threading.Timer(self._random.random() * 0.004, arrive).start()

    def _store(self, tiles: Any, coord: list[Any], source: Shared) -> None:
        self._stores.of.append((tiles, [int(_raw(c)) for c in coord], source))

    def _stored(self, pending: int) -> None:
        for tiles, (row, column), source in self._stores.of:
            part = tiles.base[row : row + source.data.shape[0], column : column + source.data.shape[1]]
            part.copy_(source.data[: part.shape[0], : part.shape[1]])
        self._stores.of = []


def _multiply(a: Shared, b: Shared, acc: _Sums, is_async: bool) -> _Sums:
    return _Sums(acc.value, [*acc.pending, lambda: (a.data.double() @ b.data.double()).float()])


def _wait_for_products(pending: int, deps: list[_Sums]) -> Any:
    (acc,) = deps
    done = len(acc.pending) - pending
    for product in acc.pending[:done]:
        acc.value = acc.value + product()
    return _Sums(acc.value, acc.pending[done:]) if pending else Value(acc.value)
