"""The mended interpreter is as strict as its own: integers that overflow end a kernel, in functions that it calls too."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is no interpreter")


@triton.jit
def _double(x, OP: tl.constexpr):
    if OP == "add":
        return x + x
    if OP == "sub":
        return -x - x
    return x * 2


@triton.jit
def _kernel(x_ptr, y_ptr, OP: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(y_ptr + at, _double(tl.load(x_ptr + at), OP))


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_that_overflow_end_a_kernel(op: str, dtype: torch.dtype):
    largest = torch.iinfo(torch.int32 if dtype is torch.int64 else dtype).max // 2
    x = torch.tensor([1, -2, 0, largest], dtype=dtype)
    y = torch.empty_like(x)
    _kernel[(1,)](x, y, op)
    assert y.tolist() == [(-2 if op == "sub" else 2) * v for v in x.tolist()]
    x += 2
    if dtype is torch.int64:  # wider than what is looked at
        _kernel[(1,)](x, y, op)
        assert y[3] == (-2 if op == "sub" else 2) * (largest + 2)
    else:
        with pytest.raises(Exception, match="overflow"):
            _kernel[(1,)](x, y, op)
