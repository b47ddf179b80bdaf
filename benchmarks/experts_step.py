"""One decode step of a model with experts, captured, beside its limit: python benchmarks/experts_step.py [--rows 1,2,4,8,32]

    [--config benchmarks/shapes/qwen3-30b-a3b.json] [--context 512] [--layers N] [--timeline 1] [--json FILE]

Random weights. The limit is the time to read what the step has to, at the bandwidth of reading in this run: all weights but the
experts, the experts that some row has chosen, keys and values. First each layer's experts are held against float32, and replays
against each other. --timeline: of the kernels of a layer in the graph when each begins, from when it is alone, and ends.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from about import write
from experts import reading
from gpu_decode import DEVICE, Cache, Input, capture, graph_ms, numbers, say
from headrace.fast_decode import forward
from headrace.fast_decode.experts import join_experts
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.takes import usual_kinds
from headrace.fast_decode.tile_tables import load_tiles
from headrace.kernels.experts import route_reference
from headrace.model.batch import ForwardBatch
from headrace.model.checkpoint import Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.weight import Weight, dequantized

SHAPES = Path(__file__).parent / "shapes"


def load(path: Path, layers: int | None) -> tuple[ModelConfig, DecoderWeights]:
    hf: dict[str, Any] = json.loads(path.read_text())
    if layers is not None:
        hf["num_hidden_layers"] = layers
        if "layer_types" in hf:
            hf["layer_types"] = hf["layer_types"][:layers]
    config = model_config_from_hf(hf)
    return config, load_model(Checkpoint(path.stem, path, "dummy", hf, ()), config, torch.bfloat16, DEVICE)


class Watched:
    """`join_experts` that is held against float32 and notes which experts were read."""

    def __init__(self) -> None:
        self.touched: list[int] = []
        self.errors: list[float] = []

    def __call__(self, config: ModelConfig, weights: Any, x: Tensor, sums: Tensor, total: Tensor, *more: Any) -> Tensor:
        experts = config.experts
        assert experts is not None
        rows = x.float() * torch.rsqrt(sums.sum(1, keepdim=True) / config.hidden_size + config.norm_eps)
        logits = F.linear(rows.double(), weights["router"].data.double())
        if (bias := weights.get("router_bias")) is not None:
            logits += bias
        ids, shares = route_reference(logits, weights.get("correction"), experts)
        expected = total + config.residual_scale * self.reference(config, weights, rows, ids, shares)
        squares = join_experts(config, weights, x, sums, total, *more)
        self.touched.append(len(ids.unique()))
        of_squares = (squares.sum(1) / total.square().sum(1) - 1).abs().max()
        self.errors.append(max(float((total - expected).norm() / expected.norm()), float(of_squares)))
        return squares

    @staticmethod
    def reference(config: ModelConfig, weights: Any, rows: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        experts = config.experts
        assert experts is not None
        out = torch.zeros(len(rows), config.hidden_size, device=rows.device)
        for e in ids.unique().tolist():
            share = torch.where(ids == e, shares, 0.0).sum(1, keepdim=True)
            y = rows @ of_expert(weights["experts_gate_up"], e, experts.count)[:, : rows.shape[1]].T
            if (bias := weights.get("experts_gate_up_bias")) is not None:
                y = y + bias.unflatten(0, (experts.count, -1))[e].float()
            gate, up = y.chunk(2, 1)
            if experts.clamp:
                gate, up = gate.clamp(max=experts.clamp), up.clamp(-experts.clamp, experts.clamp)
                y = (up + 1) * gate * (1.702 * gate).sigmoid()
            else:
                y = F.silu(gate) * up
            y = y @ of_expert(weights["experts_down"], e, experts.count)[:, : y.shape[1]].T
            if (bias := weights.get("experts_down_bias")) is not None:
                y = y + bias.unflatten(0, (experts.count, -1))[e].float()
            out += share * y
        return out


def of_expert(weight: Weight, expert: int, count: int) -> Tensor:
    """One expert's matrix in float32."""
    parts = [None if t is None else t.view(count, -1, *t.shape[1:])[expert] for t in (weight.data, weight.scales, weight.zeros)]
    return dequantized(Weight(*parts, weight.kind, weight.group, weight.scale_rows), torch.float32)  # type: ignore[arg-type]


class Step:
    def __init__(self, path: Path, layers: int | None, rows: int, context: int):
        self.config, self.weights = load(path, layers)
        blocks = rows * -(-context // 64)
        self.kv = Cache(self.config, blocks + 8, DEVICE)
        self.input = Input(self.config, rows, context, blocks, DEVICE)
        self.context = context
        held = [layer.more[name] for layer in self.weights.layers for name in ("experts_gate_up", "experts_down")]
        self.expert_bytes = sum(t.nbytes for w in held for t in w.tensors)
        self.other_bytes = self.weights.num_bytes - self.weights.embedding.nbytes - self.expert_bytes

    def batch(self, rows: int) -> ForwardBatch:
        return self.input.batch([self.context] * rows)

    def fast(self, rows: int) -> FastDecode:
        tiles = load_tiles(self.config, torch.cuda.get_device_name(), usual_kinds(self.weights))
        return FastDecode(self.config, self.weights, rows, DEVICE, tiles, max_model_len=4096)

    def limit_ms(self, touched: list[int], rows: int, bandwidth: float) -> float:
        experts = self.config.experts
        assert experts is not None
        read = self.expert_bytes * sum(touched) / (experts.count * len(touched))
        cache = 4 * self.config.num_layers * rows * self.context * self.config.kv_size
        return (self.other_bytes + read + cache) / bandwidth / 1e6

    def check(self, rows: int) -> Watched:
        watched, usual = Watched(), forward.join_experts
        forward.join_experts = watched
        try:
            self.fast(rows).forward(self.batch(rows), self.kv)
        finally:
            forward.join_experts = usual
        return watched

    def captured(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph is of use until the next one is captured: what it works with is kept as long."""
        fast, batch = self.of_graph = self.fast(rows), self.batch(rows)
        return capture(lambda: fast.forward(batch, self.kv))

    def measure(self, rows: int, bandwidth: float, replays: int) -> dict[str, Any]:
        watched = self.check(rows)
        graph, out = self.captured(rows)
        first = out.clone()
        different = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(replays):
            graph.replay()
            different += (out != first).any()
        took, limit = graph_ms(graph), self.limit_ms(watched.touched, rows, bandwidth)
        errors = sorted(watched.errors)
        found = {
            "rows": rows, "step_ms": took, "limit_ms": limit, "percent": 100 * limit / took,
            "experts": sum(watched.touched) / len(watched.touched), "differing replays": int(different),
            "error": errors[len(errors) // 2], "largest error": errors[-1], "finite": bool(first.isfinite().all()),
        }  # fmt: skip
        say(json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in found.items()}))
        return found

    def timeline(self, rows: int, steps: int = 5) -> list[tuple[str, float, float, float]]:
        """(kernel, begins, ends, added) of a layer, means over layers and steps, microseconds from the one before's end."""
        from torch.profiler import ProfilerActivity, profile

        graph, _ = self.captured(rows)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(steps):
                graph.replay()
            torch.cuda.synchronize()
        kernels = [e for e in trace.events() if "kernel" in e.name or e.name.startswith("_")]
        kernels.sort(key=lambda e: e.time_range.end)
        heads = [i for i, e in enumerate(kernels) if e.name.startswith("_embed_residual")]
        lines: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
        for at, after in zip(heads, [*heads[1:], len(kernels)], strict=True):
            step = kernels[at:after]
            per_layer = (len(step) - 2) // self.config.num_layers
            for layer in range(1, self.config.num_layers):
                own = step[layer * per_layer : (layer + 1) * per_layer + 1]
                zero, before = own[0].time_range.end, own[0].time_range.end
                for place, e in enumerate(own[1:]):
                    begin, end = e.time_range.start, e.time_range.end
                    lines.setdefault((place, e.name), []).append((begin - zero, end - zero, end - before))
                    before = end
        found = []
        for (place, name), values in sorted(lines.items()):
            begin, end, added = (sum(v[i] for v in values) / len(values) for i in range(3))
            found.append((name, begin, end, added))
            say(f"  {place} {name:40s} n {len(values):4d}  begins {begin:7.2f}  ends {end:7.2f}  added {added:6.2f} us")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=SHAPES / "qwen3-30b-a3b.json")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, help="of the model, if not all")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--timeline", type=numbers, default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bandwidth = reading()
    say(f"{torch.cuda.get_device_name()}: reads {bandwidth:.0f} GB/s")
    with torch.inference_mode():
        step = Step(args.config, args.layers, max([*args.rows, *args.timeline]), args.context)
        found = [step.measure(rows, bandwidth, args.replays) for rows in args.rows]
        lines = {rows: step.timeline(rows) for rows in args.timeline}
    if args.json:
        write(args.json, {"read_gbs": bandwidth, "steps": found, "timeline_us": lines})


if __name__ == "__main__":
    main()
