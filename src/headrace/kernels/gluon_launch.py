"""Programmatic dependent launch for kernels in Gluon, which has no functions for it; launch.py says the rules."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.kernels.cluster import blocked


@gluon.jit
def grid_dependency(what: gl.constexpr, WARPS: gl.constexpr = 4, CTAS: gl.constexpr = 1):
    """griddepcontrol's `what` ("wait", "launch_dependents"), by every thread of a program, or of a role, of so many warps; CTAS
    of a cluster."""
    thread = gl.arange(0, 32 * WARPS, layout=blocked([1], [32], [WARPS], [0], CTAS))
    gl.inline_asm_elementwise("griddepcontrol." + what + "; mov.u32 $0, $1;", "=r,r", [thread], gl.int32, False, 1)
