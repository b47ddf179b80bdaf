"""The parts of speculation by themselves: prompt lookup, draft lengths, and which rows of a verified step count."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import EngineConfig
from headrace.errors import ParameterError
from headrace.kernels.prepare import KEPT, Rows, publish
from headrace.kernels.tables import Float, Int, SlotTables
from headrace.sampling.params import SamplingParams
from headrace.sampling.penalties import counts_with_drafts, load_counts, token_counts
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.request import Request
from headrace.speculative.draft_length import AcceptanceRate, DraftLengths, best_length
from headrace.speculative.ngram import TOKENS_PER_CALL, NGramProposer
from headrace.speculative.speculator import SpeculationStats, Speculator

# ---- prompt lookup


def request(prompt: list[int], output: list[int] | None = None, name: str = "a") -> Request:
    return Request(id=name, prompt_ids=prompt, params=SamplingParams(), seed=0, output_ids=output or [])


def plan_of(*requests: Request) -> StepPlan:
    """Of a step in which these have their drafts verified."""
    drafts = np.asarray([r.num_drafts for r in requests], np.int32)
    starts, zeros = np.asarray([r.num_scheduled for r in requests], np.int32), np.zeros_like(drafts)
    return StepPlan(1, 0, 0, [r.id for r in requests], zeros, starts, 1 + drafts, drafts, zeros, zeros == 0)


def matches(ids: list[int], least: int, most: int) -> dict[int, int]:
    """Place -> length of the match of the last tokens with those that end there (at least `least`, at most `most`)."""
    found = {}
    for place in range(len(ids) - 1):
        length = 0
        while length < most and length <= place and ids[place - length] == ids[len(ids) - 1 - length]:
            length += 1
        if length >= least:
            found[place] = length
    return found


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 4), st.integers(1, 12))
def test_lookup_finds_the_longest_of_the_latest_matches(ids, least, more, count):
    got = NGramProposer(least, least + more).propose(request(ids[:1], ids[1:]), count) if ids else []
    latest = dict(list(matches(ids, least, least + more).items())[-8:])
    if not latest:
        assert got == []
        return
    longest = max(latest.values())
    best = max(place for place, length in latest.items() if length == longest)
    text = list(ids)
    for i in range(count):  # as if it were copied token by token
        text.append(text[best + 1 + i])
    assert got == text[len(ids) :]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.lists(st.integers(1, 10), max_size=20))
def test_an_index_that_grows_knows_what_a_new_one_knows(ids, steps):
    grown = NGramProposer(2, 4)
    one = request(ids[:1])
    for step in steps:
        done = one.num_known
        one.output_ids += ids[done : done + step]
        assert grown.propose(one, 5) == NGramProposer(2, 4).propose(one, 5)


def test_a_long_prompt_is_entered_bit_by_bit():
    proposer = NGramProposer(2, 4)
    long = request([1, 2, 3, 4] * (TOKENS_PER_CALL // 2))
    assert proposer.propose(long, 3) == []
    assert proposer.propose(long, 3) == [1, 2, 3]


def test_indices_end_with_their_requests():
    proposer = NGramProposer(1, 4)
    assert proposer.propose(request([1, 2, 1]), 1) == [2]
    proposer.end("a")
    proposer.end("never seen")
    assert proposer.propose(request([5, 6, 5]), 1) == [6]


@pytest.mark.parametrize("least, most", [(0, 3), (4, 3)])
def test_bounds_of_lookup_are_checked(least, most):
    with pytest.raises(ParameterError, match="prompt_lookup_min"):
        NGramProposer(least, most)


@pytest.mark.parametrize("options", [
    {"speculative_method": "guess"}, {"num_speculative_tokens": 0}, {"speculative_model": "x"},
    {"speculative_method": "draft_model"}, {"speculative_method": "ngram", "speculative_model": "x"},
    {"prompt_lookup_min": 5, "prompt_lookup_max": 4}, {"speculative_max_rows": 1},
    {"num_speculative_tokens": 3}, {"speculative_max_rows": 8, "skip_tokenizer_init": True}, {"prompt_lookup_max": 4},
    {"speculative_method": "draft_model", "speculative_model": "x", "prompt_lookup_min": 2},
])  # fmt: skip
def test_options_are_checked(options):
    with pytest.raises(ParameterError):
        EngineConfig(**options)


# ---- how many


def test_the_best_length_maximizes_tokens_per_cost():
    for rate in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        for cost in (0.02, 0.1, 0.5, 1.2):
            gains = [sum(rate**i for i in range(k + 1)) / (1 + k * cost) for k in range(9)]
            found = best_length(rate, 8, cost)
            assert gains[found] >= max(gains) - 1e-3 if found else max(gains) < 1.1 + 1e-3
    assert best_length(0.0, 8, 0.01) == 0
    assert best_length(1.0, 8, 0.1) == 8
    assert best_length(1.0, 8, 1.1) == 0  # drafts that cost more than a step of the target


@pytest.mark.parametrize("rate", [i / 50 for i in range(50)])
def test_drafts_lose_nothing_if_they_cost_four_times_what_was_estimated(rate):
    found = best_length(rate, 8, 0.03)
    assert sum(rate**i for i in range(found + 1)) >= 1 + 0.12 * found


def test_lengths_follow_the_rate():
    lengths, rate = DraftLengths(8, 0.1), AcceptanceRate()
    first = lengths.of(rate)
    assert first > 0
    for _ in range(20):
        rate.observe(4, 4)
    assert lengths.of(rate) == 8
    for _ in range(50):
        rate.observe(2, 0)
    assert lengths.of(rate) == 0
    steps = 0
    while not lengths.of(rate):
        rate.rest()
        steps += 1
    assert 20 < steps < 1000


def test_a_rate_forgets_what_is_long_ago():
    rate = AcceptanceRate()
    for _ in range(1000):
        rate.observe(4, 0)
    for _ in range(12):
        rate.observe(4, 4)
    assert rate.value > 0.6


def test_counters():
    stats = SpeculationStats()
    for drafted, accepted in ((3, 3), (3, 1), (5, 0), (40, 40)):
        stats.count(drafted, accepted)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 51, 44)
    assert stats.accepted_per_position[:4] == [3, 2, 2, 1]
    assert len(stats.accepted_per_position) == 32


class Wishful:
    def propose(self, request: Request, most: int) -> list[int]:
        return [7] * most

    def end(self, request_id: str) -> None:
        pass


@given(st.integers(1, 40), st.integers(2, 32))
def test_wishes_fit_the_rows(count, rows):
    speculator = Speculator(8, rows, 0.01, Wishful())
    requests = [request([1, 2], [3], f"r{i}") for i in range(count)]
    plain = plan_of()
    speculator.choose(requests)
    drafts = sum(r.num_drafts for r in requests)
    if count >= rows:
        assert drafts == 0 and not speculator.settles_first(plain, requests)
    else:
        assert speculator.settles_first(plain, requests) and drafts > 0
        assert drafts <= rows - count or all(r.num_drafts == 1 for r in requests)
    speculator.choose([])
    assert not any(r.num_drafts for r in requests)


@pytest.mark.parametrize("accepted, idle, settles", [(4, 0.05, False), (2, 0.05, True), (2, 1.5, False), (0, 0.0, False)])
def test_the_host_guesses_on_or_waits_for_ids(accepted, idle, settles):
    """What is always right is guessed on; behind what is often wrong the ids are worth a short wait, not a long one."""
    speculator = Speculator(4, 64, 0.03, Wishful(), overlap=True)
    speculator.idle = idle
    running = request([1, 2], [3])
    for _ in range(40):
        running.num_scheduled, running.num_unverified = running.num_known - 1, 0
        speculator.choose([running])
        if running.num_drafts:
            count = 1 + min(accepted, running.num_drafts)
            speculator.settled(plan_of(running), StepResult([7] * count, [count]), {running.id})
    running.num_scheduled, running.num_unverified = running.num_known, running.num_drafts
    assert speculator.settles_first(plan_of(), [running]) is settles
    assert not Speculator(4, 64, 0.03, overlap=True).settles_first(plan_of(), [running])  # the drafter is on the device


# ---- what grammars force


class Grammars:
    """Of the requests in `runs`, and what each forces."""

    def __init__(self, runs: dict[str, list[int]]):
        self.runs = runs

    has_any = True

    def has(self, request_id: str) -> bool:
        return request_id in self.runs

    def matcher(self, request_id: str):
        run = self.runs.get(request_id)
        return None if run is None else SimpleNamespace(forced=lambda: run)


RUNNING = st.lists(st.tuples(st.none() | st.integers(0, 9), st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=12)


@given(RUNNING, st.integers(2, 24), st.integers(1, 6))
def test_forced_tokens_fill_what_nobody_pays_for(running, rows, multiple):
    """For each request: the length of its run, or None without a grammar; tokens and drafts in flight."""
    runs, requests = {}, []
    for i, (length, pending, unsure) in enumerate(running):
        requests.append(request([1, 2], [3], f"r{i}"))
        requests[-1].num_scheduled, requests[-1].num_unverified = 2 + pending, unsure * pending
        if length is not None:
            runs[f"r{i}"] = [10 * i + j for j in range(length)]
    speculator = Speculator(0, rows, 0.1, None, Grammars(runs), overlap=True)
    speculator.padded = lambda n: -(-n // multiple) * multiple
    free = len(runs) < len(requests)
    if speculator.settles_first(plan_of(), requests):
        assert not free and any(0 < r.num_unverified + r.num_pending < len(runs[r.id]) for r in requests)
    speculator.choose(requests)
    drafts = sum(r.num_drafts for r in requests)
    assert speculator.has_drafts is (drafts > 0)
    room = max(0, rows - len(requests))
    assert drafts <= (min(room, -len(requests) % multiple) if free else room) or (not free and all(r.num_drafts <= 1 for r in requests))
    for r in requests:
        assert r.num_drafts <= (0 if r.num_unverified else max(0, len(runs.get(r.id, [])) - r.num_pending))
        plan = plan_of(r)
        speculator.fill(plan)
        assert plan.guesses.get(0, []) == runs.get(r.id, [])[r.num_pending :][: r.num_drafts]
    if not free and room >= 9 * len(requests):
        assert all(r.num_drafts == max(0, len(runs[r.id]) - r.num_pending) for r in requests if not r.num_unverified)


@pytest.mark.parametrize("in_flight, idle, settles", [(3, 0.1, True), (3, 3.0, False), (8, 0.0, False)])
def test_the_rest_of_a_forced_run_is_worth_a_short_wait(in_flight, idle, settles):
    """A step with a part of it is in flight: where it ends the host knows when that step has settled."""
    speculator = Speculator(0, 64, 0.03, None, Grammars({"a": list(range(6))}), overlap=True)
    speculator.idle = idle
    running = request([1, 2], [3])
    running.num_scheduled, running.num_unverified = running.num_known, in_flight
    assert speculator.settles_first(plan_of(), [running]) is settles


# ---- which rows count

STEPS = st.lists(
    st.integers(0, 4).flatmap(lambda k: st.tuples(*[st.lists(st.integers(0, 1), min_size=k + 1, max_size=k + 1)] * 3)),
    min_size=1, max_size=8,
)  # fmt: skip


@given(STEPS)
def test_rows_count_up_to_the_first_wrong_draft(steps):
    sampled, guesses, failed, first_slot, expected = [], [], [], [], []
    for slot, (ids, drafts, bad) in enumerate(steps):
        right = True
        for i in range(len(ids)):
            expected.append(right and not bad[i])
            right = right and not bad[i] and ids[i] == drafts[i]
        sampled += ids
        guesses += drafts
        failed += bad
        first_slot += [slot] * len(ids)
    rows, slots = Rows.empty(len(sampled), torch.device("cpu")), len(steps)
    rows.seq_slots[:], rows.seq_lens[:], rows.guesses[:] = torch.tensor(first_slot), 1, torch.tensor(guesses)
    tables = SlotTables(
        torch.zeros(slots, 2, dtype=torch.int32), torch.zeros(slots, 1, dtype=torch.int32), torch.zeros(slots, len(Float)),
        torch.zeros(slots, len(Int), dtype=torch.int64), torch.zeros(slots, dtype=torch.int32), 1,
    )  # fmt: skip
    out = torch.zeros(3, len(sampled), dtype=torch.int32)
    publish(torch.tensor(sampled, dtype=torch.int32), torch.tensor(failed).bool(), rows, tables, out, None, verify=True)
    assert out[KEPT].tolist() == expected
    counts = [sum(k for k, s in zip(expected, first_slot, strict=True) if s == slot) for slot in range(slots)]
    assert tables.accepted.tolist() == [count - 1 for count in counts]


@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), max_size=5))
def test_counts_of_a_row_include_the_drafts_before_it(prompt, output, drafts):
    def load(counts, prompt, output):
        load_counts(counts, 1, torch.from_numpy(token_counts(np.asarray(prompt, int), np.asarray(output, int), 10)))

    counts = torch.zeros(3, 10, dtype=torch.int32)
    load(counts, prompt, output)
    rows = len(drafts) + 1
    pairs = [(r, drafts[i]) for r in range(rows) for i in range(r)]
    where, ids = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    got = counts_with_drafts(counts, torch.full((rows,), 1), where, ids)
    for r in range(rows):
        want = torch.zeros(3, 10, dtype=torch.int32)
        load(want, prompt, output + drafts[:r])
        assert got[r].tolist() == want[1].tolist()
