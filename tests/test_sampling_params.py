"""Every sampling parameter: what is refused, with the field named, and what is accepted at the edges."""

import math
import pickle

import msgspec
import pytest

from headrace.api.protocol import ChatRequest, CompletionRequest
from headrace.errors import ParameterError
from headrace.sampling.checks import check_vocabulary
from headrace.sampling.foreign import FOREIGN
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import StructuredOutputsParams

NAN, INF = math.nan, math.inf
NO_FLOAT = [NAN, INF, -INF, "1", True, [], 10**400]
NO_INT = [NAN, INF, 1.0, 1.5, "1", True, [], 10**400, -(10**400), 10**5000]
BAD = {
    "n": [*NO_INT, None, 0, -1, 129, 10**6],
    "temperature": [*NO_FLOAT, -1e-9, -1, 2.0001, 1e308],
    "top_p": [*NO_FLOAT, 0, 0.0, -0.1, 1.0001],
    "top_k": [*NO_INT, -2, 2**31],
    "min_p": [*NO_FLOAT, -0.01, 1.01],
    "presence_penalty": [*NO_FLOAT, None, -2.01, 2.01],
    "frequency_penalty": [*NO_FLOAT, None, -2.01, 2.01],
    "repetition_penalty": [*NO_FLOAT, 0, -1.0, 1e-7, 1e7],
    "logit_bias": [3, [1, 2], "x", {"x": 1.0}, {1.5: 1.0}, {True: 1.0}, {-1: 1.0}, {"-1": 1.0}, {2**31: 1.0},
                   {"1_0": 1.0}, {"9" * 5000: 1.0}, {5: NAN}, {5: 100.1}, {5: -INF}, {5: "1"}, {5: True}, {5: None},
                   {5: 1.0, "5": 2.0}, {"5": 1.0, "05": 1.0}],
    "allowed_token_ids": [[], 3, "12", [1.0], [-1], ["1"], [True], [2**31], [None], {1: 2}],
    "bad_words": ["word", [""], [1], [None], ["a"] * 1025, ["a" * 4097], 3],
    "min_tokens": [*NO_INT, None, -1, 2**31],
    "max_tokens": [*NO_INT, 0, -1, 2**31],
    "stop": [3, [3], [""], "", [None], ["a"] * 65, ["a" * 4097], {"a": 1}],
    "stop_token_ids": [3, "12", [1.0], [-1], [True], [2**31], [None]],
    "include_stop_str_in_output": [None, 0, 1, "true", NAN],
    "ignore_eos": [None, 0, "false"],
    "seed": [*NO_INT, 2**63, -(2**63) - 1],
    "logprobs": [*NO_INT, -2, 101],
    "prompt_logprobs": [*NO_INT, -1, 101],
    "skip_special_tokens": [None, 1, "yes"],
    "spaces_between_special_tokens": [None, 1],
    "detokenize": [None, 0],
    "truncate_prompt_tokens": [*NO_INT, 0, -2],
    "logits_processors": [len, [3], "x", {}],
    "structured_outputs": [3, "json", {"json": {}}],
    "lora": [None, 1, ["a"]],
}  # fmt: skip
GOOD = {
    "n": [1, 128],
    "temperature": [None, 0, 0.0, 1e-9, 1, 2],
    "top_p": [None, 1, 1.0, 1e-9],
    "top_k": [None, -1, 0, 1, 2**31 - 1],
    "min_p": [None, 0, 1],
    "presence_penalty": [-2, 2.0, 0],
    "frequency_penalty": [-2, 2.0, 0],
    "repetition_penalty": [None, 1e-6, 1, 5.0],
    "logit_bias": [None, {}, {0: -100, "7": 100.0}],
    "allowed_token_ids": [None, [0], (3, 4)],
    "bad_words": [None, [], ["a b"]],
    "min_tokens": [0, 16],
    "max_tokens": [None, 1, 2**31 - 1],
    "stop": [None, [], "x", ["x", "yy"]],
    "stop_token_ids": [None, [], [0]],
    "seed": [None, 0, -1, 2**63 - 1, -(2**63)],
    "logprobs": [None, 0, 100, -1],
    "prompt_logprobs": [None, 0, 100],
    "truncate_prompt_tokens": [None, -1, 1],
    "logits_processors": [None, [], [lambda ids, row: row]],
    "structured_outputs": [None, StructuredOutputsParams(regex="a")],
    "lora": ["", "name"],
}


def test_a_field_of_another_engine_that_is_none_asks_for_nothing():
    assert SamplingParams(guided_decoding=None, best_of=None, max_tokens=3) == SamplingParams(max_tokens=3)
    with pytest.raises(ParameterError, match="best_of"):
        SamplingParams(guided_decoding=None, best_of=2)
    with pytest.raises(TypeError):
        SamplingParams(frobnicate=None)


def test_spaces_between_special_tokens_are_refused_where_they_would_show():
    with pytest.raises(ParameterError, match="spaces_between_special_tokens: got True, allowed: false"):
        SamplingParams(spaces_between_special_tokens=True, skip_special_tokens=False)
    SamplingParams(spaces_between_special_tokens=True)


def label(value) -> str:
    return "int" if isinstance(value, int) else str(value)[:20]


@pytest.mark.parametrize("field, value", [(f, v) for f, values in BAD.items() for v in values], ids=label)
def test_refused_by_name(field, value):
    with pytest.raises(ParameterError) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field
    assert str(error.value).startswith(field) and len(str(error.value)) < 1000
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value) if field != "logits_processors" else True


@pytest.mark.parametrize("field, value", [(f, v) for f, values in GOOD.items() for v in values], ids=label)
def test_accepted_at_the_edges(field, value):
    SamplingParams(**{field: value})


def test_every_field_a_caller_may_set_is_in_the_tables():
    internal = {"eos_token_ids", "bad_word_ids", "sample_index"}
    assert set(BAD) == set(SamplingParams.__struct_fields__) - internal


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_beyond_the_vocabulary(field):
    check_vocabulary(SamplingParams(**{field: [99]}), 100)
    with pytest.raises(ParameterError) as error:
        check_vocabulary(SamplingParams(**{field: [3, 100]}), 100)
    assert (error.value.field, error.value.value) == (field, 100)


def test_bias_beyond_the_vocabulary():
    params = SamplingParams(logit_bias={"100": 1.0})
    assert params.logit_bias == {100: 1.0}
    with pytest.raises(ParameterError, match="logit_bias"):
        check_vocabulary(params, 100)


def test_parameters_that_exclude_each_other():
    for kwargs, field in [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"structured_outputs": StructuredOutputsParams(regex="a"), "ignore_eos": True}, "ignore_eos"),
    ]:
        with pytest.raises(ParameterError) as error:
            SamplingParams(**kwargs)
        assert error.value.field == field
    for kwargs in (
        {"allowed_token_ids": [7], "min_tokens": 1, "stop_token_ids": [7]},
        {"allowed_token_ids": [2, 7], "min_tokens": 1, "stop_token_ids": [7], "eos_token_ids": [2]},
        {"allowed_token_ids": [7], "bad_word_ids": [[7], [1, 2]]},
    ):
        with pytest.raises(ParameterError, match="allowed_token_ids"):
            check_vocabulary(SamplingParams(**kwargs), 10)
    most = {"stop_token_ids": list(range(8)), "eos_token_ids": [8], "min_tokens": 1}
    for kwargs, field in ((most, "min_tokens"), ({"bad_word_ids": [[i] for i in range(9)]}, "bad_words")):
        check_vocabulary(SamplingParams(**kwargs), 10)
        for sizes in ((9,), (10, 9)):  # ten rows, of which nine are tokens
            with pytest.raises(ParameterError, match=field):
                check_vocabulary(SamplingParams(**kwargs), *sizes)
    check_vocabulary(SamplingParams(**most | {"min_tokens": 0}), 9)
    check_vocabulary(SamplingParams(allowed_token_ids=[2], min_tokens=1, eos_token_ids=[2], ignore_eos=True), 10)
    check_vocabulary(SamplingParams(allowed_token_ids=[2], bad_word_ids=[[2, 2]]), 10)


def test_an_explicit_value_wins_over_the_checkpoints_even_when_it_is_zero():
    defaults = {
        "temperature": 0.6,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": None,
        "repetition_penalty": 1.1,
        "do_sample": True,
    }
    assert SamplingParams(temperature=0, top_k=0, top_p=1.0).resolved(defaults) == SamplingParams(
        temperature=0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.1
    )
    silent = SamplingParams().resolved({})
    assert (silent.temperature, silent.top_k, silent.top_p, silent.min_p, silent.repetition_penalty) == (
        1.0,
        0,
        1.0,
        0.0,
        1.0,
    )
    assert silent.sample_index == 0, "alone, it is the first of its request"
    assert SamplingParams().resolved(defaults).top_k == 50
    with pytest.raises(ParameterError, match="top_p"):
        SamplingParams().resolved({"top_p": 7})


def test_they_cross_the_process_border():
    params = SamplingParams(temperature=0.5, stop=["a", "b"], logit_bias={3: 1.5}, seed=-5, logprobs=0, top_k=-1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("max_new_tokens", "max_tokens"), ("n_predict", "max_tokens"), ("num_predict", "max_tokens"), ("repeat_penalty", "repetition_penalty"),
     ("stop_sequences", "stop"), ("logits_bias", "logit_bias"), ("guided_json", '{"json": ...}'), ("guided_regex", '{"regex": ...}'),
     ("grammar", '{"grammar": ...}'), ("json_schema", '{"json": ...}'), ("num_return_sequences", "use n"), ("do_sample", "temperature")],
)  # fmt: skip
def test_fields_of_other_engines_name_ours(theirs, ours):
    with pytest.raises(ParameterError) as error:
        SamplingParams(**{theirs: 1})
    assert error.value.field == theirs and ours in error.value.allowed


def test_whatever_is_advised_exists():
    for theirs, (ours, _) in FOREIGN.items():
        known = {*SamplingParams.__struct_fields__, *CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
        assert not ours or ours in known, theirs
        assert theirs not in SamplingParams.__struct_fields__
    with pytest.raises(TypeError, match="nonsense"):
        SamplingParams(nonsense=1)
