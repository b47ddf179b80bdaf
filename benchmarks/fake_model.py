"""A builder for EngineClient: the real scheduler and core over a model of zero cost, which recites a text.

FAKE_STEP_MS in the environment: a step takes so long, and costs nothing all the same, as on a device.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from headrace.config import EngineConfig
from headrace.engine.build import Engine, resolve, resolved
from headrace.engine.core import EngineCore
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.tokenizer import Tokenizer
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.scheduler import Scheduler

TEXT = "A headrace is the channel that leads water onto a mill wheel; nothing is lost on the way, and it never stands still. "


class Recited:
    def __init__(self, result: StepResult, finished: float):
        self._result, self.finished = result, finished

    def result(self) -> StepResult:
        if (left := self.finished - time.perf_counter()) > 0:
            time.sleep(left)
        return self._result


class Reciter:
    """A runner: the n-th output token of every request is the n-th of the text."""

    def __init__(self, ids: list[int]):
        self._ids = ids
        self._prompts: dict[int, int] = {}  # their lengths, by slot
        self._seconds = float(os.environ.get("FAKE_STEP_MS", "0")) / 1000
        self._free = 0.0  # when the steps before have ended

    def launch(self, plan: StepPlan) -> Recited:
        ids, count = self._ids, len(self._ids)
        for new in plan.admitted:
            self._prompts[new.slot] = new.num_prompt
        columns = (c.tolist() for c in (plan.slots, plan.starts + plan.counts, plan.samples))
        found = [ids[(stop - self._prompts[slot]) % count] for slot, stop, samples in zip(*columns, strict=True) if samples]
        self._free = max(self._free, time.perf_counter()) + self._seconds
        return Recited(StepResult(found, plan.samples.astype(int).tolist()), self._free)

    def idle(self) -> bool:
        return False


def build_fake(config: EngineConfig) -> Engine:
    began = time.perf_counter()
    checkpoint = resolve_checkpoint(config)
    model, device = model_config_from_hf(checkpoint.config), torch.device("cpu")
    limits = resolve(config, model, device)
    config, scheduler = resolved(config, limits), Scheduler(limits)
    reciter = Reciter(Tokenizer.from_checkpoint(checkpoint).encode(TEXT * 4, add_special_tokens=False))
    core = EngineCore(scheduler, reciter, vocab_size=model.vocab_size, async_scheduling=config.async_scheduling)  # type: ignore
    return Engine(core, config, model, checkpoint, None, device, torch.float32, "none", time.perf_counter() - began)


def build_paced(config: EngineConfig) -> Engine:
    """The same with steps of 20 ms, and more for more rows. Overlapped, as on a card, unless the options say otherwise."""
    engine = build_fake(config)
    runner: Any = engine.core.runner
    launch = runner.launch

    def paced(plan: StepPlan) -> Recited:
        runner._seconds = 0.02 + 0.001 * len(plan) + 1e-4 * (plan.num_tokens - len(plan))
        return launch(plan)

    runner.launch = paced
    return engine
