"""The fused decode step of several ranks gives the logits of one decoder, and the keys and values of its heads.

By the torch references of its kernels; how their parts meet on cards is in test_kernels_all_reduce and
test_gpu_tensor_parallel.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from echo_group import EchoGroup
from fast_decode_cases import CONFIGS, PLAIN, decode_batch, random_weights
from headrace.attention.torch_backend import TorchAttention
from headrace.cache.kv_cache import KVCache
from headrace.config import EngineConfig
from headrace.fast_decode.attention import AttentionTile
from headrace.fast_decode.decoder import FastDecoder
from headrace.fast_decode.epilogues import rms_factor_reference
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.products import send
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.tiles import StepTiles
from headrace.kernels.all_reduce import ROW_COLUMNS, RowPlace, all_reduce_norm_reference, empty_mark, row_sum, row_sum_tiles
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.config import RopeConfig
from headrace.model.decoder import Decoder
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.weight import Weight
from push_ranks import push_spaces
from rank_threads import ThreadGroup, run_ranks
from tiny_models import write_tiny

CPU = torch.device("cpu")
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
MODELS = {
    "qwen3": ("qwen3", HEADS),
    "llama, few key heads": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 515}),
    "qwen2, biases": ("qwen2", {}),
    "granite, biases": ("granite", {"attention_bias": True}),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_decoder_of_one_rank(name: str, size: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    family, options = MODELS[name]
    checkpoint = resolve_checkpoint(EngineConfig(model=str(write_tiny(family, tmp_path / "model", **options))))
    config = model_config_from_hf(checkpoint.config)
    batch, kv = decode_batch(config, [60, 1, 33], 16)
    _, before = decode_batch(config, [60, 1, 33], 16)
    decoder = Decoder(config, load_model(checkpoint, config, torch.float32, CPU), TorchAttention(), max_model_len=64)
    expected = decoder.decode(batch, kv)

    def run(group: ThreadGroup) -> tuple[torch.Tensor, KVCache]:
        part, heads = group.shard.config(config), group.shard.kv_heads(config.num_kv_heads)
        own = KVCache(part, before.num_blocks, before.block_size, torch.float32, CPU)
        for mine, whole in zip((*own.k, *own.v), (*before.k, *before.v), strict=True):
            mine.copy_(whole[:, :, heads.start : heads.stop])
        weights = load_model(checkpoint, config, torch.float32, CPU, shard=group.shard)
        fast = FastDecode(part, weights, 3, CPU, max_model_len=64, group=group)
        both = FastDecoder(part, weights, TorchAttention(), fast, max_model_len=64, group=group)
        logits = both.decode(batch, own)
        assert both.vocab is not None
        return both.vocab.whole(logits), own

    for rank, (logits, own) in enumerate(run_ranks(size, run)):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        heads = range(config.num_kv_heads)
        first = rank * len(heads) // size
        for mine, whole in zip((*own.k, *own.v), (*kv.k, *kv.v), strict=True):
            torch.testing.assert_close(mine, whole[:, :, first : first + mine.shape[2]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [0, 1])
def test_a_product_sends_its_own_part(shared: int) -> None:
    """Of one row: what all ranks' products have sent joins the residual as if it had been stored first."""
    torch.manual_seed(0)
    width = ROW_COLUMNS + 48
    spaces = push_spaces(3, 1, width, torch.float32)
    for step in range(4):
        xs, weights = [torch.randn(1, 64) for _ in spaces], [torch.randn(width, 64) for _ in spaces]
        bias, norm, residual = torch.randn(width), torch.randn(width), torch.randn(1, width)
        places = [RowPlace(space, step % 2) for space in spaces]
        for x, weight, place in zip(xs, weights, places, strict=True):
            send(x, Weight(weight), GemvTile(16, 32, 1, 1, shared), place, bias if place.space.rank == 0 else None)
        parts = [x @ weight.T for x, weight in zip(xs, weights, strict=True)]
        want_total, want = all_reduce_norm_reference(
            [parts[0] + bias, *parts[1:]], torch.float32, norm, residual=residual, eps=1e-6
        )
        for place in places:
            total, out, sumsq = residual.clone(), torch.empty(1, width), torch.empty(1, row_sum_tiles(width))
            row_sum(place, total, out, sumsq, norm)
            torch.testing.assert_close(total, want_total, rtol=1e-5, atol=1e-5)
            factor = rms_factor_reference(sumsq, width, 1e-6)
            torch.testing.assert_close(out * factor, want, rtol=1e-5, atol=1e-5)
    assert all((space.slots == empty_mark(space.slots.dtype)).all() for space in spaces)


@pytest.mark.parametrize("rows, shared", [(1, 0), (1, 2), (3, 0)])
def test_few_rows_by_their_kernels(rows: int, shared: int, monkeypatch) -> None:
    """A rank's whole step, in the interpreter, its parts coming back as the other's."""
    config = replace(PLAIN, hidden_size=320, intermediate_size=64, num_layers=2, qk_norm="head", head_dim=32, rope=RopeConfig(1e4, 32))
    weights, tile = random_weights(replace(config, vocab_size=48)), GemvTile(16, 32, 1, 1, shared)
    attention = AttentionTile(block_n=16, num_warps=1, early=True, few=4096, at_once=True)
    step = StepTiles(tile, tile, tile, tile, tile, few_attention=attention)
    if rows > 1:
        whole, split = (GemmTile(32, 32, splits, 4, 2) for splits in (1, 2))
        step = StepTiles(split, split, whole, split, whole, AttentionTile(block_n=16))
    logits = []
    for kind in (EchoGroup, Doubled):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", kind is EchoGroup)
        batch, kv = decode_batch(replace(config, vocab_size=48), [40, 3, 17][:rows], 16)
        group = kind(2, rows, config.hidden_size, torch.float32, CPU)
        fast = FastDecode(config, weights, rows, CPU, {rows: step}, max_model_len=64, group=group)
        logits.append(torch.stack([fast.forward(batch, kv).clone() for _ in range(2)]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


class Apart(EchoGroup):
    """Without memory that all see: what comes back is the same, by a sum of its own."""

    def push_space(self, rows: int, width: int, dtype: torch.dtype) -> None:
        return None


class Doubled(Apart):
    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return self.shard.size * part


@pytest.mark.parametrize("name", ["qwen3", "granite"])
def test_steps_of_more_rows_add_up_in_one_kernel_too(name: str) -> None:
    """In the interpreter; one rank, which hears its own parts as those of the other."""
    config = replace(CONFIGS[name], num_layers=2)
    weights = random_weights(replace(config, vocab_size=48))  # of 90 ids
    logits = []
    for kind in (EchoGroup, Apart):
        batch, kv = decode_batch(replace(config, vocab_size=48), [40, 3, 17], 16)
        group = kind(2, 4, config.hidden_size, torch.float32, CPU)
        fast = FastDecode(config, weights, 1, CPU, max_model_len=64, group=group)
        decoder = FastDecoder(config, weights, TorchAttention(), fast, max_model_len=64, group=group)
        logits.append(decoder.decode(batch, kv))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
