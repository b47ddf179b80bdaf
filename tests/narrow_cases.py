"""Random narrow weights of all forms that files have, for tests of the kernels that multiply by them."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.model.weight import Weight, pack_int4

# kind, group, zeros ("whole" numbers, "any", or none), rows of a scale, dtype of scales
FORMS = {
    "fp8 row": ("fp8", 0, None, 1, torch.float32),
    "fp8 blocks": ("fp8", 128, None, 128, torch.bfloat16),
    "int8 row": ("int8", 0, None, 1, torch.bfloat16),
    "int8 row, zeros": ("int8", 0, "whole", 1, torch.float16),
    "int8 by 32": ("int8", 32, None, 1, torch.float16),
    "int8 by 16": ("int8", 16, None, 1, torch.float32),
    "int8 by 32, minima": ("int8", 32, "any", 1, torch.float32),
    "int8 by 128": ("int8", 128, None, 1, torch.bfloat16),
    "int4 row": ("int4", 0, None, 1, torch.bfloat16),
    "int4 by 128": ("int4", 128, None, 1, torch.float16),
    "int4 by 128, zeros": ("int4", 128, "whole", 1, torch.bfloat16),
    "int4 by 128, minima": ("int4", 128, "any", 1, torch.float16),
    "int4 by 64": ("int4", 64, None, 1, torch.float16),
    "int4 by 64, zeros": ("int4", 64, "whole", 1, torch.float16),
    "int4 by 32": ("int4", 32, None, 1, torch.float16),
    "int4 by 32, minima": ("int4", 32, "any", 1, torch.float32),
    "fp4 by 32": ("fp4", 32, None, 1, torch.bfloat16),
    "fp4 by 16": ("fp4", 16, None, 1, torch.float32),
}


def narrow(form: str, rows: int, columns: int, device: str | torch.device = "cpu", seed: int = 0) -> Weight:
    """A Weight [rows, columns] of one of FORMS, whose elements are about one in size."""
    kind, group, zeros, scale_rows, dtype = FORMS[form]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator)
    if kind == "fp8":
        codes[codes % 128 == 127] = 0  # the codes of NaN
        data = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        size = 100.0
    elif kind == "int8":
        data, size = (codes - 128).to(torch.int8), 60.0
    else:
        data, size = pack_int4(codes % 16), 4.0
    groups = -(-columns // group) if group else 1

    def per_group(low: float, high: float) -> Tensor:
        return torch.empty(-(-rows // scale_rows), groups).uniform_(low, high, generator=generator)

    scales = per_group(0.5 / size, 1.5 / size).to(dtype)
    offset = None if zeros is None else per_group(-9, 9) if kind == "int8" else per_group(0, 15)
    if offset is not None:
        whole = torch.uint8 if kind == "int4" else dtype  # as `smallest` keeps them
        offset = offset.round().to(whole) if zeros == "whole" else offset.to(dtype)
    weight = Weight(data, scales, offset, kind, group, scale_rows)
    weight.data, weight.scales, weight.zeros = (None if t is None else t.to(device) for t in (data, scales, offset))
    return weight
