"""The fused step of few rows of one of two ranks on one card: both as two streams, and one that hears itself.

With programmatic dependent launch, programs of later kernels stand on the card and wait. They hold up none of their own stream:
a kernel is launched when all programs of the one before have started. But those of another rank on the same card, for whose
parts they wait, might find no room. So two ranks run without it here, where at most two kernels are on the card; on two cards
no rank's programs are in the other's way.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from echo_group import EchoGroup
from fast_decode_cases import PLAIN, decode_batch, moved, random_weights
from headrace.cache.kv_cache import KVCache
from headrace.fast_decode.attention import AttentionTile
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.ring_tile import RingAttention, RingTile
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.tiles import StepTiles
from headrace.kernels import launch
from headrace.kernels.all_reduce import PushSpace
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.decoder_weights import DecoderWeights, LayerWeights
from headrace.model.shard import Shard
from headrace.model.weight import Weight
from headrace.tensor_parallel.cards import fill_by_copies
from push_ranks import push_spaces

pytestmark = pytest.mark.gpu
BF16, SECONDS = torch.bfloat16, 20.0
CONFIG = replace(
    PLAIN, hidden_size=512, intermediate_size=512, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=512,
    rope=RopeConfig(1e4, 64), attn_scale=0.125, max_position=512, qk_norm="head",
)  # fmt: skip
CONTEXTS = [150, 3, 64, 1, 100, 65, 20, 140]
FORMS = {"registers": 1, "shared": 1, "rings": 8, "rings, fewer rows": 5, "no rings": 5}  # of products -> rows


def half(tensor: Tensor, rank: int, dim: int = 0, parts: int = 1) -> Tensor:
    """Of each of `parts` of equal size the rank's half."""
    return torch.cat([part.chunk(2, dim)[rank] for part in tensor.chunk(parts, dim)], dim).contiguous()


def of_rank(weights: DecoderWeights, config: ModelConfig, rank: int) -> DecoderWeights:
    def layer(whole: LayerWeights) -> LayerWeights:
        q, kv = whole.qkv.data.split((config.q_size, 2 * config.kv_size))
        return replace(
            whole, qkv=Weight(torch.cat((half(q, rank), half(kv, rank, parts=2)))), o=Weight(half(whole.o.data, rank, 1)),
            gate_up=Weight(half(whole.gate_up.data, rank, parts=2)), down=Weight(half(whole.down.data, rank, 1)),
        )  # fmt: skip

    layers, head = [layer(whole) for whole in weights.layers], Weight(half(weights.lm_head.data, rank))
    return replace(weights, embedding=half(weights.embedding, rank), layers=layers, lm_head=head)


class OneOfTwo(EchoGroup):
    """A Group by memory that is there already."""

    def __init__(self, space: PushSpace):
        self.shard, self._spaces = Shard(space.rank, 2), [space]


def tiles(form: str) -> StepTiles:
    attention = AttentionTile(early=True)
    if FORMS[form] > 1:
        gemm = GemmTile(64, 128, 2, 4, 2)
        ring, glu = (RingTile(64, 128, splits, 2, True) for splits in (2, 1))
        sent = gemm if form == "no rings" else ring
        return StepTiles(ring, sent, glu, sent, glu, attention, 32, ring_attention=RingAttention(1, 2, 32))
    few = AttentionTile(block_n=32, num_warps=1, early=True, few=4096, at_once=form == "shared")
    tile = GemvTile(16, 256, 1, 1)
    gate_up, down = GemvTile(8, 256, 1, 1), tile
    if form == "shared":
        gate_up, down = (GemvTile(16, 128, 1, 1, shared=2) for _ in range(2))
    return StepTiles(tile, tile, gate_up, down, tile, attention, 32, few_attention=few)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_two_ranks_give_the_logits_of_one(form: str, monkeypatch) -> None:
    monkeypatch.setattr(launch, "capability", lambda device: (8, 0))  # no programmatic dependent launch
    card, rows = torch.device("cuda", 0), FORMS[form]
    weights = random_weights(CONFIG, dtype=BF16)
    batch, kv = (moved(what, card) for what in decode_batch(CONFIG, CONTEXTS[:rows], 64, BF16))
    whole = moved(weights, card)
    spaces = push_spaces(2, rows, CONFIG.hidden_size, BF16, "cuda")
    kept, graphs, outs = [], [], []  # graphs have addresses of what is kept
    for space in spaces:
        part = Shard(space.rank, 2).config(CONFIG)
        own = KVCache(part, kv.num_blocks, kv.block_size, BF16, card)
        for mine, all_heads in zip((*own.k, *own.v), (*kv.k, *kv.v), strict=True):
            mine.copy_(half(all_heads, space.rank, 2))

        def fast(group: EchoGroup, part: ModelConfig = part, rank: int = space.rank) -> FastDecode:
            table = {rows: tiles(form)}
            return FastDecode(part, of_rank(whole, CONFIG, rank), rows, card, table, max_model_len=512, group=group)

        fast(EchoGroup(2, rows, CONFIG.hidden_size, BF16, card)).forward(batch, own)  # kernels are compiled and loaded
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        step = fast(OneOfTwo(space))
        kept.append((step, own))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            outs.append(step.forward(batch, own))
            graph.capture_end()
        graphs.append((graph, stream))
    expected = FastDecode(CONFIG, whole, rows, card, max_model_len=512).forward(batch, kv).clone()
    first: Tensor | None = None
    for _ in range(20):
        ends = [torch.cuda.Event() for _ in graphs]
        for _ in range(5):
            for (graph, stream), end in zip(graphs, ends, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
                    end.record()
        wait(ends, spaces)
        logits = torch.cat(outs, 1)
        error = float((logits - expected).norm() / expected.norm())
        assert error < 0.03
        first = logits if first is None else first
        assert torch.equal(logits, first)


class Doubled(EchoGroup):
    """The same without memory that all see."""

    def push_space(self, rows: int, width: int, dtype: torch.dtype) -> None:
        return None

    def sum(self, part: Tensor) -> Tensor:
        return 2 * part


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_rank_that_hears_itself(form: str) -> None:
    rows, card, cpu, part = FORMS[form], torch.device("cuda", 0), torch.device("cpu"), Shard(0, 2).config(CONFIG)
    weights = of_rank(random_weights(CONFIG, dtype=BF16), CONFIG, 0)
    batch, kv = decode_batch(part, CONTEXTS[:rows], 64, BF16)
    batch.token_ids.remainder_(part.vocab_size // 2)  # the rank's
    group, table = EchoGroup(2, rows, CONFIG.hidden_size, BF16, card), {rows: tiles(form)}
    step = FastDecode(part, moved(weights, card), rows, card, table, max_model_len=512, group=group)
    on_card, own = moved(batch, card), moved(kv, card)
    first = step.forward(on_card, own).clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        out = step.forward(on_card, own)
        graph.capture_end()
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, first)
    exact = moved(weights, cpu, torch.float32)
    plain = FastDecode(part, exact, rows, cpu, table, max_model_len=512, group=Doubled(2, rows, 8, torch.float32, cpu))
    expected = plain.forward(batch, moved(kv, cpu, torch.float32))
    error = float((first.cpu() - expected).norm() / expected.norm())
    assert error < 0.03


def wait(ends: list[torch.cuda.Event], spaces: list[PushSpace]) -> None:
    """Or let go who waits for ever."""
    last = time.monotonic() + SECONDS
    while not all(end.query() for end in ends):
        if time.monotonic() > last:
            zeros = torch.zeros(1 << 16, dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(1000):
                    for space in spaces:
                        fill_by_copies(space.slots, zeros)
            pytest.fail("the ranks wait for each other")
        time.sleep(1e-3)
