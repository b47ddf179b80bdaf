"""Mends Triton's interpreter where it breaks: NumPy 2.4 (one-element arrays as ints), bfloat16 matrix products, rounding to FP8."""

from __future__ import annotations


def mend() -> None:
    try:
        import numpy as np
        import torch
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:  # no Triton: the tests of its kernels are skipped or fail by themselves
        return
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widen(x):
        if x.dtype.scalar == tl.bfloat16:  # kept as uint16
            return (x.data.astype(np.uint32) << 16).view(np.float32)
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
