"""Attention with roles for warps, on a card that has it: against dense attention, in chunks, and the same bits each time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.kernels.launch import capability
from kernel_cases import PagedCase, attention_reference, paged_case

pytestmark = pytest.mark.gpu
DEVICE, SCALE = torch.device("cuda", 0), 0.1
HEADS = [(32, 8, 128), (8, 4, 256), (4, 4, 64), (64, 2, 128)]


@pytest.fixture(scope="module", autouse=True)
def card() -> None:
    if capability(DEVICE) != (9, 0):
        pytest.skip("not on this card")


def case_of(query_lens: list[int], context_lens: list[int], heads: tuple[int, int, int], seed: int = 0) -> PagedCase:
    return paged_case(query_lens, context_lens, *heads, 64, dtype=torch.bfloat16, device="cuda", seed=seed)


def attend(case: PagedCase, *, least: int = 0, fill: float = 7.0, **options) -> torch.Tensor:
    from headrace.kernels.attention_roles import roles_attention

    rows, heads, dim = case.q.shape
    out = torch.full((rows, heads * dim), fill, dtype=torch.bfloat16, device="cuda")
    roles_attention(
        case.q, case.k_cache, case.v_cache, out, *case.tensors(), first_seq=0, num_seqs=len(case.query_lens), num_rows=rows,
        scale=SCALE, least=least, **options,
    )  # fmt: skip
    return out


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Relative in the norm over a row's values."""
    assert got.isfinite().all()
    error = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1).clamp_min(1e-3)
    assert error.max() < 8e-3, f"row {int(error.argmax())}: {float(error.max()):.4f}"


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lens", [([300, 130, 64], [300, 700, 64]), ([1, 65, 200], [1, 65, 1500]), ([1030], [1030])], ids=str)
def test_prompts_and_chunks(heads, lens):
    """What lies behind a sequence's end, and in blocks that are nobody's, is NaN."""
    case = case_of(*lens, heads)
    close(attend(case), attention_reference(case, SCALE))


@pytest.mark.parametrize("window, softcap", [(1, 0.0), (70, 0.0), (64, 0.0), (1000, 0.0), (0, 50.0), (100, 5.0)])
def test_windows_and_soft_caps(window, softcap):
    case = case_of([200, 33, 70], [200, 500, 1700], (8, 4, 256))
    close(attend(case, window=window, softcap=softcap), attention_reference(case, SCALE, window, softcap))


def test_padded_sequences_become_zero_and_few_rows_are_left():
    case = case_of([130, 40, 64, 2], [130, 0, 64, 70], (32, 8, 128))
    got = attend(case, least=3)
    assert (got[130:170] == 0).all() and (got[-2:] == 7.0).all()
    close(got[:-2], attention_reference(case, SCALE)[:-2])


def test_chunks_give_the_bits_of_the_whole():
    """A row's sums are formed in one order wherever its prompt was cut."""
    whole = case_of([700], [700], (32, 8, 128))
    want = attend(whole)
    for cut in (1, 64, 333):
        parts = [
            PagedCase(whole.q[:cut], *case_parts(whole, cut, cut)),
            PagedCase(whole.q[cut:], *case_parts(whole, 700 - cut, 700)),
        ]
        assert torch.equal(torch.cat([attend(part) for part in parts]), want)


def case_parts(case: PagedCase, rows: int, length: int) -> tuple:
    """The rest of a case of one sequence that is so long, of which the last rows are new."""
    ints = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, rows], [length]))
    return case.k_cache, case.v_cache, case.block_tables, case.seq_slots, *ints, [rows], [length]


def test_the_same_bits_each_time():
    case = case_of([1000, 517, 64], [1000, 1500, 64], (32, 8, 128))
    want = attend(case)
    assert all(torch.equal(attend(case), want) for _ in range(50))


def test_a_captured_launch_takes_whatever_lengths_the_device_knows():
    case = case_of([128] * 4, [1024] * 4, (8, 4, 256))
    attend(case)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        out = attend(case)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    for counts, contexts in (([128] * 4, [1024] * 4), ([500, 10, 1, 1], [1000, 10, 70, 1]), ([3, 200, 300, 9], [3, 0, 640, 9])):
        case.query_start.copy_(torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]))
        case.seq_lens.copy_(torch.tensor(contexts))
        graph.replay()
        close(out, attention_reference(replace(case, query_lens=counts, context_lens=contexts), SCALE))
