"""Custom tools in chat completions: calls with any text as their input, whole and streamed, in the history, chosen and refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import error_of
from fake_engine import TEMPLATE, FakeEngine
from headrace.api.custom_tools import custom_input
from server_driver import MODEL, Api, serving
from structured_driver import compiled, takes

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*** Begin" /.+/'}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits files.", "format": GRAMMAR}}
SAY = {"type": "custom", "custom": {"name": "say"}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}
TOOLS = [PATCH, LOOK, SAY]


def written(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


def api_of(text: str, **options) -> Api:
    engine = FakeEngine(script=lambda ids, params: text, max_model_len=65536, **options)
    calls = TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls or '' }}")
    engine.tokenizer.chat_templates = {"default": calls + "{# <tool_call> </think> #}"}
    return Api(engine, tool_parser="hermes")


def put_together(chunks: list[dict]) -> dict:
    """The message of a stream, as OpenAI's client adds its deltas: texts are joined, the rest is set once."""
    def add(whole: dict, delta: dict) -> None:
        for key, value in delta.items():
            if key == "tool_calls":
                calls = whole.setdefault(key, [])
                for call in value:
                    if call["index"] == len(calls):
                        assert call["id"] and call["type"] in call
                        calls.append({})
                    add(calls[call["index"]], {k: v for k, v in call.items() if k != "index"})
            elif isinstance(value, dict):
                add(whole.setdefault(key, {}), value)
            elif isinstance(value, str) and key in ("content", "reasoning", "reasoning_content", "input", "arguments"):
                whole[key] = whole.get(key, "") + value
            else:
                assert key not in whole, key
                whole[key] = value

    message: dict = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            add(message, choice["delta"])
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
    return message


def plain(calls: list[dict]) -> list[dict]:
    return [{k: v for k, v in call.items() if k != "id"} for call in calls]


def both_ways(api: Api, body: dict) -> dict:
    """The choice, after a check that the stream says the same."""
    body = {"messages": HI, "tools": TOOLS, **body}
    streamed = put_together(api.events(CHAT, body))
    choice = api.ok(CHAT, body)["choices"][0]
    message = choice["message"]
    assert plain(streamed.get("tool_calls", [])) == plain(message.get("tool_calls", []))
    assert streamed["content"] == (message["content"] or "") and streamed["finish_reason"] == choice["finish_reason"]
    return choice


def prompt(api: Api) -> str:
    return api.engine.tokenizer.decode(api.engine.prompts[-1], skip_special_tokens=False)


def test_calls():
    api = api_of("Well." + written("patch", {"input": "*** Begin\n\"ü😀\""}) + written("look", {"at": "x"}) + written("say", {"input": ""}) + written("say", {"other": 1}))
    choice = both_ways(api, {})
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well."
    assert plain(choice["message"]["tool_calls"]) == [
        {"type": "custom", "custom": {"name": "patch", "input": "*** Begin\n\"ü😀\""}}, {"type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}},
        {"type": "custom", "custom": {"name": "say", "input": ""}}, {"type": "custom", "custom": {"name": "say", "input": '{"other": 1}'}},
    ]  # fmt: skip
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 4
    shown = prompt(api)
    assert "must obey this grammar (lark)" in shown and '*** Begin' in shown and shown.index('"patch"') < shown.index('"look"') < shown.index('"say"')
    only = both_ways(api, {"parallel_tool_calls": False})
    assert [call["type"] for call in only["message"]["tool_calls"]] == ["custom"]
    assert "tool_calls" not in both_ways(api, {"tool_choice": "none"})["message"]


@settings(max_examples=80)
@given(
    pieces=st.lists(st.sampled_from(["text ", written("say", {"input": "a\\\"b\n😀"}), written("look", {"at": "q"}), written("say", {}), "<tool_call>", "<think>x</think>", "{"]), max_size=5),
    most=st.integers(1, 250), n=st.integers(1, 2),
)  # fmt: skip
def test_streamed_equals_whole_wherever_it_is_cut(pieces, most, n):
    """What is there of a cut input is a beginning of it."""
    api = api_of("".join(pieces))
    choice = both_ways(api, {"max_tokens": most})
    for call in choice["message"].get("tool_calls", []):
        assert call["type"] == "function" or "a\\\"b\n😀".startswith(call["custom"]["input"]) or call["custom"]["input"] == "{}"
    if n > 1:
        choices = api.ok(CHAT, {"messages": HI, "tools": TOOLS, "max_tokens": most, "n": n})["choices"]
        assert len(choices) == n and all(plain(c["message"].get("tool_calls", [])) == plain(choice["message"].get("tool_calls", [])) for c in choices)


@pytest.mark.parametrize("rest", ['"', '"\n            ', '", "why": "as', '", "why": {"a": [1', "", "\\", "\\u00", '"}'])
@pytest.mark.parametrize("text", ["", "a\n\"b\" \\ é😀", '", "x": "'])
def test_an_input_is_there_as_far_as_it_was_written(text, rest):
    """Whatever comes behind it, and wherever that is cut off."""
    assert custom_input('{ "input": ' + json.dumps(text)[:-1] + rest) == text


def test_a_conversation_goes_on():
    api = api_of("Done.")
    (call,) = api_of(written("say", {"input": "é"})).ok(CHAT, {"messages": HI, "tools": TOOLS})["choices"][0]["message"]["tool_calls"]
    asked = {"role": "assistant", "content": None, "tool_calls": [call, {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}}]}
    history = [*HI, asked, {"role": "tool", "tool_call_id": call["id"], "content": "said"}, {"role": "tool", "tool_call_id": "c2", "content": "seen"}]
    for tools in (TOOLS, None):
        api.ok(CHAT, {"messages": history, **({"tools": tools} if tools else {})})
        assert """{'name': 'say', 'arguments': '{"input": "é"}'}""" in prompt(api) and "'custom'" not in prompt(api)
        assert api.ok("/tokenize", {"messages": history, **({"tools": tools} if tools else {})})["tokens"] == api.engine.prompts[-1]
    assert history[1]["tool_calls"][0] == call, "the client's own list is as it was"


def test_one_name_may_be_a_function_and_a_custom_tool():
    """The function keeps it; the model has another name for the other one, which clients never see."""
    both = [{"type": "custom", "custom": {"name": "look"}}, LOOK]
    api = api_of("x")
    api.ok(CHAT, {"messages": HI, "tools": both})
    names = [tool["function"]["name"] for tool in json.loads(prompt(api).split("TOOLS ")[1].splitlines()[0])]
    assert names[1] == "look" and names[0].startswith("look_")
    api = api_of(written(names[0], {"input": "a"}) + written("look", {"at": "b"}))
    calls = both_ways(api, {"tools": both})["message"]["tool_calls"]
    assert plain(calls) == [{"type": "custom", "custom": {"name": "look", "input": "a"}}, {"type": "function", "function": {"name": "look", "arguments": '{"at": "b"}'}}]
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]
    api.ok(CHAT, {"messages": history, "tools": both})
    assert f"'name': '{names[0]}'" in prompt(api) and "'name': 'look'" in prompt(api)


def test_which_must_be_called():
    api = api_of(written("say", {"input": "a"}), supports_structured=True)

    def chosen(choice: Any) -> Any:
        found = both_ways(api, {"tool_choice": choice})
        assert plain(found["message"]["tool_calls"]) == [{"type": "custom", "custom": {"name": "say", "input": "a"}}]
        return found["finish_reason"], compiled(grammar=api.engine.params[-1].structured_outputs.grammar)

    reason, matcher = chosen({"type": "custom", "custom": {"name": "say"}})
    assert reason == "stop" and takes(matcher, written("say", {"input": "\n"})) and not takes(matcher, written("patch", {"input": "\n"}))
    assert not takes(matcher, written("say", {"at": "x"})) and not takes(matcher, written("say", {"input": 5}))
    reason, matcher = chosen("required")
    assert reason == "tool_calls" and takes(matcher, written("patch", {"input": "\n"})) and takes(matcher, written("look", {"at": "x"}))
    allowed = [{"type": "custom", "custom": {"name": "say"}}, {"type": "function", "function": {"name": "look"}}]
    reason, matcher = chosen({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}})
    assert takes(matcher, written("look", {"at": "x"})) and not takes(matcher, written("patch", {"input": "\n"}))
    assert '"patch"' not in prompt(api)


def test_what_is_wrong_is_named():
    api = api_of("x", supports_structured=True)
    custom = {"type": "custom", "custom": {"name": "f"}}

    def call(**parts: Any) -> dict:
        return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "custom", **parts}]}]}

    for body, param in (
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"), ({"tools": [LOOK, {"type": "custom", "custom": {}}]}, "tools[1].custom.name"),
        ({"tools": [{"type": "custom", "name": "flat"}]}, "tools[0].custom"), ({"tools": [{**custom, "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [{**LOOK, "custom": {"name": "f"}}]}, "tools[0].custom"), ({"tools": [{"custom": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"), ({"tools": [{"type": "custom", "custom": {"name": "x" * 65}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": "text"}}]}, "tools[0].custom.format"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "json"}}}]}, "tools[0].custom.format.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]}, "tools[0].custom.format.grammar"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}}}]}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": 5, "definition": ""}}}}]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [custom] * 257}, "tools"), ({"tool_choice": custom}, "tool_choice"), ({"tools": [LOOK], "tool_choice": {"type": "custom", "custom": {"name": "look"}}}, "tool_choice"),
        ({"tools": [custom], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"), ({"tools": [custom], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [custom], "tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice.function"),
        ({"tools": [custom], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "function": {"name": "f"}}]}}}, "tool_choice.allowed_tools.tools[0].custom.name"),
        (call(), "messages[1].tool_calls[0].custom"), (call(custom=5), "messages[1].tool_calls[0].custom"), (call(custom={"name": "f"}), "messages[1].tool_calls[0].custom.input"),
        (call(custom={"name": 5, "input": ""}), "messages[1].tool_calls[0].custom.name"), (call(custom={"name": "f", "input": {}}), "messages[1].tool_calls[0].custom.input"),
    ):  # fmt: skip
        answer = api.post(CHAT, {"messages": HI, **body})
        assert answer.status_code == 400, body
        assert error_of(answer)["param"] in (param, *(("tools[0].custom.name",) if param == "tools[0].function" else ())), (body, answer.text)
    assert not api.engine.params
    assert api.post("/tokenize", {"messages": HI, "tools": [{"type": "custom"}]}).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", CHAT])
def test_tools_of_other_kinds_are_left_out_still(path):
    api = api_of("x")
    answer = api.post(path, {"messages": HI, "tools": [{"type": "mcp", "server_label": "m"}, SAY]})
    assert answer.status_code == 200 and answer.headers["x-headrace-ignored"] == "tools[mcp]"


async def test_by_the_sdk():
    text = written("say", {"input": "a \"b\""})
    engine = FakeEngine(script=lambda ids, params: text)
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> #}"}
    async with serving(engine) as server, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k", max_retries=0) as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS}
        answer = await client.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "custom" and (call.custom.name, call.custom.input) == ("say", 'a "b"')
        deltas = [d async for chunk in await client.chat.completions.create(**asked, stream=True) for c in chunk.choices for d in c.delta.tool_calls or ()]
        assert [d.type for d in deltas] == ["custom", None] and "".join(d.custom["input"] for d in deltas) == 'a "b"'
        more = [*HI, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "said"}]
        assert (await client.chat.completions.create(**{**asked, "messages": more})).choices[0].message.tool_calls
