"""Between loading and ready, on a card: kernels are compiled by a pool, steps captured, and the engine has answered once.

    build_engine    | begins the pool |   loads the weights   |
    the pool        |   kernels of this model, options and card   |
    Engine.prepare                            | waits for it | captures what may come | answers requests of its own |

So no request waits for a compiler or for whatever a library does at its first use. Who only has results to lose by it (a pool
that fails, an answer that does not come) is reported and passed over: the rest is then done when it is needed. Of several ranks
that holds for the pool alone: a step that one has captured or answered and another has not ends all of them.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from headrace.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.extras import is_installed
from headrace.lora.core import CoreAdapters
from headrace.lora.names import salted
from headrace.lora.pool import AdapterPool
from headrace.lora.version import Version
from headrace.model.checkpoint import Checkpoint
from headrace.sampling.params import SamplingParams
from headrace.scheduler.config import Limits
from headrace.scheduler.scheduler import Scheduler
from headrace.worker.model_runner import ModelRunner

if TYPE_CHECKING:  # imports Triton's driver, which a CPU does not need
    from headrace.compile_ahead.ahead import Compilation

logger = logging.getLogger(__name__)
Tell = Callable[[str, int, int], None]  # what is done, and of what can be counted how much is, of how much
SAY_SECONDS = 2.0  # between lines of the log that count
PROMPTS = (24, 300, 300, 4500)  # tokens of the prompts of our own; the third begins like the second, the last is not captured
OUTPUTS = 6
OWN = "own"  # what stands for an adapter


def tell_nobody(doing: str, done: int = 0, total: int = 0) -> None:
    pass


class Preparation:
    """Of one engine, begun before its weights are loaded."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, limits: Limits, device: torch.device):
        self._wanted, self._alone = device.type == "cuda", config.tensor_parallel_size == 1
        self._compilation = begin(config, checkpoint, limits) if self._wanted and is_installed("triton") else None

    def close(self) -> None:
        if self._compilation is not None:
            self._compilation.__exit__()
            self._compilation = None

    def finish(self, runner: ModelRunner, limits: Limits, vocab_size: int, tell: Tell = tell_nobody) -> None:
        """When this returns, the engine is as fast as it will be."""
        if not self._wanted:
            return
        began = time.perf_counter()
        if self._compilation is not None:
            tell("compiling kernels", 0, 0)  # before they are counted, or while another process compiles the same
            self._compilation.wait(counted(tell))
            self.close()
        compiled = time.perf_counter()
        tell("preparing", 0, 0)
        try:
            for graphs in (runner.graphs, runner.prompts):
                if graphs is not None:
                    graphs.prepare()
            answer_own(runner, limits, vocab_size, self._alone)
        except Exception:
            if not self._alone:  # the others have done what this one has not: all end
                raise
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # a device that is lost says so again: no request would be answered
            logger.exception("what is prepared before the first request failed; it is done when it is needed")
            runner.leave_preparations()
            runner.prompts = None  # what perhaps cannot be captured is not tried among requests
        done = time.perf_counter()
        logger.info("kernels after %.2f s, steps captured and tried after %.2f s", compiled - began, done - compiled)


def begin(config: EngineConfig, checkpoint: Checkpoint, limits: Limits) -> Compilation | None:
    """For the card that this process has, and of several ranks for the others', which wait for it in their first step. None:
    what is needed is compiled when it is."""
    from headrace.compile_ahead.ahead import Compilation, compiles_ahead
    from headrace.compile_ahead.cards import Card

    if not compiles_ahead(config, checkpoint):
        return None
    device = torch.cuda.current_device()
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    card = Card(torch.cuda.get_device_name(device), capability, found.multi_processor_count, found.total_memory >> 30)
    return Compilation(replace(config, local_files_only=True), checkpoint, limits, card)


def counted(tell: Tell) -> Callable[[int, int], None]:
    """For the pool: each kernel is told, and now and then logged."""
    said = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal said
        tell("compiling kernels", done, total)
        if done in (0, total) or time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            logger.info("compiling kernels: %d of %d", done, total)

    return told


def answer_own(runner: ModelRunner, limits: Limits, vocab_size: int, alone: bool = True) -> None:
    """Requests of our own, greedy and not, alone and together, through a scheduler of their own: no counter, no cached prefix
    and no estimate of the engine's sees them. Not `alone`: other ranks know no adapter that is not in a file."""
    core = EngineCore(Scheduler(replace(limits, max_itl=None, kv_cache_events="off")), runner, vocab_size=vocab_size)
    longest = min(limits.max_num_batched_tokens, limits.max_len - OUTPUTS - 1)
    adapters = [""]
    if alone and isinstance(pool := runner.state.adapters, AdapterPool):  # one that adds nothing stands for all
        core.adapters = CoreAdapters(1, lambda version: None, pool.assign, pool.unload)
        core.adapters.load(Version(OWN, ""))
        adapters.append(OWN)
    for number, (lora, tokens) in enumerate(product(adapters, PROMPTS)):
        prompt = [(7 * i + 13) % vocab_size for i in range(min(tokens + 40 * number, longest))]
        if not prompt:
            return
        for temperature in (0.0, 0.8):
            top_p = 0.9 if temperature else 1.0
            params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=OUTPUTS, ignore_eos=True, lora=lora)
            name, salt = f"own-{number}-{temperature}", salted("", lora)
            core.add(EngineRequest(name, array("i", prompt), params.resolved({}), number, cache_salt=salt))
            core.step()  # the next one's prompt is computed beside this one's decodes
    while core.has_work:
        core.step()
    if core.adapters is not None:
        core.adapters.unload(OWN)
    core.close()
