"""What few ask for besides tokens: logprobs of sampled and of prompt tokens, and embeddings of prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.model.forward import Forward
from headrace.sampling.logprobs import Logprobs, LogprobsRequest, prompt_logprobs
from headrace.scheduler.plan import Admitted, StepPlan, StepResult, TokenLogprobs
from headrace.worker.batch_state import BatchState
from headrace.worker.staging import Staging

Host = Callable[[Tensor], Tensor]  # starts the copy of a tensor to the host


def logprobs_request(num_top: dict[int, int], staging: Staging) -> LogprobsRequest:
    """For rows that ask, each for so many of the likeliest (-1: for all that can be)."""
    most = -1 if min(num_top.values()) < 0 else max(num_top.values())
    return LogprobsRequest(staging.upload(np.asarray(list(num_top))), most)


@dataclass(slots=True)
class RowLogprobs:
    """Of the sampled rows that asked for them, in their order."""

    num_top: dict[int, int]  # by row
    found: Logprobs

    def to_host(self, host: Host) -> RowLogprobs:
        return RowLogprobs(self.num_top, Logprobs(*map(host, self.found.tensors())))

    def read(self) -> dict[int, TokenLogprobs]:
        """By row, when they have arrived."""
        ids, logprobs, ranks, top_ids, top = (t.numpy() for t in self.found.tensors())
        entries = {}
        for q, (row, num_top) in enumerate(self.num_top.items()):
            width = int((top[q] > -np.inf).sum()) if num_top < 0 else num_top
            of_ids, of_logprobs = [int(ids[q]), *top_ids[q, :width].tolist()], [float(logprobs[q]), *top[q, :width].tolist()]
            entries[row] = TokenLogprobs(of_ids, of_logprobs, int(ranks[q]))
        return entries


class AskingPrompt(NamedTuple):
    """A sequence whose rows' hidden states are wanted, all of them."""

    sequence: int
    start: int
    request: Admitted


@dataclass(slots=True)
class PromptResult:
    """Of one sequence: one of the two."""

    sequence: int
    pooled: Tensor | None = None  # [H]
    scores: Logprobs | None = None  # of the tokens that its rows predict

    def to_host(self, host: Host) -> PromptResult:
        if self.pooled is not None:
            return PromptResult(self.sequence, pooled=host(self.pooled))
        assert self.scores is not None
        return PromptResult(self.sequence, scores=Logprobs(*map(host, self.scores.tensors())))

    def read(self, result: StepResult) -> None:
        """When it has arrived."""
        if self.pooled is not None:
            result.pooled[self.sequence] = self.pooled.numpy()
        if self.scores is not None:
            columns = (tensor.tolist() for tensor in self.scores.tensors())
            result.prompt_logprobs[self.sequence] = [
                TokenLogprobs([token, *top_ids], [logprob, *top], rank)
                for token, logprob, rank, top_ids, top in zip(*columns, strict=True)
            ]


def prompts_that_ask(plan: StepPlan, state: BatchState) -> list[AskingPrompt]:
    begin, found = plan.num_decodes, []
    slots, starts = plan.slots[begin:].tolist(), plan.starts[begin:].tolist()
    for sequence, slot, start in zip(range(begin, len(plan)), slots, starts, strict=True):
        request = state.request(slot)
        scored = request.params.prompt_logprobs is not None and start < request.num_prompt - 1
        if scored or request.pooling is not None:
            found.append(AskingPrompt(sequence, start, request))
    return found


def prompt_result(prompt: AskingPrompt, hidden: Tensor, state: BatchState, decoder: Forward) -> PromptResult:
    """From the hidden states [n, H] of its rows. (Row p predicts the token at position p + 1.)"""
    sequence, start, request = prompt
    if request.pooling is not None:
        rows = hidden.float()
        return PromptResult(sequence, pooled=rows.sum(0) if request.pooling == "mean" else rows[-1])
    num_top = request.params.prompt_logprobs
    assert num_top is not None
    stop = min(start + len(hidden), request.num_prompt - 1)
    targets = state.token_ids[request.slot, start + 1 : stop + 1].to(torch.int64)
    found = prompt_logprobs(hidden[: stop - start], targets, partial(whole_logits, decoder), num_top, decoder.vocab_size)
    return PromptResult(sequence, scores=found)


def whole_logits(decoder: Forward, hidden: Tensor) -> Tensor:
    """[R, V], on every rank."""
    logits = decoder.logits(hidden)
    return logits if decoder.vocab is None else decoder.vocab.whole(logits)
