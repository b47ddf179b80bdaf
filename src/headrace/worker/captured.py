"""What captured steps of all kinds share: their mailbox, which of them are captured and when, and who makes room.

A step is captured when it is first needed, or ahead: some that cover whatever may come before the first request, others while
the engine has nothing to do. There are at most `max_graphs`, which is what the memory plan counts with: after that the one that
was not used for longest makes room, and nothing more is captured ahead.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.prepare import Rows
from headrace.worker.batch_state import BatchState
from headrace.worker.sampling import Tail
from headrace.worker.trial import in_short

if TYPE_CHECKING:
    from torch.cuda.graphs import _POOL_HANDLE as Pool

logger = logging.getLogger(__name__)
MIB = 1 << 20
PAGES = 64  # a power of two (see kernels/prepare.py); so many steps may be under way, those of a draft model among them
HALF = PAGES // 2
COVERING = {Tail.GREEDY: 0, Tail.RANDOM: 1, Tail.FILTERED: 2}  # a sampler does what those before it do, with the same ids
MISSES, SETTLED_SECONDS = 1000, 75.0  # a minute, and what a start still does when the first steps are captured
WAY_OUT = "this step could not be captured; with --enforce-eager nothing is"


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor | None  # [R, V]


@dataclass(slots=True)
class Replayed:
    """What a replay leaves behind, padded rows too."""

    logits: Tensor | None  # [R, V]; None: sampled within the step
    rows: Rows
    sent: Tensor  # [3, R] int32 on the host, there when the step is done: ids, failures, which rows count (with drafts)


class Mailbox:
    """Numbers to captured steps and ids back, through host memory that the device itself reads and writes.

    Copies before and after a step's graph would each cost the stream microseconds, a fraction that shows where a step has
    hundreds. A step takes the page after the one before it: which, it counts on the device (`turn`), so that pages can be
    filled while earlier steps still run.

    `inbox` [PAGES, numbers, rows] and `outbox` [PAGES, 3, rows] int32, pinned; `turn` [1] int32 on the device: pages taken.
    """

    def __init__(self, rows: int, device: torch.device, numbers: int = 4):
        self.inbox = torch.zeros((PAGES, numbers, rows), dtype=torch.int32, pin_memory=True)
        self.outbox = torch.zeros((PAGES, 3, rows), dtype=torch.int32, pin_memory=True)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._inbox = self.inbox.numpy()
        self._posted = 0
        self._left = [torch.cuda.Event(), torch.cuda.Event()]  # the steps with pages of this half are done

    def post(self, numbers: np.ndarray, size: int, dummy_slot: int) -> Tensor:
        """The numbers [any, R] of the next step, padded to `size` rows; -> where its ids, failures, and which rows count (only
        of steps with drafts) will be: [3, size]."""
        page = self._posted % PAGES
        if page % HALF == 0:
            half = page // HALF
            self._left[1 - half].record()
            self._left[half].synchronize()  # of 32 steps ago: long done
        self._posted += 1
        count = numbers.shape[1]
        self._inbox[page, :, :count] = numbers
        self._inbox[page, 0, count:size] = dummy_slot
        self._inbox[page, 1:, count:size] = -1
        return self.outbox[page, :, :size]

    def resume(self) -> None:
        """Somebody was interrupted and perhaps no step took the last page: go on with the one that the device takes next."""
        torch.cuda.synchronize(self.turn.device)
        self._posted = int(self.turn) % PAGES


K = TypeVar("K", bound=tuple)


class StepGraphs(ABC, Generic[K]):
    """Captures and replays steps, each of a key; everything happens on the current stream's thread.

    Steps run one after the other: kinds that are given one `pool` compute in the same memory.
    """

    decoder: Any = None  # what runs the layers
    spare = 0  # places for steps that were missed, which those that are only likely do not take
    lead: Callable[[K, Callable[[K], Captured]], object] | None = None  # of several ranks' first: what captures on all of them

    def __init__(self, state: BatchState, mailbox: Mailbox, max_graphs: int, pool: Pool | None = None):
        self.state, self._mailbox, self.max_graphs = state, mailbox, max_graphs
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = torch.cuda.Stream(state.device)
        self._graphs: dict[K, Captured] = {}  # the last used one comes last
        self._todo: list[K] = []
        self._prepared: float | None = None  # time.monotonic() when what covers all had been captured
        self._missed: Counter[K] = Counter()  # what the replays have cost for which another step stood in
        self._stand_ins: dict[K, K] = {}  # that one, until another is captured

    @abstractmethod
    def _step(self, key: K) -> Tensor | None:
        """Launch the step of the mailbox's next page; -> its logits, if it does not sample itself."""

    @abstractmethod
    def _padding(self, key: K) -> np.ndarray:
        """Numbers [any, R] of a step without a real row."""

    @abstractmethod
    def _covers(self, key: K, wanted: K) -> bool:
        """Whether one does for the other, with as good a result."""

    @abstractmethod
    def _order(self, key: K) -> tuple[int, ...]:
        """The smaller of two that cover a step comes first."""

    def _waste(self, cover: K, wanted: K) -> int:
        """What one replay of the other costs, of which MISSES are worth a capture."""
        return 1

    def _chosen(self, wanted: K) -> K:
        """The step that is to be replayed for it: one that is captured, or shall be now. Time decides, too: of several ranks
        the first asks, and the others are told."""
        return wanted if wanted in self._graphs else self._cover(wanted)

    def _take(self, key: K) -> Captured:
        """A chosen step; it has been used last."""
        captured = self._graphs.pop(key, None) or self.capture(key)
        self._graphs[key] = captured
        return captured

    def _send(self, captured: Captured, numbers: np.ndarray, size: int) -> Tensor:
        """Replay it with these numbers; -> where its ids will be."""
        try:
            sent = self._mailbox.post(numbers, size, self.state.dummy_slot)
            captured.graph.replay()
        except BaseException:
            self._mailbox.resume()
            raise
        return sent

    def _cover(self, wanted: K) -> K:
        """A captured step that does for the wanted one, the smallest; that itself, if there is none, or if it shall be captured
        now: that takes as long as many steps, and so not in the first minute."""
        if self._prepared is None:
            return wanted
        if (cover := self._stand_ins.get(wanted)) is None or cover not in self._graphs:
            covers = [key for key in self._graphs if self._covers(key, wanted)]
            if not covers:
                return wanted
            cover = self._stand_ins[wanted] = min(covers, key=self._order)
        if wanted not in self._missed:
            self._todo.insert(0, wanted)
        self._missed[wanted] += self._waste(cover, wanted)
        if self._missed[wanted] > MISSES and time.monotonic() - self._prepared > SETTLED_SECONDS:
            del self._missed[wanted]
            return wanted
        return cover

    def _next_planned(self) -> K | None:
        """A graph that is likely to be needed and is not there; None if there is none left, or no room."""
        while self._todo and (room := self.max_graphs - len(self._graphs)) > 0:
            key = self._todo.pop(0)
            if key not in self._graphs and (room > self.spare or key in self._missed):
                return key
        return None

    def capture_next(self) -> bool:
        """Capture one of those; False if there is none."""
        key = self._next_planned()
        if key is not None:
            self._capture_ahead(key)
        return key is not None

    def leave_planned(self) -> None:
        """Capture nothing ahead but what later steps make likely."""
        self._todo.clear()

    def _capture_ahead(self, key: K) -> None:
        """Before anybody needs it."""
        if self.lead is None:
            self.capture(key)
        else:
            self.lead(key, self.capture)

    def capture(self, key: K) -> Captured:
        while len(self._graphs) >= self.max_graphs:
            del self._graphs[next(iter(self._graphs))]  # one that still runs is freed when it is done
        try:
            return self._capture(key)
        except Exception as e:
            e.add_note(WAY_OUT)
            raise

    def _capture(self, key: K) -> Captured:
        told = logger.isEnabledFor(logging.DEBUG)
        began, before = time.perf_counter(), self._driver_bytes() if told else 0
        current = torch.cuda.current_stream(self.state.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            try:
                padding = self._padding(key)
                self._mailbox.post(padding, padding.shape[1], self.state.dummy_slot)
                with in_short(self.decoder):
                    self._step(key)  # padded rows only: compiles and loads what is not there yet
            except BaseException:
                self._mailbox.resume()
                raise
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                logits = self._step(key)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        captured = self._graphs[key] = Captured(graph, logits)
        self._stand_ins.clear()
        if told:
            took, grown = 1e3 * (time.perf_counter() - began), (self._driver_bytes() - before) / MIB
            logger.debug("captured %s in %.1f ms: %.2f MiB of the driver's, %d graphs", key, took, grown, len(self._graphs))
        return captured

    def _driver_bytes(self) -> int:
        """Memory of the device that is taken, by whomever, but for that of torch's allocator."""
        free, total = torch.cuda.mem_get_info(self.state.device)
        return total - free - torch.cuda.memory_reserved(self.state.device)
