"""The GPU attention backends on the CPU: which launch takes which rows; kernels interpreted, foreign ones stood in for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from headrace.attention import flash
from headrace.attention.flash import CudnnAttention, FlashAttention3, split_dense
from headrace.attention.select import select_attention
from headrace.attention.triton_backend import TritonAttention, plan_runs
from headrace.errors import ParameterError
from headrace.kernels.attention_prefill import varlen_attention
from headrace.model.config import ModelConfig, RopeConfig
from kernel_cases import PagedCase, attention_reference, batch_of, cache_of, paged_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a card is")
CPU = torch.device("cpu")
SCALE = 0.2


def model(**options) -> ModelConfig:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, **options}
    return ModelConfig(
        family="llama", vocab_size=64, hidden_size=64, num_layers=1, intermediate_size=64, max_position=4096,
        rope=RopeConfig(1e4, 16), **sizes,
    )  # fmt: skip


def attend(backend, case: PagedCase, window: int = 0) -> torch.Tensor:
    batch, kv = batch_of(case), cache_of(case)
    backend.begin(batch, kv)
    own = kv.rows if backend.keeps_own else None
    return backend.attend(case.q, 0, kv, batch, scale=SCALE, window=window, softcap=0.0, own=own)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_runs_cover_every_row_once() -> None:
    query_lens = [1, 1, 3, 200, 2, 4, 1, 30]
    context_lens = [5, 9000, 4000, 200, 2000, 3000, 8000, 70]
    batch = batch_of(paged_case(query_lens, [min(c, 300) for c in context_lens], 4, 2, 16, 16))
    batch.context_lens = context_lens
    runs = plan_runs(batch, 2)
    assert [(r.kind, r.first_seq, r.num_seqs, r.tokens) for r in runs] == [
        ("split", 0, 2, 1), ("split", 2, 1, 4), ("varlen", 3, 1, 200), ("split", 4, 1, 2), ("split", 5, 1, 4),
        ("split", 6, 1, 2), ("varlen", 7, 1, 30),
    ]  # fmt: skip
    assert [(r.first_row, r.num_rows) for r in runs] == [(0, 2), (2, 3), (5, 200), (205, 2), (207, 4), (211, 1), (212, 30)]
    batch.query_lens, batch.context_lens, batch.num_decodes = [2, 40] * 10, [2000, 40] * 10, 0
    batch.seq_slots = torch.zeros(20, dtype=torch.int32)
    (run,) = plan_runs(batch, 2)
    assert (run.kind, run.num_seqs, run.num_rows, run.tokens) == ("varlen", 20, 420, 40)


@pytest.mark.parametrize("window", [0, 25])
def test_triton_backend_mixed(monkeypatch, window: int) -> None:
    monkeypatch.setattr("headrace.attention.triton_backend.SPLIT_CONTEXT", 100)
    case = paged_case([1, 1, 3, 40, 2, 2], [5, 130, 120, 60, 140, 2], 4, 2, 16, 16)
    backend = TritonAttention(model(), CPU)
    want = attention_reference(case, SCALE, window)
    close(attend(backend, case, window), want)
    close(attend(backend, case, window), want)  # the workspace is as it was


def test_a_single_row_behind_a_context_among_prefills(monkeypatch) -> None:
    """One row that is not among the leading decodes: its row number is not its sequence number."""
    monkeypatch.setattr("headrace.attention.triton_backend.SPLIT_CONTEXT", 100)
    case = paged_case([1, 20, 1, 7], [150, 20, 130, 90], 4, 2, 16, 16)
    close(attend(TritonAttention(model(), CPU), case), attention_reference(case, SCALE))


@pytest.mark.parametrize("refused", [False, True])
def test_launches_of_many_rows_go_to_the_kernel_with_roles(monkeypatch, refused: bool) -> None:
    launched = []

    def roles_attention(*args, num_rows: int, least: int, **options) -> None:
        launched.append(num_rows)
        varlen_attention(*args, num_rows=num_rows, max_tokens=num_rows, least=least, **options)

    roles = SimpleNamespace(takes=lambda *_: not refused, roles_attention=roles_attention)
    monkeypatch.setattr("headrace.attention.triton_backend.find_roles", lambda device: roles)
    monkeypatch.setattr("headrace.attention.triton_backend.ROLES_ROWS", 40)
    monkeypatch.setattr("headrace.attention.triton_backend.SPLIT_CONTEXT", 100)
    case = paged_case([1, 20, 25, 2, 39], [150, 20, 30, 130, 90], 4, 2, 16, 16)
    close(attend(TritonAttention(model(), CPU), case), attention_reference(case, SCALE))
    assert launched == ([] if refused else [45])


@pytest.mark.parametrize("query_lens, context_lens, dense", [
    ([64, 64], [64, 64], [(0, 2, 64)]),  # equal ones in one call, nothing left
    ([1, 64, 70, 33], [90, 64, 70, 33], [(1, 1, 64), (65, 1, 64), (135, 1, 32)]),  # remainders are chunks behind a context
    ([40, 96, 96, 10], [50, 96, 96, 20], [(40, 2, 96)]),  # chunks with a context are not fresh
    ([32, 33, 34, 35, 36, 64], [32, 33, 34, 35, 36, 64], None),  # more calls than are worth it
])  # fmt: skip
def test_cudnn_backend(monkeypatch, query_lens, context_lens, dense) -> None:
    monkeypatch.setattr(flash, "CUDNN_MULTIPLE", 32)
    monkeypatch.setattr(flash, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    case = paged_case(query_lens, context_lens, 4, 2, 16, 16, dtype=torch.float16)
    backend = CudnnAttention(model(), CPU)
    close(attend(backend, case), attention_reference(case, SCALE), 3e-3)
    if dense is not None:
        assert [(d.first_row, d.num_seqs, d.rows) for d in backend.dense] == dense
    assert len(backend.dense) <= flash.CUDNN_CALLS
    close(attend(backend, case, window=20), attention_reference(case, SCALE, 20), 3e-3)


def test_cudnn_refusal_is_survived(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(flash, "CUDNN_MULTIPLE", 32)
    monkeypatch.setattr(flash.F, "scaled_dot_product_attention", refuse)
    case = paged_case([40, 32], [40, 32], 4, 2, 16, 16, dtype=torch.float16)
    backend = CudnnAttention(model(), CPU)
    for _ in range(2):
        close(attend(backend, case), attention_reference(case, SCALE), 3e-3)
    assert split_dense(plan_runs(batch_of(case), 2), batch_of(case))[0] and not backend.dense


@pytest.mark.parametrize("query_lens, context_lens", [
    ([70, 33], [70, 33]), ([1, 1, 50, 20], [90, 3, 50, 20]), ([1, 50, 20], [90, 130, 20]),
    ([40, 40], [40, 40]), ([1, 40, 40], [70, 40, 40]), ([1, 35], [70, 90]), ([40, 40], [60, 60]),
])  # fmt: skip
def test_flash_attention_3_backend(monkeypatch, query_lens, context_lens) -> None:
    monkeypatch.setattr(flash, "FA3_ROWS", 30)
    calls = []

    def forward(q, k, v, *, out, softmax_scale, is_causal, num_splits, cu_seqlens_q=None, cu_seqlens_k=None,
                max_seqlen_q=None, max_seqlen_k=None):  # fmt: skip
        assert is_causal and softmax_scale == SCALE and num_splits == 1 and out.shape == q.shape
        calls.append(cu_seqlens_q)
        if cu_seqlens_q is None:
            cu_q, cu_k = ([i * x.shape[1] for i in range(len(x) + 1)] for x in (q, k))
            max_q, max_k = q.shape[1], k.shape[1]
            q, k, v, out = (x.flatten(0, 1) if x is not out else x.view(-1, *x.shape[2:]) for x in (q, k, v, out))
        else:
            cu_q, cu_k, max_q, max_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), max_seqlen_q, max_seqlen_k
        for i in range(len(cu_q) - 1):
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            n, c = int(cu_q[i + 1] - cu_q[i]), int(cu_k[i + 1] - cu_k[i])
            assert n <= max_q and c <= max_k
            mask = torch.ones(n, c, dtype=torch.bool).tril(c - n)
            done = torch.nn.functional.scaled_dot_product_attention(
                q[rows].transpose(0, 1).float(), k[keys].transpose(0, 1).float(), v[keys].transpose(0, 1).float(),
                attn_mask=mask, scale=softmax_scale, enable_gqa=True,
            )  # fmt: skip
            out[rows] = done.transpose(0, 1).to(q.dtype)

    case = paged_case(query_lens, context_lens, 4, 2, 16, 16, dtype=torch.bfloat16)
    backend = FlashAttention3(model(), CPU, forward)
    close(attend(backend, case), attention_reference(case, SCALE), 3e-2)
    assert len(calls) == 1
    prefills = {(q, c) for q, c in zip(query_lens, context_lens, strict=True) if q > 1}
    assert (calls[0] is None) == (len(prefills) == 1), "prompts that are alike need no lengths"
    close(attend(backend, case, window=20), attention_reference(case, SCALE, 20), 3e-2)
    assert len(calls) == 1, "windows stay with our own kernels"


def test_selection() -> None:
    assert "torch" in select_attention("auto", model(), CPU)[1]
    for name in ("triton", "nonsense"):
        with pytest.raises(ParameterError, match="attention_backend"):
            select_attention(name, model(), CPU)


def test_selection_for_a_card(monkeypatch) -> None:
    card, chosen = torch.device("cuda", 0), []
    monkeypatch.setattr("headrace.attention.select.capability", lambda device: chosen[-1])

    def pick(name: str, capability: tuple[int, int], **options):
        chosen.append(capability)
        return select_attention(name, model(head_dim=128, **options), card)

    for found in (True, False):
        monkeypatch.setattr(flash, "find_flash_attention_3", lambda found=found: (len if found else None, "because"))
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        backend, why = pick("auto", (9, 0))  # not cuDNN: a plan for each shape holds everybody up
        assert type(backend) is (FlashAttention3 if found else TritonAttention) and "because" in why
    assert type(pick("triton", (9, 0))[0]) is TritonAttention
    assert type(pick("cudnn", (9, 0))[0]) is CudnnAttention
    for capability, options in (((8, 0), {}), *(((9, 0), o) for o in ({"attn_softcap": 50.0}, {"windows": (128,)}, {"sinks": True}))):
        assert type(pick("auto", capability, **options)[0]) is TritonAttention
        with pytest.raises(ParameterError):
            pick("cudnn", capability, **options)
    chosen.append((9, 0))
    assert type(select_attention("cudnn", model(head_dim=256), card)[0]) is CudnnAttention
    with pytest.raises(ParameterError, match="head_dim 256 beside windows"):
        select_attention("cudnn", model(head_dim=256, windows=(0, 128)), card)
    with pytest.raises(ParameterError, match="FlashAttention-3 is because"):
        pick("fa3", (9, 0))
    for capability in ((8, 0), (9, 0)):
        with pytest.raises(ParameterError, match=r"attention_backend: got 'torch', allowed: auto, triton, cudnn or fa3 on a GPU"):
            pick("torch", capability)
    with pytest.raises(ParameterError, match=r"device: got 'cuda', allowed: cpu: .*head_dim of 1024"):
        chosen.append((9, 0))
        select_attention("auto", model(head_dim=1024), card)
