"""Linears in the form that the CPU runs them in, and the decoder below float32."""

from __future__ import annotations

import pytest
import torch

from headrace.model.decoder import DecoderWeights
from headrace.model.families import weight_plan
from headrace.model.linear import make_linear
from model_harness import Sequences, load_tiny
from test_model_families import tokens
from tiny_models import write_tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 96), (33, 17), (16400, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_product(dtype, shape, with_bias):
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    exact_weight = weight.double()
    exact_bias = 0 if bias is None else bias.double()
    linear = make_linear(weight, bias)
    for rows in (1, 2, 7, 130):
        x = torch.randn(rows, shape[1]).to(dtype)
        exact = x.double() @ exact_weight.T + exact_bias
        got = linear(x)
        assert got.dtype == dtype
        assert (got - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "phi3", "gemma2", "gemma3"])
def test_half_precision_follows_float32(family, dtype, tmp_path):
    config, weights = load_tiny(write_tiny(family, tmp_path))
    targets = {spec.target for spec in weight_plan(config)}
    tensors = {"embedding": weights.embedding, "final_norm": weights.final_norm, "lm_head": weights.lm_head}
    for index, layer in enumerate(weights.layers):
        tensors |= {t: getattr(layer, t.split(".")[2]) for t in targets if t.startswith(f"layers.{index}.")}
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    ids = tokens(25)

    def logits(of: dict[str, torch.Tensor]) -> torch.Tensor:
        run = Sequences(config, DecoderWeights.from_tensors(of, config), max_len=32)
        return torch.cat([run.step([(0, ids[:20])])[0], *(run.step([(0, [token])])[0] for token in ids[20:])])

    exact = logits({name: tensor.float() for name, tensor in rounded.items()})
    got = logits(rounded)
    assert got.dtype == torch.float32
    scale = exact.std()
    assert (got - exact).std() <= (0.06 if dtype == torch.bfloat16 else 0.01) * scale
