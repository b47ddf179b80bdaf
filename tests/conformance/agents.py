"""Histories as coding agents and their client libraries send them, against a served model: none may be refused.

    python agents.py URL MODEL

The bodies follow what these clients send, field by field; the texts in them are ours.
"""

from __future__ import annotations

import sys
from typing import Any

from real_tokenizers import post

SYSTEM = {"role": "system", "content": "You edit files. Use the tools."}
USER = {"role": "user", "content": "Rename f to g in a.py"}


def tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {n: {"type": t, "description": n} for n, t in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)[:1], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"Tool {name}", "parameters": schema}}


def call(name: str, arguments: str, call_id: str = "call_Zy4k1mXv0aQ2", **more: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def result(content: Any, call_id: str = "call_Zy4k1mXv0aQ2", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


TOOLS = [tool("read_file", path="string", limit="integer"), tool("shell", command="string", timeout="number")]
READ = call("read_file", '{"path": "a.py"}')
CHATS: dict[str, dict[str, Any]] = {
    # assistant messages as the openai library dumps them: every field that it has, most of them null
    "library dump": {
        "messages": [SYSTEM, USER, {
            "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
            "tool_calls": [READ],
        }, result("def f(): pass")], "tools": TOOLS,
    },
    "no content": {"messages": [USER, {"role": "assistant", "tool_calls": [READ]}, result("x")], "tools": TOOLS},
    "no tools in the last turn": {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [READ]}, result("x")]},
    "parallel calls": {
        "messages": [USER, {"role": "assistant", "content": "", "tool_calls": [READ, call("shell", '{"command": "ls"}', "call_2")]},
                     result("x"), result("a.py", "call_2")], "tools": TOOLS, "parallel_tool_calls": True, "tool_choice": "auto",
    },
    # Cline, Continue, Open WebUI, LangChain: lists of parts, also in results; Aider: several user turns in a row
    "parts": {
        "messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, {"role": "user", "content": [
            {"type": "text", "text": "Look"}, {"type": "text", "text": "here"}]}, {"role": "assistant", "content": [], "tool_calls": [READ]},
            result([{"type": "text", "text": "x"}])], "tools": TOOLS,
    },
    "user turns in a row": {"messages": [USER, USER, {"role": "assistant", "content": "Ok."}, USER, USER]},
    "empty arguments": {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call("shell", "")]}, result("")], "tools": TOOLS},
    "empty lists": {"messages": [USER, {"role": "assistant", "content": "Ok.", "tool_calls": []}, USER], "tools": []},
    "reasoning kept": {
        "messages": [USER, {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call("shell", "{}", index=0)]},
                     result("ok", name="shell")], "tools": TOOLS, "stream_options": None,
    },
    "refused before": {"messages": [USER, {"role": "assistant", "content": None, "refusal": "I cannot."}, USER]},
    "interrupted": {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [READ]}, result("x"), USER], "tools": TOOLS},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER], "store": False, "metadata": {}, "user": "u"},
}  # fmt: skip
FUNCTION = {**TOOLS[0]["function"], "type": "function", "strict": False}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin hunk+ end"}}  # fmt: skip
SPACE = {"type": "namespace", "name": "mcp__docs", "description": "Documentation.", "tools": [FUNCTION]}
ITEMS: dict[str, dict[str, Any]] = {  # Responses, as Codex CLI sends it
    "first turn": {"instructions": "You edit files.", "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rename f to g"}]},
    ]},
    "after a call": {"instructions": "You edit files.", "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rename f to g"}]},
        {"type": "function_call", "name": "read_file", "arguments": '{"path": "a.py"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "def f(): pass"},
    ]},
    "after a patch": {"instructions": "You edit files.", "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rename f to g"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Easy."}], "encrypted_content": None},
        {"type": "message", "role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "I patch."}]},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch\n*** End Patch", "call_id": "call_2"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"},
        {"type": "function_call", "name": "read_file", "namespace": "mcp__docs", "arguments": "{}", "call_id": "call_3"},
        {"type": "function_call_output", "call_id": "call_3", "output": [{"type": "input_text", "text": "def g(): pass"}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "g"}},
    ]},
    "tools in the input": {"tools": None, "instructions": "", "input": [
        {"type": "additional_tools", "role": "developer", "tools": [FUNCTION, PATCH]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rename f to g"}]},
    ]},
}  # fmt: skip


def main(url: str, model: str) -> int:
    failed = []
    bodies = [("/v1/chat/completions", name, {**body, "max_tokens": 4}) for name, body in CHATS.items()]
    shared = {
        "tools": [FUNCTION, PATCH, SPACE, {"type": "web_search", "external_web_access": False}], "tool_choice": "auto", "store": False,
        "parallel_tool_calls": False, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "max", "summary": "auto"},
        "client_metadata": {"x": "y"}, "text": {"verbosity": "low"}, "prompt_cache_key": "thread", "max_output_tokens": 4,
    }  # fmt: skip
    bodies += [("/v1/responses", name, {**shared, **body}) for name, body in ITEMS.items()]
    for path, name, body in bodies:
        try:
            post(url, path, {**body, "model": model})
        except AssertionError as error:
            failed.append(name)
            print(f"{name}: {error}")
    if not failed:
        print(f"passed, {len(bodies)} bodies")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
