"""Anthropic's Messages API, by Anthropic's own client and by bodies as Claude Code sends them."""

from __future__ import annotations

import json

import anthropic
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engine import TEMPLATE, FakeEngine
from headrace.api.anthropic_input import MessagesRequest, conversation
from server_driver import LOOP, MODEL, Api, after_a_silence

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
TOOL = {"name": "f", "description": "does f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ü😀"}}\n</tool_call>'
BASE = {"model": MODEL, "max_tokens": 400, "messages": HI}
# as an agent sends it: its system prompt begins with a line that changes each time, and it brings its own services' fields
AGENT = {
    "max_tokens": 32000, "stream": True, "thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "high"},
    "metadata": {"user_id": "user_1_account__session_2"}, "speed": "fast",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=00aa1;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}, {"type": "text", "text": "go on"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "let me see", "signature": "headrace"}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "x"}},
            {"type": "tool_use", "id": "toolu_2", "name": "f", "input": {}}]},
        {"role": "user", "content": [
            {"type": "text", "text": "and now?"}, {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "one"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": "no"}]},
        {"role": "system", "content": "<total_tokens>5 tokens left</total_tokens>"},
    ],
}  # fmt: skip


def make(text: str = "Hello.", **options) -> Api:
    engine = FakeEngine(script=lambda ids, params: text)
    engine.supports_structured = True
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> </think> #}"}
    return Api(engine, **options)


def client(api: Api, **options) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app), base_url="http://test")
    return anthropic.AsyncAnthropic(**{"api_key": "k", "max_retries": 0, **options}, base_url="http://test", http_client=http)


def create(api: Api, **fields):
    async def call():
        async with client(api) as c:
            return await c.messages.create(**{**BASE, **fields})

    return LOOP.run(call())


def streamed(api: Api, **fields):
    """What the SDK makes of the stream: it demands the order of events."""

    async def call():
        async with client(api) as c, c.messages.stream(**{**BASE, **fields}) as stream:
            return await stream.get_final_message()

    return LOOP.run(call())


def without_ids(block: dict) -> dict:
    return {k: v for k, v in block.items() if k not in ("id", "parsed_output", "citations")}


def both_ways(api: Api, **fields):
    whole, stream = create(api, **fields), streamed(api, **fields)
    of_stream, of_whole = ([b.to_dict() for b in m.content] for m in (stream, whole))
    assert [without_ids(b) for b in of_stream] == [without_ids(b) for b in of_whole]
    assert stream.stop_reason == whole.stop_reason
    assert stream.stop_sequence == whole.stop_sequence and stream.usage.output_tokens == whole.usage.output_tokens
    return whole


def prompt(api: Api) -> str:
    return api.engine.tokenizer.decode(api.engine.prompts[-1], skip_special_tokens=False)


def test_text():
    api = make()
    message = both_ways(api)
    assert [(b.type, b.text) for b in message.content] == [("text", "Hello.")]
    assert (message.type, message.role, message.model, message.stop_reason) == ("message", "assistant", MODEL, "end_turn")
    assert message.usage.cache_read_input_tokens == api.engine.num_cached and message.usage.output_tokens > 0
    assert message.usage.input_tokens + api.engine.num_cached == len(api.engine.prompts[-1])


def test_thinking_and_calls():
    api = make(f"<think>so</think>Well.{CALL}")
    message = both_ways(api, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, text, call = message.content
    assert (thinking.thinking, text.text, call.name, call.input) == ("so", "Well.", "f", {"a": "ü😀"})
    assert thinking.signature and call.id and message.stop_reason == "tool_use"


def test_stops():
    assert both_ways(make("one two three"), stop_sequences=["two"]).stop_sequence == "two"
    assert both_ways(make("one two three"), max_tokens=2).stop_reason == "max_tokens"
    assert both_ways(make(f"{CALL}"), tools=[TOOL], max_tokens=20).stop_reason == "max_tokens"


@settings(max_examples=50)
@given(pieces=st.lists(st.sampled_from(["text ", "\n", CALL, "<tool_call>", "{", "<think>", "</think>", "é😀", "<tool_"]), max_size=6),
       most=st.integers(1, 200), tools=st.booleans())  # fmt: skip
def test_streamed_equals_whole(pieces, most, tools):
    both_ways(make("".join(pieces)), max_tokens=most, **({"tools": [TOOL]} if tools else {}))


def test_an_agents_body_is_served():
    api = make()
    response = api.post(PATH, AGENT, headers={"anthropic-beta": "a,b", "anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    assert {"context_management", "tools[web_search_20250305]", "speed"} == set(response.headers["x-headrace-ignored"].split(", "))
    assert response.headers["request-id"] == response.headers["x-request-id"]
    shown = prompt(api)
    assert "billing" not in shown and "You are an agent." in shown and "web_search" not in shown
    order = ["You are an agent.", "<system-reminder>", "go on", "I look.", "one", "Error: no", "and now?", "tokens left"]
    places = [shown.index(text) for text in order]
    assert places == sorted(places)


def test_the_prompt_does_not_change_with_the_billing_line():
    shown = []
    for line in ("cch=1;", "cch=2;\nYou are an agent."):
        api = make()
        system = [{"type": "text", "text": f"x-anthropic-billing-header: {line}"}, *AGENT["system"][1:]]
        api.ok(PATH, {**AGENT, "stream": False, "system": system if "\n" not in line else system[:1]})
        shown.append(prompt(api))
    assert shown[0] == shown[1]


@pytest.mark.parametrize("keeps", [True, False])
def test_systems_in_the_middle(keeps):
    body = MessagesRequest(max_tokens=1, messages=[
        {"role": "system", "content": "a"}, *HI, {"role": "system", "content": "b"}, {"role": "assistant", "content": "ok"},
        {"role": "system", "content": "c"}, {"role": "user", "content": "d"},
    ])  # fmt: skip
    chat = [(m["role"], m["content"]) for m in conversation(body, keeps)]
    if keeps:
        assert chat == [("system", "a"), ("user", "hi"), ("system", "b"), ("assistant", "ok"), ("system", "c"), ("user", "d")]
    else:
        assert chat == [("system", "a"), ("user", "hi\n\nb"), ("assistant", "ok"), ("user", "c\n\nd")]


def test_a_prefill_is_continued():
    api = make(" world")
    message = create(api, messages=[*HI, {"role": "assistant", "content": "Hello "}])
    assert message.content[0].text == " world" and prompt(api).endswith("Hello")


def test_thinking_is_off_unless_asked_for():
    shown = []
    for fields in ({}, {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled"}}):
        api = make()
        api.engine.tokenizer.chat_templates = {"default": "{{ enable_thinking }}|{{ messages[0].content }}"}
        create(api, **fields)
        shown.append(prompt(api))
    assert shown == ["False|hi", "True|hi", "False|hi"]


def test_tool_choices():
    api = make(CALL)
    assert create(api, tools=[TOOL], tool_choice={"type": "any"}).stop_reason == "tool_use"
    assert create(api, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}).content[0].type == "tool_use"
    assert create(api, tools=[TOOL], tool_choice={"type": "none"}).content[0].type == "text"
    twice = make(CALL + CALL)
    assert len(create(twice, tools=[TOOL]).content) == 2
    assert len(create(twice, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).content) == 1


def test_tokens_are_counted_as_they_are_rendered():
    api = make()
    fields = {k: AGENT[k] for k in ("system", "tools", "messages", "thinking")}
    answer = api.ok(f"{PATH}/count_tokens?beta=true", fields)
    api.ok(PATH, {**AGENT, "stream": False})
    assert answer == {"input_tokens": len(api.engine.prompts[-1])}


@pytest.mark.parametrize(("fields", "param"), [
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": None}, "max_tokens"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"), ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "x"}]}]}, "messages[1].content[0].input"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"), ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"temperature": 3}, "temperature"), ({"stop_sequences": [""]}, "stop"), ({"max_token": 3}, "max_token"), ({"n": 2}, "n"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"), ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"output_format": SCHEMA, "output_config": {"format": SCHEMA}}, "output_format"),
])  # fmt: skip
def test_refusals_have_the_apis_shape(fields, param):
    response = make().post(PATH, {**BASE, **fields})
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error" and error["request_id"]
    assert error["error"]["message"].startswith(param) or param in error["error"]["message"]


def test_errors_by_the_sdk():
    with pytest.raises(anthropic.NotFoundError):
        create(make(), model="other")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        create(make(), messages=[{"role": "user", "content": "x" * 100_000}])
    failing = make()
    failing.engine.fail = lambda n: "error" if n else None
    body = {**BASE, "stream": True}
    events = [json.loads(line[6:]) for line in failing.post(PATH, body).text.splitlines() if line.startswith("data: ")]
    assert events[0]["type"] == "message_start" and events[-1]["error"]["type"] == "api_error"


def test_keys():
    api = make(api_keys=("secret",))
    for headers, status in (({"x-api-key": "secret"}, 200), ({"authorization": "Bearer secret"}, 200), ({"x-api-key": "no"}, 401), ({}, 401)):
        response = api.post(PATH, BASE, headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["type"] == "authentication_error"


def test_models_in_the_form_of_who_asks():
    api = make()

    async def listed():
        async with client(api) as c:
            return [m async for m in c.models.list()], await c.models.retrieve(MODEL)

    models, one = LOOP.run(listed())
    assert [m.id for m in models] == [MODEL] and one.display_name == MODEL
    assert api.request("GET", "/v1/models").json()["object"] == "list"


@pytest.mark.parametrize("fields", [{"output_config": {"format": SCHEMA}}, {"extra_body": {"output_format": SCHEMA}}])
def test_a_schema_for_the_whole_answer(fields):
    api = make('{"a": 1}')
    create(api, **fields)
    assert api.engine.params[-1].structured_outputs.json == {"type": "object"}


def test_tools_of_type_custom_stay_beside_unknown_fields():
    api = make(CALL)
    answer = api.ok(PATH, {**BASE, "tools": [{**TOOL, "type": "custom"}], "context_management": {}})
    assert answer["content"][0]["type"] == "tool_use" and '"f"' in prompt(api)


def test_halves_of_surrogate_pairs_in_arguments():
    """Models can write them; JSON documents cannot be sent with them."""
    call = r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d", "b": [1e999, "\ud83d\ude00"]}}</tool_call>'
    answer = make(call).ok(PATH, {**BASE, "tools": [TOOL]})
    assert answer["content"][0]["input"] == {"a": "\ufffd", "b": [None, "😀"]}


async def test_a_long_silence_is_filled_with_pings():
    """Its clients count events: the message has begun before the first token is there."""
    engine = FakeEngine(script=lambda ids, params: "ok", bursts=1)
    events = await after_a_silence(engine, PATH, {**BASE, "stream": True}, b"event: ping")
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "ping"] and kinds.count("message_start") == 1
    assert kinds[-1] == "message_stop" and "content_block_delta" in kinds
