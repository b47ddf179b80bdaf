"""The small-batch decode path against the decoder, in float32: same logits, same keys and values in the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fast_decode_cases import CONFIGS, PLAIN, decode_batch, random_weights
from headrace.attention.torch_backend import TorchAttention
from headrace.kernels.attention_decode_fused import AttentionTile
from headrace.kernels.epilogues import runs_triton
from headrace.kernels.gemv import GemvTile
from headrace.kernels.skinny_gemm import GemmTile
from headrace.model.decode_tiles import StepTiles, default_table, from_json, to_json, tune
from headrace.model.decoder import Decoder
from headrace.model.fast_decode import FastDecode

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
TABLES = {"gemv": {4: GEMV}, "gemm": {16: GEMM}, "mixed": {8: replace(GEMM, down=GEMV.down, qkv=GEMV.qkv)}}

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="runs in Triton's interpreter")


def assert_close(result: Tensor, expected: Tensor) -> None:
    error = (result - expected).norm() / expected.norm()
    assert error < 2e-5, f"relative error {error:.1e}"


@pytest.mark.parametrize(
    ("name", "table"),
    [*((name, "gemm") for name in CONFIGS), ("qwen3", "gemv"), ("qwen2, window in one layer", "gemv"), ("granite", "mixed")],
)
def test_equals_the_decoder(name: str, table: str) -> None:
    config = CONFIGS[name]
    assert FastDecode.supports(config)
    weights = random_weights(config)
    batch, kv = decode_batch(config, LENGTHS, 16)
    _, kv_expected = decode_batch(config, LENGTHS, 16)
    decoder = Decoder(config, weights, TorchAttention())
    expected = decoder.logits(decoder.forward(batch, kv_expected))
    fast = FastDecode(config, weights, 4, CPU, TABLES[table])
    assert_close(fast.forward(batch, kv), expected)
    for ours, theirs in zip((*kv.k, *kv.v), (*kv_expected.k, *kv_expected.v), strict=True):
        assert_close(ours, theirs)


def test_padded_rows_touch_nothing() -> None:
    """Rows of padding leave the other rows' logits bit for bit alone and write nothing to the cache.

    The two steps run on one object: workspaces and tickets are left as a step of another size needs them.
    """
    weights = random_weights(PLAIN)
    fast = FastDecode(PLAIN, weights, 8, CPU, TABLES["gemm"])
    batch, kv = decode_batch(PLAIN, [150, 17, 0, 0], 16)
    # the same two rows without padding
    short, kv_short = decode_batch(PLAIN, [150, 17, 0, 0], 16)
    for name in ("token_ids", "positions", "slot_mapping", "seq_slots", "seq_lens"):
        setattr(short, name, getattr(short, name)[:2])
    short.query_start, short.num_decodes, short.query_lens = short.query_start[:3], 2, [1, 1]
    padded = fast.forward(batch, kv)
    assert padded.isfinite().all()
    padded = padded[:2].clone()
    assert (fast.forward(short, kv_short) == padded).all()
    for ours, theirs in zip((*kv.k, *kv.v), (*kv_short.k, *kv_short.v), strict=True):
        assert (ours == theirs).all()


def test_what_is_not_supported() -> None:
    for change in ({"norm_place": "post"}, {"norm_place": "sandwich"}, {"qk_norm": "full"}, {"mlp_bias": True}):
        assert not FastDecode.supports(replace(PLAIN, **change))
    assert not FastDecode.supports(PLAIN, torch.float16)
    fast = FastDecode(PLAIN, random_weights(PLAIN), 2, CPU)
    batch, kv = decode_batch(PLAIN, LENGTHS, 16)
    with pytest.raises(ValueError, match="3 rows"):
        fast.forward(batch, kv)


def test_tables_survive_json() -> None:
    table = {**default_table(PLAIN), 8: GEMV, 16: GEMM}
    assert from_json(to_json(table)) == table


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

    start = replace(default_table(config)[8], o=GemmTile(64, 128, 8, 4, 3))
    best, took = tune(start, config, 8, cost, seconds=60)
    assert {t.block_n for t in (best.qkv, best.o, best.gate_up, best.down)} == {32}
    assert took == cost(best) < cost(start)
    assert calls > 20
