"""Input items of /v1/responses as the messages of a conversation."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

from headrace.api.custom_tools import arguments_of
from headrace.api.errors import invalid
from headrace.api.responses_tools import Origin, function_name
from headrace.conversation.message_forms import ROLES

Items = list[dict[str, Any]]
SEAL = "headrace."  # what our `encrypted_content` begins with
TOOL_ITEMS = ("additional_tools", "tool_search_output")  # these bring tools
# what a provider has done by itself: nothing that a template could show
UNSEEN = (
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "tool_search_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", *TOOL_ITEMS,
)  # fmt: skip
KINDS = (
    "message", "agent_message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
    "custom_tool_call_output", "local_shell_call", "local_shell_call_output",
)  # fmt: skip


def as_items(value: str | Items) -> Items:
    """The input as a list. Raises ApiError for an empty one."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not value:
        raise invalid("input", "an empty list; at least one item is needed.")
    return value


def tools_in(items: Items) -> list[tuple[str, Items]]:
    """Tools that stand in the input, with their places."""
    found = []
    for i, item in enumerate(items):
        if item.get("type") in TOOL_ITEMS:
            tools = item.get("tools")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise invalid(f"input[{i}].tools", "a list of tools is needed.")
            found.append((f"input[{i}].tools", tools))
    return found


def left_out(items: Items) -> list[str]:
    """Items that are served without: what of them the model is not shown."""
    return [f"input[{item['type']}]" for item in items if item.get("type") in UNSEEN and item["type"] not in TOOL_ITEMS]


def messages(
    value: str | Items, instructions: str | None, name_of: Callable[[Origin], str] = function_name, before: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """The conversation that the items stand for, behind those of earlier turns. Raises ApiError naming the item.

    `name_of`: the function that stands for a tool.
    """
    reader = _Reader(name_of)
    for item in before:
        reader.add(item, "previous_response_id")
    for i, item in enumerate(as_items(value) if isinstance(value, str) else value):
        reader.add(item, f"input[{i}]")
    if instructions:
        _add_instructions(reader.found, instructions)
    return reader.found


def _add_instructions(found: list[dict[str, Any]], instructions: str) -> None:
    """In front, and in one system message with the input's own: many templates take only one."""
    first = found[0] if found else {}
    if first.get("role") in ("system", "developer"):
        first["content"] = f"{instructions}\n\n{first['content']}"
    else:
        found.insert(0, {"role": "system", "content": instructions})


class _Reader:
    """Reasoning opens a message of the assistant; the answer or the calls that follow at once complete it."""

    def __init__(self, name_of: Callable[[Origin], str]):
        self.found: list[dict[str, Any]] = []
        self._name_of = name_of

    def add(self, item: dict[str, Any], path: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, path)
        elif kind == "agent_message":
            self._agent_message(item, path)
        elif kind == "reasoning":
            self._reasoning(item)
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            self._call(item, kind, path)
        elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
            output = _content(item.get("output"), f"{path}.output")
            self.found.append({"role": "tool", "tool_call_id": _call_id(item, path), "content": output})
        elif kind not in UNSEEN:
            raise invalid(f"{path}.type", f"allowed are {', '.join((*KINDS, *UNSEEN))}.")

    def _thought(self) -> dict[str, Any] | None:
        """The last message, where it is reasoning alone."""
        last = self.found[-1] if self.found else {}
        return last if "reasoning_content" in last and not last["content"] and "tool_calls" not in last else None

    def _message(self, item: dict[str, Any], path: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise invalid(f"{path}.role", f"allowed are {', '.join(ROLES)}.")
        message = {"role": role, "content": _content(item.get("content"), f"{path}.content")}
        if role == "assistant" and (thought := self._thought()) is not None:
            thought.update(message)
        else:
            self.found.append(message)

    def _agent_message(self, item: dict[str, Any], path: str) -> None:
        """What another agent says, whose reader the model is; what is encrypted in it was never meant for us."""
        content = item.get("content")
        if isinstance(content, list):
            content = [p for p in content if not (isinstance(p, dict) and p.get("type") == "encrypted_content")]
        said = _content(content, f"{path}.content")
        head = f"Message from agent {_text(item, 'author', path)} to {_text(item, 'recipient', path)}:"
        self.found.append({"role": "user", "content": f"{head}\n{said}"})

    def _reasoning(self, item: dict[str, Any]) -> None:
        text, thought = reasoning_text(item), self._thought()
        if text and thought is not None:
            thought["reasoning_content"] += "\n" + text
        elif text:
            self.found.append({"role": "assistant", "content": "", "reasoning_content": text})

    def _call(self, item: dict[str, Any], kind: str, path: str) -> None:
        if kind == "local_shell_call":
            name, arguments = "local_shell", json.dumps(item.get("action") or {}, ensure_ascii=False)
        else:
            namespace = item.get("namespace")
            if namespace is not None and not isinstance(namespace, str):
                raise invalid(f"{path}.namespace", "a text is needed.")
            custom = kind == "custom_tool_call"
            name = self._name_of(Origin(_text(item, "name", path), namespace or None, custom))
            arguments = _text(item, "input" if custom else "arguments", path)
            if custom:
                arguments = arguments_of(arguments)
        call = {"id": _call_id(item, path), "type": "function", "function": {"name": name, "arguments": arguments}}
        if not self.found or self.found[-1]["role"] != "assistant":
            self.found.append({"role": "assistant", "content": None})
        elif (thought := self._thought()) is not None:
            thought["content"] = None
        self.found[-1].setdefault("tool_calls", []).append(call)


# ---------------------------------------------------------------------------------------------------------------------
# reasoning, given to clients that keep it for us


def sealed(text: str) -> str:
    """Not a secret, and nobody's business: the client hands it back."""
    return SEAL + base64.urlsafe_b64encode(text.encode()).decode()


def reasoning_text(item: dict[str, Any]) -> str:
    """What can be read of it; that of another server may be encrypted."""
    if text := _texts(item.get("content")):
        return text
    seal = item.get("encrypted_content")
    if isinstance(seal, str) and seal.startswith(SEAL):
        try:
            return base64.b64decode(seal[len(SEAL) :], altchars=b"-_", validate=True).decode()
        except ValueError:
            pass
    return _texts(item.get("summary"))


def _texts(parts: Any) -> str:
    parts = parts if isinstance(parts, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


# ---------------------------------------------------------------------------------------------------------------------
# fields of items


def _text(item: dict[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{path}.{name}", "a text is needed.")
    return value


def _call_id(item: dict[str, Any], path: str) -> str:
    """Calls of the shell, and what they put out, may have an `id` only."""
    shell = str(item.get("type")).startswith("local_shell_call") and item.get("call_id") is None
    return _text(item, "id" if shell else "call_id", path)


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
