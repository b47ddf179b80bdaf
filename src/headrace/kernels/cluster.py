"""Programs of a cluster that join their parts over distributed shared memory (Hopper), for kernels in Gluon.

A kernel launched with num_ctas runs in clusters of so many programs. By their layouts all programs of one have the same
numbers; here each has its own, by its rank. What layouts say that all have the first one stores alone, so that is who adds up.
Parts come by st.async, which counts its bytes at a barrier beside where they arrive: nobody waits but who wants the sum. (A
barrier of the cluster that releases is a fence of the whole card, which takes longer than parts in memory and tickets.)

Inline PTX knows shared memory by bytes from its start, so it must be known where Triton puts a buffer: `place_of` (what it says
is held against Triton's own places in tests/test_kernels_compile.py).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def place_of(buffer: str, sizes: dict[str, int]) -> int:
    """The byte that a buffer begins at, of those in use together, by their sizes in bytes in the order of the kernel's text:
    Triton places the largest first."""
    before = sorted(sizes.items(), key=lambda item: -item[1])
    return sum(size for _, size in before[: [name for name, _ in before].index(buffer)])


def tiles_of(matrix: Tensor, shape: list[int], ctas: int) -> TensorDescriptor:
    """Of which each program copies its own. (`get_default_for` takes what all have for halves: no swizzle for eight rows.)"""
    usual = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
    apart = [[0, 0] for _ in range(ctas.bit_length() - 1)]
    layout = gl.NVMMASharedLayout(usual.swizzle_byte_width, usual.element_bitwidth, usual.rank, cga_layout=apart)
    return TensorDescriptor.from_tensor(matrix, shape, layout)


@gluon.constexpr_function
def blocked(size, threads, warps, order, ctas):
    return gl.BlockedLayout(size, threads, warps, order, [[0] * len(size)] * (ctas.bit_length() - 1))


@gluon.constexpr_function
def sums_of(rows, warps, ctas):
    """Of a product with so many rows of x."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16], [[0, 0]] * (ctas.bit_length() - 1))


@gluon.constexpr_function
def operand(ctas):
    return gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[0, 0]] * (ctas.bit_length() - 1))


@gluon.constexpr_function
def plain(ctas):
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0], [[0, 0]] * (ctas.bit_length() - 1))


@gluon.constexpr_function
def barriers(ctas):
    return mbarrier.MBarrierLayout([[0]] * (ctas.bit_length() - 1))


@gluon.jit
def rank_in_cluster():
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, True, 1)


@gluon.jit
def begin_joining(at: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """A barrier at that byte of shared memory, where parts are counted; says that this program has begun."""
    thread = gl.arange(0, 32 * WARPS, layout=blocked([1], [32], [WARPS], [0], CTAS))
    gl.inline_asm_elementwise(
        "{ .reg .b32 a; .reg .pred p; setp.eq.u32 p, $1, 0; mov.u32 a, global_smem; add.u32 a, a, $2; "
        "@p mbarrier.init.shared::cta.b64 [a], 1; fence.mbarrier_init.release.cluster; "
        "barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0; }", "=r,r,r", [thread, at + thread * 0], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def await_begun(WARPS: gl.constexpr, CTAS: gl.constexpr):
    """Until all programs have: only then may anything be sent."""
    thread = gl.arange(0, 32 * WARPS, layout=blocked([1], [32], [WARPS], [0], CTAS))
    gl.inline_asm_elementwise("barrier.cluster.wait.aligned; mov.u32 $0, $1;", "=r,r", [thread], gl.int32, False, 1)


@gluon.jit
def send_four(y, at, barrier_at: gl.constexpr, ok):
    """Numbers of threads that are `ok`, four that follow each other at a time, to those bytes of the first program's memory."""
    gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; .reg .pred p; setp.ne.s32 p, $16, 0; mov.u32 a, global_smem; add.u32 b, a, $12; add.u32 a, a, $8; "
        "mapa.shared::cluster.u32 a, a, 0; mapa.shared::cluster.u32 b, b, 0; "
        "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [a], {$4, $5, $6, $7}, [b]; "
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }",
        "=r,=r,=r,=r,f,f,f,f" + ",r" * 12, [y, at, barrier_at + at * 0, ok.to(gl.int32)], gl.int32, False, 4,
    )  # fmt: skip


@gluon.jit
def send_one(y, at, barrier_at: gl.constexpr, ok):
    gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; .reg .pred p; setp.ne.s32 p, $4, 0; mov.u32 a, global_smem; add.u32 b, a, $3; add.u32 a, a, $2; "
        "mapa.shared::cluster.u32 a, a, 0; mapa.shared::cluster.u32 b, b, 0; "
        "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], $1, [b]; mov.u32 $0, 0; }",
        "=r,f,r,r,r", [y, at, barrier_at + at * 0, ok.to(gl.int32)], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def await_joined(at: gl.constexpr, number, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """Until so many bytes have come to the barrier at that byte."""
    thread = gl.arange(0, 32 * WARPS, layout=blocked([1], [32], [WARPS], [0], CTAS))
    gl.inline_asm_elementwise(
        "{ .reg .b32 a; .reg .pred p, more; setp.eq.u32 p, $1, 0; mov.u32 a, global_smem; add.u32 a, a, $2; "
        "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], $3; "
        "again: mbarrier.try_wait.parity.shared::cta.b64 more, [a], 0; @!more bra again; mov.u32 $0, 0; }",
        "=r,r,r,r", [thread, at + thread * 0, number + thread * 0], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def joined_four(at):
    """Numbers that lie from those bytes on, four that follow each other at a time."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, global_smem; add.u32 a, a, $4; ld.shared.v4.f32 {$0, $1, $2, $3}, [a]; }",
        "=f,=f,=f,=f,r,r,r,r", [at], gl.float32, False, 4,
    )  # fmt: skip


@gluon.jit
def joined_one(at):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, global_smem; add.u32 a, a, $1; ld.shared.f32 $0, [a]; }", "=f,r", [at], gl.float32, False, 1
    )  # fmt: skip


@gluon.jit
def lane_like(x):
    """%laneid of each thread, in the shape of a tensor of whole numbers."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid; // $1", "=r,r", [x], gl.int32, True, 1)
