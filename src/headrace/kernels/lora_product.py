"""Low-rank additions inside of the product that they belong to, as one more step of its sum, in fused decode steps of few rows.

    the kernel before  ->  x A^T of the rows' adapters (here)  ->  the product, which adds (x A^T) B^T at its end

The small kernel in the middle runs beside the product, which starts as soon as its programs are on the card (programmatic
dependent launch): it sets a flag when x is there, for which the product waits before it begins, and has ended when the product
needs what it made. Nobody waits for a program that may have no place. Where all rows together have few ranks, a program makes
some of one row's x A^T; else x A^T is cut into parts along x, and an adapter's last part adds them up in their order. What is
handed on has zeros where an adapter is not a row's, so that a tile of outputs is one product of all rows by B of several
adapters; adding zeros changes no sum, and what a row gets depends on no other row.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl
from headrace.kernels.lora import Pair
from headrace.kernels.split import count_part

MAX_ROWS = 64  # of more it has not been measured
BLOCK_ROWS = 32  # of x at a time
A_NUMBERS = 8192  # of A at a time, at most; so many times MOST_STEPS are loaded before the wait
MOST_STEPS = 3
MOST_RANK = 64  # of an adapter that a product adds at a time
WIDTH = 128  # ranks of several adapters that it adds at a time
ALONE = 128  # ranks of all rows, up to which each row has programs of its own (of 512 they are slower, on an H200)
ROW_RANKS, ROW_COLUMNS = 2, 1024  # of A that one of these programs takes at a time
ROW_STEPS = 12  # so many times before the wait, at most
LINE = 32  # int32 numbers in a line of the cache
TICKETS = 16  # ranks that have one


class Members(NamedTuple):
    """The adapters of a step's rows."""

    used: Tensor  # [1 + slots] int32: how many slots have rows; these slots, ascending; -1
    places: Tensor  # [T] int32: where among them a row's slot is; -1 of a row without an adapter


def members_of(adapters: Tensor, slots: int) -> Members:
    """adapters [T] int64: 0, or one more than the row's slot."""
    used = torch.empty(1 + slots, dtype=torch.int32, device=adapters.device)
    places = torch.empty(len(adapters), dtype=torch.int32, device=adapters.device)
    _members[(1,)](adapters, used, places, len(adapters), slots, SLOTS=max(16, next_power_of_2(slots)), num_warps=4)
    return Members(used, places)


class LowRank(NamedTuple):
    """What a product of few rows adds to its sums."""

    shrunk: Tensor  # [slices, T, slots that may have rows * rank] in x's dtype: x A^T times the scales, or 0
    pair: Pair
    used: Tensor  # see Members
    flag: Tensor  # one of new_flags: 0 until x is there

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a product's kernel."""
        width, rank = self.shrunk.shape[2], self.pair.rank
        return {
            "shrunk_ptr": self.shrunk, "b_ptr": self.pair.b, "slices_ptr": self.pair.slices, "used_ptr": self.used,
            "flag_ptr": self.flag, "SHRUNK": width, "RANK": rank,
            "AT_ONCE": max(1, min(WIDTH // min(rank, MOST_RANK), next_power_of_2(width // rank))),
        }  # fmt: skip


NOTHING: dict[str, Any] = dict.fromkeys(("shrunk_ptr", "b_ptr", "slices_ptr", "used_ptr", "flag_ptr"))
NOTHING |= {"SHRUNK": 0, "RANK": 0, "AT_ONCE": 0}


def new_flags(products: int, device: torch.device) -> Tensor:
    """[products, LINE] int32, 0: each in a line of its own, as others are looked at meanwhile."""
    return torch.zeros((products, LINE), dtype=torch.int32, device=device)


def num_tickets(pair: Pair) -> int:
    return pair.a.shape[0] * pair.a.shape[1] // TICKETS


def shrink_few(x: Tensor, pair: Pair, members: Members, flag: Tensor, tickets: Tensor) -> LowRank:
    """x [T, in] -> what the product of x, which is launched next, adds. flag: 0; tickets [num_tickets] int32 are 0 between
    launches."""
    (slots, width, columns), rows, rank = pair.a.shape, len(x), pair.rank
    most, slices = min(slots, rows), width // rank
    shrunk = torch.empty((slices, rows, most * rank), dtype=x.dtype, device=x.device)
    places = x, pair.a, pair.scales, members.used, members.places, flag, shrunk
    if rows * rank <= ALONE:
        _shrink_row[(width // ROW_RANKS, rows)](
            *places, x.stride(0), width, COLUMNS=columns, SLICES=slices, RANK=rank, BLOCK_R=ROW_RANKS, BLOCK_K=ROW_COLUMNS,
            EARLY=min(ROW_STEPS, -(-columns // ROW_COLUMNS)), MOST=most, PLACES=next_power_of_2(most), num_warps=4, **pdl(x),
        )  # fmt: skip
        return LowRank(shrunk, pair, members.used, flag)
    block_r, some = min(rank, MOST_RANK), 16 < rows <= BLOCK_ROWS
    # of 17 to 32 rows fewer columns at a time are 1 % of a step faster (an 8B, on an H200)
    step = min(A_NUMBERS // block_r // (2 if some else 1), next_power_of_2(columns))
    steps = min(MOST_STEPS, -(-columns // ((24 if some else 12) * step)))
    parts = -(-columns // (steps * step))
    sums = torch.empty((parts, rows, width), dtype=torch.float32, device=x.device)
    _shrink_few[(parts * (width // block_r), most)](
        *places, sums, tickets, rows, x.stride(0), columns, width, SLICES=slices, RANK=rank, PARTS=parts,
        BLOCK_M=min(BLOCK_ROWS, max(16, next_power_of_2(rows))), BLOCK_R=block_r, BLOCK_K=step, STEPS=steps, MOST=most,
        num_warps=4, num_stages=1, **pdl(x),
    )  # fmt: skip
    return LowRank(shrunk, pair, members.used, flag)


@jit(do_not_specialize=["rows", "slots"])
def _members(adapters, used, places, rows, slots, SLOTS: tl.constexpr):
    s = tl.arange(0, SLOTS)
    lane = tl.arange(0, 32)
    there = tl.zeros((SLOTS,), tl.int32)
    for first in range(0, rows, 32):
        one = tl.load(adapters + first + lane, first + lane < rows, 0).to(tl.int32)
        there = tl.maximum(there, tl.max((one[None, :] == s[:, None] + 1).to(tl.int32), 1))
    place = tl.cumsum(there, 0) - there
    for first in range(0, slots, 32):
        i = first + lane
        here = (place[:, None] == i[None, :]) & (there != 0)[:, None]
        tl.store(used + 1 + i, tl.sum(tl.where(here, s[:, None] + 1, 0), 0) - 1, i < slots)
    tl.store(used, tl.sum(there, 0))
    for first in range(0, rows, 32):
        one = tl.load(adapters + first + lane, first + lane < rows, 0).to(tl.int32)
        mine = tl.sum(tl.where(one[None, :] == s[:, None] + 1, place[:, None] + 1, 0), 0) - 1
        tl.store(places + first + lane, mine, first + lane < rows)


@jit(do_not_specialize=["rows"])
def _shrink_few(
    x, a, scales, used, places, flag, shrunk, sums, tickets, rows, x_stride, columns, width, SLICES: tl.constexpr,
    RANK: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of the sums of BLOCK_R columns of x A^T, of one adapter's rows; all that it reads of A comes before the wait."""
    if PDL:
        gdc_launch_dependents()
    part, block = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    number = tl.program_id(1)
    slot = tl.load(used + 1 + number).to(tl.int64)
    busy = slot >= 0
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    k = part * (BLOCK_K * STEPS) + tl.arange(0, BLOCK_K)
    matrix = a + (slot * width + r[None, :]) * columns + k[:, None]
    right = ()
    for step in tl.static_range(STEPS):
        right = right + (tl.load(matrix + step * BLOCK_K, (k + step * BLOCK_K < columns)[:, None] & busy, 0.0),)
    scale = tl.load(scales + slot * SLICES + block * BLOCK_R // RANK, busy, 0.0)
    m = tl.arange(0, BLOCK_M)
    place = tl.load(places + m, m < rows, -1)
    if PDL:
        gdc_wait()
        if tl.program_id(0) + number == 0:
            tl.atomic_add(flag, 1, sem="release")
    for first in range(0, rows, BLOCK_M):
        own = (place == number) & busy
        row = (first + m).to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for step in tl.static_range(STEPS):
            here = own[:, None] & (k + step * BLOCK_K < columns)[None, :]
            left = tl.load(x + row[:, None] * x_stride + k[None, :] + step * BLOCK_K, here, 0.0)
            total = tl.dot(left, right[step], total, input_precision="ieee")
        tl.store(sums + (part * rows + row[:, None]) * width + r[None, :], total * scale, own[:, None])
        place = tl.load(places + first + BLOCK_M + m, first + BLOCK_M + m < rows, -1)
    if busy:  # noqa: SIM102 (whose parts there are to count)
        if count_part(tickets + number * (tl.num_programs(0) // PARTS) + block) == PARTS - 1:
            for first in range(0, rows, BLOCK_M):
                row = (first + m).to(tl.int64)
                own = (tl.load(places + row, row < rows, -1) == number)[:, None]
                total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for other in tl.static_range(PARTS):
                    source = sums + (other * rows + row[:, None]) * width + r[None, :]
                    total += tl.load(source, own, 0.0, cache_modifier=".cg")
                place_of = (block * BLOCK_R // RANK * rows + row[:, None]) * (MOST * RANK) + number * RANK + (r % RANK)[None, :]
                tl.store(shrunk + place_of, total.to(shrunk.dtype.element_ty), (row < rows)[:, None])
            tl.store(tickets + number * (tl.num_programs(0) // PARTS) + block, 0)


@jit
def _shrink_row(
    x, a, scales, used, places, flag, shrunk, x_stride, width, COLUMNS: tl.constexpr, SLICES: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr, MOST: tl.constexpr,
    PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_R columns of one row's x A^T, over all of x."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    place = tl.load(places + row)
    slot = tl.load(used + 1 + place, place >= 0, 0).to(tl.int64)
    r, k = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    matrix = a + (slot * width + r[:, None]) * COLUMNS + k[None, :]
    x += row * x_stride + k
    right = ()
    for step in tl.static_range(EARLY):
        right = right + (tl.load(matrix + step * BLOCK_K, (k + step * BLOCK_K < COLUMNS)[None, :] & (place >= 0), 0.0),)
    scale = tl.load(scales + slot * SLICES + r // RANK)
    if PDL:
        gdc_wait()
        if tl.program_id(0) + row == 0:
            tl.atomic_add(flag, 1, sem="release")
    total = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for step in tl.static_range(EARLY):
        left = tl.load(x + step * BLOCK_K, (k + step * BLOCK_K < COLUMNS) & (place >= 0), 0.0)
        total += right[step].to(tl.float32) * left.to(tl.float32)[None, :]
    for first in range(EARLY * BLOCK_K, COLUMNS, BLOCK_K):
        ok = (k + first < COLUMNS) & (place >= 0)
        total += tl.load(matrix + first, ok[None, :], 0.0).to(tl.float32) * tl.load(x + first, ok, 0.0).to(tl.float32)[None, :]
    number = tl.arange(0, PLACES)[:, None]
    found = tl.where(number == place, (tl.sum(total, 1) * scale)[None, :], 0.0)
    at = (r // RANK * tl.num_programs(1) + row) * (MOST * RANK) + r % RANK
    tl.store(shrunk + at[None, :] + number * RANK, found.to(shrunk.dtype.element_ty), number < MOST)


# ---------------------------------------------------------------- in a product


@jit
def wait_for_x(flag):
    """Until it is not 0; what its writer had seen before is there then. One thread looks, and acquires when it has seen it,
    which empties the L1 cache."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.b32 $0, 1; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE;
        AGAIN: ld.relaxed.gpu.global.b32 $0, [$1]; setp.eq.u32 p, $0, 0; @p bra AGAIN;
        ld.acquire.gpu.global.b32 $0, [$1]; DONE: }""",
        "=&r,l", [flag.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@jit
def _part_of_b(
    b_ptr, used_ptr, here, n0, outputs, first, low, BLOCK_N: tl.constexpr, SHRUNK: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """BLOCK_R ranks from `low` on of AT_ONCE adapters from the `first` one on, of a tile of outputs: [BLOCK_N, these ranks],
    zeros where there is none, or not `here`."""
    n, k = tl.arange(0, BLOCK_N), tl.arange(0, AT_ONCE * BLOCK_R)
    number = first + k // BLOCK_R
    slot = tl.load(used_ptr + 1 + number, number < SHRUNK // RANK, -1).to(tl.int64)
    at = (slot[None, :] * outputs + (n0 + n)[:, None]) * RANK + (low + k % BLOCK_R)[None, :]
    at = tl.multiple_of(tl.max_contiguous(at, [1, 16]), [1, 16])  # at least, which the compiler cannot know
    return tl.load(b_ptr + at, ((slot >= 0) & here)[None, :] & (n0 + n < outputs)[:, None], 0.0)


@jit
def _part_of_x(
    shrunk_ptr, count, index, rm, M, first, low, SHRUNK: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What the rows rm have for these ranks: [rows, ranks]."""
    k = tl.arange(0, AT_ONCE * BLOCK_R)
    at = (index * M + rm[:, None]) * SHRUNK + first * RANK + low + (k // BLOCK_R * RANK + k % BLOCK_R)[None, :]
    at = tl.multiple_of(tl.max_contiguous(at, [1, 16]), [1, 16])
    return tl.load(shrunk_ptr + at, (rm < M)[:, None] & (first + k // BLOCK_R < count)[None, :], 0.0)


@jit
def _add_product(acc, b, of_row, COLUMNS: tl.constexpr):
    if COLUMNS == 0:
        acc = tl.dot(b, tl.trans(of_row), acc, input_precision="ieee")
    else:
        acc = tl.dot(of_row, tl.trans(b), acc, input_precision="ieee")
    return acc


@jit
def begin_low_rank(
    b_ptr, slices_ptr, used_ptr, n0, N, here, MODE: tl.constexpr, BLOCK_N: tl.constexpr, SHRUNK: tl.constexpr,
    RANK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What a tile of outputs from n0 on, of gate and up both, has to know before it adds: how many adapters (0 unless `here`),
    whose outputs these are (all of a tile have one A), the first part of their B."""
    BLOCK_R: tl.constexpr = RANK if RANK < 64 else 64
    count = tl.load(used_ptr, here, 0)
    if MODE == "glu":
        b = _part_of_b(b_ptr, used_ptr, here, n0, 2 * N, 0, 0, BLOCK_N, SHRUNK, RANK, BLOCK_R, AT_ONCE)
        up_b = _part_of_b(b_ptr, used_ptr, here, N + n0, 2 * N, 0, 0, BLOCK_N, SHRUNK, RANK, BLOCK_R, AT_ONCE)
        up_index = tl.load(slices_ptr + N + n0)
    else:
        b = _part_of_b(b_ptr, used_ptr, here, n0, N, 0, 0, BLOCK_N, SHRUNK, RANK, BLOCK_R, AT_ONCE)
        up_b, up_index = 0, 0
    return count, tl.load(slices_ptr + n0), up_index, b, up_b


@jit
def add_low_rank(
    acc, up_acc, begun, shrunk_ptr, b_ptr, used_ptr, rm, n0, M, N, MODE: tl.constexpr, SHRUNK: tl.constexpr,
    RANK: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """acc, and with gate and up up_acc too, with what adapters add to the rows rm of a tile of outputs from n0 on, which are
    its axis COLUMNS (0 or 1)."""
    BLOCK_N: tl.constexpr = acc.shape[COLUMNS]
    BLOCK_R: tl.constexpr = RANK if RANK < 64 else 64
    STEPS: tl.constexpr = RANK // BLOCK_R
    count, index, up_index, b, up_b = begun
    if PDL:
        gdc_wait()
    if count > 0:
        # the selects keep B in registers until now: in shared memory it would take the next kernel's place
        x = _part_of_x(shrunk_ptr, count, index, rm, M, 0, 0, SHRUNK, RANK, BLOCK_R, AT_ONCE)
        if MODE == "glu":
            up_x = _part_of_x(shrunk_ptr, count, up_index, rm, M, 0, 0, SHRUNK, RANK, BLOCK_R, AT_ONCE)
            up_acc = _add_product(up_acc, tl.where(up_index >= 0, up_b, 0.0), up_x, COLUMNS)
        acc = _add_product(acc, tl.where(index >= 0, b, 0.0), x, COLUMNS)
    for step in tl.range(1, (count + AT_ONCE - 1) // AT_ONCE * STEPS, num_stages=1):
        first, low = step // STEPS * AT_ONCE, step % STEPS * BLOCK_R
        outputs = 2 * N if MODE == "glu" else N
        x = _part_of_x(shrunk_ptr, count, index, rm, M, first, low, SHRUNK, RANK, BLOCK_R, AT_ONCE)
        b = _part_of_b(b_ptr, used_ptr, True, n0, outputs, first, low, BLOCK_N, SHRUNK, RANK, BLOCK_R, AT_ONCE)
        if MODE == "glu":
            up_x = _part_of_x(shrunk_ptr, count, up_index, rm, M, first, low, SHRUNK, RANK, BLOCK_R, AT_ONCE)
            up_b = _part_of_b(b_ptr, used_ptr, True, N + n0, outputs, first, low, BLOCK_N, SHRUNK, RANK, BLOCK_R, AT_ONCE)
            up_acc = _add_product(up_acc, up_b, up_x, COLUMNS)
        acc = _add_product(acc, b, x, COLUMNS)
    return acc, up_acc


@jit
def begin_row(b_ptr, slices_ptr, used_ptr, n0, N, MODE: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr):
    """What a tile of outputs from n0 on, of gate and up both, has to know before it adds what the only row's adapter makes:
    whether it has one, B [BLOCK_N, RANK] (zeros if not), whose outputs these are."""
    HALVES: tl.constexpr = 2 if MODE == "glu" else 1
    slot = tl.load(used_ptr + 1).to(tl.int64)
    there = slot >= 0
    n = n0 + tl.arange(0, BLOCK_N)
    matrix = b_ptr + (slot * (HALVES * N) + n[:, None]) * RANK + tl.arange(0, RANK)[None, :]
    ok = (n < N)[:, None] & there
    up = matrix + (HALVES - 1) * N.to(tl.int64) * RANK
    index, up_index = tl.load(slices_ptr + n0), tl.load(slices_ptr + (HALVES - 1) * N + n0)
    return there, tl.load(matrix, ok, 0.0), tl.load(up, ok, 0.0), index, up_index


@jit
def add_to_row(
    y, up_y, begun, shrunk_ptr, factor, MODE: tl.constexpr, SHRUNK: tl.constexpr, RANK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y, and with gate and up up_y too, with `factor` times what the only row's adapter makes of a tile of outputs."""
    there, b, up_b, index, up_index = begun
    k = tl.arange(0, RANK)
    if PDL:
        gdc_wait()
    low = tl.load(shrunk_ptr + index * SHRUNK + k, there, 0.0).to(tl.float32)
    if MODE == "glu":
        up_low = tl.load(shrunk_ptr + up_index * SHRUNK + k, there, 0.0).to(tl.float32)
        up_y += factor * tl.sum(up_b.to(tl.float32) * up_low[None, :], 1)
    y += factor * tl.sum(b.to(tl.float32) * low[None, :], 1)
    return y, up_y
