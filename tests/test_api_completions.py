"""/v1/completions and /generate: streamed equals whole equals what the engine made; echo, logprobs, stops, usage."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from answers import error_of, joined
from fake_engine import BOS, EOS, ByteTokenizer, FakeEngine, random_text
from headrace.model.tokenizer import Tokenizer
from headrace.sampling.params import SamplingParams
from server_driver import Api
from test_text_stream import begins_by_definition
from test_tokenizer_json import write_metaspace_tokenizer

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def api():
    return Api()


def expected(prompt: str, seed: int, index: int) -> str:
    return random_text([BOS, *prompt.encode()], SamplingParams(seed=seed, sample_index=index))


@settings(max_examples=60)
@given(
    prompts=st.lists(st.text(max_size=8).filter(lambda s: "<" not in s), min_size=1, max_size=3),
    n=st.integers(1, 3),
    seed=st.integers(0, 1000),
    stop=st.sampled_from([None, "😀", ["b", "the x"], "漢字", [], ["\n"]]),
    include=st.booleans(),
    max_tokens=st.integers(1, 200),
    logprobs=st.sampled_from([None, 0, 1, 5]),
    echo=st.booleans(),
    as_ids=st.booleans(),
)
def test_streamed_equals_whole(api, prompts, n, seed, stop, include, max_tokens, logprobs, echo, as_ids):
    body = {
        "prompt": prompts, "n": n, "seed": seed, "stop": stop, "include_stop_str_in_output": include, "echo": echo,
        "max_tokens": max_tokens, "logprobs": logprobs, "return_token_ids": True, "return_tokens_as_token_ids": as_ids,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    events = api.events(PATH, body)
    assert all(e["object"] == "text_completion" for e in events)
    usage = events.pop()
    assert usage["choices"] == [] and all("usage" not in e for e in events)
    streamed = joined(events)
    shown = {c["index"]: c["prompt_token_ids"] for e in events for c in e["choices"] if "prompt_token_ids" in c}
    del body["stream_options"]
    whole = api.ok(PATH, body)
    assert [shown[c["index"]] for c in whole["choices"]] == [c["prompt_token_ids"] for c in whole["choices"]]
    assert usage["usage"] == whole["usage"]
    assert len(streamed) == len(whole["choices"]) == len(prompts) * n
    for s, w in zip(streamed, whole["choices"], strict=True):
        assert s["content"] == w["text"]
        for name in ("index", "finish_reason", "logprobs", "token_ids"):
            assert s[name] == w[name]
        assert s["stop_reason"] == w.get("stop_reason")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000), stops=st.lists(st.sampled_from(["b", "😀", "the x", "字a", "c c"]), max_size=3),
    include=st.booleans(), max_tokens=st.integers(1, 200),
)  # fmt: skip
def test_text_is_cut_at_the_first_stop(api, seed, stops, include, max_tokens):
    body = {"prompt": "p", "seed": seed, "stop": stops, "include_stop_str_in_output": include, "max_tokens": max_tokens}
    whole = api.ok(PATH, {**body, "return_token_ids": True})
    choice = whole["choices"][0]
    made = [*expected("p", seed, 0).encode(), EOS]
    text = bytes(made[: min(max_tokens, len(made) - 1)]).decode("utf-8", "replace")
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if ends:
        end, _, stop = min(ends)
        assert choice["text"] == text[: end if include else end - len(stop)]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
        count = len(text[:end].encode())
    else:
        assert choice["text"] == text
        assert choice["finish_reason"] == ("stop" if max_tokens >= len(made) else "length")
        assert "stop_reason" not in choice
        count = min(max_tokens, len(made))
    assert whole["usage"]["completion_tokens"] == count == len(choice["token_ids"])
    assert whole["usage"]["total_tokens"] == count + 2


def test_choices_are_ordered_by_prompt_and_sample(api):
    whole = api.ok(PATH, {"prompt": ["a", "b"], "n": 3, "seed": 5, "max_tokens": 500})
    assert [c["index"] for c in whole["choices"]] == list(range(6))
    for i, prompt in enumerate("ab"):
        for k in range(3):
            assert whole["choices"][3 * i + k]["text"] == expected(prompt, 5, k)
    assert whole["usage"]["prompt_tokens"] == 4  # each prompt once, with its bos
    lengths = [len(expected(p, 5, k).encode()) + 1 for p in "ab" for k in range(3)]
    assert whole["usage"]["completion_tokens"] == sum(lengths)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_prompts_as_ids(api):
    ids = [BOS, 104, 105]
    texts = {
        c["text"]
        for prompt in ("hi", ["hi"], ids, [ids])
        for c in api.ok(PATH, {"prompt": prompt, "seed": 1, "max_tokens": 100})["choices"]
    }
    assert texts == {expected("hi", 1, 0)}


@pytest.mark.parametrize("prompt", [[], [[]], ["a", [1]], [1, "a"], [[1], "a"], [True], [1.5], [None], {}, 5, None, [-1], [300], [[1], [2, 99999]]])
def test_bad_prompts(api, prompt):
    error = error_of(response := api.post(PATH, {"prompt": prompt}))
    assert response.status_code == 400 and error["param"].startswith("prompt")


def test_default_is_sixteen_tokens(api):
    api.engine.script = lambda ids, params: "x" * 100
    try:
        whole = api.ok(PATH, {"prompt": "hi"})
    finally:
        api.engine.script = random_text
    assert whole["choices"][0]["text"] == "x" * 16
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["logprobs"] is None


def test_scoring(api):
    """echo with max_tokens 0: the prompt with its logprobs, nothing sampled."""
    body = {"prompt": "hü", "max_tokens": 0, "echo": True, "logprobs": 1}
    whole = api.ok(PATH, body)
    choice = whole["choices"][0]
    assert choice["text"] == "hü" and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:2] == ["<bos>", "h"] and len(logprobs["tokens"]) == 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(p <= 0 for p in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 0
    assert joined(api.events(PATH, body))[0]["logprobs"] == logprobs
    assert error_of(api.post(PATH, {**body, "echo": False}))["param"] == "max_tokens"


@pytest.mark.parametrize("top", [0, 1, 3])
def test_logprobs_hold_the_sampled_token(api, top):
    logprobs = api.ok(PATH, {"prompt": "hi", "seed": 3, "logprobs": top, "max_tokens": 50})["choices"][0]["logprobs"]
    assert len({len(v) for v in logprobs.values()}) == 1
    for token, value, entries in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert token in entries and len(entries) <= top + 1
        if token != "\ufffd":  # several tokens are shown as that
            assert entries[token] == value
        assert list(entries.values()) == sorted(entries.values(), reverse=True)


def test_offsets_point_into_the_text(api):
    choice = api.ok(PATH, {"prompt": "hi", "seed": 9, "logprobs": 0, "max_tokens": 300})["choices"][0]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if token not in ("\ufffd", "<eos>"):
            assert choice["text"].startswith(token, offset)


class WordEngine(FakeEngine):
    """Samples the ids that it is given."""

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer):
        super().__init__(tokenizer=tokenizer)  # type: ignore[arg-type]
        self.model_config = dataclasses.replace(self.model_config, vocab_size=tokenizer.vocab_size)
        self.ids: list[int] = []

    def sample(self, prompt_ids, params):
        for n, token in enumerate(self.ids, 1):
            if token in (params.stop_token_ids or ()):
                return self.ids[:n], "stop", token
        return self.ids, "length", None


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = write_metaspace_tokenizer(tmp_path_factory.mktemp("words") / "tokenizer")
    return Api(WordEngine(Tokenizer.from_directory(path)))


@pytest.fixture(scope="module")
def bytes_api():
    return Api(WordEngine(ByteTokenizer()))


WORDS = st.lists(st.sampled_from(["hello", " ", "  ", "world", "é", "日", "🙂", "\n", "</s>", "x", "wor"]), max_size=6).map("".join)


@settings(max_examples=150)
@given(WORDS, st.data(), st.booleans(), st.booleans(), st.booleans())
def test_tokens_and_offsets_are_those_of_the_text_that_is_sent(words, prompt, data, echo, special, skip):
    """Prompts with and without a first space, special tokens and bytes; what follows begins with any token."""
    tokenizer = words.engine.tokenizer
    plain = sorted(set(range(3, tokenizer.vocab_size)) - set(tokenizer.byte_fallback))
    words.engine.ids = data.draw(st.lists(st.sampled_from(plain), min_size=1, max_size=5))
    given = tokenizer.encode(prompt, add_special_tokens=special)
    assume(given)
    body = {
        "prompt": data.draw(st.sampled_from([prompt, given])) or given, "max_tokens": len(words.engine.ids), "logprobs": 2,
        "echo": echo, "add_special_tokens": special, "skip_special_tokens": skip,
    }  # fmt: skip
    choice = words.ok(PATH, body)["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    offsets = logprobs["text_offset"]
    assert joined(words.events(PATH, body))[0]["logprobs"] == logprobs
    alone = words.ok(PATH, {**body, "echo": False})["choices"][0]["text"]
    before = body["prompt"] if isinstance(body["prompt"], str) else tokenizer.decode(given, skip)
    assert text == (before if echo else "") + alone
    assert len(offsets) == len(words.engine.ids) + echo * len(given)
    assert offsets == sorted(offsets) and offsets[0] == 0
    for token, top, start, end in zip(logprobs["tokens"], logprobs["top_logprobs"], offsets, [*offsets[1:], len(text)], strict=True):
        assert top is None or token in top
        if "\ufffd" not in token:  # a part of a character
            assert text[start:end] == token or (token in tokenizer.special_texts and start == end)


@settings(max_examples=150)
@given(data=st.data(), echo=st.booleans(), include=st.booleans(), stop=st.sampled_from([None, "l", "\ufffd", "o w"]))
@pytest.mark.parametrize("kind", ["bytes", "byte fallback"])
@pytest.mark.parametrize("path", [PATH, "/generate"])
def test_offsets_behind_what_is_no_utf8(bytes_api, words, path, kind, data, echo, include, stop):
    """Streamed as in whole: no offset is sent before its token's place in the text is certain, and the text before it is."""
    api = words if kind == "byte fallback" else bytes_api
    tokenizer = api.engine.tokenizer
    some_bytes = b"\xf0\x9f\x98\x80\xe6\x97\xa5\xed\xa0\xff l"
    id_of = {byte: i for i, byte in tokenizer.byte_fallback.items()} or range(256)
    some_id = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from([id_of[b] for b in some_bytes]))
    prompt, ids = data.draw(st.lists(some_id, min_size=1, max_size=6)), data.draw(st.lists(some_id, min_size=1, max_size=12))
    ends = data.draw(st.sampled_from([None, ids[-1:]]))
    api.engine.ids = ids
    body = {
        "prompt": prompt, "max_tokens": len(ids), "logprobs": 0, "stop": stop, "stop_token_ids": ends, "add_special_tokens": False,
        "include_stop_str_in_output": include, "return_token_ids": True, "echo": echo,
    }  # fmt: skip
    if path == "/generate":
        echo = False
        body = {k: v for k, v in body.items() if k not in ("echo", "return_token_ids")}
    whole = api.ok(path, body)
    choice = (whole.get("choices") or whole["outputs"])[0]
    text, made, offsets = choice["text"], choice["token_ids"], choice["logprobs"]["text_offset"]
    shown = made[: len(made) - (isinstance(choice.get("stop_reason"), int) and not include)]
    before, begins = begins_by_definition(tokenizer, prompt, True), begins_by_definition(tokenizer, prompt + shown, True)
    start = before[-1] * echo
    right = before[:-1] * echo + [start + n - begins[len(prompt)] for n in begins[len(prompt) :]]
    assert offsets == [min(n, len(text)) for n in right][: len(made) + echo * len(prompt)]

    sent, streamed, together = 0, [], []
    for event in api.events(path, {**body, "stream": True}):
        for part in event.get("choices") or [event] * ("text" in event):
            sent += len(part["text"])
            streamed += part["logprobs"]["text_offset"]
            together.append(len(part["token_ids"]) == len(part["logprobs"]["tokens"]) - len(prompt) * echo * (not together))
            assert all(offset <= sent for offset in streamed)
    assert streamed == offsets and all(together)


def test_the_first_word_of_an_echoed_prompt(words):
    words.engine.ids = words.engine.tokenizer.encode(" world", add_special_tokens=False)[-1:]
    body = {"prompt": "hello world", "max_tokens": 1, "logprobs": 0, "echo": True}
    for prompt in (body["prompt"], words.engine.tokenizer.encode("hello world")):
        logprobs = words.ok(PATH, {**body, "prompt": prompt})["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["<s>", "hello", " world", " world"] and logprobs["text_offset"] == [0, 0, 5, 11]
    written = words.ok(PATH, {**body, "prompt": "</s>hello"})["choices"][0]
    assert written["text"] == "</s>hello world" and written["logprobs"]["text_offset"] == [0, 0, 4, 9]


def test_stop_token_is_not_shown_unless_asked(api):
    body = {"prompt": "hi", "seed": 2, "stop_token_ids": list(b"\x80b0c"), "max_tokens": 300, "return_token_ids": True}
    without = api.ok(PATH, body)["choices"][0]
    with_stop = api.ok(PATH, {**body, "include_stop_str_in_output": True})["choices"][0]
    assert without["stop_reason"] == with_stop["stop_reason"] == without["token_ids"][-1]
    assert with_stop["text"] == bytes(with_stop["token_ids"]).decode("utf-8", "replace")
    assert without["text"] == bytes(without["token_ids"][:-1]).decode("utf-8", "replace")


def test_prompt_logprobs(api):
    choice = api.ok(PATH, {"prompt": "hi", "prompt_logprobs": 2})["choices"][0]
    entries = choice["prompt_logprobs"]
    assert entries[0] is None and len(entries) == 3
    assert {"logprob", "rank", "decoded_token"} == set(entries[1]["104"])
    assert error_of(api.post(PATH, {"prompt": "hi", "prompt_logprobs": 2, "stream": True}))["param"] == "prompt_logprobs"
    for path, body in (("/generate", {"prompt": "hi"}), ("/v1/responses", {"input": "hi"})):  # their answers have no place for it
        assert error_of(api.post(path, {**body, "prompt_logprobs": 2}))["param"] == "prompt_logprobs"


def test_usage_comes_only_when_asked(api):
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": False, "include_obfuscation": False}):
        events = api.events(PATH, {"prompt": "hi", "stream_options": options})
        assert all("usage" not in e and e["choices"] for e in events)
    events = api.events(PATH, {"prompt": "hi", "n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and all(e["usage"]["prompt_tokens"] == 3 for e in events)
    assert error_of(api.post(PATH, {"prompt": "hi", "stream_options": {}}))["param"] == "stream_options"
    for option in ("continuous_usage_stats", "include_obfuscation"):  # nothing to show continuously; no padding here
        error = error_of(api.post(PATH, {"prompt": "hi", "stream": True, "stream_options": {option: True}}))
        assert error["param"] == f"stream_options.{option}"


def test_no_empty_chunks_before_the_last(api):
    events = api.events(PATH, {"prompt": "hi", "seed": 4, "stop": ["zzz"], "max_tokens": 300})
    assert all(e["choices"][0]["text"] for e in events[:-1])


def test_context_limits_are_named():
    api = Api(FakeEngine(max_model_len=50))
    assert api.ok(PATH, {"prompt": "x" * 30, "seed": 1})["usage"]["completion_tokens"] <= 16
    api.ok(PATH, {"prompt": "x" * 45})  # the default of 16 shrinks to what fits
    for body, param in (
        ({"prompt": "x" * 49}, "prompt"), ({"prompt": "x" * 30, "max_tokens": 20}, "max_tokens"),
        ({"prompt": "x" * 100_000}, "prompt"),
    ):  # fmt: skip
        error = error_of(api.post(PATH, body))
        assert error["code"] == "context_length_exceeded" and error["param"] == param and "50" in error["message"]
    cut = api.ok(PATH, {"prompt": "ab" * 100, "truncate_prompt_tokens": 10, "echo": True, "max_tokens": 0})
    assert cut["usage"]["prompt_tokens"] == 10 and cut["choices"][0]["text"] == "ab" * 5
    right = {"truncate_prompt_tokens": 3, "truncation_side": "right", "echo": True, "max_tokens": 0}
    assert api.ok(PATH, {"prompt": "abcdef", **right})["choices"][0]["text"] == "ab"
    usage = api.ok(PATH, {"prompt": "ab" * 10_000, "truncate_prompt_tokens": 5, "ignore_eos": True})["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 16)  # room is what is left after the cut
    assert api.ok(PATH, {"prompt": "x" * 300, "truncate_prompt_tokens": -1, "max_tokens": 20})["usage"]["prompt_tokens"] == 30


def test_generate(api):
    body = {"prompt": "hi", "seed": 1, "n": 2, "max_tokens": 300, "logprobs": 1}
    whole = api.ok("/generate", body)
    events = api.events("/generate", body)
    assert events.pop()["usage"] == whole["usage"]
    for output in whole["outputs"]:
        own = [e for e in events if e["index"] == output["index"]]
        assert "".join(e["text"] for e in own) == output["text"] == expected("hi", 1, output["index"])
        assert sum((e["token_ids"] for e in own), []) == output["token_ids"]
        assert sum((e["logprobs"]["token_logprobs"] for e in own), []) == output["logprobs"]["token_logprobs"]
        assert [e["finish_reason"] for e in own if e["finish_reason"]] == [output["finish_reason"]]


def test_request_is_passed_on_whole(api):
    body = {
        "prompt": "hi", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "repetition_penalty": 1.1, "logit_bias": {"5": -100}, "min_tokens": 1, "max_tokens": 4,
        "seed": -5, "ignore_eos": True, "allowed_token_ids": [1, 2], "bad_words": ["no"], "skip_special_tokens": False,
    }  # fmt: skip
    api.ok(PATH, body)
    params = api.engine.params[-1]
    for name, value in body.items():
        if name not in ("prompt", "logit_bias"):
            assert getattr(params, name) == value, name
    assert params.logit_bias == {5: -100.0} and params.bad_word_ids == [list(b"no"), list(b" no")]
    assert params.eos_token_ids == [257, 259]
