"""`tool_choice` as OpenAI's clients write it, in chat and in /v1/responses, as what it asks for.

`allowed_tools` leaves the list of tools as it is from turn to turn, and says which of them may be called in this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal

import msgspec

from headrace.api.errors import invalid
from headrace.api.protocol import ChatTool, ToolChoice
from headrace.api.responses_input import FlatToolChoice
from headrace.api.responses_tools import ResponseTools
from headrace.api.tool_choice import MAX_TOOLS, Allowed, Choice, Named


def of_chat(choice: str | ToolChoice | None, tools: ResponseTools) -> Choice:
    """Raises ApiError naming the part that is missing, wrong or too much."""
    if choice is None or isinstance(choice, str):
        return choice
    check_parts(choice, "tool_choice", (choice.type,))
    if (named := choice.function or choice.custom) is not None:
        return Named(tools.function(choice.type, named.name, None, "tool_choice"))
    assert choice.allowed_tools is not None
    field, names = "tool_choice.allowed_tools", []
    for at, tool in _entries(choice.allowed_tools.tools, f"{field}.tools", ("function", "custom")):
        kind = tool.get("type", "function")
        part = tool.get(kind)
        name = _text(part if isinstance(part, dict) else {}, "name", f"{at}.{kind}")
        names.append(tools.function(kind, name, None, at))
    return _allowed(choice.allowed_tools.mode, names, field)


def of_responses(choice: str | FlatToolChoice | None, tools: ResponseTools) -> Choice:
    """The same of /v1/responses, where custom tools and those of a namespace can be chosen, too."""
    if choice is None or isinstance(choice, str):
        return None if choice == "auto" and not tools.functions else choice
    if choice.type != "allowed_tools":
        check_parts(choice, "tool_choice", ("name",), ("namespace",))
        return Named(tools.function(choice.type, str(choice.name), choice.namespace or None, "tool_choice"))
    check_parts(choice, "tool_choice", ("mode", "tools"))
    assert choice.mode and choice.tools is not msgspec.UNSET
    names = []
    for at, tool in _entries(choice.tools, "tool_choice.tools", ("function", "custom")):
        namespace = None if tool.get("namespace") is None else _text(tool, "namespace", at)
        names.append(tools.function(tool.get("type", "function"), _text(tool, "name", at), namespace, at))
    return _allowed(choice.mode, names, "tool_choice")


def check_parts(
    whole: ToolChoice | FlatToolChoice | ChatTool, field: str, needed: Collection[str], more: Collection[str] = ()
) -> None:
    """That it has those parts that its type has. Raises ApiError naming the part below `field`."""
    for part in whole.__struct_fields__:
        given = getattr(whole, part) not in (None, msgspec.UNSET)
        if part in needed and not given:
            raise invalid(f"{field}.{part}", f"it is needed for {whole.type}.", "missing_required_parameter")
        if given and part not in (*needed, *more, "type"):
            raise invalid(f"{field}.{part}", f"{whole.type} has no such part.")


def _entries(tools: list[dict[str, Any]], field: str, kinds: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, tool) of those that can be called here. Others are left out, as they are of `tools`, where they are named."""
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise invalid(field, f"{len(tools)} tools; allowed are 1 to {MAX_TOOLS}.")
    for i, tool in enumerate(tools):
        kind = tool.get("type", "function")
        if not isinstance(kind, str):
            raise invalid(f"{field}[{i}].type", "a text is expected.")
        if kind in kinds:
            yield f"{field}[{i}]", tool


def _text(holder: dict[str, Any], name: str, at: str) -> str:
    value = holder.get(name)
    if value is None:
        raise invalid(f"{at}.{name}", "it is needed.", "missing_required_parameter")
    if not isinstance(value, str):
        raise invalid(f"{at}.{name}", "a text is expected.")
    return value


def _allowed(mode: Literal["auto", "required"], names: list[str], field: str) -> Choice:
    if names:
        return Allowed(mode, frozenset(names))
    if mode == "required":
        raise invalid(f"{field}.tools", "none of them is a tool that can be called here.")
    return "none"
