"""What the gated delta rule's reference (delta_rule.py) and its kernels (delta_triton.py, delta_prompts.py) are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

CHUNK = 64
LENGTH_EPS = 1e-6  # of the squared lengths of q and k


class Rows(Protocol):
    """Of a ForwardBatch."""

    positions: Tensor
    seq_slots: Tensor
    seq_lens: Tensor
    query_start: Tensor
    query_lens: list[int]
    num_decodes: int
    num_verified: int
    context_bound: int


@dataclass(slots=True, eq=False)
class DeltaLayer:
    """A layer's sizes and its weights beside the products, all in float32."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: Tensor  # [2 * key_heads * key_dim + value_heads * value_dim, kernel]: of the oldest row first
    decay: Tensor  # [value_heads]: g = -exp(decay) softplus(a + bias)
    bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float

    @property
    def channels(self) -> int:
        return self.conv.shape[0]
