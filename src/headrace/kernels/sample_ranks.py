"""Token ids where each rank has the logits of a part of the vocabulary: a few words of each rank decide, within the step.

    _reduce   as for whole rows (see sample.py), over this rank's part
    _choose   one program a row: what the part has at its best and the sum of its weights goes to all ranks as words of a
              PushSpace (see all_reduce.py), and theirs come. Greedy rows are then known. A row with a temperature ends in the
              part that the running sum of weights, in vocabulary order, says: the rank that has it finds the id in its blocks
              and tells the others, by one more word.

Every rank computes the same from the same words. The id is that of whole rows but for the rounding of sums over other blocks.
Rows with filters need whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import sample
from headrace.kernels.all_reduce import PushSpace, empty_mark
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, num_multiprocessors, pdl, tl
from headrace.kernels.sample import _reduce
from headrace.kernels.sample_filter import PARAMETERS, block_sums, first_over, uniform

WORDS = 4  # of a rank and a row: its largest logit, that one's id, the sum of its weights; and the id that is drawn there
WARPS = 4
THREADS = 32 * WARPS  # a rank for each at most: every wait is then one decision of the whole program
ROWS_PER_SM = 8  # programs that run at once, so that all have sent before the last one waits


def max_rows(device: torch.device) -> int:
    return ROWS_PER_SM * num_multiprocessors(device)


def sample_parts(
    logits: Tensor, first_id: int, space: PushSpace, temperature: Tensor, seed: Tensor, output_index: Tensor,
    sample_index: Tensor, *, purpose: int, greedy_eps: float, all_greedy: bool, stage: str = "all",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """This rank's logits [R, part] of the ids from `first_id` on -> (ids [R] int32, failed [R] bool), the same on every rank.

    As `sample_rows` without filters; `space` has WORDS words a row. `stage`: "send", "draw" or "finish" alone, for ranks that
    run one after the other (tests).
    """
    rows, part = logits.shape
    if rows > min(space.max_rows, max_rows(logits.device)) or space.slots.dtype != torch.int32:
        raise ValueError(f"{rows} rows: the space holds {space.max_rows}, the card {max_rows(logits.device)} at once")
    num_blocks = -(-part // sample.BLOCK)
    work = torch.empty(rows, 3 * num_blocks, dtype=torch.float32, device=logits.device)
    work_ids = work.view(torch.int32)
    token_ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    failed = torch.empty(rows, dtype=torch.bool, device=logits.device)
    common = (logits, logits.stride(0), work, work_ids, work.stride(0), part, num_blocks, temperature)
    options = {"BLOCK": sample.BLOCK, "EPS": greedy_eps, "RANDOM": not all_greedy, "num_warps": WARPS, **pdl(logits)}
    _reduce[(rows, num_blocks)](*common, CHUNK=sample.CHUNK, FILTERED=False, **options)
    _choose[(rows,)](
        *common, seed, output_index, sample_index, token_ids, failed,
        space.slots, space.peers, space.turns, space.slots.stride(1), space.slots.stride(2), first_id, space.rank,
        SIZE=space.size, RANKS=THREADS, BLOCKS=next_power_of_2(num_blocks), PURPOSE=purpose,
        EMPTY=empty_mark(torch.int32), SEND=stage in ("all", "send"), RECEIVE=stage != "send",
        DRAW=stage in ("all", "draw"), FINISH=stage in ("all", "finish"), **options,
    )  # fmt: skip
    return token_ids, failed


@jit
def _send(peers_ptr, slots_ptr, place, word, rank, SIZE: tl.constexpr, EMPTY: tl.constexpr):
    """One word to all other ranks."""
    for step in tl.static_range(1, SIZE):
        peer = tl.load(peers_ptr + (rank + step) % SIZE).to(slots_ptr.dtype)
        tl.store(peer + place, tl.where(word == EMPTY, 0, word))


@jit
def _receive(places, own, ok, EMPTY: tl.constexpr):
    """[RANKS]: the word of each rank; `own` where not `ok`."""
    found = tl.load(places, mask=ok, other=0, volatile=True)
    while tl.max(((found == EMPTY) & ok).to(tl.int32), 0) != 0:
        found = tl.load(places, mask=ok, other=0, volatile=True)
    return tl.where(ok, found, own)


@jit(do_not_specialize=["first_id", "rank"], do_not_specialize_on_alignment=PARAMETERS)
def _choose(
    logits_ptr, row_stride, work_ptr, work_ids_ptr, work_stride, part, num_blocks, temperature_ptr,
    seed_ptr, index_ptr, sample_ptr, out_ptr, failed_ptr,
    slots_ptr, peers_ptr, turns_ptr, rank_stride, place_stride, first_id, rank,
    SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    PURPOSE: tl.constexpr, EMPTY: tl.constexpr, RANDOM: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    DRAW: tl.constexpr, FINISH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    turn = tl.load(turns_ptr + row)
    work = work_ptr + row * work_stride
    m = tl.load(work + block, mask=block < num_blocks, other=-float("inf"))
    has_nan = tl.max((m != m).to(tl.int32), 0) > 0
    here = tl.max(tl.where(m == m, m, -float("inf")), 0)
    firsts = tl.load(work_ids_ptr + row * work_stride + 2 * num_blocks + block, mask=block < num_blocks, other=0)
    best = first_id + tl.min(tl.where(m == here, firsts, 0x3FFFFFFF), 0)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        inverse = tl.div_rn(1.0, tl.maximum(temperature, EPS))
        sums = tl.zeros([BLOCKS], tl.float32)
        if (temperature >= EPS) & (here > -float("inf")):  # of greedy rows the weights do not matter
            sums = block_sums(work, m, block, num_blocks, here, inverse)
        weight = tl.sum(sums, 0).to(tl.int32, bitcast=True)
    value = tl.where(has_nan, float("nan"), here).to(tl.int32, bitcast=True)
    place = turn * SIZE * rank_stride + row * place_stride
    if SEND:
        mine = place + rank * rank_stride
        _send(peers_ptr, slots_ptr, mine, value, rank, SIZE, EMPTY)
        _send(peers_ptr, slots_ptr, mine + 1, best, rank, SIZE, EMPTY)
        if RANDOM:
            _send(peers_ptr, slots_ptr, mine + 2, weight, rank, SIZE, EMPTY)
    if RECEIVE:
        r = tl.arange(0, RANKS)
        others = (r < SIZE) & (r != rank)
        slots = slots_ptr + place + r * rank_stride
        values = _receive(slots, value, others, EMPTY).to(tl.float32, bitcast=True)
        ids = _receive(slots + 1, best, others, EMPTY)
        values = tl.where(r < SIZE, values, -float("inf"))
        broken = tl.max((values != values).to(tl.int32), 0) > 0
        largest = tl.max(tl.where(values == values, values, -float("inf")), 0)
        failed = broken | (tl.abs(largest) == float("inf"))
        token = tl.min(tl.where((values == largest) & (r < SIZE), ids, 0x7FFFFFFF), 0)
        if RANDOM:
            masses = _receive(slots + 2, weight, others, EMPTY).to(tl.float32, bitcast=True)
            if (temperature >= EPS) & (failed == 0):
                u = uniform(tl.load(seed_ptr + row), tl.load(index_ptr + row), tl.load(sample_ptr + row), PURPOSE)
                shares = masses * tl.exp((values - largest) * inverse)
                shares = tl.where((r < SIZE) & (values > -float("inf")), shares, 0.0)
                target = u * tl.sum(shares, 0)
                owner = first_over(shares, r, target)
                told = place + owner * rank_stride + 3
                if owner == rank:
                    rest = target - tl.sum(tl.where(r < owner, shares, 0.0), 0)
                    shrunk = sums * tl.exp((here - largest) * inverse)
                    chosen = first_over(shrunk, block, rest)
                    rest -= tl.sum(tl.where(block < chosen, shrunk, 0.0), 0)
                    inside = chosen * BLOCK + tl.arange(0, BLOCK)
                    x = tl.load(logits_ptr + row * row_stride + inside, mask=inside < part, other=-float("inf")).to(tl.float32)
                    token = first_id + first_over(tl.exp((x - largest) * inverse), inside, rest)
                    if DRAW:
                        _send(peers_ptr, slots_ptr, told, token, rank, SIZE, EMPTY)
                elif FINISH:
                    token = tl.sum(_receive(slots_ptr + told + r * 0, 0, r == 0, EMPTY), 0)
                    tl.store(slots_ptr + told, EMPTY)
        if FINISH:
            for word in tl.static_range(3):
                tl.store(slots + word, tl.full([RANKS], EMPTY, tl.int32), mask=others)
            tl.store(turns_ptr + row, 1 - turn)
            tl.store(out_ptr + row, tl.where(failed, 0, token))
            tl.store(failed_ptr + row, failed)
