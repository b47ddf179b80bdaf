"""Plain decodes on a CPU in one native call: rows from the slots' tables, the forward, the sampler, ids back into the table.

Beside a forward of milliseconds that has just filled the caches with weights, each line of Python and each small array costs
several times what it does alone: of 0.5 ms a step, 0.04 ms are left. Whatever is more than a decode that samples by its own
parameters is the general runner's.
"""

from __future__ import annotations

import time

from headrace.native.forward import NativeDecoder
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.worker.model_runner import ModelRunner, StepHandle
from headrace.worker.sampling import Tail


class NativeRunner(ModelRunner):
    """See ModelRunner; for a NativeDecoder without a drafter."""

    decoder: NativeDecoder
    _drawn = 0  # version of plain decodes that are known to ask for no more

    def launch(self, plan: StepPlan) -> StepHandle:
        if not plan.is_plain:
            return super().launch(plan)
        if plan.version != self._drawn:
            if self.sampler.tail(plan) is Tail.LOGITS:
                return super().launch(plan)
            self._drawn = plan.version
        if plan.new_blocks:
            self.state.apply(plan)
        return DoneStep(*self.decoder.decode_slots(plan.slots, plan.starts))


class DoneStep(StepHandle):
    """Of a step that is done."""

    def __init__(self, ids: list[int], failed: list[int]):
        self.finished = time.perf_counter()
        self._result = StepResult(ids, [1] * len(ids), frozenset(failed))

    def result(self) -> StepResult:
        return self._result
