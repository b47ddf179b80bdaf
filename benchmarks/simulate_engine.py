"""What `headrace simulate` foretells beside the engine alone: its loop, given requests at their very times.

    python benchmarks/simulate_engine.py [--cpu-time] [--json FILE]                      the embedded model on one core of a CPU
    python benchmarks/simulate_engine.py --config benchmarks/shapes/qwen3-8b.json [--json FILE]           a shape on a GPU

The core's real loop runs in this process, its messages encoded and decoded as between two. No HTTP, no client, no text: those
have another check, simulate_check.py. On a CPU it keeps to one core, and is alone there as it is on a card. Some loads are
recorded, as by `headrace serve --trace`, and the cost of a step is fitted to that; then other requests come at other rates,
shares of the highest throughput that was seen. Of each such run three things are asked, with the same arrivals:

- replayed: each step takes what it took. What is off is the simulator's own: its loop, its scheduler, its arrivals.
- refitted: a step costs what is fitted to this very run. What is off besides is what a fit does not see of steps.
- foretold: a step costs what was fitted to the recorded runs. What is off besides is what has changed since, as of the machine.

The two last ones are medians of several simulations, each with other steps that are slow; "by chance" is how far those of the
last are apart.

With --save FOLDER the engine's runs are kept there and nothing is simulated, and --saved FOLDER simulates beside those: a card
is only needed for the first. Before each run the engine captures what it would in idle time, as a server does that was idle.

With --cpu-time the loop's clock is the CPU time of this process, and it does not wait for requests that are still to come: a
machine that others use, too, is then as one that nobody does, but for what they do to its caches. With --paced the steps sleep,
20 ms and more for more rows, while the host goes on: a device that is the same on any machine.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from array import array
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from fake_model import build_paced
from headrace.config import EngineConfig
from headrace.engine import core as core_module
from headrace.engine import process as process_module
from headrace.engine.build import Engine, build_engine, choose_device
from headrace.engine.messages import EngineRequest
from headrace.engine.process import CoreLoop, spare_collections
from headrace.engine.stats import StepTrace
from headrace.engine.wire import Add, FromCore, News, Shutdown, to_wire
from headrace.metrics.trace import TraceFile
from headrace.native import runner as runner_module
from headrace.sampling.params import SamplingParams
from headrace.scheduler.config import Limits
from headrace_bench.engine import shape_directory
from headrace_bench.load import Load, arrival_times
from headrace_bench.report import distribution
from headrace_bench.simulation.cost import Work
from headrace_bench.simulation.figures import summary
from headrace_bench.simulation.fleet import Setup, simulate
from headrace_bench.simulation.replay import replayed, shapes_of
from headrace_bench.simulation.trace_fit import Fitted, Sample, fit_trace, kind_of, pairs, read_steps
from headrace_bench.simulation.traffic import Ask, Traffic
from headrace_bench.workload import random_lengths

PERCENTILES = [50, 90, 99]
KEYS = [f"p{p}_{name}_ms" for name in ("ttft", "tpot", "itl") for p in PERCENTILES]
KEYS += ["output_throughput", "request_throughput"]
WANTED = 0.10
ENCODE = msgspec.msgpack.Encoder(enc_hook=to_wire).encode


class CpuTime:
    """What the loop sees of the module time: the CPU time of this process, and what it has waited for."""

    def __init__(self) -> None:
        self._waited = 0.0

    def monotonic(self) -> float:
        return time.process_time() + self._waited

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self._waited += seconds


@dataclass
class Client:
    """Both ends of a core's messages. Requests come at their times (seconds, ascending) or, of `most`, as soon as one ends."""

    asks: list[Ask]
    times: list[float]
    vocabulary: int
    seed: int
    clock: Any
    most: int | None = None
    steps: list[StepTrace] = field(default_factory=list)
    starts: dict[str, float] = field(default_factory=dict)
    got: dict[str, list[float]] = field(default_factory=dict)  # when each token came
    looked: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._messages = [ENCODE(Add(self._request(i, ask))) for i, ask in enumerate(self.asks)]
        self._encode = msgspec.msgpack.Encoder().encode
        self._next = self._open = 0
        self.begin = self.clock.monotonic()
        self._held: deque[int] = deque()

    def _request(self, number: int, ask: Ask) -> EngineRequest:
        ids = random.Random(f"{self.seed}/{number}").choices(range(self.vocabulary), k=ask.own)
        params = SamplingParams(max_tokens=ask.output, temperature=0.0, ignore_eos=True)
        return EngineRequest(f"{self.seed}/{number}", array("i", ids), params, seed=0)

    def take(self) -> bytes | None:
        """As an `Inbox`."""
        if self._next == len(self._messages):
            return self._nothing() if self._open else ENCODE(Shutdown())
        at, now = self.begin + self.times[self._next], self.clock.monotonic()
        if at > now or (self.most is not None and self._open >= self.most):
            return self._nothing(now)
        number, self._next, self._open = self._next, self._next + 1, self._open + 1
        name = f"{self.seed}/{number}"
        self.starts[name], self.got[name] = (at if self.most is None else now), []
        return self._messages[number]

    def _nothing(self, now: float | None = None) -> None:
        self.looked.append(self.clock.monotonic() if now is None else now)

    def wait(self, milliseconds: int) -> None:
        if self._next < len(self.times):
            left = self.begin + self.times[self._next] - self.clock.monotonic()
            self.clock.sleep(max(0.0, min(left, milliseconds / 1e3)))

    def send(self, message: FromCore) -> None:
        self._encode(message)
        now = self.clock.monotonic()
        assert isinstance(message, News)
        self.steps += message.steps or ()
        self.told.append(now)
        for name in message.outputs.ids:
            self.got[name].append(now)
        for output in message.outputs.news:
            self.got[output.id] += [now] * len(output.token_ids)
            if output.finish_reason is not None:
                self._open -= 1
                assert output.finish_reason == "length", output

    def figures(self) -> dict[str, float]:
        """Under the keys of `headrace bench serve`."""
        got, starts = list(self.got.values()), list(self.starts.values())
        seconds = max(times[-1] for times in got) - min(starts)
        ttft = np.array([times[0] - start for times, start in zip(got, starts, strict=True)])
        tpot = np.array([(times[-1] - times[0]) / (len(times) - 1) for times in got if len(times) > 1])
        itl = np.concatenate([np.diff(times) for times in got])
        found = {"output_throughput": sum(map(len, got)) / seconds, "request_throughput": len(got) / seconds}
        for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
            found |= distribution(name, 1e3 * values, PERCENTILES)
        return found


@dataclass
class Run:
    """What is known of one; times as the loop's."""

    steps: list[StepTrace]
    looked: list[float]
    told: list[float]
    starts: list[float]
    figures: dict[str, float]

    @property
    def throughput(self) -> float:
        return self.figures["request_throughput"]

    def write(self, path: Path) -> None:
        """With times to 0.1 us."""
        steps = [[round(value, 7) for value in msgspec.structs.astuple(step)] for step in self.steps]
        times = ([round(at, 7) for at in times] for times in (self.looked, self.told, self.starts))
        with gzip.open(path, "wt") as file:
            json.dump([steps, *times, self.figures], file)

    @staticmethod
    def read(path: Path) -> Run:
        with gzip.open(path, "rt") as file:
            steps, *rest = json.load(file)
        return Run([StepTrace(*step) for step in steps], *rest)


@dataclass
class Runs:
    """The engine's, one after the other. A run's name begins with what it is for: `recorded`, or `checked`."""

    args: argparse.Namespace
    engine: Engine
    clock: Any
    ready: float

    def about(self) -> dict[str, Any]:
        """What a simulation of them needs, and when the engine was ready, in the clock of the steps."""
        core = self.engine.core
        limits, machine = asdict(core.scheduler.limits), machine_of(self.args)
        return {"limits": limits, "blocking": not core.async_scheduling, "machine": machine, "ready": self.ready}

    def run(self, name: str, count: int, load: Load, seed: int) -> Run:
        while self.engine.core.idle():
            pass
        times, vocabulary = arrival_times(count, load, seed), self.engine.model.vocab_size
        client = Client(asks(self.args, seed, count), times, vocabulary, seed, self.clock, load.max_concurrency)
        CoreLoop(self.engine.core, client, client.send, traced=True).run()  # type: ignore[arg-type]
        found = client.figures()
        words = f"{load.max_concurrency} at once" if load.max_concurrency else f"{load.request_rate:.2f} a second"
        print(
            f"{words:>16}: {count} requests, {found['output_throughput']:.0f} tokens/s, "
            f"TTFT {found['p50_ttft_ms']:.1f} ms, TPOT {found['p50_tpot_ms']:.2f} ms", flush=True,
        )  # fmt: skip
        run = Run(client.steps, client.looked, client.told, list(client.starts.values()), found)
        if self.args.save:
            run.write(Path(self.args.save) / f"{name}.json.gz")
        return run

    def recorded(self) -> list[Run]:
        args, runs = self.args, []
        most = Load(max_concurrency=max(args.concurrency))
        self.run("first", min(64, 2 * max(args.concurrency)), most, 99)  # what is lazy is done
        gc.collect()
        spare_collections()  # as the core's own process does
        for at_once in args.concurrency:
            count, load = min(3 * at_once, args.requests), Load(max_concurrency=at_once)
            runs.append(self.run(f"recorded-{at_once}", count, load, at_once))
        best = max(run.throughput for run in runs)
        for number, share in enumerate(args.recorded):
            count, load = args.recorded_requests or args.requests, Load(share * best)
            runs.append(self.run(f"recorded-{share}", count, load, 1000 + number))
        return runs

    def checked(self, number: int, rate: float) -> Run:
        return self.run(f"checked-{self.args.shares[number]}", self.args.requests, Load(rate), self.args.seed + number)


@dataclass
class Saved:
    """Runs that were kept."""

    args: argparse.Namespace
    place: Path

    def about(self) -> dict[str, Any]:
        return json.loads((self.place / "about.json").read_text())

    def recorded(self) -> list[Run]:
        return [Run.read(self.place / f"recorded-{n}.json.gz") for n in [*self.args.concurrency, *self.args.recorded]]

    def checked(self, number: int, rate: float) -> Run:
        return Run.read(self.place / f"checked-{self.args.shares[number]}.json.gz")


def asks(args: argparse.Namespace, seed: int, count: int) -> list[Ask]:
    drawn = random_lengths(seed, count, args.input_len, args.output_len, 0, 0.5)
    return [Ask(w.input_len, w.output_len) for w in drawn]


@dataclass
class Check:
    args: argparse.Namespace
    limits: Limits
    blocking: bool
    place: Path

    def traced(self, name: str, steps: list[StepTrace]) -> Path:
        trace = TraceFile(self.place / name, max_bytes=2**30)
        for i in range(0, len(steps), 256):  # each is some events, and so many are kept
            trace.steps(steps[i : i + 256])
        trace.close()
        return self.place / name

    def row(self, trace: Path, run: Run, share: float, rate: float, seed: int) -> dict[str, Any]:
        """One load, as it was and as it is simulated."""
        count, load = len(run.starts), Load(rate)
        traffic = Traffic(lambda _, n: asks(self.args, seed, n), load, count, seed)  # type: ignore[misc]
        again = replayed(run.steps, run.looked, run.told, run.starts, self.blocking)
        setup = Setup(self.limits, again, overlap=not self.blocking, leaps=False)
        same = summary(simulate(setup, traffic), PERCENTILES, {})
        checked, setup = self.traced("checked.json", run.steps), replace(setup, leaps=True)
        costs = {path: [fit_trace(str(path), number) for number in range(self.args.draws)] for path in (trace, checked)}
        foretold, refitted = (
            [summary(simulate(replace(setup, cost=cost), traffic), PERCENTILES, {}) for cost in costs[path]] for path in costs
        )
        steps, first = pairs(read_steps(str(checked)), self.blocking), costs[trace][0]
        row: dict[str, Any] = {
            "share": share, "request_rate": rate, "requests": count, "steps": len(shapes_of(run.steps)),
            "replayed_steps": len(again.shapes), "alike": again.alike(run.steps), "device_busy": same["device_busy"],
            "steps_took": took(first, [s for s in steps if s.tokens == s.seqs]),
            "prefills_took": took(first, [s for s in steps if s.tokens > s.seqs]), "figures": {},
        }  # fmt: skip
        real = run.figures
        for key in KEYS:
            draws = sorted(f[key] for f in foretold)
            row["figures"][key] = {
                "real": real[key], "replayed": same[key], "refitted": statistics.median(f[key] for f in refitted),
                "foretold": statistics.median(draws), "low": draws[0], "high": draws[-1],
            }  # fmt: skip
        return row


def took(cost: Fitted, steps: list[Sample]) -> float | None:
    """All of these steps over what was foretold of them."""
    ratios = [cost.ratios[kind_of(s.tokens, s.seqs)].mean() for s in steps]
    works = [Work(s.tokens, s.seqs, 0, 0.0, s.seqs, s.used) for s in steps]
    foretold = sum(cost.expected(work) * ratio for work, ratio in zip(works, ratios, strict=True))
    return sum(s.seconds for s in steps) / foretold if steps else None


def shown(row: dict[str, Any]) -> float:
    """The table; how far the worst of what was foretold is off."""
    kinds = (("decodes", row["steps_took"]), ("steps with prefill", row["prefills_took"]))
    shares = " and ".join(f"{words} {share:.3f}" for words, share in kinds if share is not None)
    print(f"-- {row['share']:.0%} of the highest throughput, {row['request_rate']:.2f} requests/s, {row['requests']} of them;")
    print(f"   {row['steps']} steps, the replayed run has the first {row['alike']}; device busy {row['device_busy']:.0%};")
    print(f"   times of what was foretold: {shares}")
    print(f"{'':20}{'real':>10}{'replayed':>11}{'':9}{'refitted':>11}{'':9}{'foretold':>11}{'':9}  by chance")
    worst = 0.0
    for key, f in row["figures"].items():
        off = {name: f[name] / f["real"] - 1 for name in ("replayed", "refitted", "foretold")}
        worst = max(worst, abs(off["foretold"]))
        mark = "  !" if abs(off["foretold"]) > WANTED else ""
        columns = "".join(f"{f[name]:11.2f}{off[name]:+9.1%}" for name in off)
        print(f"{key:20}{f['real']:10.2f}{columns}  {f['low']:.2f} to {f['high']:.2f}{mark}", flush=True)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", help="a config.json whose shape runs with random weights; default: the embedded model")
    parser.add_argument("--device", default="auto", help="as of `headrace serve`")
    parser.add_argument("--cpu", type=int, help="the core that the engine keeps to (default: the last one)")
    parser.add_argument("--cpu-time", action="store_true", help="the clock is this process's CPU time")
    parser.add_argument(
        "--paced", action="store_true", help="a model that only sleeps, as on a device that overlaps with the host"
    )
    parser.add_argument("--input-len", type=int, help="prompt tokens, +- half (64; of a shape 512)")
    parser.add_argument("--output-len", type=int, help="likewise (64; of a shape 128)")
    parser.add_argument("--concurrency", type=int, nargs="+", help="recorded (8 32; of a shape 16 64 128)")
    parser.add_argument("--recorded", type=float, nargs="+", default=[0.55, 0.85], help="and so much of the highest throughput")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.4, 0.7, 0.9], help="of it, to be foretold")
    parser.add_argument("--requests", type=int, default=150, help="of each run")
    parser.add_argument("--recorded-requests", type=int, help="of each that is recorded at a rate (the same)")
    parser.add_argument("--seed", type=int, default=10, help="of the requests that are foretold")
    parser.add_argument("--draws", type=int, default=9, help="simulations of each run")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--save", type=Path, help="keep the engine's runs in this folder and simulate nothing")
    parser.add_argument("--saved", type=Path, help="simulate beside the runs of this folder")
    args = parser.parse_args()
    args.input_len = args.input_len or (512 if args.config else 64)
    args.output_len = args.output_len or (128 if args.config else 64)
    args.concurrency = args.concurrency or ([16, 64, 128] if args.config else [8, 32])
    began, load = time.perf_counter(), os.getloadavg()
    clock = prepared(args)
    if args.saved:
        check(args, Saved(args, args.saved), load)
    else:
        options: dict[str, Any] = {"model": shape_directory(args.config), "load_format": "dummy"} if args.config else {}
        config = EngineConfig(**options, device=args.device, threads=args.threads, skip_tokenizer_init=not args.paced)
        engine = (build_paced if args.paced else build_engine)(config)
        engine.begin()
        print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
        try:
            (keep if args.save else check)(args, Runs(args, engine, clock, clock.monotonic()), load)
        finally:
            engine.close()
    print(f"took {time.perf_counter() - began:.0f} s")


def highest(recorded: list[Run]) -> float:
    """Requests a second of those runs that had as many at once as they would."""
    return max(run.throughput for run in recorded)


def keep(args: argparse.Namespace, runs: Runs, load: tuple[float, ...]) -> None:
    args.save.mkdir(parents=True, exist_ok=True)
    (args.save / "about.json").write_text(json.dumps(runs.about() | {"load_average": load}))
    best = highest(runs.recorded())
    for number, share in enumerate(args.shares):
        runs.checked(number, share * best)


def check(args: argparse.Namespace, runs: Runs | Saved, load: tuple[float, ...]) -> None:
    about = runs.about()
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as place:
        check = Check(args, Limits(**about["limits"]), about["blocking"], Path(place))
        recorded = runs.recorded()
        best, trace = highest(recorded), check.traced("recorded.json", [step for run in recorded for step in run.steps])
        print(f"at most {best:.2f} requests/s; {fit_trace(str(trace), 0)}", flush=True)
        rows = []
        for number, share in enumerate(args.shares):
            rate = share * best
            rows.append(check.row(trace, runs.checked(number, rate), share, rate, args.seed + number))
            rows[-1]["worst"] = shown(rows[-1])
            if args.json:
                write(args, about["machine"], {"best_request_throughput": best, "rows": rows}, about.get("load_average", load))


def prepared(args: argparse.Namespace) -> Any:
    """The clock. On a CPU this process stays on one of its cores from now on."""
    args.threads = None
    if args.saved:
        return time
    if choose_device(args.device).type == "cpu":
        args.threads = 1
        os.sched_setaffinity(0, {args.cpu if args.cpu is not None else max(os.sched_getaffinity(0))})
    if not args.cpu_time:
        return time
    clock = CpuTime()
    for module in (core_module, process_module, runner_module):
        module.time = clock  # type: ignore[attr-defined]
    return clock


def machine_of(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    card = torch.cuda.get_device_name() if args.threads is None else f"CPU, one of {os.cpu_count()} cores"
    versions = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit.stdout.strip() or None}
    return {"machine": card, **versions}


def write(args: argparse.Namespace, about: dict[str, Any], found: dict[str, Any], load: tuple[float, ...]) -> None:
    document = {
        "benchmark": "simulate_engine", **about, "load_average": load, "clock": "CPU time" if args.cpu_time else "real",
        "model": "one that sleeps" if args.paced else args.config or "embedded SmolLM2-135M-Instruct",
        "input_len": args.input_len, "output_len": args.output_len,
        "range_ratio": 0.5, "concurrency": args.concurrency, "recorded": args.recorded, **found,
    }  # fmt: skip
    Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
