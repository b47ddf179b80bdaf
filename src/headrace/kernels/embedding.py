"""Token embedding: a gather of rows, with the scale that some families put on them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embed_reference(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """See `embed`."""
    rows = F.embedding(token_ids, table)
    return rows if scale == 1.0 else rows.mul_(scale)


def embed(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """table[token_ids] * scale: token_ids [T] int32, table [V, H] -> [T, H] in table's dtype (product rounded once)."""
    return embed_reference(token_ids, table, scale)
