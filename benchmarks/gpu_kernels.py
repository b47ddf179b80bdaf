"""Each GPU kernel alone, in CUDA graphs, beside the limit of the same card: python benchmarks/gpu_kernels.py [--json FILE].

Times are medians over replays of a graph that launches the kernel many times on rotating buffers (nothing stays in the L2
cache), so they include the gap to the next kernel. GB/s count what must be read and written once; TFLOP/s of attention
count causal work only. --sweep also tries other tiles of the attention kernels; --only rows times the elementwise kernels of
a large prefill step by several tiles, and products that add to the residual beside those that do not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.attention.flash import find_flash_attention_3
from headrace.kernels.activation import ActTile, act_mul, act_mul_triton
from headrace.kernels.attention_decode import SplitTile, split_attention
from headrace.kernels.attention_prefill import VarlenTile, varlen_attention
from headrace.kernels.gather_kv import gather_kv
from headrace.kernels.norm import NormTile, add_rms_norm, add_rms_norm_triton, rms_norm_triton
from headrace.kernels.norm import default_tile as norm_tile
from headrace.kernels.qkv import QkvTile, qkv_rope_write, qkv_rope_write_triton
from headrace.kernels.qkv import default_tile as qkv_tile
from headrace.kernels.split import split_space
from headrace.model.decoder import embed
from headrace.model.linear import MatrixLinear

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16
KV_HEADS, DIM, BLOCK = 8, 128, 64
ROTATE_BYTES = 200e6  # four times the L2 cache of an H100


@dataclass
class Report:
    """Prints a line per measurement and keeps them all."""

    copy_gbs: float
    matmul_tflops: float
    rows: list[dict] = field(default_factory=list)

    def bytes(self, kernel: str, case: str, micros: float, num_bytes: float) -> None:
        gbs = num_bytes / micros / 1e3
        self._add(kernel, case, micros, f"{gbs:7.0f} GB/s  ", 100 * gbs / self.copy_gbs, gbs=gbs)

    def flops(self, kernel: str, case: str, micros: float, flops: float) -> None:
        tflops = flops / micros / 1e6
        self._add(kernel, case, micros, f"{tflops:7.0f} TFLOP/s", 100 * tflops / self.matmul_tflops, tflops=tflops)

    def _add(self, kernel: str, case: str, micros: float, rate: str, percent: float, **numbers: float) -> None:
        self.rows.append({"kernel": kernel, "case": case, "us": micros, "percent": percent, **numbers})
        print(f"{kernel:22s} {case:34s} {micros:9.2f} us {rate} {percent:5.1f} %", flush=True)


def graph_micros(launches: Sequence[Callable[[], object]], replays: int = 9) -> float:
    """Median microseconds of one launch, all of them captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """(copy GB/s counting bytes read and written, bfloat16 8192^3 TFLOP/s) of this card, now."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / graph_micros([partial(target.copy_, source)] * 3) / 1e3
    del source, target
    x, y = (torch.randn((8192, 8192), device=DEVICE).to(BF16) for _ in range(2))
    out = torch.empty_like(x)
    return copy, 2 * 8192**3 / graph_micros([lambda: torch.mm(x, y, out=out)] * 3) / 1e6


def rotation(num_bytes: float) -> int:
    return max(4, min(40, int(ROTATE_BYTES // num_bytes) + 1))


def bench_fused(report: Report, name: str, hidden: int, heads: int, inner: int) -> None:
    """The elementwise kernels of a layer at decode and prefill sizes."""
    angle = torch.rand((40960, DIM // 2), device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    weight, head_weight = torch.ones(hidden, dtype=BF16, device=DEVICE), torch.ones(DIM, dtype=BF16, device=DEVICE)
    table = torch.zeros((151936, hidden), dtype=BF16, device=DEVICE)
    cache = [torch.zeros((256, BLOCK, KV_HEADS, DIM), dtype=BF16, device=DEVICE) for _ in range(2)]
    for rows in (1, 32, 256, 8192):
        width = (heads + 2 * KV_HEADS) * DIM
        xs = [torch.randn((rows, hidden), dtype=BF16, device=DEVICE) for _ in range(rotation(4 * rows * hidden))]
        pairs = zip(xs, xs[1:] + xs[:1], strict=True)
        micros = graph_micros([partial(add_rms_norm, x, residual, weight, 1e-6) for x, residual in pairs])
        report.bytes("add_rms_norm", f"{name} {rows} rows", micros, 8 * rows * hidden)
        xs = [torch.randn((rows, 2 * inner), dtype=BF16, device=DEVICE) for _ in range(rotation(rows * 4 * inner))]
        micros = graph_micros([partial(act_mul, x, "silu") for x in xs])
        report.bytes("act_mul", f"{name} {rows} rows", micros, 6 * rows * inner)
        xs = [torch.randn((rows, width), dtype=BF16, device=DEVICE) for _ in range(rotation(rows * 2 * width))]
        ids = torch.randint(0, 151936, (rows,), dtype=torch.int32, device=DEVICE)
        slots = torch.randperm(256 * BLOCK, device=DEVICE)[:rows]
        for keep in (False, True) if rows == 8192 else (False,):
            kv = SimpleNamespace(k=cache[:1], v=cache[1:], scales=[(None, None)])
            micros = graph_micros([
                partial(
                    qkv_rope_write, x, ids % 40960, cos, sin, kv, 0, slots, num_heads=heads, num_kv_heads=KV_HEADS,
                    head_dim=DIM, q_norm=head_weight, k_norm=head_weight, eps=1e-6, norm_offset=0.0, keep=keep,
                )
                for x in xs
            ])  # fmt: skip
            extra = rows * KV_HEADS * DIM * 2 if keep else 0
            case = f"{name} {rows} rows{' keeping keys' if keep else ''}"
            report.bytes("qkv_rope_write", case, micros, 4 * rows * width + extra)
        if rows in (1, 8192):
            report.bytes("embed", f"{name} {rows} rows", graph_micros([partial(embed, ids, table)] * 8), 4 * rows * hidden)


def bench_rows(report: Report, name: str, hidden: int, heads: int, inner: int, rows: int = 16384) -> None:
    """The elementwise kernels of a prefill step by several tiles (the first is the default), and the products before norms."""
    weight, head_weight = torch.ones(hidden, dtype=BF16, device=DEVICE), torch.ones(DIM, dtype=BF16, device=DEVICE)
    xs = [torch.randn((rows, hidden), dtype=BF16, device=DEVICE) for _ in range(rotation(4 * rows * hidden))]
    pairs = list(zip(xs, xs[1:] + xs[:1], strict=True))
    usual = norm_tile(hidden)
    tiles = [usual, NormTile(1, usual.num_warps // 2), NormTile(1, 2 * usual.num_warps), NormTile(2, usual.num_warps)]
    tiles.append(NormTile(4, 4) if hidden <= 1024 else NormTile(2, 2 * usual.num_warps))
    for tile in tiles:
        case = f"{name} {rows} rows, {tile.rows} x w{tile.num_warps}"
        micros = graph_micros([partial(rms_norm_triton, x, weight, 1e-6, tile=tile) for x in xs])
        report.bytes("rms_norm", case, micros, 4 * rows * hidden)
        micros = graph_micros([partial(add_rms_norm_triton, x, y, weight, 1e-6, tile=tile) for x, y in pairs])
        report.bytes("add_rms_norm", case, micros, 8 * rows * hidden)
    wide = [torch.randn((rows, 2 * inner), dtype=BF16, device=DEVICE) for _ in range(rotation(rows * 4 * inner))]
    for act in (ActTile(), ActTile(1024, 2), ActTile(2048, 4), ActTile(2048, 8), ActTile(512, 2)):
        micros = graph_micros([partial(act_mul_triton, x, "silu", tile=act) for x in wide])
        report.bytes("act_mul", f"{name} {rows} rows, {act.block} w{act.num_warps}", micros, 6 * rows * inner)
    del wide
    width, positions = (heads + 2 * KV_HEADS) * DIM, torch.arange(rows, dtype=torch.int32, device=DEVICE) % 4096
    angle, slots = torch.rand((4096, DIM // 2), device=DEVICE), torch.randperm(256 * BLOCK, device=DEVICE)[:rows]
    cos, sin = angle.cos(), angle.sin()
    k, v = (torch.zeros((256, BLOCK, KV_HEADS, DIM), dtype=BF16, device=DEVICE) for _ in range(2))
    kv = SimpleNamespace(k=[k], v=[v], scales=[(None, None)])
    wide = [torch.randn((rows, width), dtype=BF16, device=DEVICE) for _ in range(rotation(rows * 2 * width))]
    for qkv in (qkv_tile(heads, DIM), QkvTile(4, 1), QkvTile(8, 1), QkvTile(8, 4), QkvTile(16, 4)):
        launches = [
            partial(
                qkv_rope_write_triton, x, positions, cos, sin, kv, 0, slots, num_heads=heads, num_kv_heads=KV_HEADS,
                head_dim=DIM, q_norm=head_weight, k_norm=head_weight, eps=1e-6, norm_offset=0.0, keep=True, tile=qkv,
            )
            for x in wide
        ]  # fmt: skip
        case = f"{name} {rows} rows, {qkv.heads} w{qkv.num_warps}"
        report.bytes("qkv_rope_write", case, graph_micros(launches), 4 * rows * width + 2 * rows * KV_HEADS * DIM)
    del wide
    for part, inputs in (("o", heads * DIM), ("down", inner)):
        linear = MatrixLinear(torch.randn((hidden, inputs), dtype=BF16, device=DEVICE))
        x, flops = torch.randn((rows, inputs), dtype=BF16, device=DEVICE), 2 * rows * inputs * hidden
        report.flops(f"{part} product", f"{name} {rows} rows", graph_micros([partial(linear, x)] * 4), flops)
        micros = graph_micros([partial(linear.add_to, total, x) for total in xs])
        report.flops(f"{part} product, added", f"{name} {rows} rows", micros, flops)


def paged(lens: list[int], copies: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor]:
    """`copies` caches of scattered blocks with their table: ([(k, v)], tables, slots, lens)."""
    blocks = [-(-n // BLOCK) for n in lens]
    order = torch.randperm(sum(blocks), device=DEVICE).to(torch.int32)
    tables = torch.zeros((len(lens), max(blocks)), dtype=torch.int32, device=DEVICE)
    first = 0
    for s, n in enumerate(blocks):
        tables[s, :n] = order[first : first + n]
        first += n
    shape = (sum(blocks), BLOCK, KV_HEADS, DIM)
    caches = [tuple(torch.randn(shape, dtype=BF16, device=DEVICE) for _ in range(2)) for _ in range(copies)]
    slots = torch.arange(len(lens), dtype=torch.int32, device=DEVICE)
    return caches, tables, slots, torch.tensor(lens, dtype=torch.int32, device=DEVICE)  # type: ignore[return-value]


def bench_decode(report: Report, heads: int, case: str, lens: list[int], bound: int, tiles: list[SplitTile | None]) -> None:
    """The split kernel on sequences of `lens` tokens under a grid made for `bound`."""
    num_bytes = 2 * sum(lens) * KV_HEADS * DIM * 2
    caches, tables, slots, seq_lens = paged(lens, rotation(num_bytes))
    seqs = len(lens)
    workspace = split_space(seqs, heads, KV_HEADS, DIM, DEVICE)
    q = torch.randn((seqs, heads, DIM), dtype=BF16, device=DEVICE)
    out = torch.empty((seqs, heads * DIM), dtype=BF16, device=DEVICE)
    start = torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE)
    for tile in tiles:
        launches = [
            partial(
                split_attention, q, k, v, out, tables, slots, start, seq_lens, workspace, first_seq=0, num_seqs=seqs, tokens=1,
                max_context=bound, scale=DIM**-0.5, tile=tile,
            )
            for k, v in caches
        ]  # fmt: skip
        named = f" {tile.keys}w{tile.num_warps}s{tile.num_stages}" if tile else ""
        report.bytes(f"decode {heads} heads", f"{case}{named}", graph_micros(launches), num_bytes)


def bench_prefill(report: Report, heads: int, prompts: int, rows: int, context: int, tiles: list[VarlenTile | None]) -> None:
    """Prompts of `rows` new tokens at the end of `context`: our kernel, cuDNN, FlashAttention-3, each where it can."""
    caches, tables, slots, seq_lens = paged([context] * prompts, 1)
    (k_cache, v_cache), total = caches[0], prompts * rows
    q = torch.randn((total, heads, DIM), dtype=BF16, device=DEVICE)
    kept = torch.randn((prompts * context, KV_HEADS, DIM), dtype=BF16, device=DEVICE)
    fused = torch.randn((prompts * context, heads + 2 * KV_HEADS, DIM), dtype=BF16, device=DEVICE)[:, heads + KV_HEADS :]
    out = torch.empty((total, heads * DIM), dtype=BF16, device=DEVICE)
    start = torch.arange(prompts + 1, dtype=torch.int32, device=DEVICE) * rows
    key_start = torch.arange(prompts + 1, dtype=torch.int32, device=DEVICE) * context
    flops = 4 * prompts * heads * DIM * (rows * context - rows * rows / 2)
    case = f"{prompts} x {rows} of {context}"

    def measure(kernel: str, launch: Callable[[], object]) -> None:
        try:
            report.flops(f"{kernel} {heads}h", case, graph_micros([launch] * 3), flops)
        except Exception as error:
            print(f"{kernel} {case} failed: {str(error)[:200]}")

    for tile in tiles:
        named = f" {tile.rows}x{tile.keys}w{tile.num_warps}s{tile.num_stages}{'' if tile.tma else ' ptr'}" if tile else ""
        measure(
            f"triton{named}",
            partial(
                varlen_attention, q, k_cache, v_cache, out, tables, slots, start, seq_lens, first_seq=0,
                num_seqs=prompts, num_rows=total, max_tokens=rows, scale=DIM**-0.5, tile=tile,
            ),
        )  # fmt: skip
    if rows == context:
        qt, kt, vt = (x.unflatten(0, (prompts, rows)).transpose(1, 2) for x in (q, kept, fused))

        def cudnn() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(qt, kt, vt, is_causal=True, scale=DIM**-0.5, enable_gqa=True)

        measure("cudnn", cudnn)
    forward, _ = find_flash_attention_3()
    if forward is not None:
        options = {"softmax_scale": DIM**-0.5, "is_causal": True, "num_splits": 1}
        inputs = [q, kept, fused if rows == context else kept, out.view(q.shape)]
        alike = [x.unflatten(0, (prompts, -1)) for x in inputs]
        lengths = {"cu_seqlens_q": start, "cu_seqlens_k": key_start, "max_seqlen_q": rows, "max_seqlen_k": context}
        measure("fa3", lambda: forward(*alike[:3], out=alike[3], **options))
        measure("fa3 by lengths", lambda: forward(*inputs[:3], out=inputs[3], **options, **lengths))
    if rows != context:
        gather = partial(
            gather_kv, k_cache, v_cache, torch.empty_like(kept), torch.empty_like(kept), tables, slots, key_start,
            first_seq=0, num_seqs=prompts, max_context=context,
        )  # fmt: skip
        report.bytes("gather_kv", case, graph_micros([gather] * 4), 8 * prompts * context * KV_HEADS * DIM)


def try_cudnn_varlen(report: Report, heads: int, lens: list[int]) -> None:
    """cuDNN over prompts of different lengths in one call (an operator that torch does not use by itself for this)."""
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn((sum(lens), h, DIM), dtype=BF16, device=DEVICE) for h in (heads, KV_HEADS, KV_HEADS))
    longest = -(-max(lens) // 1024) * 1024  # plans are made for this, not for each length

    def run() -> Tensor:
        return torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, starts, starts, longest, longest, True, 0.0, True, False, scale=DIM**-0.5
        )[0]

    got = run()
    worst = 0.0
    for lo, hi in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        qt, kt, vt = (x[lo:hi].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        want = F.scaled_dot_product_attention(qt, kt, vt, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        worst = max(worst, float((got[lo:hi].float() - want.float()).norm() / want.float().norm()))
    flops = sum(2 * heads * DIM * n * n for n in lens)
    case = f"{len(lens)} of up to {max(lens)}, error {worst:.0e}"
    report.flops(f"cudnn varlen {heads}h", case, graph_micros([run] * 3), flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--sweep", action="store_true", help="also other tiles of the attention kernels")
    parser.add_argument("--only", default="", help="fused, rows, decode or prefill")
    options = parser.parse_args()
    torch.manual_seed(0)
    card = torch.cuda.get_device_name(DEVICE)
    copy, matmul = ceilings()
    print(f"{card}: copy {copy:.0f} GB/s, bfloat16 matmul {matmul:.0f} TFLOP/s; torch {torch.__version__}")
    report = Report(copy, matmul)
    rng = random.Random(0)
    split_tiles: list[SplitTile | None] = [None]
    varlen_tiles: list[VarlenTile | None] = [None]
    if options.sweep:
        split_tiles += [SplitTile(64, 4, 5), SplitTile(64, 2, 3), SplitTile(32, 4, 3), SplitTile(64, 8, 3)]
        varlen_tiles += [
            VarlenTile(128, 64, 8, 3, True), VarlenTile(128, 64, 8, 4, True), VarlenTile(64, 64, 4, 4, True),
            VarlenTile(64, 32, 4, 4, True), VarlenTile(128, 64, 8, 3, False),
        ]  # fmt: skip
    sections: list[tuple[str, Callable[[], None]]] = [
        ("fused", partial(bench_fused, report, "0.6B", 1024, 16, 3072)),
        ("fused", partial(bench_fused, report, "8B", 4096, 32, 12288)),
    ]
    if options.only == "rows":  # tiles to choose from, not figures to keep
        sections += [
            ("rows", partial(bench_rows, report, "0.6B", 1024, 16, 3072)),
            ("rows", partial(bench_rows, report, "8B", 4096, 32, 12288)),
        ]
    for heads in (16, 32):
        for seqs, context in ((1, 1024), (1, 8192), (8, 1024), (32, 1024), (64, 1024), (256, 1024), (32, 8192)):
            tiles = split_tiles if (seqs, context) in ((256, 1024), (32, 1024), (8, 1024)) else split_tiles[:1]
            case = f"{seqs} x {context}"
            sections.append(("decode", partial(bench_decode, report, heads, case, [context] * seqs, context, tiles)))
    ragged = [rng.randint(128, 2048) for _ in range(256)]
    for case, lens, bound in (
        ("256 x 1030, grid 2048", [1030] * 256, 2048),
        ("256 x U(128, 2048)", ragged, 2048),
        ("the same, grid 32768", ragged, 32768),
        ("64 x U(64, 4096)", [rng.randint(64, 4096) for _ in range(64)], 4096),
        ("1 x 32768 + 31 x 512", [32768] + [512] * 31, 32768),
    ):
        sections.append(("decode", partial(bench_decode, report, 32, case, lens, bound, [None])))
    for heads in (16, 32):
        for prompts, rows, context in ((1, 4096, 4096), (2, 4096, 4096), (4, 4096, 4096), (16, 512, 512), (1, 2048, 8192)):
            wide = varlen_tiles if (prompts, rows) == (2, 4096) else varlen_tiles[:1]
            sections.append(("prefill", partial(bench_prefill, report, heads, prompts, rows, context, wide)))
    if options.sweep:  # last: they are experiments
        for heads in (16, 32):
            for lens in ([4096], [4096] * 2, [1100, 3000, 700, 2500, 890]):
                sections.append(("prefill", partial(try_cudnn_varlen, report, heads, lens)))
    for name, section in sections:
        if options.only in name:
            try:
                section()
            except Exception:  # one kernel's failure must not cost the other figures
                traceback.print_exc(limit=3)
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"card": card, "torch": torch.__version__, "triton": triton.__version__, **asdict(report)}, f, indent=1)


if __name__ == "__main__":
    main()
