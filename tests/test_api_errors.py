"""Bad requests of every kind: a 4xx with the one error shape, never a 5xx; and what the engine's failures become."""

from __future__ import annotations

import json
import logging
import re

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import error_of, parse_events
from fake_engine import FakeEngine
from headrace.api.body import decode
from headrace.api.errors import ApiError
from headrace.api.structured import Structure, renamed
from headrace.config import EngineConfig
from headrace.engine.messages import EngineOutput
from headrace.errors import CapacityError, EngineDeadError, ParameterError
from headrace.metrics.prometheus import PrometheusMetrics
from headrace.model.formats.tokenizer_file import TokenizerExtras
from headrace.model.tokenizer import Tokenizer
from server_driver import MODEL, Api

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
    "/generate": {"prompt": "hi"},
}
GENERATING = [p for p in BODIES if p not in ("/v1/responses/input_tokens", "/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize")]
STREAMING = GENERATING


@pytest.fixture(scope="module")
def api():
    return Api(max_prompts=4, max_samples=16, max_body_bytes=1_000_000)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "data",
    [
        b"", b" ", b"{", b"null", b"[]", b"5", b'"x"', b"NaN", b'{"model": NaN}', b'{"model": Infinity}', b'{"temperature": 1e999}',
        b'{"model": "\xff"}', b'{"model": "\\ud800"}', b'{"model": "a\\udc00b"}', b'{"model": "a", "model": "b"}', b"\xef\xbb\xbf{}",
        b"{}}", b'{"a": 1,}', b"{'a': 1}", b'{"a":' + b"[" * 100_000, b'{"a": ' + b"1" * 10_000 + b"}", b"\x00", b'{"\\u0000": 1}',
        b'{"model": "fake/model", "x": {"y": 1, "y": 2}}', b'{"metadata": {"a": 1e400}}', b'\x80\x81', b'{"model": true}', b'{"model": {"a": "b"}}',
    ],
)  # fmt: skip
def test_malformed_bodies(api, path, data):
    response = api.request("POST", path, content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_repeated_keys_are_found_at_any_depth(api):
    good = json.dumps({"model": MODEL, "messages": MESSAGES, "metadata": {"a": {"b": 1}}})
    bad = good.replace('"b": 1', '"b": 1, "b": 1')
    for text, status in ((good, 200), (bad, 400)):
        response = api.request("POST", "/v1/chat/completions", content=text, headers={"content-type": "application/json"})
        assert response.status_code == status
    assert error_of(response)["param"] == "b"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200), ("application/json; charset=utf-8", 200), ("APPLICATION/JSON", 200), ("application/vnd.x+json", 200),
        (None, 200), ("text/plain", 200), ("application/x-www-form-urlencoded", 200), ("", 200), ("\u00e9", 200), ("json", 200),
        ("application/octet-stream", 200), ("multipart/form-data; boundary=x", 400), ("image/png", 400), ("Audio/wav", 400),
        ("application/json; charset=latin-1", 400), ("text/plain; charset=utf-16", 400),
    ],
)  # fmt: skip
def test_content_types(api, kind, status):
    """A JSON body is one whatever `curl -d` calls it, but a page of another origin cannot send one unasked."""
    content = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
    headers = {} if kind is None else {"content-type": kind.encode("latin-1")}
    response = api.request("POST", "/v1/completions", content=content, headers=headers)
    assert response.status_code == status
    if status != 200:
        assert error_of(response)["code"] == "invalid_content_type"
    asked_first = kind is not None and "json" in kind.partition("/")[2].lower()  # of these a browser asks the server beforehand
    response = api.request("POST", "/v1/completions", content=content, headers={**headers, "origin": "http://elsewhere"})
    assert response.status_code == (status if asked_first else 400)


def test_a_body_in_another_coding_is_told_so(api):
    for coding, status in (("identity", 200), ("gzip", 415), ("br, gzip", 415)):
        headers = {"content-type": "application/json", "content-encoding": coding}
        response = api.request("POST", "/v1/completions", content=json.dumps({"model": MODEL, "prompt": "hi"}), headers=headers)
        assert response.status_code == status
    assert error_of(response)["code"] == "unsupported_content_encoding" and "'br, gzip'" in error_of(response)["message"]


def test_what_is_no_json_is_told_whatever_it_is_called(api):
    for content in ("prompt=hi&model=x", "%7B%7D", ""):
        headers = {"content-type": "application/x-www-form-urlencoded"}
        response = api.request("POST", "/v1/completions", content=content, headers=headers)
        assert response.status_code == 400 and error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "twice"), [
        ('{"prompt": [1, 2], "model": "m", "prompt": [3]}', "prompt"), ('{"options": {"1": 1, "1": [2]}, "prompt": [1]}', "1"),
        ('{"options": {"a[1]": 1, "a[2]": [7, 7]}, "prompt": [1, 2]}', None), ('{"options": {"a[1]": 1, "a[1]": 2}}', "a[1]"),
        ('{"prompt": [], "options": {"x": {"y": [1,\n 2], "z": [], "y": 1}}}', "y"),
    ],
)  # fmt: skip
def test_a_key_stands_once_in_an_object(body: str, twice: str | None):
    if twice is None:
        assert decode(body.encode(), dict)["options"] == {"a[1]": 1, "a[2]": [7, 7]}
    else:
        with pytest.raises(ApiError, match=re.escape(f"The key `{twice}` stands twice")):
            decode(body.encode(), dict)


@pytest.mark.parametrize("path", BODIES)
def test_slashes_of_a_joined_url_do_not_matter(api, path):
    body = {"model": MODEL, **BODIES[path]}
    for spelt in (path + "/", "/" + path, path.replace("/", "//"), path + "///"):
        response = api.request("POST", f"http://test{spelt}", json=body)
        assert response.status_code == 200, (spelt, response.text)
    assert api.request("GET", "http://test//health/").status_code == 200
    assert api.request("GET", "http://test/v1//models/").json()["object"] == "list"
    assert api.request("GET", f"http://test//v1/models/{MODEL}/").json()["id"] == MODEL


def test_a_model_may_be_named_by_a_path():
    served = Api(served_model_names=("/data/my model", "x"))
    assert served.request("GET", "http://test/v1/models//data/my%20model").json()["id"] == "/data/my model"
    assert served.request("GET", "http://test/v1/models/x/").json()["id"] == "x"


@pytest.mark.parametrize("path", BODIES)
def test_missing_and_unknown_fields(api, path):
    for field in BODIES[path]:
        others = {name: value for name, value in BODIES[path].items() if name != field}
        error = error_of(api.request("POST", path, json={"model": MODEL, **others}))
        assert error["param"] == field or path in ("/tokenize",)
    answer = api.post(path, {**BODIES[path], "frobnicate": {"x": [1]}, "client_metadata": None})
    assert answer.status_code == 200 and answer.headers["x-headrace-ignored"] == "frobnicate, client_metadata"
    typo = "p" + next(iter(BODIES[path]))
    for sent in (Api(unknown_fields="refuse").post(path, {**BODIES[path], "frobnicate": 1}), api.post(path, {**BODIES[path], typo: 1})):
        error = error_of(sent)
        assert error["param"] in ("frobnicate", typo) and error["code"] == "unknown_parameter"
    known = {"/v1/completions": ("max_new_tokens", "use max_tokens"), "/v1/chat/completions": ("ebnf", "structured_outputs"),
             "/v1/responses": ("max_new_tokens", "use max_output_tokens")}  # fmt: skip
    if path in known:
        field, instead = known[path]
        error = error_of(api.post(path, {**BODIES[path], field: 1}))
        assert error["param"] == field and error["code"] == "unknown_parameter" and instead in error["message"]
    assert api.request("POST", path, json=BODIES[path]).status_code == 200, "there is one model"


@pytest.mark.parametrize("path", BODIES)
def test_unknown_model(api, path):
    response = api.request("POST", path, json={**BODIES[path], "model": "other"})
    assert response.status_code == 404
    error = error_of(response)
    assert error["param"] == "model" and error["code"] == "model_not_found"
    assert error["message"] == "The model `other` does not exist; served here: fake/model"


def test_paths_and_methods(api):
    assert api.request("GET", "/nothing").status_code == 404
    assert api.request("POST", "/v1/").status_code == 404
    assert api.request("POST", "/v1/responses/compact").status_code == 404, "no method of what is not there"
    error_of(api.request("GET", "/nothing"))
    for path in BODIES:
        response = api.request("GET", path)
        error_of(response)
        if path != "/v1/responses/input_tokens":  # which GET takes for the name of a response
            assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert api.request("GET", "/v1/models/a/b/c").status_code == 404
    assert api.request("GET", f"/v1/models/{MODEL}").json()["id"] == MODEL


@pytest.mark.parametrize(("path", "body"), [("/v1/embeddings", {"input": "x" * 60}), ("/v1/rerank", {"query": "q", "documents": ["x" * 60]})])
def test_a_text_that_is_only_read_is_not_said_to_ask_for_an_answer(path, body):
    error = error_of(Api(FakeEngine(max_model_len=50)).post(path, body))
    assert error["code"] == "context_length_exceeded" and error["message"].endswith("of at most 49.") and "max_tokens" not in error["message"]


def test_fan_out_is_capped(api):
    assert error_of(api.post("/v1/completions", {"prompt": ["a"] * 5}))["param"] == "prompt"
    assert error_of(api.post("/v1/completions", {"prompt": ["a"] * 4, "n": 5}))["param"] == "n"
    assert error_of(api.post("/v1/embeddings", {"input": ["a"] * 5}))["param"] == "input"
    assert error_of(api.post("/v1/completions", {"prompt": "a", "n": 10**6}))["param"] == "n"
    assert error_of(api.post("/v1/completions", {"prompt": "a", "best_of": 3}))["param"] == "best_of"
    stops = [f"{i:04}" * 1000 for i in range(9)]
    for path in GENERATING:
        many = {} if path == "/v1/responses" else {"n": 4}
        assert error_of(api.post(path, {**BODIES[path], **many, "stop": stops * (1 if many else 4)}))["param"] == "stop"


def test_large_bodies(api):
    response = api.post("/v1/completions", {"prompt": "x" * 2_000_000})
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"

    def pieces():
        yield from (b" " * 100_000 for _ in range(20))

    async def chunked():
        for piece in pieces():
            yield piece

    response = api.request("POST", "/v1/completions", content=chunked(), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_large_headers(api):
    response = api.request("GET", "/health", headers={"x-large": "x" * 100_000})
    assert response.status_code == 431
    error_of(response)


def test_odd_texts_in_messages_of_errors(api):
    strict = Api(unknown_fields="refuse")
    for name in ("\u0000", "ü" * 500, "`", "😀"):
        error_of(response := strict.post("/v1/completions", {"prompt": "x", name: 1}))
        assert response.status_code == 400
        named = api.post("/v1/completions", {"prompt": "x", name: 1}).headers["x-headrace-ignored"]
        assert 1 <= len(named) <= 64 and named.isascii()
        assert api.request("POST", "/v1/completions", json={"prompt": "x", "model": name}).status_code == 404


def test_half_a_character_in_the_text_of_an_error():
    """A body cannot hold one, but the template of a checkpoint can."""
    engine = FakeEngine()
    engine.tokenizer.chat_templates = {"default": r"{{ raise_exception('not so \ud83d, please') }}"}
    api = Api(engine)
    error = error_of(response := api.post("/v1/chat/completions", {"messages": MESSAGES}))
    assert response.status_code == 400 and "not so ?, please" in error["message"]


FIELDS = sorted(
    {
        "model", "prompt", "messages", "input", "n", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "logprobs", "top_logprobs",
        "max_tokens", "max_completion_tokens", "max_output_tokens", "stream", "stream_options", "echo", "logit_bias", "tools", "tool_choice",
        "response_format", "structured_outputs", "prompt_logprobs", "truncate_prompt_tokens", "stop_token_ids", "allowed_token_ids", "bad_words",
        "priority", "cache_salt", "request_id", "chat_template_kwargs", "reasoning", "text", "include", "instructions", "tokens", "dimensions",
        "encoding_format", "suffix", "best_of", "min_tokens", "ignore_eos", "continue_final_message", "reasoning_effort", "metadata", "truncation_side",
    }
)  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 130), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6), st.sampled_from(["auto", "required", "user", "text", "json_object", "left", "base64", MODEL]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from(["role", "content", "type", "text", "function", "name", "parameters", "json_schema", "schema", "id",
                                       "tool_calls", "arguments", "format", "include_usage", "regex", "call_id", "output", "5"]),
                      st.text(max_size=3)),
            inner, max_size=4,
        ),
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=500)
@given(path=st.sampled_from(sorted(BODIES)), extra=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3), known=st.booleans())
def test_fuzzed_bodies_never_give_a_5xx(api, path, extra, known):
    body = {**(BODIES[path] | {"model": MODEL} if known else {}), **extra}
    before = set(api.engine.active)
    response = api.request("POST", path, json=body)
    assert response.status_code in (200, 400, 404), (response.text, body)
    if response.status_code != 200:
        error_of(response)
    elif response.headers["content-type"] == "text/event-stream":
        events = parse_events(response.text)
        assert all("error" not in (e or {}) or e["error"] is None for e in events), (events, body)
    else:
        assert isinstance(response.json(), dict)
    assert api.engine.active == before


@settings(max_examples=100)
@given(path=st.sampled_from(sorted(BODIES)), data=st.binary(max_size=40))
def test_random_bytes(api, path, data):
    response = api.request("POST", path, content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


# ---------------------------------------------------------------------------------------------------------------------
# failures of the engine


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("failure", "status"),
    [(ParameterError("prompt", "x", "y"), 400), (CapacityError("too large for the KV cache"), 400), (EngineDeadError("secret"), 503),
     (RuntimeError("secret path /root"), 500), ("error", 500), ("abort", 503)],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token(path, failure, status, stream):
    api = Api(FakeEngine(fail=lambda at: _fail(failure)))
    response = api.post(path, {**BODIES[path], "stream": stream})
    assert response.status_code == status
    error = error_of(response)
    assert "secret" not in error["message"]
    if status == 503:
        assert int(response.headers["retry-after"]) >= 1
    assert not api.engine.active
    assert api.app.state.api.limits.active == 0 and api.app.state.api.limits.unstarted_tokens == 0


@pytest.mark.parametrize("path", GENERATING)
def test_an_output_that_cannot_follow_its_grammar_is_the_requests_fault(path, monkeypatch):
    """Also when the engine finds out late: a 400 that names the field."""
    monkeypatch.setattr(FakeEngine, "generate", _blames)
    for stream in (False, True):
        response = Api().post(path, {**BODIES[path], "stream": stream})
        assert response.status_code == 400 and error_of(response)["message"].startswith("structured_outputs: no text"), response.text


async def _blames(self, request_id, *_, **__):
    yield EngineOutput(request_id, finish_reason="error", error="no text can satisfy it", stop_reason="structured_outputs")


def test_failure_before_the_first_character_has_a_status():
    """Half a character is no text yet: nothing has been sent."""
    api = Api(FakeEngine(script=lambda i, p: "é", bursts=1, fail=lambda at: "error" if at else None))
    assert api.post("/v1/completions", {"prompt": "hi", "stream": True}).status_code == 500


def test_a_tool_that_cannot_be_compiled_is_named():
    rules = ["start: tool_0 | tool_1", 'tool_0: %json {"name": {"const": "f"}}', 'tool_1: %json {"name": {"const": "g \\"1"}}']
    wish = Structure("grammar", "\n".join(rules), "tools")
    for line, name in ((2, '"f"'), (3, r'"g \"1"'), (1, "the tools"), (9, "the tools")):
        error = ParameterError("structured_outputs.grammar", "...", f"what can be compiled (at {line}(1): no such type)")
        found = renamed(error, wish)
        assert (found.field, found.value) == ("tools", f"the parameters of {name}") and "no such type" in found.allowed


@pytest.mark.parametrize("path", STREAMING)
@pytest.mark.parametrize("failure", [RuntimeError("secret"), "error"])
def test_failure_in_a_stream(path, failure):
    api = Api(FakeEngine(script=lambda i, p: "x" * 50, fail=lambda at: _fail(failure) if at > 5 else None))
    response = api.post(path, {**BODIES[path], "stream": True, "seed": 1})
    assert response.status_code == 200
    events = parse_events(response.text)
    assert "secret" not in response.text
    if path == "/v1/responses":
        assert events[-2]["type"] == "error" and events[-2]["code"] and events[-2]["message"]
        assert events[-1]["type"] == "response.failed" and events[-1]["response"]["error"]["code"]
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
    else:
        assert events[-1] is None and set(events[-2]) == {"error"}
        assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
    assert not api.engine.active


def test_one_failed_sample_ends_its_siblings():
    def script(ids, params):
        return "x" * 1000

    engine = FakeEngine(script=script, delay=0.001, fail=lambda at: "error" if at > 20 else None)
    api = Api(engine)
    assert api.post("/v1/completions", {"prompt": ["a", "b"], "n": 3, "max_tokens": 1000}).status_code == 500
    assert not engine.active and api.app.state.api.limits.active == 0


class Records(PrometheusMetrics):
    """Keeps what the metrics are told of the samples that have ended."""

    def __init__(self, engine):
        super().__init__(engine)
        self.samples = []

    def sample_ended(self, record):
        self.samples.append(record)


def recorded(engine):
    api = Api(engine)
    api.app.state.api.metrics = Records(engine)
    return api, api.app.state.api.metrics.samples


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("failure", "reason"),
    [("error", "error"), ("abort", "abort"), (RuntimeError("x"), "error"), (ParameterError("prompt", "x", "y"), "error"), (None, "stop")],
    ids=["error", "abort", "raises", "refuses", "ends"],
)
def test_how_a_sample_ended_is_counted(path, stream, begun, failure, reason):
    engine = FakeEngine(script=lambda i, p: "x" * 9, fail=lambda at: _fail(failure) if at or not begun else None)
    api, samples = recorded(engine)
    api.post(path, {**BODIES[path], "stream": stream})
    assert [(s.endpoint, s.reason) for s in samples] == [(path, reason)]
    assert (samples[0].first_output is None) == (isinstance(failure, Exception) and not begun)


def test_samples_that_end_with_another_are_counted_as_aborted():
    failed = []

    def fail(at):
        return failed.append(at) or "error" if at > 20 and not failed else None

    engine = FakeEngine(script=lambda i, p: "x" * 1000, delay=0.001, fail=fail)
    api, samples = recorded(engine)
    api.post("/v1/completions", {"prompt": ["a", "b"], "n": 3, "max_tokens": 1000})
    assert sorted(s.reason for s in samples) == ["abort"] * 5 + ["error"]


@pytest.mark.parametrize("num_cached", [0, 1, 10**6])
def test_no_more_is_cached_than_the_prompt_has(num_cached):
    api, samples = recorded(FakeEngine(num_cached=num_cached))
    for path, body in BODIES.items():
        if path in GENERATING:
            usage = api.ok(path, body)["usage"]
            count, details = ("input_tokens", "input_tokens_details") if path == "/v1/responses" else ("prompt_tokens", "prompt_tokens_details")
            assert usage[details]["cached_tokens"] == min(num_cached, usage[count])
            assert samples[-1].cached_tokens == min(num_cached, samples[-1].prompt_tokens)
    usage = api.ok("/v1/completions", {"prompt": [[65], [65, 66, 67]], "n": 2})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == min(num_cached, 1) + min(num_cached, 3)


def _fail(failure):
    if isinstance(failure, Exception):
        raise failure
    return failure


@pytest.mark.parametrize(
    ("state", "code"), [({"loaded": False}, "loading"), ({"draining": True}, "draining"), ({"alive": False}, "engine_dead")]
)
def test_not_ready(state, code):
    api = Api()
    api.engine.state.doing = "compiling kernels 3 of 120"
    words = {"loading": "compiling kernels 3 of 120", "draining": "draining", "engine_dead": "given up"}
    for name, value in state.items():
        setattr(api.engine.state, name, value)
    for path, body in BODIES.items():
        response = api.post(path, body)
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert error_of(response)["code"] == code
    ready = api.request("GET", "/ready")
    assert ready.status_code == 503 and ready.json()["state"] == words[code]
    for path in ("/health", "/ping"):
        response = api.request("GET", path)
        assert (response.status_code, response.content) == (503 if code == "engine_dead" else 200, b"")
    assert api.request("GET", "/v1/models").status_code == 200
    assert api.request("GET", "/metrics").status_code == 200


def test_a_core_that_restarts_is_alive_but_not_ready():
    api = Api()
    api.engine.state.progressing = False
    assert api.request("GET", "/health").status_code == 200
    assert api.request("GET", "/ready").status_code == 503
    assert api.post("/v1/completions", {"prompt": "hi"}).status_code == 200  # it waits for the restart


def test_nan_embeddings_are_a_500_of_their_own():
    api = Api()

    async def embed(request_id, ids, pooling, **options):
        return [float("nan")]

    api.engine.embed = embed
    response = api.post("/v1/embeddings", {"input": "hi"})
    assert response.status_code == 500 and error_of(response)["code"] == "engine_error"


@pytest.mark.parametrize("path", GENERATING)
def test_what_would_have_no_effect_is_refused(api, path):
    for fields in ({"truncation_side": "left"}, {"spaces_between_special_tokens": True, "skip_special_tokens": False}):
        error = error_of(api.post(path, {**BODIES[path], **fields}))
        field, value = next(iter(fields.items()))
        assert error["param"] == field and repr(value) in error["message"] and "allowed: " in error["message"]
    assert api.post(path, {**BODIES[path], "spaces_between_special_tokens": False, "skip_special_tokens": False}).status_code == 200


def test_special_tokens_that_only_the_parser_sees_need_no_spaces():
    template = "{{ messages[0].content }}[TOOL_CALLS]"
    api = Api(chat_template=template, tool_parser="mistral")
    tools = [{"type": "function", "function": {"name": "f"}}]
    api.ok("/v1/chat/completions", {"messages": MESSAGES, "tools": tools, "spaces_between_special_tokens": True})


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"echo": True, "logprobs": 1, "prompt_logprobs": 3}, "prompt_logprobs"),
        ("/v1/completions", {"echo": True, "max_tokens": 0, "min_tokens": 2}, "min_tokens"),
        *(("/tokenize", {name: value}, name) for name, value in (
            ("tools", [{"function": {"name": "f"}}]), ("add_generation_prompt", True), ("continue_final_message", True),
            ("chat_template_kwargs", {"a": 1}),
        )),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_refused(api, path, fields, param):
    assert error_of(api.post(path, {**BODIES[path], **fields}))["param"] == param


def test_of_two_limits_the_smaller_holds(api):
    for most, more in ((2, 5), (5, 2)):
        body = {"messages": MESSAGES, "max_tokens": most, "max_completion_tokens": more, "ignore_eos": True}
        assert api.ok("/v1/chat/completions", body)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", [p for p in BODIES if "prompt" in BODIES[p] and p != "/tokenize"] + ["/v1/embeddings"])
def test_token_ids_are_checked_once_and_named(api, path):
    field = "input" if path == "/v1/embeddings" else "prompt"
    for wrong in (-1, 2**31, 10**30, 261):
        error = error_of(api.post(path, {field: [1, wrong, 2]}))
        assert error["param"] == field and error["code"] == "invalid_value"
    assert "got 261" in error["message"] and "token ids in [0, 260]" in error["message"]


@pytest.mark.parametrize("path", [*GENERATING, "/v1/embeddings", "/v1/rerank", "/v1/score"])
@pytest.mark.parametrize("more", [{}, {"use_beam_search": True, "n": 2, "max_tokens": 2, "ignore_eos": True}])
def test_a_salt_reaches_the_engine_from_every_endpoint(path, more):
    api = Api()
    if not more or path in ("/v1/completions", "/v1/chat/completions"):
        api.ok(path, {**BODIES[path], "cache_salt": "tenant", **more})
        assert set(api.engine.salts) == {"tenant"}
    assert error_of(api.post(path, {**BODIES[path], "cache_salt": ""}))["param"] == "cache_salt"


def test_embeddings_have_a_priority():
    api = Api(FakeEngine(config=EngineConfig(scheduling_policy="priority")))
    api.ok("/v1/embeddings", {"input": ["hi", "ho"], "priority": 7})
    assert api.engine.priorities == [7, 7]


def test_ids_that_no_token_has_are_not_detokenized():
    """Holes in a vocabulary, ids that it only pads itself with, ids behind it: none has a text that could be given back."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 4, "[PAD5]": 5, "c": 6}, unk_token="<unk>"))
    tokenizer = Tokenizer(backend, TokenizerExtras(unused=frozenset({5})))
    api = Api(FakeEngine(tokenizer=tokenizer))  # type: ignore[arg-type]
    assert api.ok("/detokenize", {"tokens": [1, 4, 6]}) == {"prompt": "a b c"}
    for tokens, wrong in (([1, 2], 2), ([3, 1], 3), ([5], 5), ([1, 7], 7), ([-1], -1)):
        response = api.post("/detokenize", {"tokens": tokens})
        error = error_of(response)
        assert response.status_code == 400 and error["param"] == "tokens" and f"got {wrong}," in error["message"]
        assert "[0, 6]" in error["message"]


@pytest.mark.parametrize(("path", "said"), [("/x%0aINFO server: forged%1b[2J", r"/x\nINFO server: forged\x1b[2J"), ("/v1/models/ä", "/v1/models/ä")])
def test_a_path_makes_one_line_of_the_log(api, caplog, path, said):
    with caplog.at_level(logging.INFO, "headrace.api.middleware"):
        assert api.request("GET", path).status_code == 404
    [line] = [record.getMessage() for record in caplog.records if record.name == "headrace.api.middleware"]
    assert f" GET {said} 404 " in line


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v1/responses/compact", "compaction"), ("POST", "/v1/conversations", "previous_response_id"),
        ("GET", "/v1/conversations/conv_1/items", "previous_response_id"), ("POST", "/v1/images/generations", ""),
        ("POST", "/v1/responses/resp_1", ""), ("GET", "/v1/" + "x" * 5000, ""), ("POST", "/v1/chat/completion", ""),
    ],
)  # fmt: skip
def test_what_is_not_served_is_told_with_what_is(method, path, hint):
    api = Api()
    answer = api.request(method, path, json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "not_found_error", "unknown_path")
    said, _, served = error["message"].partition(" Served are ")
    assert path[:60] in said and hint in said and len(said) < 300
    paths = served.rstrip(".").split(", ")
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models"} < set(paths) == {p for p in paths if p.startswith("/v1/")}
    assert all(api.request("OPTIONS", one).status_code in (403, 405) for one in paths), "each is there"


def test_what_is_not_served_beside_the_apis_is_told_plainly():
    api = Api()
    assert api.request("GET", "/nothing").json()["error"]["message"] == "There is nothing at this path."
    assert api.request("POST", "/api/nothing").json() == {"error": "There is nothing at this path."}
    assert "/v1/messages" in api.request("POST", "/v1/messages/batches").json()["error"]["message"].partition("Served are")[2]
