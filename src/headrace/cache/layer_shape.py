"""What the KV cache keeps of one layer, for those who plan without torch."""

from __future__ import annotations

from typing import NamedTuple


class LayerShape(NamedTuple):
    """What a layer keeps of a token; 0 heads: nothing (it reads another layer's, or has no attention)."""

    heads: int
    k_dim: int
    v_dim: int
