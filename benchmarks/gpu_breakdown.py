"""What each kernel of a captured step adds to it.

    python benchmarks/gpu_breakdown.py [--steps 4b:8,4b:32,8b:256] [--prefill 8b,gemma2_2b] [--json FILE]

Random weights; a step is replayed under the profiler. Kernels overlap (programmatic dependent launch), so each is told by what
it adds: from the latest end before it to its own. `alone` is from its own start, `early` how long before that end it started.
GB/s and TFLOP/s count what it must read and compute, over what it adds. Kernels of a layer are told by their place in it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from about import about
from gpu_decode import (
    BF16,
    BLOCK,
    DEVICE,
    MAX_LEN,
    MODELS,
    TIED,
    Cache,
    Input,
    capture,
    cublas_step,
    graph_ms,
    random_weights,
    say,
)
from headrace.fast_decode import tiles as decode_tiles
from headrace.fast_decode.forward import FastDecode
from headrace.model.batch import ForwardBatch
from headrace_bench.roofline import measure_limits


def prompt_batch(tokens: int) -> ForwardBatch:
    """One fresh prompt."""

    def ints(values: Tensor) -> Tensor:
        return values.to(torch.int32).to(DEVICE)

    return ForwardBatch(
        token_ids=ints(torch.randint(0, 30000, (tokens,))), positions=ints(torch.arange(tokens)),
        slot_mapping=torch.arange(tokens, device=DEVICE), block_tables=ints(torch.arange(tokens // BLOCK)[None]),
        seq_slots=ints(torch.zeros(1)), query_start=ints(torch.tensor([0, tokens])), seq_lens=ints(torch.tensor([tokens])),
        num_decodes=0, query_lens=[tokens], context_lens=[tokens],
    )  # fmt: skip


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float, float]]:
    """(name, start, end) in microseconds of one replay, by their ends."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    on_card = [e for e in trace.events() if e.device_type == DeviceType.CUDA and "Memset" not in e.name]
    found = sorted(((e.name, e.time_range.start, e.time_range.end) for e in on_card), key=lambda e: e[1])
    third = found[-(len(found) // 3) :]
    return sorted(third, key=lambda e: e[2])


def by_place(found: list[tuple[str, float, float]], layers: int) -> dict[str, list[tuple[float, float, float]]]:
    """place in a layer, or before and behind them -> (added, alone, early) of each time."""
    attention = [i for i, (name, _, _) in enumerate(found) if "attention" in name or "flash" in name or "fmha" in name]
    steps = [b - a for a, b in itertools.pairwise(attention)]
    period = statistics.mode(steps) if steps else len(found)
    first = attention[0] if attention else 0
    places: dict[str, list[tuple[float, float, float]]] = {}
    latest = found[0][1]
    for i, (name, start, end) in enumerate(found):
        if first - period < i < first + period * layers:
            place = f"{(i - first) % period:2d} {short(name)}"
        else:
            place = f"before {short(name)}" if i < first else f"after {short(name)}"
        added = max(0.0, end - latest)
        places.setdefault(place, []).append((added, end - start, latest - start))
        latest = max(latest, end)
    return places


def short(name: str) -> str:
    name = name.replace("void ", "").replace("at::native::", "")
    return name.split("(")[0].split("<")[0][:44]


def show(title: str, graph: torch.cuda.CUDAGraph, layers: int, results: list[dict], **more: object) -> None:
    ms = graph_ms(graph)
    places = by_place(kernels_of(graph), layers)
    say(f"== {title}: {ms:.4f} ms {more}")
    total = 0.0
    for place, seen in sorted(places.items(), key=lambda item: item[0]):
        added, alone, early = (sum(column) / len(seen) for column in zip(*seen, strict=True))
        total += added * len(seen)
        print(f"   {place:48s} x{len(seen):3d} added {added:8.2f} alone {alone:8.2f} early {early:7.2f}", flush=True)
        results.append(
            {"step": title, "place": place, "times": len(seen), "added_us": added, "alone_us": alone, "early_us": early}
        )
    print(f"   sum {total / 1e3:.4f} ms", flush=True)
    results.append({"step": title, "ms": ms, **more})


def decode(name: str, rows: int, context: int, layers: int | None, gbs: float, results: list[dict], path: str) -> None:
    config = MODELS[name] if layers is None else replace(MODELS[name], num_layers=layers)
    weights = random_weights(config, name in TIED, DEVICE)
    blocks = rows * -(-context // BLOCK)
    kv = Cache(config, blocks + 8, DEVICE)
    batch = Input(config, rows, context, blocks, DEVICE).batch([context] * rows)
    step: Callable[[ForwardBatch, Cache], Tensor]
    if path == "cublas":
        step = cublas_step(config, weights, DEVICE)
    else:
        step = FastDecode(config, weights, rows, DEVICE, decode_tiles.default_table(config), max_model_len=MAX_LEN).forward
    with torch.inference_mode():
        graph, _ = capture(lambda: step(batch, kv))
    size = weights.num_bytes - (0 if name in TIED else weights.embedding.nbytes)
    limit = (size + 4 * config.num_layers * rows * context * config.kv_size) / gbs / 1e6
    show(f"{name} {rows} rows {path}", graph, config.num_layers, results, limit_ms=round(limit, 4))


def prefill(name: str, tokens: int, layers: int | None, results: list[dict]) -> None:
    from headrace.attention.select import select_attention
    from headrace.model.decoder import Decoder

    config = MODELS[name] if layers is None else replace(MODELS[name], num_layers=layers)
    attention, why = select_attention("auto", config, DEVICE, BF16)
    decoder = Decoder(config, random_weights(config, name in TIED, DEVICE), attention, max_model_len=tokens)
    kv, batch = Cache(config, tokens // BLOCK, DEVICE), prompt_batch(tokens)
    with torch.inference_mode():
        graph, _ = capture(lambda: decoder.forward(batch, kv))
    say(f"{name}: {why}")
    show(f"{name} prompt of {tokens}", graph, config.num_layers, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="4b:8,4b:32,4b:64,llama1b:8,llama1b:32,0.6b:8,0.6b:32,8b:256")
    parser.add_argument("--prefill", default="8b,gemma2_2b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--path", default="table", choices=("table", "cublas"))
    parser.add_argument("--json")
    args = parser.parse_args()
    machine = measure_limits(DEVICE, BF16)
    say(f"{torch.cuda.get_device_name(0)}: copy {machine.bandwidth / 1e9:.0f} GB/s, {machine.flops / 1e12:.0f} TFLOP/s")
    results: list[dict] = [about() | {"copy_gbs": machine.bandwidth / 1e9, "tflops": machine.flops / 1e12}]
    for step in filter(None, args.steps.split(",")):
        name, rows = step.split(":")
        decode(name, int(rows), args.context, args.layers, machine.bandwidth / 1e9, results, args.path)
        gc.collect()
        torch.cuda.empty_cache()
    for name in filter(None, args.prefill.split(",")):
        prefill(name, args.tokens, args.layers, results)
        gc.collect()
        torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
