"""The options of `headrace simulate`, and what is made of them: one front with one replica, and the traffic of a load."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.api.config import ServerConfig
from headrace.cli.options import LogOptions, add_options
from headrace.cli.parser import text
from headrace.config import CPU_BLOCK, CPU_STEP, GPU_BLOCK, GPU_STEP, EngineConfig
from headrace.distributed.balancers import ROUTERS
from headrace.errors import ParameterError
from headrace.files import read_text
from headrace_bench.load import Load
from headrace_bench.serve import add_datasets, add_load, add_results, loads_of
from headrace_bench.simulation.sizing import FRONT_CORES
from headrace_bench.simulation.traffic import MIXES, Ask, Traffic, file_asks

if TYPE_CHECKING:
    from headrace_bench.simulation.fleet import Setup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_step(parser.add_argument_group("cost of a step", "a card and a model's shape, or a recorded trace"))
    _add_engine(parser)
    _add_fleet(parser.add_argument_group("fleet"))
    load = parser.add_argument_group("load")
    add_load(load)
    load.add_argument(
        "--duration", type=float, metavar="SECONDS", help="of the arrivals, in place of --num-prompts (default: none)"
    )
    load.add_argument(
        "--arrivals", choices=("steady", "day"), default="steady", help="day: the rate follows a sine over 24 hours"
    )
    load.add_argument("--peak-to-mean", type=float, metavar="X", default=1.6, help="day: the highest rate over the mean one")
    data = parser.add_argument_group("requests", "; ".join(f"{name}: {mix.words}" for name, mix in MIXES.items()))
    add_datasets(data, ("random", "prefix_repetition", "custom", *MIXES))
    data.add_argument(
        "--max-tokens", type=int, metavar="N", help="what clients ask for, whatever they get (default: exactly what they get)"
    )
    out = parser.add_argument_group("results")
    add_results(out)
    out.add_argument("--goodput-share", type=float, metavar="X", default=0.99, help="of the requests that must keep --goodput")
    out.add_argument("--price-per-hour", type=float, metavar="X", help="of one card: costs per million tokens")
    out.add_argument("--jobs", type=int, metavar="N", help="processes (default: the machine's cores)")
    out.add_argument("--debug-checks", action="store_true", help="check the block accounting after every turn")
    add_options(parser, LogOptions)


def _add_step(group) -> None:
    group.add_argument("--config", type=text, metavar="FILE", help="a config.json with the model's shape")
    group.add_argument("--model", type=text, help="or a checkpoint (default: the embedded SmolLM2-135M-Instruct)")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights, keys and values")
    group.add_argument("--card", type=text, metavar="NAME", default="h100", help="a100, l40s, h100, h200 or b200")
    group.add_argument("--tensor-parallel-size", type=int, metavar="N", default=1, help="cards of one replica")
    group.add_argument("--trace", type=text, metavar="FILE", help="fit steps to this trace of `headrace serve --trace` instead")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """As they are described for a server."""
    add_options(
        parser, EngineConfig, "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "gpu_memory_utilization",
        "max_itl_ms", "enable_prefix_caching", "async_scheduling",
    )  # fmt: skip
    add_options(parser, ServerConfig, "max_queued_requests")
    parser.add_argument(
        "--num-kv-blocks", type=int, metavar="N", help="of a replica's KV cache (default: what the card's memory holds)"
    )


def _add_fleet(group) -> None:
    group.add_argument(
        "--replicas", type=int, metavar="N", help="engines behind the router (default: 1; with --goodput as many as it takes)"
    )
    group.add_argument("--router", choices=ROUTERS, default="prefix", help="how a front chooses among them")
    group.add_argument(
        "--fronts", type=int, metavar="N", help=f"each with its share of replicas and traffic (default: one for {FRONT_CORES})"
    )
    group.add_argument(
        "--sample-fronts", type=int, metavar="N", help="simulate so many of the fronts, and count for all (default: all)"
    )
    group.add_argument(
        "--front-ms", type=float, metavar="MS", default=2.0, help="of a request outside of its engine: HTTP, text"
    )
    group.add_argument(
        "--leaps",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make steps that are alike at once: the same answer, sooner",
    )


def checked(args: argparse.Namespace) -> list[Load]:
    """The loads. Raises ParameterError for numbers with which nothing can be simulated."""
    for name, low in (
        ("replicas", 1), ("fronts", 1), ("sample_fronts", 1), ("jobs", 1), ("num_kv_blocks", 1), ("max_tokens", 1),
        ("max_model_len", 2), ("max_queued_requests", 0),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < low:
            raise ParameterError(option(name), value, f"at least {low}")
    for name in ("duration", "price_per_hour"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ParameterError(option(name), value, "more than 0")
    if not 0 <= args.front_ms < 1e6:
        raise ParameterError("--front-ms", args.front_ms, "milliseconds in [0, 1e6)")
    if not 0 < args.goodput_share <= 1:
        raise ParameterError("--goodput-share", args.goodput_share, "a number in (0, 1]")
    if not 1 <= args.peak_to_mean <= 2:
        raise ParameterError("--peak-to-mean", args.peak_to_mean, "a number in [1, 2]: a sine has no higher peak")
    if args.duration is not None and (args.num_prompts is not None or not all(map(math.isfinite, args.request_rate))):
        raise ParameterError("--duration", args.duration, "seconds with a --request-rate and without --num-prompts")
    fronts = args.fronts or 1
    if args.replicas is not None and fronts > args.replicas:
        raise ParameterError("--fronts", args.fronts, f"at most as many as there are replicas, {args.replicas}")
    if args.sample_fronts is not None and args.dataset_name == "custom":
        raise ParameterError("--sample-fronts", args.sample_fronts, "nothing with --dataset-name custom: a file is not divided")
    return loads_of(args)


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def setup_of(args: argparse.Namespace) -> Setup:
    """One front with one replica, as the options say."""
    import torch

    from headrace.model.checkpoint import resolve_checkpoint, ties_head
    from headrace.model.families import model_config_from_hf
    from headrace.scheduler.config import Limits
    from headrace.worker.seats import CPU_SEATS
    from headrace_bench.simulation.cards import BlockSizes, card_named, num_blocks, roofline, seats
    from headrace_bench.simulation.cost import StepCost
    from headrace_bench.simulation.fleet import Setup
    from headrace_bench.simulation.trace_fit import fit_trace

    shape = shape_of(args.config) if args.config else resolve_checkpoint(EngineConfig(model=args.model)).config
    model, dtype = model_config_from_hf(shape), getattr(torch, args.dtype)
    card, cost = card_named(args.card), None
    if args.trace is not None:
        cost = fit_trace(args.trace, args.seed)
        print(f"headrace: {args.trace}: {cost}", file=sys.stderr)
    on_cpu = cost is not None and cost.blocking
    config = EngineConfig(  # its checks, under the names of its options
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or (CPU_STEP if on_cpu else GPU_STEP),
        block_size=args.block_size or (CPU_BLOCK if on_cpu else GPU_BLOCK),
        max_model_len=args.max_model_len or model.max_position,
        num_kv_blocks=args.num_kv_blocks, gpu_memory_utilization=args.gpu_memory_utilization, max_itl_ms=args.max_itl_ms,
    )  # fmt: skip
    tied = ties_head(shape, model.family)
    if config.max_num_seqs is None:
        fits = cost is None and config.num_kv_blocks is None
        count = seats(card, config, model, dtype, args.tensor_parallel_size, tied) if fits else CPU_SEATS
        config = replace(config, max_num_seqs=count)
    assert config.block_size and config.max_num_batched_tokens and config.max_model_len and config.max_num_seqs
    step_cost: StepCost = cost or roofline(card, model, dtype, args.tensor_parallel_size)
    blocks = config.num_kv_blocks
    if blocks is None:
        if cost is not None:
            allowed = "with --trace: those of the engine that was recorded (`cache_config_info` of its /metrics names them)"
            raise ParameterError("--num-kv-blocks", None, allowed)
        sizes = BlockSizes(
            config.block_size, config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len,
            config.gpu_memory_utilization,
        )  # fmt: skip
        blocks = num_blocks(card, model, dtype, args.tensor_parallel_size, tied, sizes)
    limits = Limits(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(config.max_model_len, blocks * config.block_size), block_size=config.block_size, num_blocks=blocks,
        enable_prefix_caching=args.enable_prefix_caching,
        max_itl=None if config.max_itl_ms is None else config.max_itl_ms / 1e3,
    )  # fmt: skip
    return Setup(
        limits, step_cost, router=args.router, overlap=args.async_scheduling and not on_cpu, front_seconds=args.front_ms / 1e3,
        max_tokens=args.max_tokens, server=ServerConfig(max_queued_requests=args.max_queued_requests), leaps=args.leaps,
        checks=args.debug_checks,
    )  # fmt: skip


def shape_of(path: str) -> dict[str, Any]:
    try:
        shape = json.loads(read_text("--config", path))
    except ValueError as e:
        raise ParameterError("--config", path, f"a JSON file ({e})") from None
    if not isinstance(shape, dict):
        raise ParameterError("--config", path, "a JSON object, as config.json is")
    return shape


def traffic_of(args: argparse.Namespace, load: Load, most: int) -> Traffic:
    count = args.num_prompts or 1000
    if args.duration is not None:
        count = max(1, round(args.duration * load.request_rate))
    mean_turns = 1.0
    if args.dataset_name in MIXES:
        mix = MIXES[args.dataset_name]
        asks, mean_turns = mix.draw, mix.mean_turns
    elif args.dataset_name == "custom":
        lines = file_asks(args.dataset_path, args.custom_output_len, most)
        count = len(lines) if args.num_prompts is None and args.duration is None else count
        asks = partial(repeated, lines)
    else:
        names = ("random", "prefix_repetition")
        lengths = {k: v for k, v in vars(args).items() if k.startswith(names)}
        asks = partial(drawn, args.dataset_name, lengths)
    return Traffic(asks, load, count, args.seed, mean_turns, args.peak_to_mean if args.arrivals == "day" else None)


def repeated(lines: list[Ask], seed: str, count: int) -> list[Ask]:
    return [lines[i % len(lines)] for i in range(count)]


def drawn(name: str, lengths: dict[str, Any], seed: str, count: int) -> list[Ask]:
    """The requests that bench serve would draw."""
    from headrace_bench.serve import workload

    wanted = workload(argparse.Namespace(dataset_name=name, seed=seed, num_prompts=count, **lengths))
    return [Ask(w.input_len, w.output_len, f"{seed}/prefix {w.prefix}", w.prefix_len) for w in wanted]
