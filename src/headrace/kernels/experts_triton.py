"""A mixture of experts on a card: `route` chooses (experts_route.py), `run_experts` computes, by one of two forms.

Up to ROW_FORM rows each pair of a token and an expert is a product of one row (experts_row.py, of MXFP4 experts_warp.py). Of
more rows the pairs are sorted by expert and cut into tiles (experts_sort.py, experts_tiles.py, experts_wide.py; in MXFP4 of few
rows experts_warp_tiles.py and experts_widened.py, of many on Hopper experts_roles.py), whose size follows the rows that an
expert has on average. A row's result is the same beside any others as long as the form and the tiles' size are the same;
between forms sums round differently. Nothing is read on the host and no grid depends on the choice, so all of it can be
captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.activation import Activation
from headrace.kernels.experts_digits import Digits, digits, new_digits
from headrace.kernels.experts_ends import Joining
from headrace.kernels.experts_few import Choice, chooses_by_logits, row_logits
from headrace.kernels.experts_lora import ExpertAdds, shrink_pairs, sort_adapted
from headrace.kernels.experts_route import Routing, Squares, choose, route, route_parts, router_parts, router_tile
from headrace.kernels.experts_row import row_down, row_glu
from headrace.kernels.experts_sort import Sorted, placed, sort_form, sort_pairs, tile_end
from headrace.kernels.experts_tiles import launch, sum_pairs, tile_for, tile_rows
from headrace.kernels.experts_warp import takes_warps, warp_down, warp_glu
from headrace.kernels.experts_warp_tiles import ROWS as WHOLE_ROWS
from headrace.kernels.experts_warp_tiles import warp_tiles_down, warp_tiles_glu
from headrace.kernels.experts_wide import takes_wide, wide_down
from headrace.kernels.experts_widened import LEAST_PAIRS, MOST_PAIRS, WidenedTile, launch_widened, takes_widened, widened_tile
from headrace.kernels.launch import capability, gdc_launch_dependents, gdc_wait, jit, pdl, tl
from headrace.kernels.narrow import NarrowMatrix, held_width

__all__ = ["Joining", "Squares", "add_experts", "choose", "route", "router_parts", "row_steps", "run_experts"]

ROW_FORM = 2  # rows; of more, each expert's weights had better be read once for all (measured on an H200)
MOST_BYTES = 2 << 30  # of what lies between the kernels; more rows are computed in parts
MOST_ROWS = 1 << 15


def run_experts(
    x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, ids: Tensor, shares: Tensor, *, count: int, first: int = 0,
    activation: Activation = "silu", clamp: float = 0.0, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    adds: ExpertAdds | None = None,
) -> Tensor:  # fmt: skip
    """See headrace.kernels.experts."""
    rows, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not rows:
        return out
    how = _How(count, first, gate_up.shape[0] // count // 2, activation, clamp, gate_up_bias, down_bias)
    step = most_rows(ids.shape[1], held_width(down), hidden, x.dtype)
    for at in range(0, rows, step):
        part, choice = slice(at, at + step), Choice(ids[at : at + step], shares[at : at + step])
        if rows <= ROW_FORM and adds is None:
            _rows(x[part], gate_up, down, choice, None, out[part], how)
        else:
            _tiles(x[part], gate_up, down, choice, None, out[part], how, None if adds is None else adds.part(part))
    return out


def add_experts(
    x: Tensor, squares: Squares, router: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, routing: Routing, joining: Joining,
    *, count: int, first: int = 0, activation: Activation = "silu", clamp: float = 0.0, router_bias: Tensor | None = None,
    correction: Tensor | None = None, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    adds: ExpertAdds | None = None,
) -> Tensor:  # fmt: skip
    """What the experts give joins a residual stream, and with it the norms on both sides of them: x [T, H] are rows that still
    have to be divided by their norm. Returns the sums of squares that the next product needs."""
    how = _How(count, first, gate_up.shape[0] // count // 2, activation, clamp, gate_up_bias, down_bias)
    few = len(x) <= ROW_FORM and adds is None
    if few and chooses_by_logits(correction, routing):
        whole = takes_warps(x, gate_up, down, routing.chosen)
        numbers = new_digits(len(x), held_width(gate_up), x.device) if whole else None
        logits, factors = row_logits(x, router, router_bias, squares, numbers)
        sums = _rows(x, gate_up, down, Choice(None, None, logits, routing), factors, joining, how, numbers)
    else:
        ids, shares, of_rows = route_parts(router_parts(x, router), router_bias, correction, routing, squares)
        choice = Choice(ids, shares)
        if few:
            sums = _rows(x, gate_up, down, choice, of_rows, joining, how)
        else:
            sums = _tiles(x, gate_up, down, choice, of_rows, joining, how, adds)
    assert sums is not None
    return sums


@jit(do_not_specialize=["slots"])
def _pad_rows(
    x_ptr, order_ptr, tiles_ptr, out_ptr, width, out_width, slots, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    of_x = row
    from_column = column
    if order_ptr is not None:
        if row >= tile_end(tiles_ptr, slots - 1):  # behind the last held expert's last
            return
        of_x = (tl.load(order_ptr + row) // CHOSEN).to(tl.int64)
        from_column = placed(column)
    x = tl.load(x_ptr + of_x * width + from_column, mask=from_column < width, other=0.0)
    tl.store(out_ptr + row * out_width + column, x, mask=column < out_width)


def _whole(x: Tensor, weight: NarrowMatrix) -> Tensor:
    """Packed numbers come in whole runs of columns: what a row lacks is 0."""
    (rows, width), held = x.shape, held_width(weight)
    if width == held:
        return x.contiguous()
    out = x.new_empty(rows, held)
    _pad_rows[rows, -(-held // 1024)](
        x.contiguous(), None, None, out, width, held, 0, CHOSEN=1, BLOCK=1024, num_warps=4, **pdl(x)
    )  # fmt: skip
    return out


def _in_order(x: Tensor, weight: NarrowMatrix, pairs: Sorted, chosen: int) -> Tensor:
    """The row of each pair in the order of the sort, as wide as the weights are held."""
    width, held = x.shape[1], held_width(weight)
    out = x.new_empty(len(pairs.order), held)
    _pad_rows[len(out), -(-held // 1024)](
        x.contiguous(), pairs.order, pairs.tiles, out, width, held, len(pairs.tiles), CHOSEN=chosen, BLOCK=1024, num_warps=4,
        **pdl(x),
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _How:
    count: int  # of experts that are here, from `first` on
    first: int
    inner: int
    activation: Activation
    clamp: float
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def _rows(
    x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, choice: Choice, factors: Tensor | None, out: Tensor | Joining,
    how: _How, numbers: Digits | None = None,
) -> Tensor | None:  # fmt: skip
    held: dict[str, Any] = {"first": how.first, "count": how.count}
    gating: dict[str, Any] = {"activation": how.activation, "clamp": how.clamp, "factors": factors}
    if takes_warps(x, gate_up, down, choice.chosen):
        numbers = numbers or digits(x, held_width(gate_up))
        inner = warp_glu(numbers, gate_up, how.gate_up_bias, choice, held_width(down), how.inner, **held, **gating)
        return warp_down(inner, down, how.down_bias, choice, out, **held)
    between = x.new_empty(choice.rows * choice.chosen, held_width(down))
    row_glu(x.contiguous(), gate_up, how.gate_up_bias, choice, between, how.inner, **held, **gating)
    return row_down(between, down, how.down_bias, choice, out, **held)


def _tiles(
    x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, choice: Choice, factors: Tensor | None, out: Tensor | Joining,
    how: _How, adds: ExpertAdds | None,
) -> Tensor | None:  # fmt: skip
    ids, shares = choice.ids, choice.shares
    assert ids is not None and shares is not None
    pairs, given = ids.numel(), (x, gate_up, down, ids, shares, factors, how)
    if adds is None and _are_whole(pairs, how.count) and takes_warps(x, gate_up, down, choice.chosen):
        parts = _whole_parts(*given)
    elif adds is None and (tile := widened_tile(pairs, how.count)) is not None and takes_widened(x, gate_up, down):
        parts = _widened_parts(*given, tile)
    elif adds is None and _has_roles(pairs, how.count) and (roles := find_roles(x, gate_up, down, how.activation, how.clamp)):
        parts = _role_parts(*given, roles)
    else:
        parts = _parts(*given, adds)
    return sum_pairs(parts, ids, out, how.count, how.first)


def _are_whole(pairs: int, count: int) -> bool:
    return pairs < LEAST_PAIRS * count


def _has_roles(pairs: int, count: int) -> bool:
    return pairs > MOST_PAIRS * count


def find_roles(x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, activation: Activation, clamp: float) -> Any:
    """The kernel with roles for warps, where the card has them, this Triton knows how to write it, and it takes these."""
    if capability(x.device) != (9, 0):
        return None
    try:
        from headrace.kernels import experts_roles
    except (ImportError, AttributeError):
        return None
    return experts_roles if experts_roles.takes(x, gate_up, down, activation, clamp) else None


def _parts(
    x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, ids: Tensor, shares: Tensor, factors: Tensor | None, how: _How,
    adds: ExpertAdds | None,
) -> Tensor:  # fmt: skip
    """What each pair adds [T * k, H]; as the three behind it, for any weights."""
    pairs, chosen, hidden = ids.numel(), ids.shape[1], down.shape[0] // how.count
    block_m = tile_rows(pairs, how.count, x.itemsize)
    between, low, low_down = x.new_empty(pairs, held_width(down)), None, None
    if adds is None:
        in_order = sort_pairs(ids, how.count, how.first, block_m)
    else:
        in_order, of_adapters = sort_adapted(ids, adds, how.count, how.first, block_m)
        low = shrink_pairs(x, adds.gate_up, of_adapters, adds.slots, how.count, chosen, block_m)
    launch(
        _whole(x, gate_up), gate_up, how.gate_up_bias, in_order, chosen, between, how.inner, tile_for(gate_up, x, block_m),
        activation=how.activation, clamp=how.clamp, factors=factors, low=low,
    )  # fmt: skip
    if adds is not None:
        low_down = shrink_pairs(between, adds.down, of_adapters, adds.slots, how.count, 0, block_m)
    wide = adds is None and takes_wide(x, down, block_m)
    parts = torch.empty((pairs, hidden), dtype=x.dtype if wide else torch.float32, device=x.device)
    if wide:
        wide_down(between, down, how.down_bias, in_order, shares, parts, block_m)
    else:
        launch(
            between, down, how.down_bias, in_order, chosen, parts, hidden, tile_for(down, x, block_m), shares=shares,
            low=low_down,
        )  # fmt: skip
    return parts


def _whole_parts(
    x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, ids: Tensor, shares: Tensor, factors: Tensor | None, how: _How
) -> Tensor:  # fmt: skip
    in_order = sort_pairs(ids, how.count, how.first, WHOLE_ROWS)
    between = warp_tiles_glu(
        digits(x, held_width(gate_up)), gate_up, how.gate_up_bias, in_order, ids.shape[1], held_width(down), how.inner,
        activation=how.activation, clamp=how.clamp, factors=factors,
    )  # fmt: skip
    return warp_tiles_down(between, down, how.down_bias, in_order, shares, down.shape[0] // how.count)


def _widened_parts(
    x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, ids: Tensor, shares: Tensor, factors: Tensor | None, how: _How,
    tile: WidenedTile,
) -> Tensor:  # fmt: skip
    pairs, chosen, hidden = ids.numel(), ids.shape[1], down.shape[0] // how.count
    rows = x.new_empty(len(x), held_width(gate_up))
    in_order = sort_pairs(ids, how.count, how.first, tile.rows, (x.contiguous(), rows))
    between = x.new_empty(pairs, held_width(down))
    launch_widened(
        rows, gate_up, how.gate_up_bias, in_order, chosen, between, how.inner, tile, activation=how.activation, clamp=how.clamp,
        factors=factors,
    )  # fmt: skip
    parts = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
    launch_widened(between, down, how.down_bias, in_order, chosen, parts, hidden, tile, shares=shares)
    return parts


def _role_parts(
    x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, ids: Tensor, shares: Tensor, factors: Tensor | None, how: _How,
    roles: Any,
) -> Tensor:  # fmt: skip
    pairs, chosen, hidden = ids.numel(), ids.shape[1], x.shape[1]
    in_order = sort_pairs(ids, how.count, how.first, roles.ROWS)
    between = x.new_empty(pairs, held_width(down))
    roles.glu(
        _in_order(x, gate_up, in_order, chosen), gate_up, how.gate_up_bias, in_order, between, how.inner, hidden, chosen=chosen,
        clamp=how.clamp, factors=factors,
    )  # fmt: skip
    parts = x.new_empty(pairs, hidden)
    roles.down(between, down, how.down_bias, in_order, shares, parts, how.inner)
    return parts


def most_rows(chosen: int, inner: int, hidden: int, dtype: torch.dtype) -> int:
    """That are computed at once: a power of two."""
    return min(MOST_ROWS, 1 << (MOST_BYTES // (chosen * (inner * dtype.itemsize + hidden * 4))).bit_length() - 1)


def row_steps(
    chosen: int, count: int, router: tuple[int, int], itemsize: int, most: int, slots: int | None = None, whole: bool = False
) -> list[int]:
    """The fewest rows, up to `most`, of each combination of forms that kernels take: one-row products, sizes of tiles, those of
    the router [E, H] too, and of a sort's steps. `slots`: of adapters of experts, where some rows have one; `whole`: the
    experts are MXFP4."""
    found: dict[tuple, int] = {}
    for rows in range(1, most + 1):
        pairs = rows * chosen
        form: tuple = (0,)
        if rows > ROW_FORM or slots is not None:
            own = whole and slots is None
            widened = widened_tile(pairs, count) if own else None
            size = WHOLE_ROWS if own and _are_whole(pairs, count) else tile_rows(pairs, count, itemsize)
            form = (widened, *sort_form(pairs, count * ((slots or 0) + 1), widened.rows if widened else size))
            form = (own and _has_roles(pairs, count), *form)
        found.setdefault((*form, *router_tile(rows, *router, itemsize)), rows)
    return list(found.values())
