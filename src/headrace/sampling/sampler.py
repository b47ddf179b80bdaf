"""From logits to token ids, for all rows at once: the exact torch sampler, and the reference of the Triton one.

What a row yields is a function of its own logits, parameters, seed and output index: no sum below runs over rows or in
an order that depends on how many there are.

A row goes through these stages (vLLM's order):
  1. edits of the logits: masks, bad words, bans, bias, user processors, penalties        (penalties.py)
  2. greedy rows (temperature below GREEDY_EPS): the largest logit, the lowest id among equals
  3. temperature:  y = (logit - largest logit) / temperature, weight w = exp(y), in float32
  4. min-p:  keep w >= min_p * (largest w, which is 1), tested as y >= log(min_p)
  5. top-k:  keep y >= the k-th largest y
  6. top-p:  keep y >= the largest value v for which the weight of all y >= v reaches top_p of the weight still kept
  7. draw:   one uniform u per row, inverse CDF over the kept ids in *vocabulary order*, which needs no sort and which
             every tensor-parallel rank and every kernel walks alike

Every filter is a threshold on y, so equal values share one fate: all ties at the edge are kept (as in vLLM's top-k; a
sort would cut ties by its own order). At least the largest logit survives every filter.

A row whose largest logit is not finite (any NaN, +inf, or nothing but -inf) is reported in `failed` and yields token 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.sampling.logprobs import Logprobs, LogprobsRequest, token_logprobs
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.penalties import LogitsEdits, apply_edits
from headrace.sampling.philox import PURPOSE_SAMPLE, uniform

BLOCK = 512  # ids per partial sum of the inverse CDF
TINY = torch.finfo(torch.float32).tiny


@dataclass(slots=True)
class SampleInputs:
    """Parameters of R rows as tensors [R], and what the host knows of them so that whole stages can be left out.

    A flag may be true without need (that costs time only), never false when some row needs the stage. Padded rows have
    temperature 0.
    """

    temperature: Tensor  # float32, below GREEDY_EPS: greedy
    top_k: Tensor  # int32, <= 0: off
    top_p: Tensor  # float32, >= 1: off
    min_p: Tensor  # float32, <= 0: off
    seed: Tensor  # int64, any bits
    output_index: Tensor  # int64: index among the request's output tokens of the one that is sampled
    sample_index: Tensor  # int32: which of the request's n samples
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    edits: LogitsEdits | None = None
    logprobs: LogprobsRequest | None = None


@dataclass(slots=True)
class SampleOutput:
    token_ids: Tensor  # [R] int32
    failed: Tensor  # [R] bool: the row's logits were not usable; its token is 0
    logprobs: Logprobs | None = None


def sample(logits: Tensor, inputs: SampleInputs) -> SampleOutput:
    """One token per row of `logits` [R, V] (float32, bfloat16 or float16; overwritten when edited)."""
    work = logits
    if inputs.edits is not None:
        dtype = logits.dtype if inputs.edits.only_masks else torch.float32
        work = logits.to(dtype, copy=inputs.logprobs is not None)
        apply_edits(work, inputs.edits)
    token_ids, failed = choose(work, inputs)
    logprobs = None
    if inputs.logprobs is not None:
        logprobs = token_logprobs(logits, token_ids, inputs.logprobs)
        failed[inputs.logprobs.rows] |= logprobs.logprobs.isnan()
        token_ids = token_ids.masked_fill(failed, 0)
    return SampleOutput(token_ids, failed, logprobs)


def choose(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    """Stages 2 to 7: logits [R, V] -> (token ids [R] int32, failed [R] bool). Reads `logits` only."""
    if logits.is_cuda:
        return _choose_on_gpu(logits, inputs)
    blocks = _blocks(logits)
    block_max = blocks.amax(-1)  # NaN wins every maximum
    largest = block_max.amax(-1)
    failed = ~largest.isfinite()
    token_ids = _first_equal(blocks, block_max, largest)
    if not inputs.all_greedy:
        greedy = inputs.temperature < GREEDY_EPS
        token_ids = torch.where(greedy, token_ids, _draw(blocks, largest, inputs))
    return token_ids.masked_fill(failed, 0).int(), failed


def _choose_on_gpu(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    from headrace.kernels.sample import sample_rows  # Triton is only there where a card is

    return sample_rows(
        logits,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.seed,
        inputs.output_index,
        inputs.sample_index,
        purpose=PURPOSE_SAMPLE,
        greedy_eps=GREEDY_EPS,
        all_greedy=inputs.all_greedy,
        any_filter=inputs.any_top_k or inputs.any_top_p or inputs.any_min_p,
    )


def _blocks(logits: Tensor) -> Tensor:
    """[R, ceil(V / BLOCK), BLOCK] in float32, filled up with -inf; a view where the shapes and the type allow it."""
    num_rows, vocab = logits.shape
    if vocab % BLOCK:
        logits = torch.nn.functional.pad(logits.float(), (0, BLOCK - vocab % BLOCK), value=float("-inf"))
    return logits.float().view(num_rows, -1, BLOCK)


def _first_equal(blocks: Tensor, block_max: Tensor, largest: Tensor) -> Tensor:
    """Lowest id of the largest logit: [R] int64. Two small argmaxes: one over the whole row costs ten times amax."""
    block = (block_max == largest[:, None]).int().argmax(-1)
    inside = blocks[torch.arange(len(block), device=block.device), block]
    return block * BLOCK + (inside == largest[:, None]).int().argmax(-1)


def _draw(blocks: Tensor, largest: Tensor, inputs: SampleInputs) -> Tensor:
    """Stages 3 to 7: ids [R] int64 (meaningless but in range for greedy and failed rows)."""
    greedy = inputs.temperature < GREEDY_EPS
    inverse = torch.where(greedy, 1.0, inputs.temperature).reciprocal()
    # the largest logit goes first: the difference is exact near the top and cannot overflow at a tiny temperature
    y = (blocks - largest[:, None, None]).mul_(inverse[:, None, None])
    w = _weights(y, masked=inputs.edits is not None and bool(inputs.edits.masks))
    if inputs.any_min_p:
        w.masked_fill_(y < inputs.min_p.log()[:, None, None], 0.0)  # log(0) = -inf keeps everything
    if inputs.any_top_k:
        w.masked_fill_(y < _top_k_threshold(y.flatten(1), inputs.top_k, greedy)[:, None, None], 0.0)
    if inputs.any_top_p:
        w.masked_fill_(y < _top_p_threshold(y, w, inputs.top_p, greedy)[:, None, None], 0.0)
    u = uniform(inputs.seed, inputs.output_index, sample_index=inputs.sample_index)
    return _inverse_cdf(w, u)


def _weights(y: Tensor, masked: bool) -> Tensor:
    """exp(y). `masked`: many are -inf, for which a CPU's exp is slow; weights below any difference then count as 0."""
    if not masked:
        return y.exp()
    return torch.nn.functional.threshold(y.clamp(min=-87.0).exp_(), 2e-38, 0.0, inplace=True)


def _top_k_threshold(y: Tensor, top_k: Tensor, greedy: Tensor) -> Tensor:
    """The k-th largest of each row of y [R, V], -inf where top-k is off: [R]."""
    off = (top_k <= 0) | (top_k >= y.shape[1]) | greedy
    k = torch.where(off, 1, top_k.long())
    kth = y.topk(int(k.max()), dim=-1).values.gather(1, k[:, None] - 1)[:, 0]
    return kth.masked_fill(off, float("-inf"))


def _top_p_threshold(y: Tensor, w: Tensor, top_p: Tensor, greedy: Tensor) -> Tensor:
    """The smallest y that top-p keeps, -inf where it is off: [R]. y, w [R, blocks, BLOCK]; w is 0 where dropped.

    All weights below (1 - p) * total / V together cannot make up (1 - p) * total, so the threshold lies above that:
    only the ids above it are sorted.
    """
    off = (top_p >= 1.0) | greedy
    p = top_p.double()
    total = w.sum(-1).double().sum(-1)
    floor = ((1.0 - p) * total / w[0].numel() * 0.99).float().clamp(min=TINY)  # 0.99: rounding must not lose an id
    w, y = w.flatten(1), y.flatten(1)
    rows, columns = (w >= floor.masked_fill(off, float("inf"))[:, None]).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(w))
    place = torch.arange(len(rows), device=w.device) - (counts.cumsum(0) - counts)[rows]
    packed = y.new_full((len(w), max(1, int(counts.max()))), float("-inf"))
    packed[rows, place] = y[rows, columns]
    packed = packed.sort(dim=-1, descending=True).values
    mass = packed.exp().double().cumsum(-1)
    last = (mass < (p * total)[:, None]).sum(-1).minimum((counts - 1).clamp(min=0))
    return packed.gather(1, last[:, None])[:, 0].masked_fill(off, float("-inf"))


def _inverse_cdf(w: Tensor, u: Tensor) -> Tensor:
    """The first id in vocabulary order at which the running sum of w [R, blocks, BLOCK] exceeds u * total: [R] int64.

    First the block, then the id in it. Sums of blocks are rounded otherwise than running sums inside one, so what is
    left of u * total may exceed the block's last running sum: then the last id with a weight is taken.
    """
    per_block = w.sum(-1).double()
    mass = per_block.cumsum(-1)
    target = u.double() * mass[:, -1]
    block = (mass <= target[:, None]).sum(-1).clamp(max=w.shape[1] - 1)
    rows = torch.arange(len(w), device=w.device)
    rest = target - (mass[rows, block] - per_block[rows, block])
    inside = w[rows, block]
    index = (inside.double().cumsum(-1) <= rest[:, None]).sum(-1)
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1)
    return block * BLOCK + index.minimum(last)
