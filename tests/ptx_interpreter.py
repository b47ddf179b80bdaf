"""Runs the inline PTX of kernels in Triton's interpreter: threads are elements of a tensor, 32 neighbours a warp.

Only what headrace.kernels.warp_words and pairs write: loads, bytes and bits, pairs of bfloat16, and the tensor cores' products m16n8k16 and, of bytes, m16n8k32.
"""

from __future__ import annotations

import ctypes
import re

import numpy as np


def _halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two bfloat16 of a register as float32, the low one first."""
    return (word << np.uint32(16)).view(np.float32), (word & np.uint32(0xFFFF0000)).view(np.float32)


def _pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two float32, rounded to bfloat16, in a register."""

    def rounded(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)

    return rounded(low) | rounded(high) << np.uint32(16)


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    out, thread = np.zeros_like(a), np.arange(len(a))
    table = np.concatenate([np.ascontiguousarray(word)[:, None].view(np.uint8) for word in (a, b)], 1)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place) & np.uint32(15)
        found = table[thread, nibble & 7].astype(np.uint32)
        found = np.where(nibble & 8, (found >> np.uint32(7)) * np.uint32(255), found)
        out |= found << np.uint32(8 * place)
    return out


def _bytes_mma(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray], of_a: type = np.int8) -> list[np.ndarray]:
    """As `_mma`, of whole numbers of a byte, four to a register; those of A are `of_a`."""
    warps = len(a[0]) // 32
    lane = np.arange(32)
    group, rest = lane // 4, lane % 4
    left, right, sums = (np.zeros((warps, *shape), np.int64) for shape in ((16, 32), (32, 8), (16, 8)))
    for part in range(4):
        for i, register in enumerate(a):
            value = register.view(of_a).reshape(warps, 32, 4)[:, :, part]
            left[:, group + 8 * (i % 2), rest * 4 + part + 16 * (i // 2)] = value
        for i, register in enumerate(b):
            right[:, rest * 4 + part + 16 * i, group] = register.view(np.int8).reshape(warps, 32, 4)[:, :, part]
    for i, register in enumerate(c):
        sums[:, group + 8 * (i // 2), rest * 2 + i % 2] = register.view(np.int32).reshape(warps, 32)
    product = (left @ right + sums).astype(np.int32)
    return [product[:, group + 8 * (i // 2), rest * 2 + i % 2].reshape(-1).view(np.uint32) for i in range(4)]


def _mma(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """D = A B + C of each warp, the operands' fragments as the PTX manual draws them."""
    warps = len(a[0]) // 32
    lane = np.arange(32)
    group, rest = lane // 4, lane % 4
    left, right, sums = (np.zeros((warps, *shape), np.float64) for shape in ((16, 16), (16, 8), (16, 8)))
    for i, register in enumerate(a):
        for half, value in enumerate(_halves(register)):
            left[:, group + 8 * (i % 2), rest * 2 + half + 8 * (i // 2)] = value.reshape(warps, 32)
    for i, register in enumerate(b):
        for half, value in enumerate(_halves(register)):
            right[:, rest * 2 + half + 8 * i, group] = value.reshape(warps, 32)
    for i, register in enumerate(c):
        sums[:, group + 8 * (i // 2), rest * 2 + i % 2] = register.view(np.float32).reshape(warps, 32)
    product = (left @ right + sums).astype(np.float32)
    return [product[:, group + 8 * (i // 2), rest * 2 + i % 2].reshape(-1).view(np.uint32) for i in range(4)]


def _load(address: np.ndarray, count: int) -> list[np.ndarray]:
    words = np.array([(ctypes.c_uint32 * count).from_address(int(at))[:] for at in address], dtype=np.uint32)
    return [words[:, i].copy() for i in range(count)]


def run(text: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """The output registers, as uint32, after the text has run on the input ones."""
    count = len(inputs[0])
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def read(name: str) -> np.ndarray:
        name = name.strip("[]")
        if name.startswith("0x"):
            return np.full(count, int(name, 16), np.uint32)
        if name.startswith("0f"):
            return np.full(count, int(name[2:], 16), np.uint32)
        return registers[name] if name in registers else np.full(count, int(name), np.uint32)

    for line in text.strip().strip("{}").split(";"):
        line = " ".join(line.split())
        if not line or line.startswith(".reg"):
            continue
        op, _, rest = line.partition(" ")
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,{}\s][^,]*", rest) if part.strip()]
        lists = [[name.strip() for name in operand.strip("{}").split(",")] for operand in operands]
        target, values = lists[0], [[read(name) for name in names] for names in lists[1:]]
        first = [value[0] for value in values]
        if op.startswith("ld.global"):
            results = _load(first[0], len(target))
        elif op.startswith("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"):
            results = _mma(*values)
        elif op == "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32":
            results = _bytes_mma(*([np.ascontiguousarray(word) for word in operand] for operand in values))
        elif op == "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32":
            results = _bytes_mma(*([np.ascontiguousarray(word) for word in operand] for operand in values), np.uint8)
        elif op == "add.s32":
            results = [first[0] + first[1]]
        elif op == "mad.lo.s32":
            results = [first[0] * first[1] + first[2]]
        elif op.startswith("mov"):
            results = [first[0]]
        elif op == "shr.u32":
            results = [first[0] >> first[1]]
        elif op == "shl.b32":
            results = [first[0] << first[1]]
        elif op == "xor.b32":
            results = [first[0] ^ first[1]]
        elif op == "and.b32":
            results = [first[0] & first[1]]
        elif op == "mul.lo.u32":
            results = [first[0] * first[1]]
        elif op == "lop3.b32" and operands[-1] == "0xea":
            results = [first[0] & first[1] | first[2]]
        elif op == "lop3.b32" and operands[-1] == "0xe4":
            results = [first[0] & first[2] | first[1] & ~first[2]]
        elif op == "prmt.b32":
            results = [_prmt(*first)]
        elif op == "mul.rn.bf16x2":
            results = [_pair(*(x * y for x, y in zip(*map(_halves, first), strict=True)))]
        elif op == "fma.rn.bf16x2":
            results = [_pair(*(x * y + z for x, y, z in zip(*map(_halves, first), strict=True)))]
        else:
            raise NotImplementedError(line)
        registers.update(zip(target, results, strict=True))
    return [registers[f"${i}"] for i in range(outputs)]


class _Results:
    def __init__(self, handles: list):
        self.handles = handles

    def get_result(self, index: int):
        return self.handles[index]


def install(monkeypatch) -> None:
    """Triton's interpreter runs inline assembly for the length of a test."""
    from triton.runtime import interpreter

    def create_inline_asm(self, text, constraints, values, types, is_pure, pack):
        assert pack == 1
        inputs = [
            value.data.astype(np.uint64) if value.data.dtype.itemsize == 8 else np.ascontiguousarray(value.data).view(np.uint32)
            for value in values
        ]
        assert inputs[0].ndim == 1 and len(inputs[0]) % 32 == 0
        found = run(text, inputs, len(types))
        handles = []
        for value, kind in zip(found, types, strict=True):
            scalar = kind.scalar
            data = np.ascontiguousarray(value).view(np.float32 if scalar.is_floating() else np.int32 if scalar.is_int_signed() else np.uint32)
            handles.append(interpreter.TensorHandle(data, scalar))
        return _Results(handles)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)
