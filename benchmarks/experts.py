"""A layer of experts in a captured graph, beside the card's limit and torch's grouped product: python benchmarks/experts.py.

The limit is the larger of two times: the bytes of the experts that the rows have chosen, of the router and of the rows, over
the bandwidth of reading in this run; and the products' operations over the rate of a large bfloat16 product in this run. Each
launch in a graph has another choice of experts, so few weights stay in the L2 cache. By grouped_mm is what Transformers runs:
rows sorted by expert, torch's grouped product, and the sum; of float weights, here without their biases.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from about import write
from gpu_kernels import DEVICE, ceilings, graph_micros
from headrace.kernels import experts_triton
from headrace.model.weight import Weight, pack_int4

BF16 = torch.bfloat16
ROWS = (1, 2, 4, 8, 32, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Layer:
    name: str
    hidden: int
    inner: int
    count: int
    chosen: int
    kind: str = "float"
    clamp: float = 0.0

    def matrix(self, rows: int, width: int) -> Weight:
        """Random numbers with little work: what they are is of no meaning to the time."""
        if self.kind == "float":
            return Weight(torch.empty(rows, width, dtype=BF16, device=DEVICE).uniform_(-0.05, 0.05))
        if self.kind == "fp8":
            data = torch.randint(0, 112, (rows, width), dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
            return Weight(data, torch.full((rows // 128, width // 128), 1e-3, dtype=BF16, device=DEVICE), None, "fp8", 128, 128)
        width = -(-width // 128) * 128
        packed = pack_int4(torch.zeros(1, 128)).new_empty(rows, width // 2, device=DEVICE).random_(0, 256)
        return Weight(packed, torch.full((rows, width // 32), 2.0**-6, dtype=BF16, device=DEVICE), None, "fp4", 32)


LAYERS = {
    "qwen3-30b": Layer("Qwen3-30B-A3B", 2048, 768, 128, 8),
    "qwen3-30b-fp8": Layer("Qwen3-30B-A3B, FP8 blocks", 2048, 768, 128, 8, "fp8"),
    "gpt-oss": Layer("gpt-oss-20b, bfloat16", 2880, 2880, 32, 4, "float", 7.0),
    "gpt-oss-fp4": Layer("gpt-oss-20b, MXFP4", 2880, 2880, 32, 4, "fp4", 7.0),
}


def reading() -> float:
    """GB/s of the largest of 4 GB of numbers."""
    numbers = torch.zeros(1 << 29, dtype=torch.int64, device=DEVICE)
    return numbers.numel() * 8 / graph_micros([partial(torch.amax, numbers)] * 3) / 1e3


def grouped(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """What Transformers does on a card; gate_up [E, 2I, H], down [E, H, I]."""
    order = ids.flatten().argsort()
    ends = torch.histc(ids.flatten().float(), len(gate_up), 0, len(gate_up) - 1).cumsum(0).int()
    y = torch._grouped_mm(x[order // ids.shape[1]], gate_up.transpose(1, 2), offs=ends)
    gate, up = y.chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    y = y * shares.flatten()[order, None].to(y.dtype)
    return torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, -1).sum(1)


def measure(layer: Layer, rows: list[int], bandwidth: float, rate: float) -> list[dict]:
    gate_up = layer.matrix(layer.count * 2 * layer.inner, layer.hidden)
    down = layer.matrix(layer.count * layer.hidden, layer.inner)
    router = torch.randn(layer.count, layer.hidden, device=DEVICE)
    routing = SimpleNamespace(chosen=layer.chosen, score="softmax", renormalize=True, scale=1.0, groups=1, groups_chosen=1)
    given: dict = {"count": layer.count, "clamp": layer.clamp}
    if layer.clamp:
        sizes = {"gate_up_bias": 2 * layer.inner, "down_bias": layer.hidden}
        given |= {name: torch.zeros(layer.count * size, dtype=BF16, device=DEVICE) for name, size in sizes.items()}
    expert_bytes = sum(t.numel() * t.element_size() for w in (gate_up, down) for t in w.tensors) / layer.count
    found = []
    for number in rows:
        xs = [torch.randn(number, layer.hidden, device=DEVICE).to(BF16) for _ in range(8 if number <= 256 else 2)]
        choices = [experts_triton.choose(x, router, None, None, routing) for x in xs]
        touched = sum(len(ids.unique()) for ids, _ in choices) / len(xs)
        num_bytes = touched * expert_bytes + router.numel() * 4 + 4 * xs[0].numel()
        flops = 6 * number * layer.chosen * layer.hidden * layer.inner
        limit = max(num_bytes / bandwidth / 1e3, flops / rate / 1e6)

        def whole(x: Tensor) -> Tensor:
            ids, shares = experts_triton.choose(x, router, None, None, routing)
            return experts_triton.run_experts(x, gate_up, down, ids, shares, **given)

        micros = graph_micros([partial(whole, x) for x in xs])
        entry = {"layer": layer.name, "rows": number, "us": micros, "limit_us": limit, "percent": 100 * limit / micros}
        line = f"{layer.name:28s} {number:5d} rows {touched:6.1f} experts {micros:9.1f} us  limit {limit:8.1f}"
        pairs = [(x, *choice) for x, choice in zip(xs, choices, strict=True)]
        alone = [partial(experts_triton.run_experts, x, gate_up, down, *choice, **given) for x, *choice in pairs]
        entry["experts_us"] = graph_micros(alone)
        line += f" = {entry['percent']:5.1f} %  without the choice {entry['experts_us']:8.1f} us"
        if layer.kind == "float":
            w, v = (m.data.unflatten(0, (layer.count, -1)) for m in (gate_up, down))
            entry["grouped_us"] = graph_micros([partial(grouped, x, w, v, *choice) for x, *choice in pairs])
            line += f", by grouped_mm {entry['grouped_us']:8.1f} us"
        print(line, flush=True)
        found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", choices=[*LAYERS, []], help="all, if none is named")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    (copy, rate), bandwidth = ceilings(), reading()
    card = torch.cuda.get_device_name()
    print(f"{card}: reads {bandwidth:.0f} GB/s, copies {copy:.0f}, bfloat16 product {rate:.0f} TFLOP/s", flush=True)
    rows = [entry for name in args.layers or LAYERS for entry in measure(LAYERS[name], args.rows, bandwidth, rate)]
    if args.json:
        found = {"card": card, "read_gbs": bandwidth, "copy_gbs": copy, "matmul_tflops": rate, "rows": rows}
        write(args.json, found)


if __name__ == "__main__":
    main()
