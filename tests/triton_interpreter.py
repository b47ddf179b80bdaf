"""Mends Triton's interpreter where it breaks: NumPy 2.4 (one-element arrays as ints), bfloat16 matrix products, rounding to FP8.
And where it does the same thing again at every operation, which was half of its time."""

from __future__ import annotations

import math
from typing import Any


def mend() -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:  # no Triton: the tests of its kernels are skipped or fail by themselves
        return
    repair(interpreter)
    hasten(interpreter)


def repair(interpreter: Any) -> None:
    import numpy as np
    import torch
    import triton.language as tl

    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widen(x):
        if x.dtype.scalar == tl.bfloat16:  # kept as uint16
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        if x.dtype.scalar == tl.float8e4nv:
            return torch.from_numpy(np.ascontiguousarray(x.data)).view(torch.float8_e4m3fn).float().numpy()
        return x.data

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(widen(a), widen(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding):
        """Its own rounds halves up, and a carry into the exponent is lost."""
        if target != tl.float8e4nv or source != tl.float32:
            return convert(data, source, target, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)

    interpreter._convert_float = convert_float
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = create_dot


def hasten(interpreter: Any) -> None:
    """The same results, and the same refusal of integers that overflow."""
    import numpy as np
    import triton.language as tl

    patch_lang, patched, kinds, kind_of = interpreter._patch_lang, set(), {}, interpreter._get_np_dtype

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_once(fn):
        """What the launch of a kernel has patched, a function that it calls need not patch again."""
        langs = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if patched and langs <= patched:
            return interpreter._LangPatchScope()
        patched.update(langs)
        return patch_lang(fn)

    def get_np_dtype(kind):
        """Its own makes a table of all at every call."""
        name = kind.scalar.name
        if name not in kinds:
            kinds[name] = kind_of(kind)
        return kinds[name]

    semantic = interpreter.TritonSemantic
    check = semantic.binary_op_sanitize_overflow_impl

    def check_overflow(self, lhs, rhs, binary_op):
        """Its own does the operation, and two comparisons, by the interpreter."""
        kind = lhs.type.scalar
        if not isinstance(self.builder, interpreter.InterpreterBuilder) or kind.int_bitwidth not in (8, 16, 32):
            return check(self, lhs, rhs, binary_op)
        found = getattr(np, {"mul": "multiply", "sub": "subtract"}.get(binary_op.__name__, binary_op.__name__))(
            lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64)
        )
        assert kind.get_int_min_value() <= found.min() and found.max() <= kind.get_int_max_value(), f"overflow in {binary_op.__name__}"

    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_tensor(self, handle, type):
        """Its own makes a type of the shape at every tensor."""
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in shapes:
            shapes[shape] = tl.core.tuple([tl.constexpr(s) for s in shape]), tl.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    make_block = tl.block_type.__init__

    def make_block_type(self, element_ty, shape):
        key = repr(element_ty), tuple(getattr(s, "value", s) for s in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    tl.block_type.__init__, tl.tensor.__init__ = make_block_type, make_tensor
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, get_np_dtype
    semantic.binary_op_sanitize_overflow_impl = check_overflow
