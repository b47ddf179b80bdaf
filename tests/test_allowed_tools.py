"""`tool_choice` of the type allowed_tools, in both of OpenAI's APIs: of all tools only some are shown and may be called."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ToolChoiceAllowed

from answers import error_of
from server_driver import MODEL
from structured_driver import compiled, takes
from test_api_openai_client import client_of
from test_structured_tools import BODY_TOOLS, HI, TEMPLATES, WRITTEN, api_of

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FLAT = [{"type": "function", **tool["function"]} for tool in BODY_TOOLS]
APPLY = {"type": "custom", "name": "apply"}
SPACE = {"type": "namespace", "name": "docs", "tools": [{"type": "function", "name": "find"}]}
NAMES = [tool["name"] for tool in FLAT]


def body_of(path: str, mode: Any, allowed: list[Any], **more: Any) -> dict[str, Any]:
    """A request that allows these: names, or what stands for them in the choice."""
    if path == CHAT:
        named = [{"type": "function", "function": {"name": t}} if isinstance(t, str) else t for t in allowed]
        return {"messages": HI, "tools": BODY_TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}, **more}
    named = [{"type": "function", "name": t} if isinstance(t, str) else t for t in allowed]
    return {"input": "hi", "tools": [*FLAT, APPLY, SPACE], "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": named}, **more}


def shown(api) -> list[str]:
    prompt = bytes(i for i in api.engine.prompts[-1] if i < 256).decode()
    return [name for name in (*NAMES, "apply", "docs__find") if f'"name": "{name}"' in prompt]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("form", [form for form in TEMPLATES if form])
def test_only_allowed_tools_are_shown_and_can_be_called(path, mode, form):
    api = api_of(form, WRITTEN[form])
    for allowed in (["weather"], ["now", "weather"], ["now"]):
        answer = api.ok(path, body_of(path, mode, allowed))
        assert set(shown(api)) == set(allowed)
        wish = api.engine.params[-1].structured_outputs
        if mode == "auto" and form == "openai":  # whose markers are no tokens of this tokenizer: there is no grammar
            assert wish is None
        else:
            matcher = compiled(grammar=wish.grammar)
            assert takes(matcher, WRITTEN[form]) == ("weather" in allowed)
            assert takes(matcher, "only text") == (mode == "auto")
        if path == CHAT:
            call, choice = answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], answer["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
        else:
            call = answer["output"][-1]["name"]
            assert answer["tool_choice"] == body_of(path, mode, allowed)["tool_choice"] and len(answer["tools"]) == 5
        assert call == "weather"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_all_that_are_allowed_are_as_all_there_are(path):
    """But for the grammar of names, which a server without grammars does without."""
    api = api_of("hermes", '{"city": 1}')
    names = [*NAMES, {**APPLY}, {"type": "function", "name": "find", "namespace": "docs"}] if path == RESPONSES else NAMES
    plain = {k: v for k, v in body_of(path, "auto", []).items() if k != "tool_choice"}
    api.ok(path, plain)
    api.ok(path, body_of(path, "auto", names))
    assert api.engine.prompts[0] == api.engine.prompts[1]
    form: dict[str, Any] = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    form = {"text": {"format": form}} if path == RESPONSES else {"response_format": {"type": "json_schema", "json_schema": {k: form[k] for k in ("name", "schema")}}}
    assert api.ok(path, body_of(path, "auto", names, **form))
    matcher = compiled(grammar=api.engine.params[-1].structured_outputs.grammar)
    assert takes(matcher, '{"city": 1}') and takes(matcher, WRITTEN["hermes"]) and not takes(matcher, WRITTEN["hermes"].replace("weather", "wether"))
    api.engine.supports_structured = False
    api.ok(path, body_of(path, "auto", names))
    assert api.engine.params[-1].structured_outputs is None and api.engine.prompts[-1] == api.engine.prompts[0]
    assert error_of(api.post(path, body_of(path, "required", names)))["param"] == "tool_choice"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_tools_of_other_kinds_are_left_out_of_the_choice_too(path):
    api = api_of("hermes", "x")
    foreign = {"type": "mcp", "server_label": "m"}
    tools = body_of(path, "auto", [])["tools"]
    response = api.post(path, body_of(path, "auto", [foreign, "now"], tools=[foreign, *tools]))
    assert shown(api) == ["now"] and response.headers["x-headrace-ignored"] == "tools[mcp]"
    for held in ([foreign, *tools], [foreign]):
        api.ok(path, body_of(path, "auto", [foreign], tools=held))
        assert shown(api) == [] and api.engine.params[-1].structured_outputs is None
        assert error_of(api.post(path, body_of(path, "required", [foreign], tools=held)))["param"].startswith("tool_choice")


def test_custom_tools_and_those_of_a_namespace_are_allowed_by_their_own_names():
    api = api_of("hermes", '<tool_call>\n{"name": "apply", "arguments": {"input": "p"}}\n</tool_call>')
    found = {"type": "function", "name": "find", "namespace": "docs"}
    item = api.ok(RESPONSES, body_of(RESPONSES, "required", [APPLY, found]))["output"][0]
    assert shown(api) == ["apply", "docs__find"] and (item["type"], item["input"]) == ("custom_tool_call", "p")


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_refusals(path):
    api = api_of("hermes", "x")
    at = "tool_choice.allowed_tools" if path == CHAT else "tool_choice"
    within = ".function" if path == CHAT else ""
    bad: list[tuple[Any, list[Any], str]] = [
        ("none", ["now"], f"{at}.mode"), (None, ["now"], f"{at}.mode"), ("auto", [], f"{at}.tools"), ("auto", [5], f"{at}.tools[0]"),
        ("auto", ["now", "then"], f"{at}.tools[1]"), ("auto", [{"type": 5}], f"{at}.tools[0].type"), ("auto", ["now"] * 257, f"{at}.tools"),
        ("auto", [{"type": "function"}], f"{at}.tools[0]{within}.name"),
    ]  # fmt: skip
    for mode, tools, param in bad:
        error = error_of(response := api.post(path, body_of(path, mode, tools)))
        assert response.status_code == 400 and error["param"] == param, error
    for body in (body_of(path, "auto", ["now"], tools=None), body_of(path, "auto", ["now"], tools=[])):
        assert error_of(api.post(path, body))["param"].startswith("tool_choice")
    for choice, part in (
        ({"type": "allowed_tools"}, "allowed_tools" if path == CHAT else "mode"),
        ({"type": "function"}, "function" if path == CHAT else "name"),
        ({"type": "function", "function": {"name": "now"}, "allowed_tools": {"mode": "auto", "tools": [{}]}}, "allowed_tools")
        if path == CHAT else ({"type": "function", "name": "now", "mode": "auto"}, "mode"),
    ):  # fmt: skip
        error = error_of(api.post(path, {**body_of(path, "auto", []), "tool_choice": choice}))
        assert error["param"] == f"tool_choice.{part}"
    assert not api.engine.params


async def test_with_the_official_client():
    async with client_of(lambda ids, params: WRITTEN["hermes"], supports_structured=True) as client:
        choice = body_of(CHAT, "required", ["weather"])["tool_choice"]
        answer = await client.chat.completions.create(model=MODEL, messages=HI, tools=BODY_TOOLS, tool_choice=choice)
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"
        choice = body_of(RESPONSES, "auto", ["weather"])["tool_choice"]
        response = await client.responses.create(model=MODEL, input="hi", tools=FLAT, tool_choice=choice)
        assert response.output[0].name == "weather" and isinstance(response.tool_choice, ToolChoiceAllowed)
        assert response.tool_choice.to_dict() == choice
