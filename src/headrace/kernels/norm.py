"""RMSNorm, alone and fused with the residual add before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., H] / rms(x) * (weight [H] + offset), computed in float32, rounded once to x's dtype."""
    if offset:
        weight = weight.float() + offset
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight.float(), eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """residual + scale * x, and its RMSNorm; x, residual [T, H] -> (normed, new residual), both [T, H]."""
    residual = torch.add(residual, x, alpha=scale)
    return rms_norm_reference(residual, weight, eps, offset), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm over the last dimension: x [..., H], weight [H] -> [..., H] in x's dtype (Zhang & Sennrich 2019)."""
    return rms_norm_reference(x, weight, eps, offset)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """new_residual = residual + scale * x; returns (RMSNorm(new_residual), new_residual), both [T, H] in x's dtype."""
    return add_rms_norm_reference(x, residual, weight, eps, offset, scale)
