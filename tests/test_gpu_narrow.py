"""Narrow weights on the card: every way to multiply by them against the model of the matrices that they stand for, replays,
and engines whose steps mix these ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agreement import BF16_TOLERANCE, compare, with_rows
from engine_driver import make_core, make_requests, run
from fast_decode_cases import decode_batch, moved, random_weights, with_narrow
from headrace.attention.torch_backend import TorchAttention
from headrace.attention.triton_backend import TritonAttention
from headrace.fast_decode import digit_tile
from headrace.fast_decode.digit_tile import DigitTile
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.products import project
from headrace.fast_decode.ring_tile import RingAttention
from headrace.fast_decode.rounded_tile import PAIR_ROWS
from headrace.fast_decode.tiles import default_table
from headrace.kernels.activation import act_mul
from headrace.kernels.narrow_linear import FEW_ROWS, FEW_ROWS_WIDENED, FEW_SCALED_ROWS, MANY_ROWS, NarrowProduct, rounds
from headrace.kernels.quantize_rows import quantize_rows
from headrace.model.config import RopeConfig
from headrace.model.decoder import Decoder
from headrace.model.weight import dequantized
from narrow_cases import FORMS, narrow
from test_gpu_fast_decode import WIDE, relative
from tiny_models import write_tiny

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
CONFIG = replace(WIDE, hidden_size=640, intermediate_size=1536, num_heads=10, num_kv_heads=2)
USUAL = ("int4 by 128, zeros", "fp8 row", "int4 by 128, zeros", "int8 by 32, minima")
LAYERS = {
    "several kinds": [USUAL, ("fp8 blocks", "int4 by 32, minima", "int8 row", "fp4 by 32")],
    "fp8": [("fp8 row",) * 4] * 2,
    "int4": [("int4 by 128, zeros",) * 4] * 2,
}


@pytest.fixture
def card() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.parametrize("rows", [1, 2, 9, 17, 33, 64])
@pytest.mark.parametrize("kinds", LAYERS)
def test_the_fused_step(kinds: str, rows: int, card) -> None:
    weights = with_narrow(random_weights(CONFIG, dtype=BF16), LAYERS[kinds])
    batch, kv = decode_batch(CONFIG, ([150, 1, 17, 400, 64, 65, 63, 129] * 8)[:rows], 64, BF16)
    on_card, kv_card = moved(batch, card), moved(kv, card)
    wide = moved(weights, torch.device("cpu"), torch.float32)
    expected = Decoder(CONFIG, wide, TorchAttention()).decode(batch, moved(kv, torch.device("cpu"), torch.float32))
    fast = FastDecode(CONFIG, moved(weights, card), rows, card)
    got = fast.forward(on_card, kv_card).clone()
    assert relative(got, expected) < (0.1 if kinds == "fp8" and rows > PAIR_ROWS else 0.03)
    # captured and eager give the same bits, and so do all replays
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.forward(on_card, kv_card)
    different = torch.zeros((), dtype=torch.int64, device=card)
    for _ in range(100):
        graph.replay()
        different += (out != got).any()
    assert int(different) == 0


def test_one_row_by_rings_of_4_bits(card) -> None:
    """A step whose four products are by DigitTile: all but the last bits of one by other tiles, and the same in all replays."""
    config = replace(WIDE, hidden_size=4096, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=128, rope=RopeConfig(1e4, 128))
    weights = moved(with_narrow(random_weights(config, dtype=BF16), LAYERS["int4"]), card)
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            matrix.scales = matrix.scales.half()
    batch, kv = (moved(part, card) for part in decode_batch(config, [150], 64, BF16))
    usual = default_table(config, kinds=("int4",) * 4 + ("float",))[1]
    tiles = replace(usual, qkv=DigitTile(16, 1), o=DigitTile(32, 2), gate_up=DigitTile(64, 2, 96), down=DigitTile(32, 2))
    assert all(map(digit_tile.suits, (weights.layers[0].qkv, weights.layers[0].down)))
    expected = FastDecode(config, weights, 1, card, {1: usual}).forward(batch, kv).clone()
    fast = FastDecode(config, weights, 1, card, {1: tiles})
    assert isinstance(fast.tiles[1].down, DigitTile)
    got = fast.forward(batch, kv).clone()
    assert relative(got, expected) < 0.02
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.forward(batch, kv)
    different = torch.zeros((), dtype=torch.int64, device=card)
    for _ in range(100):
        graph.replay()
        different += (out != got).any()
    assert int(different) == 0


def test_products_by_rings_of_4_bits(card) -> None:
    """Alone: as exact as sums in float32, whatever the size of what the row is multiplied by."""
    x, w = torch.randn(1, 8192, device=card), narrow("int4 by 128, zeros", 96, 8192, card)
    x = (x * torch.logspace(-6, 6, 8192, device=card)[torch.randperm(8192, device=card)]).bfloat16()
    for tile in (DigitTile(16, 1), DigitTile(48, 2, 96), DigitTile(96, 4)):
        out = torch.full((1, 1, 96), float("nan"), device=card)
        project(x, w, out, tile)
        assert relative(out[0], x.double() @ dequantized(w, torch.float32).double().T) < 1e-5


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [8, 32, 64])
def test_fp8_weights_and_an_fp8_cache(rows: int, dim: int, card) -> None:
    """What is handed on in FP8 is what was handed on in bfloat16; heads of 128 by attention in rings."""
    config = replace(CONFIG, head_dim=dim, rope=RopeConfig(1e4, dim))
    weights = moved(with_narrow(random_weights(config, dtype=BF16), LAYERS["fp8"]), card)
    batch, kv = decode_batch(config, ([150, 1, 17, 400, 64, 65, 63, 129] * 8)[:rows], 64, torch.float8_e4m3fn)
    as_it_was = default_table(config, kinds=("fp8",) * 4 + ("float",), rounded=False)
    found = [FastDecode(config, weights, rows, card, table).forward(moved(batch, card), moved(kv, card)) for table in (None, as_it_was)]
    assert relative(found[0], found[1]) < (0.03 if rows <= PAIR_ROWS else 0.1)


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("lengths", [[150, 1, 17, 400, 64, 65, 63, 129], [1, 2, 3, 4]])
def test_attention_in_rings_hands_on_fp8(lengths: list[int], rows: int, card) -> None:
    """Of one program for a sequence or several, and padding: what the other attention kernel hands on, but for its last bits."""
    weights = moved(with_narrow(random_weights(CONFIG, dtype=BF16), LAYERS["fp8"]), card)
    batch, kv = decode_batch(CONFIG, [*(lengths * 8)[: rows - 1], 0], 64, BF16)
    found = []
    for ring in (None, RingAttention(2, 2, 256), RingAttention(1, 1, 64)):
        usual = default_table(CONFIG, kinds=("fp8",) * 4 + ("float",))
        fast = FastDecode(CONFIG, weights, rows, card, {n: replace(step, ring_attention=ring) for n, step in usual.items()})
        assert fast.rounds
        found.append(fast.forward(moved(batch, card), moved(kv, card))[:-1].clone())
    assert all(relative(ours, found[0]) < (0.02 if rows <= PAIR_ROWS else 0.1) for ours in found[1:])


@pytest.mark.parametrize("rows", [1, 5, FEW_SCALED_ROWS + 1, FEW_ROWS, FEW_ROWS + 1, FEW_ROWS_WIDENED, FEW_ROWS_WIDENED + 1, 700])
@pytest.mark.parametrize("form", FORMS)
def test_products_of_any_number_of_rows(form: str, rows: int, card) -> None:
    """By few rows, by FP8 times FP8 (activations lose digits) or by a matrix that is widened in parts; also captured."""
    w, bias = narrow(form, 48000 if rows == 700 and form == "int4 by 128" else 208, 384, card), torch.randn(208, device=card).to(BF16)
    x = torch.randn(rows, 384, device=card).to(BF16)
    bias = bias if w.shape[0] == 208 else None
    product = NarrowProduct(w, bias)
    expected = torch.nn.functional.linear(x.float(), dequantized(w, torch.float32), None if bias is None else bias.float())
    got = product(x)
    assert relative(got, expected) < (0.05 if product.scaled and rounds(x) else 0.004)
    out = torch.empty_like(got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(x, out)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, got)


@pytest.mark.parametrize("rows", [70, FEW_ROWS_WIDENED, FEW_ROWS_WIDENED + 1, 256, 257, MANY_ROWS, MANY_ROWS + 1])
def test_a_head_in_int8_of_all_sizes_of_steps(rows: int, card) -> None:
    """All of it, as a tile may be wrong in a few places; replays give the same bits."""
    w, x = narrow("int8 row", 20000, 4096, card), torch.randn(rows, 4096, device=card).to(BF16)
    product, expected = NarrowProduct(w, None), torch.nn.functional.linear(x.float(), dequantized(w, torch.float32))
    got = product(x)
    worst = max(relative(part, of) for part, of in zip(got.split(500, 1), expected.split(500, 1), strict=True))
    assert worst < 0.004
    out = torch.empty_like(got)
    for _ in range(50):
        assert torch.equal(product(x, out.fill_(float("nan"))), got)


@pytest.mark.parametrize("rows", [FEW_SCALED_ROWS + 1, 60, 72, 128, 200, 256, 257])
@pytest.mark.parametrize("size", [(4096, 12288), (6144, 4096), (18000, 2048)])
def test_fp8_by_fp8_of_full_sizes(size: tuple[int, int], rows: int, card) -> None:
    """Sums over K in parts too; all of it, and replays give the same bits."""
    w, x = narrow("fp8 row", *size, card), torch.randn(rows, size[1], device=card).to(BF16)
    product = NarrowProduct(w, None)
    rounded, got = quantize_rows(x), product(x)
    of_rows = rounded.values[:rows].float() * rounded.scales[:rows]
    expected = torch.nn.functional.linear(of_rows, dequantized(w, torch.float32))
    worst = max(relative(part, of) for part, of in zip(got.split(500, 1), expected.split(500, 1), strict=True))
    assert worst < 0.004
    for _ in range(50):
        assert torch.equal(product(rounded), got)


@pytest.mark.parametrize("rows", [FEW_SCALED_ROWS, FEW_SCALED_ROWS + 1, FEW_ROWS, FEW_ROWS + 1, 700])
@pytest.mark.parametrize("form", ["fp8 row", "fp8 blocks"])
def test_a_product_behind_an_activation(form: str, rows: int, card) -> None:
    """The bits of the two one after the other, whether or not what lies between is made FP8 at once."""
    product = NarrowProduct(narrow(form, 208, 384, card), None)
    gate_up = torch.randn(rows, 768, device=card).to(BF16)
    assert torch.equal(product.of_gated(gate_up, "silu"), product(act_mul(gate_up, "silu")))


@pytest.mark.parametrize("rows", [3, 100, 300])
@pytest.mark.parametrize("kinds", LAYERS)
def test_the_general_path(kinds: str, rows: int, card) -> None:
    weights = with_narrow(random_weights(CONFIG, dtype=BF16), LAYERS[kinds])
    batch, kv = decode_batch(CONFIG, ([15, 1, 17, 4, 6, 5, 3, 9] * 40)[:rows], 64, BF16)
    decoder = Decoder(CONFIG, moved(weights, card), TritonAttention(CONFIG, card))
    wide = moved(weights, torch.device("cpu"), torch.float32)
    expected = Decoder(CONFIG, wide, TorchAttention()).decode(batch, moved(kv, torch.device("cpu"), torch.float32))
    error = relative(decoder.decode(moved(batch, card), moved(kv, card)), expected)
    assert error < (0.1 if kinds != "int4" and rows > FEW_ROWS else 0.03), error


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_engines_of_any_schedule_agree(kind: str, tmp_path) -> None:
    """Captured or not, in chunks or not, one at a time or together: the same tokens until the first near-tie."""
    model = str(write_tiny("qwen3", tmp_path))
    options = {"device": "cuda", "dtype": "bfloat16", "quantization": kind}
    alone = make_core(model, max_num_seqs=1, enable_prefix_caching=False, **options)
    requests = with_rows(make_requests(3, 10, alone.vocab_size))
    want = run(alone, requests)
    problems = []
    for name, change in {"together": {}, "chunks": {"max_num_batched_tokens": 16}, "eager": {"enforce_eager": True}}.items():
        problems += compare(run(make_core(model, **options, **change), requests), want, BF16_TOLERANCE, name).problems
    assert not problems, "\n".join(problems)
