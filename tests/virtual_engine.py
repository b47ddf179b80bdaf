"""The core's real loop in virtual time: its process's code, messages and trace, on a model that takes the time it is told."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec
import pytest

from headrace.engine import core as core_module
from headrace.engine import process as process_module
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.engine.process import CoreLoop
from headrace.engine.stats import StepTrace
from headrace.engine.wire import Add, News, Shutdown, to_wire
from headrace.sampling.params import SamplingParams
from headrace.scheduler.config import Limits
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.scheduler import Scheduler
from headrace_bench.load import Load, arrival_times
from headrace_bench.simulation.traffic import Ask

ENCODE = msgspec.msgpack.Encoder(enc_hook=to_wire).encode


class Clock:
    """What the loop sees of the module time. To look at it takes some, too: what has been waited for is never nothing."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        self.now += 1e-7
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Done:
    """A handle of a step; who reads it waits for the device."""

    clock: Clock
    finished: float
    answer: StepResult

    def result(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.finished)
        return self.answer


@dataclass
class Model:
    """A runner. `seconds` of a plan, by its number; `host`: of the launch, of a device that goes on by itself (None: a CPU)."""

    clock: Clock
    seconds: Callable[[StepPlan, int], float]
    host: float | None = None
    prompt_host: float | None = None  # where prompts take another time to launch: the device begins with them before it is over
    steps: int = 0
    free: float = 0.0

    def launch(self, plan: StepPlan) -> Done:
        took, clock = self.seconds(plan, self.steps), self.clock
        self.steps += 1
        begun = clock.now + (self.host or 0.0)
        prompts = self.prompt_host is not None and plan.num_tokens > len(plan)
        clock.now += took if self.host is None else self.prompt_host if prompts else self.host  # type: ignore[operator]
        self.free = clock.now if self.host is None else max(max(self.free, begun) + took, clock.now)
        return Done(clock, self.free, StepResult([1] * int(plan.samples.sum()), plan.samples.astype(int).tolist()))

    def idle(self) -> bool:
        return False


@dataclass
class Times:
    start: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


@dataclass
class Client:
    """Both ends of the core's messages. Requests come at their times, or as soon as another ends (`Load.max_concurrency`)."""

    clock: Clock
    asks: list[Ask]
    load: Load
    seed: int
    steps: list[StepTrace] = field(default_factory=list)
    seen: dict[str, Times] = field(default_factory=dict)
    looked: list[float] = field(default_factory=list)  # when it was found, in each turn, that nothing more had come
    told: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin = self.clock.now
        times = arrival_times(len(self.asks), self.load, self.seed)
        self.coming = [(self.begin + at, i) for i, at in enumerate(times)]
        self.held: list[int] = []
        self.open = 0

    def take(self) -> bytes | None:
        """As an `Inbox`."""
        if not self.coming and not self.held and not self.open:
            return ENCODE(Shutdown())
        while self.coming and self.coming[0][0] <= self.clock.now:
            at, i = heappop(self.coming)
            if self.load.max_concurrency is not None and self.open >= self.load.max_concurrency:
                self.held.append(i)
                continue
            self.open += 1
            ask, name = self.asks[i], f"{self.seed}/{i}"
            self.seen[name] = Times(max(at, self.begin))
            ids = array("i", range(i * 10_000, i * 10_000 + ask.own))
            params = SamplingParams(max_tokens=ask.output, temperature=0.0, ignore_eos=True)
            return ENCODE(Add(EngineRequest(name, ids, params, seed=0)))
        self.looked.append(self.clock.now)
        return None

    def wait(self, milliseconds: int) -> None:
        at = self.coming[0][0] if self.coming else math.inf
        self.clock.now = max(self.clock.now, min(at, self.clock.now + milliseconds / 1000))

    def send(self, news: News) -> None:
        self.steps += news.steps or ()
        self.told.append(self.clock.now)
        for output in news.outputs:
            times = self.seen[output.id]
            times.tokens += len(output.token_ids)
            if output.token_ids:
                times.first, times.last = times.first or self.clock.now, self.clock.now
            if output.finish_reason is not None:
                self.open -= 1
                if self.held:
                    heappush(self.coming, (self.clock.now, self.held.pop(0)))


@contextmanager
def virtual_time() -> Iterator[Clock]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "time", clock)
        patch.setattr(process_module, "time", clock)
        yield clock


def run(clock: Clock, limits: Limits, model: Model, asks: list[Ask], load: Load, seed: int, overlap: bool = True) -> Client:
    """All of them, to the end."""
    core = EngineCore(Scheduler(limits), model, vocab_size=2**31, async_scheduling=overlap)  # type: ignore[arg-type]
    client = Client(clock, asks, load, seed)
    CoreLoop(core, client, client.send, traced=True).run()  # type: ignore[arg-type]
    return client
