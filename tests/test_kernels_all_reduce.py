"""The push all-reduce in Triton's interpreter: all ranks in one process, against an ordered sum in float32."""

from __future__ import annotations

import random

import pytest
import torch

from echo_group import echo_space
from headrace.fast_decode.epilogues import rms_factor_reference
from headrace.kernels import all_reduce
from headrace.kernels.all_reduce import RowPlace, all_reduce_norm_reference, empty_mark, ordered_sum, row_sum, row_sum_tiles
from push_ranks import norm_of_all, push_spaces, sum_of_all

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a card is")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, but for zeros' signs and what a NaN holds."""
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rank_has_the_ordered_sum(size: int, dtype: torch.dtype) -> None:
    """Through calls of other heights and widths, in any mixture: nothing of one is seen by the next."""
    spaces = push_spaces(size, 5, 100, dtype)
    for rows, width in [(5, 100), (1, 100), (1, 64), (3, 7), (5, 100), (2, 100), (1, 100), (5, 64)]:
        parts = [torch.randn(rows, width).to(dtype) for _ in range(size)]
        sums = sum_of_all(parts, spaces)
        assert all(torch.equal(got, sums[0]) for got in sums)
        if dtype == torch.bfloat16:  # which the interpreter rounds towards zero
            torch.testing.assert_close(sums[0], ordered_sum(parts), rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(sums[0], ordered_sum(parts))
    assert all((space.slots == empty_mark(space.slots.dtype)).all() for space in spaces)


@pytest.mark.parametrize("size", [2, 3])
def test_programs_with_several_rows(size: int, monkeypatch) -> None:
    """As of steps with prompts; between them other heights, after which rows differ in which place is next."""
    monkeypatch.setattr(all_reduce, "num_multiprocessors", lambda device: 3)
    spaces = push_spaces(size, 8, 20, torch.float32)
    for rows in (8, 2, 7, 8, 1, 8, 4):
        parts = [torch.randn(rows, 20) for _ in range(size)]
        assert all(torch.equal(got, ordered_sum(parts)) for got in sum_of_all(parts, spaces))
    assert all((space.slots == empty_mark(space.slots.dtype)).all() for space in spaces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_look_like_marks(dtype: torch.dtype) -> None:
    """-0.0, what rounds to it, infinities and NaN are numbers like all others."""
    odd = torch.tensor([[-0.0, -1e-45, 0.0, float("inf"), float("-inf"), float("nan"), -1e-30, 5.0]]).to(dtype)
    spaces = push_spaces(2, 1, 8, dtype)
    for parts in ([odd, odd], [odd, odd.flip(1)], [-odd, odd]):
        for got in sum_of_all(parts, spaces):
            assert same(got, ordered_sum(parts))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype, total", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                          (torch.bfloat16, torch.bfloat16)])  # fmt: skip
def test_residual_and_norms(dtype, total, residual: bool, norm: bool) -> None:
    size, rows, width = 2, 3, 96
    spaces = push_spaces(size, rows, width, dtype)
    slabs = [torch.randn(2, rows, width) for _ in range(size)]
    before = torch.randn(rows, width).to(total) if residual else None
    residuals = None if before is None else [before.clone() for _ in range(size)]
    totals = residuals or [torch.empty(rows, width, dtype=total) for _ in range(size)]
    outs = [torch.zeros(rows, width, dtype=dtype) for _ in range(size)]
    weight = torch.randn(width).to(dtype) if norm else None
    options = {"eps": 1e-6, "offset": 1.0, "scale": 0.5 if residual else 1.0}
    norm_of_all(slabs, spaces, totals, outs, weight, residuals, **options)
    parts = [slab.sum(0).to(dtype) for slab in slabs]
    want_total, want = all_reduce_norm_reference(parts, total, weight, residual=before, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for rank in range(size):
        torch.testing.assert_close(totals[rank], want_total, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            outs[rank], torch.zeros_like(outs[rank]) if want is None else want, rtol=tolerance, atol=tolerance
        )
        assert torch.equal(totals[rank], totals[0])
        assert torch.equal(outs[rank], outs[0])


def test_a_space_refuses_what_it_cannot_hold() -> None:
    spaces = push_spaces(2, 2, 16, torch.bfloat16)
    for rows, width, dtype in [(3, 16, torch.bfloat16), (2, 17, torch.bfloat16), (2, 16, torch.float32)]:
        with pytest.raises(ValueError, match="the space holds 2 rows of 16 numbers of 2 bytes"):
            sum_of_all([torch.zeros(rows, width, dtype=dtype)] * 2, spaces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_rows_by_many_programs(dtype: torch.dtype, monkeypatch) -> None:
    """Of parts that products have stored in slabs, and which come back to the rank as those of the others."""
    monkeypatch.setattr(all_reduce, "ROW_COLUMNS", 32)
    size, width = 3, 80
    space, norm = echo_space(size, 4, width, dtype, torch.device("cpu")), torch.randn(width).to(dtype)
    for call, rows in enumerate((3, 1, 4, 2, 4)):
        slabs, before = torch.randn(2, rows, width), torch.randn(rows, width)
        want_total, want = all_reduce_norm_reference(
            [slabs.sum(0).to(dtype)] * size, torch.float32, norm, residual=before, eps=1e-6, scale=0.5
        )
        out, sumsq = torch.empty(rows, width, dtype=dtype), torch.empty(rows, row_sum_tiles(width))
        row_sum(RowPlace(space, call % 2), before, out, sumsq, norm, parts=slabs, scale=0.5)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(before, want_total, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(sumsq.sum(1), before.square().sum(1))
        factor = rms_factor_reference(sumsq, width, 1e-6)
        torch.testing.assert_close(out * factor, want.float(), rtol=tolerance, atol=tolerance)
        assert (space.slots == empty_mark(space.slots.dtype)).all()


@pytest.mark.parametrize("seed", range(4))
def test_places_are_free_when_parts_are_sent_to_them(seed: int) -> None:
    """Steps of several ranks, each of which goes on as far as those that it waits for let it, in any order: of a step's sums
    the first is counted, and those that follow have two places in turn; steps of one row and of two."""
    order, size, width, most = random.Random(seed), 3, 8, 2
    spaces = push_spaces(size, most, width, torch.float32)
    mark, heights = empty_mark(spaces[0].slots.dtype), [order.choice((1, 2)) for _ in range(4)]
    calls = [(phase, height) for height in heights for phase in (None, 0, 1, 0, 1, 0, 1)]
    parts = torch.randn(len(calls), size, most, width)
    done, has_sent, apart = [0] * size, [False] * size, 0
    while min(done) < len(calls):
        rank = order.choices(range(size), [1, 4, 9])[0]
        space, call = spaces[rank], done[rank]
        if call == len(calls):
            continue
        phase, height = calls[call]
        told, part = phase is not None, parts[call, rank, : calls[call][1]]
        # phase and row
        places = [(phase, most + row) if told else (int(space.turns[row]), row) for row in range(height)]
        if not has_sent[rank]:
            for at, row in places:
                assert all((peer.slots[at, rank, row] == mark).all() for peer in spaces if told or peer is not space)
            if not told:
                all_reduce.all_reduce(part, space, half="send")
            for peer in spaces if told else ():
                peer.slots[phase, rank, most : most + height] = part.view(torch.int32)
            has_sent[rank] = True
        elif all((space.slots[at, peer, row] != mark).all() for peer in range(size) if told or peer != rank for at, row in places):
            if told:
                total, squares = torch.zeros(height, width), torch.empty(height, 1)
                row_sum(RowPlace(space, phase), total, torch.empty(height, width), squares, torch.ones(width))
                torch.testing.assert_close(squares[:, 0], total.square().sum(1))
            else:
                total = all_reduce.all_reduce(part, space, half="receive")
            assert torch.equal(total, ordered_sum(parts[call, :, :height]))
            done[rank], has_sent[rank] = call + 1, False
            apart = max(apart, max(done) - min(done))
    assert apart == 1  # nobody is two sums ahead
    assert all((space.slots == mark).all() for space in spaces)
