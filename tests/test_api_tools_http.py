"""Tools and reasoning through the chat and responses endpoints: streamed equals whole, finish reasons, history, usage."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import error_of, joined
from fake_engine import TEMPLATE, FakeEngine
from headrace.api.responses_messages import messages
from server_driver import Api

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "does f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
FLAT = [{"type": "function", **TOOL}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ü😀"}}\n</tool_call>'
EMPTY = '<tool_call>{"name": "g"}</tool_call>'


def make(text: str, **options):
    engine = FakeEngine(script=lambda ids, params: text)
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> </think> #}"}
    return Api(engine, **options)


def chat_both_ways(api: Api, body: dict) -> dict:
    """The choice, after a check that the stream says the same."""
    events = api.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    usage = events.pop()["usage"]
    streamed = joined(events)[0]
    whole = api.ok("/v1/chat/completions", body)
    choice = whole["choices"][0]
    message = choice["message"]
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning"] == message.get("reasoning", "")
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert usage == whole["usage"]
    calls = [{"name": c["function"]["name"], "arguments": c["function"]["arguments"]} for c in message.get("tool_calls", [])]
    assert calls == [{k: c[k] for k in ("name", "arguments")} for c in streamed["tool_calls"]]
    choice["usage"] = usage
    return choice


PIECES = ["text ", "\n", CALL, EMPTY, "<tool_call>", "{", "</think>", "<think>", "é😀", "<", "<tool_"]


@settings(max_examples=60)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=6), with_tools=st.booleans(), most=st.integers(1, 200))
def test_streamed_equals_whole(pieces, with_tools, most):
    api = make("".join(pieces))
    body = {"messages": HI, "max_tokens": most} | ({"tools": TOOLS} if with_tools else {})
    choice = chat_both_ways(api, body)
    if choice["message"].get("tool_calls"):
        assert with_tools and choice["finish_reason"] in ("tool_calls", "length")
    else:
        assert choice["finish_reason"] in ("stop", "length")
    assert choice["usage"]["completion_tokens"] == len(api.engine.sample([], api.engine.params[-1])[0])
    responses_both_ways(api, {"input": "hi", "max_output_tokens": most} | ({"tools": FLAT} if with_tools else {}))


def test_calls():
    api = make(f"Well.\n{CALL}\n{EMPTY}")
    choice = chat_both_ways(api, {"messages": HI, "tools": TOOLS})
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well."
    first, second = choice["message"]["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"a": "ü😀"} and second["function"]["arguments"] == "{}"
    assert first["type"] == "function" and first["id"] != second["id"]
    only = chat_both_ways(api, {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False})
    assert len(only["message"]["tool_calls"]) == 1
    ignored = chat_both_ways(api, {"messages": HI, "tools": TOOLS, "tool_choice": "none"})
    assert ignored["finish_reason"] == "stop" and "<tool_call>" in ignored["message"]["content"]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"), [("<think>a END b</think>c", "a", ""), ("<think>a</think>b END c", "a", "b ")]
)  # fmt: skip
def test_a_stop_string_ends_reasoning_too(text, reasoning, content):
    message = (choice := chat_both_ways(make(text), {"messages": HI, "stop": ["END"]}))["message"]
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == (reasoning, content, "stop")


def test_content_is_null_with_calls_alone():
    api = make(CALL)
    assert chat_both_ways(api, {"messages": HI, "tools": TOOLS})["message"]["content"] is None
    deltas = [e["choices"][0]["delta"] for e in api.events("/v1/chat/completions", {"messages": HI, "tools": TOOLS})]
    assert all("content" not in d for d in deltas[1:])
    assert all(isinstance(c["index"], int) for d in deltas for c in d.get("tool_calls", ()))


def test_a_call_that_is_cut_stays_length():
    api = make(CALL + "trailing" * 50)
    choice = chat_both_ways(api, {"messages": HI, "tools": TOOLS, "max_tokens": len(CALL.encode()) + 5})
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"]


def test_logprobs_with_tools_and_streams():
    api = make(f"hm {CALL}")
    body = {"messages": HI, "tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    whole = api.ok("/v1/chat/completions", body)["choices"][0]
    assert joined(api.events("/v1/chat/completions", body))[0]["logprobs"] == whole["logprobs"]
    assert len(whole["logprobs"]["content"]) == len(f"hm {CALL}".encode()) + 1


def test_reasoning():
    api = make("<think>\nwhy é\n</think>\n\nbecause")
    choice = chat_both_ways(api, {"messages": HI})
    message = choice["message"]
    assert message["content"] == "because" and message["reasoning"] == message["reasoning_content"] == "why é"
    assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("why é".encode())}
    hidden = chat_both_ways(api, {"messages": HI, "include_reasoning": False})
    assert "reasoning" not in hidden["message"] and hidden["message"]["content"] == "because"
    assert hidden["usage"] == choice["usage"]
    plain = make("<think>x</think>y", reasoning_parser=None)
    assert chat_both_ways(plain, {"messages": HI})["message"]["content"] == "<think>x</think>y"


def test_templates_without_tools_get_them_in_the_system_message():
    engine = FakeEngine(script=lambda ids, params: CALL)
    engine.tokenizer.chat_templates = {"default": "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"}
    api = Api(engine)
    history = [
        {"role": "system", "content": "Be good."}, *HI,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
    ]  # fmt: skip
    choice = chat_both_ways(api, {"messages": history, "tools": TOOLS})
    assert choice["finish_reason"] == "tool_calls"
    text = bytes(engine.prompts[-1]).decode()
    assert text.startswith("[system: Be good.\n\n# Tools") and json.dumps(TOOLS[0]) in text
    assert '[assistant: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>]' in text
    assert text.endswith("[user: <tool_response>\none\n</tool_response>]")


def test_templates_whose_format_is_unknown_refuse_tools():
    engine = FakeEngine()
    engine.tokenizer.chat_templates = {"default": "{{ tools }}"}
    api = Api(engine)
    assert error_of(api.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS}))["param"] == "tools"
    assert api.ok("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "tool_choice": "none"})


# ---------------------------------------------------------------------------------------------------------------------
# constrained output


def constraint(api: Api) -> tuple:
    """(kind, value) of the last request's constraint."""
    wish = api.engine.params[-1].structured_outputs
    assert wish is not None
    value = getattr(wish, wish.kind)
    return wish.kind, json.loads(value) if isinstance(value, str) and wish.kind == "json" else value


def test_required_and_named_calls_of_a_model_whose_format_is_unknown():
    """They are plain JSON: a list of calls, or the arguments alone."""
    api = make('[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]', tool_parser=None)
    api.engine.supports_structured = True
    choice = chat_both_ways(api, {"messages": HI, "tools": TOOLS, "tool_choice": "required"})
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert [json.loads(c["function"]["arguments"]) for c in choice["message"]["tool_calls"]] == [{"a": 1}, {}]
    assert constraint(api)[0] == "grammar"
    api = make('{"a": 1}', tool_parser=None)
    api.engine.supports_structured = True
    named = {"type": "function", "function": {"name": "f"}}
    choice = chat_both_ways(api, {"messages": HI, "tools": TOOLS, "tool_choice": named})
    assert choice["finish_reason"] == "stop" and choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert constraint(api) == ("json", TOOL["parameters"])
    whole = responses_both_ways(api, {"input": "hi", "tools": FLAT, "tool_choice": {"type": "function", "name": "f"}})
    assert whole["output"][0]["type"] == "function_call" and whole["output"][0]["arguments"] == '{"a": 1}'


def test_constraints_reach_the_engine():
    schema = {"type": "object"}
    api = make("{}", reasoning_parser=None)
    api.engine.supports_structured = True
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a"]}
    for path, body, expected in (
        ("/v1/chat/completions", {"messages": HI, "response_format": form}, ("json", schema)),
        ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_object"}}, ("json_object", True)),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ("/v1/completions", {"prompt": "x", "response_format": form}, ("json", schema)),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "structural_tag", **tag}}, ("structural_tag", tag)),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}, ("json", schema)),
    ):
        api.ok(path, body)
        assert constraint(api) == expected
    error = error_of(api.post("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}}))
    assert error["param"].startswith("structured_outputs") and "regular expression" in error["message"]


# ---------------------------------------------------------------------------------------------------------------------
# responses


def responses_both_ways(api: Api, body: dict) -> dict:
    """The response, after a check that the stream tells the same and is well-formed."""
    events = api.events("/v1/responses", body)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    whole = api.ok("/v1/responses", body)
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    final = last["response"]
    assert final["id"] == events[0]["response"]["id"]
    items: list[dict] = []
    texts: dict[str, str] = {}  # of the item that is open, by its kind of delta
    for e in events[2:-1]:
        kind = e["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert e["output_index"] == len(items)
            items.append(e["item"])
            texts = {}
        elif kind.endswith(".delta"):
            assert e["item_id"] == items[-1]["id"] and e["output_index"] == len(items) - 1
            texts[kind[:-6]] = texts.get(kind[:-6], "") + e["delta"]
        elif kind in ("output_text.done", "reasoning_text.done", "reasoning_summary_text.done"):
            assert e["text"] == texts.pop(kind[:-5], "")
        elif kind == "function_call_arguments.done":
            assert e["arguments"] == texts.pop(kind[:-5], "") and e["name"] == items[-1]["name"]
        elif kind == "custom_tool_call_input.done":
            assert e["input"] == texts.pop(kind[:-5], "")
        elif kind == "output_item.done":
            assert not texts and e["item"]["id"] == items[-1]["id"]
            assert e["item"] == final["output"][e["output_index"]]
    assert len(items) == len(final["output"]) > 0
    assert _without_ids(final["output"]) == _without_ids(whole["output"])
    for name in whole:
        if name not in ("id", "created_at", "completed_at", "output"):
            assert final[name] == whole[name], name
    return whole


def _without_ids(items: list[dict]) -> list[dict]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def test_responses():
    api = make(f"<think>hm</think>Well.\n{CALL}\n{EMPTY}")
    whole = responses_both_ways(api, {"input": "hi", "tools": FLAT, "metadata": {"k": "v"}, "instructions": "Be good."})
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, call, _ = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}] and reasoning["summary"] == []
    assert message["content"] == [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}]
    assert call["status"] == "completed" and json.loads(call["arguments"]) == {"a": "ü😀"}
    assert whole["status"] == "completed" and whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
    assert whole["metadata"] == {"k": "v"} and whole["instructions"] == "Be good." and whole["store"] is True
    assert whole["tools"][0]["name"] == "f" and whole["tool_choice"] == "auto"


def test_responses_that_are_cut_and_empty_ones():
    api = make("x" * 100)
    whole = responses_both_ways(api, {"input": "hi", "max_output_tokens": 16})
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"
    api = make("")
    assert responses_both_ways(api, {"input": "hi"})["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("bursts", [1, 3])
def test_responses_logprobs(bursts):
    """Also that of the token which ends the text and is not a part of it."""
    api = make("ab")
    api.engine.bursts = bursts
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = responses_both_ways(api, body)["output"][0]["content"][0]
    assert [p["token"] for p in part["logprobs"]] == ["a", "b", "<eos>"]
    assert all(len(p["top_logprobs"]) == 2 for p in part["logprobs"])


def test_responses_input_items():
    api = make("x")
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "phase": "final_answer",
         "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": "out"},
    ]  # fmt: skip
    api.engine.tokenizer.chat_templates = {
        "default": "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|{{ m.tool_calls is defined }}]{% endfor %}{{ tools }}"
    }
    api.ok("/v1/responses", {"input": items, "instructions": "I"})
    text = bytes(api.engine.prompts[-1]).decode()
    assert text == "[system|I\n\nD||False][user|a\nb||False][assistant|c|R|True][tool|out||False]None"


@pytest.mark.parametrize("parallel", [None, True, False])
def test_responses_say_whether_calls_may_be_parallel(parallel):
    api = make("x")
    assert api.ok("/v1/responses", {"input": "hi", "tools": FLAT, "parallel_tool_calls": parallel})["parallel_tool_calls"] == (parallel is not False)


@pytest.mark.parametrize("value", ["hi", [{"role": "user", "content": "hi"}]])
def test_responses_instructions_are_a_message_of_their_own(value):
    assert messages(value, "I") == [{"role": "system", "content": "I"}, {"role": "user", "content": "hi"}]


ITEMS = {
    "reasoning": lambda i: {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": f"r{i}"}]},
    "encrypted": lambda i: {"type": "reasoning", "summary": [], "encrypted_content": "?"},
    "assistant": lambda i: {"type": "message", "role": "assistant", "content": f"a{i}"},
    "call": lambda i: {"type": "function_call", "call_id": f"{i}", "name": f"f{i}", "arguments": "{}"},
    "output": lambda i: {"type": "function_call_output", "call_id": f"{i}", "output": f"o{i}"},
    "user": lambda i: {"role": "user", "content": f"u{i}"},
}


@given(st.lists(st.sampled_from(sorted(ITEMS)), min_size=1, max_size=8))
def test_responses_input_keeps_everything_in_its_order(kinds):
    """Reasoning stays with the turn of the assistant that it stands in, before a message or a call; none is lost or moved on."""
    conversation = messages([ITEMS[kind](i) for i, kind in enumerate(kinds)], None)
    said: list[str] = []
    for message in conversation:
        if "reasoning_content" in message:
            assert message["role"] == "assistant"
            said += message["reasoning_content"].split("\n")
        said += [message["content"]] if message.get("content") else []
        said += [call["function"]["name"] for call in message.get("tool_calls", ())]
    letters = {"assistant": "a", "call": "f", "output": "o", "user": "u", "reasoning": "r"}
    wanted = [f"{letters[kind]}{i}" for i, kind in enumerate(kinds) if kind != "encrypted"]
    assert sorted(said) == sorted(wanted)
    turn = lambda name: sum(kind in ("user", "output") for kind in kinds[: int(name[1:])])  # noqa: E731
    assert [turn(name) for name in said] == sorted(turn(name) for name in wanted)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True, "store": False}, "background"), ({"truncation": "auto"}, "truncation"),
        ({"conversation": "x"}, "conversation"), ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"), ({"include": ["everything"]}, "include"),
        ({"tools": [{"type": 5}]}, "tools[0]"), ({"max_output_tokens": 0}, "max_output_tokens"), ({"n": 2}, "n"), ({"max_tokens": 5}, "max_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"), ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"), ({"prompt": {"id": "x"}}, "prompt"), ({"stream_options": {}}, "stream_options"),
    ],
)  # fmt: skip
def test_responses_refusals(body, param):
    api = make("x")
    error = error_of(response := api.post("/v1/responses", {"input": "hi", **body}))
    assert response.status_code == 400 and error["param"].startswith(param), error
    assert not api.engine.params
