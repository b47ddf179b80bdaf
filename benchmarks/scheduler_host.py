"""Host time of the scheduler per running request and step, with a fake model: schedule + launched + settle, nothing else.

    python benchmarks/scheduler_host.py [--json FILE]

Every request decodes, as in a full server; blocks fill and enter the prefix index on the way. With `overlap` step N + 1 is
scheduled before step N settles. Wanted: below 3 microseconds per running request and step at 256.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time

from headrace.engine.plan import StepPlan
from headrace.engine.request import Request
from headrace.engine.scheduler import Scheduler, SchedulerConfig
from headrace.sampling.params import SamplingParams


def build(num_running: int, num_prompt: int, num_output: int, block_size: int) -> Scheduler:
    length = num_prompt + num_output
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=max(8192, num_running),
            max_model_len=length,
            block_size=block_size,
            num_blocks=num_running * (-(-length // block_size)),
        )
    )
    for i in range(num_running):
        params = SamplingParams(max_tokens=num_output, eos_token_ids=[2])
        scheduler.add(
            Request(id=str(i), prompt_ids=[(i * 7919 + j) % 30000 + 3 for j in range(num_prompt)], params=params, seed=i)
        )
    return scheduler


def measure(num_running: int, overlap: bool, block_size: int, num_steps: int) -> dict[str, float | int | bool]:
    """Microseconds of processor time per step in which all decode (mean), per running request, and wall time."""
    num_prompt = 64
    scheduler = build(num_running, num_prompt, num_steps + 32, block_size)
    one, none = [11], []
    flight: list[StepPlan] = []
    times, busy = [], []
    clock, cpu = time.perf_counter, time.thread_time  # the latter does not count what other processes take
    gc.collect()
    while True:
        start, start_cpu = clock(), cpu()
        plan = scheduler.schedule()
        if plan is not None:
            scheduler.launched(plan)
            flight.append(plan)
        spent, spent_cpu = clock() - start, cpu() - start_cpu
        decodes = plan is not None and plan.num_tokens == num_running == len(plan.chunks)
        while len(flight) > (overlap and plan is not None):
            done = flight.pop(0)
            ids = [one if chunk.samples else none for chunk in done.chunks]  # the fake sampler, outside of the clock
            start, start_cpu = clock(), cpu()
            scheduler.settle(done, ids)
            spent, spent_cpu = spent + clock() - start, spent_cpu + cpu() - start_cpu
        if plan is None and not flight:
            break
        if decodes:
            times.append(spent * 1e6)
            busy.append(spent_cpu * 1e6)
    scheduler.check()
    times.sort()
    mean = sum(busy) / len(busy)
    return {
        "running": num_running, "overlap": overlap, "block_size": block_size, "steps": len(times),
        "us_per_step": round(mean, 2), "us_per_request_and_step": round(mean / num_running, 3),
        "wall_us_per_step_median": round(times[len(times) // 2], 2),
        "wall_us_per_step_p99": round(times[int(len(times) * 0.99)], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    rows = []
    for num_running in args.running:
        for block_size in args.block_size:
            for overlap in (False, True):
                row = measure(num_running, overlap, block_size, args.steps)
                rows.append(row)
                print(
                    f"{num_running:4d} running, blocks of {block_size:2d}, overlap {overlap!s:5}: "
                    f"{row['us_per_step']:7.1f} us per step (wall: median {row['wall_us_per_step_median']:.1f}, "
                    f"p99 {row['wall_us_per_step_p99']:.1f}), {row['us_per_request_and_step']:.2f} us per request and step"
                )
    if args.json:
        record = {
            "benchmark": "scheduler_host", "python": platform.python_version(), "machine": platform.machine(),
            "implementation": sys.implementation.name, "rows": rows,
        }  # fmt: skip
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
