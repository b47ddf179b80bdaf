"""Matrix products of 2 to 64 rows on Hopper's tensor cores, whose weights are all asked for at once, by the copy engine (TMA).

What `skinny_gemm.py` does, in Gluon. There the weights that a program loads before the wait pass through registers, six loads
of a thread on their way at most, and so do the rows behind the wait. Here a ring of tiles in shared memory is filled by copies
that need no registers: the whole ring before the wait, and the rows' parts of it by one turn of copies behind. A step of the
sum waits for its own tile only, and what is read is asked for again at once. Neither the interpreter nor another card runs
it: there GemmTile computes the same (ring_tile.py). products.py says what is computed.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from headrace.fast_decode.epilogues import Plan, split_width, sumsq_block
from headrace.fast_decode.ring_ends import column_parameters, norm_factors, store_joined, store_projected
from headrace.fast_decode.ring_tile import RingTile, row_block
from headrace.kernels.activation import activate
from headrace.kernels.cluster import (
    await_begun,
    await_joined,
    begin_joining,
    blocked,
    joined_four,
    place_of,
    plain,
    rank_in_cluster,
    send_four,
    sums_of,
    tiles_of,
)
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.gluon_rings import ask, leave_part, ring_barriers, sum_parts
from headrace.model.weight import Weight

WAITS_FROM = 64  # rows of a tile: its last split waits for the others and keeps its own sums; of fewer the one that comes last
CLUSTER_ROWS = 32  # of a tile, whose splits may be a cluster


@gluon.jit
def say_done(ticket):
    """What this program has stored is there for the one that waits for it."""
    gl.thread_barrier()  # all threads' stores before the one thread's release
    gl.atomic_add(ticket, 1, sem="release")


@gluon.jit
def await_parts(ticket, number, WARPS: gl.constexpr = 4):
    """Until so many programs have said so: those before this one, which begin before it. Each thread looks for itself."""
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(
        "{ .reg .pred more; again: ld.acquire.gpu.global.s32 $0, [$1]; setp.lt.s32 more, $0, $2; @more bra again; }",
        "=&r,l,r", [(ticket + thread * 0).to(gl.int64), number + thread * 0], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def join_parts(y, slab, split, ticket, SIZE: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr):
    """The same sum for the tile's last split, which waits for the others'; whether this is it."""
    last = split == SPLITS - 1
    if SPLITS > 1:
        if last:
            await_parts(ticket, SPLITS - 1, WARPS)
            total = gl.load(slab, cache_modifier=".cg")
            for s in gl.static_range(1, SPLITS - 1):
                total += gl.load(slab + s * SIZE, cache_modifier=".cg")
            y = total + y
            gl.thread_barrier()  # all threads have looked
            gl.store(ticket, 0)
        else:
            gl.store(slab + split * SIZE, y)
            say_done(ticket)
    return y, last


@gluon.jit
def join_in_cluster(y, at, split, BASE: gl.constexpr, SIZE: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr):
    """The same sum over distributed shared memory, for the tile's last split, the first of its cluster. The barrier lies where
    its own part would."""
    BARRIER: gl.constexpr = BASE + 4 * (CTAS - 1) * SIZE
    await_begun(WARPS, CTAS)
    if split < CTAS - 1:
        send_four(y, BASE + 4 * (split * SIZE + at), BARRIER, at >= 0)
    else:
        await_joined(BARRIER, 4 * (CTAS - 1) * SIZE, WARPS, CTAS)
        total = joined_four(BASE + 4 * at)
        for p in gl.static_range(1, CTAS - 1):
            total += joined_four(BASE + 4 * (p * SIZE + at))
        y = total + y
    return y, split == CTAS - 1


@gluon.jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])  # or multiples of 16 would be variants
def _ring_kernel(
    x_tiles, w_tiles, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr,
    M, N, K, k_split, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    BEHIND: gl.constexpr, WAITS: gl.constexpr, CTAS: gl.constexpr, BASE: gl.constexpr, MODE: gl.constexpr,
    SUMSQ_BLOCK: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 if MODE == "glu" else 1
    BYTES: gl.constexpr = 2 * BLOCK_K * (PARTS * BLOCK_N + BLOCK_M)  # of a step; rows past the last come as zeros
    WARPS: gl.constexpr = BLOCK_N // 16  # four for 64 columns
    sums: gl.constexpr = sums_of(BLOCK_M, WARPS, CTAS)
    flat: gl.constexpr = blocked([4, 1], [BLOCK_N // 4, 128 // BLOCK_N], [1, WARPS], [0, 1], CTAS)
    squares: gl.constexpr = blocked([1, 4], [2, 16], [WARPS, 1], [1, 0], CTAS)
    if PDL:
        grid_dependency("launch_dependents", WARPS, CTAS)
    tile = gl.program_id(0)
    if CTAS > 1:
        split = CTAS - 1 - rank_in_cluster()
        joined = gl.allocate_shared_memory(gl.float32, [CTAS, BLOCK_N * BLOCK_M], plain(CTAS))
        begin_joining(BASE + 4 * (CTAS - 1) * BLOCK_N * BLOCK_M, WARPS, CTAS)
    else:
        split = gl.program_id(1)
    n0 = tile * BLOCK_N
    k_start = split * k_split
    steps = gl.maximum(gl.cdiv(gl.minimum(k_split, K - k_start), BLOCK_K), 0)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, BLOCK_N, BLOCK_K], w_tiles.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], x_tiles.layout)
    full = ring_barriers(STAGES, CTAS)
    for i in range(0, gl.minimum(steps, STAGES)):
        ask(w_tiles, w_ring, full, i, n0, N, k_start + i * BLOCK_K, STAGES, PARTS, BYTES)
    # parameters of columns are weights, so before the wait
    rn = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, flat))
    rm = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, flat))
    norm, bias = column_parameters(
        norm_ptr, bias_ptr, rn, rn < N, norm_offset, split, gl.SliceLayout(1, flat), BLOCK_N, MODE, HAS_BIAS, SPLITS
    )  # fmt: skip
    place = rm[None, :] * N + rn[:, None]
    ok = (rm < M)[None, :] & (rn < N)[:, None]
    if PDL:
        grid_dependency("wait", WARPS, CTAS)
    for i in range(0, gl.minimum(steps, STAGES)):
        tma.async_copy_global_to_shared(x_tiles, [0, k_start + i * BLOCK_K], full.index(i), x_ring.index(i))
    # what the epilogue reads is asked for now: behind the sums its latency would show
    if SUMSQ_BLOCK > 0:
        row = gl.minimum(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, squares)), M - 1)
        part = gl.arange(0, SUMSQ_BLOCK, layout=gl.SliceLayout(0, squares))
        at = sumsq_ptr + row[:, None] * sumsq_tiles + part[None, :]
        sumsq = gl.load(at, mask=(part < sumsq_tiles)[None, :], other=0.0)
    if MODE == "residual":
        before = gl.load(residual_ptr + place, mask=ok, other=0.0)
    acc = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, sums)
    up_acc = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, sums)
    for i in range(0, steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        x = x_ring.index(stage).permute((1, 0))
        next_acc = warpgroup_mma(w_ring.index(stage * PARTS), x, acc, is_async=True)
        if MODE == "glu":
            next_up = warpgroup_mma(w_ring.index(stage * PARTS + 1), x, up_acc, is_async=True)
            acc, up_acc = warpgroup_mma_wait(PARTS * BEHIND, deps=[next_acc, next_up])
        else:
            acc = warpgroup_mma_wait(BEHIND, deps=[next_acc])
        done = i - BEHIND  # step whose place is free again
        if (done >= 0) & (done + STAGES < steps):
            gl.thread_barrier()  # all warps have read it
            k = k_start + (done + STAGES) * BLOCK_K
            ask(w_tiles, w_ring, full, done, n0, N, k, STAGES, PARTS, BYTES)
            tma.async_copy_global_to_shared(x_tiles, [0, k], full.index(done % STAGES), x_ring.index(done % STAGES))
    if BEHIND:
        if MODE == "glu":
            acc, up_acc = warpgroup_mma_wait(0, deps=[acc, up_acc])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
    y = gl.convert_layout(acc, flat)
    if SUMSQ_BLOCK > 0:
        factor = norm_factors(sumsq, K, eps, flat)
        y = y * factor[None, :]
    if MODE == "glu":
        up = gl.convert_layout(up_acc, flat)
        if SUMSQ_BLOCK > 0:
            up = up * factor[None, :]
        gl.store(out_ptr + place, (activate(y, ACTIVATION) * up).to(out_ptr.dtype.element_ty), mask=ok)
    elif MODE == "project":
        store_projected(y, bias, scale, softcap, out_ptr, place, ok, split, M, N, HAS_SOFTCAP)
    else:
        SIZE: gl.constexpr = BLOCK_N * BLOCK_M
        slab = partials_ptr + tile * (SPLITS * SIZE) + rm[None, :] * BLOCK_N + (rn - n0)[:, None]
        if CTAS > 1:
            at = rm[None, :] * BLOCK_N + (rn - n0)[:, None]
            y, last = join_in_cluster(y, at, split, BASE, SIZE, CTAS, WARPS)
        elif WAITS:
            y, last = join_parts(y, slab, split, tickets_ptr + tile, SIZE, SPLITS, WARPS)
        else:
            last = leave_part(y, slab, split, tickets_ptr + tile, SIZE, SPLITS)
        if last:
            if CTAS == 1 and not WAITS:
                y = sum_parts(y, slab, tickets_ptr + tile, SIZE, SPLITS)
            store_joined(
                y, before, bias, norm, scale, residual_ptr, out_ptr, sumsq_out_ptr, sumsq_out_tiles, tile, place, ok, rm, M
            )  # fmt: skip
        if CTAS > 1:
            joined._keep_alive()  # nothing else lies in its place until here


def plan(tile: RingTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None, *, joins: bool = False) -> Plan:
    """`joins`: the splits' sums are added up, in a cluster if the tile says so."""
    rows, width = x.shape
    block_m = row_block(rows)
    ctas = tile.splits if tile.cluster and joins and block_m <= CLUSTER_ROWS else 1
    sizes = {
        "joined": 4 * ctas * tile.block_n * block_m, "weights": 2 * tile.stages * tile.block_n * tile.block_k,
        "rows": 2 * tile.stages * block_m * tile.block_k,
    }  # fmt: skip
    own = {
        "x_tiles": tiles_of(x, [block_m, tile.block_k], ctas),
        "w_tiles": tiles_of(weight.data, [tile.block_n, tile.block_k], ctas), "BLOCK_M": block_m,
        "BLOCK_K": tile.block_k, "k_split": split_width(width, tile.splits, tile.block_k), "STAGES": tile.stages,
        "BEHIND": int(tile.behind and tile.stages > 1), "WAITS": block_m >= WAITS_FROM, "SUMSQ_BLOCK": sumsq_block(sumsq, 64),
        "CTAS": ctas, "BASE": place_of("joined", sizes) if ctas > 1 else 0, "num_ctas": ctas,
    }  # fmt: skip
    return Plan(_ring_kernel, (-(-columns // tile.block_n), tile.splits // ctas), own)
