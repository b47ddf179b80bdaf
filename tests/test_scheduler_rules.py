"""One rule of the scheduler, or one fault that others had, per test; all without a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.errors import CapacityError, ParameterError
from headrace.sampling.params import SamplingParams
from headrace.scheduler.admission import Demand, LengthEstimate, PeakForecast
from headrace.scheduler.config import Limits
from headrace.scheduler.request import Request, Status
from headrace.scheduler.scheduler import Scheduler
from scheduler_driver import EOS, SchedulerDriver, reference, settle


def config(**changes) -> Limits:
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4, "num_blocks": 32}
    return Limits(**(fields | changes))


def finish_alone(engine: SchedulerDriver, prompt: list[int], id: str = "warm", **kwargs) -> Request:
    request = engine.add(id, prompt, **kwargs)
    engine.run()
    return request


def expect(request: Request, max_len: int = 64) -> None:
    output, reason = reference(request.prompt_ids, request.seed, request.params, max_len)
    assert (request.output_ids, request.finish_reason) == (output, reason)


# ---- prefix hits


@pytest.mark.parametrize("length", [3, 4, 5, 8, 12, 13])
def test_last_token_of_a_fully_cached_prompt_is_always_computed(length):
    engine = SchedulerDriver(config())
    prompt = list(range(10, 10 + length))
    finish_alone(engine, prompt, max_tokens=6, ignore_eos=True)
    request = engine.add("again", prompt, max_tokens=6, ignore_eos=True)
    (chunk,) = engine.step().chunks
    assert chunk.start == (length - 1) // 4 * 4 == request.num_cached
    assert chunk.num_tokens == length - chunk.start >= 1 and chunk.samples and chunk.admitted
    assert chunk.new_blocks == request.block_ids[: len(chunk.new_blocks)] and chunk.block_offset == 0
    engine.run()
    expect(request)


def test_output_of_a_finished_request_is_found_by_the_next_turn():
    engine = SchedulerDriver(config())
    first = finish_alone(engine, [1, 2, 3, 4, 5], max_tokens=10, ignore_eos=True)
    # the KV of all 15 tokens but the last is there: 3 full blocks
    second = engine.add("turn 2", [*first.prompt_ids, *first.output_ids, 9, 9], max_tokens=2, ignore_eos=True)
    engine.run()
    assert second.num_cached == 12
    expect(second)


@pytest.mark.parametrize("length, full", [(3, 0), (4, 1), (10, 2), (12, 3)])
def test_blocks_are_found_only_after_the_launch_of_the_forward_that_fills_them(length, full):
    engine = SchedulerDriver(config())
    engine.add("a", list(range(10, 10 + length)), max_tokens=3)
    plan = engine.schedule()
    assert engine.scheduler.tree.num_nodes == 0
    engine.launch(plan)
    assert engine.scheduler.tree.num_nodes == full


def test_a_block_of_pending_tokens_is_indexed_when_their_ids_are_known():
    engine = SchedulerDriver(config(), depth=1)
    request = engine.add("a", [1, 2, 3], max_tokens=10, ignore_eos=True)
    engine.step()  # prompt
    engine.step()  # computes token 3, which is not on the host: block 0 is full
    assert len(engine.device.flight) == 1 and request.num_pending == 1 and request.num_known == 4
    assert engine.scheduler.tree.num_nodes == 0
    engine.step()
    assert engine.scheduler.tree.num_nodes == 1


def test_token_counts_are_taken_after_the_prefix_lookup():
    """Preempted, then resumed on a hit: the chunk starts behind the hit and the budget pays for the rest only."""
    engine = SchedulerDriver(config(num_blocks=8, max_model_len=30, max_num_batched_tokens=16)).admit_greedily()
    a = engine.add("a", list(range(10, 18)), max_tokens=20, ignore_eos=True)
    b = engine.add("b", list(range(20, 28)), max_tokens=20, ignore_eos=True)
    resumed = []
    while engine.scheduler.has_unfinished:
        plan = engine.step()
        resumed += [c for c in plan.chunks if c.admitted and c.request.num_preemptions]
    assert a.num_preemptions == 0 and b.num_preemptions >= 1 and resumed
    assert all(c.stop <= c.request.num_tokens for c in resumed)
    assert b.num_cached == 0, "num_cached is that of the first admission"
    for request in (a, b):
        expect(request, 30)


def test_no_prefix_is_read_for_prompt_logprobs_but_it_is_left_to_others():
    engine = SchedulerDriver(config())
    prompt = list(range(10, 22))
    finish_alone(engine, prompt, max_tokens=1)
    scored = engine.add("scored", prompt, max_tokens=1, prompt_logprobs=0)
    assert engine.step().num_tokens == 12 and scored.num_cached == 0
    other = finish_alone(engine, prompt, id="other", max_tokens=1)
    assert other.num_cached == 8


def test_salted_requests_share_with_their_own_kind_only():
    engine = SchedulerDriver(config())
    prompt = list(range(10, 22))
    cached = []
    for i, salt in enumerate(["a", "b", "", "a"]):
        cached.append(finish_alone(engine, prompt, id=str(i), max_tokens=1, cache_salt=salt).num_cached)
    assert cached == [0, 0, 0, 8]


def test_without_prefix_caching_nothing_is_shared_or_kept():
    engine = SchedulerDriver(config(enable_prefix_caching=False))
    for i in range(2):
        request = finish_alone(engine, list(range(10, 22)), id=str(i), max_tokens=3)
        assert request.num_cached == 0 and engine.scheduler.pool.num_free == 32


def test_siblings_wait_one_step_and_then_share():
    engine = SchedulerDriver(config())
    prompt = list(range(10, 23))
    siblings = [engine.add(str(i), prompt, seed=i, max_tokens=4) for i in range(4)]
    stranger = engine.add("stranger", [1, 2, 3], max_tokens=4)
    first = engine.step()
    assert [c.request for c in first.chunks] == [siblings[0], stranger], "a sibling's wait holds up nobody else"
    assert [c.request for c in engine.step().chunks if c.admitted] == siblings[1:3]
    assert [s.num_cached for s in siblings[:3]] == [0, 12, 12]
    engine.run()
    for request in [*siblings, stranger]:
        expect(request)


def test_nobody_waits_for_a_block_that_must_be_computed_anyway():
    engine = SchedulerDriver(config())
    for i in range(2):
        engine.add(str(i), [1, 2, 3, 4], max_tokens=2)
    assert len(engine.step().chunks) == 2
    engine.run()


def test_nobody_waits_twice_for_what_others_compute():
    engine = SchedulerDriver(config(policy="priority"))
    stem = list(range(10, 18))
    engine.add("a", stem, priority=1, max_tokens=4)
    waiting = engine.add("b", [*stem, *range(20, 29)], priority=2, max_tokens=4)
    engine.step()
    assert waiting.status is Status.WAITING
    ahead = engine.add("c", [*stem, *range(20, 27)], priority=0, max_tokens=4)
    engine.step()  # c computes what b lacks after a's blocks
    assert ahead.num_cached == 8 and waiting.num_cached == 8 and waiting.status is Status.RUNNING
    engine.run()
    expect(waiting)


def test_a_long_prompt_is_shared_to_its_end():
    engine = SchedulerDriver(config(max_num_batched_tokens=8))
    engine.add("first", list(range(10, 32)), max_tokens=4)
    second = engine.add("second", list(range(10, 32)), max_tokens=4)
    while second.status is Status.WAITING:
        engine.step()
    assert second.num_cached == 20
    engine.run()


# ---- counters, blocks, slots


def test_a_block_is_taken_exactly_when_the_last_one_is_full():
    engine = SchedulerDriver(config())
    request = engine.add("a", list(range(10, 17)), max_tokens=12, ignore_eos=True)
    seen = []
    while engine.scheduler.has_unfinished:
        (chunk,) = engine.step().chunks
        seen.append((chunk.start, len(chunk.new_blocks)))
        assert chunk.output_index == chunk.stop - 7
    # 7 + 12 tokens; the KV of the last one is never computed
    assert seen == [(0, 2), *((p, int(p % 4 == 0)) for p in range(7, 18))]
    expect(request)


@pytest.mark.parametrize("depth", [0, 1])
def test_no_step_is_wasted_on_a_request_known_to_end(depth):
    engine = SchedulerDriver(config(max_model_len=16), depth=depth)
    by_tokens = engine.add("tokens", [1, 2, 3], max_tokens=5, ignore_eos=True)
    by_context = engine.add("context", [1, 2, 3, 4], max_tokens=None, ignore_eos=True)
    rows = {by_tokens: 0, by_context: 0}
    while engine.scheduler.has_unfinished:
        plan = engine.step()
        for chunk in plan.chunks if plan else ():
            rows[chunk.request] += 1
    assert rows == {by_tokens: 5, by_context: 12}
    assert (by_tokens.finish_reason, by_context.finish_reason) == ("length", "length")
    assert len(by_context.output_ids) == 12


def test_chunks_of_an_unfinished_prompt_do_not_sample():
    engine = SchedulerDriver(config(max_num_batched_tokens=4))
    request = engine.add("a", list(range(10, 20)), max_tokens=2)
    samples = []
    while request.num_pending + len(request.output_ids) == 0:
        plan = engine.schedule()
        samples += [c.samples for c in plan.chunks]
        engine.launch(plan)
        engine.settle()
    assert samples == [False, False, True]


def test_running_decodes_come_before_prefills_and_these_before_admissions():
    engine = SchedulerDriver(config(max_num_batched_tokens=8))
    decoding = engine.add("decoding", [1, 2], max_tokens=20, ignore_eos=True)
    engine.step()
    prefilling = engine.add("prefilling", list(range(10, 24)), max_tokens=2)
    engine.step()
    waiting = engine.add("waiting", [5, 6], max_tokens=2)
    plan = engine.step()
    assert [(c.request, c.num_tokens) for c in plan.chunks] == [(decoding, 1), (prefilling, 7)]
    assert waiting.status is Status.WAITING
    engine.run()


# ---- ends


@pytest.mark.parametrize("params, expected", [
    ({}, ([11, EOS], "stop", None)),
    ({"ignore_eos": True}, ([11, EOS, 12, 13, 14], "stop", 14)),
    ({"ignore_eos": True, "stop_token_ids": [12]}, ([11, EOS, 12], "stop", 12)),
    ({"eos_token_ids": [8, 12]}, ([11, EOS, 12], "stop", None)),
    ({"min_tokens": 3}, ([11, EOS, 12, 13, 14], "stop", 14)),
    ({"min_tokens": 5, "eos_token_ids": [14]}, ([11, EOS, 12, 13, 14], "stop", None)),
    ({"stop_token_ids": [11], "min_tokens": 1}, ([11], "stop", 11)),
    ({"stop_token_ids": [11], "min_tokens": 2}, ([11, EOS], "stop", None)),
    ({"max_tokens": 1}, ([11], "length", None)),
    ({"max_tokens": 2}, ([11, EOS], "stop", None)),
])  # fmt: skip
@pytest.mark.parametrize("together", [False, True])
def test_ends(params, expected, together):
    """The sampler yields 11, EOS, 12, 13, 14, one by one or (as a verified draft does) several at once."""
    params = {"eos_token_ids": [EOS], "stop_token_ids": [14], "max_tokens": 16} | params
    scheduler = Scheduler(config())
    request = Request(id="a", prompt_ids=[1, 2], params=SamplingParams(**params), seed=0)
    scheduler.add(request)
    stream, taken = [11, EOS, 12, 13, 14], []
    while request.status is not Status.FINISHED:
        plan = scheduler.schedule()
        scheduler.launched(plan)
        ids = stream if together else [stream.pop(0)]
        ((same, got),) = settle(scheduler, plan, [ids])
        assert same is request
        taken += got
    assert (request.output_ids, request.finish_reason, request.stop_reason) == expected
    assert taken == request.output_ids
    assert not scheduler.has_unfinished
    scheduler.check()


def test_a_failed_row_ends_its_request_alone_and_its_path_leaves_the_index():
    engine = SchedulerDriver(config())
    prompt = list(range(10, 22))
    bad = engine.add("bad", [*prompt, 1], max_tokens=9, ignore_eos=True)
    good = engine.add("good", [30, 31, 32, 33, 34], max_tokens=9, ignore_eos=True)
    engine.launch(engine.schedule())
    results = engine.settle(failed=frozenset([0]))
    assert results[0] == (bad, []) and bad.finish_reason == "error" and bad.output_ids == []
    engine.run()
    expect(good)
    again = finish_alone(engine, [*prompt, 2], id="again", max_tokens=2)
    assert again.num_cached == 0, "a NaN would live on in the cache"


def test_a_request_ends_with_length_when_it_outgrows_the_whole_cache():
    engine = SchedulerDriver(config(num_blocks=4))
    request = finish_alone(engine, [1, 2, 3], max_tokens=50, ignore_eos=True)
    assert request.finish_reason == "length" and len(request.output_ids) == 14  # KV of 16 tokens, and one more
    expect(request, 17)


def test_prompts_that_are_embedded_end_after_their_prefill():
    scheduler = Scheduler(config(max_num_batched_tokens=8))
    for i in range(2):
        request = Request(id="a", prompt_ids=list(range(12)), params=SamplingParams(), seed=0, pooling="mean")
        scheduler.add(request)
        for _ in range(2):
            plan = scheduler.schedule()
            scheduler.launched(plan)
            results = settle(scheduler, plan, [[]])
        assert results == [(request, [])] and request.finish_reason == "stop" and request.output_ids == []
        assert request.num_cached == 0, f"round {i}: every row is part of the mean"
        assert not scheduler.has_unfinished
        scheduler.check()


# ---- abort and finish in flight


@pytest.mark.parametrize("ended_by", ["abort", "stop"])
def test_slot_and_blocks_outlive_the_launched_step(ended_by):
    engine = SchedulerDriver(config(max_num_seqs=1), depth=1)
    first = engine.add("first", [1, 2, 3], max_tokens=30, stop_token_ids=list(range(50)))
    second = engine.add("second", [4, 5, 6], max_tokens=2, ignore_eos=True)
    engine.launch(engine.schedule())
    engine.launch(engine.schedule())  # the next token, before the first one is read
    if ended_by == "abort":
        assert engine.scheduler.abort("first") is first
        assert engine.settle() == [], "nothing comes after the end"
    else:
        assert engine.settle() == [(first, first.output_ids)]
    assert first.status is Status.FINISHED and first.finish_reason == ended_by
    assert first.slot == 0 and first.block_ids
    assert engine.schedule() is None, "its slot is not free yet"
    assert engine.settle() == [] and first.slot == -1 and not first.block_ids
    assert len(first.output_ids) == (ended_by == "stop")
    engine.run()
    expect(second)


@pytest.mark.parametrize("phase", ["waiting", "scheduled", "launched", "settled", "overlapped", "finished"])
def test_abort_in_every_phase_frees_once(phase):
    engine = SchedulerDriver(config(), depth=1)
    request = engine.add("a", list(range(10, 19)), max_tokens=3, ignore_eos=True)
    if phase == "finished":
        engine.run()
        assert engine.scheduler.abort("a") is None and request.finish_reason == "length"
        return
    if phase != "waiting":
        plan = engine.schedule()
        if phase != "scheduled":
            engine.launch(plan)
        if phase == "settled":
            engine.settle()
        if phase == "overlapped":
            engine.launch(engine.schedule())
            engine.settle()
    assert engine.scheduler.abort("a") is request and request.finish_reason == "abort"
    assert engine.scheduler.abort("a") is None
    engine.check()
    if phase == "scheduled":
        engine.launch(plan)
    while engine.device.flight:
        assert engine.settle() == []
    engine.assert_idle()


def test_aborts_do_not_pile_up_behind_a_waiting_head():
    engine = SchedulerDriver(config(max_num_seqs=1))
    engine.add("running", [1, 2, 3], max_tokens=60, ignore_eos=True)
    engine.step()
    engine.add("head", [1, 2, 3], max_tokens=2)
    for i in range(1000):
        engine.add(str(i), [1, 2, 3], max_tokens=2)
        engine.scheduler.abort(str(i))
    assert len(engine.scheduler.admission._heap) < 100 and engine.scheduler.num_waiting == 1
    engine.run()


# ---- preemption and admission


@pytest.mark.parametrize("depth", [0, 1])
def test_the_youngest_is_preempted_and_says_the_same(depth):
    engine = SchedulerDriver(config(num_blocks=9, max_model_len=37), depth=depth).admit_greedily()
    requests = [engine.add(str(i), [10 + i, 20, 30], seed=i, max_tokens=30, ignore_eos=True) for i in range(3)]
    engine.run()
    preempted = [r.num_preemptions for r in requests]
    assert preempted[0] == 0 and preempted[2] >= 1
    assert engine.scheduler.stats.num_preemptions == sum(preempted)
    for request in requests:
        expect(request, 37)


def test_lower_priority_goes_first_and_is_served_last():
    engine = SchedulerDriver(config(num_blocks=9, max_model_len=37, policy="priority")).admit_greedily()
    late = [2, 0, 1]
    requests = [engine.add(f"p{p}", [10 + p, 20, 30], priority=p, max_tokens=30, ignore_eos=True) for p in late]
    assert [c.request.priority for c in engine.step().chunks] == [0, 1, 2]
    ended = []
    while engine.scheduler.has_unfinished:
        engine.step()
        ended += [r.priority for r in requests if r.status is Status.FINISHED and r.priority not in ended]
    assert ended == [0, 1, 2]
    assert requests[1].num_preemptions == 0 < requests[0].num_preemptions


def test_nobody_preempts_those_ahead_or_itself():
    """The last in rank lacks a block while others run: it waits, and keeps what it has."""
    engine = SchedulerDriver(config(num_blocks=3, max_model_len=13)).admit_greedily()
    first = engine.add("first", [1, 2, 3, 4, 5], max_tokens=3, ignore_eos=True)  # blocks: 2, and no more
    second = engine.add("second", [6, 7, 8], max_tokens=5, ignore_eos=True)  # 1, soon 2
    engine.step()
    engine.step()
    plan = engine.step()
    assert [c.request for c in plan.chunks] == [first] and second.num_preemptions == 0 and len(second.block_ids) == 1
    engine.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)
    expect(second, 13)


def test_a_preempted_request_in_flight_keeps_its_sampled_token():
    engine = SchedulerDriver(config(num_blocks=5, max_model_len=17), depth=1).admit_greedily()
    first = engine.add("first", list(range(20, 31)), max_tokens=6, ignore_eos=True)
    second = engine.add("second", [11, 12, 13, 14, 15], max_tokens=8, ignore_eos=True)
    engine.launch(engine.schedule())
    engine.launch(engine.schedule())
    engine.settle()
    plan = engine.schedule()  # the first one lacks a block
    assert (second.num_preemptions, second.num_pending) == (1, 1) and second.block_ids
    known = len(second.output_ids)
    assert plan is None, "the block comes when the step that holds it settles"
    engine.settle()
    assert len(second.output_ids) == known + 1 and second.status is Status.WAITING and not second.block_ids
    engine.run()
    expect(first, 17)
    expect(second, 17)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_request_comes_back_when_another_has_ended_and_finds_its_blocks(depth, caching):
    sizes = config(num_blocks=8, max_model_len=33, enable_prefix_caching=caching)
    engine = SchedulerDriver(sizes, depth=depth).admit_greedily()
    first = engine.add("first", list(range(20, 28)), max_tokens=12, ignore_eos=True)
    second = engine.add("second", list(range(30, 35)), max_tokens=14, ignore_eos=True)
    comebacks = []
    while engine.scheduler.has_unfinished:
        running = first.status is not Status.FINISHED
        plan = engine.step()
        comebacks += [(c.start, running) for c in plan.chunks if c.admitted and c.request.num_preemptions] if plan else []
    # with 5 tokens of prompt and 9 of output it had 3 full blocks, and the first one's growth needed only the fourth
    assert comebacks == [(12 if caching else 0, False)] and second.num_preemptions == 1
    expect(first, 33)
    expect(second, 33)


def test_nobody_is_preempted_for_blocks_that_come_back_anyway():
    engine = SchedulerDriver(config(num_blocks=3, max_model_len=13), depth=1).admit_greedily()
    engine.add("ends", [1, 2, 3], max_tokens=1)
    grows = engine.add("grows", [4, 5, 6, 7], max_tokens=3, ignore_eos=True)
    youngest = engine.add("youngest", [8, 9], max_tokens=3, ignore_eos=True)
    engine.launch(engine.schedule())
    plan = engine.schedule()
    assert [c.request for c in plan.chunks] == [youngest], "the other one waits for the block of the one that ends"
    engine.launch(plan)
    engine.settle()
    assert [c.request for c in engine.step().chunks] == [grows, youngest]
    engine.run()
    assert youngest.num_preemptions == 0


def test_one_client_with_a_huge_max_tokens_does_not_starve_all():
    engine = SchedulerDriver(config(max_num_seqs=8, num_blocks=64, max_model_len=200, max_num_batched_tokens=256))
    engine.scheduler.admission.estimate.mean = 8.0  # what is usual here
    for i in range(8):
        engine.add(str(i), [i, 1, 2, 3], max_tokens=190)
    assert len(engine.step().chunks) == 8
    engine.run()


def test_a_cache_full_of_expected_output_admits_no_more():
    engine = SchedulerDriver(config(max_num_seqs=8, num_blocks=8, max_model_len=33))
    requests = [engine.add(str(i), [i, 1, 2, 3], max_tokens=12, ignore_eos=True) for i in range(8)]
    engine.run()
    assert sum(r.num_preemptions for r in requests) == 0, "the forecast knew: all get their 12 tokens"


def test_a_long_prompt_does_not_promise_a_long_output():
    engine = SchedulerDriver(config(num_blocks=30))
    engine.scheduler.admission.estimate.mean = 4.0
    for i in range(2):
        engine.add(f"{i}", [i] * 44, max_tokens=20, ignore_eos=True)
    engine.step()
    assert engine.scheduler.num_running == 2


def test_a_head_without_room_is_not_overtaken():
    engine = SchedulerDriver(config(num_blocks=8, max_model_len=33))
    engine.add("running", list(range(10, 26)), max_tokens=12, ignore_eos=True)
    engine.step()
    head = engine.add("head", list(range(30, 50)), max_tokens=4, ignore_eos=True)
    small = engine.add("small", [1], max_tokens=1)
    while head.status is Status.WAITING:
        engine.step()
        assert small.status is Status.WAITING or head.status is not Status.WAITING
    engine.run()


def test_peak_of_future_use():
    forecast = PeakForecast(num_blocks=10, block_size=4, fixed=0)
    assert forecast.fits(Demand(own=16, rest=24)) and not forecast.fits(Demand(own=16, rest=25))
    forecast.add(Demand(own=16, rest=4))  # 4 blocks now, 5 at its end
    # both at the first one's end: 16 + 4 + 12 + 4 tokens; the second alone at its own: 12 + 24
    assert forecast.fits(Demand(own=12, rest=24))
    assert not forecast.fits(Demand(own=24, rest=8))
    assert not forecast.fits(Demand(own=12, rest=24, fixed=3))


def test_expected_length_follows_what_ended_and_never_exceeds_what_is_allowed():
    estimate = LengthEstimate()
    for _ in range(500):
        estimate.observe(40)
    assert 35 <= estimate.remaining(0, 10_000) <= 45
    assert estimate.remaining(0, 7) == 7
    assert estimate.remaining(35, 10_000) >= 10, "one near the mean is not expected to stop at once"
    assert estimate.remaining(400, 10_000) >= 100


# ---- refusals


@pytest.mark.parametrize("changes, error, numbers", [
    ({"prompt_ids": []}, ParameterError, "at least one"),
    ({"prompt_ids": [1] * 64}, ParameterError, "63 tokens"),
    ({"prompt_ids": [1] * 33}, CapacityError, "33 tokens needs 9 blocks.* 8 "),
    ({"prompt_ids": [1, -1, 2**31]}, ParameterError, "prompt_ids"),
    ({"prompt_ids": [1, "a"]}, ParameterError, "prompt_ids"),
    ({"output_ids": [1] * 16}, ParameterError, "max_tokens = 16"),
    ({"id": "there"}, ParameterError, "there"),
])  # fmt: skip
def test_what_can_never_run_is_refused_and_leaves_no_trace(changes, error, numbers):
    scheduler = Scheduler(config(num_blocks=8))
    scheduler.add(Request(id="there", prompt_ids=[1], params=SamplingParams(), seed=0))
    with pytest.raises(error, match=numbers):
        scheduler.add(Request(**({"id": "a", "prompt_ids": [1], "params": SamplingParams(), "seed": 0} | changes)))
    assert scheduler.num_waiting == 1
    scheduler.check()


def test_the_largest_request_that_fits_runs():
    engine = SchedulerDriver(config(num_blocks=8))
    request = finish_alone(engine, [1] * 32, max_tokens=30, ignore_eos=True)
    assert len(request.output_ids) == 1 and request.finish_reason == "length"


def test_a_broken_stream_goes_on_where_it_stopped():
    engine = SchedulerDriver(config())
    whole = finish_alone(engine, [1, 2, 3], max_tokens=12, ignore_eos=True)
    rest = engine.add("rest", [1, 2, 3], output_ids=whole.output_ids[:5], max_tokens=12, ignore_eos=True)
    plan = engine.step()
    assert plan.chunks[0].output_index == 5
    engine.run()
    assert rest.output_ids == whole.output_ids


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"])
def test_sizes_are_checked(field):
    with pytest.raises(ParameterError, match=field):
        config(**{field: 0})
    with pytest.raises(ParameterError, match="policy"):
        config(policy="lottery")


# ---- the rest


def test_gauges_and_counters():
    engine = SchedulerDriver(config(max_num_seqs=1))
    request = engine.add("a", list(range(10, 22)), max_tokens=4, ignore_eos=True)
    engine.add("b", list(range(10, 22)), max_tokens=4, ignore_eos=True)
    engine.step()
    scheduler = engine.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage) == (1, 1, 3 / 32)
    assert request.first_scheduled >= request.arrival and request.first_token >= request.first_scheduled
    engine.run()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage) == (0, 0, 0.0)
    stats = scheduler.stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (24, 8)


def test_a_plan_settles_once():
    engine = SchedulerDriver(config())
    engine.add("a", [1, 2], max_tokens=4)
    plan = engine.schedule()
    engine.launch(plan)
    engine.settle()
    with pytest.raises(KeyError):
        settle(engine.scheduler, plan, [[1]])


def test_scheduler_and_index_import_no_torch():
    code = "import sys, headrace.scheduler.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
