"""Sampling where each rank has the logits of a part of the vocabulary.

Plain rows need a few numbers of each part, however many ids there are:

  greedy        each rank's largest logit and its id; the largest of all, of equal ones the first rank's
  temperature   with them the sum of each part's weights: which part the running sum of weights ends in, in vocabulary order,
                follows from these, and the rank that has it says which id

What asks for more (filters, logprobs, edits of the logits) is sampled by rank 0 from whole rows, as one rank would do it, and
the others are told the ids. So grammars, penalties and users' functions are known to rank 0 alone. Everything that decides
is the same on every rank: the parameters come with the plan, and that rank 0 edits logits is said with the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.model.ranks import VocabPart
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.philox import PURPOSE_SAMPLE, uniform
from headrace.sampling.sampler import BLOCK, SampleInputs, SampleOutput, sample
from headrace.scheduler.plan import Admitted
from headrace.worker.batch_state import BatchState
from headrace.worker.edits import slot_edits
from headrace.worker.sampling import RowSampler


class SplitSampler(RowSampler):
    """The sampler of one of several ranks: `logits` are those of its part."""

    def __init__(self, state: BatchState, part: VocabPart):
        super().__init__(state, part.vocab_size)
        self.part, self.leads = part, part.group.shard.rank == 0

    def load(self, new: Admitted) -> None:
        if self.leads:
            super().load(new)
            return
        self._known_for = 0
        edits = slot_edits(new.params, self.vocab_size)
        self._special[new.slot] = edits is not None or new.params.logprobs is not None

    def _sample(self, logits: Tensor, inputs: SampleInputs, whole: bool) -> SampleOutput:
        if not (whole or inputs.any_top_k or inputs.any_top_p or inputs.any_min_p):
            return SampleOutput(*choose_split(logits, inputs, self.part))
        logits = self.part.whole(logits)
        told = torch.empty((2, len(logits)), dtype=torch.int32, device=logits.device)
        logprobs = None
        if self.leads:
            output = sample(logits, inputs)
            told[0], told[1], logprobs = output.token_ids, output.failed, output.logprobs
        self.part.group.share(told)
        return SampleOutput(told[0], told[1] != 0, logprobs)


def choose_split(logits: Tensor, inputs: SampleInputs, part: VocabPart) -> tuple[Tensor, Tensor]:
    """Token ids and failures [R] as `choose` gives them, on every rank, from its logits [R, part.rows]; no filters."""
    if inputs.all_greedy:
        largest, ids = _best_of(part, *_best_here(logits, part))
    else:
        largest, ids = _drawn(logits, inputs, part)
    failed = ~largest.isfinite()
    return ids.masked_fill(failed, 0), failed


def _best_here(logits: Tensor, part: VocabPart) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, float32, and its id, the lowest of equals, int32; a NaN before anything."""
    largest, place = logits.max(-1)
    return largest.float(), (place + part.ids.start).int()


def _best_of(part: VocabPart, largest: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of all ranks [R] and its id."""
    found = part.group.gather(torch.stack([largest.view(torch.int32), ids]))
    best, rank = found[:, 0].view(torch.float32).max(0)
    return best, found[:, 1].gather(0, rank[None])[0]


def _drawn(logits: Tensor, inputs: SampleInputs, part: VocabPart) -> tuple[Tensor, Tensor]:
    """Greedy rows, and rows with a temperature alone: the inverse CDF in vocabulary order (see sampling/sampler.py)."""
    rank = part.group.shard.rank
    greedy = inputs.temperature < GREEDY_EPS
    inverse = 1.0 / torch.where(greedy, 1.0, inputs.temperature)
    here, own = _best_here(logits, part)
    # of nothing but -inf: no weights
    weights = ((logits.float() - torch.where(here == -torch.inf, 0.0, here)[:, None]) * inverse[:, None]).exp_()
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    per_block = blocks.sum(-1).double()
    numbers = torch.stack([here.view(torch.int32), own, per_block.sum(-1).float().view(torch.int32)])
    found = part.group.gather(numbers)  # [ranks, 3, R]
    values = found[:, 0].view(torch.float32)
    largest, leader = values.max(0)
    scale = ((values - largest) * inverse).exp().double()
    mass = found[:, 2].view(torch.float32).double() * scale
    running = mass.cumsum(0)
    target = running[-1] * _uniform(inputs).double()
    owner = (running <= target).sum(0)  # a rank: the target is less than all of the weights
    # what is left of the target in this rank's part; meaningless where another has it
    rest = (target - (running[rank] - mass[rank])) / scale[rank]
    drawn = (_place(blocks, per_block, rest) + part.ids.start).int()
    told = part.group.gather(drawn).gather(0, owner[None])[0]
    return largest, torch.where(greedy, found[:, 1].gather(0, leader[None])[0], told)


def _uniform(inputs: SampleInputs) -> Tensor:
    """One number in (0, 1) per row."""
    seed, index, sample_index = inputs.seed, inputs.output_index, inputs.sample_index
    if not seed.is_cuda:
        return torch.from_numpy(uniform(seed.numpy(), index.numpy(), sample_index=sample_index.numpy()))
    from headrace.kernels.sample import uniform_rows  # Triton is only there where a card is

    return uniform_rows(seed, index, sample_index, PURPOSE_SAMPLE)


def _place(blocks: Tensor, per_block: Tensor, rest: Tensor) -> Tensor:
    """The first place at which the running sum of weights [R, blocks, BLOCK] exceeds `rest` [R], and has a weight."""
    running = per_block.cumsum(-1)
    block = (running <= rest[:, None]).sum(-1).clamp(max=per_block.shape[1] - 1)
    left = rest - (running - per_block).gather(1, block[:, None])[:, 0]
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0]
    index = (inside.double().cumsum(-1) <= left[:, None]).sum(-1)
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1)
    return block * BLOCK + torch.minimum(index, last)
