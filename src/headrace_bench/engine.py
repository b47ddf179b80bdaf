"""`headrace bench throughput | latency | prefill | prompts | startup | all`: the engine alone, each figure beside its limit.

The limit is computed from the copy bandwidth and the bf16 matmul rate that the same run measures (roofline.py).
Each result is printed when it is there; with --out all are written as JSON with card, versions, commit and workload.
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.options import add_engine_arguments, engine_options
from headrace.cli.parser import text
from headrace.config import environment_of_child, python_of_child
from headrace.errors import HeadraceError, ParameterError
from headrace.files import read_text
from headrace.prewarm import prewarm
from headrace_bench.serve import check_place

if TYPE_CHECKING:
    from headrace_bench.roofline import Limits

LONGEST = 1024  # tokens of a prompt and of an output of offline-random


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=text, metavar="FILE", help="a config.json whose shape is run with random weights (--load-format dummy)"
    )
    sizes = [1, 8, 32, 64, 128, 256]
    parser.add_argument("--batch", type=int, metavar="N", nargs="+", default=sizes, help="latency: batch sizes")
    parser.add_argument(
        "--num-prompts", type=int, metavar="N", nargs="+", default=[256, 1024], help="throughput: prompts of each run"
    )
    for name, default, words in (
        ("input-len", 128, "latency: prompt tokens"), ("output-len", 512, "latency: output tokens"),
        ("prefill-prompts", 16, "prefill: prompts"),
        ("prefill-len", 4096, "prefill: tokens of each"), ("repeat", 1, "runs of each workload; the median counts"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=words)
    parser.add_argument("--temperature", type=float, metavar="X", nargs="+", default=[0.6], help="0 is greedy")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a decode step and of a prefill step")
    parser.add_argument("--out", type=text, metavar="FILE", help="write the results to this JSON file")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check(args)
    options = engine_options(args)
    if args.config:
        options |= {"model": shape_directory(args.config), "load_format": "dummy"}
    if args.what == "startup":
        return report(args, [shown(startup(args, options))], {})
    from headrace import LLM
    from headrace.model.checkpoint import resolve_checkpoint
    from headrace.model.formats.quantized import quantization_of
    from headrace_bench.prompts import PromptBench
    from headrace_bench.roofline import FP8, Limits, dtype_of_products, held_as, measure_limits, multiplies_fp8, sustained_flops

    options.setdefault("skip_tokenizer_init", True)
    options.setdefault("max_model_len", default_length(args, options))
    check_lengths(args, options["max_model_len"])
    with LLM(**options) as llm:
        assert llm.engine is not None
        check_seats(args, llm.engine.config.max_num_seqs)
        on_cards = llm.engine.device.type == "cuda"  # ranks on a CPU are measured as the threads of one
        cards = llm.engine.config.tensor_parallel_size if on_cards else 1
        reading = None if on_cards else llm.engine.reading
        config = llm.engine.config
        source = resolve_checkpoint(config)
        quantization = config.quantization or held_as(quantization_of(source.config), source.format == "dummy")
        device, products = llm.engine.device, dtype_of_products(llm.engine.model, llm.engine.dtype, reading)
        fp8 = multiplies_fp8(device, quantization)
        measured = measure_limits(device, products, cards, fp8)
        if on_cards:  # now, as the card has time to cool down until the first workload
            kept = sustained_flops(device, products), sustained_flops(device, FP8) if fp8 else 0.0
            measured = replace(measured, sustained_flops=kept[0], sustained_fp8_flops=kept[1])
        for doubt in measured.warnings():
            print(f"headrace: warning: {doubt}", file=sys.stderr)
        narrow = (quantization, config.kv_cache_dtype == "fp8") if on_cards else (None, False)
        own_head = config.quantization is not None and not source.ties_head(llm.engine.model.family)
        limits = Limits(llm.engine.model, llm.engine.dtype, measured, *narrow, reading, own_head)
        bench = Bench(llm, limits)
        results: list[dict[str, Any]] = []
        for temperature in args.temperature:
            for count in args.num_prompts if args.what in ("throughput", "all") else ():
                results.append(shown(bench.throughput(count, temperature, args.repeat)))
            for batch in args.batch if args.what in ("latency", "all") else ():
                results.append(shown(bench.latency(batch, args.input_len, args.output_len, temperature, args.repeat)))
        if args.what in ("prefill", "all"):
            results.append(shown(bench.prefill(args.prefill_prompts, args.prefill_len, max(args.repeat, 3))))
        if args.what in ("prompts", "all"):
            results += map(shown, PromptBench(bench).results(args.repeat))
        if args.profile:
            bench.profile(args.batch[-1], args.input_len)
        machine = limits.machine.as_dict()
    return report(args, results, machine)


def default_length(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Tokens of the longest request, with some room, or the model's context."""
    from headrace.config import EngineConfig
    from headrace.model.checkpoint import resolve_checkpoint
    from headrace.model.families import model_config_from_hf

    context = model_config_from_hf(resolve_checkpoint(EngineConfig(**options)).config).max_position
    return min(context, max(args.prefill_len, args.input_len + args.output_len, 2 * LONGEST) + 256)


def check_lengths(args: argparse.Namespace, longest: int) -> None:
    """Raises ParameterError if what is measured is longer than a request may be."""
    for what, tokens, words in (
        ("throughput", 2 * LONGEST, f"prompts and outputs of up to {LONGEST} tokens each"),
        ("latency", args.input_len + args.output_len, "--input-len and --output-len"),
        ("prefill", args.prefill_len + 1, "--prefill-len and an output token"),
        ("prompts", 129, "a prompt of 128 tokens"),
    ):
        if args.what in (what, "all") and tokens > longest:
            raise ParameterError("max_model_len", longest, f"at least {tokens}: {words}")


def check_seats(args: argparse.Namespace, seats: int | None) -> None:
    """Raises ParameterError for batches that would run in parts."""
    if args.what in ("latency", "all") and seats is not None and max(args.batch) > seats:
        raise ParameterError("batch", args.batch, f"at most {seats}: so many requests run at the same time (--max-num-seqs)")


def check(args: argparse.Namespace) -> None:
    """Raises ParameterError for numbers with which nothing can be measured."""
    from headrace.sampling.params import SamplingParams

    for name, low in (
        ("batch", 1), ("input_len", 1), ("output_len", 2), ("num_prompts", 1), ("prefill_prompts", 1), ("prefill_len", 1),
        ("repeat", 1),
    ):  # fmt: skip
        value = getattr(args, name)
        if not all(v >= low for v in (value if isinstance(value, list) else [value])):
            raise ParameterError(name, value, f"at least {low}")
    for temperature in args.temperature:
        SamplingParams(temperature=temperature)
    check_place("out", args.out)


class Bench:
    """Runs workloads of random token ids through an LLM; the prefix cache is emptied before each."""

    def __init__(self, llm, limits):
        self.llm, self.limits = llm, limits
        self._sustained = limits.sustained()
        self._random = random.Random(12345)
        # first launches, compiled kernels, also of mixed steps; then all graphs of the default kind of sampling
        config = llm.engine.config
        long = min(600, config.max_model_len - 8)
        warm = [(2, min(64, long)), (2, long)]
        if llm.engine.device.type == "cuda":
            warm.append((config.max_num_batched_tokens // 600 + 2, long))
        for count, length in warm:
            self.timed(self.prompts_of(count, length), ([4, 8] * count)[:count], 0.6)
        while llm.engine.core.idle():
            pass

    def throughput(self, count: int, temperature: float, repeat: int) -> dict[str, Any]:
        """offline-random: prompts and outputs of 100-1024 tokens, all submitted at once (draws as in nano-vllm's bench)."""
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, LONGEST))] for _ in range(count)]
        outputs = [rng.randint(100, LONGEST) for _ in range(count)]
        vocab = self.llm.engine.model.vocab_size
        prompts = [[t % vocab for t in p] for p in prompts]
        seconds = self._median(lambda: self.timed(prompts, outputs, temperature), repeat)
        tokens = sum(outputs)
        return self.result(
            "offline-random", temperature, tokens / seconds, "tok/s",
            lambda limits: tokens / limits.offline([len(p) for p in prompts], outputs), num_prompts=count, seconds=seconds,
            host_ms_per_step=self.host_milliseconds(),
        )  # fmt: skip

    def latency(self, batch: int, inputs: int, outputs: int, temperature: float, repeat: int) -> dict[str, Any]:
        """TPOT in ms: (time of `outputs` tokens - time of one token) / (outputs - 1), for `batch` prompts at once."""

        def once() -> float:
            first = self.timed(self.prompts_of(batch, inputs), [1] * batch, temperature)
            total = self.timed(self.prompts_of(batch, inputs), [outputs] * batch, temperature)
            return (total - first) / (outputs - 1)

        seconds = self._median(once, repeat)
        contexts = [inputs + outputs // 2] * batch
        moved = self.limits.decode_bytes(contexts)
        return self.result(
            f"batch {batch}", temperature, 1e3 * seconds, "ms",
            lambda limits: 1e3 * limits.decode_seconds(contexts), input_len=inputs, output_len=outputs,
            gigabytes_per_second=moved / seconds / 1e9, host_ms_per_step=self.host_milliseconds(),
        )  # fmt: skip

    def prefill(self, count: int, length: int, repeat: int) -> dict[str, Any]:
        seconds = min(self.timed(self.prompts_of(count, length), [1] * count, 0.0) for _ in range(repeat))
        flops = count * self.limits.prefill_flops(length)
        return self.result(
            f"prefill {count} x {length}", 0.0, count * length / seconds, "tok/s",
            lambda limits: count * length / limits.prompts_seconds([length] * count), teraflops=flops / seconds / 1e12,
        )  # fmt: skip

    def profile(self, batch: int, inputs: int) -> None:
        """The kernels of 16 decode steps and of the prefill before them, by time on the device."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.llm.engine.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        for name, outputs in (("prefill", 1), ("prefill and 16 decode steps", 17)):
            with profile(activities=activities) as profiler:
                self.timed(self.prompts_of(batch, inputs), [outputs] * batch, 0.6)
            key = "self_device_time_total" if len(activities) > 1 else "self_cpu_time_total"
            print(f"-- {name}, batch {batch}\n" + profiler.key_averages().table(sort_by=key, row_limit=16), flush=True)

    def prompts_of(self, count: int, length: int) -> list[list[int]]:
        top = min(10000, self.llm.engine.model.vocab_size - 1)
        return [[self._random.randint(0, top) for _ in range(length)] for _ in range(count)]

    def timed(self, prompts: list[list[int]], outputs: list[int], temperature: float) -> float:
        from headrace.sampling.params import SamplingParams

        params = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False) for n in outputs]
        self.llm.reset_prefix_cache()
        self.llm.engine.core.times.recent_host.clear()
        began = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def host_milliseconds(self) -> float:
        """The median of what the host did in each step of the last run, without its wait for the device."""
        return 1e3 * statistics.median(self.llm.engine.core.times.recent_host or [0.0])

    @staticmethod
    def _median(once: Callable[[], float], repeat: int) -> float:
        return sorted(once() for _ in range(repeat))[repeat // 2]

    def result(
        self, name: str, temperature: float, value: float, unit: str, limit_of: Callable[[Limits], float], **more: Any
    ) -> dict[str, Any]:
        """`value` beside its limit, by the card's best rate and, on a GPU, by the one that it keeps up; shares are of speed, so
        for times they are limit / value."""
        result = {"workload": name, "temperature": temperature, "value": value, "unit": unit, **more}
        for kind, limits in (("limit", self.limits), ("sustained_limit", self._sustained)):
            if limits is not None:
                result[kind] = limit = limit_of(limits)
                result[f"percent_of_{kind}"] = 100 * (limit / value if unit == "ms" else value / limit)
        return result


def startup(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the start of a fresh process to its first token."""
    code = "import sys, json; from headrace_bench.engine import first_token; first_token(json.loads(sys.argv[1]))"
    times = []
    for _ in range(max(1, args.repeat)):
        began = time.perf_counter()
        command = python_of_child("-c", code, json.dumps(options))
        process = subprocess.Popen(command, env=environment_of_child(), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        times.append(time.perf_counter() - began)
        process.wait()
        if process.returncode:
            raise HeadraceError(f"the process that was started ended with exit code {process.returncode}: see above")
        print("first token", line.strip(), flush=True)
    return {"workload": "startup", "value": sorted(times)[len(times) // 2], "unit": "s", "all": times}


def first_token(options: dict[str, Any]) -> None:
    prewarm(options.get("device", "auto"))
    from headrace import LLM
    from headrace.sampling.params import SamplingParams

    options.setdefault("skip_tokenizer_init", True)
    try:
        with LLM(**options) as llm:
            for *_, output in llm.stream([[1] * 128], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)):
                print(output.outputs[0].token_ids, flush=True)
    except HeadraceError as error:
        sys.exit(f"headrace: {error}")


def shape_directory(config: str) -> str:
    """A checkpoint directory that holds only this config.json, and goes when this process ends."""
    shape = read_text("--config", config)
    try:
        json.loads(shape)
    except ValueError as e:
        raise ParameterError("--config", config, f"a JSON file ({e})") from None
    directory = tempfile.mkdtemp(prefix="headrace-shape-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (Path(directory) / "config.json").write_text(shape)
    return directory


def shown(r: dict[str, Any]) -> dict[str, Any]:
    """The result itself, after a line about it."""
    share = f"  {r['percent_of_limit']:5.1f} % of the limit {r['limit']:,.3f}" if "limit" in r else ""
    if "sustained_limit" in r:
        share += f" ({r['percent_of_sustained_limit']:.1f} % of what is kept up)"
    extra = "".join(f"  {k}={r[k]:,.2f}" for k in ("gigabytes_per_second", "teraflops", "host_ms_per_step") if k in r)
    print(f"{r['workload']:22s} t={r.get('temperature', 0)}  {r['value']:,.3f} {r['unit']}{share}{extra}", flush=True)
    return r


def report(args: argparse.Namespace, results: list[dict[str, Any]], machine: dict[str, Any]) -> int:
    """Write the results to --out, if it is asked for."""
    if args.out:
        import torch

        document = {
            "machine": machine, "torch": torch.__version__, "python": sys.version.split()[0], "commit": commit_of_source(),
            "model": args.config or args.model, "dtype": args.dtype, "options": engine_options(args), "results": results,
        }  # fmt: skip
        try:
            Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as e:
            raise ParameterError("out", args.out, f"a file that can be written ({e.strerror})") from None
    return 0


def commit_of_source() -> str | None:
    """Of the checkout that ran, wherever it ran; None of a package that was installed."""
    here = Path(__file__).resolve()
    try:
        for command in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
            said = subprocess.run(["git", "-C", here.parent, *command], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git, or a repository that has other files
        return None
    return said.strip()
