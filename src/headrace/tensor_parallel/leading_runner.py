"""Rank 0's runner: it tells the other ranks what it is about to do, and then does it.

What it decides (a captured step or not, and which; what is captured ahead; whether the sampler has whole rows) it says; the
others decide nothing. If it fails in between, they have done what it has not, and nobody can go on: all end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.lora.version import Version
from headrace.sampling.penalties import UserProcessor
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.structured_output.manager import GrammarMasks
from headrace.tensor_parallel.messages import (
    Capture,
    Compute,
    Decodes,
    LoadAdapter,
    Place,
    Prompts,
    Replay,
    Sample,
    ToRank,
    UnloadAdapter,
)
from headrace.tensor_parallel.ranks import Ranks
from headrace.worker.model_runner import ModelRunner, Pending, StepHandle

if TYPE_CHECKING:
    from headrace.worker.captured import Captured
    from headrace.worker.cuda_graphs import Key
    from headrace.worker.prompt_graphs import PromptKey

Done = TypeVar("Done")


def named_decodes(key: Key) -> Decodes:
    return Decodes(key.rows, key.context, key.tail.value, key.related, key.adapted)


def named_prompts(key: PromptKey) -> Prompts:
    return Prompts(key.tokens, key.seqs, key.decodes, key.context, key.tail.value)


def together(ranks: Ranks, message: ToRank, act: Callable[[], Done]) -> Done:
    """Tell it, and do it."""
    ranks.check()
    try:
        ranks.tell(message)
        return act()
    except BaseException as e:
        reason = ranks.give_up(e)
        if reason is e:
            raise
        raise reason from e


def capture_together(
    ranks: Ranks, named: Callable[[Any], Decodes | Prompts], key: Any, capture: Callable[[Any], Captured]
) -> None:  # fmt: skip
    """What is captured ahead is captured by all."""
    together(ranks, Capture(named(key)), lambda: capture(key))


class CheckedHandle(StepHandle):
    """Takes the place of `handle`. A result is one only if all ranks were there: kernels that waited for a dead one were let go
    with whatever they had."""

    def __init__(self, handle: StepHandle, ranks: Ranks):
        vars(self).update(vars(handle))
        self._ranks = ranks

    def result(self) -> StepResult:
        result = super().result()
        self._ranks.check()
        return result


class LeadingRunner(ModelRunner):
    """See ModelRunner. Takes over what `runner` has."""

    def __init__(self, runner: ModelRunner, ranks: Ranks):
        super().__init__(runner.decoder, runner.kv, runner.state, runner.graphs, runner.drafter, runner.prompts)
        self._ranks = ranks
        if self.graphs is not None:
            self.graphs.lead = partial(capture_together, ranks, named_decodes)
        if self.prompts is not None:
            self.prompts.lead = partial(capture_together, ranks, named_prompts)

    def launch(self, plan: StepPlan) -> StepHandle:
        handle = super().launch(plan)
        return handle if isinstance(handle, CheckedHandle) else CheckedHandle(handle, self._ranks)

    def place(self, plan: StepPlan) -> None:
        self._together(Place(plan), lambda: super(LeadingRunner, self).place(plan))

    def compute(self, plan: StepPlan, key: PromptKey | None = None) -> Pending:
        step = None if key is None else named_prompts(key)
        return self._together(Compute(step), lambda: super(LeadingRunner, self).compute(plan, key))

    def replay(self, plan: StepPlan, key: Key) -> Pending:
        return self._together(Replay(plan, named_decodes(key)), lambda: super(LeadingRunner, self).replay(plan, key))

    def sample(
        self, pending: Pending, masks: GrammarMasks | None = None, users: Sequence[UserProcessor] = (), edited: bool = False
    ) -> StepHandle:
        edited = edited or masks is not None or bool(users)
        handle = self._together(Sample(edited), lambda: super(LeadingRunner, self).sample(pending, masks, users, edited))
        return CheckedHandle(handle, self._ranks)

    def load_adapter(self, version: Version, slot: int, found: Any) -> None:
        """Of all ranks' pools (AdapterPool.load); the others read it now, and this one has found nothing wrong with it."""
        self._together(LoadAdapter(version, slot), lambda: self.state.adapters.load(version, slot, found))

    def unload_adapter(self, digest: str) -> None:
        self._together(UnloadAdapter(digest), lambda: self.state.adapters.unload(digest))

    def _together(self, message: ToRank, act: Callable[[], Done]) -> Done:
        return together(self._ranks, message, act)
