"""The sum of what the cards of one host have, for few rows: each card sends its part to all others and adds up what it got.

Memory of every card is mapped on the others (see PushSpace). A place that waits for a number holds -0.0, which no card sends
(its own becomes +0.0): so a number is its own flag, and a reader waits for nothing but the numbers that it needs (Lamport 1977;
as in NVIDIA's one-shot all-reduce). There is no barrier and no counter on the host: a captured graph may hold any mixture of
calls.

Who has read a place puts -0.0 back. Two places for each row are used in turn, and that is enough: a card sends a row for the
third time only when its second sum of that row is done; for that it needed the second part of every other card; and that card
began its second call after its first one, reading and clearing, had ended. Which place is next is counted per row on the
device.

The parts are added in the order of the ranks in float32 and rounded once, so every rank has the same bits, however many rows
there are. A program sends all that it has before it waits, and there are no more than run at once: one for a multiprocessor,
or two of half its registers, or many of one warp. The wait ends for all threads of a program in the same round: no warp goes on
alone.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, num_multiprocessors, pdl, tl
from headrace.kernels.norm import rms_norm_reference

MAX_WIDTH = 16384  # of a row: one program has it in registers
THREADS = 512  # of a program at most, with up to 128 registers each, or 64 where that is enough
LOOK_NUMBERS = 32  # that a thread asks for before it waits for the first of them
PHASES = 2
ROW_COLUMNS = 256  # of a program of `row_sum`: 16 bytes a thread
PLACE_ROWS = 64  # that `row_sum` takes at most


@dataclass(frozen=True, slots=True)
class PushSpace:
    """Where the parts of all ranks meet: `slots` [PHASES, size, rows + place_rows, width] is this rank's, and at `peers` [size]
    int64 lie everybody's, as this card sees them. `turns` [rows] int32: the phase that a row uses next. The last rows are
    RowPlace's.

    Numbers are held as integers of their size (`wire`). One space serves calls that run in order, of narrower rows too.
    """

    rank: int
    size: int
    slots: Tensor
    peers: Tensor
    turns: Tensor

    @property
    def max_rows(self) -> int:
        return len(self.turns)

    def takes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return rows <= self.max_rows and width <= self.slots.shape[-1] and wire(dtype) == self.slots.dtype

    @property
    def place_rows(self) -> int:
        return self.slots.shape[2] - self.max_rows

    @property
    def row_place(self) -> int:
        """Where the last rows lie in each part of `slots`."""
        return self.max_rows * self.slots.stride(2)

    def clear(self) -> None:
        """As before the first call; every rank has done so before any of them calls."""
        self.slots.fill_(empty_mark(self.slots.dtype))
        self.turns.zero_()


class RowPlace(NamedTuple):
    """Where the parts of a few rows meet whose phase is told: all ranks have had another sum since their last of this phase.

    So it is free when a part is sent to it. Who sends has ended that other sum, as a kernel goes on from its wait when those
    before it have ended; for it he needed a part of the rank whose place this is; and that one sent it when its last sum of
    this phase, reading and clearing, had ended.
    """

    space: PushSpace
    phase: int


def wire(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def empty_mark(dtype: torch.dtype) -> int:
    """-0.0 as an integer."""
    return torch.iinfo(dtype).min


def slots_shape(size: int, rows: int, width: int) -> tuple[int, int, int, int]:
    return PHASES, size, rows + min(rows, PLACE_ROWS), width


@jit
def _wait(pointers, first, ok, EMPTY: tl.constexpr):
    """What lies at `pointers` (`first`: by a look before), when all of it has come."""
    found = first
    while tl.max(((found == EMPTY) & ok).to(tl.int32), 0) != 0:
        found = tl.load(pointers, mask=ok, other=0, volatile=True)
    return found


@jit
def as_sent(x, KIND: tl.constexpr, WIRE: tl.constexpr, EMPTY: tl.constexpr):
    """Float32 numbers as they travel: rounded to KIND, as integers."""
    bits = x.to(KIND).to(WIRE, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits).to(WIRE)


@jit
def _own(
    x_ptr, row, x_stride, slab_stride, c, ok, SLABS: tl.constexpr, KIND: tl.constexpr, WIRE: tl.constexpr, EMPTY: tl.constexpr
):
    """This rank's part of a row as it is sent."""
    x = tl.load(x_ptr + row * x_stride + c, mask=ok, other=0.0).to(tl.float32)
    for slab in tl.static_range(1, SLABS):
        x += tl.load(x_ptr + slab * slab_stride + row * x_stride + c, mask=ok, other=0.0).to(tl.float32)
    return as_sent(x, KIND, WIRE, EMPTY)


@jit
def _rms(x, weight, eps, WIDTH: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight


@jit(do_not_specialize=["rank", "num_rows"])
def _push_sum_kernel(
    x_ptr, slots_ptr, peers_ptr, turns_ptr, residual_ptr, norm_ptr, total_ptr, out_ptr,
    num_rows, x_stride, slab_stride, rank_stride, row_stride, rank, eps, offset, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, AHEAD: tl.constexpr, SLABS: tl.constexpr,
    EMPTY: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # at once, as products do: the next one's weights stream while parts are on their way
        gdc_launch_dependents()
    c = tl.arange(0, BLOCK)
    ok = c < WIDTH
    KIND: tl.constexpr = out_ptr.dtype.element_ty
    WIRE: tl.constexpr = slots_ptr.dtype.element_ty
    if NORM:
        norm = tl.load(norm_ptr + c, mask=ok, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    if SEND:
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            place = (tl.load(turns_ptr + row) * SIZE + rank) * rank_stride + row * row_stride + c
            own = _own(x_ptr, row, x_stride, slab_stride, c, ok, SLABS, KIND, WIRE, EMPTY)
            for step in tl.static_range(1, SIZE):  # not all to the same one first
                peer = tl.load(peers_ptr + (rank + step) % SIZE).to(slots_ptr.dtype)
                tl.store(tl.multiple_of(peer, 16) + place, own, mask=ok)
    if RECEIVE:
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            turn = tl.load(turns_ptr + row)
            slots = slots_ptr + turn * SIZE * rank_stride + row * row_stride + c
            before = tl.zeros([BLOCK], tl.float32)
            if RESIDUAL:  # asked for now: it is here when the parts are
                before = tl.load(residual_ptr + row * WIDTH + c, mask=ok, other=0.0).to(tl.float32)
            own = _own(x_ptr, row, x_stride, slab_stride, c, ok, SLABS, KIND, WIRE, EMPTY)
            total = tl.zeros([BLOCK], tl.float32)
            for first in tl.static_range(0, SIZE, AHEAD):
                looks = ()
                for i in tl.static_range(AHEAD):
                    there = ok & (first + i < SIZE)
                    looks = looks + (tl.load(slots + (first + i) * rank_stride, mask=there, other=0, volatile=True),)
                for i in tl.static_range(AHEAD):
                    if first + i < SIZE:
                        theirs = slots + (first + i) * rank_stride
                        part = own
                        if first + i != rank:
                            part = _wait(theirs, looks[i], ok, EMPTY)
                        tl.store(theirs, tl.full([BLOCK], EMPTY, WIRE), mask=ok)
                        total += part.to(KIND, bitcast=True).to(tl.float32)
            tl.store(turns_ptr + row, 1 - turn)
            total = total.to(total_ptr.dtype.element_ty)
            if RESIDUAL:
                total = (before + scale * total.to(tl.float32)).to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + row * WIDTH + c, total, mask=ok)
            if NORM:
                tl.store(out_ptr + row * WIDTH + c, _rms(total.to(tl.float32), norm, eps, WIDTH).to(KIND), mask=ok)


def _launch(
    x: Tensor, space: PushSpace, total: Tensor, out: Tensor, *, residual: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, offset: float = 0.0, scale: float = 1.0, half: str = "both",
) -> None:  # fmt: skip
    slabs, rows, width = x.shape
    if not space.takes(rows, width, out.dtype):
        most = f"{space.max_rows} rows of {space.slots.shape[-1]} numbers of {space.slots.itemsize} bytes"
        raise ValueError(f"an all-reduce of {rows} rows of {width} {out.dtype}: the space holds {most}")
    if not rows:
        return
    block = max(32, next_power_of_2(width))  # every thread waits for something of its own
    num_warps = min(THREADS // 32, max(1, block // 256))  # 16 bytes a thread, more of the widest rows
    pairs = space.size == 2 and block <= 256 * num_warps  # two programs have room on a multiprocessor
    _push_sum_kernel[(min(rows, (2 if pairs else 1) * num_multiprocessors(x.device)),)](
        x, space.slots, space.peers, space.turns, residual, norm, total, out,
        rows, x.stride(1), x.stride(0), space.slots.stride(1), space.slots.stride(2), space.rank, eps, offset, scale,
        WIDTH=width, BLOCK=block, SIZE=space.size, AHEAD=min(space.size, max(1, LOOK_NUMBERS * 32 * num_warps // block)),
        SLABS=slabs, EMPTY=empty_mark(space.slots.dtype), RESIDUAL=residual is not None, NORM=norm is not None,
        SEND=half != "receive", RECEIVE=half != "send", num_warps=num_warps, maxnreg=64 if pairs else None, **pdl(x),
    )  # fmt: skip


def all_reduce(part: Tensor, space: PushSpace, *, half: str = "both") -> Tensor:
    """Sum over the ranks of part [rows, width], contiguous rows, rounded once to its dtype.

    `half`: "send" or "receive" alone, for ranks that run one after the other (tests).
    """
    out = torch.empty_like(part)
    _launch(part[None], space, out, out, half=half)
    return out


def all_reduce_norm(
    part: Tensor, space: PushSpace, total: Tensor, out: Tensor, norm: Tensor | None, *, residual: Tensor | None = None,
    eps: float = 0.0, offset: float = 0.0, scale: float = 1.0, half: str = "both",
) -> None:  # fmt: skip
    """What closes a part of a layer, of part [slabs, rows, width] whose sum over the slabs is this rank's:

        y = sum of the parts, each rounded to out's dtype, over the ranks
        total = residual + scale * y;   out = RMSNorm(total, norm) with `norm`, else left alone

    norms are of weight + offset. `total` may be `residual`; y and total are rounded to total's dtype. Without `residual` total
    is y. All [rows, width], contiguous.
    """
    _launch(part, space, total, out, residual=residual, norm=norm, eps=eps, offset=offset, scale=scale, half=half)


@jit(do_not_specialize=["rank"])
def _row_sum_kernel(
    x_ptr, slots_ptr, peers_ptr, residual_ptr, norm_ptr, out_ptr, sumsq_ptr, slab_stride, rank_stride, row_stride, row_place,
    rank, offset, scale,
    PHASE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, SLABS: tl.constexpr, EMPTY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = c < WIDTH
    KIND: tl.constexpr = out_ptr.dtype.element_ty
    WIRE: tl.constexpr = slots_ptr.dtype.element_ty
    norm = tl.load(norm_ptr + c, mask=ok, other=0.0).to(tl.float32) + offset
    place = PHASE * SIZE * rank_stride + row_place + row * row_stride + c
    slots = slots_ptr + place
    peers = ()
    if SLABS > 0:
        for step in tl.static_range(1, SIZE):
            peers = peers + (tl.load(peers_ptr + (rank + step) % SIZE),)
    if PDL:
        gdc_wait()
    if SLABS > 0:
        own = _own(x_ptr, row, WIDTH, slab_stride, c, ok, SLABS, KIND, WIRE, EMPTY)
        for step in tl.static_range(SIZE - 1):
            theirs = tl.multiple_of(peers[step].to(slots_ptr.dtype), 16)
            tl.store(theirs + rank * rank_stride + place, own, mask=ok)
    looks = ()
    for r in tl.static_range(SIZE):
        looks = looks + (tl.load(slots + r * rank_stride, mask=ok, other=0, volatile=True),)
    before = tl.load(residual_ptr + row * WIDTH + c, mask=ok, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(SIZE):
        part = looks[r]
        if r != rank:  # this one's was sent by the kernel before, which is done
            part = _wait(slots + r * rank_stride, part, ok, EMPTY)
        elif SLABS > 0:
            part = own
        tl.store(slots + r * rank_stride, tl.full([BLOCK], EMPTY, WIRE), mask=ok)
        total += part.to(KIND, bitcast=True).to(tl.float32)
    total = before + scale * total
    tl.store(residual_ptr + row * WIDTH + c, total, mask=ok)
    tl.store(out_ptr + row * WIDTH + c, (total * norm).to(KIND), mask=ok)
    tl.store(sumsq_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.sum(total * total, 0))


def row_sum_tiles(width: int) -> int:
    """Sums of squares that `row_sum` leaves of a row."""
    return -(-width // ROW_COLUMNS)


def row_sum(
    place: RowPlace, residual: Tensor, out: Tensor, sumsq: Tensor, norm: Tensor, *, parts: Tensor | None = None,
    offset: float = 0.0, scale: float = 1.0,
) -> None:  # fmt: skip
    """residual [rows, width] float32 += scale * the sum over the ranks of what their kernels before have sent to `place`, or,
    with parts [slabs, rows, width], of these, summed over the slabs; out [rows, width] = residual * (norm + offset), and sumsq
    [rows, row_sum_tiles(width)] float32 has the sums of residual^2 over each ROW_COLUMNS columns: what the next product needs
    to see RMSNorm(residual) (fast_decode/epilogues.py).

    Of few rows that is sooner done than `all_reduce_norm`: many programs of one warp, none of which needs a whole row.
    """
    space, (rows, width) = place.space, residual.shape
    slabs, slab_stride = (0, 0) if parts is None else (len(parts), parts.stride(0))
    _row_sum_kernel[(row_sum_tiles(width), rows)](
        parts, space.slots, space.peers, residual, norm, out, sumsq, slab_stride, space.slots.stride(1), space.slots.stride(2),
        space.row_place, space.rank, offset, scale,
        PHASE=place.phase, WIDTH=width, BLOCK=ROW_COLUMNS, SIZE=space.size, SLABS=slabs, EMPTY=empty_mark(space.slots.dtype),
        num_warps=1, **pdl(out),
    )  # fmt: skip


def ordered_sum(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Parts of equal shape, added one after the other in float32 (float64 stays) and rounded once to their dtype."""
    first = parts[0]
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)


def all_reduce_norm_reference(
    parts: Sequence[Tensor], total_dtype: torch.dtype, norm: Tensor | None, *, residual: Tensor | None = None,
    eps: float = 0.0, offset: float = 0.0, scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(total, out) of `all_reduce_norm` for the ranks' parts [rows, width], slabs summed already and rounded."""
    dtype = parts[0].dtype
    y = ordered_sum([part.float() for part in parts]).to(total_dtype)
    total = y if residual is None else (residual.float() + scale * y.float()).to(total_dtype)
    return total, None if norm is None else rms_norm_reference(total, norm, eps, offset).to(dtype)
