"""Two ranks as two streams of one card: the fused step of one row, whose kernels wait for each other's parts.

A kernel may start before the one it waits for has ended (programmatic dependent launch), and so on: of a model that is small
enough the programs of a whole step are on the card at once, waiting. On two cards they are in nobody's way: each was started
behind those that it waits for. Here the other rank's programs, for whose parts these wait, need room on the same card. So
there is room for all programs of both ranks' steps at once, and the test says so.
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
from headrace.fast_decode.tiles import StepTiles
from headrace.kernels.all_reduce import PushSpace, row_sum_tiles
from headrace.kernels.launch import num_multiprocessors
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
CONTEXT = 150


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


def tiles(shared: bool) -> StepTiles:
    attention = AttentionTile(block_n=32, num_warps=1, early=True, few=4096, at_once=shared)
    tile = GemvTile(16, 256, 1, 1)
    gate_up, down = (GemvTile(16, 128, 1, 1, shared=2) for _ in range(2)) if shared else (GemvTile(8, 256, 1, 1), tile)
    return StepTiles(tile, tile, gate_up, down, tile, AttentionTile(early=True), 32, few_attention=attention)


def programs(part: ModelConfig, step: StepTiles) -> int:
    """Of a rank's step, of one warp each but for attention's and the embedding's."""
    hidden, sums = part.hidden_size, row_sum_tiles(part.hidden_size)
    columns = part.q_size + 2 * part.kv_size
    layer = columns // step.qkv.block_n + part.num_heads * -(-CONTEXT // 32) + part.intermediate_size // step.gate_up.block_n
    layer += hidden // step.o.block_n + hidden // step.down.block_n + 2 * sums
    return part.num_layers * layer + part.vocab_size // 2 // step.lm_head.block_n + 2


@pytest.mark.parametrize("shared", [False, True])
@torch.inference_mode()
def test_two_ranks_give_the_logits_of_one(shared: bool) -> None:
    card = torch.device("cuda", 0)
    weights = random_weights(CONFIG, dtype=BF16)
    batch, kv = (moved(what, card) for what in decode_batch(CONFIG, [CONTEXT], 64, BF16))
    whole = moved(weights, card)
    spaces = push_spaces(2, 1, CONFIG.hidden_size, BF16, "cuda")
    kept, graphs, outs = [], [], []  # graphs have addresses of what is kept
    for space in spaces:
        part = Shard(space.rank, 2).config(CONFIG)
        own = KVCache(part, kv.num_blocks, kv.block_size, BF16, card)
        for mine, all_heads in zip((*own.k, *own.v), (*kv.k, *kv.v), strict=True):
            mine.copy_(half(all_heads, space.rank, 2))

        def fast(group: EchoGroup, part: ModelConfig = part, rank: int = space.rank) -> FastDecode:
            table = {1: tiles(shared)}
            return FastDecode(part, of_rank(whole, CONFIG, rank), 1, card, table, max_model_len=512, group=group)

        assert 2 * programs(part, tiles(shared)) <= 8 * num_multiprocessors(card)  # 65,536 registers are for 8 warps of 255

        fast(EchoGroup(2, 1, CONFIG.hidden_size, BF16, card)).forward(batch, own)  # kernels are compiled and loaded
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        step = fast(OneOfTwo(space))
        kept.append((step, own))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            outs.append(step.forward(batch, own))
            graph.capture_end()
        graphs.append((graph, stream))
    expected = FastDecode(CONFIG, whole, 1, card, max_model_len=512).forward(batch, kv).clone()
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
