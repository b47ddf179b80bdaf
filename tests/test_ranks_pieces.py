"""Prompts of two ranks in pieces, whose sums are on their way meanwhile: the logits of one rank, the same bits on both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from echo_group import EchoGroup
from fast_decode_cases import PLAIN, random_weights
from headrace.attention.torch_backend import TorchAttention
from headrace.cache.kv_cache import KVCache
from headrace.fast_decode import pieces
from headrace.fast_decode.decoder import FastDecoder
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.pieces import HeadsProjection, spans
from headrace.kernels.norm import add_rms_norm, add_rms_norm_reference
from headrace.model import linear
from headrace.model.batch import ForwardBatch
from headrace.model.config import RopeConfig
from headrace.model.decoder import Decoder
from headrace.model.decoder_weights import DecoderWeights, LayerWeights
from headrace.model.linear import MatrixLinear, make_linear
from headrace.model.weight import Weight
from rank_threads import ThreadExchange, ThreadGroup, run_ranks

CPU = torch.device("cpu")
CONFIG = replace(
    PLAIN, hidden_size=64, intermediate_size=64, num_layers=3, qk_norm="head", head_dim=32, rope=RopeConfig(1e4, 32),
    vocab_size=96, max_position=1024,
)  # fmt: skip


def half(tensor: Tensor, rank: int, dim: int = 0, parts: int = 1) -> Tensor:
    return torch.cat([part.chunk(2, dim)[rank] for part in tensor.chunk(parts, dim)], dim).contiguous()


def of_rank(weights: DecoderWeights, rank: int) -> DecoderWeights:
    def layer(whole: LayerWeights) -> LayerWeights:
        q, kv = whole.qkv.data.split((CONFIG.q_size, 2 * CONFIG.kv_size))
        return replace(
            whole, o_bias=None if rank else whole.o_bias, qkv=Weight(torch.cat((half(q, rank), half(kv, rank, parts=2)))),
            o=Weight(half(whole.o.data, rank, 1)),
            gate_up=Weight(half(whole.gate_up.data, rank, parts=2)), down=Weight(half(whole.down.data, rank, 1)),
        )  # fmt: skip

    layers, head = [layer(whole) for whole in weights.layers], Weight(half(weights.lm_head.data, rank))
    return replace(weights, embedding=half(weights.embedding, rank), layers=layers, lm_head=head)


def prompt(rows: int) -> ForwardBatch:
    count = torch.arange(rows)
    return ForwardBatch(
        token_ids=(count * 7 % 96).int(), positions=count.int(), slot_mapping=count, block_tables=torch.arange(32).int()[None],
        seq_slots=torch.zeros(1).int(), query_start=torch.tensor([0, rows]).int(), seq_lens=torch.tensor([rows]).int(),
        num_decodes=0, query_lens=[rows], context_lens=[rows],
    )  # fmt: skip


@pytest.mark.parametrize("rows, hooked, biased", [
    (300, False, False), (300, True, False), (192, False, False), (191, False, False), (300, False, True),
])  # fmt: skip
def test_the_logits_are_those_of_one_rank(rows: int, hooked: bool, biased: bool, monkeypatch) -> None:
    """A bias of o, which one rank has, leaves both without pieces."""
    monkeypatch.setattr(pieces, "PIECE_ROWS", 128)
    of_one = replace(CONFIG, o_bias=biased)
    weights, batch = random_weights(of_one), prompt(rows)

    def run(decoder: Decoder, config) -> tuple[Tensor, list[Tensor]]:
        seen: list[Tensor] = []
        if hooked:
            decoder.hidden_state_hook = lambda index, residual, of: seen.append(residual.clone())
        logits = decoder.logits(decoder.forward(batch, KVCache(config, 32, 16, torch.float32, CPU)))
        return logits if decoder.vocab is None else decoder.vocab.whole(logits), seen

    def of(group: ThreadGroup) -> tuple[Tensor, list[Tensor]]:
        config, own = group.shard.config(of_one), of_rank(weights, group.shard.rank)
        fast = FastDecode(config, own, 3, CPU, max_model_len=512, group=group)
        decoder = FastDecoder(config, own, TorchAttention(), fast, max_model_len=512, group=group, make=make, most_rows=512)
        assert isinstance(decoder.layers[0].mixer.qkv, HeadsProjection)  # type: ignore[attr-defined]
        found = run(decoder, config)
        exchange = decoder.exchange
        if biased:
            assert exchange is None
            return found
        assert isinstance(exchange, ThreadExchange) and (rows < 192 or len(exchange.sent) >= 4 * config.num_layers - 2)
        return found

    want, wanted = run(Decoder(of_one, weights, TorchAttention(), max_model_len=512), of_one)
    (first, seen), (second, others) = run_ranks(2, of)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want, rtol=1e-5, atol=1e-5)
    assert len(seen) == len(others) == (CONFIG.num_layers if hooked else 0)
    for mine, theirs, whole in zip(seen, others, wanted, strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decode_rows, pieced", [(0, True), (191, True), (192, False)])
def test_steps_that_may_be_captured_are_not_in_pieces(decode_rows: int, pieced: bool, monkeypatch) -> None:
    """Decodes of as many rows would be, and a graph would wait for numbers that have come long ago."""
    monkeypatch.setattr(pieces, "PIECE_ROWS", 128)

    def of(group: ThreadGroup) -> bool:
        config, own = group.shard.config(CONFIG), of_rank(random_weights(CONFIG), group.shard.rank)
        decoder = FastDecoder(
            config, own, TorchAttention(), FastDecode(config, own, 3, CPU, max_model_len=512, group=group), max_model_len=512,
            group=group, make=make, most_rows=512, decode_rows=decode_rows,
        )  # fmt: skip
        return decoder.exchange is not None

    assert run_ranks(2, of) == [pieced, pieced]


def test_halves_of_a_ranks_part_join_the_others(monkeypatch) -> None:
    """In the kernel that adds up parts, in the interpreter; they come back as the other rank's."""
    config = replace(CONFIG, hidden_size=256, intermediate_size=256, num_layers=2)
    weights, batch = random_weights(config, dtype=torch.bfloat16), prompt(70)
    weights = replace(weights, embedding=weights.embedding[:48])
    fitted, found = linear.halves_fit, []
    for fits in (fitted, lambda rows, matrix: False):
        asked: list[bool] = []
        monkeypatch.setattr(linear, "halves_fit", lambda rows, matrix, fits=fits, to=asked: to.append(fits(rows, matrix)) or to[-1])
        group = EchoGroup(2, 128, 256, torch.bfloat16, CPU)
        fast = FastDecode(config, weights, 3, CPU, max_model_len=512, group=group)
        decoder = FastDecoder(config, weights, TorchAttention(), fast, max_model_len=512, group=group, make=make)
        found.append(decoder.forward(batch, KVCache(config, 32, 16, torch.bfloat16, CPU)).float())
        assert any(asked) == (fits is fitted)
    assert (found[0] - found[1]).norm() <= 0.02 * found[1].norm()


def make(weight: Weight, bias: Tensor | None, reduce):
    return MatrixLinear(weight.data, reduce) if bias is None else make_linear(weight, bias, reduce)


def test_pieces_are_all_rows_in_order() -> None:
    for rows in (1, 127, 128, 4097, 8191, 8192, 10000, 16384):
        parts = spans(rows)
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
        assert len(parts) == max(1, round(rows / pieces.PIECE_ROWS))


def test_what_a_norm_leaves_may_be_where_the_residual_was() -> None:
    """As the sum of two parts joins it, a piece at a time."""
    parts, residual, norm = torch.randn(2, 5, 64), torch.randn(9, 64), torch.randn(64)
    normed, total = add_rms_norm_reference(parts, residual[2:7], norm, 1e-6, 0.0, 0.5)
    whole, before = torch.zeros(9, 64), residual.clone()
    add_rms_norm(parts, residual[2:7], norm, 1e-6, 0.0, 0.5, into=(whole[2:7], residual[2:7]))
    assert torch.equal(whole[2:7], normed) and torch.equal(residual[2:7], total)
    assert torch.equal(residual[:2], before[:2]) and torch.equal(residual[7:], before[7:]) and not whole[:2].any()
