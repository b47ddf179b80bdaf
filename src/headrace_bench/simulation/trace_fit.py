"""The cost of a step from a recorded trace (`headrace serve --trace FILE`): a least-squares fit, and its error.

    seconds = base + a * sequences + b * prefill tokens + c * share of the KV blocks in use, with kinks over the first two, and
              another `a` where there is prefill

times a level: without prefill for that very number of sequences, with prefill for the size that its rows are padded to, for
they are computed in tiles, or padded to what was captured, and one more costs nothing, a third more, or twice as much. No
coefficient is negative. What is fitted is the time from one turn of the loop to the next, while there is work; so all that the
loop does is in it. Each step is then as long as the fit says times a ratio (measured to fitted). Those of steps of a kind
(decodes of about as many sequences, or about as much prefill) are the recorded ones: what the fit is wrong about for all of
them is put right. Which of them a step has follows the recorded steps one after the other, whatever their kinds: a machine that
is slow is so for a while, and queues feel that more than as many slow steps here and there. What some step took far beyond its
kind is added, as so many seconds, to whichever step has its place.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ParameterError
from headrace.files import read_text
from headrace_bench.simulation.cost import Hosts, Work

KINKS = (4, 16, 64, 256)  # sequences, and
PREFILL_KINKS = (64, 512)  # prefill tokens: from here on the slope may be another
STALLED = 3.0  # times what half of the steps of its kind took: not of its kind's doing
WAITED = 0.05  # of a turn: one that waited for less may have come late
FEWEST = 50  # steps: from fewer nothing is fitted
DECODES, PREFILLS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (16, 64, 128, 256, 512, 1024, 2048)  # kinds: by sequences, by tokens
NUM_KINDS = len(DECODES) + 1 + len(PREFILLS) + 1
FEWEST_OF_KIND = 25  # recorded steps; one with fewer is as the nearest that has as many
FEWEST_LAUNCHED, LAUNCHED = 5, 2.0  # steps with prompts of a sort, and how many times as long the launch of the other is
MOST = 1 << 16  # recorded steps that others follow
USED = 4  # the column of the share of blocks in use
LEVELS = 0.1  # about how far levels are from 1; what spells make of a number that was seen a few times is not one
OUTLIERS = 0.02  # steps that the fit does not look at; their ratios are drawn like any other's


class Step(NamedTuple):
    """One turn of the loop, seconds."""

    began: float
    lasted: float
    waited: float
    tokens: int
    seqs: int
    running: int
    used: float


class Sample(NamedTuple):
    tokens: int
    seqs: int
    used: float
    seconds: float


@dataclass(slots=True)
class Fitted:
    """`ratios`: for each kind of steps, which take them by their numbers."""

    coefficients: np.ndarray
    ratios: list[np.ndarray]
    errors: tuple[tuple[float, float], ...]  # half and nine tenths of |measured / fitted - 1| are below; without, with prefill
    counts: tuple[int, int]
    host: float
    prompt_hosts: Hosts
    blocking: bool
    stalls: np.ndarray  # seconds on top of a step, whatever its kind, by its number
    levels: dict[int, float] = field(default_factory=dict)  # by `size_of`; of what is not there 1
    _expected: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)  # at no use of the cache, by shape

    def seconds(self, work: Work, step: int) -> float:
        ratios = self.ratios[kind_of(work.tokens, work.seqs)]
        return self.expected(work) * float(ratios[step % len(ratios)]) + float(self.stalls[step % len(self.stalls)])

    def many_seconds(self, work: Work, step: int, count: int) -> np.ndarray:
        ratios = self.ratios[kind_of(work.tokens, work.seqs)]
        steps = np.arange(step, step + count)
        return self.expected(work) * ratios[steps % len(ratios)] + self.stalls[steps % len(self.stalls)]

    def expected(self, work: Work) -> float:
        shape = work.tokens, work.seqs
        found = self._expected.get(shape)
        if found is None:
            found = self._expected[shape] = float(features(*shape, 0.0) @ self.coefficients)
        found += work.used * float(self.coefficients[USED])
        return found * self.levels.get(size_of(*shape), 1.0)

    def __str__(self) -> str:
        parts = (
            f"{count} steps {kind}, half of them fitted within {100 * half:.1f} %, nine tenths within {100 * most:.1f} %"
            for kind, count, (half, most) in zip(("of decodes", "with prefill"), self.counts, self.errors, strict=True)
            if count
        )
        return "; ".join(parts)


def features(tokens: int, seqs: int, used: float) -> np.ndarray:
    prefill = tokens - seqs
    kinks = [max(0, seqs - k) for k in KINKS] + [max(0, prefill - k) for k in PREFILL_KINKS]
    return np.array([1.0, seqs, prefill, prefill > 0, used, seqs * (prefill > 0), *kinks])


def kind_of(tokens: int, seqs: int) -> int:
    """The first ones are of steps without prefill."""
    prefill = tokens - seqs
    return len(DECODES) + 1 + bisect_left(PREFILLS, prefill) if prefill else bisect_left(DECODES, seqs)


def fit_trace(path: str, seed: int) -> Fitted:
    """Raises ParameterError for a file that is no trace, or holds too little."""
    steps = read_steps(path)
    blocking = sum(s.waited for s in steps) < 0.1 * sum(s.lasted for s in steps)
    samples = pairs(steps, blocking)
    if len(samples) < FEWEST:
        raise ParameterError("--trace", path, f"a trace with at least {FEWEST} steps under load (this one has {len(samples)})")
    host, prompt_hosts = (0.0, ()) if blocking else hosts_of(steps)
    x = np.array([features(s.tokens, s.seqs, s.used) for s in samples])
    y = np.array([s.seconds for s in samples])
    coefficients = least_squares(x, y)
    ratios = y / (x @ coefficients)
    kinds = np.array([kind_of(sample.tokens, sample.seqs) for sample in samples])
    logs = np.log(without_stalls(ratios, kinds))
    levels = levels_of(samples, logs, kinds, False) | levels_of(samples, logs, kinds, True)
    ratios /= [levels[size_of(s.tokens, s.seqs)] for s in samples]
    sorts = [ratios[kinds <= len(DECODES)], ratios[kinds > len(DECODES)]]
    errors = tuple(_half_and_most(np.abs(sort - 1)) for sort in sorts)
    first = random.Random(f"{seed}/steps").randrange(len(ratios))
    plain = without_stalls(ratios, kinds)
    stalls = np.roll((ratios - plain) * (y / ratios), -first)[:MOST]
    spread = ratios_of_kinds(plain, kinds, first)
    return Fitted(coefficients, spread, errors, (len(sorts[0]), len(sorts[1])), host, prompt_hosts, blocking, stalls, levels)


def size_of(tokens: int, seqs: int) -> int:
    """What a step has a level by: of decodes their number; with prefill, below 0, the rows that it is padded to if it is
    captured (as worker/prompt_graphs.py has them)."""
    width = 16 if tokens <= 32 else 64 if tokens <= 1024 else 256 if tokens <= 2048 else 512
    return seqs if tokens == seqs else -(-(-tokens // width) * width)


def levels_of(samples: list[Sample], logs: np.ndarray, kinds: np.ndarray, prefill: bool) -> dict[int, float]:
    """How much longer steps of a size take than others of their kind, as far as that is more than chance; those with prefill,
    or those without. Steps in a row are slow together, so each time that the size was seen counts once.
    """
    visits: dict[int, list[float]] = defaultdict(list)
    means = {kind: float(logs[kinds == kind].mean()) for kind in set(kinds.tolist())}
    sizes = [size_of(s.tokens, s.seqs) for s in samples]
    sort = [(size, log - means[kind]) for size, log, kind in zip(sizes, logs, kinds, strict=True) if (size < 0) == prefill]
    for size, visit in groupby(sort, key=lambda pair: pair[0]):
        visits[size].append(float(np.mean([off for _, off in visit])))
    several = [np.array(offs) for offs in visits.values() if len(offs) > 1]
    chance = sum(float(((v - v.mean()) ** 2).sum()) for v in several) / max(1, sum(len(v) - 1 for v in several))
    return {n: math.exp(np.mean(offs) * LEVELS**2 / (LEVELS**2 + chance / len(offs))) for n, offs in visits.items()}


def without_stalls(ratios: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """What stalls one step for long would have stalled any other for as long. As a ratio of its kind it would count for that
    kind alone, and for much where few were recorded.
    """
    middles = np.ones(NUM_KINDS)
    for kind in set(kinds.tolist()):
        middles[kind] = np.median(ratios[kinds == kind])
    return np.where(ratios > STALLED * middles[kinds], middles[kinds], ratios)


def ratios_of_kinds(ratios: np.ndarray, kinds: np.ndarray, first: int) -> list[np.ndarray]:
    """For each kind some of its own recorded ratios, one for each recorded step from `first` on: that which is as far up among
    those of the kind as the step's was among those of its own. What makes a short step ten times as long does not do so with a
    long one.
    """
    counts = np.bincount(kinds, minlength=NUM_KINDS)
    rank = np.full(len(ratios), 0.5)  # among its kind, in (0, 1); of too few nothing is known
    for known in np.flatnonzero(counts >= FEWEST_OF_KIND):
        own = np.flatnonzero(kinds == known)
        rank[own[np.argsort(ratios[own], kind="stable")]] = (np.arange(len(own)) + 0.5) / len(own)
    rank = np.roll(rank, -first)[:MOST]
    found = []
    for kind in range(NUM_KINDS):
        of_kind = np.sort(ratios[kinds == _nearest(kind, counts)])
        found.append(of_kind[(rank * len(of_kind)).astype(int)] if len(of_kind) else np.ones(1))
    return found


def _nearest(kind: int, counts: np.ndarray) -> int:
    """The nearest kind that was recorded often enough, of those with prefill or of those without."""
    border = len(DECODES) + 1
    among = range(border) if kind < border else range(border, NUM_KINDS)
    enough = min(FEWEST_OF_KIND, max(counts[list(among)]))
    return min((other for other in among if counts[other] >= enough), key=lambda other: abs(other - kind))


def _half_and_most(errors: np.ndarray) -> tuple[float, float]:
    return (float(np.median(errors)), float(np.quantile(errors, 0.9))) if len(errors) else (0.0, 0.0)


def least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Coefficients, none negative, of the smallest sum of squared relative errors; the worst steps are left out of it."""
    x, ones = x / y[:, None], np.ones(len(y))
    first = _not_negative(x, ones)
    errors = np.abs(x @ first - 1)
    kept = errors <= np.quantile(errors, 1 - OUTLIERS)
    return _not_negative(x[kept], ones[kept])


def _not_negative(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares; whose coefficient would be most negative is left out, until none is."""
    columns = [c for c in range(x.shape[1]) if x[:, c].any()]
    found = np.zeros(x.shape[1])
    while columns:
        solution = np.linalg.lstsq(x[:, columns], y, rcond=None)[0]
        if solution.min() >= 0:
            found[columns] = solution
            break
        columns.pop(int(solution.argmin()))
    return found


def pairs(steps: list[Step], blocking: bool) -> list[Sample]:
    """What each step computed, and how long it took: the turn that launched it, or, beside a device, what `Device` says."""
    if not blocking:
        return Device(hosts_of(steps)[0]).samples(steps)
    turns = (
        (step, after.began - step.began) for step, after in pairwise(steps) if step.running
    )  # else there was nothing to do
    return [Sample(step.tokens, step.seqs, step.used, seconds) for step, seconds in turns if step.seqs and seconds > 0]


def hosts_of(steps: list[Step]) -> tuple[float, Hosts]:
    """Seconds of the loop in a turn beside its wait: one that launches decodes, and one that launches prompts. Those of many
    tokens may not be captured, and take far longer: the number is where the logarithms of both sorts scatter least.
    """
    plain = [s.lasted - s.waited for s in steps if s.tokens == s.seqs > 0]
    prompts = sorted((s.tokens, max(s.lasted - s.waited, 1e-6)) for s in steps if s.tokens > s.seqs)
    host = float(np.median(plain or [seconds for _, seconds in prompts]))
    if len(prompts) < FEWEST_OF_KIND:
        return host, ()
    logs = np.log([seconds for _, seconds in prompts])
    borders = [i for i in range(FEWEST_LAUNCHED, len(logs) - FEWEST_LAUNCHED) if prompts[i - 1][0] < prompts[i][0]]
    scatter = {i: i * logs[:i].var() + (len(logs) - i) * logs[i:].var() for i in borders}
    border = min(scatter, key=scatter.__getitem__, default=0)
    if border and np.median(logs[border:]) - np.median(logs[:border]) > math.log(LAUNCHED):
        most = -size_of(prompts[border - 1][0], 0)
        return host, ((most, max(host, math.exp(np.median(logs[:border])))), (math.inf, math.exp(np.median(logs[border:]))))
    return host, ((math.inf, max(host, math.exp(np.median(logs)))),)


@dataclass(slots=True)
class Device:
    """One that works while the host goes on. A step lasts from when it could begin to the end of the turn that waited for it. A
    turn whose launch took longer did not wait: when the step had ended is not known then, and taken from others of its kind.
    """

    host: float
    _typical: dict[int, float] = field(default_factory=dict)  # seconds, by kind

    def samples(self, steps: list[Step]) -> list[Sample]:
        known = [sample for sample, is_known in self._walk(steps) if is_known]
        by_kind: dict[int, list[float]] = defaultdict(list)
        for sample in known:
            by_kind[kind_of(sample.tokens, sample.seqs)].append(sample.seconds)
        self._typical = {kind: float(np.median(seconds)) for kind, seconds in by_kind.items()}
        found, every = [], list(self._walk(steps))
        for with_prompts in (False, True):
            sort = [pair for pair in every if (pair[0].tokens > pair[0].seqs) == with_prompts]
            known = [sample for sample, is_known in sort if is_known]
            found.append(known if len(known) >= FEWEST_OF_KIND else [sample for sample, _ in sort])
        return found[0] + found[1]

    def _walk(self, steps: list[Step]) -> Iterator[tuple[Sample, bool]]:
        """Each step's, and whether its begin and its end are known."""
        free, free_known = -math.inf, True  # when the device had done the step before
        for launched, step, after in zip(steps, steps[1:], steps[2:], strict=False):
            if not launched.seqs or step.waited <= 0:
                continue
            end, waited = after.began if step.running else step.began + step.lasted, step.waited > WAITED * step.lasted
            begin = launched.began + self.host
            start, start_known = max(begin, free), free_known or begin >= free
            sample = Sample(launched.tokens, launched.seqs, launched.used, end - start)
            if step.running and end > start:
                yield sample, waited and start_known
            typical = self._typical.get(kind_of(launched.tokens, launched.seqs))
            free = end if waited or typical is None else min(end, start + typical)
            free_known = waited or typical is not None


def read_steps(path: str) -> list[Step]:
    """The steps of the core that made most of them."""
    try:
        events = json.loads(read_text("--trace", path))["traceEvents"]
        by_core: dict[Any, list[Step]] = defaultdict(list)
        for event in events:
            core = event.get("pid")
            args, steps = event.get("args", {}), by_core[core]
            if event["ph"] == "X" and event["name"] == "wait":
                steps[-1] = steps[-1]._replace(waited=event["dur"] / 1e6)
            elif event["ph"] == "X" and event["name"] not in ("schedule", "launch", "settle"):
                last = steps[-1] if steps else None
                running, used = (last.running, last.used) if last else (0, 0.0)
                began, lasted = event["ts"] / 1e6, event["dur"] / 1e6
                steps.append(Step(began, lasted, 0.0, args["tokens"], args["seqs"], running, used))
            elif event["ph"] == "C" and steps:
                new = {"running": args["running"]} if "running" in args else {"used": args["used"]}
                steps[-1] = steps[-1]._replace(**new)
        return max(by_core.values(), key=len, default=[])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ParameterError("--trace", path, "a file that `headrace serve --trace FILE` wrote") from None
