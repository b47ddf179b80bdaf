"""What /v1/responses takes: its body, and its input items as the messages of a conversation."""

from __future__ import annotations

from typing import Any, Literal

from headrace.api.errors import invalid, unsupported
from headrace.api.protocol import Body, Effort, FunctionName, NamedTool, OpenAIFields
from headrace.api.structured import Structure, from_response_format, json_schema
from headrace.conversation.tool_grammar import FunctionDef, Tool

LOGPROBS = "message.output_text.logprobs"
# what `include` may name; all but LOGPROBS concern tools that are not run here, or storage
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
)  # fmt: skip


class FlatTool(FunctionDef, kw_only=True):
    """A function; other kinds of tools are run by their provider and not served here."""

    type: Literal["function"] = "function"


class FlatNamedTool(FunctionName, kw_only=True):
    type: Literal["function"] = "function"


class TextOptions(Body, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None  # ignored


class ReasoningOptions(Body, kw_only=True):
    effort: Effort | None = None
    summary: str | None = None  # ignored: reasoning is given in full
    generate_summary: str | None = None  # ignored


class ResponsesRequest(OpenAIFields, kw_only=True):
    """POST /v1/responses. Nothing is stored: what would need a stored response is refused."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # given back: it counts tools run by the server, and there are none
    # refused unless they ask for nothing
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None


def check_unserved(body: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise unsupported(name, "not supported: this server stores nothing; send the whole input")
    if body.background:
        raise unsupported("background", "not supported: this server stores nothing")
    if body.truncation == "auto":
        raise unsupported("truncation", "only disabled: a prompt is never cut silently (truncate_prompt_tokens cuts it)")
    if body.n not in (None, 1):
        raise unsupported("n", "one response for each request")
    if body.max_tokens is not None:
        raise unsupported("max_tokens", "it is called max_output_tokens here")
    for value in body.include or ():
        if value not in INCLUDABLE:
            raise invalid("include", f"allowed are {', '.join(INCLUDABLE)}.")


def nested_tools(tools: list[FlatTool] | None) -> list[Tool] | None:
    if tools is None:
        return None
    return [Tool(function=FunctionDef(**{f: getattr(t, f) for f in FunctionDef.__struct_fields__})) for t in tools]


def nested_choice(choice: str | FlatNamedTool | None) -> str | NamedTool | None:
    return NamedTool(function=FunctionName(name=choice.name)) if isinstance(choice, FlatNamedTool) else choice


def structure(text: TextOptions | None) -> Structure | None:
    """`text.format`, whose json_schema is flat."""
    form = text.format if text is not None else None
    if form is not None and form.get("type") == "json_schema":
        flat = {k: v for k, v in form.items() if k != "type"}
        return json_schema(flat, "text.format", "text.format")
    return from_response_format(form, "text.format")


# ---------------------------------------------------------------------------------------------------------------------
# input items


def messages(value: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation that the input stands for. Raises ApiError naming the item."""
    found: list[dict[str, Any]] = []
    if isinstance(value, str):
        found.append({"role": "user", "content": value})
    else:
        if not value:
            raise invalid("input", "an empty list; at least one item is needed.")
        for i, item in enumerate(value):
            _add_item(found, item, f"input[{i}]")
    if instructions is not None:
        _add_instructions(found, instructions)
    return found


def _add_instructions(found: list[dict[str, Any]], instructions: str) -> None:
    """In front, and in one system message with the input's own: many templates take only one."""
    first = found[0] if found else {}
    if first.get("role") in ("system", "developer"):
        first["content"] = f"{instructions}\n\n{first['content']}"
    else:
        found.insert(0, {"role": "system", "content": instructions})


def _add_item(found: list[dict[str, Any]], item: dict[str, Any], path: str) -> None:
    """Append one item. Reasoning opens a message of the assistant; the answer or the calls that follow at once complete it."""
    kind = item.get("type", "message")
    last = found[-1] if found else {}
    thought = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
    if kind == "message":
        message = {"role": item.get("role"), "content": _content(item.get("content"), f"{path}.content")}
        if thought and message["role"] == "assistant":
            last.update(message)
        else:
            found.append(message)
    elif kind == "function_call":
        call: dict[str, Any] = {"id": _text(item, "call_id", path), "type": "function"}
        call["function"] = {"name": _text(item, "name", path), "arguments": _text(item, "arguments", path)}
        if last.get("role") != "assistant":
            found.append({"role": "assistant", "content": None})
        elif thought:
            last["content"] = None
        found[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{path}.output")
        found.append({"role": "tool", "tool_call_id": _text(item, "call_id", path), "content": output})
    elif kind == "reasoning":
        if (text := _reasoning(item)) and thought:
            last["reasoning_content"] += "\n" + text
        elif text:
            found.append({"role": "assistant", "content": "", "reasoning_content": text})
    else:
        raise invalid(f"{path}.type", "allowed are message, function_call, function_call_output, reasoning.")


def _reasoning(item: dict[str, Any]) -> str:
    """What can be read of it: another server's may be encrypted."""
    parts = item.get("content")
    parts = parts if isinstance(parts, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


def _text(item: dict[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{path}.{name}", "a text is needed.")
    return value


def _content(value: Any, path: str) -> str:
    """Text, or parts that are text: joined, as they are one content."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(path, "text or a list of parts is needed.")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        name = "refusal" if kind == "refusal" else "text"
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(part.get(name), str):
            raise invalid(f"{path}[{i}]", "allowed are parts of text (input_text, output_text, refusal).")
        texts.append(part[name])
    return "\n".join(texts)
