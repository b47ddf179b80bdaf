"""Fields that no body of ours has: what agents and front ends send is served, typos and foreign samplers are refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import error_of
from fake_engine import FakeEngine
from headrace.api.protocol import ChatRequest, CompletionRequest
from headrace.api.responses_input import ResponsesRequest
from headrace.api.unknown_fields import CHANGES_ANSWERS, MAX_NAMED, header_value, nearest
from headrace.metrics.prometheus import MAX_FIELDS
from server_driver import Api

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 3}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def api():
    return Api(tool_parser="hermes")


def ignored(api: Api, path: str, body: dict) -> str:
    response = api.post(path, body)
    assert response.status_code == 200, response.text
    return response.headers.get("x-headrace-ignored", "")


def test_a_body_with_nothing_unknown_has_no_header(api):
    assert ignored(api, "/v1/chat/completions", {**CHAT, "user": "x"}) == ""


@pytest.mark.parametrize(("path", "body", "named"), [
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "client_metadata": {"x": "y"}, "access_programs": {}},
     "client_metadata, access_programs"),  # Codex
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "tool_choice": "auto", "tools": [
        {"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch", "color": 1},
        {"type": "namespace", "name": "mcp", "tools": [{"name": "f", "annotations": {}}]}], "client_metadata": {}},
     "client_metadata, tools[web_search], tools[].color, tools[].tools[].annotations"),
    ("/v1/chat/completions", {**CHAT, "provider": {"order": ["a"]}, "chat_id": "1", "session_id": "2"},
     "provider, chat_id, session_id"),  # gateways, front ends
    ("/v1/chat/completions", {**CHAT, "cache_prompt": True, "timings_per_token": True}, "cache_prompt, timings_per_token"),
    ("/v1/chat/completions", {**CHAT, "tools": [{**FUNCTION, "cache_control": {"type": "ephemeral"}}]}, "tools[].cache_control"),
    ("/v1/embeddings", {"input": "hi", "input_type": "query"}, "input_type"),
])  # fmt: skip
def test_bookkeeping_is_served_and_named(api, path, body, named):
    assert ignored(api, path, body) == named
    error = error_of(Api(unknown_fields="refuse").post(path, body))
    assert error["param"].rsplit(".", 1)[-1] in (*named.replace(".", ", ").split(", "), "type", "external_web_access")


def test_tools_that_are_left_out_leave_the_others(api):
    body = {**CHAT, "tools": [{"type": "web_search"}, FUNCTION], "return_token_ids": True}
    response = api.post("/v1/chat/completions", body)
    assert response.headers["x-headrace-ignored"] == "tools[web_search]"
    prompt = api.engine.tokenizer.decode(response.json()["prompt_token_ids"])
    assert '"look"' in prompt and "web_search" not in prompt


@pytest.mark.parametrize("choice", ["required", {"type": "web_search"}])
def test_a_choice_that_asks_for_a_foreign_tool_is_refused(api, choice):
    error = error_of(api.post("/v1/chat/completions", {**CHAT, "tools": [{"type": "web_search"}], "tool_choice": choice}))
    assert error["param"].startswith("tool_choice")


@pytest.mark.parametrize("name", [
    "max_token", "maxTokens", "max-tokens", "temprature", "top-p", "topP", "topk", "tool", "stops", "messsages",
    "max_completion_token", "respons_format", "seeds",
])  # fmt: skip
def test_typos_are_refused_with_what_was_meant(api, name):
    error = error_of(api.post("/v1/chat/completions", {**CHAT, name: 1}))
    assert error["param"] == name and error["code"] == "unknown_parameter" and "; is it " in error["message"]


@pytest.mark.parametrize("name", [*sorted(CHANGES_ANSWERS - {"mm_processor_kwargs"}), "structural_tag", "max_new_tokens", "no_stop_trim", "system_prompt", "prefill", "json_mode"])
def test_what_changes_answers_elsewhere_is_refused(api, name):
    error = error_of(api.post("/v1/chat/completions", {**CHAT, name: 1}))
    assert error["param"] == name and error["code"] == "unknown_parameter"


@pytest.mark.parametrize("name", ["logits_processors", "guided_whitespace_pattern", "best_of", "suffix", "temprature", "images"])
@pytest.mark.parametrize("nothing", [None, [], {}])
def test_what_asks_for_nothing_is_left_out_and_named(api, name, nothing):
    assert ignored(api, "/v1/chat/completions", {**CHAT, name: nothing}) == name


@pytest.mark.parametrize("body", [{"kv_transfer_params": {}}, {"vllm_xargs": {}}, {"documents": []}, {"mm_processor_kwargs": {}}])
def test_known_fields_that_ask_for_nothing_are_served(api, body):
    assert ignored(api, "/v1/chat/completions", {**CHAT, **body}) == ""
    [(name, empty)] = body.items()
    assert error_of(api.post("/v1/chat/completions", {**CHAT, name: [1] if empty == [] else {"a": 1}}))["param"] == name


@pytest.mark.parametrize(("name", "here", "elsewhere"), [
    ("normalize", True, False), ("embed_dtype", "float32", "float16"), ("endianness", "little", "big"), ("use_activation", True, False),
])  # fmt: skip
def test_a_vector_of_another_kind_is_refused(api, name, here, elsewhere):
    assert ignored(api, "/v1/embeddings", {"input": "hi", name: here}) == ""
    assert error_of(api.post("/v1/embeddings", {"input": "hi", name: elsewhere}))["param"] == name


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GUIDED = [
    ({"guided_json": SCHEMA}, "json", SCHEMA), ({"guided_json": json.dumps(SCHEMA)}, "json", SCHEMA), ({"guided_regex": "[a-c]+"}, "regex", "[a-c]+"),
    ({"guided_choice": ["a", "b"], "guided_json": None}, "choice", ["a", "b"]), ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ({"guided_json_object": True, "structured_outputs": {}}, "json_object", True),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "kind", "value"), GUIDED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("unknown", ["ignore", "refuse"])
def test_older_words_for_structured_outputs_are_taken_for_them(path, unknown, fields, kind, value):
    engine = FakeEngine(supports_structured=True)
    api = Api(engine, unknown_fields=unknown)
    base = CHAT if "chat" in path else {"prompt": "hi", "max_tokens": 3}
    assert ignored(api, path, {**base, **fields}) == ""
    asked = engine.params[-1].structured_outputs
    assert asked.kind == kind and getattr(asked, kind) == value


def test_one_that_asks_for_nothing_is_none():
    engine = FakeEngine(supports_structured=True)
    assert ignored(Api(engine), "/v1/chat/completions", {**CHAT, "guided_json_object": False, "guided_regex": None}) == ""
    assert engine.params[-1].structured_outputs is None


def test_two_of_them_are_refused():
    engine = FakeEngine(supports_structured=True)
    api = Api(engine)
    for fields in ({"guided_json": SCHEMA, "guided_regex": "a"}, {"guided_json": SCHEMA, "structured_outputs": {"regex": "a"}}):
        assert error_of(api.post("/v1/chat/completions", {**CHAT, **fields}))["param"] == "structured_outputs"
    twice = {**CHAT, "guided_json": SCHEMA, "structured_outputs": {"json": {"type": "array"}}}
    assert error_of(api.post("/v1/chat/completions", twice))["param"] == "guided_json"
    assert ignored(api, "/v1/chat/completions", {**CHAT, "guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}) == "guided_decoding_backend"


@given(kind=st.sampled_from([ChatRequest, CompletionRequest, ResponsesRequest]), data=st.data())
@settings(max_examples=200)
def test_a_letter_wrong_is_near(kind, data):
    known = kind.__struct_fields__
    name = data.draw(st.sampled_from([f for f in known if len(f) > 3]))
    place, letter = data.draw(st.integers(0, len(name) - 1)), data.draw(st.sampled_from("abcxyz_"))
    way = data.draw(st.sampled_from(["drop", "double", "swap", "upper"]))
    wrong = {
        "drop": name[:place] + name[place + 1 :], "double": name[:place] + letter + name[place:],
        "swap": name[:place] + letter + name[place + 1 :], "upper": name.upper(),
    }[way]  # fmt: skip
    assert nearest(wrong, known) is not None


@given(st.lists(st.text(min_size=1), max_size=60))
def test_the_header_is_short_and_ascii(names):
    value = header_value(names)
    assert value.isascii() and len(value) <= (MAX_NAMED + 1) * 66 and b"\n" not in value and b"\r" not in value


def test_names_that_clients_invent_are_counted_within_a_bound():
    api = Api()
    for first in range(0, 3 * MAX_FIELDS, 50):
        fields = {f"trace_{i:04d}_of_the_front_end": i for i in range(first, first + 50)}
        ignored(api, "/v1/chat/completions", {**CHAT, **fields})
    page = api.request("GET", "/metrics").text
    lines = [line for line in page.splitlines() if "ignored_fields_total{" in line]
    assert len(lines) == MAX_FIELDS + 1
    assert sum(float(line.rsplit(" ", 1)[1]) for line in lines) == 3 * MAX_FIELDS


@pytest.mark.parametrize(("fields", "enabled"), [
    ({"enable_thinking": False}, False), ({"thinking": {"type": "disabled"}}, False), ({"thinking": True}, True),
    ({"reasoning": {"effort": "high"}}, True), ({"reasoning": {"enabled": False}}, False), ({"reasoning_effort": "none"}, False),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}, "enable_thinking": True}, True),
])  # fmt: skip
def test_thinking_is_switched_by_any_of_its_names(fields, enabled):
    api = Api()
    api.engine.tokenizer.chat_templates = {"default": "{{ enable_thinking }}|{{ messages[0].content }}"}
    answer = api.ok("/v1/chat/completions", {**CHAT, **fields, "return_token_ids": True})
    assert api.engine.tokenizer.decode(answer["prompt_token_ids"]) == f"{enabled}|hi"


def test_thinking_that_contradicts_itself_is_refused(api):
    error = error_of(api.post("/v1/chat/completions", {**CHAT, "reasoning_effort": "none", "enable_thinking": True}))
    assert error["param"] == "enable_thinking"
    error = error_of(api.post("/v1/chat/completions", {**CHAT, "reasoning": {"max_tokens": 5}}))
    assert error["param"] == "reasoning.max_tokens"


def test_any_model_name():
    api = Api(any_model_name=True)
    assert api.request("POST", "/v1/chat/completions", json={**CHAT, "model": "gpt-4o"}).json()["model"] == api.engine.model_name
    assert api.request("POST", "/v1/chat/completions", json=CHAT).json()["model"] == api.engine.model_name
