"""What prompts give besides tokens (their own logprobs, embeddings): it comes in pieces, and is kept until it can be told."""

from __future__ import annotations

import numpy as np

from headrace.engine.messages import EngineOutput
from headrace.scheduler.plan import StepPlan, StepResult, TokenLogprobs
from headrace.scheduler.request import Request


class PromptResults:
    """`live`: requests by id."""

    def __init__(self, live: dict[str, Request]):
        self._live = live
        self.logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.pooled: dict[str, np.ndarray] = {}

    def keep(self, plan: StepPlan, result: StepResult) -> None:
        """Take a step's pieces, before it is settled."""
        for s, found in result.prompt_logprobs.items():
            if (name := plan.ids[s]) in self._live:
                kept = self.logprobs.setdefault(name, [None])
                del kept[plan.starts[s] + 1 :]  # computed again after a preemption
                kept += found
        for s, vector in result.pooled.items():
            if (name := plan.ids[s]) in self._live:
                before = 0.0 if plan.starts[s] == 0 or self._live[name].pooling == "last" else self.pooled[name]
                self.pooled[name] = before + vector

    def tell(self, request: Request, news: EngineOutput) -> None:
        """Logprobs come with the first tokens, the embedding with the end."""
        if request.finish_reason or len(request.output_ids) <= len(news.token_ids):
            found = self.logprobs.pop(request.id, None)
            if request.params.prompt_logprobs is not None and len(request.output_ids) == len(news.token_ids) > 0:
                news.prompt_logprobs = found or [None]  # a prompt of one token has no other
        if request.finish_reason is not None:
            pooled = self.pooled.pop(request.id, None)
            if pooled is not None and request.finish_reason == "stop":
                # to length 1, so that the sum over a prompt will do for its mean
                news.embedding = (pooled / max(float(np.linalg.norm(pooled)), 1e-12)).tolist()

    def forget(self, request_id: str) -> None:
        self.logprobs.pop(request_id, None)
        self.pooled.pop(request_id, None)
