"""Log-probabilities of sampled and prompt tokens: raw, of the logits before any edit or temperature (as in vLLM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# of float32 logits at a time: those of prompts are computed chunk by chunk, and few rows would be slow; the others are there
PROMPT_CHUNK_BYTES, SAMPLED_CHUNK_BYTES = 64 << 20, 16 << 20


@dataclass(slots=True)
class LogprobsRequest:
    """Which rows of a batch want log-probabilities, and how many alternatives the most demanding of them wants."""

    rows: Tensor  # [Q] int64 on the logits' device
    num_top: int  # 0: the token only; -1: the whole vocabulary. A row that wants fewer reads its first columns


@dataclass(slots=True)
class Logprobs:
    """Of Q tokens. `top_*` are ordered from the likeliest down, equal ones by id where the device's topk does so."""

    token_ids: Tensor  # [Q] int64
    logprobs: Tensor  # [Q] float32
    ranks: Tensor  # [Q] int32: 1 + number of ids with a strictly greater log-probability
    top_ids: Tensor  # [Q, K] int32
    top_logprobs: Tensor  # [Q, K] float32

    def tensors(self) -> list[Tensor]:
        """All, in this order."""
        return [getattr(self, f.name) for f in fields(self)]


def token_logprobs(
    logits: Tensor, token_ids: Tensor, request: LogprobsRequest, chunk_bytes: int = SAMPLED_CHUNK_BYTES
) -> Logprobs:
    """Logprobs of `token_ids` [R] under `logits` [R, V], for the rows asked; memory as of `prompt_logprobs`."""
    rows = rows_per_chunk(logits.shape[1], chunk_bytes)
    return joined([logprobs_of(logits[part], token_ids[part], request.num_top) for part in request.rows.split(rows)])


def logprobs_of(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Logprobs of token_ids [Q] under logits [Q, V]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    token_ids = token_ids.long()
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1, dtype=torch.int32) + 1
    vocab = logprobs.shape[1]
    width = vocab if num_top < 0 else min(num_top, vocab)
    top_logprobs, top_ids = logprobs.topk(width, dim=-1)
    return Logprobs(token_ids, chosen[:, 0], ranks, top_ids.int(), top_logprobs)


def prompt_logprobs(
    hidden: Tensor,
    next_ids: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    num_top: int,
    vocab_size: int,
    chunk_bytes: int = PROMPT_CHUNK_BYTES,
) -> Logprobs:
    """Logprobs of next_ids [T], each under the logits of its row of hidden [T, H] (the token after that position).

    At most `chunk_bytes` of logits and as much of log-probabilities exist at a time: rows go through `to_logits`
    ([n, H] -> [n, V]) in chunks of chunk_bytes / (4 V), at least one. The result itself is [T, num_top].
    """
    rows = rows_per_chunk(vocab_size, chunk_bytes)
    return joined(
        [
            logprobs_of(to_logits(hidden[start : start + rows]), next_ids[start : start + rows], num_top)
            for start in range(0, max(1, len(next_ids)), rows)
        ]
    )


def joined(parts: list[Logprobs]) -> Logprobs:
    """The parts' rows as one."""
    if len(parts) == 1:
        return parts[0]
    return Logprobs(*map(torch.cat, zip(*(p.tensors() for p in parts), strict=True)))


def rows_per_chunk(vocab_size: int, chunk_bytes: int = PROMPT_CHUNK_BYTES) -> int:
    """Rows of float32 logits that fit into `chunk_bytes`; never less than one."""
    return max(1, chunk_bytes // (4 * vocab_size))
