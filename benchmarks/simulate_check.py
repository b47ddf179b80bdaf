"""What `headrace simulate` foretells beside what the real server does: percentiles and throughput of the same arrivals.

    python benchmarks/simulate_check.py [--json FILE]                                        the embedded model on the CPU
    python benchmarks/simulate_check.py --config benchmarks/shapes/qwen3-0.6b.json --load-format dummy [--json FILE]   on a GPU

Starts `headrace serve --trace`, loads it with `headrace bench serve` at some concurrencies and rates (the calibration), fits
the cost of a step to the trace and the time outside of the engine to the requests that ran alone. Then it sends other requests
at other times, at shares of the highest throughput that was seen, and simulates exactly these arrivals several times, each with
other steps that are slow. What is foretold is the median; how far these runs differ is what chance does. Wanted: within 10 %.

The engine's process has a core of the CPU for itself, as it has a card, and the front and the client have the others. With
--shared each takes what it gets, which is not foretold: it depends on how many streams the others write and read.
simulate_engine.py asks the engine alone, without HTTP.

With --recorded nothing runs: the roofline's answers are printed beside what `headrace bench` measured on an H100. The shares of
the limit are taken from the `batch` rows, for they are the model; nothing is taken from `offline-random`.

With --paced the server's model only sleeps, 20 ms and more for more rows: that checks the method, on a busy machine too.

Server, client and simulation are on one machine, and it must be quiet: what else runs is in the trace and not in the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.cli.parser import CommandParser
from headrace_bench.simulation import options as simulation
from headrace_bench.simulation.figures import summary
from headrace_bench.simulation.fleet import simulate
from headrace_bench.simulation.trace_fit import fit_trace

HERE = Path(__file__).parent
HEADRACE = [sys.executable, "-m", "headrace.cli"]
KEYS = [f"{p}_{name}_ms" for name in ("ttft", "tpot", "itl") for p in ("median", "p90", "p99")]
KEYS += ["output_throughput", "request_throughput"]
WANTED = 0.10
PACED = """
import sys
from headrace.cli import serve
from headrace.cli.parser import CommandParser
parser = CommandParser()
serve.add_arguments(parser)
sys.exit(serve.run(parser.parse_args(sys.argv[1:]), "fake_model:build_paced"))
"""
PACED_START = [sys.executable, "-c", PACED]


class Server:
    """`headrace serve` with a trace, on a port of its own."""

    def __init__(self, start: list[str], options: list[str], directory: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.trace = f"http://127.0.0.1:{port}", directory / "trace.json"
        self._log = (directory / "log").open("w+")
        command = [*start, "--port", str(port), "--trace", str(self.trace), "--no-standby", *options]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
        )

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/ready")
                return
            except OSError:
                time.sleep(0.2)
        self._log.seek(0)
        raise SystemExit(f"the server is not ready:\n{self._log.read()[-3000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def cache(self) -> dict[str, int]:
        """Blocks of the KV cache and their size."""
        page = self.get("/metrics")
        line = next(line for line in page.splitlines() if line.startswith("headrace:cache_config_info{"))
        return {name: int(re.search(rf'{name}="(\d+)"', line)[1]) for name in ("block_size", "num_gpu_blocks")}  # type: ignore[index]

    def keep_apart(self) -> None:
        """The last of the machine's cores is the engine's, the others are for the front, and for this process and its own."""
        cores = os.sched_getaffinity(0)
        if len(cores) < 2:
            raise SystemExit("one core for the engine and one for all else are not there: --shared")
        last, waiting = {max(cores)}, [self.process.pid]
        while waiting:
            directory = Path("/proc") / str(waiting.pop())
            is_engine = b"headrace.engine.process" in (directory / "cmdline").read_bytes()
            for task in (directory / "task").iterdir():
                os.sched_setaffinity(int(task.name), last if is_engine else cores - last)
                waiting += map(int, (task / "children").read_text().split())
        os.sched_setaffinity(0, cores - last)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", help="a config.json whose shape is served with random weights")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy with --config")
    parser.add_argument("--recorded", action="store_true", help="beside the runs on an H100 in results/, and nothing else")
    parser.add_argument("--paced", action="store_true", help="a model that only sleeps")
    parser.add_argument("--input-len", type=int, default=None, help="prompt tokens, +- half (64; of a shape 512)")
    parser.add_argument("--output-len", type=int, default=None, help="likewise (64; of a shape 128)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="of the calibration, the first 1")
    parser.add_argument("--recorded-shares", type=float, nargs="+", default=[0.55, 0.85], help="and of the highest throughput")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.4, 0.7, 0.9], help="of it, to be foretold")
    parser.add_argument("--requests", type=int, default=150, help="of each of these runs")
    parser.add_argument("--shared", action="store_true", help="the engine has no core of a CPU for itself")
    parser.add_argument("--draws", type=int, default=9, help="simulations of each")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    if (args.config is not None) != (args.load_format == "dummy"):
        parser.error("--config FILE and --load-format dummy go together")
    if args.recorded:
        return recorded()
    args.input_len = args.input_len or (512 if args.config else 64)
    args.output_len = args.output_len or (128 if args.config else 64)
    began, load = time.perf_counter(), os.getloadavg()
    directory = Path(tempfile.mkdtemp(prefix="headrace-check-"))
    try:
        rows, facts = check(args, directory)
    finally:
        shutil.rmtree(directory)
    print(f"took {time.perf_counter() - began:.0f} s")
    if args.json:
        write(args, rows, facts, load)


def check(args: argparse.Namespace, directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    options = served_shape(args.config, directory) if args.config else []
    apart = not (args.config or args.paced or args.shared)
    options += ["--threads", "1"] if apart else ["--no-async-scheduling"] if args.paced else []  # a launch that returns is done
    server = Server(PACED_START if args.paced else [*HEADRACE, "serve"], options, directory)
    try:
        server.wait(120)
        cache = server.cache()
        if apart:
            server.keep_apart()
        bench(server, args, directory, "--max-concurrency", "8", "--num-prompts", "16", seed=99)  # what is lazy is done
        calibrated = bench(
            server, args, directory, "--max-concurrency", *map(str, args.concurrency),
            counts=[max(20, 3 * c) for c in args.concurrency], seed=1,
        )  # fmt: skip
        best = max(run["request_throughput"] for run in calibrated)
        for number, share in enumerate(args.recorded_shares):
            rate = f"{share * best:.4g}"
            bench(server, args, directory, "--request-rate", rate, "--num-prompts", str(args.requests), seed=1000 + number)
        time.sleep(1.5)  # the trace is flushed every second
        trace = directory / "calibration.json"
        shutil.copy(server.trace, trace)
        fixed = ["--trace", str(trace), "--num-kv-blocks", str(cache["num_gpu_blocks"])]
        fixed += ["--block-size", str(cache["block_size"])]
        alone = simulated(fixed, args, directory, "--front-ms", "0", "--max-concurrency", "1", "--num-prompts", "10", seed=1)
        front = max(0.0, calibrated[0]["median_ttft_ms"] - alone["median_ttft_ms"])
        print(f"outside of the engine {front:.2f} ms; at most {best:.2f} requests/s", flush=True)
        rows = []
        for number, share in enumerate(args.shares):
            run = ["--request-rate", f"{share * best:.4g}", "--num-prompts", str(args.requests)]
            real = bench(server, args, directory, *run, seed=10 + number)[0]
            foretold = drawn(args.draws, fixed, args, "--front-ms", f"{front:.4g}", *run, seed=10 + number)
            rows.append(compared(share, real, foretold))
    finally:
        server.end()
    return rows, {"front_ms": front, "best_request_throughput": best, **cache}


def bench(
    server: Server, args: argparse.Namespace, directory: Path, *options: str, seed: int, counts: list[int] | None = None
) -> list[dict[str, Any]]:  # fmt: skip
    """`headrace bench serve`; with `counts` the last options are one run each, of so many requests."""
    runs = [options] if counts is None else [
        (options[0], option, "--num-prompts", str(count)) for option, count in zip(options[1:], counts, strict=True)
    ]  # fmt: skip
    results = []
    for run in runs:
        out = directory / "bench.json"
        command = [*HEADRACE, "bench", "serve", "--url", server.url, "--save-result", str(out), *lengths(args, seed), *run]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-500:]}{done.stderr[-2000:]}")
        results.append(json.loads(out.read_text()))
        r = results[-1]
        print(f"real {' '.join(run)}: {r['output_throughput']:.0f} tok/s, TPOT {r['median_tpot_ms']:.2f} ms", flush=True)
    return results


def simulated(fixed: list[str], args: argparse.Namespace, directory: Path, *options: str, seed: int) -> dict[str, Any]:
    out = directory / "simulated.json"
    command = [*HEADRACE, "simulate", *fixed, "--save-result", str(out), *lengths(args, seed), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    print(done.stderr.strip(), flush=True)
    return json.loads(out.read_text())


def drawn(count: int, fixed: list[str], args: argparse.Namespace, *options: str, seed: int) -> dict[str, list[float]]:
    """Each figure of so many simulations of the same arrivals, which begin at different steps of the trace; sorted."""
    parser = CommandParser()
    simulation.add_arguments(parser)
    given = parser.parse_args([*fixed, *lengths(args, seed), *options])
    [load] = simulation.checked(given)
    setup = simulation.setup_of(given)
    traffic = simulation.traffic_of(given, load, setup.limits.max_model_len)
    costs = [fit_trace(given.trace, seed) for seed in range(count)]
    runs = [summary(simulate(replace(setup, cost=cost), traffic), [50, 90, 99], {}) for cost in costs]
    return {key: sorted(run[key] for run in runs) for key in KEYS}


def lengths(args: argparse.Namespace, seed: int) -> list[str]:
    return [
        "--seed", str(seed), "--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len),
        "--random-range-ratio", "0.5",
    ]  # fmt: skip


def compared(share: float, real: dict[str, Any], foretold: dict[str, list[float]]) -> dict[str, Any]:
    """Prints a table of the run."""
    print(f"-- {share:.0%} of the highest throughput, {real['completed']} requests")
    print(f"{'':24}{'real':>10}{'simulated':>12}{'':8}   by chance")
    row: dict[str, Any] = {"share": share, "completed": real["completed"], "client_cpu": real["client_cpu"], "figures": {}}
    for key in KEYS:
        found = foretold[key]
        median = statistics.median(found)
        off, low, high = median / real[key] - 1, found[0], found[-1]
        row["figures"][key] = {"real": real[key], "simulated": median, "off": off, "low": low, "high": high}
        mark = "" if abs(off) <= WANTED else "   !"
        print(f"{key:24}{real[key]:10.2f}{median:12.2f}{off:+8.1%}   {low:.2f} to {high:.2f}{mark}", flush=True)
    row["worst"] = max(abs(f["off"]) for f in row["figures"].values())
    return row


def recorded() -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as place:
        directory = Path(place)
        rng = random.Random(0)  # the draws of `headrace bench throughput`
        prompts = [len([rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))]) for _ in range(256)]
        lines = [json.dumps({"input_len": n, "output_len": rng.randint(100, 1024)}) for n in prompts]
        (directory / "offline.jsonl").write_text("\n".join(lines))
        for name in ("qwen3-8b", "qwen3-0.6b"):
            for result in json.loads((HERE / "results" / f"h100-{name}.json").read_text())["results"]:
                foretold = foretell(result, name, directory)
                if foretold is not None:
                    off = foretold / result["value"] - 1
                    print(
                        f"{name:12}{result['workload']:18}{result['value']:10.2f}{foretold:10.2f} {result['unit']:6}{off:+7.1%}"
                    )


def foretell(result: dict[str, Any], name: str, directory: Path) -> float | None:
    """The value of a recorded workload, simulated."""
    out, workload = directory / "simulated.json", result["workload"]
    command = [
        *HEADRACE,
        "simulate",
        "--config",
        str(HERE / "shapes" / f"{name}.json"),
        "--front-ms",
        "0",
        "--max-num-batched-tokens",  # as by default when they ran
        "16384",
        "--save-result",
        str(out),
    ]
    if workload == "offline-random":
        command += ["--dataset-name", "custom", "--dataset-path", str(directory / "offline.jsonl")]
    elif workload.startswith("batch "):
        command += ["--num-prompts", workload.split()[1], "--random-input-len", str(result["input_len"])]
        command += ["--random-output-len", str(result["output_len"])]
    else:
        return None
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads(out.read_text())
    return found["output_throughput"] if workload == "offline-random" else found["mean_tpot_ms"]


def served_shape(config: str, directory: Path) -> list[str]:
    """Options that serve a shape with random weights; its tokenizer knows bytes only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    home = directory / "shape"
    home.mkdir()
    shutil.copy(config, home / "config.json")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(home / "tokenizer.json"))
    return [str(home), "--load-format", "dummy"]


def write(args: argparse.Namespace, rows: list[dict[str, Any]], facts: dict[str, Any], load: tuple[float, ...]) -> None:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    document = {
        "benchmark": "simulate_check", "machine": card or f"CPU, {os.cpu_count()} cores", "load_average": load,
        "torch": torch.__version__, "python": platform.python_version(), "commit": commit.stdout.strip() or None,
        "model": "one that sleeps" if args.paced else args.config or "embedded SmolLM2-135M-Instruct",
        "input_len": args.input_len, "output_len": args.output_len,
        "range_ratio": 0.5, **facts, "rows": rows,
    }  # fmt: skip
    Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
