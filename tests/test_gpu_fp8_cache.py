"""The FP8 cache on a card: the kernels that write and read it, captured and not, and law 1 in engines that have it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agreement import BF16_TOLERANCE, compare, with_rows
from drafting import drafting_core
from engine_driver import assert_all_same, make_core, make_requests, run
from fast_decode_cases import decode_batch, moved, random_weights
from headrace.attention.torch_backend import TorchAttention
from headrace.cache import fp8
from headrace.fast_decode.forward import FastDecode
from headrace.kernels.attention_prefill import VarlenTile
from headrace.kernels.qkv import qkv_rope_write
from headrace.kernels.split import split_space
from headrace.model.config import RopeConfig
from headrace.model.decoder import Decoder
from kernel_cases import attention_reference, check_qkv_fp8, in_fp8, paged_case, run_split, run_varlen, run_widened
from test_fp8_cache import NEAR, SCHEDULES
from test_gpu_fast_decode import WIDE
from tiny_models import write_eagle, write_tiny

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
DEVICE = torch.device("cuda", 0)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 8e-3) -> None:
    got, want = got.float().flatten(1), want.float().flatten(1)
    assert got.isfinite().all()
    error = (got - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-3)
    assert error.max() < tolerance, f"row {int(error.argmax())}: {float(error.max()):.4f}"


@pytest.mark.parametrize("sizes", [(32, 8, 128, 64), (9, 3, 64, 16), (16, 1, 80, 16), (8, 4, 256, 64), (12, 4, 24, 64)])
@pytest.mark.parametrize("window, softcap", [(0, 0.0), (100, 20.0)])
def test_attention(sizes, window, softcap):
    case, wide = in_fp8(paged_case([1] * 6, [1, 64, 1000, 5000, 0, 333], *sizes, dtype=BF16, device="cuda"))
    for options in ({}, {"chunk": 64}):
        close(run_split(case, window=window, softcap=softcap, **options), attention_reference(wide, sizes[2] ** -0.5, window, softcap))
    case, wide = in_fp8(paged_case([3, 1, 4], [900, 70, 1500], *sizes, dtype=BF16, device="cuda"))
    if sizes[0] // sizes[1] <= 8:
        close(run_split(case, tokens=4, window=window, softcap=softcap), attention_reference(wide, sizes[2] ** -0.5, window, softcap))
    case, wide = in_fp8(paged_case([1, 500, 130, 1, 77], [900, 500, 700, 0, 78], *sizes, dtype=BF16, device="cuda"))
    tiles = [None] if sizes[2] > 128 else [None, VarlenTile(128, 64, 8, 3, False)]
    for tile in tiles:
        got = run_varlen(case, window=window, softcap=softcap, tile=tile)
        close(got, attention_reference(wide, sizes[2] ** -0.5, window, softcap))
        got = run_widened(case, window=window, softcap=softcap, tile=tile)
        close(got, attention_reference(wide, sizes[2] ** -0.5, window, softcap))


@pytest.mark.parametrize("sizes", [(16, 8, 128, 128), (9, 3, 64, 64), (8, 4, 256, 256), (5, 1, 80, 32), (12, 4, 96, 96)])
@pytest.mark.parametrize("norm", [False, True])
def test_the_kernel_that_rotates_writes_what_the_reference_would(sizes, norm):
    torch.manual_seed(0)
    check_qkv_fp8(qkv_rope_write, *sizes, rows=70, block=64, norm=norm, dtype=BF16, device="cuda")


def test_a_graph_follows_lengths_and_its_replays_are_identical():
    lens = [4000, 1, 1000, 64, 129, 0, 0, 2048]
    case, wide = in_fp8(paged_case([1] * 8, [4096] * 8, 16, 8, 128, 64, dtype=BF16, device="cuda"))
    workspace, out = split_space(8, 16, 8, 128, DEVICE), torch.empty((8, 16 * 128), dtype=BF16, device=DEVICE)
    run_split(case, workspace=workspace, out=out, max_context=4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_split(case, workspace=workspace, out=out, max_context=4096)
    for shift in range(3):
        now = lens[shift:] + lens[:shift]
        case.seq_lens.copy_(torch.tensor(now, dtype=torch.int32))
        wide.context_lens = now
        graph.replay()
        first = out.clone()
        close(first, attention_reference(wide, 128**-0.5))
        for _ in range(50):
            graph.replay()
            assert torch.equal(out, first)


@pytest.mark.parametrize("rows, dim", [(1, 64), (1, 128), (5, 64), (5, 128), (30, 128), (40, 64), (100, 64)])
@pytest.mark.parametrize("related", [False, True])
def test_the_fused_step_is_the_decoder_with_such_a_cache(rows, dim, related):
    """Captured and replayed: the same bits, in the cache too; rows of one request go through two kernels, one row with heads of
    128 through a program for each query head, several with such heads as others."""
    lengths = [(17 * i) % 300 + 1 for i in range(rows)]
    lengths[-1] = 400
    config = replace(WIDE, head_dim=dim, rope=RopeConfig(1e4, dim))
    weights = random_weights(config, dtype=BF16)
    batch, kv = decode_batch(config, lengths, 64, fp8.DTYPE)
    wide = moved(weights, torch.device("cpu"), torch.float32)
    on_card, kv_card = moved(batch, DEVICE), moved(kv, DEVICE)
    on_card.related = related
    fast = FastDecode(config, moved(weights, DEVICE), rows, DEVICE)
    assert (fast.tiles_for(rows).few_attention is not None) == (rows == 1 and dim == 128)
    got = fast.forward(on_card, kv_card).clone()
    decoder = Decoder(config, wide, TorchAttention())
    expected = decoder.logits(decoder.forward(batch, kv))
    error = (got.float().cpu() - expected).norm() / expected.norm()
    assert error < 0.04, float(error)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.forward(on_card, kv_card)
    written = [t.view(torch.uint8).clone() for t in (*kv_card.k, *kv_card.v)]
    for _ in range(50):
        graph.replay()
    assert torch.equal(out, got)
    assert all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(written, (*kv_card.k, *kv_card.v), strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


def test_any_schedule_gives_the_tokens_of_a_cpu(model, tmp_path):
    """float32: chunks, preemption, hits of the prefix cache, drafts of a model and of a head, captured and eager."""
    options = {"kv_cache_dtype": "fp8"}
    requests = make_requests(1, 10, 512)
    want = run(make_core(model, enforce_eager=True, enable_prefix_caching=False, **options), requests)
    eagle = {"speculative_method": "eagle3", "speculative_model": write_eagle(tmp_path, model)}
    itself = {"speculative_method": "draft_model", "speculative_model": model}
    cores = {name: (make_core, schedule) for name, schedule in SCHEDULES.items() if name != "drafts"}
    cores["eager"] = (make_core, {"enforce_eager": True})
    cores |= {name: (drafting_core, drafts | {"overlap": True}) for name, drafts in (("eagle", eagle), ("draft", itself))}
    for name, (make, more) in cores.items():
        core = make(model, device="cuda", **options, **more)
        assert core.runner.kv.k[0].dtype == fp8.DTYPE
        for _ in range(2):
            assert_all_same(run(core, requests), want, name, NEAR)


def test_bfloat16_is_near_itself_whatever_the_schedule(model):
    """A key that rounds otherwise in bfloat16 is often another one in FP8: twice the tolerance of bfloat16 alone."""
    options = {"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    requests = with_rows(make_requests(1, 10, 512))
    want = run(make_core(model, max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False, **options), requests)
    problems = []
    for name, schedule in SCHEDULES.items():
        seen = compare(run(make_core(model, **options, **schedule), requests), want, 2 * BF16_TOLERANCE, name)
        print(f"{name}: {seen}")
        problems += seen.problems
    assert not problems, "\n".join(problems)
