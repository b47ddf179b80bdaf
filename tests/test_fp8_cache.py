"""Keys and values in FP8: what is stored, what reads it (torch, and the kernels in Triton's interpreter), and that no schedule shows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import drafting_core
from engine_driver import BLOCK, assert_all_same, complete, lonely_answers, make_core, make_requests, run
from headrace.attention import flash, select, widened
from headrace.attention.select import choose_cache_dtype, select_attention
from headrace.attention.triton_backend import TritonAttention
from headrace.cache import fp8
from headrace.cache.kv_cache import KVCache
from headrace.config import EngineConfig
from headrace.engine.build import build_engine
from headrace.engine.messages import EngineRequest
from headrace.errors import CapacityError, ParameterError
from headrace.kernels.attention_prefill import VarlenTile
from headrace.kernels.qkv import qkv_rope_write_triton
from headrace.kernels.widen_kv import widen
from headrace.model.config import ModelConfig, RopeConfig
from headrace.sampling.params import SamplingParams
from kernel_cases import (
    attention_reference,
    batch_of,
    cache_of,
    check_qkv_fp8,
    in_fp8,
    paged_case,
    run_split,
    run_varlen,
    run_widened,
)  # fmt: skip
from test_memory_plan import plan
from tiny_models import VOCAB, write_tiny

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a card is")
SCALE = 0.17


def shape(**sizes) -> ModelConfig:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_layers": 2, **sizes}
    return ModelConfig(
        family="llama", vocab_size=64, hidden_size=64, intermediate_size=64, max_position=512, rope=RopeConfig(1e4, 16), **sizes
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- what is stored

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.floats(-4.0, 4.0, width=32) | st.sampled_from([0.0, 1e-20, 448.0, 1e30])


@settings(max_examples=100)
@given(st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=1, max_size=4))
def test_each_vector_is_kept_within_the_rounding_of_fp8_whatever_is_beside_it(vectors):
    x = torch.tensor(vectors, dtype=torch.float32)
    data, scales = fp8.quantize(x)
    got, top = fp8.dequantize(data, scales), x.abs().amax(-1, keepdim=True)
    assert got.isfinite().all(), "the largest numbers there are become neither infinite nor NaN"
    assert ((got - x).abs() <= torch.maximum(x.abs() / 16, top / 448 / 512).clamp_min(fp8.SMALLEST) * 1.001).all()
    assert torch.allclose(got.abs().amax(-1, keepdim=True), top, rtol=1e-6, atol=fp8.SMALLEST), "the largest one stays"
    for vector, kept, scale in zip(x, data, scales, strict=True):
        alone, its_scale = fp8.quantize(vector)
        assert torch.equal(alone.float(), kept.float()) and its_scale == scale


def test_what_is_not_finite_breaks_its_own_vector_only():
    x = torch.randn(6, 2, 8)
    clean = fp8.dequantize(*fp8.quantize(x))
    x[1, 0, 3], x[4, 1, 0] = math.inf, math.nan
    got = fp8.dequantize(*fp8.quantize(x))
    assert got[1, 0].isnan().all() and got[4, 1].isnan().all()
    got[1, 0], got[4, 1] = clean[1, 0], clean[4, 1]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_a_block_costs_its_bytes_and_about_half_of_bfloat16(head_dim):
    config = shape(head_dim=head_dim)
    kv = KVCache(config, 5, 8, fp8.DTYPE, CPU)
    tensors = [*kv.k, *kv.v, *(t for pair in kv.scales for t in pair if t is not None)]
    assert sum(t.nbytes for t in tensors) == 5 * KVCache.bytes_per_block(config, 8, fp8.DTYPE)
    ratio = KVCache.bytes_per_block(config, 8, torch.bfloat16) / KVCache.bytes_per_block(config, 8, fp8.DTYPE)
    assert ratio == 2 * head_dim / (head_dim + 4)


def test_the_same_memory_holds_about_twice_the_context(tmp_path):
    model = shape(head_dim=64)
    held = [plan(model, dtype=torch.bfloat16, cache_dtype=kept, kv_cache_bytes=10_000_000).num_blocks for kept in (None, fp8.DTYPE)]
    assert 1.85 * held[0] < held[1] <= 2 * held[0]
    options = {"device": "cpu", "kv_cache_dtype": "fp8", "kv_cache_bytes": 1000, "max_model_len": 128, "enforce_eager": True}
    with pytest.raises(CapacityError, match="kv_cache_bytes = 1000 holds"):
        build_engine(EngineConfig(model=str(write_tiny("qwen3", tmp_path)), **options))


# --------------------------------------------------------------------------------------------------------------- what reads it


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)


@interpreted
@pytest.mark.parametrize("sizes, window, softcap, tokens", [
    ((8, 2, 64, 16), 0, 0.0, 1), ((9, 3, 80, 64), 20, 3.0, 1), ((7, 1, 24, 5), 0, 0.0, 1), ((8, 2, 64, 16), 9, 0.0, 3),
])  # fmt: skip
def test_few_rows(sizes, window, softcap, tokens):
    lens = [min(tokens, n) for n in (3, 1, 2)]
    case, wide = in_fp8(paged_case(lens, [150, 1, 77], *sizes))
    got = run_split(case, scale=SCALE, tokens=tokens, window=window, softcap=softcap, chunk=64)
    close(got, attention_reference(wide, SCALE, window, softcap))


@interpreted
def test_numbers_of_any_size_become_float16():
    """Queries, and values of tokens beside each other, far beyond what it holds."""
    case = paged_case([1, 1], [150, 77], 8, 2, 64, 16, dtype=torch.bfloat16)
    sizes = 10.0 ** torch.arange(-12, 12).repeat_interleave(8)[: case.v_cache.shape[1]].view(1, -1, 1, 1)
    large = replace(case, q=case.q * 1e9, k_cache=case.k_cache * 1e-9, v_cache=(case.v_cache * sizes).to(torch.bfloat16))
    narrow, wide = in_fp8(large)
    got, want = run_split(narrow, scale=SCALE, chunk=64).double(), attention_reference(wide, SCALE)
    assert (got - want).norm() < 0.01 * want.norm()


@interpreted
@pytest.mark.parametrize("sizes", [(4, 2, 32, 16), (3, 1, 80, 64)])
@pytest.mark.parametrize("window, softcap", [(0, 0.0), (30, 4.0)])
@pytest.mark.parametrize("tma", [False, True])
def test_many_rows(sizes, window, softcap, tma):
    if tma and sizes[-1] == 16:
        pytest.skip("a block must hold whole tiles")
    case, wide = in_fp8(paged_case([40, 1, 30], [40, 30, 100], *sizes))
    got = run_varlen(case, scale=SCALE, tile=VarlenTile(32, 32, 4, 2, tma), window=window, softcap=softcap)
    close(got, attention_reference(wide, SCALE, window, softcap))


@interpreted
@pytest.mark.parametrize("sizes, window, softcap, tma", [
    ((4, 2, 32, 16), 0, 0.0, True), ((3, 1, 80, 64), 30, 0.0, False), ((2, 2, 24, 5), 30, 4.0, True),
])  # fmt: skip
def test_many_rows_of_what_was_made_wide(sizes, window, softcap, tma):
    case, wide = in_fp8(paged_case([3, 40, 1, 30], [5, 40, 30, 100], *sizes))
    got = run_widened(case, 1, scale=SCALE, tile=VarlenTile(32, 32, 4, 2, tma), window=window, softcap=softcap)
    assert got[:3].isnan().all()
    close(got[3:], attention_reference(wide, SCALE, window, softcap)[3:])


@interpreted
@pytest.mark.parametrize("tokens, pieces", [(32, 0), (64, 2), (1024, 1)])
def test_prompts_are_made_wide_as_many_as_there_is_room_for(monkeypatch, tokens, pieces):
    monkeypatch.setattr(widened, "WORTH", 20)
    monkeypatch.setattr(widened, "TOKENS", 2 * tokens)  # of float32 half as many
    seen = []
    monkeypatch.setattr(widened, "widen", lambda *given, **which: seen.append(which) or widen(*given, **which))
    case, wide = in_fp8(paged_case([1, 1, 32, 20], [70, 3, 32, 50], 4, 2, 16, 16))
    backend, batch, kv = widened.WidenedAttention(shape(), CPU), batch_of(case), cache_of(case)
    backend.begin(batch, kv)  # type: ignore[arg-type]
    got = backend.attend(case.q, 0, kv, batch, scale=SCALE, window=0, softcap=0.0)  # type: ignore[arg-type]
    close(got, attention_reference(wide, SCALE))
    assert [(which["first_seq"], which["num_seqs"]) for which in seen] == [[], [(2, 2)], [(2, 1), (3, 1)]][pieces]
    room = backend.room
    planned = backend.workspace_bytes(4) - TritonAttention(shape(), CPU).workspace_bytes(4)
    assert room is None or sum(t.nbytes for t in (room.k, room.v, room.k_scales)) <= planned


@interpreted
def test_every_backend_reads_it_by_our_kernels(monkeypatch):
    """Also those that hand prefill to others, should one be made for such a cache."""
    monkeypatch.setattr(flash, "CUDNN_MULTIPLE", 16)
    monkeypatch.setattr(flash, "FA3_ROWS", 8)
    case, wide = in_fp8(paged_case([1, 1, 32, 20], [70, 3, 32, 50], 4, 2, 16, 16))
    model = shape()
    for backend in (TritonAttention(model, CPU), flash.CudnnAttention(model, CPU), flash.FlashAttention3(model, CPU, None)):  # type: ignore[arg-type]
        batch, kv = batch_of(case), cache_of(case)
        backend.begin(batch, kv)  # type: ignore[arg-type]
        assert not backend.keeps_own
        close(backend.attend(case.q, 0, kv, batch, scale=SCALE, window=0, softcap=0.0), attention_reference(wide, SCALE))  # type: ignore[arg-type]


@interpreted
@pytest.mark.parametrize("sizes, norm", [((4, 2, 32, 32), True), ((3, 3, 80, 32), False), ((5, 1, 24, 24), True)])
def test_the_kernel_that_rotates_writes_what_the_reference_would(sizes, norm):
    torch.manual_seed(0)
    check_qkv_fp8(qkv_rope_write_triton, *sizes, rows=8, block=16, norm=norm)


@interpreted
@pytest.mark.parametrize("name", ["auto", "triton", "cudnn", "fa3"])
def test_only_our_kernels_are_chosen(monkeypatch, name):
    monkeypatch.setattr(select, "capability", lambda device: (9, 0))
    card, model = torch.device("cuda", 0), shape(head_dim=128)
    if name in ("auto", "triton"):
        assert type(select_attention(name, model, card, fp8.DTYPE)[0]) is widened.WidenedAttention
        return
    with pytest.raises(ParameterError, match=f"attention_backend: got '{name}', allowed: auto or triton .*FP8"):
        select_attention(name, model, card, fp8.DTYPE)


def test_who_has_no_fp8_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(select, "capability", lambda device: (8, 6))
    with pytest.raises(ParameterError, match=r"kv_cache_dtype: got 'fp8', allowed: auto on this GPU: FP8 needs .*8\.9"):
        choose_cache_dtype("fp8", torch.bfloat16, torch.device("cuda", 0))
    with pytest.raises(ParameterError, match="kv_cache_dtype: got 'fp8', allowed: auto, float32, bfloat16 or int8 in the native"):
        build_engine(EngineConfig(model=str(write_tiny("qwen3", tmp_path)), device="cpu", kv_cache_dtype="fp8"))
    with pytest.raises(ParameterError, match=r"kv_cache_dtype: got 'fp16', allowed: one of auto, .*, fp8"):
        EngineConfig(kv_cache_dtype="fp16")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="kv_cache_dtype: got 'int8', allowed: auto, fp8 here"):
        build_engine(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_dtype="int8", enforce_eager=True))


# --------------------------------------------------------------------------------------------------------------- whole engines

# A number that rounds otherwise in its last bit, as products of other row counts do in torch, is another one in FP8 once in a
# million times: an eighth of it, of one key or value.
NEAR = 1e-2
SCHEDULES = {
    "chunks of 7": {"max_num_batched_tokens": 7},
    "tiny pool, chunks of 5": {"num_kv_blocks": 11, "max_num_batched_tokens": 5},
    "blocks of 1, two slots": {"block_size": 1, "num_kv_blocks": 1024, "max_num_seqs": 2},
    "not asynchronous": {"async_scheduling": False},
    "drafts": {},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def make(tiny):
    def core(make=make_core, **options):
        core = make(tiny, enforce_eager=True, kv_cache_dtype="fp8", **options)
        assert core.runner.kv.k[0].dtype == fp8.DTYPE
        return core

    return core


@pytest.fixture(scope="module")
def alone(make):
    return lonely_answers(make)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_gives_the_same_tokens(tiny, make, alone, schedule):
    itself = {"speculative_method": "draft_model", "speculative_model": tiny}
    core = make(drafting_core, overlap=True, **itself) if schedule == "drafts" else make(**SCHEDULES[schedule])
    if "pool" in schedule:
        short = complete(SamplingParams(max_tokens=1))
        run(core, [EngineRequest(f"short {i}", [i], short, i) for i in range(150)])
    for _ in range(2):  # the second time out of the prefix cache
        assert_all_same(run(core, make_requests(1, 8, VOCAB)), alone(1, 8), schedule, NEAR)
    if "pool" in schedule:
        assert core.scheduler.stats.num_preemptions > 0


def test_a_cached_prompt_gives_the_same_numbers(make):
    core = make()
    params = complete(SamplingParams(temperature=0.0, max_tokens=6, logprobs=0))
    prompt = [(7 * i) % VOCAB for i in range(5 * BLOCK)]
    cold, warm = (run(core, [EngineRequest("a", prompt, params, 1)])["a"] for _ in range(2))
    assert (cold.cached, warm.cached) == (0, 4 * BLOCK)
    assert warm.ids == cold.ids and warm.logprobs == pytest.approx(cold.logprobs, abs=NEAR)
