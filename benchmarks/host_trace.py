"""A steady decode under the profiler: what the host does in a step, and whether the device ever waits for it.

    python benchmarks/host_trace.py --config benchmarks/shapes/qwen3-0.6b.json [--batch 1 8 64 256] [--context 512]
        [--steps 50] [--temperature 0.6] [--top-k 20] [--top-p 0.95] [--out FILE.json] [--trace FILE.json]

Two passes over the same running requests, each of --steps steps. The first is timed without a profiler: what the parts of a
step take on the host, and in how many steps the device was still busy with the step before when the next one had been
launched, so that it went from one to the other without a pause. The second runs under torch.profiler: the time in which no
kernel and no copy ran, in all and between the last of one step and the first of the next (each captured step begins with
`prepare_rows`), and by how much each of the kernels that are no layer's makes a step longer: it ends so long after what began
before it. Tracing itself slows the launches, so the second pass is an upper bound. --trace keeps its events (Perfetto).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from about import write
from headrace.config import EngineConfig
from headrace.engine.build import Engine, build_engine
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from headrace.worker.model_runner import StepHandle, StepResult
from headrace_bench.engine import shape_directory

PARTS = ("schedule", "launch", "wait", "settle")
WARM = 16  # steps before the first pass
FIRST = "prepare_rows"  # in the name of a step's first kernel
ONCE = 1.5  # launches a step, at most, of kernels that are no layer's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each sequence")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out")
    parser.add_argument("--trace")
    args = parser.parse_args()
    tokens = WARM + 2 * args.steps + 16
    engine = build_engine(
        EngineConfig(
            model=shape_directory(args.config), load_format="dummy", skip_tokenizer_init=True, device=args.device,
            max_num_seqs=max(args.batch), max_model_len=args.context + tokens, enable_prefix_caching=False,
        )
    )  # fmt: skip
    rows = []
    for batch in args.batch:
        steady(engine, batch, args, 4)  # compiles and captures
        rows.append(steady(engine, batch, args, tokens))
        print(line(rows[-1]), flush=True)
    if args.out:
        card = torch.cuda.get_device_name() if engine.device.type == "cuda" else "CPU"
        write(args.out, {"card": card, "dtype": str(engine.dtype), **vars(args), "results": rows})


def steady(engine: Engine, batch: int, args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Let `batch` requests run until all decode, then measure both passes; with few `tokens` just run to the end."""
    core, rng = engine.core, random.Random(0)
    settings = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, max_tokens=tokens, ignore_eos=True
    ).resolved({})
    for i in range(batch):
        prompt = [rng.randrange(core.vocab_size) for _ in range(args.context)]
        core.add(EngineRequest(f"{batch}.{tokens}.{i}", prompt, settings, i))
    result: dict[str, Any] = {"batch": batch}
    if tokens > WARM + 2 * args.steps:
        started: set[str] = set()
        while len(started) < batch:
            started |= {news.id for news in core.step()}
        for _ in range(WARM):
            core.step()
        result |= timed(engine, args.steps)
        result |= traced(engine, args.steps, args.trace)
        for i in range(batch):
            core.abort(f"{batch}.{tokens}.{i}")
    while core.has_work:
        core.step()
    return result


def timed(engine: Engine, steps: int) -> dict[str, Any]:
    core = engine.core
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    busy: list[bool] = []  # the device, when the host has launched a step and turns to the one before
    replays: list[float] = []
    original, replay = StepHandle.result, torch.cuda.CUDAGraph.replay

    def result(handle: StepHandle) -> StepResult:
        busy.append(handle._done is not None and not handle._done.query())
        return original(handle)

    def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
        start = time.perf_counter()
        replay(graph)
        replays.append(time.perf_counter() - start)

    StepHandle.result = result  # type: ignore[method-assign]
    torch.cuda.CUDAGraph.replay = timed_replay  # type: ignore[method-assign]
    began = time.perf_counter()
    for _ in range(steps):
        core.step()
        for name in PARTS:
            parts[name].append(getattr(core.times, name))
    took = time.perf_counter() - began
    StepHandle.result, torch.cuda.CUDAGraph.replay = original, replay  # type: ignore[method-assign]
    medians = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in parts.items()}
    host = 1e3 * statistics.median(map(sum, zip(*(parts[n] for n in PARTS if n != "wait"), strict=True)))
    times = {"step_ms": 1e3 * took / steps, "host_ms": host, **medians}
    times["graph_ms"] = 1e3 * statistics.median(replays or [0.0])  # of the launch: the driver's part
    return times | {"device_busy_at_launch": sum(busy), "steps": len(busy)}


def traced(engine: Engine, steps: int, trace: str | None) -> dict[str, Any]:
    if engine.device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.core.step()
        torch.cuda.synchronize()
    if trace:
        profiler.export_chrome_trace(trace)
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end > e.time_range.start
    )
    return idle_times(events)


def idle_times(events: list[tuple[float, float, str]]) -> dict[str, Any]:
    """Of device events (start, end, name), microseconds, in order of their start: without the first and last step."""
    firsts = [i for i, (_, _, name) in enumerate(events) if FIRST in name]
    if len(firsts) < 3:
        return {"device_steps": 0}
    events = events[firsts[0] : firsts[-1] + 1]
    busy_until, idle, between = events[0][1], 0.0, []
    added: dict[str, list[float]] = {}
    for start, end, name in events[1:]:
        gap = max(0.0, start - busy_until)
        idle += gap
        if FIRST in name:
            between.append(gap)
        added.setdefault(name, []).append(max(0.0, end - max(start, busy_until)))
        busy_until = max(busy_until, end)
    alone = {name: statistics.median(of) for name, of in added.items() if len(of) <= ONCE * len(between)}
    span = events[-1][0] - events[0][0]
    return {
        "device_steps": len(between), "device_idle_percent": 100 * idle / span,
        "idle_between_steps_percent": 100 * sum(between) / span, "idle_between_steps_us": statistics.median(between),
        "traced_step_ms": span / len(between) / 1e3, "outside_layers_us": alone,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    host = ", ".join(f"{name} {row[f'{name}_ms']:.3f}" for name in PARTS)
    text = f"batch {row['batch']:4d}: {row['step_ms']:.3f} ms a step; host {row['host_ms']:.3f} ms ({host}; "
    text += f"of the launch, the driver's {row['graph_ms']:.3f}); "
    text += f"the device was busy at {row['device_busy_at_launch']} of {row['steps']} launches"
    if row.get("device_steps"):
        text += f"; traced: device idle {row['device_idle_percent']:.1f} %, between steps "
        text += f"{row['idle_between_steps_percent']:.2f} % ({row['idle_between_steps_us']:.1f} us); us: "
        text += ", ".join(f"{name} {us:.1f}" for name, us in row["outside_layers_us"].items())
    return text


if __name__ == "__main__":
    main()
