"""Tools for models whose chat template knows none: described in the system message, in the model's own format where its
template shows what that is, else in the hermes format. And calls that a template would drop.

Without this the template would drop them silently. The words of the hermes format are those that Qwen's and Hermes' templates
use, so that a model which has seen any tool format has most likely seen this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headrace.conversation.call_layouts import HERMES, LAYOUTS, CallLayout, calls_of
from headrace.conversation.message_forms import check_messages
from headrace.conversation.template import ChatTemplate
from headrace.conversation.tool_formats import detect_tool_parser

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


# of models whose templates write calls, and show no tools
OWN_INTRODUCTIONS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("deepseek_v3", "deepseek_v31"),
        """## Tools

You can call these functions, each described with a JSON schema of its parameters:

{tools}

To call functions, end your answer with all the calls, written exactly in this form, each with its arguments as a JSON object:
{example}""",
    )
)
IN_SYSTEM_MESSAGE = "phi4_mini_json"  # whose template takes the tools as a field of the system message


def spoken_format(template: ChatTemplate) -> str | None:
    """The format of the calls that a model writes after it was shown tools by shown_to()."""
    form = detect_tool_parser(template.source(tools=True))
    return form if template.shows_tools or form in (*OWN_INTRODUCTIONS, IN_SYSTEM_MESSAGE) else "hermes"


def shown_to(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """Messages and tools as `template` is to be given them: what it would drop is spelled out.

    Raises ParameterError for messages that are none.
    """
    knows = template.shows_tools if tools else template.shows_calls
    form = detect_tool_parser(template.source(bool(tools)))
    layout = HERMES if form == "hermes" and knows else LAYOUTS.get(form or "")
    if layout is None or not (knows or not tools or spoken_format(template) == form):
        return (messages, tools) if knows else (with_tools(messages, tools or []), None)
    if any(isinstance(m, Mapping) and m.get("tool_calls") for m in messages):
        drops_all = "tool_calls" not in template.source(bool(tools))
        messages = [_with_calls(m, layout, drops_all, form == "deepseek_v3") for m in check_messages(messages)]
    if not tools or knows:
        return messages, tools
    if form == IN_SYSTEM_MESSAGE:
        functions = [tool.get("function", tool) for tool in tools]
        return _with_system(messages, "", tools=json.dumps(functions, ensure_ascii=False)), None
    text = OWN_INTRODUCTIONS[form or ""].format(tools=_lines(tools), example=layout.written([("FUNCTION", "ARGUMENTS")]))
    return _with_system(messages, text), None


def _with_calls(message: dict[str, Any], layout: CallLayout, drops_all: bool, drops_beside_text: bool) -> dict[str, Any]:
    """The message with its calls in the text, if the template would drop them."""
    if not message.get("tool_calls") or not (drops_all or (drops_beside_text and message.get("content"))):
        return message
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**rest, "content": _text(message) + layout.written(calls_of(message))}


def _with_system(messages: Sequence[Mapping[str, Any]], text: str, **fields: Any) -> list[Mapping[str, Any]]:
    """The conversation with this at the end of its system message."""
    first, *others = check_messages(messages)
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text, **fields}, first, *others]
    return [{**first, "role": "system", "content": "\n\n".join(filter(None, (_text(first), text))), **fields}, *others]


def _lines(tools: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


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
    text = INTRODUCTION.format(tools=_lines(tools))
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
    texts.append(HERMES.written(calls_of(message)))
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": "\n".join(texts)}


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
