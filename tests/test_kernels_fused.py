"""The fused elementwise kernels, run by Triton's interpreter on the CPU, against their torch references."""

from __future__ import annotations

import pytest
import torch

from headrace.attention.triton_backend import TritonAttention
from headrace.kernels import activation, norm, qkv
from headrace.kernels.activation import act_mul_reference, act_mul_triton
from headrace.kernels.norm import (
    NormTile,
    add_normed_reference,
    add_normed_triton,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
    rms_norm_triton,
)
from headrace.kernels.qkv import qkv_rope_write_triton
from headrace.model import decoder, linear
from headrace.model.linear import MatrixLinear, make_linear
from kernel_cases import check_qkv, flat_cache
from model_harness import Sequences, load_tiny
from tiny_models import write_tiny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a card is")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [64, 576, 100])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(width: int, offset: float) -> None:
    x, weight = torch.randn(5, width), torch.randn(width)
    close(rms_norm_triton(x, weight, 1e-5, offset), rms_norm_reference(x, weight, 1e-5, offset))
    wide = torch.randn(4, 3 * width)[:, width : 2 * width]  # a part of a fused projection
    close(rms_norm_triton(wide, weight, 1e-5, offset), rms_norm_reference(wide, weight, 1e-5, offset))


@pytest.mark.parametrize("offset, scale", [(0.0, 1.0), (1.0, 0.22)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize("with_post", [False, True])
def test_add_rms_norm(offset: float, scale: float, dtype: torch.dtype, tolerance: float, with_post: bool) -> None:
    x, residual, weight = torch.randn(5, 576).to(dtype), torch.randn(5, 576).to(dtype), torch.randn(576).to(dtype)
    before, post = residual.clone(), torch.randn(576).to(dtype) if with_post else None
    normed, total = add_rms_norm_triton(x, residual, weight, 1e-6, offset, scale, post)
    added = x if post is None else rms_norm_reference(x, post, 1e-6, offset)
    want, want_total = add_rms_norm_reference(added, residual, weight, 1e-6, offset, scale)
    assert torch.equal(add_rms_norm_reference(x, residual, weight, 1e-6, offset, scale, post)[0], want)
    close(normed, want, tolerance)
    close(total, want_total, tolerance)
    assert torch.equal(residual, before), "the residual is not changed in place"
    parts = torch.stack((x - 1, torch.ones_like(x)))
    normed, total = add_rms_norm_triton(parts, residual, weight, 1e-6, offset, scale, post)
    want, want_total = add_rms_norm_reference(parts, residual, weight, 1e-6, offset, scale, post)
    close(normed, want, tolerance)
    close(total, want_total, tolerance)


@pytest.mark.parametrize("tile", [NormTile(1, 1), NormTile(4, 2)])
def test_norms_by_other_tiles(tile: NormTile) -> None:
    """Also where the last program has rows to spare."""
    x, residual, weight = torch.randn(5, 100), torch.randn(5, 100), torch.randn(100)
    close(rms_norm_triton(x, weight, 1e-6, tile=tile), rms_norm_reference(x, weight, 1e-6))
    for got, want in zip(
        add_rms_norm_triton(x, residual, weight, 1e-6, tile=tile), add_rms_norm_reference(x, residual, weight, 1e-6), strict=True
    ):
        close(got, want)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("width", [96, 1500])
def test_act_mul(kind, width: int) -> None:
    gate_up = 3 * torch.randn(3, 2 * width)
    gate_up[0, :4] = torch.tensor([100.0, -100.0, 0.0, 30.0])
    close(act_mul_triton(gate_up, kind), act_mul_reference(gate_up, kind))


@pytest.mark.parametrize("heads, kv_heads, head_dim, rot", [
    (4, 2, 32, 32), (9, 3, 64, 64), (6, 6, 80, 80), (4, 1, 80, 32), (16, 2, 128, 96), (3, 3, 96, 96), (20, 4, 16, 8), (3, 0, 512, 512),
])  # fmt: skip
@pytest.mark.parametrize("norm", ["none", "head", "full"])
@pytest.mark.parametrize("keep", [False, True])
def test_qkv(heads: int, kv_heads: int, head_dim: int, rot: int, norm: str, keep: bool) -> None:
    check_qkv(qkv_rope_write_triton, close, heads, kv_heads, head_dim, rot, norm, rows=6, block=16, keep=keep)


@pytest.mark.parametrize("norm", ["none", "head", "full"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rot", [80, 32])
def test_halves_of_a_projection(rot: int, norm: str, keep: bool) -> None:
    check_qkv(qkv_rope_write_triton, close, 4, 2, 80, rot, norm, rows=6, block=16, keep=keep, halves=True)


@pytest.mark.parametrize("keys_alone", [False, True])
@pytest.mark.parametrize("rot", [80, 32])
def test_normed_values(keys_alone: bool, rot: int) -> None:
    options = {"rows": 6, "block": 16, "keep": False, "keys_alone": keys_alone, "normed_values": True}
    check_qkv(qkv_rope_write_triton, close, 4, 2, 80, rot, "head", **options)


@pytest.mark.parametrize("factor", [None, torch.tensor([0.3])])
def test_add_normed(factor) -> None:
    x, total, weight = torch.randn(5, 2 * 96)[:, :96], torch.randn(5, 96), torch.randn(96)
    want = total.clone()
    add_normed_reference(want, x, weight, 1e-6, factor)
    add_normed_triton(total, x, weight, 1e-6, factor)
    close(total, want)


def test_qkv_padded_rows_write_nothing() -> None:
    heads, kv_heads, head_dim = 4, 2, 32
    qkv, angle = torch.randn(4, (heads + 2 * kv_heads) * head_dim), torch.rand(10, 16)
    kv = flat_cache(2, 16, kv_heads, head_dim)
    slots = torch.tensor([5, -1, -1, 20])
    qkv_rope_write_triton(
        qkv, torch.tensor([1, 0, 0, 2], dtype=torch.int32), angle.cos(), angle.sin(), kv, 0, slots,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, q_norm=None, k_norm=None, eps=1e-6, norm_offset=0.0,
    )  # fmt: skip
    for tensor in (kv.k[0], kv.v[0]):
        flat = tensor.flatten(0, 1)
        assert (flat[[5, 20]] != 7).all()
        flat[[5, 20]] = 7
        assert (flat == 7).all()


GEMMA4 = {  # inputs of layers; values of their own, those that are keys, and another layer's
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 12,
}  # fmt: skip


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("family, settings", [("qwen3", {}), ("olmo2", {}), ("gemma4", GEMMA4)])
def test_decoder_on_kernels(family: str, settings: dict, halved: bool, tmp_path, monkeypatch) -> None:
    """The decoder as a GPU runs it, products that add in place and few wanted rows included, against the torch decoder."""
    config, weights = load_tiny(write_tiny(family, tmp_path, **settings))
    ids = [3 + 7 * i % 50 for i in range(30)]
    steps = [  # work, wanted rows
        ([(0, ids[:7]), (1, ids[7:10])], [[6], []]),
        ([(0, ids[10:11]), (1, ids[11:15]), (2, ids[15:18])], [[0], [1, 3], [2]]),
        ([(1, ids[18:20])], [[]]),
    ]
    run = Sequences(config, weights, max_len=64, block_size=16)
    want = [logits[rows] for work, wanted in steps for logits, rows in zip(run.step(work), wanted, strict=True)]
    for module in (activation, decoder, norm, qkv):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(linear, "halves_fit", lambda rows, matrix: halved)
    run = Sequences(
        config, weights, max_len=64, block_size=16, attention=TritonAttention(config, torch.device("cpu")),
        make=lambda weight, bias, _: MatrixLinear(weight.data) if bias is None else make_linear(weight, bias),
    )  # fmt: skip
    got = [logits for work, wanted in steps for logits in run.step(work, wanted)]
    close(torch.cat(got), torch.cat(want), 1e-4)
