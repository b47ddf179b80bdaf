"""The small-batch decode path against the decoder, in float32: same logits, same keys and values in the cache."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor

import gpu_decode
from fast_decode_cases import CONFIGS, PLAIN, cut, decode_batch, random_weights, states_of, with_narrow
from headrace.attention.torch_backend import TorchAttention
from headrace.cache import fp8
from headrace.fast_decode import forward as fast_decode
from headrace.fast_decode import rounded_tile, takes, workspace
from headrace.fast_decode.attention import AttentionTile, decode_attention
from headrace.fast_decode.decoder import FastDecoder
from headrace.fast_decode.epilogues import runs_triton
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.ring_tile import RingAttention, RingTile
from headrace.fast_decode.rounded_tile import RoundedTile
from headrace.fast_decode.skinny_gemm import GemmTile, row_block
from headrace.fast_decode.takes import has_copy_engine, most_rows
from headrace.fast_decode.tile_tables import SHIPPED, from_json
from headrace.fast_decode.tiles import (
    PRODUCTS,
    StepTiles,
    default_table,
    default_tiles,
    product_shapes,
    with_fp8_cache,
)
from headrace.fast_decode.wide_gemm import WideTile
from headrace.kernels.attention_decode import SplitTile
from headrace.kernels.quantize_rows import Rounded
from headrace.model import rare
from headrace.model.config import RopeConfig
from headrace.model.decoder import Decoder
from headrace.model.delta_config import DeltaConfig
from headrace.model.experts_config import ExpertsConfig
from headrace.model.formats.gpt_oss_experts import random_mxfp4
from headrace.model.narrow import compact
from headrace.model.shard import WHOLE
from tile_search import candidates, to_json, tune

CPU = torch.device("cpu")
LENGTHS = [150, 1, 33]

GEMV = StepTiles(
    qkv=GemvTile(64, 32, 1, 2), o=GemvTile(32, 64, 2, 1), gate_up=GemvTile(32, 16, 1, 1), down=GemvTile(16, 64, 2, 3),
    lm_head=GemvTile(64, 64, 1, 1), attention=AttentionTile(block_n=32, early=True), attention_programs=12,
)  # fmt: skip
GEMM = StepTiles(
    qkv=GemmTile(64, 32, 2, 4, 2), o=GemmTile(32, 16, 3, 4, 2, prefetch=1), gate_up=GemmTile(64, 32, 1, 4, 2, prefetch=4),
    down=GemmTile(32, 64, 2, 4, 2), lm_head=GemmTile(64, 64, 1, 4, 2), attention=AttentionTile(block_n=64, min_tiles=2),
    attention_programs=20,
)  # fmt: skip
WIDE = StepTiles(
    qkv=WideTile(64, 64, 32, 2, 4, 2), o=WideTile(64, 32, 32, 2, 4, 2), gate_up=WideTile(64, 64, 64, 1, 4, 2),
    down=WideTile(128, 32, 32, 3, 4, 2), lm_head=WideTile(128, 64, 64, 1, 4, 2),
    attention=AttentionTile(block_n=64, heads_first=True),
)  # fmt: skip
TWO_KERNELS = replace(WIDE, qkv=WideTile(64, 64, 64, 1, 4, 2), o=WideTile(64, 64, 64, 1, 4, 2), attention=SplitTile(64))
RING = StepTiles(  # as the others, here
    qkv=RingTile(64, 32, 2, 3), o=RingTile(32, 32, 3, 2), gate_up=RingTile(64, 32, 1, 4), down=RingTile(32, 64, 2, 2),
    lm_head=RingTile(64, 64, 1, 2), attention=AttentionTile(block_n=64), ring_attention=RingAttention(2, 2, 20),
)  # fmt: skip
TABLES = {
    "gemv": {1: GEMV}, "ring": {16: RING}, "gemm": {16: GEMM}, "short": {4: replace(GEMM, short_attention=AttentionTile(256))},
    "mixed": {1: replace(GEMM, down=GEMV.down, qkv=GEMV.qkv)},
}  # fmt: skip

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="runs in Triton's interpreter")


def assert_close(result: Tensor, expected: Tensor) -> None:
    error, size = (result - expected).norm(), expected.norm()
    assert error <= 2e-5 * size, f"relative error {error / size:.1e}"


@pytest.mark.parametrize(
    ("name", "table"),
    [*((name, "gemm") for name in CONFIGS), ("qwen3", "gemv"), ("gemma", "gemv"), ("gemma", "ring"), ("qwen2, window in one layer", "ring"), ("delta net", "gemv"), ("qwen2, window in one layer", "gemv"), ("granite", "mixed"),
     ("qwen2, window in one layer", "short")],
)
def test_equals_the_decoder(name: str, table: str) -> None:
    config = CONFIGS[name]
    assert FastDecode.supports(config)
    weights = random_weights(config)
    rows = min(4, max(TABLES[table]))
    batch, kv = decode_batch(config, LENGTHS[:rows], 16)
    _, kv_expected = decode_batch(config, LENGTHS[:rows], 16)
    decoder = Decoder(config, weights, TorchAttention())
    fast = FastDecode(config, weights, rows, CPU, TABLES[table])
    both = FastDecoder(config, weights, TorchAttention(), fast)
    streams: dict[Decoder, list[tuple[int, Tensor]]] = {decoder: [], both: []}
    for path, seen in streams.items():
        path.hidden_state_hook = lambda layer, residual, batch, seen=seen: seen.append((layer, residual.clone()))
    expected = decoder.decode(batch, kv_expected)
    assert_close(both.decode(batch, kv), expected)
    for (layer, ours), (layer_expected, theirs) in zip(*(streams[path] for path in (both, decoder)), strict=True):
        assert layer == layer_expected
        assert_close(ours, theirs)
    for ours, theirs in zip((*kv.k, *kv.v), (*kv_expected.k, *kv_expected.v), strict=True):
        assert_close(ours, theirs)
    for ours, theirs in zip(states_of(kv), states_of(kv_expected), strict=True):
        assert_close(ours, theirs)


def test_rows_that_come_in_fp8(monkeypatch) -> None:
    """As many rows do where the product that reads them is one of FP8 by FP8: not through the fused step. Here by a product
    that widens them again."""
    linear = torch.nn.functional.linear

    def widened(x: Tensor | Rounded, *others: Tensor) -> Tensor:
        return linear((x.values.float() * x.scales)[: x.rows] if isinstance(x, Rounded) else x, *others)

    monkeypatch.setattr(torch.nn.functional, "linear", widened)
    monkeypatch.setattr(rare, "rounds", lambda x: True)
    config = CONFIGS["qwen3"]
    weights = random_weights(config)
    (batch, kv), (_, kv_expected) = (decode_batch(config, LENGTHS, 16) for _ in range(2))
    decoder = Decoder(config, weights, TorchAttention())
    both = FastDecoder(config, weights, TorchAttention(), FastDecode(config, weights, 2, CPU, TABLES["gemm"]))
    for layer in (*decoder.layers, *both.layers):
        layer.mixer.takes_rounded = layer.mlp.takes_rounded = True
    assert_close(both.decode(batch, kv), decoder.decode(batch, kv_expected))


def test_a_delta_net_whose_gates_are_a_product_of_their_own(monkeypatch) -> None:
    """Those of the other weights are narrow. By the products' references."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    config = CONFIGS["delta net"]
    weights = with_narrow(random_weights(config), [("int8 row",) * 4] * 2)
    (batch, kv), (_, kv_expected) = (decode_batch(config, LENGTHS, 16) for _ in range(2))
    expected = Decoder(config, weights, TorchAttention()).decode(batch, kv_expected)
    assert_close(FastDecode(config, weights, len(LENGTHS), CPU).forward(batch, kv), expected)
    for ours, theirs in zip(states_of(kv), states_of(kv_expected), strict=True):
        assert_close(ours, theirs)


def test_a_table_serves_gated_delta_nets_too() -> None:
    """But for their first product, which is of another size."""
    config, up = CONFIGS["delta net"], GemmTile(16, 64, 1, 2, 2)
    fast = FastDecode(config, random_weights(config), 2, CPU, {2: replace(GEMM, gate_up=up)})
    net, attention = (table[2] for table in fast.layer_tables)
    assert net.gate_up == attention.gate_up == up and net.qkv == default_tiles(config, 2, False, delta=True).qkv != attention.qkv


def test_attention_in_two_kernels_whose_output_is_gated_by_a_third() -> None:
    """As for drafts."""
    config = replace(CONFIGS["delta net"], num_layers=1, delta=DeltaConfig(2, 4, 16, 16, 4, layers=(False,)))
    weights = random_weights(config)
    (batch, kv), (_, kv_expected) = (decode_batch(config, LENGTHS, 16) for _ in range(2))
    batch.related = True
    expected = Decoder(config, weights, TorchAttention()).decode(batch, kv_expected)
    assert_close(FastDecode(config, weights, len(LENGTHS), CPU, TABLES["gemm"]).forward(batch, kv), expected)


@pytest.mark.parametrize(
    ("name", "rows", "tiles"),
    [
        ("qwen2, window in one layer", 70, WIDE), ("qwen2, window in one layer", 70, TWO_KERNELS),
        ("qwen3", 130, TWO_KERNELS), ("granite", 140, WIDE),
    ],
)  # fmt: skip
def test_many_rows_equal_the_decoder(name: str, rows: int, tiles: StepTiles) -> None:
    """Rows past the first tile of them, and a last tile that is not full."""
    config = replace(CONFIGS[name], hidden_size=80, num_heads=2, num_kv_heads=1, num_layers=1)
    config = replace(config, windows=config.windows[-1:])
    weights = random_weights(config)
    lengths = [1 + 7 * i % (24 if rows == 70 else 16) for i in range(rows)]
    lengths[-1] = 90
    batch, kv = decode_batch(config, lengths, 64)
    _, kv_expected = decode_batch(config, lengths, 64)
    decoder = Decoder(config, weights, TorchAttention())
    expected = decoder.logits(decoder.forward(batch, kv_expected))
    fast = FastDecode(config, weights, rows, CPU, {256: tiles})
    for buffer in (fast.work.qkv, fast.work.attended, fast.work.inner, fast.work.space.partials):
        buffer.fill_(float("nan"))
    assert_close(fast.forward(batch, kv), expected)
    for ours, theirs in zip((*kv.k, *kv.v), (*kv_expected.k, *kv_expected.v), strict=True):
        assert_close(ours, theirs)
    assert not fast.work.space.tickets.any()


def test_experts_of_more_than_a_few_rows() -> None:
    config = replace(CONFIGS["experts in one layer"], num_layers=1)
    weights, lengths = random_weights(config), [3, 1, 20, 7, 2, 9]
    (batch, kv), (_, kv_expected) = (decode_batch(config, lengths, 16) for _ in range(2))
    expected = Decoder(config, weights, TorchAttention()).decode(batch, kv_expected)
    assert_close(FastDecode(config, weights, 6, CPU, {16: GEMM}).forward(batch, kv), expected)


@pytest.mark.parametrize("lengths", [[33], [3, 1, 20, 7]], ids=["one row", "few rows"])
def test_experts_in_mxfp4_that_are_longer_than_rows(lengths: list[int]) -> None:
    config = CONFIGS["gpt-oss"]
    experts = config.experts and replace(config.experts, count=3, inner=32)
    config = replace(config, hidden_size=160, num_layers=1, windows=(), experts=experts)
    weights = random_weights(config)
    for i, layer in enumerate(weights.layers):
        for name in ("experts_gate_up", "experts_down"):
            rows, columns = layer.more[name].shape
            made = random_mxfp4((rows, columns), CPU, torch.Generator().manual_seed(i))
            layer.more[name] = compact(made, rows)
    (batch, kv), (_, kv_expected) = (decode_batch(config, lengths, 16) for _ in range(2))
    expected = Decoder(config, weights, TorchAttention()).decode(batch, kv_expected)
    assert_close(FastDecode(config, weights, len(lengths), CPU, {16: GEMM}).forward(batch, kv), expected)


@pytest.mark.parametrize("lengths", [[33], [20, 1, 33]], ids=["one row", "few rows"])
def test_narrow_weights_of_several_kinds(lengths: list[int]) -> None:
    """Layers whose matrices are of other kinds than most have tiles of their own."""
    config = replace(PLAIN, hidden_size=128, intermediate_size=256, num_heads=8)
    usual = ("int4 by 128, zeros", "fp8 row", "int4 by 32", "int8 by 32, minima")
    weights = with_narrow(random_weights(config), [usual, ("fp8 blocks", "int4 by 128", "fp8 row", "fp4 by 32")], "int8 row")
    batch, kv = decode_batch(config, lengths, 16)
    _, kv_expected = decode_batch(config, lengths, 16)
    fast = FastDecode(config, weights, len(lengths), CPU)
    assert len(fast.tables) == 2 and max(fast.tiles) == 64
    expected = Decoder(config, weights, TorchAttention()).decode(batch, kv_expected)
    error = (fast.forward(batch, kv) - expected).norm() / expected.norm()
    assert error < 2e-4, f"relative error {error:.1e}"


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("sinks", [True, False])
def test_activations_in_fp8_between_fp8_weights(pairs: bool, sinks: bool, monkeypatch) -> None:
    """Pairs as close to the decoder, whose activations are float32, as bfloat16 is; others by what FP8 rounds."""
    config = replace(PLAIN, hidden_size=128, intermediate_size=256, head_dim=64, rope=RopeConfig(1e4, 64), sinks=sinks, norm_offset=0.5)
    weights = with_narrow(random_weights(config), [("fp8 row",) * 4] * 2)
    tile = RoundedTile(64, 2, 3)
    step = StepTiles(
        qkv=tile, o=tile, gate_up=replace(tile, splits=1), down=replace(tile, block_n=128), lm_head=GEMM.lm_head,
        attention=AttentionTile(16, 4, 2), attention_programs=12,
    )  # fmt: skip
    monkeypatch.setattr(rounded_tile, "suit", lambda *_: True)
    monkeypatch.setattr(workspace, "PAIR_ROWS", 16 if pairs else 0)
    lengths = [20, 1, 33]
    (batch, kv), (_, kv_expected) = (decode_batch(config, lengths, 16) for _ in range(2))
    fast = FastDecode(config, weights, 3, CPU, {4: step})
    logits = fast.forward(batch, kv)
    assert all(buffer.float().any() for buffer in fast.work.rounded) and fast.work.normed.any()
    expected = Decoder(config, weights, TorchAttention()).decode(batch, kv_expected)
    error = (logits - expected).norm() / expected.norm()
    assert error < (0.003 if pairs else 0.1), f"relative error {error:.1e}"


SMALL = replace(PLAIN, num_heads=2, num_kv_heads=1, num_layers=1)
MANY = [1 + 5 * i % 16 for i in range(20)]


@pytest.mark.parametrize(
    ("config", "table", "lengths", "padding"),
    [(PLAIN, TABLES["gemm"], [150, 17], 2), (SMALL, {256: WIDE}, MANY, 64), (SMALL, {256: TWO_KERNELS}, MANY, 64)],
    ids=["few", "fused attention", "attention in two kernels"],
)
def test_padded_rows_touch_nothing(config, table, lengths: list[int], padding: int) -> None:
    """Rows of padding, also a tile of rows that is nothing but padding, leave the other rows' logits alone (bit for bit where the
    rest is no other number of tiles) and write nothing to the cache.

    The two steps run on one object: workspaces and tickets are left as a step of another size needs them.
    """
    fast = FastDecode(config, random_weights(config), max(8, len(lengths) + padding), CPU, table)
    results = []
    for rows in (len(lengths) + padding, len(lengths)):
        batch, kv = decode_batch(config, lengths + [0] * padding, 16)
        logits = fast.forward(cut(batch, rows), kv)
        assert logits.isfinite().all()
        results.append((logits[: len(lengths)].clone(), *kv.k, *kv.v))
    for padded, alone in zip(*results, strict=True):
        assert_close(padded, alone)
        assert lengths is MANY or torch.equal(padded, alone)


@pytest.mark.parametrize(
    ("longest", "related", "expected"), [(256, False, ("short", 1)), (257, False, ("usual", 5)), (256, True, None)]
)
def test_short_attention_is_for_short_contexts(monkeypatch, longest: int, related: bool, expected) -> None:
    """One program without a merge up to its tile's length, else the usual ones; never where rows are of one request."""
    tiles = replace(GEMM, short_attention=AttentionTile(256), attention=AttentionTile(64), attention_programs=20)
    fast = FastDecode(PLAIN, random_weights(PLAIN), 2, CPU, {2: tiles})
    seen: set[tuple[str, int]] = set()

    def spy(*args, tile: AttentionTile, num_splits: int, **options) -> None:
        seen.add(("short" if tile is tiles.short_attention else "usual", num_splits))
        decode_attention(*args, tile=tile, num_splits=num_splits, **options)

    monkeypatch.setattr(fast_decode, "decode_attention", spy)
    batch, kv = decode_batch(PLAIN, [40, 17], 16)
    batch.context_lens, batch.related = [longest, 40], related
    fast.forward(batch, kv)
    assert seen == (set() if expected is None else {expected})


@pytest.mark.parametrize("dtype", [torch.float32, fp8.DTYPE])
def test_a_program_for_each_query_head_is_for_contexts_that_are_not_long(monkeypatch, dtype) -> None:
    """Whatever the cache keeps; above, one in FP8 has tiles of its own."""
    tiles = replace(GEMM, few_attention=AttentionTile(16, few=100), attention=AttentionTile(64), attention_programs=4)
    fast = FastDecode(PLAIN, random_weights(PLAIN), 1, CPU, {1: tiles})
    seen: list[AttentionTile] = []

    def spy(*args, tile: AttentionTile, **options) -> None:
        seen.append(tile)
        decode_attention(*args, tile=tile, **options)

    monkeypatch.setattr(fast_decode, "decode_attention", spy)
    batch, kv = decode_batch(PLAIN, [40], 16, dtype)
    for longest in (100, 101):
        batch.context_lens = [longest]
        fast.forward(batch, kv)
    layers = PLAIN.num_layers
    assert seen[:layers] == [tiles.few_attention] * layers
    assert [tile.block_n for tile in seen[layers:]] == [64 if dtype == torch.float32 else 128] * layers


@pytest.mark.parametrize(
    ("rings", "dtype", "longest", "expected"),
    [
        (True, torch.float32, 50, ("first", 2)), (True, torch.float32, 100, ("second", 4)), (True, torch.float32, 101, ("few", 3)), (True, torch.float32, 201, ("ring", 2)),
        (True, fp8.DTYPE, 100, ("few", 3)), (False, torch.float32, 100, ("few", 3)),
    ],
)  # fmt: skip
def test_clusters_are_for_hopper_and_a_cache_in_bfloat16(monkeypatch, rings: bool, dtype, longest: int, expected) -> None:
    """And for contexts of up to their tokens; their programs are a power of two."""
    tiles = replace(
        GEMM, few_attention=AttentionTile(32, few=200), ring_attention=RingAttention(2, 2, 8), attention_programs=12,
        cluster_attention=(RingAttention(1, 2, 12, few=50), RingAttention(3, 3, 28, few=100)),
    )  # fmt: skip
    fast = FastDecode(PLAIN, random_weights(PLAIN), 2, CPU, {2: tiles})
    fast.rings = rings
    seen: set[tuple[str, int]] = set()

    def spy(qkv, out, *args, tile: AttentionTile, num_splits: int, **options) -> None:
        tiles_of = {"few": tiles.few_attention, "ring": tiles.ring_attention, "first": tiles.cluster_attention[0], "second": tiles.cluster_attention[1]}
        names = [name for name, other in tiles_of.items() if other == tile]
        seen.add((*names, num_splits))
        out.zero_()

    monkeypatch.setattr(fast_decode, "decode_attention", spy)
    batch, kv = decode_batch(PLAIN, [40, 17], 64, dtype)
    batch.context_lens = [longest, 40]
    fast.forward(batch, kv)
    assert PLAIN.num_kv_heads == 2 and seen == {expected}


@pytest.mark.parametrize("model", ["0.6b", "1.7b", "4b", "8b"])
def test_what_is_early_and_the_sums_fit_into_a_small_card(model: str) -> None:
    """An L4 has 99 KB for a program: o of Qwen3-0.6B at 32 rows once asked for 104."""
    config = gpu_decode.MODELS[model]
    shapes = product_shapes(config)
    for rows, step in default_table(config, copy_engine=False).items():
        for name in PRODUCTS:
            tile, columns = getattr(step, name), 2 if shapes[name].gated else 1
            if isinstance(tile, GemmTile) and tile.prefetch:
                bytes_ = 2 * tile.prefetch * tile.block_k * (columns * tile.block_n + row_block(rows))
                assert bytes_ + 4 * tile.block_n * row_block(rows) <= 99 << 10, (name, rows, tile)


def test_what_a_card_without_a_copy_engine_gets() -> None:
    table = default_table(PLAIN, copy_engine=False)
    tiles = [getattr(step, product) for step in table.values() for product in PRODUCTS]
    assert max(table) == 64 and not any(isinstance(tile, WideTile) for tile in tiles)
    assert not has_copy_engine(PLAIN, torch.bfloat16, CPU)
    fast = FastDecode(PLAIN, random_weights(PLAIN), 64, CPU)
    assert max(fast.tiles) == 64
    with pytest.raises(ValueError, match="65 rows"):
        FastDecode(PLAIN, random_weights(PLAIN), 65, CPU)


@pytest.mark.parametrize(
    ("card", "dtype", "change", "expected"),
    [
        ((9, 0), torch.bfloat16, {}, True), ((10, 0), torch.bfloat16, {}, True), ((8, 0), torch.bfloat16, {}, False),
        ((12, 0), torch.bfloat16, {}, False), ((9, 0), torch.float32, {}, False),
        ((9, 0), torch.bfloat16, {"intermediate_size": 100}, False),
    ],
)  # fmt: skip
def test_who_has_a_copy_engine(monkeypatch, card, dtype, change, expected) -> None:
    monkeypatch.setattr(takes, "capability", lambda device: card)
    assert has_copy_engine(replace(PLAIN, **change), dtype, CPU) is expected


def test_what_is_not_supported() -> None:
    for change in ({"norm_place": "post"}, {"qk_norm": "full"}, {"mlp_bias": True}):
        assert not FastDecode.supports(replace(PLAIN, **change))
    assert not FastDecode.supports(CONFIGS["gemma"], alone=False)
    assert most_rows(CONFIGS["gemma"]) < most_rows(PLAIN)
    experts = ExpertsConfig(6, 2, 24)
    assert FastDecode.supports(WHOLE.config(replace(PLAIN, experts=experts)))  # as an engine has it: all are held
    for rows in (8, 64):  # of a table's largest step
        of_experts, plain = (most_rows(model, {rows: None}) for model in (replace(PLAIN, experts=experts), PLAIN))
        assert of_experts <= plain == rows and of_experts < 64
    assert not FastDecode.supports(replace(CONFIGS["gemma"], experts=experts))
    for beside in ({"shared_inner": 16}, {"held": 3}):
        assert not FastDecode.supports(replace(PLAIN, experts=replace(experts, **beside)))
    assert not FastDecode.supports(replace(CONFIGS["delta net"], delta=DeltaConfig(2, 4, 24, 16, 4, (True, False))))
    assert not FastDecode.supports(PLAIN, torch.float16)
    fast = FastDecode(PLAIN, random_weights(PLAIN), 2, CPU)
    batch, kv = decode_batch(PLAIN, LENGTHS, 16)
    with pytest.raises(ValueError, match="3 rows"):
        fast.forward(batch, kv)


def test_tables_survive_json() -> None:
    own = {1: GEMV, 4: TABLES["short"][4], 8: RING, 16: GEMM, 128: TWO_KERNELS, 256: WIDE}
    table = {**default_table(PLAIN), **own}
    assert from_json(to_json(table)) == table


def test_shipped_tables_are_tables() -> None:
    files = list(SHIPPED.glob("*.json"))
    assert files
    for file in files:
        assert 64 <= max(from_json(file.read_text())) <= 256


@pytest.mark.parametrize("table", [{}, {128: GEMM}, {2: GEMV}])
def test_a_table_that_cannot_run_is_none(table) -> None:
    with pytest.raises(ValueError):
        from_json(to_json(table))


def test_a_table_whose_attention_would_wait_for_ever_is_none() -> None:
    text = to_json({16: RING})
    assert from_json(text)[16].ring_attention == RING.ring_attention
    with pytest.raises(ValueError, match="never come"):
        from_json(text.replace('"chunk": 2', '"chunk": 3'))


def test_a_table_whose_splits_are_no_cluster_is_none() -> None:
    step = replace(RING, down=RingTile(32, 64, 4, 2, cluster=True), cluster_attention=(RingAttention(2, 2, 20, few=512),))
    text = to_json({16: step})
    assert from_json(text) == {16: step}
    with pytest.raises(ValueError, match="3 splits are no cluster"):
        from_json(text.replace('"splits": 4', '"splits": 3'))


def test_tune_finds_the_fastest_candidate() -> None:
    """With a made-up cost that is a sum over products, the search ends at the best of each."""
    config = replace(PLAIN, hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, head_dim=128)
    calls = 0

    def cost(tiles: StepTiles) -> float:
        nonlocal calls
        calls += 1
        if isinstance(tiles.o, GemmTile) and tiles.o.num_stages == 4:
            raise RuntimeError("out of shared memory")
        products = (tiles.qkv, tiles.o, tiles.gate_up, tiles.down, tiles.lm_head)
        return sum(abs(t.block_n - 32) + t.num_warps for t in products) + tiles.attention_programs / 1e4

    for product in ("qkv", "o", "gate_up", "down"):
        shape = product_shapes(config)[product]
        kinds = [{type(tile) for tile in candidates(shape, rows)} for rows in (32, 64, 256)]
        assert kinds == [{GemmTile, RingTile}, {GemmTile, RingTile, WideTile}, {WideTile}]
    start = replace(default_table(config)[8], o=GemmTile(64, 128, 8, 4, 3))
    best, took = tune(start, config, 8, cost, seconds=60)
    assert {t.block_n for t in (best.qkv, best.o, best.gate_up, best.down)} == {32}
    assert took == cost(best) < cost(start)
    assert calls > 20


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
def test_an_fp8_cache_splits_no_more_than_there_is_room_for(kv_heads):
    """The workspace is made before it is known what the cache is."""
    config = replace(PLAIN, num_heads=32, num_kv_heads=kv_heads, head_dim=128)
    fast = SimpleNamespace(config=config)
    for rows, tiles in default_table(config).items():
        for narrow in (with_fp8_cache(tiles, config, rows, ring) for ring in (False, True)):
            for context in (1, 100, 1000, 5000, 100_000):
                splits = FastDecode._num_splits(fast, narrow, rows, context)  # type: ignore[arg-type]
                assert 1 <= splits <= FastDecode._num_splits(fast, tiles, rows, context)  # type: ignore[arg-type]
    assert with_fp8_cache(default_table(config)[1], config, 1).attention.block_n == 128
