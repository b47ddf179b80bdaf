"""The values that tool calls are written as, JSON and Python literals: where they end, and what they say."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_NAME = 256  # characters of a tool's name
MAX_DEPTH = 100  # brackets within brackets


class BracketScanner:
    """Finds the end of a bracketed value in text that comes in pieces; brackets in strings do not count."""

    def __init__(self, quotes: str = '"'):
        self._outside = re.compile(f"[{quotes}\\[\\](){{}}]")
        self._inside = {q: re.compile(f"[{q}\\\\]") for q in quotes}
        self._depth, self._quote, self._escaped = 0, "", False
        self.too_deep = False

    def push(self, text: str) -> int:
        """Where the value ends: an index behind its last bracket, or -1 if it goes on."""
        i = 0
        while i < len(text):
            if self._escaped:
                self._escaped = False
                i += 1
                continue
            hit = (self._inside[self._quote] if self._quote else self._outside).search(text, i)
            if hit is None:
                return -1
            c, i = hit.group(), hit.end()
            if c == "\\":
                self._escaped = True
            elif c in self._inside:
                self._quote = "" if self._quote else c
            elif c in "[{(":
                self._depth += 1
                self.too_deep |= self._depth > MAX_DEPTH
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return i
        return -1


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse_json(text: str) -> Any:
    """Strict but for line breaks in strings, which models write. Raises ValueError or RecursionError."""
    return json.loads(text, strict=False, parse_constant=_refuse_constant)


def cut_off(text: str) -> bool:
    """Whether `text` could be the beginning of a JSON value, and not the whole of one."""
    text = text.rstrip()
    try:
        parse_json(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        if error.msg.startswith("Unterminated string") or not rest:
            return True
        if "escape" in error.msg:
            return len(rest) < 6
        return any(word.startswith(rest) for word in ("true", "false", "null", "-"))
    except (ValueError, RecursionError):
        return False
    return False


def json_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair cannot be sent otherwise
        return json.dumps(value)
    return text


def read_call(value: Any, keys: tuple[str, ...]) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of an object with a name and, under one of `keys`, arguments; None if it is none."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not 0 < len(value["name"]) <= MAX_NAME:
        return None
    arguments = next((value[k] for k in keys if k in value), None)
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    return (value["name"], json_text(arguments)) if isinstance(arguments, dict) else None


def read_python_calls(text: str, names: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]] | None:
    """[(name, arguments)] of `[f(a=1), g()]`; None if it is anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        calls = []
        for call in tree.elts:
            if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
                return None
            arguments = {str(k.arg): _python_value(k.value, names) for k in call.keywords}
            json.dumps(arguments, allow_nan=False)
            calls.append((_dotted(call.func), arguments))
        return calls
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("not a name")


def _python_value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(e, names) for e in node.elts]
    if isinstance(node, ast.Dict):
        if any(k is None for k in node.keys):
            raise ValueError("** in a dict")
        keys = [_python_value(k, names) for k in node.keys if k is not None]
        if not all(isinstance(k, str) for k in keys):
            raise ValueError("a key that is not a string")
        return dict(zip(keys, [_python_value(v, names) for v in node.values], strict=True))
    return ast.literal_eval(node)
