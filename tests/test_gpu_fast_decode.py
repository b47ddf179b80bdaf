"""The fused decode step on the card: against the float32 CPU decoder, in graphs, at sizes and offsets that only a card holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fast_decode_cases import CONFIGS, PLAIN, decode_batch, moved, random_weights, states_of
from headrace.attention.torch_backend import TorchAttention
from headrace.cache.kv_cache import KVCache
from headrace.fast_decode.attention import AttentionTile, decode_attention
from headrace.fast_decode.attention_reference import HeadShape, decode_attention_reference
from headrace.fast_decode.epilogues import glu_reference, residual_reference
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.products import MAX_ROWS, glu, project, residual
from headrace.fast_decode.ring_tile import RingAttention, RingTile
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.takes import has_copy_engine
from headrace.fast_decode.tiles import ROW_STEPS, default_table, default_tiles, gemv_tile, product_shapes, ring_tile
from headrace.fast_decode.wide_gemm import WideTile
from headrace.kernels.split import SplitSpace
from headrace.model.config import RopeConfig
from headrace.model.decoder import Decoder
from headrace.model.weight import Weight
from tile_search import ahead_tile

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LENGTHS = [150, 1, 17, 400, 64, 65, 63, 129]
WIDE = replace(PLAIN, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=3001,
               rope=RopeConfig(1e4, 64), attn_scale=0.125, max_position=512)  # fmt: skip


@pytest.fixture
def card() -> torch.device:
    return torch.device("cuda", 0)


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    result, expected = result.float().cpu(), expected.float().cpu()
    return float((result - expected).norm() / expected.norm())


def forced(config, make):
    most = 1 if make is gemv_tile else 64
    tiles = {
        rows: {name: make(shape, rows) for name, shape in product_shapes(config).items()} for rows in ROW_STEPS if rows <= most
    }
    return {rows: replace(default_tiles(config, rows), **products) for rows, products in tiles.items()}


def check(config, card, rows: int, table=None, block_size: int = 64) -> None:
    """Logits and cache against the float32 decoder on the CPU with the same (bfloat16) weights and older cache."""
    lengths = (LENGTHS * 32)[:rows]
    weights = random_weights(config, dtype=BF16)
    batch, kv = decode_batch(config, lengths, block_size, BF16)
    on_card, kv_card = moved(batch, card), moved(kv, card)
    wide, kv_wide = moved(weights, torch.device("cpu"), torch.float32), moved(kv, torch.device("cpu"), torch.float32)
    decoder = Decoder(config, wide, TorchAttention())
    expected = decoder.logits(decoder.forward(batch, kv_wide))
    fast = FastDecode(config, moved(weights, card), rows, card, table)
    error = relative(fast.forward(on_card, kv_card), expected)
    assert error < 0.03, f"{rows} rows: logits off by {error:.4f} of their norm"
    for ours, theirs in zip(*((*kept.k, *kept.v, *states_of(kept)) for kept in (kv_card, kv_wide)), strict=True):
        if theirs.numel():  # a layer without keys and values has none
            assert relative(ours, theirs) < 0.01, f"{rows} rows: keys, values or states off by {relative(ours, theirs):.4f}"
    assert not fast.work.space.tickets.any()


@pytest.mark.parametrize("rows", [1, 3, 8, 33])
@pytest.mark.parametrize("name", CONFIGS)
def test_families(name: str, rows: int, card) -> None:
    check(replace(CONFIGS[name], max_position=512), card, rows, block_size=16)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 16, 17, 32, 64, 65, 130, 256])
def test_rows(rows: int, card) -> None:
    if rows > 64 and not has_copy_engine(WIDE, BF16, card):
        pytest.skip("more rows than this path takes on a card without a copy engine")
    check(WIDE, card, rows)


@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_block_sizes(block_size: int, card) -> None:
    check(WIDE, card, 3, block_size=block_size)


@pytest.mark.parametrize(("make", "rows"), [(gemv_tile, 1), (ahead_tile, 2), (ahead_tile, 7), (ahead_tile, 8), (ring_tile, 2), (ring_tile, 11), (ring_tile, 32), (ring_tile, 61)])
def test_kinds_of_tiles(make, rows: int, card) -> None:
    check(WIDE, card, rows, forced(WIDE, make))


@pytest.mark.parametrize(("block_n", "block_k", "splits", "stages", "behind"), [(64, 128, 2, 3, False), (128, 64, 4, 8, True), (64, 64, 8, 6, True)])
@pytest.mark.parametrize(("rows", "columns", "width"), [(8, 1024, 4096), (29, 200, 1000), (64, 2560, 2048)])
def test_parts_of_rings_join_the_residual(rows: int, columns: int, width: int, block_n: int, block_k: int, splits: int, stages: int, behind: bool, card) -> None:
    """And of what multiplies in their place where adapters add to the product."""
    draw = torch.Generator(card).manual_seed(0)
    shapes = (rows, width), (columns, width), (columns,), (columns,)
    x, weight, norm, bias = (torch.randn(*shape, generator=draw, device=card).to(BF16) for shape in shapes)
    tile, before = RingTile(block_n, block_k, splits, stages, behind), torch.randn(rows, columns, generator=draw, device=card)
    expected = residual_reference(x.cpu(), Weight(weight.cpu()), before.cpu(), norm.cpu(), 1.0, 0.5, bias.cpu())
    space = SplitSpace(tile.partial_elements(rows, columns), -(-columns // block_n), card)
    for instead in (tile, tile.otherwise(x, False)) if rows > 32 else (tile,):
        total, normed = before.clone(), torch.empty(rows, columns, dtype=BF16, device=card)
        squares = torch.empty(rows, -(-columns // block_n), device=card)
        residual(x, Weight(weight), total, normed, squares, norm, instead, space, norm_offset=1.0, scale=0.5, bias=bias)
        for ours, theirs in zip((total, normed, squares.sum(1, keepdim=True)), expected, strict=True):
            assert relative(ours, theirs) < 5e-3
        assert not space.tickets.any()


@pytest.mark.parametrize("tile", [RingTile(64, 128, 2, 3), RingTile(64, 256, 4, 2, True), RingTile(64, 64, 8, 4, True), RingTile(128, 64, 4, 4)])
@pytest.mark.parametrize(("rows", "columns", "width"), [(2, 1024, 3072), (8, 1024, 2048), (11, 200, 1000), (32, 2560, 2048)])
def test_parts_of_rings_join_in_clusters(rows: int, columns: int, width: int, tile: RingTile, card) -> None:
    """The same bits as by memory and tickets, again and again."""
    draw = torch.Generator(card).manual_seed(0)
    shapes = (rows, width), (columns, width), (columns,)
    x, weight, norm = (torch.randn(*shape, generator=draw, device=card).to(BF16) for shape in shapes)
    before = torch.randn(rows, columns, generator=draw, device=card)
    space, found = SplitSpace(tile.partial_elements(rows, columns), -(-columns // tile.block_n), card), []
    for instead in (tile, *[replace(tile, cluster=True)] * 20):
        total, normed = before.clone(), torch.empty(rows, columns, dtype=BF16, device=card)
        squares = torch.empty(rows, -(-columns // tile.block_n), device=card)
        residual(x, Weight(weight), total, normed, squares, norm, instead, space)
        found.append((total, normed, squares))
    assert relative(found[0][0], before + x.float() @ weight.float().T) < 5e-3
    assert all(torch.equal(ours, first) for others in found[1:] for ours, first in zip(others, found[0], strict=True))


@pytest.mark.parametrize("tile", [RingTile(64, 128, 1, 2), RingTile(64, 64, 1, 9, True)])
@pytest.mark.parametrize(("rows", "columns", "width"), [(3, 192, 1000), (40, 1000, 2048)])
def test_gate_and_up_by_short_rings(rows: int, columns: int, width: int, tile: RingTile, card) -> None:
    draw = torch.Generator(card).manual_seed(0)
    x, weight = (torch.randn(*shape, generator=draw, device=card).to(BF16) for shape in ((rows, width), (2 * columns, width)))
    squares = x.float().square().sum(1, keepdim=True)
    expected = glu_reference(x.cpu(), Weight(weight.cpu()), squares.cpu(), 1e-6, "gelu_tanh")
    for instead in (tile, tile.otherwise(x, True)) if rows > 32 else (tile,):
        out = torch.empty(rows, columns, dtype=BF16, device=card)
        glu(x, Weight(weight), out, instead, sumsq=squares, eps=1e-6, activation="gelu_tanh")
        assert relative(out, expected) < 5e-3


TURNS = [(16, 8, 128, True, 0, 0.0), (32, 8, 64, False, 0, 0.0), (28, 4, 128, False, 0, 0.0), (8, 4, 256, False, 100, 50.0)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "normed", "window", "cap"), TURNS)
def test_attention_in_turns(heads: int, kv_heads: int, dim: int, normed: bool, window: int, cap: float, card) -> None:
    """Fewer tiles than are weighed together, more than have place, ends of blocks, padding; nothing behind a sequence's end
    counts, and the cache gets what the other kernel writes."""
    lengths = [1, 2, 63, 64, 65, 0, 200, 1000, 384]
    config = replace(PLAIN, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, num_layers=1)
    batch, kv = decode_batch(config, lengths, 64, BF16)
    for tensor in (kv.k[0], kv.v[0]):
        tensor.view(-1, kv_heads, dim)[batch.slot_mapping[batch.slot_mapping >= 0]] = float("nan")
    batch = moved(batch, card)
    angle = torch.rand(1024, dim // 2, device=card) * 6
    norms = [(torch.randn(dim, device=card) * 0.1 + 1).to(BF16) if normed else None for _ in range(2)]
    options = {
        "block_tables": batch.block_tables, "seq_slots": batch.seq_slots, "seq_lens": batch.seq_lens,
        "slot_mapping": batch.slot_mapping, "cos": angle.cos(), "sin": angle.sin(), "q_norm": norms[0], "k_norm": norms[1],
        "heads": HeadShape(heads, kv_heads, dim, dim**-0.5, cap), "window": window,
    }  # fmt: skip
    # the last ones: parts of a sequence that join in a cluster
    for slabs, chunk, ring, splits, few in ((1, 2, 2, 1, 0), (2, 1, 1, 3, 0), (2, 3, 3, 2, 0), (1, 1, 3, 8, 0), (2, 3, 3, 2, 1), (2, 2, 2, 4, 1), (1, 1, 3, 8, 1)):
        if 4 * 64 * dim * ring + few * 8 * splits * heads // kv_heads * dim > 212 * 1024:
            continue
        qkv = torch.randn(slabs, len(lengths), (heads + 2 * kv_heads) * dim, device=card)
        ours, theirs = (moved(kv, card) for _ in range(2))
        out = torch.full((len(lengths), heads * dim), float("nan"), device=card, dtype=BF16)
        space = SplitSpace(splits * len(lengths) * heads * dim, len(lengths) * kv_heads, card, lse=splits * len(lengths) * heads)
        tile = RingAttention(chunk, ring, 0, few)
        decode_attention(qkv, out, ours, 0, **options, num_splits=splits, tile=tile, space=space)
        assert not space.tickets.any()
        expected = decode_attention_reference(qkv.sum(0), theirs, 0, **options)
        assert relative(out, expected) < 0.01
        assert not out[5].any()
        for mine, other in ((ours.k[0], theirs.k[0]), (ours.v[0], theirs.v[0])):
            assert relative(mine.nan_to_num(9.0), other.nan_to_num(9.0)) < 1e-3


@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), [(64, 1, 16), (80, 2, 4), (96, 2, 1), (128, 2, 5), (256, 1, 8)])
def test_head_shapes(head_dim: int, kv_heads: int, group: int, card) -> None:
    config = replace(
        WIDE, head_dim=head_dim, num_kv_heads=kv_heads, num_heads=kv_heads * group, rope=RopeConfig(1e4, head_dim),
        attn_scale=head_dim**-0.5, qk_norm="head",
    )  # fmt: skip
    for rows in (1, 6):
        check(config, card, rows, block_size=16 if head_dim == 80 else 64)


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 256])
def test_replays_are_bit_identical(rows: int, card) -> None:
    config = replace(WIDE, num_layers=4)
    if rows > 64 and not has_copy_engine(config, BF16, card):
        pytest.skip("more rows than this path takes on a card without a copy engine")
    weights = moved(random_weights(config, dtype=BF16), card)
    batch, kv = decode_batch(config, (LENGTHS * 32)[:rows], 64, BF16)
    batch, kv = moved(batch, card), moved(kv, card)
    for table in (default_table(config), *([forced(config, ahead_tile), forced(config, ring_tile)] if rows <= 64 else [])):
        check_replays(FastDecode(config, weights, rows, card, table), batch, kv)


def check_replays(fast: FastDecode, batch, kv) -> None:
    fast.forward(batch, kv)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.forward(batch, kv)
    graph.replay()
    first, different = out.clone(), torch.zeros((), dtype=torch.int64, device=out.device)
    for _ in range(300):
        graph.replay()
        different += (out != first).any()
    assert first.isfinite().all()
    assert int(different) == 0, f"{int(different)} of 300 replays differ from the first"


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_steps_in_clusters(rows: int, card) -> None:
    """Right, and the same bits in all replays; where there are no clusters by what takes their place."""
    config = replace(WIDE, num_heads=8, num_kv_heads=4, num_layers=4)
    step = replace(
        forced(config, ring_tile)[8], o=RingTile(64, 64, 2, 3, cluster=True), down=RingTile(64, 128, 4, 3, True, True),
        cluster_attention=(RingAttention(2, 2, 128, few=1024),),
    )  # fmt: skip
    check(config, card, rows, {8: step})
    batch, kv = decode_batch(config, LENGTHS[:rows], 64, BF16)
    fast = FastDecode(config, moved(random_weights(config, dtype=BF16), card), rows, card, {8: step})
    check_replays(fast, moved(batch, card), moved(kv, card))


def test_a_graph_follows_lengths_and_padding(card) -> None:
    """One graph, captured for padded rows with a bound on the context, serves other lengths by its input tensors."""
    rows, bound = 8, 400
    weights = random_weights(WIDE, dtype=BF16)
    fast = FastDecode(WIDE, moved(weights, card), rows, card)
    real, kv = decode_batch(WIDE, [400, 17, 0, 200, 1, 0, 64, 0], 64, BF16)
    batch, kv = moved(real, card), moved(kv, card)
    batch.context_lens = [bound] * rows
    lens, mapping = batch.seq_lens.clone(), batch.slot_mapping.clone()
    batch.seq_lens.zero_()
    batch.slot_mapping.fill_(-1)
    before = [t.clone() for t in (*kv.k, *kv.v)]
    fast.forward(batch, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.forward(batch, kv)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(before, (*kv.k, *kv.v), strict=True)), "padded rows wrote to the cache"
    batch.seq_lens.copy_(lens)
    batch.slot_mapping.copy_(mapping)
    graph.replay()
    wide, kv_wide = moved(weights, torch.device("cpu"), torch.float32), decode_batch(WIDE, real.context_lens, 64, BF16)[1]
    live = [i for i, n in enumerate(real.context_lens) if n]
    part = replace(
        real, token_ids=real.token_ids[live], positions=real.positions[live], slot_mapping=real.slot_mapping[live],
        seq_slots=real.seq_slots[live], query_start=real.query_start[: len(live) + 1], seq_lens=real.seq_lens[live],
        num_decodes=len(live), query_lens=[1] * len(live), context_lens=[real.context_lens[i] for i in live],
    )  # fmt: skip
    decoder = Decoder(WIDE, wide, TorchAttention())
    expected = decoder.logits(decoder.forward(part, moved(kv_wide, torch.device("cpu"), torch.float32)))
    assert relative(out[live], expected) < 0.03


def test_weights_beyond_2_31_elements(card) -> None:
    width, columns = 16384, 140000
    weight = torch.empty(columns, width, dtype=BF16, device=card).normal_(0, 0.02)
    x = torch.randn(3, width, device=card).to(BF16)
    tail = weight[-4096:].float()
    expected = x.float() @ tail.T
    for tile in (GemvTile(8, 1024, 4, 2), GemmTile(64, 128, 1, 4, 4), RingTile(64, 128, 1, 4), WideTile(64, 64, 128, 1, 4, 4)):
        rows = min(3, MAX_ROWS[type(tile)])
        out = torch.empty(1, rows, columns, device=card)
        project(x[:rows], Weight(weight), out, tile)
        assert relative(out[0, :, -4096:], expected[:rows]) < 1e-3


@pytest.mark.parametrize(("length", "far"), [(131072, False), (700, True)])
def test_long_contexts_and_far_blocks(length: int, far: bool, card) -> None:
    """128k tokens in one sequence; blocks that lie beyond 2^31 elements in the cache."""
    config = replace(PLAIN, num_heads=16, num_kv_heads=8, head_dim=128, num_layers=1, rope=RopeConfig(1e6, 128))
    blocks = -(-length // 64)
    kv = KVCache(config, 33500 if far else blocks + 1, 64, BF16, card)
    order = torch.randperm(blocks, device=card).int() + (kv.num_blocks - blocks)
    for tensor in (*kv.k, *kv.v):
        tensor[order.long()] = torch.randn(blocks, 64, 8, 128, device=card).to(BF16)
    tables = torch.zeros(3, blocks, dtype=torch.int32, device=card)
    tables[2] = order
    place = int(order[-1]) * 64 + (length - 1) % 64
    angle = torch.outer(torch.arange(length, device=card).float(), 1e6 ** -(torch.arange(64, device=card) / 64))
    options = {
        "block_tables": tables, "seq_slots": torch.tensor([2], dtype=torch.int32, device=card),
        "seq_lens": torch.tensor([length], dtype=torch.int32, device=card), "slot_mapping": torch.tensor([place], device=card),
        "cos": angle.cos(), "sin": angle.sin(), "q_norm": None, "k_norm": None, "heads": HeadShape(16, 8, 128, 128**-0.5),
        "window": 0,
    }  # fmt: skip
    qkv = torch.randn(1, 32 * 128, device=card)
    expected = decode_attention_reference(qkv, kv, 0, **options)
    out = torch.empty(1, 2048, dtype=BF16, device=card)
    for splits in (1, 32):
        space = SplitSpace(splits * 16 * 128, 8, card, lse=splits * 16)
        decode_attention(qkv[None], out, kv, 0, **options, num_splits=splits, tile=AttentionTile(), space=space)
        assert relative(out, expected) < 0.01
