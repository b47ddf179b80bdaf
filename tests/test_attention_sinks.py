"""Attention sinks in our kernels, run by Triton's interpreter, against attention written out in float64."""

from __future__ import annotations

import pytest
import torch

from headrace.attention import widened
from headrace.attention.flash import CudnnAttention, FlashAttention3
from headrace.attention.triton_backend import TritonAttention
from headrace.kernels.attention_prefill import VarlenTile
from headrace.kernels.split import split_space
from headrace.model.config import ModelConfig, RopeConfig
from kernel_cases import attention_reference, batch_of, cache_of, in_fp8, paged_case, run_split, run_varlen, run_widened

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a card is")
SCALE = 0.17
CPU = torch.device("cpu")


def sinks_of(heads: int) -> torch.Tensor:
    """Some that count for nothing, some for about a key, some for nearly all."""
    return torch.linspace(-9.0, 9.0, heads)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("tokens, window, softcap, chunk, narrow", [
    (1, 0, 0.0, 64, False), (1, 20, 3.0, 64, False), (3, 9, 0.0, 64, False), (3, 0, 0.0, 512, False), (1, 20, 0.0, 64, True),
])  # fmt: skip
def test_few_rows(tokens, window, softcap, chunk, narrow):
    lens = [min(tokens, n) for n in (3, 1, 2, 1)]
    case = wide = paged_case(lens, [140, 1, 65, 0], 6, 2, 32, 16)
    if narrow:
        case, wide = in_fp8(case)
    space = split_space(4, 6, 2, 32, CPU)
    options = {"window": window, "softcap": softcap, "sinks": sinks_of(6)}
    want = attention_reference(wide, SCALE, **options)
    for _ in range(2):  # the tickets are as they were
        close(run_split(case, space, scale=SCALE, tokens=tokens, chunk=chunk, **options), want)
    assert not torch.allclose(want, attention_reference(wide, SCALE, window, softcap)), "they do count"


@pytest.mark.parametrize("window, softcap, tma, narrow", [
    (0, 0.0, True, False), (1, 0.0, False, False), (30, 4.0, True, True), (0, 0.0, False, True),
])  # fmt: skip
def test_many_rows(window, softcap, tma, narrow):
    case = wide = paged_case([40, 1, 20], [40, 40, 90], 6, 2, 32, 64)
    options = {"window": window, "softcap": softcap, "sinks": sinks_of(6)}
    tile = VarlenTile(32, 32, 4, 2, tma)
    if narrow:
        case, wide = in_fp8(case)
        close(run_widened(case, scale=SCALE, tile=tile, **options), attention_reference(wide, SCALE, **options))
    close(run_varlen(case, scale=SCALE, tile=tile, **options), attention_reference(wide, SCALE, **options))


@pytest.mark.parametrize("narrow", [False, True])
def test_every_backend_has_them(monkeypatch, narrow):
    """Whatever it would else hand to kernels that do not know them."""
    monkeypatch.setattr("headrace.attention.triton_backend.SPLIT_CONTEXT", 100)
    monkeypatch.setattr(widened, "WORTH", 20)
    monkeypatch.setattr("headrace.attention.flash.CUDNN_MULTIPLE", 16)
    monkeypatch.setattr("headrace.attention.flash.FA3_ROWS", 8)
    case = wide = paged_case([1, 1, 3, 32], [70, 3, 120, 32], 4, 2, 16, 16)
    if narrow:
        case, wide = in_fp8(case)
    model = ModelConfig(
        family="gpt_oss", vocab_size=64, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=64, max_position=4096, rope=RopeConfig(1e4, 16), sinks=True,
    )  # fmt: skip
    backends = [widened.WidenedAttention(model, CPU)] if narrow else []
    for backend in (TritonAttention(model, CPU), CudnnAttention(model, CPU), FlashAttention3(model, CPU, None), *backends):  # type: ignore[arg-type]
        batch, kv = batch_of(case), cache_of(case)
        backend.begin(batch, kv)  # type: ignore[arg-type]
        own = kv.rows if backend.keeps_own else None
        for window in (0, 25):
            options = {"window": window, "softcap": 0.0, "sinks": sinks_of(4)}
            got = backend.attend(case.q, 0, kv, batch, scale=SCALE, own=own, **options)  # type: ignore[arg-type]
            close(got, attention_reference(wide, SCALE, **options))
