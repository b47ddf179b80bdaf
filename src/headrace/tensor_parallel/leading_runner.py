"""Rank 0's runner: it tells the other ranks what it is about to do, and then does it.

What it decides (a captured step or not, and which; whether the sampler has whole rows) it says; the others decide nothing. If
it fails in between, they have done what it has not, and nobody can go on: all end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headrace.lora.format import Version
from headrace.sampling.penalties import UserProcessor
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.structured_output.manager import GrammarMasks
from headrace.tensor_parallel.messages import Capture, Compute, LoadAdapter, Replay, Sample, ToRank, UnloadAdapter
from headrace.tensor_parallel.ranks import Ranks
from headrace.worker.model_runner import ModelRunner, Pending, StepHandle
from headrace.worker.sampling import Tail

Done = TypeVar("Done")


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
        super().__init__(runner.decoder, runner.kv, runner.state, runner.graphs, runner.drafter)
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> StepHandle:
        handle = super().launch(plan)
        return handle if isinstance(handle, CheckedHandle) else CheckedHandle(handle, self._ranks)

    def compute(self, plan: StepPlan, whole: bool = True) -> Pending:
        return self._together(Compute(plan), lambda: super(LeadingRunner, self).compute(plan, whole))

    def replay(self, plan: StepPlan, tail: Tail) -> Pending:
        return self._together(Replay(plan, tail.value), lambda: super(LeadingRunner, self).replay(plan, tail))

    def sample(
        self, pending: Pending, masks: GrammarMasks | None = None, users: Sequence[UserProcessor] = (), edited: bool = False
    ) -> StepHandle:
        edited = edited or masks is not None or bool(users)
        handle = self._together(Sample(edited), lambda: super(LeadingRunner, self).sample(pending, masks, users, edited))
        return CheckedHandle(handle, self._ranks)

    def idle(self) -> bool:
        graphs = self.graphs
        key = None if graphs is None else graphs.next_planned()
        if graphs is None or key is None:
            return False
        self._together(Capture(key.rows, key.context, key.tail.value, key.related, key.adapted), lambda: graphs.capture(key))
        return True

    def load_adapter(self, version: Version, slot: int, found: Any) -> None:
        """Of all ranks' pools (AdapterPool.load); the others read it now, and this one has found nothing wrong with it."""
        self._together(LoadAdapter(version, slot), lambda: self.state.adapters.load(version, slot, found))

    def unload_adapter(self, digest: str) -> None:
        self._together(UnloadAdapter(digest), lambda: self.state.adapters.unload(digest))

    def _together(self, message: ToRank, act: Callable[[], Done]) -> Done:
        self._ranks.check()
        try:
            self._ranks.tell(message)
            return act()
        except BaseException as e:
            reason = self._ranks.give_up(e)
            if reason is e:
                raise
            raise reason from e
