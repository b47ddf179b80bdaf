"""When requests are sent, and the run itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace_bench.target import Measured, Plan, Target


@dataclass(frozen=True, slots=True)
class Load:
    """Requests per second (inf: all at once), shape of their arrival, and how many may be in progress (None: any)."""

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None


@dataclass(slots=True)
class Run:
    """One run under one load. Seconds; `client_cpu` is the share of a core that the client itself used."""

    load: Load
    results: list[Measured]
    duration: float
    client_cpu: float


def arrival_times(count: int, load: Load, seed: int) -> list[float]:
    """Seconds from the beginning, the first at 0. Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process,
    less comes in bursts, more is more even. They are scaled so that the mean gap is exactly 1 / request_rate.
    """
    if math.isinf(load.request_rate) or count < 2:
        return [0.0] * count
    rng = random.Random(f"{seed}/arrivals")
    gaps = [rng.gammavariate(load.burstiness, 1.0) for _ in range(count - 1)]
    scale = (count - 1) / load.request_rate / sum(gaps)
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap * scale)
    return times


async def run_load(target: Target, plans: list[Plan], load: Load, seed: int, on_end: Callable[[Measured], None]) -> Run:
    """Send every plan at its time; returns when all have ended."""
    gate = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()

    async def one(plan: Plan, arrival: float) -> Measured:
        async with gate:
            measured = await target.send(plan, arrival)
        on_end(measured)
        return measured

    gc.collect()
    gc.freeze()  # what exists by now is not looked at again while times are taken
    cpu, began = time.process_time(), time.perf_counter()
    tasks = []
    try:
        for plan, offset in zip(plans, arrival_times(len(plans), load, seed), strict=True):
            delay = began + offset - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(plan, began + offset)))
        results = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        gc.unfreeze()
    duration = time.perf_counter() - began
    return Run(load, results, duration, (time.process_time() - cpu) / duration)
