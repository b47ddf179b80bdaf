"""From logits to token ids, for all rows at once: the exact sampler of the CPU, and the reference of the Triton one.

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

On a CPU a step of one row takes milliseconds, so calls count here as well as passes over the vocabulary. Torch does the
exponentials and the sums; numpy the rest, with less to pay for a call, and several times as fast in comparisons and searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.logprobs import Logprobs, LogprobsRequest, token_logprobs
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.penalties import LogitsEdits, apply_edits
from headrace.sampling.philox import PURPOSE_SAMPLE, uniform

BLOCK = 512  # ids per partial sum of the inverse CDF
PIECE = 63  # blocks that torch gets at once where rows are few: more it gives to several threads, and waits for the last
FEW = 16  # rows: what other threads would save is less than what a wait costs, where another process has taken a core
AT_ONCE = 1 << 19  # scores that go through the stages together: what stays in a cache
TINY = np.finfo(np.float32).tiny


class Scratch:
    """Memory that stays from step to step. Of this size it comes from the system page by page, and goes back when it is freed:
    that took several times as long as sampling 32 rows."""

    def __init__(self) -> None:
        self._scores = self._weights = np.empty((0, 0), np.float32)
        self._kept = np.empty((0, 0), np.bool_)

    def take(self, rows: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For scores, weights and a mask: each [rows, blocks * BLOCK], the scores -inf where there is no id."""
        width = -(-vocab // BLOCK) * BLOCK
        if len(self._scores) < rows or self._scores.shape[1] != width:
            self._scores, self._weights = (np.full((rows, width), -np.inf, np.float32) for _ in range(2))
            self._kept = np.empty((rows, width), np.bool_)
        return self._scores[:rows], self._weights[:rows], self._kept[:rows]


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
    scratch: Scratch | None = None
    choose: Choose | None = None  # what runs the model draws the rows itself


# stages 2 to 7: logits [R, V], read only -> (token ids [R] int32, failed [R] bool)
Choose = Callable[[Tensor, SampleInputs], tuple[Tensor, Tensor]]


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
    token_ids, failed = (inputs.choose or choose)(work, inputs)
    logprobs = None
    if inputs.logprobs is not None:
        logprobs = token_logprobs(logits, token_ids, inputs.logprobs)
        failed[inputs.logprobs.rows] |= logprobs.logprobs.isnan()
        token_ids = token_ids.masked_fill(failed, 0)
    return SampleOutput(token_ids, failed, logprobs)


def choose(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    """See Choose."""
    if logits.is_cuda:
        return _choose_on_gpu(logits, inputs)
    values = logits.float().numpy()
    ids = values.argmax(-1)  # the lowest of equals; a NaN before anything
    largest = values[np.arange(len(values)), ids]
    failed = ~np.isfinite(largest)
    if not inputs.all_greedy:
        ids = np.where(inputs.temperature.numpy() < GREEDY_EPS, ids, _draw(values, largest, inputs))
    return torch.from_numpy(np.where(failed, 0, ids).astype(np.int32)), torch.from_numpy(failed)


def _choose_on_gpu(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    from headrace.kernels.sample import sample_rows  # Triton is only there where a card is

    return sample_rows(
        logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.output_index,
        inputs.sample_index, purpose=PURPOSE_SAMPLE, greedy_eps=GREEDY_EPS, all_greedy=inputs.all_greedy,
        any_filter=inputs.any_top_k or inputs.any_top_p or inputs.any_min_p,
    )  # fmt: skip


def _draw(values: np.ndarray, largest: np.ndarray, inputs: SampleInputs) -> np.ndarray:
    """Stages 3 to 7: ids [R] (meaningless but in range for greedy and failed rows); values [R, V] float32."""
    num_rows, vocab = values.shape
    u = uniform(inputs.seed.numpy(), inputs.output_index.numpy(), sample_index=inputs.sample_index.numpy())
    ids, scratch = np.empty(num_rows, np.int64), inputs.scratch or Scratch()
    step = max(1, AT_ONCE // vocab)
    for begin in range(0, num_rows, step):
        part = slice(begin, min(begin + step, num_rows))
        drawn = _Draw(inputs, part, *scratch.take(part.stop - begin, vocab), few=num_rows < FEW)
        ids[part] = drawn.ids(values[part], largest[part], u[part])
    return ids


class _Draw:
    """The rows `part` of a step. y: their scores, w: their weights, 0 where they are dropped, each [R, blocks * BLOCK]."""

    def __init__(
        self, inputs: SampleInputs, part: slice, y: np.ndarray, w: np.ndarray, kept: np.ndarray, few: bool
    ):
        self.inputs, self.y, self.w, self._kept, self._few = inputs, y, w, kept, few
        columns = inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p
        temperature, self.top_k, self.top_p, self.min_p = (column[part].numpy() for column in columns)
        self.greedy = temperature < GREEDY_EPS
        self.inverse = np.float32(1.0) / np.where(self.greedy, np.float32(1.0), temperature)
        self.rows = np.arange(len(y))

    def ids(self, values: np.ndarray, largest: np.ndarray, u: np.ndarray) -> np.ndarray:
        y = self.y[:, : values.shape[1]]
        with np.errstate(invalid="ignore", over="ignore"):  # of failed rows; of weights that are 0
            # the largest logit goes first: the difference is exact near the top and cannot overflow at a tiny temperature
            np.subtract(values, largest[:, None], out=y)
            np.multiply(y, self.inverse[:, None], out=y)
        self._weigh()
        if self.inputs.any_min_p:
            self._keep(torch.from_numpy(self.min_p).log().numpy())  # log(0) = -inf keeps everything
        if self.inputs.any_top_k:
            self._keep(self._top_k_threshold())
        if self.inputs.any_top_p:
            self._keep(self._top_p_threshold())
        return self._inverse_cdf(u)

    def _pieces(self, array: np.ndarray) -> Sequence[Tensor]:
        """The blocks, as many at once as torch shall take: each [n, BLOCK]."""
        blocks = torch.from_numpy(array).view(-1, BLOCK)
        return blocks.split(PIECE) if self._few else [blocks]

    def _weigh(self) -> None:
        """w = exp(y). Where many are masked, -inf, a CPU's exp is slow: weights below any difference then count as 0."""
        masked = self.inputs.edits is not None and bool(self.inputs.edits.masks)
        for y, w in zip(self._pieces(self.y), self._pieces(self.w), strict=True):
            if masked:
                torch.clamp(y, min=-87.0, out=w).exp_()
                torch.nn.functional.threshold(w, 2e-38, 0.0, inplace=True)
            else:
                torch.exp(y, out=w)

    def _keep(self, threshold: np.ndarray) -> None:
        """Drop what scores less than its row's threshold [R]."""
        np.greater_equal(self.y, threshold[:, None], out=self._kept)
        np.multiply(self.w, self._kept, out=self.w)

    def _block_sums(self) -> np.ndarray:
        """Sums of the blocks' weights, in float32, as float64: [R, blocks]."""
        sums = torch.cat([piece.sum(-1) for piece in self._pieces(self.w)])
        return sums.numpy().reshape(len(self.w), -1).astype(np.float64)

    def _top_k_threshold(self) -> np.ndarray:
        """The k-th largest score of each row, -inf where top-k is off: [R].

        The k-th largest of all is no less than the k-th largest of 64 ids' maxima: only what is above that is sorted.
        """
        y, width = self.y, self.y.shape[1]
        off = (self.top_k <= 0) | (self.top_k >= width) | self.greedy
        k = np.where(off, 1, self.top_k)
        maxima = np.sort(y.reshape(len(y), -1, 64).max(-1), axis=-1)
        floor = np.where(k <= maxima.shape[1], maxima[self.rows, -np.minimum(k, maxima.shape[1])], -np.inf)
        found, _ = self._sorted_where(y, np.where(off, np.inf, floor))
        return np.where(off, -np.inf, found[self.rows, np.minimum(k, found.shape[1]) - 1])

    def _top_p_threshold(self) -> np.ndarray:
        """The smallest score that top-p keeps, -inf where it is off: [R].

        All weights below (1 - p) * total / V together cannot make up (1 - p) * total, so the threshold lies above that:
        only the ids above it are sorted.
        """
        off = (self.top_p >= 1.0) | self.greedy
        p = self.top_p.astype(np.float64)
        total = torch.from_numpy(self._block_sums()).sum(-1).numpy()
        floor = ((1.0 - p) * total / self.w.shape[1] * 0.99).astype(np.float32)  # 0.99: rounding must not lose an id
        found, counts = self._sorted_where(self.w, np.where(off, np.float32(np.inf), np.maximum(floor, TINY)))
        mass = torch.from_numpy(found).exp().double().cumsum(-1).numpy()
        last = np.minimum((mass < (p * total)[:, None]).sum(-1), np.maximum(counts - 1, 0))
        return np.where(off, -np.inf, found[self.rows, last])

    def _sorted_where(self, array: np.ndarray, floor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's scores where `array` is at least its floor [R], the largest first, -inf behind them; how many: [R]."""
        there = np.greater_equal(array, floor.astype(np.float32)[:, None], out=self._kept)
        rows, places = np.divmod(np.flatnonzero(there), there.shape[1])
        counts = np.bincount(rows, minlength=len(there))
        packed = np.full((len(there), max(1, counts.max())), -np.inf, np.float32)
        packed[rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]] = self.y[rows, places]
        packed.sort(-1)
        return packed[:, ::-1].copy(), counts

    def _inverse_cdf(self, u: np.ndarray) -> np.ndarray:
        """The first id in vocabulary order at which the running sum of weights exceeds u * total: [R].

        First the block, then the id in it. Sums of blocks are rounded otherwise than running sums inside one, so what is
        left of u * total may exceed the block's last running sum: then the last id with a weight is taken.
        """
        per_block = self._block_sums()
        mass = np.cumsum(per_block, -1)
        target = u.astype(np.float64) * mass[:, -1]
        block = np.minimum((mass <= target[:, None]).sum(-1), mass.shape[1] - 1)
        rest = target - (mass[self.rows, block] - per_block[self.rows, block])
        inside = self.w.reshape(len(self.w), -1, BLOCK)[self.rows, block]
        index = (np.cumsum(inside, -1, np.float64) <= rest[:, None]).sum(-1)
        last = BLOCK - 1 - (inside > 0)[:, ::-1].argmax(-1)
        return block * BLOCK + np.minimum(index, last)
