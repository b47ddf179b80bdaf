"""What the steps of a model with gated delta nets take on a card, each beside its limit: kernels alone, then the engine.

    python benchmarks/gpu_hybrid.py [--config benchmarks/shapes/qwen3.5-4b.json] [--out FILE.json]

Random weights. A decode step's limit is the time to read all weights, the keys and values, and to read and write the states, at
the bandwidth that a copy has here; that of a prompt the time of its products at the speed of a large one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from about import write
from headrace.cache.state_pool import LayerStates
from headrace.config import EngineConfig
from headrace.engine.build import build_engine
from headrace.engine.messages import EngineRequest
from headrace.kernels.delta_layer import DeltaLayer
from headrace.kernels.delta_prompts import plan_chunks
from headrace.kernels.delta_triton import delta_rule_triton
from headrace.model.config import ModelConfig
from headrace.model.families import model_config_from_hf
from headrace.model.parts import weight_bytes
from headrace.sampling.params import SamplingParams

DECODES, PROMPTS = (1, 8, 32), (128, 1024, 4096, 8192, 32768)


def seconds(run: Callable[[], object], repeat: int = 10) -> float:
    """Of one call, by the device's clock."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Without what the host takes to launch."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measured_limits() -> tuple[float, float]:
    """Bytes a second of a copy, operations a second of a product in bfloat16."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    bandwidth = 2 * a.numel() / seconds(lambda: a[: 1 << 30].copy_(a[1 << 30 :])) / 2
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return bandwidth, 2 * 8192**3 / seconds(lambda: x @ x)


def layer_of(model: ModelConfig) -> DeltaLayer:
    delta = model.delta
    assert delta is not None
    norms = [torch.randn(count, device="cuda") for count in (delta.value_heads, delta.value_heads, delta.value_dim)]
    conv = torch.randn(delta.channels, delta.kernel, device="cuda")
    return DeltaLayer(delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, conv, *norms, 1e-6)


def kernels(model: ModelConfig, bandwidth: float) -> dict[str, float]:
    """One layer's delta rule: microseconds, and of decodes, all layers one after the other, the share of what the states' bytes
    need."""
    layer, found = layer_of(model), {}
    delta = model.delta
    assert delta is not None
    width, slots, layers = delta.channels + delta.v_size + 2 * delta.value_heads, max(DECODES), sum(delta.layers)
    inputs = torch.zeros(layers, slots, delta.kernel, delta.channels, dtype=torch.bfloat16, device="cuda")
    states = torch.zeros(layers, slots, delta.value_heads, delta.key_dim, delta.value_dim, device="cuda")
    kept = [LayerStates(*of, None) for of in zip(inputs, states, strict=True)]
    for counts in [[1] * rows for rows in DECODES] + [[tokens] for tokens in PROMPTS]:
        begins = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        positions = torch.cat([torch.arange(count, device="cuda") for count in counts]).int() + (counts[0] == 1)
        rows = torch.randn(sum(counts), width, dtype=torch.bfloat16, device="cuda")
        slot = torch.arange(len(counts), device="cuda").int()
        decodes = sum(count == 1 for count in counts)
        batch = SimpleNamespace(
            positions=positions, seq_slots=slot, seq_lens=begins[1:] - begins[:-1] + 1, query_start=begins, query_lens=counts,
            num_decodes=decodes, num_verified=0, context_bound=0,
        )  # fmt: skip
        chunks, gates = plan_chunks(batch), rows[:, delta.channels + delta.v_size :]
        run = partial(delta_rule_triton, layer, rows, gates, batch=batch, chunks=chunks)
        if decodes:
            took = seconds(captured(lambda: [run(of) for of in kept])) / layers  # noqa: B023
            found[f"{decodes} decodes, us"] = 1e6 * took
            found[f"{decodes} decodes, of the bandwidth"] = 2 * decodes * states[0, 0].numel() * 4 / bandwidth / took
        else:
            found[f"prompt of {counts[0]}, us"] = 1e6 * seconds(lambda: run(kept[0]), 20)  # noqa: B023
    return found


def engine(path: str, model: ModelConfig, bandwidth: float, speed: float) -> dict[str, float]:
    """Decode steps and prompts through the whole engine."""
    options = dict(
        load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, max_num_seqs=max(DECODES),
        max_model_len=max(PROMPTS) + 1024,
    )  # fmt: skip
    core = build_engine(EngineConfig(model=path, device="cuda", **options)).core  # type: ignore[arg-type]
    delta, found = model.delta, {}
    assert delta is not None
    weights = weight_bytes(model, torch.bfloat16)
    state = 4 * sum(delta.layers) * delta.value_heads * delta.key_dim * delta.value_dim

    def run(count: int, tokens: int, max_tokens: int) -> list[float]:
        wanted = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True).resolved({})
        for i in range(count):
            core.add(EngineRequest(f"{time.perf_counter()} {i}", [(7 * j + i) % 1000 for j in range(tokens)], wanted, i))
        times = [time.perf_counter()]
        while core.has_work:
            if core.step():
                times.append(time.perf_counter())
        return times

    for count in DECODES:
        run(count, 100, 40)
        times = run(count, 100, 140)
        step = sorted(b - a for a, b in zip(times[-100:], times[-99:], strict=False))[48]
        limit = (weights + count * 2 * state) / bandwidth
        print(f"decode of {count}: {1e3 * step:.3f} ms, {limit / step:.3f} of the limit", flush=True)
        found[f"decode of {count}, ms"], found[f"decode of {count}, of the limit"] = 1e3 * step, limit / step
    for tokens in PROMPTS:
        run(1, tokens, 1)
        spans = [run(1, tokens, 1) for _ in range(5)]
        took = statistics.median(times[-1] - times[0] for times in spans)
        found[f"prompt of {tokens}, ms"] = 1e3 * took
        print(f"prompt of {tokens}: {1e3 * took:.1f} ms", flush=True)
        found[f"prompt of {tokens}, us a token"] = 1e6 * took / tokens
        products = weights / 2 - model.vocab_size * model.hidden_size  # one row of a prompt has logits
        found[f"prompt of {tokens}, of the limit"] = 2 * tokens * products / speed / took
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(Path(__file__).parent / "shapes" / "qwen3.5-4b.json"))
    parser.add_argument("--out")
    args = parser.parse_args()
    config = json.loads(Path(args.config).read_text())
    model = model_config_from_hf(config)
    bandwidth, speed = measured_limits()
    result = {"card": torch.cuda.get_device_name(), "copy, TB/s": bandwidth / 1e12, "product, TFLOP/s": speed / 1e12}
    print(json.dumps(result), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        for measure in (lambda: kernels(model, bandwidth), lambda: engine(directory, model, bandwidth, speed)):
            part = measure()
            result |= part
            for name, value in part.items():
                print(f"{name}: {value:.3f}", flush=True)
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
