"""Latent attention of published sizes on a card: the kernel against float32, and a small model against the exact engine."""

from __future__ import annotations

import pytest
import torch

from agreement import BF16_TOLERANCE, compare, with_rows
from engine_driver import assert_all_same, complete, make_core, make_requests, run
from headrace.engine.messages import EngineRequest
from headrace.kernels.latent_attention import PartSpace
from headrace.sampling.params import SamplingParams
from kernel_cases import latent_case, latent_reference, run_latent
from tiny_models import write_tiny

pytestmark = pytest.mark.gpu
RANK, ROPE = 512, 64
LENS = [3000, 1, 0, 64, 777, 2048]


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.isfinite().all()
    assert (got.float() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("heads, dtype, tolerance", [
    (16, torch.bfloat16, 0.01), (20, torch.bfloat16, 0.01), (128, torch.bfloat16, 0.01), (20, torch.float16, 0.002), (20, torch.float32, 1e-5),
])  # fmt: skip
def test_decode(heads, dtype, tolerance):
    """Long and short contexts, a padded row, and a grid that is made for longer ones."""
    case = latent_case([1] * 6, LENS, heads, RANK, ROPE, 64, dtype=dtype, device="cuda")
    want = latent_reference(case, RANK)
    for parts in (1, 5, None):
        near(run_latent(case, RANK, split=True, parts=parts, max_context=8192), want, tolerance)


@pytest.mark.parametrize("heads", [20])
def test_a_replayed_graph_sees_new_lengths(heads):
    case = latent_case([1] * 6, LENS, heads, RANK, ROPE, 64, dtype=torch.bfloat16, device="cuda")
    space = PartSpace.of(6, heads, RANK, torch.device("cuda"))
    run_latent(case, RANK, split=True, space=space, max_context=4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_latent(case, RANK, split=True, space=space, max_context=4096)
    for shorter in (0, 700):
        case.context_lens = [max(0, c - shorter) for c in LENS]
        case.seq_lens.copy_(torch.tensor(case.context_lens))
        graph.replay()
        near(out, latent_reference(case, RANK), 0.01)


@pytest.mark.parametrize("heads, dtype, tolerance", [(20, torch.bfloat16, 0.01), (128, torch.bfloat16, 0.01), (20, torch.float32, 1e-5)])
def test_prefill(heads, dtype, tolerance):
    case = latent_case([200, 1, 33, 64], [200, 90, 500, 64], heads, RANK, ROPE, 64, dtype=dtype, device="cuda")
    near(run_latent(case, RANK, split=False), latent_reference(case, RANK), tolerance)
    few = latent_case([8, 3, 1], [2000, 90, 1], heads, RANK, ROPE, 64, dtype=dtype, device="cuda")
    near(run_latent(few, RANK, split=True, tokens=8), latent_reference(few, RANK), tolerance)


SIZES = {
    "hidden_size": 256, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "q_lora_rank": 192, "num_hidden_layers": 2, "first_k_dense_replace": 1, "initializer_range": 0.05,
}  # fmt: skip


@pytest.mark.parametrize("heads", [16, 20])
def test_a_model_of_published_sizes(tmp_path, heads):
    """float32 token for token; bfloat16 within its tolerance, beside others and alone."""
    model = str(write_tiny("deepseek_v3", tmp_path / "model", num_attention_heads=heads, num_key_value_heads=heads, **SIZES))
    cpu = make_core(model, enable_prefix_caching=False)
    requests = with_rows(make_requests(1, 10, cpu.vocab_size))
    want = run(cpu, requests)
    assert_all_same(run(make_core(model, device="cuda"), make_requests(1, 10, cpu.vocab_size)), want)
    for options in ({}, {"enforce_eager": True}, {"max_num_seqs": 1}):
        got = run(make_core(model, device="cuda", dtype="bfloat16", **options), requests)
        seen = compare(got, want, BF16_TOLERANCE)
        assert not seen.problems and seen.total / seen.compared < BF16_TOLERANCE / 2, f"{options}: {seen}"


def test_long_prompts_by_keys_and_values_of_heads(tmp_path):
    """Two that cuDNN gets, alike and not, of which one ends beside its multiple; then behind what is cached of one."""
    model = str(write_tiny("deepseek_v3", tmp_path / "model", max_position_embeddings=4096, **SIZES | {"num_hidden_layers": 1}))
    prompts = [[3 + (7 * i + j) % 500 for i in range(count)] for j, count in enumerate((1024, 2100, 300, 2100))]
    params = complete(SamplingParams(temperature=0.0, max_tokens=3, logprobs=-1))
    requests = [EngineRequest(f"r{j}", prompt, params, j) for j, prompt in enumerate(prompts)]
    options = {"max_model_len": 4096, "num_kv_blocks": 400, "block_size": 64}
    want = run(make_core(model, **options), requests)
    core = make_core(model, device="cuda", dtype="bfloat16", **options)
    for _ in range(2):
        seen = compare(run(core, requests), want, BF16_TOLERANCE)
        assert not seen.problems and seen.total / seen.compared < BF16_TOLERANCE / 2, str(seen)
