"""What /v1/messages takes: its body, and its blocks as the messages, tools and switches that chat templates know.

Source: Anthropic's Messages API. Its conversation differs from OpenAI's in that results of tools stand in the user's message,
calls and reasoning in the assistant's content, and system texts anywhere.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.api.errors import bad_request, invalid, unsupported
from headrace.api.protocol import Body, Effort, SamplingFields, Thinking
from headrace.api.structured import Structure
from headrace.api.tool_choice import Choice, Named
from headrace.conversation.tool_grammar import FunctionDef, Tool

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "ctx": "user", "msg": "user"}
BILLING = "x-anthropic-billing-header:"  # a line that agents put into the system prompt; it changes with every request
_UNSEEN = ("redacted_thinking", "tool_reference")  # nothing that a template could show
_SERVER_TOOLS = ("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result")
Chat = list[dict[str, Any]]


class OutputConfig(Body, kw_only=True):
    effort: Effort | None = None
    format: dict[str, Any] | None = None


class ToolChoice(Body, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(Body, kw_only=True):
    """POST /v1/messages and /v1/messages/count_tokens. Fields of Anthropic's own services are unknown here and left out."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None  # needed to generate
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # its format, as older clients send it
    # ignored: bookkeeping, and what marks texts for a cache that finds them by itself here
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    # ours, as everywhere
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    seed: int | None = None

    @property
    def request_id(self) -> None:
        """An id that the client gives; this API has none."""

    def sampling_fields(self) -> SamplingFields:
        return SamplingFields(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed, stop=self.stop_sequences or None
        )


def split_tools(given: list[dict[str, Any]] | None) -> tuple[list[Tool], list[str]]:
    """The functions, and the places of tools that their provider runs: these are left out."""
    tools, left_out = [], []
    for i, tool in enumerate(given or ()):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            left_out.append(f"tools[{kind}]")
            continue
        name, schema, about = tool.get("name"), tool.get("input_schema"), tool.get("description")
        if not isinstance(name, str) or not name:
            raise invalid(f"tools[{i}].name", "a name is needed.", "missing_required_parameter")
        if not isinstance(schema, dict):
            raise invalid(f"tools[{i}].input_schema", "a JSON schema is needed.", "missing_required_parameter")
        if about is not None and not isinstance(about, str):
            raise invalid(f"tools[{i}].description", "a text is needed.")
        parameters = {"type": "object", **{k: v for k, v in schema.items() if v is not None}}
        strict = True if tool.get("strict") is True else None
        tools.append(Tool(function=FunctionDef(name=name, description=about, parameters=parameters, strict=strict)))
    return tools, left_out


def choice_of(choice: ToolChoice | None, tools: list[Tool]) -> Choice:
    """As `tool_choice` of chat."""
    if choice is None or choice.type in ("auto", "none"):
        return None if not tools or choice is None else choice.type
    if choice.type == "any":
        return "required"
    if choice.type != "tool":
        raise invalid("tool_choice.type", "allowed are auto, any, tool, none.")
    if choice.name is None:
        raise invalid("tool_choice.name", "the name of a tool is needed.", "missing_required_parameter")
    return Named(choice.name)


def structure(body: MessagesRequest) -> Structure | None:
    form, place = None if body.output_config is None else body.output_config.format, "output_config.format"
    if form is not None and body.output_format is not None:
        raise invalid("output_format", f"{place} is given, too: one of them.")
    if form is None:
        form, place = body.output_format, "output_format"
    if form is None:
        return None
    if form.get("type") != "json_schema":
        raise invalid(f"{place}.type", "allowed is json_schema.")
    if not isinstance(form.get("schema"), dict):
        raise invalid(f"{place}.schema", "a JSON schema is needed.", "missing_required_parameter")
    return Structure("json", form["schema"], place)


def thinking_kwargs(body: MessagesRequest) -> dict[str, Any]:
    """Thinking is off unless it is asked for, as at Anthropic; a template without the switches ignores them."""
    on = body.thinking is not None and body.thinking.type != "disabled"
    kwargs: dict[str, Any] = {"enable_thinking": on, "thinking": on}
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    return kwargs | (body.chat_template_kwargs or {})


# ---------------------------------------------------------------------------------------------------------------------
# the conversation


def conversation(body: MessagesRequest, keeps_later_systems: bool) -> Chat:
    """As chat's messages. `keeps_later_systems`: the template shows a system message in the middle; else its text goes to the
    message before or after it. Raises ApiError naming the block."""
    if not body.messages:
        raise invalid("messages", "an empty list; at least one message is needed.")
    system = [] if body.system is None else [_without_billing(text) for text in _texts(body.system, "system")]
    chat: Chat = []
    for i, message in enumerate(body.messages):
        path, role = f"messages[{i}]", ROLES.get(str(message.get("role")))
        if role is None:
            raise invalid(f"{path}.role", "allowed are user, assistant, system.")
        if role == "system":
            text = "\n".join(_without_billing(text) for text in _texts(message.get("content"), f"{path}.content"))
            if not chat:
                system.append(text)
            else:
                _add_system(chat, text, keeps_later_systems)
        elif role == "user":
            _add_user(chat, message.get("content"), f"{path}.content")
        else:
            _add_assistant(chat, message.get("content"), f"{path}.content")
    if (text := "\n\n".join(filter(None, system))):
        chat.insert(0, {"role": "system", "content": text})
    return chat


def _without_billing(text: str) -> str:
    """The line would make every prompt a new one."""
    if not text.startswith(BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")


def _add_system(chat: Chat, text: str, keeps: bool) -> None:
    last = chat[-1]
    if not text:
        return
    if keeps and last["role"] != "tool":  # between results and what the model says to them nothing may stand
        chat.append({"role": "system", "content": text})
    elif last["role"] in ("user", "tool"):
        last["content"] = f"{last['content']}\n\n{text}" if last["content"] else text
    else:
        chat.append({"role": "user", "content": text})


def _add_user(chat: Chat, content: Any, path: str) -> None:
    """Results of tools first, directly behind their calls; consecutive messages of the user are one."""
    texts: list[str] = []
    for at, block in _blocks(content, path):
        if block.get("type") == "tool_result":
            [call] = _string(block, "tool_use_id", at)
            result = "\n".join(_texts(block.get("content") or "", f"{at}.content"))
            result = f"Error: {result}" if block.get("is_error") else result
            chat.append({"role": "tool", "tool_call_id": call, "content": result})
        else:
            texts += _text_of(block, at)
    if not texts and chat and chat[-1]["role"] == "tool":
        return
    text = "\n".join(texts)
    if chat and chat[-1]["role"] == "user":
        chat[-1]["content"] += f"\n\n{text}"
    else:
        chat.append({"role": "user", "content": text})


def _add_assistant(chat: Chat, content: Any, path: str) -> None:
    """Text, reasoning and calls are one message."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in _blocks(content, path):
        kind = block.get("type")
        if kind == "thinking":
            reasoning += _string(block, "thinking", at)
        elif kind == "tool_use":
            [call], [name], arguments = _string(block, "id", at), _string(block, "name", at), block.get("input")
            if not isinstance(arguments, dict):
                raise invalid(f"{at}.input", "an object is needed.")
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": call, "type": "function", "function": function})
        else:
            texts += _text_of(block, at)
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": ""})
    message: dict[str, Any] = chat[-1]
    message["content"] += "".join(texts)
    if reasoning:
        message["reasoning_content"] = message.get("reasoning_content", "") + "\n".join(reasoning)
    if calls:
        message.setdefault("tool_calls", []).extend(calls)


def _blocks(content: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(path, "text or a list of blocks is needed.")
    return [(f"{path}[{i}]", block) for i, block in enumerate(content)]


def _texts(content: Any, path: str) -> list[str]:
    return [text for at, block in _blocks(content, path) for text in _text_of(block, at)]


def _text_of(block: dict[str, Any], path: str) -> list[str]:
    """Of a block that is text, whatever it is called."""
    kind = block.get("type")
    if kind == "text":
        return _string(block, "text", path)
    if kind in _UNSEEN or kind in _SERVER_TOOLS:
        return []
    if kind == "search_result":
        return [str(block.get("title", "")), *_texts(block.get("content"), f"{path}.content")]
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        name = "data" if source["type"] == "text" else "content"
        return _texts(source.get(name), f"{path}.source.{name}")
    raise unsupported(f"{path}.type", f"{str(kind)[:100]} is no text, and this model takes no other kind of content")


def _string(block: dict[str, Any], name: str, path: str) -> list[str]:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{path}.{name}", "a text is needed.", "missing_required_parameter")
    return [value]


def check_generates(body: MessagesRequest) -> int:
    """max_tokens, which this API wants to be told."""
    if body.max_tokens is None:
        raise bad_request("max_tokens: a number is needed.", "max_tokens", "missing_required_parameter")
    if body.max_tokens < 1:
        raise invalid("max_tokens", f"got {body.max_tokens}, allowed: an integer >= 1.")
    return body.max_tokens
