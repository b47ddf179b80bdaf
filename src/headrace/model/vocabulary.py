"""The two ends of a model: rows of the embedding, and rows of an lm_head that belong to no token, because vocabularies are
padded to round numbers and tokenizers have holes."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def embed(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """table[token_ids] * scale: token_ids [T] int32, table [V, H] -> [T, H] in table's dtype (product rounded once).

    An id that is not in the table (a draft model may have fewer than its target) gets the row nearest to it.
    """
    rows = F.embedding(token_ids.clamp(0, table.shape[0] - 1), table)
    return rows if scale == 1.0 else rows.mul_(scale)


class TokenlessIds:
    """Makes the logits of ids without a token -inf, where logits are made: so nothing downstream ever picks or lists one."""

    def __init__(self, valid: np.ndarray, device: torch.device):
        """`valid` bool [V]: which ids have a token."""
        self._valid, self._device = valid, device
        holes = np.flatnonzero(~valid)
        self.stop = int(valid.nonzero()[0].max(initial=-1)) + 1  # from here on there is none
        holes = holes[holes < self.stop]
        self._holes = torch.from_numpy(holes).to(device) if holes.size else None

    @classmethod
    def of(cls, valid: np.ndarray | None, device: torch.device) -> TokenlessIds | None:
        """None where every id has a token, or nobody knows."""
        return None if valid is None or valid.all() else cls(valid, device)

    def cut(self, vocab_size: int) -> TokenlessIds:
        """The same for a model with so many rows, more or fewer."""
        valid = np.zeros(vocab_size, np.bool_)
        valid[: len(self._valid)] = self._valid[:vocab_size]
        return TokenlessIds(valid, self._device)

    def part(self, ids: range, rows: int) -> TokenlessIds | None:
        """The same of logits [R, rows] of these ids, behind which are rows of no id."""
        valid = np.zeros(rows, np.bool_)
        valid[: len(ids)] = self._valid[ids.start : ids.stop]
        return self.of(valid, self._device)

    def ids(self, vocab_size: int) -> list[int]:
        """All of them in a model with so many rows."""
        return np.flatnonzero(np.append(~self._valid, [True] * vocab_size)[:vocab_size]).tolist()

    def mask(self, logits: Tensor) -> Tensor:
        """`logits` [R, V], changed in place."""
        logits[:, self.stop :].fill_(-torch.inf)
        if self._holes is not None:
            logits.index_fill_(1, self._holes, -torch.inf)
        return logits
