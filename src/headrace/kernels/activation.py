"""The gated activation of the feed-forward part."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "gelu"]


def act_mul_reference(gate_up: Tensor, kind: Activation) -> Tensor:
    """See `act_mul`."""
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float()  # itself when it is float32
    if kind == "silu":
        active = F.silu(wide)
    else:
        active = F.gelu(wide, approximate="tanh" if kind == "gelu_tanh" else "none")
    return active.mul_(up).to(gate_up.dtype)


def act_mul(gate_up: Tensor, kind: Activation) -> Tensor:
    """activation(gate) * up with gate_up [T, 2I] = (gate, up) -> [T, I], in float32, rounded once."""
    return act_mul_reference(gate_up, kind)
