"""`headrace bench serve`: latencies and throughput of any OpenAI-compatible server under load.

Option names and the keys of the JSON are those of `vllm bench serve` where the meaning is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.cli.keys import client_key
from headrace.cli.options import LogOptions, add_options
from headrace.cli.parser import json_object, text
from headrace.errors import ParameterError
from headrace.extras import is_installed
from headrace_bench.http_client import HttpClient
from headrace_bench.load import Load, Run, run_load
from headrace_bench.target import ENDPOINTS, BenchmarkError, Measured, Plan, Target, first_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", "--url", type=text, metavar="URL", default="http://127.0.0.1:8000", help="with or without /v1 at its end"
    )
    server.add_argument("--api-key", metavar="KEY", help="the server's key (default: HEADRACE_API_KEY)")
    server.add_argument("--header", action="append", metavar="NAME=VALUE", help="a further HTTP header (repeatable)")
    server.add_argument("--model", type=text, metavar="NAME", help="(default: the first that the server lists)")
    server.add_argument("--endpoint", choices=tuple(ENDPOINTS), default="completions", help="which API is measured")
    server.add_argument(
        "--request-timeout", type=float, metavar="SECONDS", default=3600.0, help="until a request counts as failed"
    )
    load = parser.add_argument_group("load")
    add_load(load)
    load.add_argument("--num-warmups", type=int, metavar="N", default=0, help="requests before the clock starts")
    data = parser.add_argument_group("requests")
    add_datasets(data, ("random", "prefix_repetition", "custom"))
    _add_sampling(data)
    out = parser.add_argument_group("results")
    add_results(out)
    out.add_argument("--save-detailed", action="store_true", help="with the lists of every request's times and texts")
    add_options(parser, LogOptions)


def add_load(load) -> None:
    load.add_argument(
        "--num-prompts", type=int, metavar="N", help="requests of a run (default: 1000, or the lines of the file)"
    )
    load.add_argument(
        "--request-rate", type=float, metavar="RPS", nargs="+", default=[math.inf], help="per second; several: a run each"
    )
    load.add_argument(
        "--burstiness", type=float, metavar="X", default=1.0, help="shape of the gaps: 1 Poisson, less: bursts, more: even"
    )
    load.add_argument(
        "--max-concurrency", type=int, metavar="N", nargs="+", help="requests in progress; several: a run each (default: any)"
    )
    load.add_argument("--seed", type=int, metavar="N", default=0, help="of prompts, lengths and arrivals")


def add_datasets(data, names: tuple[str, ...]) -> None:
    data.add_argument("--dataset-name", choices=names, default="random", help="what is asked")
    data.add_argument("--dataset-path", type=text, metavar="FILE", help="custom: a JSONL file of prompts or of lengths")
    for name, default, words in (
        ("random-input-len", 1024, "random: prompt tokens"),
        ("random-output-len", 128, "random: output tokens"),
        ("random-prefix-len", 0, "random: tokens with which all prompts begin"),
        ("prefix-repetition-prefix-len", 256, "prefix_repetition: tokens of a shared prefix"),
        ("prefix-repetition-suffix-len", 256, "prefix_repetition: tokens after it"),
        ("prefix-repetition-num-prefixes", 10, "prefix_repetition: how many prefixes"),
        ("prefix-repetition-output-len", 128, "prefix_repetition: output tokens"),
        ("custom-output-len", 256, "custom: output tokens where a line of the file has no output_len"),
    ):
        data.add_argument(f"--{name}", type=int, metavar="N", default=default, help=words)
    data.add_argument(
        "--random-range-ratio", type=float, metavar="X", default=0.0, help="random: lengths are uniform in len * (1 +- ratio)"
    )


def add_results(out) -> None:
    out.add_argument("--goodput", nargs="+", default=[], metavar="ttft:MS", help="count requests that keep these limits")
    out.add_argument("--metric-percentiles", metavar="P,P", default="90,99", help="which percentiles of each time")
    out.add_argument("--save-result", type=text, metavar="FILE", help="the figures as JSON; a list of them for several loads")
    out.add_argument("--plot", type=text, metavar="FILE", help="a picture of latency over load (needs matplotlib)")


def _add_sampling(data) -> None:
    data.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, help="exact lengths (default: yes, but for files of prompts)"
    )
    for name, kind, metavar in (("temperature", float, "X"), ("top-p", float, "X"), ("top-k", int, "N")):
        data.add_argument(f"--{name}", type=kind, metavar=metavar, help="of every request (default: the server's)")
    data.add_argument("--extra-body", type=text, default="{}", metavar="JSON", help="further fields of every request")


def run(args: argparse.Namespace) -> int:
    from headrace_bench.report import check_plot, parse_goodput, plot

    loads = checked_loads(args)
    percentiles, goodput = parse_percentiles(args.metric_percentiles), parse_goodput(args.goodput)
    for option, path in (("--save-result", args.save_result), ("--plot", args.plot)):
        check_place(option, path)
    if args.plot:
        check_plot(args.plot)
    allow_many_connections()
    loop = importlib.import_module("uvloop" if is_installed("uvloop") else "asyncio")
    results = loop.run(measure(args, loads, percentiles, goodput))
    save_result(args.save_result, results)
    if args.plot:
        plot(args.plot, results, percentiles, f"{results[0]['model_id']}, {args.dataset_name}")
    return 0 if all(r["failed"] == 0 for r in results) else 1


def check_place(option: str, path: str | None) -> None:
    """Raises ParameterError before anything is measured whose figures could not be written there."""
    if path is None:
        return
    place = path if os.path.exists(path) else os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(place, os.W_OK):
        raise ParameterError(option, path, "a file in a directory that can be written")


def save_result(path: str | None, results: list[dict[str, Any]]) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(results[0] if len(results) == 1 else results, indent=2))
    except OSError as e:
        raise ParameterError("--save-result", path, f"a file that can be written ({e.strerror})") from None


def checked_loads(args: argparse.Namespace) -> list[Load]:
    if args.num_warmups < 0:
        raise ParameterError("--num-warmups", args.num_warmups, "at least 0")
    if not args.request_timeout > 0:
        raise ParameterError("--request-timeout", args.request_timeout, "more than 0")
    args.extra_body = json_object("--extra-body", args.extra_body)
    return loads_of(args)


def loads_of(args: argparse.Namespace) -> list[Load]:
    for name, low in (
        ("num_prompts", 1), ("random_input_len", 1), ("random_output_len", 1), ("random_prefix_len", 0),
        ("prefix_repetition_prefix_len", 0), ("prefix_repetition_suffix_len", 1), ("prefix_repetition_num_prefixes", 1),
        ("prefix_repetition_output_len", 1), ("custom_output_len", 1),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < low:
            raise ParameterError("--" + name.replace("_", "-"), value, f"at least {low}")
    for name, values in (
        ("--request-rate", args.request_rate), ("--burstiness", [args.burstiness]),
        ("--max-concurrency", args.max_concurrency or []),
    ):  # fmt: skip
        if not all(v > 0 for v in values):
            raise ParameterError(name, values, "more than 0")
    if (args.dataset_name == "custom") != (args.dataset_path is not None):
        raise ParameterError("--dataset-path", args.dataset_path, "a file with --dataset-name custom, none without")
    return [Load(r, args.burstiness, c) for r, c in itertools.product(args.request_rate, args.max_concurrency or [None])]


def parse_percentiles(text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= v <= 100 for v in values):
        raise ParameterError("--metric-percentiles", text, "numbers in [0, 100] with commas between")
    return values


def parse_headers(words: list[str] | None) -> dict[str, str]:
    found = {}
    for word in words or ():
        name, mark, value = word.partition("=")
        if not (mark and name):
            raise ParameterError("--header", word, "NAME=VALUE")
        found[name] = value
    return found


async def measure(args: argparse.Namespace, loads: list[Load], percentiles, goodput) -> list[dict[str, Any]]:
    """Run every load, print its table, return the figures."""
    from headrace_bench.report import details, summary, table
    from headrace_bench.workload import prompt_maker

    client = HttpClient(args.base_url, client_key(args), parse_headers(args.header))
    try:
        target = Target(
            client, args.model or await first_model(client), args.endpoint, request_fields(args), args.request_timeout
        )  # fmt: skip
        await target.check()
        wanted = workload(args)
        prompts = await prompt_maker(target, args.seed, wanted)
        await warm_up(target, prompts.plans(wanted[: args.num_warmups], "warm-up"))
        results = []
        for number, load in enumerate(loads):
            plans = prompts.plans(wanted, f"run {number}")
            with progress_bar(len(plans)) as on_end:
                outcome = await run_load(target, plans, load, args.seed, on_end)
            figures = summary(outcome, percentiles, goodput)
            results.append({**metadata(args, target, len(plans), load), **figures})
            if args.save_detailed:
                results[-1] |= details(outcome)
            print(table(outcome, figures, percentiles), flush=True)
            warn(outcome)
        return results
    finally:
        client.close()


def workload(args: argparse.Namespace) -> list[Any]:
    from headrace_bench.workload import from_file, prefix_repetition, random_lengths

    if args.dataset_name == "custom":
        return list(from_file(args.dataset_path, args.num_prompts, args.custom_output_len))
    count = args.num_prompts or 1000
    if args.dataset_name == "prefix_repetition":
        return prefix_repetition(
            args.seed, count, args.prefix_repetition_num_prefixes, args.prefix_repetition_prefix_len,
            args.prefix_repetition_suffix_len, args.prefix_repetition_output_len,
        )  # fmt: skip
    return random_lengths(
        args.seed, count, args.random_input_len, args.random_output_len, args.random_prefix_len, args.random_range_ratio
    )


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k")
    fields = {k: v for k in names if (v := getattr(args, k)) is not None}
    ignore_eos = args.ignore_eos if args.ignore_eos is not None else args.dataset_name != "custom"
    if ignore_eos:
        fields["ignore_eos"] = True
    return {**fields, **args.extra_body}


async def warm_up(target: Target, plans: list[Plan]) -> None:
    for measured in await asyncio.gather(*(target.send(plan) for plan in plans)):
        if not measured.success:
            raise BenchmarkError(f"a request of the warm-up failed: {measured.error}")


def metadata(args: argparse.Namespace, target: Target, count: int, load: Load) -> dict[str, Any]:
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai" if target.endpoint == "completions" else "openai-chat",
        "model_id": target.model,
        "dataset_name": args.dataset_name,
        "num_prompts": count,
        "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
    }


def warn(outcome: Run) -> None:
    """What makes the figures doubtful."""
    failed = [r for r in outcome.results if not r.success]
    for r in failed[:10]:
        print(f"headrace: a request failed: {r.error}", file=sys.stderr)
    if outcome.client_cpu > 0.8:
        print("headrace: the client used most of a core: these may be its own limits, not the server's", file=sys.stderr)


def allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[Measured], None]]:
    """Requests that have ended, on stderr where that is a terminal."""
    from headrace.progress import token_progress

    num_tokens = 0
    with token_progress(total, lambda: num_tokens, sys.stderr.isatty()) as update:

        def ended(measured: Measured) -> None:
            nonlocal num_tokens
            num_tokens += measured.output_tokens
            if update is not None:
                update(1)

        yield ended
