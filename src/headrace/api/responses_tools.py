"""Tools of /v1/responses as the functions that templates and parsers know, and the way back from a function's name.

A tool of a namespace is the function `NAMESPACE__NAME`; of custom tools see custom_tools. What a provider runs is left out and
named, as everywhere. The names of chat's tools are kept here, too.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

from headrace.api.body import read_part
from headrace.api.custom_tools import function_of
from headrace.api.errors import invalid
from headrace.api.responses_input import CustomTool, FlatTool, Namespace
from headrace.api.tool_choice import FUNCTION_NAME, check_name
from headrace.conversation.tool_grammar import FunctionDef, Tool

KINDS = ("function", "custom", "namespace")


class Origin(NamedTuple):
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ResponseTools:
    """The tools of one request. `ignored`: where what is left out is named; None: it is refused."""

    def __init__(self, ignored: list[str] | None):
        self.ignored = ignored
        self.functions: list[Tool] = []
        self.given: list[Any] = []  # as the response gives them back
        self._origins: dict[str, Origin] = {}  # name of the function -> tool
        self._names: dict[Origin, str] = {}

    def add(self, tools: list[dict[str, Any]], place: str) -> None:
        """Raises ApiError naming the tool below `place`."""
        for i, tool in enumerate(tools):
            at = f"{place}[{i}]"
            if self._foreign(tool, at, KINDS):
                continue
            if tool.get("type") == "namespace":
                space = read_part(tool, Namespace, at, self.ignored)
                self.given.append(space)
                for j, inner in enumerate(space.tools):
                    if not self._foreign(inner, f"{at}.tools[{j}]", KINDS[:2]):
                        self._add(inner, f"{at}.tools[{j}]", space.name)
            else:
                self.given.append(self._add(tool, at, None))

    def _foreign(self, tool: dict[str, Any], at: str, kinds: tuple[str, ...]) -> bool:
        kind = tool.get("type")
        if not isinstance(kind, str) or kind in kinds:
            return False
        if self.ignored is None:
            raise invalid(f"{at}.type", f"allowed are {', '.join(kinds)}.")
        self.ignored.append(f"tools[{kind}]")
        return True

    def _add(self, given: dict[str, Any], at: str, namespace: str | None) -> FlatTool | CustomTool:
        tool: FlatTool | CustomTool
        if given.get("type") == "custom":
            tool = custom = read_part(given, CustomTool, at, self.ignored)
            function = function_of(custom.name, custom.description, custom.format, at)
        else:
            tool = read_part(given, FlatTool, at, self.ignored)
            function = FunctionDef(**{f: getattr(tool, f) for f in FunctionDef.__struct_fields__})
        check_name(tool.name, f"{at}.name")
        origin = Origin(tool.name, namespace, isinstance(tool, CustomTool))
        if origin not in self._names:  # agents repeat them
            self.append(origin, function)
        return tool

    def append(self, origin: Origin, function: FunctionDef) -> None:
        function.name = self.new_name(origin)
        self.functions.append(Tool(function=function))

    def new_name(self, origin: Origin) -> str:
        """Of the function that stands for a tool; the same where it has one."""
        if origin in self._names:
            return self._names[origin]
        name = function_name(origin)
        if name in self._origins:
            name = _short(name, repr(origin))
        self._origins[name], self._names[origin] = origin, name
        return name

    def name(self, origin: Origin) -> str:
        """Of the function that stands for a tool, also for one that this request does not bring."""
        return self._names.get(origin) or function_name(origin)

    def origin(self, name: str) -> Origin:
        return self._origins.get(name) or Origin(name)

    def function(self, kind: str, name: str, namespace: str | None, field: str) -> str:
        """The function that stands for a tool of this request. Raises ApiError naming `field`."""
        origin = Origin(name, namespace or None, kind == "custom")
        if origin not in self._names:
            raise invalid(field, f"there is no {kind} tool named {name[:100]!r}.")
        return self._names[origin]


def function_name(origin: Origin) -> str:
    if origin.namespace is None:
        return origin.name
    joined = f"{origin.namespace}__{origin.name}"
    return joined if FUNCTION_NAME.fullmatch(joined) else _short(joined, joined)


def _short(name: str, key: str) -> str:
    """A name like `name` that is allowed, and another one for each `key`."""
    return re.sub(r"[^a-zA-Z0-9_.-]", "_", name[:55]) + "_" + hashlib.sha256(key.encode()).hexdigest()[:8]
