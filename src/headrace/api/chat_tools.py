"""Tools of chat completions, and calls to them: functions, and custom tools, which are functions too for the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.api.custom_tools import arguments_of, custom_input, function_of
from headrace.api.errors import invalid
from headrace.api.protocol import ChatTool
from headrace.api.responses_tools import Origin, ResponseTools
from headrace.api.tool_choice import check_name
from headrace.api.tool_choice_input import check_parts
from headrace.conversation.events import CallArguments, CallBegin, Event


def tools_of(given: Sequence[ChatTool] | None) -> ResponseTools:
    """The tools of a request. Functions keep their names. Raises ApiError naming the tool."""
    tools = ResponseTools(None)
    for i, tool in enumerate(given or ()):
        check_parts(tool, f"tools[{i}]", (tool.type,))
        if tool.function is not None:
            tools.new_name(Origin(tool.function.name))
    for i, tool in enumerate(given or ()):
        if tool.function is not None:
            tools.append(Origin(tool.function.name), tool.function)
        elif (custom := tool.custom) is not None:
            at = f"tools[{i}].custom"
            check_name(custom.name, f"{at}.name")
            function = function_of(custom.name, custom.description, custom.format, at, "grammar")
            tools.append(Origin(custom.name, custom=True), function)
    return tools


def with_functions(messages: list[dict[str, Any]], tools: ResponseTools) -> list[dict[str, Any]]:
    """The messages, with calls to custom tools as the calls to functions that they are for the model. Raises ApiError."""
    return [_with_functions(message, tools, f"messages[{i}].tool_calls") for i, message in enumerate(messages)]


def _with_functions(message: dict[str, Any], tools: ResponseTools, at: str) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(isinstance(call, dict) and call.get("type") == "custom" for call in calls):
        return message
    return {**message, "tool_calls": [_as_function(call, tools, f"{at}[{j}]") for j, call in enumerate(calls)]}


def _as_function(call: Any, tools: ResponseTools, at: str) -> Any:
    if not isinstance(call, dict) or call.get("type") != "custom":
        return call
    custom = call.get("custom")
    if not isinstance(custom, dict):
        raise invalid(f"{at}.custom", "an object with name and input is needed.", "missing_required_parameter")
    for field in ("name", "input"):
        if not isinstance(custom.get(field), str):
            raise invalid(f"{at}.custom.{field}", "a text is needed.", "missing_required_parameter")
    function = {"name": tools.name(Origin(custom["name"], custom=True)), "arguments": arguments_of(custom["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}


class CustomInputs:
    """The events of one answer, in which a call to a custom tool has its input in the place of its arguments, at its end."""

    def __init__(self, tools: ResponseTools):
        self.customs: set[int] = set()  # indices of such calls
        self._tools = tools
        self._open: int | None = None
        self._pieces: list[str] = []  # of the open call's arguments

    def read(self, events: list[Event], *, last: bool) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if isinstance(event, CallArguments) and event.index == self._open:
                self._pieces.append(event.text)
                continue
            found += self._close()
            if isinstance(event, CallBegin) and self._tools.origin(event.name).custom:
                self._open = event.index
                self.customs.add(event.index)
            found.append(event)
        return found + self._close() if last else found

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        index, text = self._open, custom_input("".join(self._pieces))
        self._open = None
        self._pieces.clear()
        return [CallArguments(index, text)] if text else []
