"""Compiling for a card that is not there (headrace.compile_ahead.no_device), and what a compiled kernel takes of one."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from pathlib import Path

import triton

from headrace.compile_ahead.no_device import install, replace_everywhere

_NO_WRITES = ("ST", "HGMMA", "BAR", "SYNCS", "RED")  # instructions whose first register is read

__all__ = ["install", "overwritten", "replace_everywhere", "stack_pointer_taken", "told", "usage"]


def told(name: str, cubin: bytes, *options: str) -> str | None:
    """What one of the tools that Triton brings says of a compiled kernel; None where that tool is not there."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    if not os.access(tool, os.X_OK):
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True)
    return out.stdout + out.stderr


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack: spilled registers) a thread of a compiled kernel; (0, 0) where they cannot be read."""
    out = told("cuobjdump", cubin, "-res-usage")
    if out is None:
        return 0, 0
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert found is not None, out
    return int(found[1]), int(found[2])


@functools.lru_cache(maxsize=1)  # it takes as long as compiling, and each kernel is looked at twice
def _instructions(cubin: bytes) -> list[str]:
    """As the disassembler writes them; none where it is not there."""
    out = told("nvdisasm", cubin, "-c", "--no-dataflow")
    return [] if out is None else re.findall(r"/\*[0-9a-f]{4,}\*/ +([^;]+);", out)


def stack_pointer_taken(cubin: bytes) -> list[str]:
    """Instructions of a compiled kernel that compute with R1, which only points to what is spilled. There are none, unless the
    assembler lost a spilled value: ptxas 12.8 made two of them out of the place in shared memory that a product reads."""
    found = []
    for instruction in _instructions(cubin):
        operands = re.sub(r"\[[^]]*\]", "", instruction)  # addresses are what it is for
        if re.search(r"\bR1\b", operands) and not re.match(r"(@\S+ )?(PRMT\b|\S+ R1,)", operands):  # PRMT: bytes of no meaning
            found.append(instruction.strip())
    return found


def overwritten(cubin: bytes) -> list[str]:
    """Instructions of a kernel for Hopper that write to registers from which a running product reads its left operand."""
    read: set[int] = set()
    found = []
    for line in _instructions(cubin):
        if product := re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", line):
            read |= {int(product[1]) + i for i in range(4)}
        elif "WARPGROUP.DEPBAR" in line:
            read.clear()
        elif (write := re.match(r"(?:@!?U?P\d+ )?([A-Z]\S*) R(\d+)\b", line)) and not write[1].startswith(_NO_WRITES):
            size = 4 if ".128" in write[1] else 2 if ".64" in write[1] or ".WIDE" in write[1] else 1
            found += [line.strip()] if read & {int(write[2]) + i for i in range(size)} else []
    return found
