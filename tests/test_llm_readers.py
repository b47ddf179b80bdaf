"""Several readers of one LLM: each gets what it would get alone, whoever steps the core, whatever happens to the others."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, BeamSearchParams, SamplingParams
from headrace.engine.messages import EngineRequest
from headrace.engine.sharing import Reader
from headrace.errors import EngineDeadError, HeadraceError, ParameterError
from headrace.sampling.checks import packed
from headrace.sampling.structured_outputs import StructuredOutputsParams

OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 128}
LONG = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True)
WISH = StructuredOutputsParams(regex="[a-d]{40}")
A, B = [5, 6, 7], [40, 41, 42, 43]


@pytest.fixture(scope="module")
def llm(model):
    """Few slots, small steps and a small cache: readers wait for each other, prompts are cut, requests are preempted."""
    with LLM(model, **OPTIONS, num_kv_blocks=24, block_size=8, debug_checks=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_stays(request) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        core = request.getfixturevalue("llm").engine.core
        if core.has_work:  # of threads the last to end may leave a step that one of them launched beside it
            core.step()
        assert not core.has_work and core.scheduler.kv_usage == 0


def ids_of(stream) -> list[int]:
    """All that is left of a stream of one sample."""
    return [token for *_, delta, _ in stream for token in delta.token_ids]


def alone(llm, prompt, params=LONG) -> list[int]:
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


# ---- any calls in any order


def prompt_of(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + 7 * i * i) % 500 for i in range(length)]


SAMPLING = st.builds(
    SamplingParams, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 3), n=st.integers(1, 2),
    max_tokens=st.integers(1, 20), stop=st.sampled_from([None, ["e"]]),
    logprobs=st.sampled_from([None, 1]), repetition_penalty=st.sampled_from([1.0, 1.3]),
    structured_outputs=st.sampled_from([None, StructuredOutputsParams(regex="[ab]{30}")]),
)  # fmt: skip
PROMPTS = st.lists(st.builds(prompt_of, st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=2)
CALLS = st.one_of(
    st.tuples(st.just("stream"), PROMPTS, SAMPLING),
    st.tuples(st.just("generate"), PROMPTS, SAMPLING),
    st.tuples(st.just("score"), st.lists(st.builds(prompt_of, st.integers(0, 3), st.integers(1, 170)), min_size=1, max_size=2), st.none()),
    st.tuples(st.just("beam_search"), PROMPTS, st.builds(BeamSearchParams, beam_width=st.integers(1, 3), max_tokens=st.integers(1, 6))),
)  # fmt: skip


def read(llm: LLM, call: tuple[str, Any, Any]) -> Iterator[Any]:
    """Runs the call; yields None wherever others may come in, and last what it brought."""
    kind, prompts, params = call
    if kind == "stream":
        found: dict = {}
        for i, k, delta, output in llm.stream(prompts, params):
            ids, text, _ = found.get((i, k), ([], "", None))
            found[i, k] = ids + delta.token_ids, text + delta.text, output.outputs[k].finish_reason
            yield None
        yield found
    elif kind == "generate":
        outputs = llm.generate(prompts, params, use_tqdm=False)
        yield {(i, o.index): (o.token_ids, o.text, o.finish_reason) for i, r in enumerate(outputs) for o in r.outputs}
    elif kind == "score":
        yield [s.logprobs for s in llm.score(prompts)]
    else:
        yield [[(s.token_ids, s.cum_logprob) for s in o.sequences] for o in llm.beam_search(prompts, params)]


def result_of(llm: LLM, call: tuple[str, Any, Any]) -> Any:
    """Of the call with nothing in between."""
    return [result for result in read(llm, call) if result is not None].pop()


def assert_same(got: Any, want: Any) -> None:
    """Tokens are equal; logprobs up to what float32 makes of products of other shapes."""
    if isinstance(want, float):
        assert got == pytest.approx(want, abs=1e-4)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same(g, w)
    else:
        assert got == want


@settings(max_examples=40)
@given(data=st.data(), calls=st.lists(CALLS, min_size=2, max_size=4), leavers=st.sets(st.integers(0, 3), max_size=2))
def test_calls_in_any_order_give_what_each_gives_alone(llm, data, calls, leavers):
    wants = [result_of(llm, call) for call in calls]
    readers = {i: read(llm, call) for i, call in enumerate(calls)}
    got: dict[int, Any] = {}
    while readers:
        i = data.draw(st.sampled_from(sorted(readers)))
        for result in readers[i]:
            if result is not None:
                got[i] = result
            if i in leavers or data.draw(st.booleans()):
                break
        if i in got or i in leavers:
            readers.pop(i).close()
    for i, result in got.items():
        assert_same(result, wants[i])
    assert not llm.engine.core.has_work


@settings(max_examples=15)
@given(calls=st.lists(CALLS, min_size=2, max_size=5))
def test_threads_get_what_each_call_gives_alone(llm, calls):
    wants = [result_of(llm, call) for call in calls]
    got: dict[int, Any] = {}
    begin = threading.Barrier(len(calls))

    def run(i: int) -> None:
        begin.wait()
        got[i] = result_of(llm, calls[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, want in enumerate(wants):
        assert_same(got[i], want)


def test_zipped_streams_and_calls_in_a_loop(llm):
    want_a, want_b = alone(llm, A), alone(llm, B)
    got_a, got_b = [], []
    for (*_, a, _), (*_, b, _) in zip(llm.stream(A, LONG), llm.stream(B, LONG), strict=True):
        got_a += a.token_ids
        got_b += b.token_ids
        assert alone(llm, B) == want_b
        assert len(llm.score([A + B])[0].logprobs) == 7
    assert (got_a, got_b) == (want_a, want_b)


# ---- what happens to one reader is nothing to another


def fail_at(count: int, error: type[BaseException]):
    def processor(ids, logits):
        if len(ids) == count:
            raise error("mine")
        return logits

    return SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logits_processors=[processor])


def broken_by_processor(llm):
    with pytest.raises(ValueError, match="mine"):
        llm.generate([B, B], [LONG, fail_at(2, ValueError)], use_tqdm=False)


def interrupted_in_a_step(llm):
    with pytest.raises(KeyboardInterrupt, match="mine"):
        llm.generate([B, B], [LONG, fail_at(3, KeyboardInterrupt)], use_tqdm=False)


def failing_in_the_model(llm):
    runner, calls = llm.engine.core.runner, []
    plain = runner.decoder.decode

    def decode(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("mine")
        return plain(*args)

    runner.decoder.decode = decode
    try:
        with pytest.raises(MemoryError, match="mine"):
            llm.generate([B], LONG, use_tqdm=False)
    finally:
        del runner.decoder.decode


def refused_half_way(llm):
    with pytest.raises(ParameterError, match="999"):
        llm.generate([B, [999]], LONG, use_tqdm=False)
    eos, llm.inputs.eos_token_ids = llm.inputs.eos_token_ids, []
    try:
        with pytest.raises(ParameterError, match="end token"):  # found by the core, when the first is in it
            llm.generate([B, B], [LONG, SamplingParams(structured_outputs=WISH)], use_tqdm=False)
    finally:
        llm.inputs.eos_token_ids = eos


def bad_grammar(llm):
    wrong = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(ParameterError):
        llm.generate([B, B], [LONG, wrong], use_tqdm=False)


def left_early(llm):
    for _ in llm.stream([B, A], LONG):
        break
    stream = llm.stream(B, LONG)
    next(stream)
    stream.close()


def dropped_in_another_thread(llm):
    streams = [llm.stream(B, LONG)]
    next(streams[0])
    thread = threading.Thread(target=lambda: (streams.clear(), gc.collect()))
    thread.start()
    thread.join()


def dropped_inside_a_step(llm):
    streams = [llm.stream(B, LONG)]
    next(streams[0])

    def processor(ids, logits):
        streams.clear()
        return logits

    params = SamplingParams(max_tokens=4, ignore_eos=True, logits_processors=[processor])
    assert len(alone(llm, B, params)) == 4 and not streams


def used_inside_a_step(llm):
    def processor(ids, logits):
        llm.generate([A], LONG, use_tqdm=False)

    with pytest.raises(HeadraceError, match="inside its own step"):
        llm.generate([B], SamplingParams(max_tokens=4, logits_processors=[processor]), use_tqdm=False)


TROUBLES = [
    broken_by_processor, interrupted_in_a_step, failing_in_the_model, refused_half_way, bad_grammar, left_early,
    dropped_in_another_thread, dropped_inside_a_step, used_inside_a_step,
]  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "extra", [{}, {"structured_outputs": WISH}, {"logprobs": 2, "repetition_penalty": 1.2, "n": 2}], ids=["plain", "grammar", "penalties"]
)
def test_a_stream_goes_on_whatever_happens_to_others(llm, trouble, extra):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=24, **extra)
    want = [(o.token_ids, o.logprobs and len(o.logprobs)) for o in llm.generate([A], params, use_tqdm=False)[0].outputs]
    stream = llm.stream(A, params)
    for _ in range(4):
        *_, output = next(stream)
    trouble(llm)
    next(stream)
    trouble(llm)
    ids_of(stream)
    assert [(o.token_ids, o.logprobs and len(o.logprobs)) for o in output.outputs] == want


def test_whose_processor_fails_learns_it_and_not_who_steps(llm):
    want = alone(llm, B)
    stream = llm.stream(A, fail_at(3, ValueError))
    assert len(next(stream)[2].token_ids) == 1
    assert alone(llm, B) == want  # steps the other one into its failure
    assert len(next(stream)[2].token_ids) == 1
    with pytest.raises(ValueError, match="mine"):
        ids_of(stream)


@pytest.mark.parametrize("calls", [*range(5, 400, 23), *range(401, 4000, 301)])
def test_ctrl_c_anywhere_leaves_the_others_whole(llm, calls):
    """The signal comes at a given one of the function calls that are made for a request."""
    want, want_b = alone(llm, A), alone(llm, B)
    stream = llm.stream(A, LONG)
    got = list(next(stream)[2].token_ids)
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += 1
        if count == calls:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        llm.generate([B, B], LONG, use_tqdm=False)
        pytest.fail("it had ended before")
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert alone(llm, B) == want_b
    assert got + ids_of(stream) == want


@pytest.mark.parametrize("options", [{"hold": True}, {"hold": False}, {}], ids=str)
def test_tokens_come_one_by_one_unless_they_are_to_be_held_and_all_are_counted(llm, options):
    params, told = llm.inputs.complete(LONG, len(A)), []
    with Reader(llm._shared) as reader:
        reader.add(EngineRequest(llm._shared.new_name(), packed(A), params, params.seed), "mine", **options)
        news = list(reader.news(lambda: told.append(reader.num_tokens())))
        assert reader.num_tokens() == LONG.max_tokens
    assert [token for _, n in news for token in n.token_ids] == alone(llm, A) and {tag for tag, _ in news} == {"mine"}
    assert len(news) == (1 if options.get("hold") else LONG.max_tokens)
    assert set(range(LONG.max_tokens - 1)) <= set(told)


# ---- the end


def test_a_closed_llm_ends_its_streams(model):
    llm = LLM(model, **OPTIONS)
    longer = SamplingParams(temperature=0.9, seed=5, max_tokens=100, ignore_eos=True)
    want = alone(llm, A, longer)
    stream, late = llm.stream(A, longer), llm.stream(A, LONG)
    got = list(next(stream)[2].token_ids)
    alone(llm, B)  # tokens of the stream wait for it now
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        for *_, delta, _ in stream:
            got += delta.token_ids
    assert 24 <= len(got) < 100 and got == want[: len(got)]
    for use in (lambda: next(late), lambda: llm.score([A]), lambda: llm.beam_search([A], BeamSearchParams(beam_width=2))):
        with pytest.raises(EngineDeadError, match="closed"):
            use()


def test_a_closed_llm_ends_what_runs_in_other_threads(model):
    llm, ends, began = LLM(model, **OPTIONS), [], threading.Event()

    def run() -> None:
        try:
            for _ in llm.stream(A, SamplingParams(max_tokens=120, ignore_eos=True)):
                began.set()
        except EngineDeadError as e:
            ends.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    llm.close()
    thread.join()
    assert len(ends) <= 1  # it may have had all before


def test_an_llm_cannot_be_closed_from_inside_its_step(llm):
    def processor(ids, logits):
        llm.close()

    with pytest.raises(HeadraceError, match="inside its own step"):
        llm.generate([B], SamplingParams(max_tokens=4, logits_processors=[processor]), use_tqdm=False)
    assert len(alone(llm, A)) == 24 and torch.is_tensor(llm.engine.core.runner.decoder.embedding)
