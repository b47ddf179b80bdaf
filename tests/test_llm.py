"""The offline API: text and figures of requests, against Transformers as the outside witness; bad input; life and death."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
import transformers

from headrace import LLM, SamplingParams
from headrace.beam_search import BeamSearchParams
from headrace.cli import main
from headrace.config import EngineConfig
from headrace.engine.build import Engine, choose_device, resolve
from headrace.engine.preparation import Preparation
from headrace.errors import CapacityError, EngineDeadError, HeadraceError, ParameterError
from headrace.native.runner import DoneStep
from headrace.worker.model_runner import StepHandle
from test_tokenizer_json import write_metaspace_tokenizer
from tiny_models import write_tiny, write_tokenizer

OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "debug_checks": True, "max_model_len": 128}
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPTS = ["The quick brown fox", "Where the water ends,", "日本語 🙂", "0123456789 0123456789 0123456789"]


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def witness(model):
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def test_greedy_text_equals_transformers(llm, model, witness):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=20, **GREEDY), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert output.prompt_token_ids == ids[0].tolist()
        want = witness.generate(ids, do_sample=False, max_new_tokens=20, min_new_tokens=20, pad_token_id=0)
        want = want[0, ids.shape[1] :].tolist()
        assert output.outputs[0].token_ids == want
        assert output.outputs[0].text == tokenizer.decode(want, skip_special_tokens=True)
        assert output.outputs[0].finish_reason == "length"
        assert output.finished and output.metrics.e2e >= output.metrics.ttft >= output.metrics.queue >= 0


def test_prompt_logprobs_equal_transformers(llm, witness):
    """Also with a warm prefix cache, which they must not read."""
    ids = [(37 * i) % 500 + 3 for i in range(60)]
    with torch.inference_mode():
        logprobs = witness(torch.tensor([ids])).logits[0].log_softmax(-1)
    params = SamplingParams(max_tokens=2, prompt_logprobs=3, logprobs=2, **GREEDY)
    for _ in range(2):
        output = llm.generate([ids], params, use_tqdm=False)[0]
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(ids)
        for i in range(1, len(ids)):
            entry = output.prompt_logprobs[i]
            row = logprobs[i - 1]
            assert entry[ids[i]].logprob == pytest.approx(row[ids[i]].item(), abs=1e-4)
            assert entry[ids[i]].rank == int((row > row[ids[i]]).sum()) + 1
            top = row.topk(3).indices.tolist()
            assert list(entry)[:1] == [ids[i]] and set(entry) == {ids[i], *top}
        chosen = output.outputs[0]
        first = chosen.logprobs[0][chosen.token_ids[0]]
        assert first.rank == 1
        assert first.logprob == pytest.approx(logprobs[-1].max().item(), abs=1e-4)
        assert chosen.cumulative_logprob == pytest.approx(
            sum(d[t].logprob for d, t in zip(chosen.logprobs, chosen.token_ids, strict=True))
        )


def test_prompt_logprobs_of_one_token(llm):
    output = llm.generate([[5]], SamplingParams(max_tokens=3, prompt_logprobs=1, **GREEDY), use_tqdm=False)[0]
    assert output.prompt_logprobs == [None]


def test_a_logprob_for_every_token_of_the_vocabulary(llm):
    output = llm.generate([[5, 6]], SamplingParams(max_tokens=1, logprobs=-1, **GREEDY), use_tqdm=False)[0].outputs[0]
    assert len(output.logprobs[0]) == llm.engine.model.vocab_size
    assert math.fsum(math.exp(entry.logprob) for entry in output.logprobs[0].values()) == pytest.approx(1, abs=1e-4)


def test_streamed_pieces_joined_are_the_text(llm):
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, seed=i, n=2, stop=["a", "the "], include_stop_str_in_output=i % 2 == 0)
        for i in range(4)
    ]
    whole = llm.generate(PROMPTS, params, use_tqdm=False)
    pieces: dict = {}
    for i, k, delta, _ in llm.stream(PROMPTS, params):
        pieces[i, k] = pieces.get((i, k), "") + delta.text
    for i, output in enumerate(whole):
        for k, sample in enumerate(output.outputs):
            assert pieces[i, k] == sample.text
            if isinstance(sample.stop_reason, str):
                assert sample.text.endswith(sample.stop_reason) is (i % 2 == 0)


def test_end_tokens(llm, model):
    """EOS ends a request and is not in its text; ignore_eos and min_tokens hold it off; stop ids name themselves."""
    prompt = [7, 8, 9]
    free = llm.generate([prompt], SamplingParams(max_tokens=12, **GREEDY), use_tqdm=False)[0].outputs[0]
    stop = free.token_ids[3]
    params = SamplingParams(max_tokens=12, stop_token_ids=[stop], **GREEDY)
    output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    end = free.token_ids.index(stop) + 1
    assert output.token_ids == free.token_ids[:end]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == llm.tokenizer.decode(free.token_ids[: end - 1])
    later = SamplingParams(max_tokens=12, min_tokens=9, stop_token_ids=[stop], **GREEDY)
    output = llm.generate([prompt], later, use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) >= 9 and stop not in output.token_ids[:8]
    by_text = SamplingParams(max_tokens=12, min_tokens=9, stop=list(free.text[:1]), **GREEDY)
    assert len(llm.generate([prompt], by_text, use_tqdm=False)[0].outputs[0].token_ids) >= 9
    eos = SamplingParams(max_tokens=50, temperature=0.0, logit_bias={2: 100.0})
    output = llm.generate([prompt], eos, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == [2] and output.finish_reason == "stop" and output.stop_reason is None and output.text == ""


def test_logits_processors_see_all_ids_and_decide(llm):
    """A processor that forces a sequence which depends on what was sampled before; its neighbours do not notice."""
    seen = []

    def count_up(ids, logits):
        seen.append(list(ids))
        forced = torch.full_like(logits, float("-inf"))
        forced[(ids[-1] + 1 if ids else 10)] = 0.0
        return forced

    plain = SamplingParams(max_tokens=8, **GREEDY)
    forced = SamplingParams(max_tokens=8, logits_processors=[count_up], **GREEDY)
    alone = llm.generate([[5, 6, 7]], plain, use_tqdm=False)[0].outputs[0].token_ids
    outputs = llm.generate([[5, 6, 7], [5, 6, 7]], [plain, forced], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == alone
    assert outputs[1].outputs[0].token_ids == list(range(10, 18))
    assert seen == [list(range(10, 10 + i)) for i in range(8)]


def test_bad_words_never_come(llm):
    free = llm.generate(["The quick"], SamplingParams(max_tokens=20, **GREEDY), use_tqdm=False)[0].outputs[0]
    word = llm.tokenizer.decode(free.token_ids[4:6])
    params = SamplingParams(max_tokens=20, bad_words=[word], **GREEDY)
    output = llm.generate(["The quick"], params, use_tqdm=False)[0].outputs[0]
    variants = [llm.tokenizer.encode(w, add_special_tokens=False) for w in (word, " " + word.lstrip())]
    for ids in variants:
        assert not any(output.token_ids[i : i + len(ids)] == ids for i in range(len(output.token_ids)))


def test_chat_renders_the_template_once(llm):
    messages = [{"role": "user", "content": "Where does the water go?"}]
    prompt = "<|user|>Where does the water go?</s>\n<|assistant|>"
    params = SamplingParams(max_tokens=6, **GREEDY)
    output = llm.chat(messages, params, use_tqdm=False)[0]
    assert output.prompt == prompt
    assert output.prompt_token_ids == llm.tokenizer.encode(prompt, add_special_tokens=False)
    for given, count in (([messages, messages], 2), (iter([messages, messages]), 2), (iter(messages), 1)):
        several = llm.chat(given, params, use_tqdm=False)
        assert [o.outputs[0].text for o in several] == [output.outputs[0].text] * count


def test_embeddings_equal_transformers(llm, witness):
    prompts = [[(11 * i) % 500 + 3 for i in range(n)] for n in (45, 1, 9)]
    for pooling in ("mean", "last"):
        found = llm.embed(prompts, pooling=pooling, use_tqdm=False)
        assert [o.prompt_token_ids for o in found] == prompts and len({o.request_id for o in found}) == 3
        for ids, output in zip(prompts, found, strict=True):
            with torch.inference_mode():
                hidden = witness.model(torch.tensor([ids])).last_hidden_state[0]
            want = hidden.mean(0) if pooling == "mean" else hidden[-1]
            assert output.finished and output.outputs.hidden_size == len(want)
            assert torch.allclose(torch.tensor(output.outputs.embedding), want / want.norm(), atol=1e-4)


def test_prompts_to_embed_have_every_form(llm):
    text = PROMPTS[0]
    ids = llm.tokenizer.encode(text)
    (one,) = llm.embed(text)
    forms = [text, ids, {"prompt": text, "cache_salt": "a"}, {"prompt_token_ids": ids}]
    for output in llm.embed(iter(forms), use_tqdm=False):
        assert output.prompt_token_ids == ids and output.outputs.embedding == pytest.approx(one.outputs.embedding, abs=1e-6)
    (cut,) = llm.embed(ids, truncate_prompt_tokens=2)
    assert cut.prompt_token_ids == ids[-2:] and cut.outputs != one.outputs and llm.embed([]) == []
    stream = llm.stream(ids, SamplingParams(max_tokens=8, **GREEDY))
    next(stream)
    assert llm.embed(text)[0].outputs.embedding == pytest.approx(one.outputs.embedding, abs=1e-6) and list(stream)
    for bad, field in (
        ({"prompts": text, "pooling": "cls"}, "pooling"), ({"prompts": [text, []]}, "prompt"), ({"prompts": 5}, "prompts"),
        ({"prompts": [[3] * 128]}, "prompt"), ({"prompts": text, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ):  # fmt: skip
        with pytest.raises(ParameterError) as caught:
            llm.embed(**bad)
        assert caught.value.field == field


def test_a_vector_that_is_not_finite_is_told(llm, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(HeadraceError, match="prompt 0 has no vector of finite numbers"):
        patched.setattr(np.linalg, "norm", lambda pooled: math.nan)
        llm.embed([[5], [5, 7]])
    assert llm.embed([5])[0].outputs.hidden_size == llm.engine.model.hidden_size


BAD_INPUT = [
    ({"prompts": [[]]}, "prompt"),
    ({"prompts": [[3, -1]]}, "prompt"),
    ({"prompts": [[3, 512]]}, "prompt"),
    ({"prompts": [[3, True]]}, "prompt"),
    ({"prompts": [[3, 2**70]]}, "prompt"),
    ({"prompts": [{"text": "a"}]}, "prompt"),
    ({"prompts": [{"prompt_token_ids": [3], "multi_modal_data": {}}]}, "multi_modal_data"),
    ({"prompts": [[3] * 128]}, "128 tokens"),
    ({"prompts": [[3] * 100000]}, "100000 tokens"),
    ({"prompts": [[3]], "params": {"logit_bias": {512: 1.0}}}, "logit_bias"),
    ({"prompts": [[3]], "params": {"stop_token_ids": [512]}}, "stop_token_ids"),
    ({"prompts": [[3]], "params": {"allowed_token_ids": [-5]}}, "allowed_token_ids"),
    ({"prompts": [[3] * 120], "params": {"min_tokens": 60, "max_tokens": None}}, "min_tokens"),
    ({"prompts": [[3] * 120], "params": {"max_tokens": 9}}, "max_tokens: got 9, allowed: at most 8"),
    ({"prompts": [[3] * 2], "params": {"max_tokens": 16 + 2**30}}, "max_tokens"),
]


@pytest.mark.parametrize("case", range(len(BAD_INPUT)))
def test_bad_input_is_named_and_the_next_request_is_right(llm, case):
    """The bad one comes in company: nothing of the call runs, and nothing stays behind."""
    given, named = BAD_INPUT[case]
    good = SamplingParams(max_tokens=4, **GREEDY)
    want = llm.generate([[5, 6, 7]], good, use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(HeadraceError, match=named):
        bad = SamplingParams(**given.get("params", {}))
        llm.generate([[5, 6, 7], *given["prompts"]], [good, *[bad] * len(given["prompts"])], use_tqdm=False)
    assert not llm.engine.core.has_work
    assert llm.generate([[5, 6, 7]], good, use_tqdm=False)[0].outputs[0].token_ids == want


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["processor", "forward", "result"])
def test_what_fails_within_a_step_leaves_nothing_behind(llm, monkeypatch, error, at):
    want = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, **GREEDY), use_tqdm=False)[0].outputs[0].token_ids
    calls = []

    def fail(*_):
        calls.append(at)
        if len(calls) == 4:
            raise error("mine")

    def failing(function):
        return lambda *args: fail() or function(*args)

    class Handle(StepHandle):
        result = failing(StepHandle.result)

    params = [SamplingParams(max_tokens=8, **GREEDY), SamplingParams(max_tokens=8, prompt_logprobs=1)]
    with monkeypatch.context() as patch:
        if at == "forward":
            patch.setattr(llm.engine.core.runner, "launch", failing(llm.engine.core.runner.launch))
        elif at == "result":
            patch.setattr("headrace.worker.model_runner.StepHandle", Handle)
            patch.setattr(DoneStep, "result", failing(DoneStep.result))
        else:
            params[0].logits_processors = [lambda ids, logits: fail() or logits]
        with pytest.raises(error, match="mine"):
            llm.generate([[5, 6, 7], list(range(4, 40))], params, use_tqdm=False)
    core = llm.engine.core
    assert not core.has_work and core.scheduler.kv_usage == 0 and not core._outputs.prompts.logprobs
    core.scheduler.check()
    assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, **GREEDY), use_tqdm=False)[0].outputs[0].token_ids == want


def test_priorities_need_their_policy(llm):
    with pytest.raises(ParameterError, match="priority"):
        llm.generate([[5, 6]], SamplingParams(max_tokens=1), priority=[1], use_tqdm=False)
    assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=1), priority=[0], use_tqdm=False)) == 1


def test_truncation_keeps_the_end(llm):
    ids = list(range(3, 103))
    output = llm.generate([ids], SamplingParams(max_tokens=2, truncate_prompt_tokens=10, **GREEDY), use_tqdm=False)[0]
    assert output.prompt_token_ids == ids[-10:]
    output = llm.generate([ids * 3], SamplingParams(max_tokens=8, truncate_prompt_tokens=-1, **GREEDY), use_tqdm=False)[0]
    assert output.prompt_token_ids == (ids * 3)[-120:]
    assert len(output.outputs[0].token_ids) == 8


def test_no_max_tokens_runs_to_the_context(llm):
    output = llm.generate([[5] * 100], SamplingParams(max_tokens=None, **GREEDY), use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 28 and output.finish_reason == "length"


def test_a_max_tokens_that_nobody_asked_for_is_what_fits(llm):
    for prompt, params in itertools.product(([5] * 120, "0" * 120), (None, SamplingParams(), SamplingParams(ignore_eos=True))):
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        room = 128 - len(output.prompt_token_ids)
        assert 0 < len(output.outputs[0].token_ids) <= min(16, room)
    assert len(output.outputs[0].token_ids) == min(16, room)
    assert SamplingParams().max_tokens == 16
    with pytest.raises(ParameterError, match="at most 8"):
        llm.generate([[5] * 120], SamplingParams(max_tokens=16), use_tqdm=False)


def test_the_command_line_refuses_what_does_not_fit(model, capsys):
    command = ["generate", "--model", model, "--device", "cpu", "--max-model-len", "64", "--prompt", "a b"]
    assert main([*command, "--max-tokens", "64"]) == 1
    written = capsys.readouterr()
    assert not written.out and "--max-tokens: got 64" in written.err and "context of 64" in written.err
    assert main(command) == 0 and capsys.readouterr().out  # 256, or what fits


def test_the_prefix_cache_can_be_emptied(llm):
    ids, params = list(range(3, 83)), SamplingParams(max_tokens=2, **GREEDY)
    cached = []
    for reset in (True, False, True):
        if reset:
            llm.reset_prefix_cache()
        cached.append(llm.generate([ids], params, use_tqdm=False)[0].num_cached_tokens)
    assert cached[0] == cached[2] == 0 < cached[1]


def test_an_abandoned_stream_leaves_nothing_behind(llm):
    stream = llm.stream([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=50, **GREEDY))
    for _ in range(6):
        next(stream)
    stream.close()
    core = llm.engine.core
    assert not core.has_work and core.scheduler.kv_usage == 0.0


def test_two_engines_live_in_one_process_and_die(tmp_path, llm):
    other = LLM(str(write_tiny("qwen2", tmp_path / "other", seed=5)), **OPTIONS)
    params = SamplingParams(max_tokens=6, **GREEDY)
    first = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    second = other.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert first != second
    assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids == first
    weights = weakref.ref(other.engine.core.runner.decoder)
    other.close()
    gc.collect()
    assert weights() is None
    with pytest.raises(EngineDeadError):
        other.generate([[5]], params)


NO_PROMPTS = [None, 5, b"hi", [None], [5.5], [b"hi"], {"prompt_token_ids": 5}, {"prompt_token_ids": b"hi"}]


@pytest.mark.parametrize("prompts", NO_PROMPTS, ids=repr)
def test_what_is_no_prompt_is_told(llm, prompts):
    with pytest.raises(ParameterError, match=r"^prompt"):
        llm.generate(prompts)


def test_prompts_of_any_iterable_and_ids_of_any_array(llm):
    params = SamplingParams(max_tokens=3, temperature=0)
    want = [r.outputs[0].token_ids for r in llm.generate([[5, 6], [7]], params)]
    for given in (([5, 6], [7]), iter([[5, 6], [7]]), [{"prompt_token_ids": np.array([5, 6])}, {"prompt_token_ids": torch.tensor([7])}]):
        assert [r.outputs[0].token_ids for r in llm.generate(given, params)] == want
    for wrong in ({"max_tokens": 3}, [5], [None], [{}], 5):
        with pytest.raises(ParameterError, match=r"^sampling_params: got"):
            llm.generate([5], wrong)
    for wrong in ({"role": "user", "content": "one message, not a list"}, None, 5, "Hello"):
        with pytest.raises(ParameterError, match=r"^messages") as told:
            llm.chat(wrong)
        assert told.value.value is wrong


def test_unknown_options_are_refused(model):
    with pytest.raises(ParameterError, match="frobnicate"):
        LLM(model, frobnicate=1)
    with pytest.raises(ParameterError, match=r"max_modl_len: got 5, .*did you mean max_model_len\?"):
        LLM(max_modl_len=5)
    with pytest.raises(ParameterError, match="max_num_seqs"):
        LLM(model, max_num_seqs=0)
    with pytest.raises(ParameterError, match="max_model_len"):
        LLM(model, **OPTIONS | {"max_model_len": 100000})


def test_nan_logits_fail_their_request_alone(llm):
    def poison(ids, logits):
        return logits * float("nan") if len(ids) == 2 else logits

    good = SamplingParams(max_tokens=6, **GREEDY)
    want = llm.generate([[5, 6, 7]], good, use_tqdm=False)[0].outputs[0].token_ids
    bad = SamplingParams(max_tokens=6, logits_processors=[poison], **GREEDY)
    outputs = llm.generate([[5, 6, 7], [5, 6, 7]], [bad, good], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error" and outputs[0].outputs[0].error.endswith("NaN logits for this request")
    assert outputs[1].outputs[0].token_ids == want
    bad.allowed_token_ids = [5, 6, 7]  # whose fault it is not
    assert llm.generate([[5, 6, 7]], bad, use_tqdm=False)[0].outputs[0].error.endswith("NaN logits for this request")


@pytest.mark.parametrize("there", [True, False])
def test_the_device_is_the_best_there_is_or_the_one_that_is_named(there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type == ("cuda" if there else "cpu")
    if there:
        assert choose_device("cuda").type == "cuda"
    else:
        with pytest.raises(ParameterError, match="finds no CUDA device"):
            choose_device("cuda")


def test_a_cache_of_few_blocks_is_one_and_of_one_token_is_none(llm):
    def limits(num_kv_blocks, block_size):
        config = EngineConfig(model="m", num_kv_blocks=num_kv_blocks, block_size=block_size)
        return resolve(config, llm.engine.model, torch.device("cpu"))

    assert limits(1, 16).num_blocks == 1 and limits(2, 1).num_blocks == 2
    with pytest.raises(CapacityError, match="hold no sequence"):
        limits(1, 1)


NOWHERE = 450  # a row of the model that has no token
WAYS_IN = {
    "prompt": lambda llm: llm.generate([[5, NOWHERE]], SamplingParams(max_tokens=1)),
    "stream": lambda llm: list(llm.stream([{"prompt_token_ids": [NOWHERE]}])),
    "score": lambda llm: llm.score([[5, NOWHERE]]),
    "embed": lambda llm: llm.embed([[5, NOWHERE]]),
    "beam search": lambda llm: llm.beam_search([[NOWHERE]], BeamSearchParams(beam_width=2)),
    "stop_token_ids": lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[5, NOWHERE])),
    "allowed_token_ids": lambda llm: llm.generate("a", SamplingParams(allowed_token_ids=[5, NOWHERE])),
    "logit_bias": lambda llm: llm.generate("a", SamplingParams(logit_bias={NOWHERE: 1.0})),
}


def test_ids_without_a_token_are_refused_wherever_they_come_in(model, tmp_path):
    """Without a tokenizer only the model's rows count; bad words of a tokenizer larger than the model are none."""
    write_tokenizer(tmp_path / "few", 400)
    with LLM(model, tokenizer=str(tmp_path / "few"), **OPTIONS) as llm:
        for way, use in WAYS_IN.items():
            with pytest.raises(ParameterError, match=rf"got {NOWHERE}, allowed: token ids in \[0, 399\]") as caught:
                use(llm)
            assert caught.value.field == (way if "_" in way else "prompt")
    with LLM(model, skip_tokenizer_init=True, **OPTIONS) as llm:
        assert llm.generate([[NOWHERE]], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished
    write_tokenizer(tmp_path / "many", 520)
    with LLM(model, tokenizer=str(tmp_path / "many"), **OPTIONS) as llm:
        word = llm.tokenizer.id_to_piece(515)
        params = SamplingParams(max_tokens=2, bad_words=[word])
        assert llm.generate("a", params, use_tqdm=False)[0].outputs[0].finish_reason in ("length", "stop")
        with pytest.raises(ParameterError, match="got 515"):
            llm.generate(word, SamplingParams(max_tokens=1))


def test_a_fork_of_a_process_that_made_an_engine_is_told_so(llm, model):
    """In a child neither the parent's LLM nor one of its own can run, and nothing hangs."""
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=8, **GREEDY))
    next(stream)
    uses = [
        lambda: LLM(model, **OPTIONS), lambda: llm.generate("a", use_tqdm=False), lambda: next(stream), lambda: llm.score("a b"),
        lambda: llm.beam_search("a", BeamSearchParams(beam_width=2)), lambda: llm.embed("a"), llm.reset_prefix_cache,
    ]  # fmt: skip

    def child(pipe) -> None:
        said = []
        for use in uses:
            try:
                use()
                said.append("nothing")
            except Exception as e:
                said.append(f"{type(e).__name__}: {e}")
        stream.close()
        llm.close()  # leaves the parent's alone
        pipe.send(said)

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there,))
    process.start()
    there.close()
    try:
        said = here.recv()
    finally:
        process.join()
    assert process.exitcode == 0
    assert all(s.startswith("EngineDeadError") and f"fork of process {os.getpid()}" in s and "spawn" in s for s in said), said
    assert sum(len(delta.token_ids) for *_, delta, _ in stream) == 7


LOADS = """
import sys
from headrace import LLM, SamplingParams
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
def load():
    return LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, device="cpu", dtype=sys.argv[2], num_kv_blocks=8)
sizes = []
for _ in range(3):
    with load() as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        sizes.append(resident())
    sizes.append(resident())
print(*sizes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_closed_engines_leave_no_memory_behind(tmp_path):
    """Weights of 160 MiB in float32 in matrices of 2 to 8 MiB; bfloat16 is packed anew, and what it is packed from must go."""
    shape = {"hidden_size": 480, "intermediate_size": 1920, "num_hidden_layers": 12}
    model = str(write_tiny("llama", tmp_path / "tiny", **shape))
    for dtype in ("float32", "bfloat16"):
        run = subprocess.run([sys.executable, "-c", LOADS, model, dtype], capture_output=True, text=True, check=True)
        sizes = list(map(int, run.stdout.split()))
        loaded, closed = sizes[::2], sizes[1::2]
        assert loaded[0] - closed[0] > 60, "there was nothing to give back"
        assert max(closed) - closed[0] < 40 and max(loaded) - loaded[0] < 60, sizes


def test_the_first_word_of_a_completion_keeps_its_space(model, tmp_path):
    """With a SentencePiece-like tokenizer, whole, streamed, with logprobs and in beams: the text is what it adds to the
    prompt's."""
    write_metaspace_tokenizer(tmp_path / "spm")
    with LLM(model, tokenizer=str(tmp_path / "spm"), **OPTIONS) as llm:
        world = llm.tokenizer.encode(" world", add_special_tokens=False)[-1]
        forced = {"allowed_token_ids": [world], "max_tokens": 2, "ignore_eos": True}
        for params in (SamplingParams(**forced, n=2), SamplingParams(**forced, logprobs=1), SamplingParams(**forced, stop="x")):
            for sample in llm.generate("hello", params, use_tqdm=False)[0].outputs:
                assert sample.text == " world world"
        assert "".join(d.text for _, _, d, _ in llm.stream("hello", SamplingParams(**forced))) == " world world"
        ids = llm.tokenizer.encode("hello")
        for sequence in llm.beam_search("hello", BeamSearchParams(beam_width=3, max_tokens=4))[0].sequences:
            shown = sequence.token_ids[:-1] if sequence.finish_reason == "stop" else sequence.token_ids
            assert "hello" + sequence.text == llm.tokenizer.decode(ids + shown)


@pytest.mark.parametrize(("of", "name", "error"), [(Preparation, "finish", KeyboardInterrupt), (Engine, "load_adapters", ValueError)])
def test_an_engine_that_does_not_get_ready_is_closed(model, monkeypatch, of, name, error):
    """Nothing of it waits for the collector: not its compiling process, not its ranks."""

    def fails(*args):
        raise error

    closed, close_engine, close_preparation = [], Engine.close, Preparation.close
    monkeypatch.setattr(of, name, fails)
    monkeypatch.setattr(Engine, "close", lambda self: (closed.append("engine"), close_engine(self)))
    monkeypatch.setattr(Preparation, "close", lambda self: (closed.append("preparation"), close_preparation(self)))
    with pytest.raises(error):
        LLM(model, **OPTIONS)
    assert closed == ["preparation", "engine"]


def test_a_stop_string_that_is_a_special_token(llm):
    """One more stop id, whatever the text shows; ignore_eos leaves it alone, min_tokens holds it off."""
    special = llm.tokenizer.special_texts["<|user|>"]
    params = {"logit_bias": {special: 100.0}, "max_tokens": 9, "stop": ["never", "<|user|>"], "temperature": 0.0, "ignore_eos": True}
    for more, text in (({}, ""), ({"n": 2}, ""), ({"include_stop_str_in_output": True}, "<|user|>"), ({"skip_special_tokens": False}, "")):
        for sample in llm.generate("The", SamplingParams(**params | more), use_tqdm=False)[0].outputs:
            assert (sample.finish_reason, sample.stop_reason, sample.text) == ("stop", "<|user|>", text)
            assert sample.token_ids == [special]
        parts = [d for _, k, d, _ in llm.stream("The", SamplingParams(**params | more)) if k == 0]
        assert "".join(d.text for d in parts) == text and parts[-1].stop_reason == "<|user|>"
    later = llm.generate("The", SamplingParams(**params, min_tokens=4), use_tqdm=False)[0].outputs[0]
    assert len(later.token_ids) == 5 and later.token_ids[-1] == special
    end = SamplingParams(max_tokens=9, stop=["</s>"], logit_bias={2: 100.0}, temperature=0.0)
    assert llm.generate("The", end, use_tqdm=False)[0].outputs[0].stop_reason == "</s>"
    among = SamplingParams(**params | {"stop": ["<|user|><|user|>"]})
    assert llm.generate("The", among, use_tqdm=False)[0].outputs[0].token_ids == [special] * 2
