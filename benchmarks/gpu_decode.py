"""One decode step on the card: right against float32, the same bits in all replays, timed beside the limit, tiles searched.

    python benchmarks/gpu_decode.py [--models 0.6b,8b,8b-fp8,8b-int8,8b-int4,llama1b] [--batches 1,2,4,8,16,32,64]
        [--contexts 384,1024] [--tune 1,8,32 --tune-seconds 25] [--tables DIR] [--json FILE] [--profile 1,32] [--ranks 2]

Random weights and cache of the shape of a Qwen3, Llama 3, Qwen2.5, Mistral or Gemma-2, bfloat16 or narrow (a head of its own
in int8, as `--quantization` makes it); CUDA-graph replays. The paths: `cublas` is Decoder; FastDecode runs with GEMVs only
(`gemv`), skinny GEMMs only (`gemm`, and `ahead` with all weights loaded before the wait where they fit), GEMMs whose weights
the copy engine brings (`ring`), wide GEMMs only (`wide`, and `two` with attention in two kernels), and with the table in use
(`table`): the shipped one or the defaults, what --tune found, or DIR/<card>-<model>.json.
The limit of a step is (weights + keys and values read once) / the copy bandwidth measured here. Kernels are compiled by a pool
of processes ahead of their use (--compile-only does just that, without a card, into Triton's cache).

--ranks N: the part of one of N ranks, on one card; timed with its all-reduces (`echo_group.py`), checked without.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import tile_search
from about import about
from echo_group import EchoGroup
from headrace.cache.kv_cache import KVCache
from headrace.fast_decode import tiles as decode_tiles
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.takes import has_copy_engine
from headrace.fast_decode.tile_tables import SHIPPED, from_json, tile_file_name
from headrace.fast_decode.tiles import ROW_STEPS, Kinds, StepTiles
from headrace.kernels.attention_decode import SplitTile
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.decoder import Decoder
from headrace.model.decoder_weights import DecoderWeights, LayerWeights
from headrace.model.narrow import quantized
from headrace.model.shard import Shard
from headrace.model.weight import Weight, dequantized, smallest
from headrace_bench.roofline import measure_limits

BF16 = torch.bfloat16
SCALES = {"fp8": torch.float32, "int8": torch.float32, "int4": torch.float16}  # as `smallest` has them of random weights
BLOCK = 64
DEVICE = torch.device("cuda", 0)
MAX_LEN = 4096  # of the rope and block tables; contexts are at most that
BEGAN = time.perf_counter()


def qwen3(hidden: int, layers: int, heads: int, inner: int) -> ModelConfig:
    return ModelConfig(
        family="qwen3", vocab_size=151936, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=8,
        head_dim=128, intermediate_size=inner, max_position=40960, rope=RopeConfig(1e6, 128, max_position=40960),
        qk_norm="head", attn_scale=128**-0.5,
    )  # fmt: skip


def other(hidden: int, layers: int, heads: int, kv_heads: int, dim: int, inner: int, vocab: int, bias: bool) -> ModelConfig:
    """A Llama's or, with a bias, a Qwen2.5's."""
    return replace(
        qwen3(hidden, layers, heads, inner), vocab_size=vocab, num_kv_heads=kv_heads, head_dim=dim, qk_norm="none",
        rope=RopeConfig(1e6, dim, max_position=40960), qkv_bias=bias, attn_scale=dim**-0.5,
    )  # fmt: skip


MODELS = {"0.6b": qwen3(1024, 28, 16, 3072), "8b": qwen3(4096, 36, 32, 12288), "32b": qwen3(5120, 64, 64, 25600)}
MODELS |= {
    "1.7b": qwen3(2048, 28, 16, 6144), "4b": qwen3(2560, 36, 32, 9728),
    "llama1b": other(2048, 16, 32, 8, 64, 8192, 128256, False), "llama8b": other(4096, 32, 32, 8, 128, 14336, 128256, False),
    "qwen2.5_7b": other(3584, 28, 28, 4, 128, 18944, 152064, True),
    "mistral7b": other(4096, 32, 32, 8, 128, 14336, 32768, False),
    "gemma2_2b": replace(
        other(2304, 26, 8, 4, 256, 9216, 256000, False), family="gemma2", norm_place="sandwich", activation="gelu_tanh",
        attn_softcap=50.0, logit_softcap=30.0, windows=tuple(4096 * (layer % 2 == 0) for layer in range(26)),
    ),
}  # fmt: skip
MODELS |= {f"{name}-{kind}": config for name, config in MODELS.items() for kind in ("fp8", "int8", "int4")}
TIED = {name for name in MODELS if name.startswith(("0.6b", "1.7b", "4b", "llama1b", "gemma2"))}


def kinds(name: str) -> Kinds:
    kind = name.partition("-")[2] or "float"
    return (kind, kind, kind, kind, "float" if kind == "float" or name in TIED else "int8")  # type: ignore[return-value]


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}]", *words, flush=True)


# ------------------------------------------------------------------------------------------------ the model and its input


def narrow_meta(rows: int, columns: int, kind: str) -> Weight:
    """What `quantized` makes, without its numbers."""
    data = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}[kind]
    four = kind == "int4"
    groups, dtypes = columns // 128 if four else 1, (SCALES[kind], torch.uint8)
    scales, zeros = (torch.empty(rows, groups, dtype=dtype, device="meta") for dtype in dtypes)
    packed = torch.empty(rows, columns // (2 if four else 1), dtype=data, device="meta")
    return Weight(packed, scales, zeros if four else None, kind, 128 if four else 0)  # type: ignore[arg-type]


def random_weights(
    config: ModelConfig, tied: bool, device: torch.device, ranks: int = 1, kind: str = "float"
) -> DecoderWeights:  # fmt: skip
    """`config` is what one of `ranks` has; `kind` is that of the layers' matrices."""

    def draw(*shape: int, mean: float = 0.0, std: float = 0.02) -> Tensor:
        tensor = torch.empty(shape, dtype=BF16, device=device)
        return tensor if device.type == "meta" else tensor.normal_(mean, std)

    hidden, q, kv, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size

    def matrix(rows: int, columns: int, kind: str = kind) -> Weight:
        if kind == "float":
            return Weight(draw(rows, columns))
        if device.type == "meta":
            return narrow_meta(rows, columns, kind)
        return smallest(quantized(draw(rows, columns), kind))

    def norm(width: int) -> Tensor:
        return draw(width, mean=1.0, std=0.1)

    normed, sandwich = config.qk_norm == "head", config.norm_place == "sandwich"

    def layer() -> LayerWeights:
        return LayerWeights(
            qkv=matrix(q + 2 * kv, hidden), o=matrix(hidden, q), gate_up=matrix(2 * inner, hidden), down=matrix(hidden, inner),
            input_norm=norm(hidden), mlp_norm=norm(hidden), qkv_bias=draw(q + 2 * kv) if config.qkv_bias else None,
            q_norm=norm(config.head_dim) if normed else None, k_norm=norm(config.head_dim) if normed else None,
            post_attn_norm=norm(hidden) if sandwich else None, post_mlp_norm=norm(hidden) if sandwich else None,
        )  # fmt: skip

    layers = [layer() for _ in range(config.num_layers)]
    rows = Shard(0, ranks).vocab_rows(config.vocab_size)
    embedding = draw(rows, hidden)
    head = Weight(embedding) if tied else matrix(rows, hidden, "float" if kind == "float" else "int8")
    return DecoderWeights(embedding, layers, norm(hidden), head)


class Cache(KVCache):
    """A cache for timing: `layers` pairs of tensors, random."""

    def __init__(self, config: ModelConfig, num_blocks: int, device: torch.device):
        self.num_blocks, self.block_size = num_blocks, BLOCK
        shape = (num_blocks, BLOCK, config.num_kv_heads, config.head_dim)
        self.k, self.v = ([torch.empty(shape, dtype=BF16, device=device) for _ in range(config.num_layers)] for _ in range(2))
        self.scales = [(None, None)] * config.num_layers
        if device.type != "meta":
            for tensor in (*self.k, *self.v):
                tensor.normal_()


class Input:
    """Batches over one cache: sequence i owns blocks of its own, scattered; slots in random order."""

    def __init__(
        self, config: ModelConfig, max_rows: int, max_context: int, num_blocks: int, device: torch.device, ranks: int = 1
    ):  # fmt: skip
        self.config, self.device = config, device
        vocab = config.vocab_size // ranks  # the first rank's ids, which it has rows for
        width = -(-max_context // BLOCK)
        generator = torch.Generator().manual_seed(0)
        self.slots = torch.randperm(max_rows, generator=generator).int()
        tables = torch.zeros(max_rows + 1, MAX_LEN // BLOCK, dtype=torch.int32)
        order = torch.randperm(num_blocks, generator=generator)[: max_rows * width].view(max_rows, width).int()
        tables[self.slots.long(), :width] = order
        self.tables, self.host_tables = tables.to(device), tables
        self.ids = torch.randint(0, vocab, (max_rows,), generator=generator).int()

    def batch(self, lengths: list[int]) -> ForwardBatch:
        rows = len(lengths)
        slots = self.slots[:rows]
        mapping = [
            int(self.host_tables[s, (n - 1) // BLOCK]) * BLOCK + (n - 1) % BLOCK if n else -1
            for n, s in zip(lengths, slots.tolist(), strict=True)
        ]
        up: Callable[[Tensor], Tensor] = lambda t: t.to(self.device)  # noqa: E731
        return ForwardBatch(
            token_ids=up(self.ids[:rows]), positions=up(torch.tensor([max(n - 1, 0) for n in lengths]).int()),
            slot_mapping=up(torch.tensor(mapping)), block_tables=self.tables, seq_slots=up(slots),
            query_start=up(torch.arange(rows + 1).int()), seq_lens=up(torch.tensor(lengths).int()), num_decodes=rows,
            query_lens=[1] * rows, context_lens=list(lengths),
        )  # fmt: skip


@torch.inference_mode()
def reference(config: ModelConfig, weights: DecoderWeights, batch: ForwardBatch, cache: Cache) -> tuple[Tensor, list[Tensor]]:
    """Logits and new keys of every layer in float32, from the same bfloat16 weights and older cache; writes nothing."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    lens = batch.seq_lens.tolist()
    rows = len(lens)
    inv = 1e6 ** -(torch.arange(0, dim, 2, device=batch.seq_lens.device).float() / dim)
    angle = batch.positions.float()[:, None] * inv[None]
    cos, sin = (torch.cat((f(angle), f(angle)), -1)[:, None] for f in (torch.cos, torch.sin))

    def rms(x: Tensor, w: Tensor | None) -> Tensor:
        return x if w is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * w.float()

    def rope(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin

    hidden = weights.embedding[batch.token_ids.long()].float()
    keys = []
    for index, layer in enumerate(weights.layers):
        x = F.linear(rms(hidden, layer.input_norm), dequantized(layer.qkv, torch.float32))
        x = (x if layer.qkv_bias is None else x + layer.qkv_bias.float()).view(rows, -1, dim)
        q, k = rope(rms(x[:, :heads], layer.q_norm)), rope(rms(x[:, heads : heads + kv_heads], layer.k_norm))
        v = x[:, heads + kv_heads :]
        keys.append(k)
        out = torch.zeros(rows, heads, dim, device=hidden.device)
        for b, n in enumerate(lens):
            if n:
                table = batch.block_tables[batch.seq_slots[b].long(), : -(-n // BLOCK)].long()
                old_k, old_v = (c[index][table].flatten(0, 1)[: n - 1].float() for c in (cache.k, cache.v))
                all_k, all_v = torch.cat((old_k, k[b : b + 1])), torch.cat((old_v, v[b : b + 1]))
                scores = torch.einsum("kgd,tkd->kgt", q[b].view(kv_heads, -1, dim), all_k) * config.attn_scale
                scores = capped(scores, config.attn_softcap)
                out[b] = torch.einsum("kgt,tkd->kgd", scores.softmax(-1), all_v).reshape(heads, dim)
        hidden = hidden + rms(F.linear(out.flatten(1), dequantized(layer.o, torch.float32)), layer.post_attn_norm)
        gate, up = F.linear(rms(hidden, layer.mlp_norm), dequantized(layer.gate_up, torch.float32)).chunk(2, -1)
        gate = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
        hidden = hidden + rms(F.linear(gate * up, dequantized(layer.down, torch.float32)), layer.post_mlp_norm)
    final = rms(hidden, weights.final_norm)
    logits = torch.cat([F.linear(final, part) for part in dequantized(weights.lm_head, torch.float32).split(32768)], -1)
    return capped(logits, config.logit_softcap), keys


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


# ------------------------------------------------------------------------------------------------ paths


MANY_ROWS = [n for n in ROW_STEPS if n > decode_tiles.ALL_ROWS]
KINDS = {  # path -> (tile of a shape, numbers of rows)
    "gemv": (decode_tiles.gemv_tile, [1]),
    "gemm": (decode_tiles.gemm_tile, [n for n in ROW_STEPS if 1 < n <= 64]),
    "ahead": (tile_search.ahead_tile, [n for n in ROW_STEPS if 1 < n <= 64]),
    "ring": (decode_tiles.ring_tile, [n for n in ROW_STEPS if 1 < n <= 64]),
    "wide": (decode_tiles.wide_tile, MANY_ROWS),
    "two": (decode_tiles.wide_tile, MANY_ROWS),
}


def forced(config: ModelConfig, kind: str) -> dict[int, StepTiles]:
    """A table with one kind of tiles only."""
    make, steps = KINDS[kind]
    shapes = decode_tiles.product_shapes(config).items()
    tiles: dict[int, dict] = {rows: {name: make(shape, rows) for name, shape in shapes} for rows in steps}
    table = {rows: replace(decode_tiles.default_tiles(config, rows), **tiles[rows]) for rows in steps}
    return {rows: decode_tiles.with_attention_in_two(step) for rows, step in table.items()} if kind == "two" else table


def cublas_step(
    config: ModelConfig, weights: DecoderWeights, device: torch.device, group: EchoGroup | None = None
) -> Callable[[ForwardBatch, Cache], Tensor]:
    from headrace.attention.triton_backend import TritonAttention

    decoder = Decoder(config, weights, TritonAttention(config, device), max_model_len=MAX_LEN, group=group)
    return lambda batch, kv: decoder.logits(decoder.forward(batch, kv))


def capture(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """(graph, its output). By hand: the context manager collects garbage and empties the allocator each time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        graph.capture_begin()
        try:
            out = step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    torch.cuda.synchronize()
    return graph, out


def graph_ms(graph: torch.cuda.CUDAGraph, repeats: int = 11, inner: int = 3) -> float:
    """Median milliseconds of a replay."""
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            graph.replay()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / inner for a, b in pairs)


# ------------------------------------------------------------------------------------------------ compiling ahead


def init_compiler(capability: int) -> None:
    """A worker process compiles for a card that it does not touch: a stand-in driver, meta tensors, no launches."""
    sys.path.insert(0, str(Path(__file__).parent))
    import compile_ahead

    compile_ahead.install(capability)


def compile_tiles(job: tuple[str, int, int, dict[int, StepTiles], int]) -> str:
    """Compile the kernels of one step; -> an error's text or ''."""
    name, rows, context, table, ranks = job
    try:
        device = torch.device("meta")
        config = replace(MODELS[name], num_layers=1)
        weights = random_weights(config, name in TIED, device, ranks, kinds(name)[0])
        group = None if ranks == 1 else EchoGroup(ranks, rows, config.hidden_size, BF16, device)
        fast = FastDecode(config, weights, rows, device, table, max_model_len=MAX_LEN, group=group)
        batch = Input(config, rows, context, rows * -(-context // BLOCK), device).batch([context] * rows)
        fast.forward(batch, Cache(config, 64, device))
    except Exception as error:
        return f"{name} {rows}: {type(error).__name__} {str(error)[:200]}"
    return ""


def tuning_jobs(name: str, rows: int, context: int, ranks: int) -> list[tuple[str, int, int, dict[int, StepTiles], int]]:
    start, shapes = decode_tiles.default_tiles(MODELS[name], rows, kinds=kinds(name)), decode_tiles.product_shapes(MODELS[name])
    old = tile_search.attention_candidates(rows)
    parts = decode_tiles.num_splits(start.qkv) > 1  # which attention in two kernels excludes
    trials = [
        replace(start, attention=tile, attention_programs=n, ring_attention=None)
        for tile, n in old if not (parts and isinstance(tile, SplitTile))
    ]  # fmt: skip
    trials += [replace(start, ring_attention=tile) for tile in tile_search.ring_attention_candidates(MODELS[name])]
    for product, shape in shapes.items():
        kind = dict(zip(decode_tiles.PRODUCTS, kinds(name), strict=True))[product]
        trials += [replace(start, **{product: tile}) for tile in tile_search.candidates(shape, rows, kind)]
    return [(name, rows, context, {rows: trial}, ranks) for trial in trials]


# ------------------------------------------------------------------------------------------------ the parts of a run


class Bench:
    def __init__(self, name: str, args: argparse.Namespace, gbs: float, results: list[dict]):
        self.name, self.args, self.gbs, self.results = name, args, gbs, results
        self.config, self.device = MODELS[name], DEVICE
        torch.manual_seed(0)
        self.weights = random_weights(self.config, name in TIED, self.device, args.ranks, kinds(name)[0])
        rows, context = max(args.batches), max(args.contexts)
        blocks = rows * -(-context // BLOCK)
        self.kv = Cache(self.config, blocks + 8, self.device)
        self.input = Input(self.config, rows, context, blocks, self.device, args.ranks)
        self.copy_engine = has_copy_engine(self.config, BF16, DEVICE)
        self.table = decode_tiles.default_table(self.config, self.copy_engine, kinds(name))
        for path in (table_file(SHIPPED, name), table_file(args.tables, name)):
            if path is not None and path.exists():
                self.table.update(from_json(path.read_text()))
                say(f"tiles from {path}")
        self.group = None
        if args.ranks > 1:
            self.group = EchoGroup(args.ranks, max(args.batches), self.config.hidden_size, BF16, self.device)
        self.weight_bytes = self.weights.num_bytes - (0 if name in TIED else self.weights.embedding.nbytes)
        say(f"{name}: {self.weight_bytes / 1e9:.3f} GB of weights a step")

    def fast(self, table: dict[int, StepTiles], rows: int, group: EchoGroup | None) -> Callable[[ForwardBatch, Cache], Tensor]:
        return FastDecode(
            self.config, self.weights, rows, self.device, table, max_model_len=MAX_LEN, group=group
        ).forward  # fmt: skip

    def paths(
        self, rows: int, only: list[str], group: EchoGroup | None = None
    ) -> dict[str, Callable[[ForwardBatch, Cache], Tensor]]:
        found: dict[str, Callable[[ForwardBatch, Cache], Tensor]] = {}
        for path in only:
            if path == "cublas":
                found[path] = cublas_step(self.config, self.weights, self.device, group)
            elif path == "table":
                if rows <= max(self.table):
                    found[path] = self.fast(self.table, rows, group)
            elif kinds(self.name) != decode_tiles.FLOAT:  # those tiles are made for bfloat16
                continue
            elif min(KINDS[path][1]) <= rows <= max(KINDS[path][1]) and (self.copy_engine or path not in ("wide", "two")):
                found[path] = self.fast(forced(self.config, path), rows, group)
        return found

    def limit_ms(self, rows: int, context: int) -> float:
        cache = 4 * self.config.num_layers * rows * context * self.config.kv_size
        return (self.weight_bytes + cache) / self.gbs / 1e6

    def check(self) -> None:
        """Every path against float32 on ragged batches with padding; the new keys in the cache; nothing else changed."""
        context = min(max(self.args.contexts), 700)
        for rows in check_rows(self.args.batches):
            lengths = [context - 37 * i % (context - 1) for i in range(rows)]
            if rows > 3:
                lengths[1], lengths[-1], lengths[2] = 1, 0, 65
            batch = self.input.batch(lengths)
            expected, keys = reference(self.config, self.weights, batch, self.kv)
            live = [i for i, n in enumerate(lengths) if n]
            places = batch.slot_mapping[live]
            copied = rows in (8, 100) and 2 * self.config.num_layers * self.kv.k[0].nbytes < 12e9
            saved = [(k.clone(), v.clone()) for k, v in zip(self.kv.k, self.kv.v, strict=True)] if copied else []
            for path, step in self.paths(rows, self.args.paths).items():
                for k in self.kv.k:
                    k.view(-1, *k.shape[2:])[places] = float("nan")
                logits = step(batch, self.kv)[live].float()
                error = float((logits - expected[live]).norm() / expected[live].norm())
                top = float((logits.argmax(-1) == expected[live].argmax(-1)).float().mean())
                worst = max(
                    float((k.view(-1, *k.shape[2:])[places].float() - ref[live]).norm() / ref[live].norm())
                    for k, ref in zip(self.kv.k, keys, strict=True)
                )
                stray = 0
                for index, (k, v) in enumerate(saved):
                    k.view(-1, *k.shape[2:])[places] = self.kv.k[index].view(-1, *k.shape[2:])[places]
                    v.view(-1, *v.shape[2:])[places] = self.kv.v[index].view(-1, *v.shape[2:])[places]
                    stray += int(not torch.equal(k, self.kv.k[index])) + int(not torch.equal(v, self.kv.v[index]))
                good = error < 0.06 and worst < 0.06 and not stray
                say(f"{self.name} check {rows:3d} rows {path:7s} logits {error:.4f} argmax {top:.2f} keys {worst:.4f} "
                    f"stray {stray} {'ok' if good else 'WRONG'}")  # fmt: skip
                self.results.append({"kind": "check", "model": self.name, "rows": rows, "path": path, "error": error,
                                     "keys": worst, "stray": stray, "ok": good})  # fmt: skip

    def repeat(self, rows: int, replays: int) -> None:
        """All replays of a graph give the same bits."""
        batch = self.input.batch([max(self.args.contexts) - 5 * i % max(self.args.contexts) for i in range(rows)])
        for path, step in self.paths(rows, self.args.paths, self.group).items():
            graph, out = capture(lambda step=step: step(batch, self.kv))
            first, different = out.clone(), torch.zeros((), dtype=torch.int64, device=self.device)
            for _ in range(replays):
                graph.replay()
                different += (out.view(torch.uint8) != first.view(torch.uint8)).any()
            count = int(different)
            say(f"{self.name} repeat {rows:3d} rows {path:7s} {replays} replays, {count} differ {'WRONG' if count else 'ok'}")
            self.results.append({"kind": "repeat", "model": self.name, "rows": rows, "path": path, "different": count})

    def tune(self, rows: int, seconds: float) -> None:
        context = self.args.contexts[0]
        batch = self.input.batch([context] * rows)

        def measure(tiles: StepTiles) -> float:
            step = self.fast({rows: tiles}, rows, self.group)
            graph, _ = capture(lambda: step(batch, self.kv))
            return graph_ms(graph, 7, 2)

        def progress(line: str) -> None:
            say(f"{self.name} tune {rows} rows: {line}")

        self.table[rows], took = tile_search.tune(
            self.table[rows], self.config, rows, measure, seconds, progress, kinds(self.name)
        )
        self.results.append({"kind": "tune", "model": self.name, "rows": rows, "ms": took})

    def time(self, rows: int, context: int) -> None:
        limit = self.limit_ms(rows, context)
        batch = self.input.batch([context] * rows)
        row = {"kind": "time", "model": self.name, "rows": rows, "context": context, "limit_ms": limit}
        for path, step in self.paths(rows, self.args.paths, self.group).items():
            try:
                graph, _ = capture(lambda step=step: step(batch, self.kv))
                row[path] = graph_ms(graph)
            except Exception as error:
                say(f"{self.name} {rows} rows {path}: {type(error).__name__} {str(error)[:300]}")
        self.results.append(row)

    def profile(self, rows: int) -> None:
        """How much each kernel of a layer adds to the step: from its predecessor's end to its own, mean over layers."""
        from torch.profiler import ProfilerActivity, profile

        batch = self.input.batch([self.args.contexts[0]] * rows)
        step = self.fast(self.table, rows, self.group)
        graph, _ = capture(lambda: step(batch, self.kv))
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
        events = sorted((e for e in trace.events() if "kernel" in e.name), key=lambda e: e.time_range.end)
        two = isinstance(self.table[min(n for n in self.table if n >= rows)].attention, SplitTile)
        add = [] if self.group is None else ["all-reduce"]
        layer = ["qkv", *(["rope"] if two else []), "attention", "o", *add, "gate_up", "down", *add]
        names = ["embed", *add, *(layer * self.config.num_layers), "lm_head"]
        per_step = len(names)
        events = events[-per_step:]
        added: dict[str, list[float]] = {}
        if len(events) != per_step:
            say(f"profile: {len(events)} kernels, expected {per_step}")
            return
        for before, event, name in zip(events[:-1], events[1:], names[1:], strict=True):
            added.setdefault(name, []).append(event.time_range.end - before.time_range.end)
        parts = {name: sum(times) / len(times) for name, times in added.items()}
        say(f"{self.name} profile {rows} rows, us added: " + "  ".join(f"{k} {v:.2f}" for k, v in parts.items()))
        self.results.append({"kind": "profile", "model": self.name, "rows": rows, "us": parts})


def table_file(folder: str | Path | None, name: str) -> Path | None:
    """Where the engine looks for the table too, if `folder` is `tiles` in Headrace's cache directory."""
    return None if folder is None else Path(folder) / tile_file_name(torch.cuda.get_device_name(0), MODELS[name], kinds(name))


def worthwhile(table: dict[int, StepTiles], times: list[dict]) -> dict[int, StepTiles]:
    """The table up to the largest rows at which it was measured faster than cuBLAS; at least up to 64."""
    faster = [r["rows"] for r in times if "table" in r and "cublas" in r and r["table"] < r["cublas"]]
    last = max([64, *faster])
    return {rows: tiles for rows, tiles in table.items() if rows <= last}


def print_table(results: list[dict], gbs: float, paths: list[str]) -> None:
    print(f"\n{torch.cuda.get_device_name(0)}, copy {gbs:.0f} GB/s; ms (% of the limit)")
    print("model   rows  ctx  limit  " + "".join(f"{p:>17s}" for p in paths) + "   best GB/s")
    for r in (r for r in results if r["kind"] == "time"):
        cells = "".join(f"{r[p]:9.4f} ({100 * r['limit_ms'] / r[p]:3.0f} %)" if p in r else " " * 17 for p in paths)
        best = min((r[p] for p in paths if p in r), default=float("nan"))
        shape = f"{r['model']:6s} {r['rows']:5d} {r['context']:5d}"
        print(f"{shape} {r['limit_ms']:6.3f} {cells}   {gbs * r['limit_ms'] / best:6.0f}")


def check_rows(batches: list[int]) -> list[int]:
    """How many rows the checks have: around those that are timed."""
    return [n for n in (1, 3, 8, 24, 64, 100, 256) if min(batches) / 2 <= n <= max(batches)]


def repeat_rows(batches: list[int]) -> list[int]:
    return [n for n in (1, 8, 32, 256) if min(batches) / 2 <= n <= max(batches)]


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda s: s.split(","), default=["0.6b", "8b"])
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=numbers, default=[384, 1024], help="tiles are searched at the first")
    parser.add_argument("--paths", type=lambda s: s.split(","), default=["cublas", *KINDS, "table"])
    parser.add_argument("--tune", type=numbers, default=[], help="rows to search tiles for")
    parser.add_argument("--tune-seconds", type=float, default=20.0, help="of each search")
    parser.add_argument("--ranks", type=int, default=1, help="time the part of one of so many")
    parser.add_argument("--profile", type=numbers, default=[])
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--limit", type=float, default=230.0, help="seconds after which nothing new is begun")
    parser.add_argument("--tables", help="folder of tile tables: read before, written after")
    parser.add_argument("--json")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--compile-only", type=int, metavar="SM", help="compile for this capability (90) and end")
    args = parser.parse_args()
    if max(args.contexts) > MAX_LEN:
        parser.error(f"contexts may be at most {MAX_LEN}")
    MODELS.update({name: Shard(0, args.ranks).config(MODELS[name]) for name in args.models})
    return args


def compile_jobs(args: argparse.Namespace) -> list[tuple[tuple[str, bool], list]]:
    """((model, of the search), jobs) in the order in which they are needed."""
    groups: list[tuple[tuple[str, bool], list]] = []
    for name in args.models:
        tables = [decode_tiles.default_table(MODELS[name], kinds=kinds(name))]
        tables += [forced(MODELS[name], path) for path in KINDS if path in args.paths and kinds(name) == decode_tiles.FLOAT]
        sizes = dict.fromkeys([*args.batches, *check_rows(args.batches), *repeat_rows(args.batches)])
        needed = [
            (name, n, args.contexts[0], table, r)
            for r in sorted({1, args.ranks})
            for n in sizes
            for table in tables
            if min(table) <= n <= max(table)
        ]
        groups.append(((name, False), needed))
        groups.append(
            ((name, True), [job for rows in args.tune for job in tuning_jobs(name, rows, args.contexts[0], args.ranks)])
        )
    return groups


def run_model(
    name: str, args: argparse.Namespace, gbs: float, results: list[dict], seconds: float, compiled: Callable[[str, bool], None]
) -> None:
    """All that was asked for of one model, as far as it gets in `seconds`; `compiled` waits for (model, also the search)."""
    ends = time.perf_counter() + seconds
    bench = Bench(name, args, gbs, results)
    compiled(name, False)
    parts: list[Callable[[], None]] = [bench.check]
    parts += [partial(bench.repeat, rows, args.replays) for rows in repeat_rows(args.batches)]
    search = min(args.tune_seconds, seconds / 2 / max(1, len(args.tune)))
    parts += [partial(compiled, name, True)] if args.tune else []
    parts += [partial(bench.tune, rows, search) for rows in args.tune]
    parts += [partial(bench.time, rows, context) for context in args.contexts for rows in args.batches]
    parts += [partial(bench.profile, rows) for rows in args.profile]
    for part in parts:
        if time.perf_counter() > ends:
            say(f"{name}: out of time")
            break
        try:
            with torch.inference_mode():
                part()
        except Exception:
            traceback.print_exc()
    tiles = tile_search.to_json(worthwhile(bench.table, [r for r in results if r["kind"] == "time" and r["model"] == name]))
    results.append({"kind": "table", "model": name, "tiles": json.loads(tiles)})
    saved = table_file(args.tables, name)
    if saved is not None:
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_text(tiles + "\n")


def run(args: argparse.Namespace, compiled: Callable[[str, bool], None]) -> list[dict]:
    results: list[dict] = []
    card = torch.cuda.get_device_name(0)
    gbs = measure_limits(DEVICE, BF16).bandwidth / 1e9
    results.append(about() | {"kind": "card", "name": card, "copy_gbs": gbs})
    say(f"{card}: copy {gbs:.0f} GB/s")
    for position, name in enumerate(args.models):
        gc.collect()
        torch.cuda.empty_cache()
        left = args.limit - (time.perf_counter() - BEGAN)
        run_model(name, args, gbs, results, left / (len(args.models) - position), compiled)
    print_table(results, gbs, args.paths)
    return results


def main() -> None:
    args = parse()
    groups = compile_jobs(args)
    # forked before this process touches the card; spawning would import torch once per worker
    pool = multiprocessing.get_context("fork").Pool(args.jobs, init_compiler, (args.compile_only or 90,))
    pending = {key: pool.map_async(compile_tiles, jobs, chunksize=1) for key, jobs in groups}

    def compiled(name: str, search: bool) -> None:
        errors = [e for e in pending[name, search].get() if e]
        say(f"{name}: kernels compiled{' for the search' if search else ''}", *errors)

    if args.compile_only:
        for key in pending:
            compiled(*key)
        return
    results = run(args, compiled)
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    pool.terminate()


if __name__ == "__main__":
    main()
