"""For tests of speculation: cores that draft whatever it is worth, guesses of any quality, captured steps without a GPU."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import torch

from engine_driver import make_core
from headrace.engine.core import EngineCore
from headrace.kernels.prepare import Rows, prepare_rows, publish
from headrace.model.batch import ForwardBatch
from headrace.model.ranks import VocabPart
from headrace.sampling.sampler import SampleInputs, choose
from headrace.scheduler.request import Request
from headrace.worker.model_runner import ModelRunner
from headrace.worker.sampling import Tail
from headrace.worker.split_sampling import choose_split


class Guesser:
    """Guesses right with probability `p_right` for each token; 0: always wrong, 1: never."""

    def __init__(self, expected: dict[str, list[int]], vocab: int, p_right: float, seed: int = 0):
        self.expected, self.vocab, self.p_right, self.rng = expected, vocab, p_right, random.Random(seed)

    def propose(self, request: Request, most: int) -> list[int]:
        rng, known = self.rng, len(request.output_ids)
        right = self.expected.get(request.id, [])[known : known + rng.randint(1, most)]
        return [t if rng.random() < self.p_right else (t + rng.randint(1, self.vocab - 1)) % self.vocab for t in right]

    def end(self, request_id: str) -> None:
        pass


def drafting_core(model: str, proposer=None, *, overlap: bool = False, **options) -> EngineCore:
    """Drafts as many tokens as may be, whatever their worth, unless told otherwise.

    `overlap`: as on a GPU, and a proposer on the host guesses on whatever its guesses were worth so far.
    """
    options = {"speculative_method": "ngram", "num_speculative_tokens": 4, "speculative_max_rows": 64} | options
    if options["speculative_method"] == "ngram":
        options = {"prompt_lookup_min": 1} | options
    core = make_core(model, **options)
    draft_always(core, options["num_speculative_tokens"], overlap)
    if proposer is not None:
        core.speculator.proposer = proposer
    return core


def draft_always(core: EngineCore, count: int, overlap: bool) -> None:
    assert core.speculator is not None
    core.speculator._lengths.best[:] = [count] * len(core.speculator._lengths.best)
    if overlap:
        core.speculator.overlap, core.speculator.idle = True, math.inf


def count_overlaps(core: EngineCore) -> list[int]:
    """[steps with drafts that are launched before the step before them is settled, those among them behind drafts]."""
    counts, launch, forward = [0, 0], core.runner.launch, core.runner.forward

    def counted(plan):
        if plan.num_drafts and core._in_flight is not None:
            counts[0] += 1
            counts[1] += core._in_flight[0].num_drafts > 0 and plan.any_unverified
        return plan

    core.runner.launch = lambda plan: launch(counted(plan))
    core.runner.forward = lambda plan, whole=True: forward(counted(plan), whole)
    return counts


class UncapturedGraphs:
    """What captured decode steps do (worker/cuda_graphs.py), done at once and without padding."""

    def __init__(self, forward, kv, state, most: int, part: VocabPart | None = None):
        self.forward, self.kv, self.state, self.sizes, self.part = forward, kv, state, [most], part
        self.replays = 0

    def key_of(self, plan, tail: Tail) -> SimpleNamespace:
        context = int((plan.starts + plan.counts + plan.unverified).max())
        return self.key_for(plan.num_tokens, context, tail, plan.num_drafts > 0)

    def key_for(self, rows: int, context: int, tail: Tail, related: bool = False) -> SimpleNamespace:
        return SimpleNamespace(rows=rows, context=context, tail=tail, related=related, adapted=False)

    @torch.inference_mode()
    def replay(self, numbers: np.ndarray, key: SimpleNamespace) -> SimpleNamespace:
        state, count, tail, related = self.state, numbers.shape[1], key.tail, key.related
        assert key.rows == count and key.context == int((numbers[1] + numbers[3]).max()) + 1
        assert related or len(set(numbers[0])) == count
        rows = Rows.empty(count, state.device)
        inbox, turn, outbox = torch.from_numpy(numbers)[None], torch.zeros(1, dtype=torch.int32), torch.zeros((1, 3, count), dtype=torch.int32)
        prepare_rows(inbox, turn, state.tables, rows)
        batch = ForwardBatch(
            rows.token_ids, rows.positions, rows.slot_mapping, state.block_tables, rows.seq_slots,
            torch.arange(count + 1, dtype=torch.int32), rows.seq_lens, count, [1] * count, rows.seq_lens.tolist(),
        )  # fmt: skip
        logits = self.forward(batch, self.kv)
        self.replays += 1
        if tail is Tail.LOGITS:
            return SimpleNamespace(logits=logits, rows=rows)
        token_ids, failed = sample_on_host(logits, rows, tail, self.part)
        publish(token_ids, failed, rows, state.tables, outbox, turn, related)
        return SimpleNamespace(logits=None, sent=outbox[0])


def sample_on_host(logits: torch.Tensor, rows: Rows, tail: Tail, part: VocabPart | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for captured_sampling.sample_step."""
    filters = tail is Tail.FILTERED
    parameters = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.output_index, rows.sample_index
    inputs = SampleInputs(*parameters, tail is Tail.GREEDY, filters, filters, filters)
    if part is None:
        return choose(logits, inputs)
    return choose(part.whole(logits), inputs) if filters else choose_split(logits, inputs, part)


def capture_nothing(core: EngineCore) -> UncapturedGraphs:
    """Let a core's decode steps run as captured ones do."""
    return give_graphs(core.runner)


def give_graphs(runner: ModelRunner) -> UncapturedGraphs:
    decoder = runner.decoder
    forward = lambda batch, kv: decoder.logits(decoder.forward(batch, kv))  # noqa: E731
    runner.graphs = UncapturedGraphs(forward, runner.kv, runner.state, 40, decoder.vocab)
    return runner.graphs
