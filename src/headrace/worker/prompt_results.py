"""What a prompt gives besides its first token, for those who ask: the logprobs of its own tokens, or its embedding. Rare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.model.forward import Forward
from headrace.sampling.logprobs import prompt_logprobs
from headrace.scheduler.plan import Admitted, StepPlan, StepResult, TokenLogprobs
from headrace.worker.batch_state import BatchState


class AskingPrompt(NamedTuple):
    """A sequence whose rows' hidden states are wanted, all of them."""

    sequence: int
    start: int
    request: Admitted


@dataclass(slots=True)
class PromptResult:
    """Of one sequence: `scores` are ids [n, K + 1], logprobs [n, K + 1] and ranks [n], of the tokens that its rows predict."""

    sequence: int
    pooled: Tensor | None = None  # [H]
    scores: tuple[Tensor, Tensor, Tensor] | None = None

    def to_host(self, host: Callable[[Tensor], Tensor]) -> PromptResult:
        """Starts the copy."""
        if self.pooled is not None:
            self.pooled = host(self.pooled)
        if self.scores is not None:
            ids, logprobs, ranks = self.scores
            self.scores = host(ids), host(logprobs), host(ranks)
        return self

    def read(self, result: StepResult) -> None:
        """When it has arrived."""
        if self.pooled is not None:
            result.pooled[self.sequence] = self.pooled.numpy()
        if self.scores is not None:
            columns = (c.tolist() for c in self.scores)
            result.prompt_logprobs[self.sequence] = [TokenLogprobs(*row) for row in zip(*columns, strict=True)]


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
    found = prompt_logprobs(hidden[: stop - start], targets, decoder.logits, num_top, decoder.vocab_size)
    ids = torch.cat([found.token_ids[:, None].int(), found.top_ids], dim=1)
    return PromptResult(sequence, scores=(ids, torch.cat([found.logprobs[:, None], found.top_logprobs], dim=1), found.ranks))
