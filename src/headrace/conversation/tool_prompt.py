"""Tools for models whose chat template knows none: described in the system message, in the hermes format.

Without this the template would drop the tools silently. The words are those that Qwen's and Hermes' templates use, so
that a model which has seen any tool format has most likely seen this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.conversation.message_forms import check_messages
from headrace.conversation.template import ChatTemplate

INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def shown_to(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """Messages and tools as `template` is to be given them: what it would drop is spelled out."""
    knows = template.shows_tools if tools else template.shows_calls
    return (messages, tools) if knows else (with_tools(messages, tools or []), None)


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message, and earlier calls and their results as text.

    Raises ParameterError for messages that are none.
    """
    spelled: list[dict[str, Any]] = []
    after_result = False
    for message in check_messages(messages):
        plain = _spelled(message)
        if after_result and plain["role"] == "user":  # many templates take no two user messages one after the other
            spelled[-1]["content"] += "\n" + _text(plain)
        else:
            spelled.append(plain)
        after_result = message["role"] == "tool"
    if not tools:
        return spelled
    text = INTRODUCTION.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in tools))
    first = spelled[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{_text(first)}\n\n{text}"}, *spelled[1:]]
    return [{"role": "system", "content": text}, *spelled]


def _spelled(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
        return dict(message)
    texts = [_text(message)] if message.get("content") else []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            texts.append(f"<tool_call>\n{_call(function)}\n</tool_call>")
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments or "{}"}}}'
