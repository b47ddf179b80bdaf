"""Whole sessions of coding agents: they send what Claude Code 2.1 and Codex 0.171 send, run what the model calls in a folder, and
send that back, until the model is done; their connections are cut anywhere, and they ask again.

`make conformance` has the agents themselves do this (conformance/coding_clients.py).
"""

from __future__ import annotations

import itertools
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import coding_agents as play

LOST = (httpx.RemoteProtocolError, httpx2.RemoteProtocolError, anthropic.APIConnectionError, openai.APIConnectionError)
CUTS = st.lists(st.integers(0, 40), max_size=4)


def run(command: str, folder: Path) -> str:
    ran = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=60)
    return ran.stdout + ran.stderr


def replaced(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} in {text!r}"
    path.write_text(text.replace(old, new))
    return "The file has been updated."


class Agent:
    """Goes on until the model calls nothing more. `said`: what it has seen, without ids."""

    def __init__(self, url: str, folder: Path):
        self.url, self.folder, self.said = url, folder, list[Any]()
        (folder / "a.py").write_text(play.FILE)

    def work(self) -> Agent:
        for _ in range(10):
            while True:
                try:
                    calls = self.turn()
                    break
                except LOST:
                    pass  # the same again
            if not calls:
                assert (self.folder / "a.py").read_text() == play.WANTED
                return self
        raise AssertionError(f"it does not come to an end: {self.said}")

    def turn(self) -> int:
        raise NotImplementedError


def function(name: str, *properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {p: {"type": "string"} for p in properties}, "required": list(properties)}
    return {"name": name, "description": f"Tool {name}", "schema": schema}


class ClaudeCode(Agent):
    """Anthropic's package below it, as there; every turn's prompt is counted before it is sent."""

    def __init__(self, url: str, folder: Path):
        super().__init__(url, folder)
        self.client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
        reminder = {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-29.\n</system-reminder>\n\n"}
        self.messages: list[Any] = [
            {"role": "user", "content": [reminder, {"type": "text", "text": play.TASK}]}, {"role": "system", "content": "Available agents: none"},
        ]  # fmt: skip
        self.turns = 0

    def body(self) -> dict[str, Any]:
        known = {t["name"]: t for t in (
            function("Read", "file_path"), function("Edit", "file_path", "old_string", "new_string"), function("Bash", "command", "description"))}  # fmt: skip
        billing = f"x-anthropic-billing-header: cc_version=2.1.197.53e; cc_entrypoint=sdk-cli; cch={self.turns};"
        tools = [{"name": t["name"], "description": t["description"], "input_schema": t["schema"]} for t in known.values()]
        return {
            "model": "scripted", "messages": self.messages, "tools": tools,
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
            "thinking": {"type": "adaptive"}, "extra_query": {"beta": "true"}, "extra_headers": {"anthropic-beta": "claude-code-20250219"},
        }  # fmt: skip

    def turn(self) -> int:
        counted = self.client.messages.count_tokens(**self.body()).input_tokens
        more = {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "output_config": {"effort": "high"},
            "metadata": {"user_id": '{"device_id":"6e","account_uuid":"","session_id":"43"}'},
        }  # fmt: skip
        with self.client.messages.stream(**self.body(), max_tokens=32000, extra_body=more) as stream:
            message = stream.get_final_message()
        assert counted == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        self.turns += 1
        content = [{k: v for k, v in b.to_dict().items() if k not in ("citations", "parsed_output")} for b in message.content]
        self.messages.append({"role": "assistant", "content": content})
        results = []
        for block in content:
            self.said.append({k: v for k, v in block.items() if k != "id"})
            if block["type"] == "tool_use":
                output = self.use(block["name"], block["input"])
                results.append({"type": "tool_result", "tool_use_id": block["id"], "content": output, "is_error": False})
                self.said.append(output)
        assert message.stop_reason == ("tool_use" if results else "end_turn")
        if results:
            results[-1]["cache_control"] = {"type": "ephemeral"}
            self.messages.append({"role": "user", "content": results})
            self.messages.append({"role": "system", "content": f"<total_tokens>{100000 - self.turns} tokens left</total_tokens>"})
        return len(results)

    def use(self, name: str, given: dict[str, Any]) -> str:
        if name == "Bash":
            return run(given["command"], self.folder)
        path = self.folder / given["file_path"]
        if name == "Edit":
            return replaced(path, given["old_string"], given["new_string"])
        assert name == "Read"
        return "".join(f"{n}\t{line}\n" for n, line in enumerate(path.read_text().splitlines(), 1))


def apply_patch(patch: str, folder: Path) -> str:
    """One hunk of one file."""
    begin, file, _, *lines, end, rest = patch.split("\n")
    assert (begin, end, rest) == ("*** Begin Patch", "*** End Patch", "") and file.startswith("*** Update File: ")
    old, new = ("\n".join(line[1:] for line in lines if line[:1] in kinds) for kinds in (" -", " +"))
    return replaced(folder / file.partition(": ")[2], old, new)


class Codex(Agent):
    """The openai package below it. `stored`: each turn names the one before and sends only what is new; else all, every time."""

    def __init__(self, url: str, folder: Path, stored: bool):
        super().__init__(url, folder)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        self.stored, self.previous = stored, None
        texts = ("developer", "Sandbox: none."), ("user", "<environment_context>here</environment_context>"), ("user", play.TASK)
        self.input: list[Any] = [{"type": "message", "role": r, "content": [{"type": "input_text", "text": t}]} for r, t in texts]

    def turn(self) -> int:
        shell, patch = function("exec_command", "cmd"), "The `apply_patch` tool can be used to edit files."
        tools = [
            {"type": "function", "name": "exec_command", "description": "Runs", "strict": False, "parameters": shell["schema"]},
            {"type": "custom", "name": "apply_patch", "description": patch, "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin"}},
            {"type": "namespace", "name": "multi_agent_v1", "description": "Others", "tools": [
                {"type": "function", "name": "close_agent", "description": "Ends", "strict": False, "parameters": {"type": "object", "properties": {}}}]},
            {"type": "local_shell"}, {"type": "web_search", "external_web_access": True},
        ]  # fmt: skip
        body = {
            "model": "gpt-5.5", "input": self.input, "tools": tools, "tool_choice": "auto", "parallel_tool_calls": True, "stream": True,
            "reasoning": {"effort": "medium", "summary": "auto"}, "store": self.stored, "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "019a", "text": {"verbosity": "low"}, "instructions": "You are Codex.", "previous_response_id": self.previous,
        }  # fmt: skip
        done, ended = [], None
        stream = self.client.responses.create(**body, extra_body={"client_metadata": {"x": "y"}})  # type: ignore[call-overload]
        for event in stream:
            if event.type == "response.output_item.done":
                done.append(event.item.to_dict())
            elif event.type == "response.completed":
                ended = event.response
        if ended is None:
            raise httpx.RemoteProtocolError("stream closed before response.completed")
        assert [item.to_dict() for item in ended.output] == done and ended.usage.output_tokens > 0
        results = [self.use(item) for item in done if item["type"] in ("function_call", "custom_tool_call")]
        self.said += [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in [*done, *results]]
        self.previous = ended.id if self.stored else None
        self.input = results if self.stored else [*self.input, *done, *results]
        return len(results)

    def use(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["type"] == "custom_tool_call":
            assert item["name"] == "apply_patch"
            output: Any = apply_patch(item["input"], self.folder)
        else:
            text = run(json.loads(item["arguments"])["cmd"], self.folder)
            output = [{"type": "input_text", "text": "Process exited with code 0\nOutput:\n"}, {"type": "input_text", "text": text}]
        return {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": output}


AGENTS = {
    "Claude Code": (ClaudeCode, lambda _: play.claude_lines()), "Codex": (lambda *a: Codex(*a, stored=False), lambda _: play.codex_lines()),
    "Codex, stored": (lambda *a: Codex(*a, stored=True), lambda _: play.codex_lines()),
}  # fmt: skip


def session(kind: str, cuts: list[int]) -> tuple[list[Any], int]:
    """What the agent has seen at the end, and how often its connection was cut."""
    agent, lines = AGENTS[kind]
    left = itertools.chain(cuts, itertools.repeat(-1))
    with tempfile.TemporaryDirectory() as folder, play.served(lines(folder), lambda: next(left)) as (url, app):
        return agent(url, Path(folder)).work().said, app.times


@pytest.mark.parametrize("kind", AGENTS)
def test_a_session_ends_the_same_wherever_it_is_cut(kind):
    whole, times = session(kind, [])
    assert not times and f"Done: it prints {play.SAYS}." in str(whole[-1])
    assert "I look at it first." in str(whole[0]) and play.SAYS in str(whole)

    @settings(max_examples=4)
    @given(cuts=CUTS)
    def cut_anywhere(cuts):
        assert session(kind, cuts)[0] == whole

    cut_anywhere()
    said, times = session(kind, [0, 3, 7, 2])
    assert said == whole and times >= 3
