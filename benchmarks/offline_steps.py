"""Where the time of offline-random goes: its steps by kind and size, each beside its limit, and the slowest of them.

    python benchmarks/offline_steps.py --config benchmarks/shapes/qwen3-0.6b.json [--repeat 2] [--tensor-parallel-size N]
                                       [--quantization fp8] [--kv-cache-dtype fp8] [--out FILE.json]

A step lasts from the end of the one before it to its own end, as the host sees it. `idle` is how much of that passed before
its launch: the device had nothing to do. The second repeat shows what the first one paid for being the first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from about import write
from headrace import LLM
from headrace.model.checkpoint import resolve_checkpoint
from headrace.scheduler.plan import StepPlan
from headrace_bench.engine import Bench, shape_directory, shown
from headrace_bench.roofline import Limits, measure_limits, multiplies_fp8

SIZES = (16, 32, 64, 96, 128, 160, 192, 224, 256)  # rows of decode steps are told apart up to these
SLOWEST = 12


class Watch:
    """Notes of each step that a core settles."""

    def __init__(self, core, limits: Limits):
        self.core, self.limits = core, limits
        self.steps: list[dict[str, Any]] = []
        self._launched: dict[int, float] = {}
        self._schedule, self._took = core.scheduler.schedule, core.scheduler.took
        core.scheduler.schedule, core.scheduler.took = self.schedule, self.took

    def schedule(self, *args: Any) -> StepPlan | None:
        plan = self._schedule(*args)
        if plan is not None:
            self._launched[plan.step] = time.perf_counter()
        return plan

    def took(self, plan: StepPlan, seconds: float) -> None:
        launched, before = self._launched.pop(plan.step), self.core._finished
        prompts = plan.counts[plan.counts > 1 + plan.drafts].tolist()
        limit = sum(map(self.limits.prefill_seconds, prompts))
        if plan.num_decodes:
            limit += self.limits.decode_seconds((plan.starts[: plan.num_decodes] + 1).tolist())
        idle = max(0.0, launched - before) if self.steps else 0.0
        self.steps.append({
            "kind": "prefill" if prompts else kind_of(plan.num_decodes), "rows": plan.num_decodes, "tokens": plan.num_tokens,
            "ms": 1e3 * (seconds + idle), "limit_ms": 1e3 * limit, "idle_ms": 1e3 * idle,
            "launch_ms": 1e3 * self.core.times.launch,
        })  # fmt: skip
        self._took(plan, seconds)


def kind_of(rows: int) -> str:
    return next((f"up to {size} rows" for size in SIZES if rows <= size), "more rows")


def summary(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for step in steps:
        kind = kinds.setdefault(step["kind"], {"kind": step["kind"], "steps": 0, "ms": 0.0, "limit_ms": 0.0, "idle_ms": 0.0})
        kind["steps"] += 1
        for name in ("ms", "limit_ms", "idle_ms"):
            kind[name] += step[name]
    return list(kinds.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cards = args.tensor_parallel_size
    options = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2304, "device": args.device,
        "tensor_parallel_size": cards, "quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype,
    }  # fmt: skip
    runs = []
    with LLM(shape_directory(args.config), **options) as llm:
        assert llm.engine is not None
        fp8 = multiplies_fp8(llm.engine.device, args.quantization)
        machine = measure_limits(llm.engine.device, llm.engine.dtype, cards, fp8)
        own_head = not resolve_checkpoint(llm.engine.config).ties_head(llm.engine.model.family)
        fp8_cache = args.kv_cache_dtype == "fp8"
        limits = Limits(llm.engine.model, llm.engine.dtype, machine, args.quantization, fp8_cache, own_head=own_head)
        bench, watch = Bench(llm, limits), Watch(llm.engine.core, limits)
        for _ in range(args.repeat):
            watch.steps.clear()
            result = shown(bench.throughput(args.num_prompts, 0.6, 1))
            kinds = summary(watch.steps)
            for kind in kinds:
                share = 100 * kind["limit_ms"] / kind["ms"]
                print(f"  {kind['kind']:15s} {kind['steps']:5d} steps {kind['ms']:9.1f} ms, {share:5.1f} % of the limit, "
                      f"idle {kind['idle_ms']:.1f} ms")  # fmt: skip
            slowest = sorted(enumerate(watch.steps), key=lambda step: step[1]["limit_ms"] - step[1]["ms"])[:SLOWEST]
            for number, step in slowest:
                values = (f"{name} {v:.2f}" if isinstance(v, float) else f"{name} {v}" for name, v in step.items())
                print(f"    step {number}: " + ", ".join(values))
            runs.append({"result": result, "kinds": kinds, "slowest": [{"step": n, **step} for n, step in slowest]})
    if args.out:
        write(args.out, {"machine": machine.as_dict(), "model": args.config, "runs": runs})


if __name__ == "__main__":
    main()
