"""Runs kernels in Gluon without a card: tensors as the program writes them, layouts of no meaning, copies and products at once.

What a layout stands for is assumed where inline PTX runs (ptx_interpreter.py): element t of a tensor [threads] is in thread t,
as `convert_layout` to a blocked layout of one element a thread has it. Only what headrace's kernels with inline PTX use.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton.language
from torch import Tensor

import ptx_interpreter

FP8 = (torch.float8_e4m3fn,)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, *FP8)


def _raw(x: Any) -> Any:
    return x.value if isinstance(x, Value | triton.language.constexpr) else x


class Value:
    """A tensor or a number on the device."""

    def __init__(self, value: Tensor):
        self.value = value

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        if bitcast:
            return Value(self.value.contiguous().view(dtype))
        if self.value.dtype in FLOATS and dtype not in FLOATS:
            return Value(torch.nan_to_num(self.value).to(dtype))
        return Value(self.value.to(dtype))

    def _with(self, other: Any, op: Callable[[Any, Any], Any]) -> Any:
        return NotImplemented if isinstance(other, Pointer) else Value(op(self.value, _raw(other)))

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def __getitem__(self, index: Any) -> Value:
        return Value(self.value[index])

    def __neg__(self) -> Value:
        return Value(-self.value)

    def __bool__(self) -> bool:
        return bool(self.value.item())

    def __index__(self) -> int:
        return int(self.value.item())


def _division(a: Any, b: Any) -> Any:
    return torch.div(a, b, rounding_mode="trunc")


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "truediv": lambda a, b: a / b,
    "floordiv": _division, "mod": lambda a, b: torch.fmod(a, b), "lshift": lambda a, b: a << b, "rshift": lambda a, b: a >> b,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "lt": lambda a, b: a < b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "le": lambda a, b: a <= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip
for _name, _op in OPERATIONS.items():
    setattr(Value, f"__{_name}__", lambda self, other, op=_op: self._with(other, op))
    setattr(Value, f"__r{_name}__", lambda self, other, op=_op: Value(op(torch.as_tensor(other), self.value)))


class Pointer:
    """Places, counted in elements, of a tensor's memory."""

    def __init__(self, memory: Tensor, at: Any = 0):
        self.memory, self.at = memory, at

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + torch.as_tensor(_raw(more)).long())

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Pointer:
        if not bitcast:  # an address
            return self
        bytes_at = torch.as_tensor(self.at) * self.memory.itemsize
        assert not (bytes_at % dtype.itemsize).any(), "a load of several numbers that is not aligned"
        return Pointer(self.memory.view(dtype), bytes_at // dtype.itemsize)


class Shared:
    def __init__(self, data: Tensor):
        self.data = data

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(_raw(i))])

    def slice(self, start: int, length: int, axis: int) -> Shared:
        return Shared(self.data.narrow(axis, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        assert self.data.shape == value.value.shape
        self.data.copy_(value.value)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.data.flatten().view(dtype)[: int(np.prod(shape))].view(shape))


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Value:
    at = torch.as_tensor(pointer.at)
    if mask is None:
        return Value(pointer.memory[at])
    at, there = torch.broadcast_tensors(at, torch.as_tensor(_raw(mask)))
    found = pointer.memory[torch.where(there, at, 0)]
    return Value(torch.where(there, found, torch.as_tensor(other, dtype=found.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    memory, at = pointer.memory, torch.as_tensor(pointer.at)
    data = torch.as_tensor(_raw(value)).to(memory.dtype)
    if memory.dtype in FP8:
        memory, data = memory.view(torch.uint8), data.view(torch.uint8)
    if mask is not None:
        at, there, data = torch.broadcast_tensors(at, torch.as_tensor(_raw(mask)), data)
        at, data = at[there], data[there]
    memory[at] = data


def _say_done(ticket: Pointer) -> None:
    _atomic_add(ticket, 1)


def _await_parts(ticket: Pointer, number: int) -> None:
    """Programs run one after the other, so those that are waited for are done."""
    assert int(_load(ticket).value) == int(number.value if isinstance(number, Value) else number)


def _atomic_add(pointer: Pointer, value: int, sem: str = "") -> Value:
    before = Value(_load(pointer).value.clone())
    _store(pointer, Value(before.value + value))
    return before


def _product(a: Value, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    found = (_operand(a) @ b.data.double()).float()
    return Value(found + acc.value if use_acc else found)


def _operand(a: Any) -> Tensor:
    return (a.data if isinstance(a, Shared) else a.value).double()


def _inline(text: str, constraints: str, args: tuple[Value, ...], dtype: Any, pure: bool, pack: int) -> Any:
    text = getattr(text, "value", text)
    if pack == 2:
        return _inline_pairs(text, args, dtype)
    assert pack == 1
    if text.startswith("ld.global"):
        pointer = args[0].to(torch.int32, bitcast=True)
        return tuple(_load(pointer + i) for i in range(len(dtype)))
    words = [np.ascontiguousarray(x.value.numpy()).view(np.uint32) for x in args]
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    found = ptx_interpreter.run(text, words, len(kinds))
    values = tuple(
        Value(torch.from_numpy(np.ascontiguousarray(x).view(np.int32)).view(t)) for x, t in zip(found, kinds, strict=True)
    )
    return values if isinstance(dtype, tuple) else values[0]


def _inline_pairs(text: str, args: tuple[Value, ...], dtype: Any) -> Any:
    """Two neighbours of each tensor at a time: bytes share a register, 32 bits have one each; of 16 bits two come out of one."""
    shape, words = args[0].value.shape, []
    for arg in args:
        pair = arg.value.expand(shape).reshape(-1, 2).numpy()
        if pair.itemsize == 1:
            low, high = (pair[:, i].astype(np.uint8).astype(np.uint32) for i in range(2))
            words.append(low | high << np.uint32(8))
        else:
            words += [np.ascontiguousarray(pair[:, i]).view(np.uint32) for i in range(2)]
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    found = ptx_interpreter.run(text, words, len(kinds))
    values = tuple(
        Value(torch.from_numpy(np.ascontiguousarray(word).view(np.int16)).view(kind).reshape(shape))
        for word, kind in zip(found, kinds, strict=True)
    )
    return values if isinstance(dtype, tuple) else values[0]


def _split(x: Value) -> tuple[Value, Value]:
    assert x.value.shape[-1] == 2
    return Value(x.value[..., 0]), Value(x.value[..., 1])


def _copy(tiles: Any, coord: list[Any], barrier: Shared, target: Shared, pred: bool = True) -> None:
    """A box of a TensorDescriptor; what lies beyond its tensor is 0."""
    if not pred:
        return
    grid = torch.meshgrid(*(torch.arange(n) + int(_raw(c)) for n, c in zip(tiles.block_shape, coord, strict=True)), indexing="ij")
    inside = torch.ones_like(grid[0], dtype=torch.bool)
    at = torch.zeros_like(grid[0])
    for axis, size, stride in zip(grid, tiles.shape, tiles.strides, strict=True):
        inside &= axis < size
        at += axis * stride
    target.data.copy_(torch.where(inside, tiles.base.flatten()[torch.where(inside, at, 0)], 0))


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    """Of what nobody has written bytes are 255: float32 are NaN."""
    return Shared(torch.full([*shape, dtype.itemsize], 255, dtype=torch.uint8).view(dtype).view(shape))


def _activate(x: Value, kind: str) -> Value:
    return Value(F.silu(x.value) if kind == "silu" else F.gelu(x.value, approximate="tanh"))


def _minimum(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else Value(torch.minimum(*map(torch.as_tensor, (_raw(a), _raw(b)))))


def _unary(op: Callable[..., Tensor]) -> Callable[..., Value]:
    return lambda x, *more: Value(op(_raw(x), *map(_raw, more)))


def _max(x: Value, axis: int) -> Value:
    return Value(x.value.amax(axis))


def _maximum(a: Any, b: Any) -> Value:
    a = torch.as_tensor(_raw(a))
    return Value(torch.maximum(a, torch.as_tensor(_raw(b), dtype=a.dtype)))


def _where(c: Value, a: Any, b: Any) -> Value:
    return Value(torch.where(_raw(c), _raw(a), _raw(b)))


class _Layouts:
    get_default_for = staticmethod(lambda *_, **__: None)

    def __init__(self, *_: Any, **__: Any) -> None: ...


def _jit(fn: Any = None, **_: Any) -> Any:
    return fn if fn is not None else lambda f: f


def _language(program: list[int]) -> SimpleNamespace:
    nothing = lambda *_, **__: None  # noqa: E731
    return SimpleNamespace(
        constexpr=lambda x: x, uint8=torch.uint8, int32=torch.int32, int64=torch.int64, int16=torch.int16, float32=torch.float32,
        float16=torch.float16, bfloat16=torch.bfloat16, float8e4nv=torch.float8_e4m3fn, pointer_type=lambda t: t, static_range=range,
        BlockedLayout=nothing, SliceLayout=nothing, DistributedLinearLayout=nothing, SwizzledSharedLayout=nothing,
        DotOperandLayout=nothing, NVMMADistributedLayout=nothing, NVMMASharedLayout=_Layouts, exp2=_unary(torch.exp2),
        log2=_unary(torch.log2), atomic_add=_atomic_add, program_id=lambda axis: program[axis], thread_barrier=nothing,
        allocate_shared_memory=_allocate,
        arange=lambda a, b, layout: Value(torch.arange(a, b, dtype=torch.int32)),
        full=lambda shape, value, dtype, layout: Value(torch.full(shape, _raw(value), dtype=dtype)),
        zeros_like=_unary(torch.zeros_like), abs=_unary(torch.abs), rsqrt=_unary(torch.rsqrt), max=_max,
        where=_where, maximum=_maximum,
        minimum=_minimum,
        sum=lambda x, axis: Value(x.value.sum(axis)), reshape=lambda x, shape: Value(x.value.reshape(shape)),
        permute=lambda x, order: Value(x.value.permute(order)), split=_split,
        join=lambda a, b: Value(torch.stack((a.value, b.value), -1)), convert_layout=lambda x, layout: x,
        expand_dims=lambda x, axis: Value(x.value.unsqueeze(axis)), load=_load, store=_store, inline_asm_elementwise=_inline,
    )  # fmt: skip


class Interpreted:
    """In the place of a kernel, which is run by its own text with functions of the files `beside`."""

    def __init__(self, file: str, kernel: str, *beside: str):
        self.file, self.kernel, self.beside = file, kernel, beside

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            for name in ("num_warps", "num_stages", "launch_pdl", "maxnreg"):
                arguments.pop(name, None)
            run(self.file, self.kernel, grid, arguments, beside=self.beside)

        return launch


def run(
    path: str | Path, kernel: str, grid: tuple[int, ...], arguments: dict[str, Any], *, beside: tuple[str, ...] = (),
    language: dict[str, Any] | None = None, **stand_ins: Any,
) -> None:  # fmt: skip
    """Every program of a kernel of the file, one after the other. Tensors are on the CPU; descriptors have fields as
    TensorDescriptor's. `beside`: other files whose functions the kernel calls; `stand_ins`: what takes a function's place, and
    `language`: that of one of gl's."""
    program: list[Any] = [Value(torch.zeros((), dtype=torch.int32))] * 3
    nothing = lambda *_, **__: None  # noqa: E731
    names: dict[str, Any] = {
        "gluon": SimpleNamespace(jit=_jit), "gl": _language(program), "fence_async_shared": nothing, "TensorDescriptor": None,
        "mbarrier": SimpleNamespace(init=nothing, expect=nothing, wait=nothing, MBarrierLayout=nothing),
        "tma": SimpleNamespace(async_copy_global_to_shared=_copy), "warpgroup_mma": _product,
        "warpgroup_mma_init": lambda acc: acc, "warpgroup_mma_wait": lambda pending, deps: deps if len(deps) > 1 else deps[0],
    }  # fmt: skip
    for file in (*beside, path):
        source = re.sub(r"^from triton[^(\n]*(\([^)]*\))?.*\n", "", Path(file).read_text(), flags=re.M)
        functions = {name: value for name, value in names.items() if inspect.isfunction(value)}
        exec(compile(source, str(file), "exec", dont_inherit=True), names)
        names |= {name: function for name, function in functions.items() if not inspect.isfunction(names[name])}
    vars(names["gl"]).update(language or {})
    names |= {"grid_dependency": nothing, "activate": _activate, "say_done": _say_done, "await_parts": _await_parts, **stand_ins}
    given = {name: Pointer(x.view(-1)) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    for place in itertools.product(*(range(n) for n in grid)):
        program[: len(place)] = [Value(torch.tensor(x, dtype=torch.int32)) for x in place]
        names[kernel](**given)
