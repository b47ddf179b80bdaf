"""How calls are written in formats whose arguments are JSON: what the grammar of forced calls makes, and what stands in a
conversation for a template that shows no calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class CallLayout:
    """NUMBER in a text stands for the number of the call."""

    begin: str
    before_name: str
    before_arguments: str
    after: str
    between: str | None  # None: there is only one call
    end: str

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Of (name, arguments as JSON)."""
        texts = [
            f"{self.before_name}{name}{self.before_arguments}{arguments}{self.after}".replace(NUMBER, str(i))
            for i, (name, arguments) in enumerate(calls)
        ]
        return self.begin + (self.between or "").join(texts) + self.end


NUMBER = "\ufdd0"
_OBJECT = ('{"name": "', '", "arguments": ', "}")
LAYOUTS: Mapping[str, CallLayout] = MappingProxyType(
    {
        "granite": CallLayout("<|tool_call|>[", *_OBJECT, ", ", "]"),
        "phi4_mini_json": CallLayout("functools[", *_OBJECT, ", ", "]"),
        "deepseek_v3": CallLayout(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
            "<｜tool▁calls▁end｜>",
        ),
        "deepseek_v31": CallLayout(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "",
            "<｜tool▁calls▁end｜>",
        ),
        "kimi_k2": CallLayout(
            "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.", f":{NUMBER}<|tool_call_argument_begin|>",
            "<|tool_call_end|>", "", "<|tool_calls_section_end|>",
        ),
        "openai": CallLayout("", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", None, ""),
    }
)  # fmt: skip
HERMES = CallLayout("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "")


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of the calls in an assistant's message."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        found.append((json.dumps(function.get("name"), ensure_ascii=False)[1:-1], arguments or "{}"))
    return found
