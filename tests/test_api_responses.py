"""What coding agents need of /v1/responses: bodies as Codex sends them, over several turns, and what its client reads."""

from __future__ import annotations

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import error_of, parse_events
from fake_engine import TEMPLATE, FakeEngine
from headrace.api.responses_items import custom_input
from headrace.api.responses_messages import messages, reasoning_text, sealed
from server_driver import MODEL, Api, after_a_silence, serving
from test_api_tools_http import make, responses_both_ways

PATH = "/v1/responses"
PATCH = '*** Begin Patch\n*** Update File: a.py\n@@\n-def f(): "ü"\n+def g(): "\\\\"\n*** End Patch\n'
SHELL = {"type": "function", "name": "shell", "description": "runs", "strict": False, "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
APPLY = {
    "type": "custom", "name": "apply_patch", "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin hunk+ end"},
}
SPACE = {"type": "namespace", "name": "mcp__docs", "description": "documentation", "tools": [
    {"type": "function", "name": "search", "description": "finds", "strict": False, "parameters": {"type": "object"}, "defer_loading": True},
    {"type": "function", "name": "a" * 60, "parameters": {"type": "object"}}]}
FIRST = {
    "instructions": "You are a coding agent.", "tool_choice": "auto", "parallel_tool_calls": False, "store": False, "stream": True,
    "reasoning": {"effort": "max", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "019a-thread",
    "text": {"verbosity": "low"}, "client_metadata": {"x": "y"}, "access_programs": {}, "service_tier": "auto",
    "stream_options": {"reasoning_summary_delivery": "sequential"},
    "tools": [SHELL, APPLY, SPACE, {"type": "web_search", "external_web_access": False}, {"type": "local_shell"},
              {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}}],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rename f to g"}]},
    ],
}  # fmt: skip


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted(*answers: str) -> Api:
    """A model that answers turn after turn."""
    left = list(answers)
    engine = FakeEngine(script=lambda ids, params: left.pop(0), max_model_len=65536)
    engine.tokenizer.chat_templates = {"default": TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls or '' }}") + "{# <tool_call> </think> #}"}
    return Api(engine)


def as_codex_reads(api: Api, body: dict) -> tuple[list[dict], dict]:
    """The finished items, which are all that it takes over, and the response at the end."""
    response = api.post(PATH, body)
    assert response.status_code == 200, response.text
    events = parse_events(response.text)
    open_item = None
    done: list[dict] = []
    for e in events:
        if e["type"] == "response.output_item.added":
            open_item = e["item"]["id"]
        elif e["type"].endswith(".delta"):
            assert e["item_id"] == open_item
        elif e["type"] == "response.output_item.done":
            done.append(e["item"])
            open_item = None
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed" and final["output"] == done
    usage = final["usage"]
    assert all(isinstance(usage[name], int) for name in ("input_tokens", "output_tokens", "total_tokens"))
    assert isinstance(usage["input_tokens_details"]["cached_tokens"], int) and isinstance(usage["output_tokens_details"]["reasoning_tokens"], int)
    return done, final


def prompt(api: Api) -> str:
    return api.engine.tokenizer.decode(api.engine.prompts[-1], skip_special_tokens=False)


def test_turns_of_an_agent():
    api = scripted(
        f"<think>Let me look.</think>{call('mcp__docs__search', q='f')}", call("apply_patch", input=PATCH),
        call("shell", command="ls"), "Done.",
    )  # fmt: skip
    done, _ = as_codex_reads(api, FIRST)
    reasoning, found = done
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Let me look."}] and reasoning["encrypted_content"]
    assert (found["type"], found["name"], found["namespace"], json.loads(found["arguments"])) == ("function_call", "search", "mcp__docs", {"q": "f"})
    shown = prompt(api)
    assert "You are a coding agent." in shown and "start: begin hunk+ end" in shown and "mcp__docs__search" in shown and "web_search" not in shown

    def handed_back(item: dict) -> dict:  # without the id, as Codex does, and without what is null
        return {k: v for k, v in item.items() if k not in ("id", "status", "content" if item["type"] == "reasoning" else "")}

    history = [*FIRST["input"], *map(handed_back, done),
               {"type": "function_call_output", "call_id": found["call_id"], "output": [{"type": "input_text", "text": "FOUND"}]}]  # fmt: skip
    (patch,), _ = as_codex_reads(api, {**FIRST, "input": history})
    assert "FOUND" in prompt(api) and "Let me look." in prompt(api) and "'mcp__docs__search'" in prompt(api)
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    history += [handed_back(patch), {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "PATCHED"}]
    (shell,), _ = as_codex_reads(api, {**FIRST, "input": history})
    assert "PATCHED" in prompt(api) and "Begin Patch" in prompt(api) and (shell["type"], shell["name"]) == ("function_call", "shell")
    assert "namespace" not in shell
    history += [handed_back(shell), {"type": "function_call_output", "call_id": shell["call_id"], "output": "a.py"}]
    (message,), _ = as_codex_reads(api, {**FIRST, "input": history})
    assert message["content"][0]["text"] == "Done."


def test_what_is_left_out_is_named():
    api = scripted("x")
    items = [*FIRST["input"], {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}}]
    response = api.post(PATH, {**FIRST, "input": items})
    named = set(response.headers["x-headrace-ignored"].split(", "))
    assert named == {
        "client_metadata", "access_programs", "tools[web_search]", "tools[local_shell]", "tools[tool_search]", "input[web_search_call]",
        "stream_options.reasoning_summary_delivery",
    }  # fmt: skip


def test_tools_that_stand_in_the_input():
    """The form of newer agents: no tools and no instructions in the body."""
    api = scripted(call("mcp__docs__search"), call("apply_patch", input="p"))
    items = [{"type": "additional_tools", "role": "developer", "tools": [SHELL, SPACE]}, *FIRST["input"]]
    (found,), _ = as_codex_reads(api, {**FIRST, "tools": None, "instructions": "", "input": items})
    assert found["namespace"] == "mcp__docs" and '"shell"' in prompt(api)
    (patch,), _ = as_codex_reads(api, {**FIRST, "tools": [SHELL, APPLY], "input": items})
    assert patch["input"] == "p" and prompt(api).count('"shell"') == 1


def test_other_items():
    api = scripted("x")
    items = [
        {"type": "message", "role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "local_shell_call", "call_id": None, "id": "lsh_1", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "lsh_1", "output": "LISTED"},
        {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": [
            {"type": "input_text", "text": "go on"}, {"type": "encrypted_content", "encrypted_content": "?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "SUMMED"}], "encrypted_content": "another server's"},
        {"type": "message", "role": "user", "content": "?"},
    ]  # fmt: skip
    as_codex_reads(api, {**FIRST, "input": items})
    shown = prompt(api)
    order = ["I look.", "local_shell", "LISTED", "Message from agent /root to /root/a:\ngo on", "SUMMED", "?"]
    assert [shown.index(text) for text in order] == sorted(shown.index(text) for text in order)


def test_names_of_namespaces_are_allowed_ones():
    spaces = [{"type": "namespace", "name": name, "tools": [{"name": "c", "type": "function"}]} for name in ("a", "a.ü ", "x" * 64)]
    plain = {"type": "function", "name": "a__c"}
    api = scripted("x")
    body = api.ok(PATH, {"input": "hi", "tools": [*spaces, plain]})
    assert body["tools"][0]["tools"] == [{"name": "c", "type": "function"}]
    names = [json.loads("{" + part.split("}")[0] + "}")["name"] for part in prompt(api).split('"function": {')[1:]]
    assert len(set(names)) == 4 and all(len(name) <= 64 and name.isascii() for name in names)
    for name, (space, own) in zip(names, [("a", "c"), ("a.ü ", "c"), ("x" * 64, "c"), (None, "a__c")], strict=True):
        (item,) = scripted(call(name)).ok(PATH, {"input": "hi", "tools": [*spaces, plain]})["output"]
        assert (item.get("namespace"), item["name"]) == (space, own)


PIECES = ["text ", "\n", call("shell", command="é😀"), call("apply_patch", input="a\n\"ü\"😀"), call("apply_patch", other="x"), call("mcp__docs__search"),
          "<tool_call>", "{", "<think>", "</think>", "é😀"]  # fmt: skip


@settings(max_examples=60)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=6), most=st.integers(1, 300), summary=st.sampled_from([None, "auto", "none"]),
       include=st.sampled_from([[], ["reasoning.encrypted_content"]]))  # fmt: skip
def test_streamed_equals_whole(pieces, most, summary, include):
    api = make("".join(pieces))
    body = {"input": "hi", "max_output_tokens": most, "tools": FIRST["tools"][:3], "reasoning": {"summary": summary}, "include": include}
    whole = responses_both_ways(api, body)
    for item in whole["output"]:
        assert ("encrypted_content" in item) == (item["type"] == "reasoning" and bool(include))
        if item["type"] == "reasoning":
            assert bool(item["summary"]) == (summary == "auto")
            assert reasoning_text({**item, "content": None}) == (item["content"][0]["text"] if include or item["summary"] else "")
    assert whole["reasoning"]["summary"] == summary
    messages([{k: v for k, v in item.items() if k != "id"} for item in whole["output"]], None)


@given(st.text())
def test_a_custom_input_is_what_was_written_and_its_beginning_when_cut(text):
    written = json.dumps({"input": text}, ensure_ascii=len(text) % 2 == 0)
    assert custom_input(written) == text
    for end in range(len(written)):
        part = custom_input(written[:end])
        assert text.startswith(part.replace("\ufffd", "")) or "\ufffd" in text
    assert custom_input('{"other": 1}') == '{"other": 1}'
    custom_input(r'{"input": "\ud83d"}').encode()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_sealed_reasoning_comes_back(text):
    assert reasoning_text({"encrypted_content": sealed(text)}) == text
    assert reasoning_text({"encrypted_content": "headrace.!" + text}) == ""


def test_custom_and_namespaced_tools_by_choice():
    engine = FakeEngine(script=lambda ids, params: call("apply_patch", input="p"))
    engine.supports_structured = True
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> #}"}
    api = Api(engine)
    body = {"input": "hi", "tools": [SHELL, APPLY, SPACE]}
    whole = responses_both_ways(api, {**body, "tool_choice": {"type": "custom", "name": "apply_patch"}})
    assert whole["output"][0]["input"] == "p" and whole["tool_choice"] == {"type": "custom", "name": "apply_patch"}
    api.ok(PATH, {**body, "tool_choice": {"type": "function", "name": "search", "namespace": "mcp__docs"}})
    assert "mcp__docs__search" in engine.params[-1].structured_outputs.grammar
    for cut in range(1, len(call("apply_patch", input="p")), 7):
        responses_both_ways(api, {**body, "tool_choice": "required", "max_output_tokens": cut})


@pytest.mark.parametrize(("body", "param"), [
    ({"tools": [{**APPLY, "format": {"type": "grammar"}}]}, "tools[0].format.syntax"), ({"tools": [{**APPLY, "format": {"type": "x"}}]}, "tools[0].format.type"),
    ({"tools": [SHELL, {"type": "custom"}]}, "tools[1].name"), ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"name": "?"}]}]}, "tools[0].tools[0].name"), ({"tools": [{"name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**SHELL, "descriptio": "x"}]}, "tools[].descriptio"), ({"tools": [APPLY], "tool_choice": {"type": "function", "name": "apply_patch"}}, "tool_choice"),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input[0].input"), ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}]}, "input[1].role"), ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"input": [{"type": "additional_tools", "tools": {}}]}, "input[0].tools"), ({"input": [{"type": "additional_tools", "tools": [{"name": 5}]}]}, "input[0].tools[0].name"),
    ({"input": [{"type": "agent_message", "content": "x"}]}, "input[0].author"), ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "namespace": 1}]}, "input[0].namespace"),
])  # fmt: skip
def test_refusals(body, param):
    error = error_of(make("x").post(PATH, {"input": "hi", "instructions": "I", **body}))
    assert error["param"] == param, error


def test_a_strict_server_refuses_tools_of_other_kinds():
    api = Api(unknown_fields="refuse")
    for tool, param in (({"type": "web_search"}, "tools[0].type"), ({**SPACE, "tools": [{"type": "mcp"}]}, "tools[0].tools[0].type")):
        assert error_of(api.post(PATH, {"input": "hi", "tools": [tool]}))["param"] == param


async def test_a_long_silence_is_filled_with_events():
    """Clients that count events only would give up at comments."""
    engine = FakeEngine(script=lambda ids, params: "ok", bursts=1)
    events = await after_a_silence(engine, PATH, {"model": MODEL, "input": "hi", "stream": True}, b"event: response.in_progress")
    kinds = [e["type"] for e in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.in_progress"] and kinds.count("response.created") == 1
    assert [e["sequence_number"] for e in events] == list(range(len(events))) and kinds[-1] == "response.completed"


async def test_the_sdk_reads_custom_calls_and_summaries():
    engine = FakeEngine(script=lambda ids, params: f"<think>hm</think>{call('apply_patch', input=PATCH)}{call('mcp__docs__search')}")
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> </think> #}"}
    async with serving(engine) as server, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k", max_retries=0) as client:
        fields = {"model": MODEL, "input": "hi", "tools": [APPLY, SPACE], "reasoning": {"summary": "auto"}}
        async with client.responses.stream(**fields) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_response()
        assert {"response.reasoning_summary_text.delta", "response.reasoning_text.delta", "response.custom_tool_call_input.done"} <= kinds
        reasoning, patch, found = final.output
        assert reasoning.summary[0].text == "hm" and patch.input == PATCH and (found.name, found.namespace) == ("search", "mcp__docs")
        whole = await client.responses.create(**fields)
        assert [item.type for item in whole.output] == ["reasoning", "custom_tool_call", "function_call"]
