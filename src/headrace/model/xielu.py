"""xIELU (Huang & Schlag 2024), Apertus' activation: two of its slopes are weights of the layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.activation import Activation

_BETA = 0.5  # the slope at 0
_EDGE = -1e-6  # next to 0, where exp(x) - 1 - x is no number in half precision


class Xielu:
    """In the place of `act`; the weights are logarithms of a sort: softplus makes slopes of them."""

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor):
        self.above, self.below = F.softplus(alpha_p), _BETA + F.softplus(alpha_n)

    def __call__(self, x: Tensor, kind: Activation) -> Tensor:
        below = (torch.expm1(x.clamp_max(_EDGE)) - x).mul_(self.below)
        return torch.where(x > 0, x * x * self.above, below).add_(x, alpha=_BETA)
