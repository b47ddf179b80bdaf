"""Parts of sums that copies bring to the other of two ranks while products go on: both as streams of one card."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from headrace.fast_decode import pieces
from headrace.fast_decode.pieces import Pieces, add_in_pieces
from headrace.kernels.norm import add_rms_norm
from headrace.tensor_parallel.card_memory import CardMemory
from headrace.tensor_parallel.copied_parts import TURN, CopiedParts

pytestmark = pytest.mark.gpu
WIDTH, ROWS, EPS = 512, 700, 1e-6
CARD = torch.device("cuda", 0)


def two_ranks() -> list[CopiedParts]:
    memories: list[CardMemory] = []

    def meet(memory: CardMemory) -> list[int]:
        memories.append(memory)
        return [memory.address] * 2

    ranks = [CopiedParts(rank, ROWS, WIDTH, torch.bfloat16, CARD, meet) for rank in (0, 1)]
    for rank, copied in enumerate(ranks):
        copied.far = memories[1 - rank].address
    return ranks


@pytest.mark.parametrize("count", [0, TURN - 20])
def test_sums_in_pieces_are_sums(count: int, monkeypatch) -> None:
    """Each rank in its own time: sums one after the other, every second one taken as a whole before the next, as in a layer;
    the same bits on both, and those of a sum of whole parts. Numbers begin again after the last."""
    monkeypatch.setattr(pieces, "PIECE_ROWS", 128)
    generator, streams = random.Random(0), [torch.cuda.Stream() for _ in range(2)]
    ranks, norm = two_ranks(), torch.rand(WIDTH, device=CARD).bfloat16()
    for copied in ranks:
        copied.count = count
        copied.number.fill_(count - TURN if count else 0)
    rows = [generator.choice((ROWS, 300, 129, 5)) for _ in range(24)]
    parts = [[torch.randn(2, n, WIDTH, device=CARD).bfloat16() for n in rows] for _ in range(2)]  # of o, and what of down is added
    before = [torch.randn(n, WIDTH, device=CARD).bfloat16() for n in rows]
    for n in {*rows}:  # to load a kernel waits for what the device has to do, and one rank for the other, who is not asked yet
        add_rms_norm(parts[0][rows.index(n)], before[rows.index(n)], norm, EPS)
        torch.add(before[rows.index(n)], before[rows.index(n)]).copy_(before[rows.index(n)])
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    found: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for turn in range(len(rows)):
        for rank in generator.sample((0, 1), 2):
            with torch.cuda.stream(streams[rank]):
                copied, residual, x = ranks[rank], before[turn].clone(), parts[0][turn][rank]

                def late(out: Tensor, of: Tensor) -> Tensor:
                    torch.cuda._sleep(generator.randrange(200_000))
                    return out.copy_(of)

                def then(out: Tensor, of: Tensor, add: Tensor = parts[1][turn][rank]) -> Tensor:
                    torch.cuda._sleep(generator.randrange(200_000))
                    return torch.add(of, add[: len(of)], out=out)

                some: Pieces = add_in_pieces(late, x, residual, copied, norm, EPS, 0.0, 1.0)
                both = add_in_pieces(then, some, residual, copied, norm, EPS, 0.0, 0.5)
                found[rank].append((both.whole(), residual))
    torch.cuda.synchronize()
    for turn, ((first, total), (second, other)) in enumerate(zip(*found, strict=True)):
        assert torch.equal(first, second) and torch.equal(total, other), turn
        normed, residual = add_rms_norm(parts[0][turn], before[turn], norm, EPS)
        adds = torch.stack([
            torch.cat([normed[span] + parts[1][turn][rank][: span.stop - span.start] for span in pieces.spans(rows[turn])])
            for rank in (0, 1)
        ])
        want, residual = add_rms_norm(adds, residual, norm, EPS, 0.0, 0.5)
        assert torch.equal(first, want) and torch.equal(total, residual), turn


def test_who_waits_for_a_dead_rank_is_let_go() -> None:
    ranks, stream = two_ranks(), torch.cuda.Stream()
    copied = ranks[0]
    with torch.cuda.stream(stream):
        copied.wait(copied.send(copied.begin()(slice(0, 5))))
    time.sleep(0.2)
    assert not stream.query(), "nobody has sent"
    copied.release()
    begin = time.monotonic()
    while not stream.query():
        assert time.monotonic() < begin + 10
    torch.cuda.synchronize()
