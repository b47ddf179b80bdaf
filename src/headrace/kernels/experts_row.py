"""The experts of one row, or of a few, on the CUDA cores: nothing is sorted, and one kernel adds up all experts of a token.

A program of the first kernel has a pair of a token and an expert and some columns of its gated product. One of the second has
a token and some columns of the result: it goes through the token's experts in the order of ids, the weights of the next ones
already on their way, the first ones' before the wait for the first kernel. What is loaded and how it is summed: one_row.py.
Pairs, and tokens, are the first axis of programs: those that share an expert read it at about the same time.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels.experts_ends import Joining, alone, finish_row, open_gate, row_target
from headrace.kernels.experts_few import Choice, choice_of, expert_of
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, num_multiprocessors, pdl, tl
from headrace.kernels.narrow import NarrowMatrix, arguments, held_width, packed, step_columns
from headrace.kernels.one_row import add_step, load_step


@jit(do_not_specialize=["first_expert", "clamp"])
def _row_glu(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, ids_ptr, logits_ptr, factors_ptr, out_ptr, N, out_width, first_expert, count,
    clamp,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, TURNS: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PACK: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    WIDTH: tl.constexpr = K // PACK  # of a row as it is held
    BLOCK: tl.constexpr = BLOCK_K // PACK
    STEPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    SUMS: tl.constexpr = BLOCK // 8 if KIND == "float" else BLOCK // 16
    EVICT: tl.constexpr = "evict_first" if KIND == "float" else ""  # what is read once had better not take others' place
    pair = tl.program_id(0)
    row = pair // CHOSEN
    rk = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = expert_of(pair, row, ids_ptr, logits_ptr, EXPERTS, BLOCK_E, CHOSEN) - first_expert
    if (expert < 0) | (expert >= count):
        return
    factor = 1.0
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + row)
    x_ptr += row.to(tl.int64) * COLUMNS
    base = expert * (2 * N)
    steps = ()
    acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    up_acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    for i in tl.static_range(TURNS * STEPS + AHEAD):
        if i < TURNS * STEPS:
            first = (tl.program_id(1) * TURNS + i // STEPS) * BLOCK_N  # past its end a row is 0
            rows = base + first + tl.arange(0, BLOCK_N)
            pointers = w_ptr + rows[:, None].to(tl.int64) * WIDTH + rk[None, :]
            one = load_step(
                pointers, scales_ptr, zeros_ptr, rk, i % STEPS * BLOCK, rows, base + first, base + N, WIDTH, BLOCK_N, BLOCK,
                EVEN, KIND, GROUP, GROUPS, SCALE_ROWS, ZEROS, EVICT,
            )  # fmt: skip
            two = load_step(
                pointers + N.to(tl.int64) * WIDTH, scales_ptr, zeros_ptr, rk, i % STEPS * BLOCK, N + rows, base + N + first,
                base + 2 * N, WIDTH, BLOCK_N, BLOCK, EVEN, KIND, GROUP, GROUPS, SCALE_ROWS, ZEROS, EVICT,
            )  # fmt: skip
            steps = steps + ((one, two),)
        if i >= AHEAD:
            one, two = steps[i - AHEAD]
            acc = add_step(
                acc, one, x_ptr, rk, (i - AHEAD) % STEPS * BLOCK, COLUMNS, BLOCK_N, BLOCK, KIND, GROUP, ZEROS, ASM
            )  # fmt: skip
            up_acc = add_step(
                up_acc, two, x_ptr, rk, (i - AHEAD) % STEPS * BLOCK, COLUMNS, BLOCK_N, BLOCK, KIND, GROUP, ZEROS, ASM
            )  # fmt: skip
            if (i - AHEAD) % STEPS == STEPS - 1:
                column = (tl.program_id(1) * TURNS + (i - AHEAD) // STEPS) * BLOCK_N + tl.arange(0, BLOCK_N)
                rows = base + column
                g, u = tl.sum(acc, 1) * factor, tl.sum(up_acc, 1) * factor
                if KIND != "float" and GROUP == 0:
                    g *= tl.load(scales_ptr + rows // SCALE_ROWS, mask=column < N, other=0.0).to(tl.float32)
                    u *= tl.load(scales_ptr + (N + rows) // SCALE_ROWS, mask=column < N, other=0.0).to(tl.float32)
                y = open_gate(g, u, bias_ptr, base, column, N, clamp, ACTIVATION)
                place = out_ptr + pair.to(tl.int64) * out_width + column
                tl.store(place, y.to(out_ptr.dtype.element_ty), mask=column < out_width)
                acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
                up_acc = tl.zeros([BLOCK_N, SUMS], tl.float32)


@jit(do_not_specialize=["first_expert"])
def _row_down(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, ids_ptr, shares_ptr, logits_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_ptr,
    N, first_expert, count, scale, norm_offset, share_scale,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PACK: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    WIDTH: tl.constexpr = K // PACK
    BLOCK: tl.constexpr = BLOCK_K // PACK
    STEPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    SUMS: tl.constexpr = BLOCK // 8 if KIND == "float" else BLOCK // 16
    EVICT: tl.constexpr = "evict_first" if KIND == "float" else ""  # what is read once had better not take others' place
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0)
    rk = tl.arange(0, BLOCK)
    ids, shares = choice_of(
        row, ids_ptr, shares_ptr, logits_ptr, share_scale, EXPERTS, BLOCK_E, CHOSEN, SCORE, RENORMALIZE
    )  # fmt: skip
    experts = ()
    for j in tl.static_range(CHOSEN):
        expert = ids[j] - first_expert
        held = (expert >= 0) & (expert < count)
        experts = experts + ((tl.where(held, expert, 0), held, tl.where(held, shares[j], 0.0)),)
    before, norm = row_target(residual_ptr, norm_ptr, row, column, N, norm_offset)
    steps = ()
    total = tl.zeros([BLOCK_N, SUMS], tl.float32)
    acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.static_range(CHOSEN * STEPS + AHEAD):
        if i < CHOSEN * STEPS:
            expert, held, share = experts[i // STEPS]
            base = expert * N
            rows = base + column
            end = tl.where(held, base + N, 0)
            pointers = w_ptr + rows[:, None].to(tl.int64) * WIDTH + rk[None, :]
            step = load_step(
                pointers, scales_ptr, zeros_ptr, rk, i % STEPS * BLOCK, rows, base + tl.program_id(1) * BLOCK_N, end, WIDTH,
                BLOCK_N, BLOCK, False, KIND, GROUP, GROUPS, SCALE_ROWS, ZEROS, EVICT,
            )  # fmt: skip
            steps = steps + (step,)
        if PDL and i + 1 == AHEAD:
            gdc_wait()
            gdc_launch_dependents()
        if i >= AHEAD:
            expert, held, share = experts[(i - AHEAD) // STEPS]
            rows = expert * N + column
            known = held & (column < N)
            from_row = x_ptr + (row * CHOSEN + (i - AHEAD) // STEPS).to(tl.int64) * K
            acc = add_step(
                acc, steps[i - AHEAD], from_row, rk, (i - AHEAD) % STEPS * BLOCK, K, BLOCK_N, BLOCK, KIND, GROUP, ZEROS, ASM
            )  # fmt: skip
            if (i - AHEAD) % STEPS == STEPS - 1:
                factor = tl.zeros([BLOCK_N], tl.float32) + share
                if KIND != "float" and GROUP == 0:
                    factor *= tl.load(scales_ptr + rows // SCALE_ROWS, mask=known, other=0.0).to(tl.float32)
                if bias_ptr is not None:
                    biases += share * tl.load(bias_ptr + rows, mask=known, other=0.0).to(tl.float32)
                total += tl.where(held, acc * factor[:, None], 0.0)  # rows of experts elsewhere were not written
                acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    y = tl.sum(total, 1) + biases
    finish_row(y, before, norm, out_ptr, residual_ptr, sumsq_ptr, row, column, N, scale, 1)


@dataclass(frozen=True, slots=True)
class RowTile:
    """A program's work: `turns` times block_n columns of a result in steps of block_k; `ahead` steps' weights are on their
    way."""

    block_n: int
    block_k: int
    num_warps: int
    ahead: int
    turns: int = 1

    def arguments(self, weight: NarrowMatrix, experts: int) -> dict[str, int]:
        steps = experts * self.turns * -(-held_width(weight) // self.block_k)
        return {
            "K": held_width(weight), "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "AHEAD": min(self.ahead, steps),
            "num_warps": self.num_warps,
        }  # fmt: skip


def _tile(weight: NarrowMatrix, block_n: int, warps: int, of_row: int, matrices: int, registers: int) -> RowTile:
    """`of_row`: warps side by side along a row, each with 512 bytes of it. `registers`: of a thread, for what is on its way."""
    per_byte, size = packed(weight.kind), weight.data.element_size()
    block_k = step_columns(weight.kind, 512 // size * per_byte * of_row)
    a_step = matrices * block_n * block_k * size // per_byte // (4 * 32 * warps)
    if weight.kind != "float":
        a_step *= 2  # and their scales
    return RowTile(block_n, block_k, warps, max(1, registers // max(1, a_step)))


def glu_tile(weight: NarrowMatrix) -> RowTile:
    """Measured on an H200, as is the other: of floats a warp by itself has three columns, one after the other."""
    width, size = weight.data.shape[1], weight.data.element_size()
    if weight.kind == "float":
        return RowTile(1, 512 // size, 1, 8, 3 if width * size <= 8192 else 1)
    warps = 4 if width * size >= 2048 else 2 if width * size >= 1024 else 1
    return _tile(weight, 4, warps, warps, 2, 64)


def down_tile(weight: NarrowMatrix, columns: int) -> RowTile:
    """`columns`: of all rows. One warp has what it multiplies by where it needs it: more would hand it over at each step."""
    if weight.kind == "float":
        return RowTile(2, 512 // weight.data.element_size(), 1, 12)
    return _tile(weight, 8 if columns >= 8 * num_multiprocessors(weight.data.device) else 4, 4, 1, 1, 48)


def row_glu(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, choice: Choice, out: Tensor, columns: int, *, first: int, count: int,
    activation: str, clamp: float, factors: Tensor | None = None,
) -> None:  # fmt: skip
    """x [T, H] -> out [T * k, W] = gated products of the held experts, 0 past `columns`; `factors` [T]: of x."""
    tile = glu_tile(weight)
    a_program = tile.block_n * tile.turns
    even = out.shape[1] == columns and columns % a_program == 0
    _row_glu[choice.rows * choice.chosen, -(-out.shape[1] // a_program)](
        x, bias_ptr=bias, factors_ptr=factors, out_ptr=out, N=columns, out_width=out.shape[1], first_expert=first, count=count,
        clamp=clamp, COLUMNS=x.shape[1], ACTIVATION="clamped" if clamp else activation, EVEN=even, TURNS=tile.turns,
        **choice.arguments(), **tile.arguments(weight, 1), **arguments(weight, x), **pdl(x),
    )  # fmt: skip


def row_down(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, choice: Choice, out: Tensor | Joining, *, first: int, count: int
) -> Tensor | None:
    """x [T * k, K] -> out [T, N]: the sums over held experts; of a residual the sums of squares."""
    rows, columns = (out if isinstance(out, Tensor) else out.total).shape
    tile = down_tile(weight, rows * columns)
    tiles = -(-columns // tile.block_n)
    target = alone(out) if isinstance(out, Tensor) else out.arguments(tiles)
    _row_down[rows, tiles](
        x, bias_ptr=bias, N=columns, first_expert=first, count=count, **choice.arguments(), **choice.share_arguments(),
        **target, **tile.arguments(weight, choice.chosen), **arguments(weight, x), **pdl(x),
    )  # fmt: skip
    return target["sumsq_ptr"]
