"""What kernels in Gluon with rings of tiles share: barriers, copies, and sums of which several programs have parts."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from headrace.kernels.cluster import barriers


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, CTAS: gl.constexpr = 1):
    """Of each place of a ring, that it is filled."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers(CTAS))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return full


@gluon.jit
def ask(w_tiles, w_ring, full, i, n0, N, k, STAGES: gl.constexpr, PARTS: gl.constexpr, BYTES: gl.constexpr):
    """The weights of step i into the ring; its barrier waits for the rows' part too."""
    stage = i % STAGES
    mbarrier.expect(full.index(stage), BYTES)
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(w_tiles, [n0 + part * N, k], full.index(stage), w_ring.index(stage * PARTS + part))


@gluon.jit
def ask_rows(x_tiles, x_ring, full, i, m0, k, HALVES: gl.constexpr, STAGES: gl.constexpr):
    """The rows' part of step i: columns from k on, 64 in each place."""
    for half in gl.static_range(HALVES):
        place = x_ring.index(i % STAGES * HALVES + half)
        tma.async_copy_global_to_shared(x_tiles, [m0, k + half * 64], full.index(i % STAGES), place)


@gluon.jit
def leave_part(y, slab, split, ticket, SIZE: gl.constexpr, SPLITS: gl.constexpr):
    """A split's sums are left to the last split of the tile, as by epilogues.finish; whether this is it."""
    last = True
    if SPLITS > 1:
        gl.store(slab + split * SIZE, y)
        gl.thread_barrier()  # all threads' stores before the one thread's release
        last = gl.atomic_add(ticket, 1, sem="acq_rel") == SPLITS - 1
    return last


@gluon.jit
def sum_parts(y, slab, ticket, SIZE: gl.constexpr, SPLITS: gl.constexpr):
    """What all splits left, in their order, for the last one."""
    if SPLITS > 1:
        y = gl.load(slab, cache_modifier=".cg")
        for s in gl.static_range(1, SPLITS):
            y += gl.load(slab + s * SIZE, cache_modifier=".cg")
        gl.store(ticket, 0)
    return y
