"""A plan and its result are messages: they go to the worker and back as bytes, to another process too, and nothing changes."""

from __future__ import annotations

import multiprocessing
import random
from multiprocessing.connection import Connection

import msgspec
import pytest

from drafting import draft_always, drafting_core
from engine_driver import assert_all_same, assert_same, make_core, make_requests, requests_of_all_kinds, run
from headrace.engine.core import EngineCore
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.tensor_parallel.messages import from_wire, to_wire

encode = msgspec.msgpack.Encoder(enc_hook=to_wire).encode
decode_plan = msgspec.msgpack.Decoder(StepPlan, dec_hook=from_wire).decode
decode_result = msgspec.msgpack.Decoder(StepResult, dec_hook=from_wire).decode


class Handle:
    """A handle whose result has travelled."""

    def __init__(self, handle):
        self._handle = handle

    @property
    def finished(self) -> float:
        return self._handle.finished

    def result(self) -> StepResult:
        return decode_result(encode(self._handle.result()))


def send_everything(core: EngineCore) -> list[StepPlan]:
    """Let plans and results cross a border; the plans as they arrived."""
    runner, arrived = core.runner, []
    launch, forward, sample = runner.launch, runner.forward, runner.sample

    def sent(plan: StepPlan) -> StepPlan:
        arrived.append(decode_plan(encode(plan)))
        return arrived[-1]

    inside = [False]  # launch itself calls the others

    def launching(plan: StepPlan) -> Handle:
        inside[0] = True
        try:
            return Handle(launch(sent(plan)))
        finally:
            inside[0] = False

    runner.launch = launching
    runner.forward = lambda plan, whole=True: forward(plan if inside[0] else sent(plan), whole)
    runner.sample = lambda *args: sample(*args) if inside[0] else Handle(sample(*args))
    return arrived


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 11, "num_kv_blocks": 12}])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_whose_plans_and_results_are_sent_says_the_same(model, options, overlap):
    plain = make_core(model, enable_prefix_caching=False)
    requests = requests_of_all_kinds(plain.vocab_size)
    rng = random.Random(2)
    arrivals = [rng.randint(0, 12) for _ in requests]
    wanted = run(plain, requests, arrivals=arrivals)
    core = drafting_core(model, overlap=overlap, **options)
    core.scheduler.admission.estimate.observe = lambda length: None  # all are taken to end soon: some are preempted
    core.scheduler.admission.estimate.mean = 1.0
    plans = send_everything(core)
    for name, got in run(core, requests, arrivals=arrivals).items():
        assert_same(got, wanted[name], name)
        assert (got.prompt_logprobs is None) is (wanted[name].prompt_logprobs is None)
        assert got.embedding is None or got.embedding == pytest.approx(wanted[name].embedding, abs=1e-5)
    assert any(plan.guesses for plan in plans) and any(plan.new_blocks for plan in plans)
    assert any(new.num_cached for plan in plans for new in plan.admitted)
    assert core.scheduler.stats.num_preemptions or not options
    assert any(plan.any_unverified for plan in plans) or not overlap


def test_a_drafting_model_needs_only_messages(model):
    options = {"speculative_method": "draft_model", "speculative_model": model, "num_speculative_tokens": 3}
    plain, core = make_core(model), make_core(model, speculative_max_rows=32, **options)
    draft_always(core, 3, overlap=True)
    send_everything(core)
    requests = make_requests(6, 8, plain.vocab_size)
    wanted = run(plain, requests)
    assert_all_same(run(core, requests), wanted)
    assert core.speculator.stats.num_accepted_tokens > 20


def serve(pipe: Connection, model: str) -> None:
    """A worker's process: plans in, results out."""
    runner = make_core(model).runner
    while (data := pipe.recv_bytes()) != b"":
        pipe.send_bytes(encode(runner.launch(decode_plan(data)).result()))


class Remote:
    """A runner in another process. `finished` is when its result was asked for."""

    finished = 0.0

    def __init__(self, pipe: Connection):
        self.pipe = pipe

    def launch(self, plan: StepPlan) -> Remote:
        self.pipe.send_bytes(encode(plan))
        return self

    def result(self) -> StepResult:
        return decode_result(self.pipe.recv_bytes())


def test_the_runner_can_live_in_another_process(model):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, model), daemon=True)
    process.start()
    plain, core = make_core(model), make_core(model)
    requests = make_requests(7, 10, plain.vocab_size)
    wanted = run(plain, requests)
    core.runner = Remote(ours)  # type: ignore[assignment]
    assert_all_same(run(core, requests), wanted)
    ours.send_bytes(b"")
    process.join(30)
    assert process.exitcode == 0
