"""Which rows of a step with drafts count, on the device. Captured steps have a twin of it in one kernel (kernels/prepare).

Row i of a request with k drafts has the drafts 1 .. i before it, and is sampled as the plain run would sample that output
token: the same processed logits, the same counted random number (purpose, seed, output index). Its id is right if all drafts
before it are, that is if each equals the id sampled in the row before it. So the tokens are those of the plain run, one by
one, and not only equal in distribution; and logprobs, penalties, masks and seeds need no rule of their own.

This is the rejection sampling of Leviathan et al. (2023) and Chen et al. (2023) for proposals that are points: a draft d
is accepted with probability p(d), and what replaces it is distributed as p without d. A draft model whose proposals are
drawn with the very random numbers that the target will use makes such points too; the two then agree more often than not
where their distributions do (a coupling: with inverse CDFs over one uniform number, as here, never more often than the
min(1, p/q) of the published scheme, which is the best there is, and which needs the distribution q of every draft).
"""

from __future__ import annotations

import torch
from torch import Tensor


def kept_rows(sampled: Tensor, guesses: Tensor, failed: Tensor, first_row: Tensor) -> Tensor:
    """Whether the row counts: [R] bool.

    sampled [R]: ids; guesses [R]: the draft that follows the row (anything in a request's last row); failed [R] bool: the
    logits were not usable; first_row [R] int64: the first row of the same request. A failed row does not count: it is computed
    again in the next step, and fails there if it has to.
    """
    wrong = ((sampled != guesses) | failed).to(torch.int32)
    before = wrong.cumsum(0) - wrong
    return (before == before[first_row]) & ~failed


def note_accepted(accepted: Tensor, slots: Tensor, kept: Tensor) -> None:
    """accepted [slots] int32 of the rows' slots [R] int64: how many of their rows are `kept` [R], less one."""
    accepted.index_fill_(0, slots, -1)
    accepted.index_add_(0, slots, kept.to(torch.int32))


def counts_with_drafts(counts: Tensor, slots: Tensor, rows: Tensor, drafts: Tensor) -> Tensor:
    """Token counts (penalties.load_counts) of each row [R, V] int32: of its slot [R], and of the drafts before it.

    rows, drafts [N] int64: `drafts[n]` stands before row `rows[n]`.
    """
    own = counts[slots]
    return own.index_put_((rows, drafts), torch.ones_like(rows, dtype=torch.int32), accumulate=True)
