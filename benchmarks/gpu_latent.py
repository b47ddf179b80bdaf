"""The kernel of latent attention at the published sizes, beside what the card can do.

    python benchmarks/gpu_latent.py [--heads 20 128] [--sweep] [--json FILE]

One card, one run, CUDA-graph replays on rotating caches as in gpu_kernels.py. Decode: percent are of the cached rows (576
numbers of 16 bits a token, read once) over the copy bandwidth measured here; with many heads the products are the limit.
Prefill: of what meets latents, and of keys and values of heads by cuDNN, made from the latents in the same time. --sweep: and
other tiles.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import torch
import triton

from gpu_kernels import BF16, BLOCK, DEVICE, graph_micros, rotation
from headrace.attention.flash import Dense
from headrace.attention.latent_triton import TritonLatentAttention
from headrace.kernels.latent_attention import LatentTile, PartSpace, latent_attention
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.latent_config import LatentConfig

RANK, ROPE = 512, 64
SIZES = [(1, 1024), (1, 8192), (1, 32768), (32, 1024), (32, 8192), (32, 32768)]
HEADS = {20: (192, 256), 16: (128, 128), 64: (128, 128), 128: (128, 128)}  # -> (nope, value) of a model that has so many
PROMPTS = [(4096, 4096), (2048, 16384)]  # new rows, context
DECODE_TILES = [
    LatentTile(64, 64, 8, 2, 16, True), LatentTile(64, 64, 4, 2, 16, True), LatentTile(64, 64, 4, 2, 16, False),
]  # fmt: skip
PREFILL_TILES = [LatentTile(64, 64, 8, 2, 64, True), LatentTile(32, 64, 8, 2, 16, False)]


def launches(heads: int, seqs: int, context: int, rows: int, tile: LatentTile | None) -> list[partial[None]]:
    """Of `rows` new rows of each sequence; one: decode."""
    width = -(-context // BLOCK)
    tables = torch.randperm(seqs * width, device=DEVICE).to(torch.int32).view(seqs, width)
    q = torch.randn((seqs * rows, heads, RANK + ROPE), dtype=BF16, device=DEVICE)
    out = torch.empty((seqs * rows, heads * RANK), dtype=BF16, device=DEVICE)
    start = torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE) * rows
    lens = torch.full((seqs,), context, dtype=torch.int32, device=DEVICE)
    space = PartSpace.of(64, heads, RANK, DEVICE) if rows == 1 else None
    count = rotation(2 * seqs * context * (RANK + ROPE)) if rows == 1 else 2
    return [
        partial(
            latent_attention, q, torch.randn((seqs * width, BLOCK, 1, RANK + ROPE), dtype=BF16, device=DEVICE), out, tables,
            torch.arange(seqs, dtype=torch.int32, device=DEVICE), start, lens, space, rank=RANK, first_seq=0, num_seqs=seqs,
            num_rows=seqs * rows, max_tokens=rows, max_context=context, scale=0.05, tile=tile,
        )
        for _ in range(count)
    ]  # fmt: skip


def expanded(heads: int, rows: int) -> tuple[float, float]:
    """(microseconds, TFLOP/s) of a fresh prompt by keys and values of heads, these made from its latents."""
    nope, value = HEADS[heads]
    model = ModelConfig(
        "deepseek_v3", 1, 1, 1, heads, 1, RANK + ROPE, 1, 1, RopeConfig(1.0, ROPE), latent=LatentConfig(RANK, ROPE, nope, value)
    )
    attention = TritonLatentAttention(model, DEVICE, expands=True)
    weight = torch.randn((heads * (nope + value), RANK), dtype=BF16, device=DEVICE)
    row = torch.randn((rows, RANK + ROPE), dtype=BF16, device=DEVICE)
    q = torch.randn((rows, heads, nope + ROPE), dtype=BF16, device=DEVICE)

    def run() -> None:
        made = torch.mm(row[:, :RANK], weight.t()).view(rows, heads, -1)
        k = torch.cat((made[..., :nope], row[:, None, RANK:].expand(-1, heads, -1)), -1)
        attention.attend_dense(Dense(0, 1, rows), q, k, made[..., nope:], 0.05)

    micros = graph_micros([run, run])
    return micros, heads * (nope + ROPE + value) * rows**2 / micros / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[20, 128], choices=HEADS)
    parser.add_argument("--sweep", action="store_true", help="also other tiles")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    source = torch.empty(1 << 30, dtype=torch.float32, device=DEVICE)
    copying = partial(torch.empty_like(source).copy_, source)
    copy = 2 * source.nbytes / triton.testing.do_bench(copying, return_mode="median") / 1e6
    del source, copying
    card, rows = torch.cuda.get_device_name(DEVICE), []
    print(f"{card}: copy {copy:.0f} GB/s; torch {torch.__version__}", flush=True)

    def note(kind: str, heads: int, size: tuple[int, int], tile: LatentTile | None, micros: float, rate: float) -> None:
        unit, (seqs, context) = "%" if kind == "decode" else "TFLOP/s", size
        found = {"kind": kind, "heads": heads, "seqs": seqs, "context": context, "tile": str(tile), "us": micros, unit: rate}
        rows.append(found)
        print(f"{kind:14} {heads:4} heads {seqs:3} x {context:5} {micros:9.1f} us {rate:6.1f} {unit}  {tile or ''}", flush=True)

    for heads in options.heads:
        for tile in [None, *(DECODE_TILES if options.sweep else [])]:
            for seqs, context in SIZES:
                try:
                    micros = graph_micros(launches(heads, seqs, context, 1, tile))
                except Exception as error:  # what a tile needs may not be there
                    print(f"decode {heads} heads, {tile}: {error}", flush=True)
                    break
                moved = 2 * seqs * context * (RANK + ROPE)
                note("decode", heads, (seqs, context), tile, micros, moved / micros / 1e3 / copy * 100)
        for new, context in PROMPTS:
            seen = context**2 - (context - new) ** 2
            for tile in [None, *(PREFILL_TILES if options.sweep else [])]:
                micros = graph_micros(launches(heads, 1, context, new, tile), 3)
                rate = heads * (2 * RANK + ROPE) * seen / micros / 1e6
                note(f"prefill {new}", heads, (1, context), tile, micros, rate)
        note("expanded 4096", heads, (1, 4096), None, *expanded(heads, 4096))
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"card": card, "copy_gbs": copy, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
