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


def _number(text: str) -> int:
    """Numbers are passed on as they are written, and no number is too long for that."""
    return 0


_STRING = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_NUMBER = re.compile(r"(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_int=_number, parse_float=_number)


def parse_json(text: str) -> Any:
    """Strict but for line breaks in strings, which models write; a number is 0. Raises ValueError or RecursionError."""
    return _DECODER.decode(text)


def as_written(text: str) -> str:
    """What parse_json() takes as JSON: the same text, but for the line breaks in its strings."""
    return _STRING.sub(lambda s: _CONTROL.sub(lambda c: json.dumps(c.group())[1:-1], s.group()), text)


def _members(text: str) -> dict[str, str]:
    """The values of an object's text, as they are written."""
    found: dict[str, str] = {}
    at = _after(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _after(text, _after(text, at) + 1)  # behind the colon
        _, end = _DECODER.raw_decode(text, begin)
        found[key] = text[begin:end]
        at = _after(text, end)
        at = _after(text, at + 1) if text[at] == "," else at
    return found


def _after(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too


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
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair cannot be sent otherwise
        return json.dumps(value)
    return text


def without_half_pairs(text: str) -> str:
    """Halves of surrogate pairs, which models can write as escapes, are no text that can be sent."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_call(text: str, keys: tuple[str, ...]) -> tuple[str, str] | None:
    """(name, arguments) of an object's text, the arguments under one of `keys` and as they are written; None if it is none.

    Raises what parse_json() raises.
    """
    value = parse_json(text)
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value, text = value["function"], _members(text)["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not 0 < len(value["name"]) <= MAX_NAME:
        return None
    key = next((k for k in keys if k in value), None)
    arguments = None if key is None else value[key]
    if isinstance(arguments, str):
        written = arguments or "{}"
        arguments = parse_json(written)
    else:
        written = _members(text)[key] if key is not None and arguments is not None else "{}"
    return (value["name"], as_written(written)) if isinstance(arguments, dict | None) else None


def has_arguments(text: str, keys: tuple[str, ...]) -> bool:
    """Whether an object that read_call() took names its arguments, under one of `keys`."""
    value = parse_json(text)
    return any(key in value for key in keys) or isinstance(value.get("function"), dict)


def read_python_calls(text: str, names: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """[(name, arguments as JSON)] of `[f(a=1), g()]`; None if it is anything else."""
    try:
        reader = _PythonReader(text.strip(), names)
        return [reader.call(node) for node in reader.calls()]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _PythonReader:
    """Python's literals as JSON: numbers as they are written where JSON has them so."""

    def __init__(self, text: str, names: Mapping[str, Any]):
        self._tree, self._names = ast.parse(text, mode="eval").body, names
        self._lines = re.split(rb"\r\n|\r|\n", text.encode())

    def calls(self) -> list[ast.expr]:
        if not isinstance(self._tree, ast.List):
            raise ValueError("not a list")
        return self._tree.elts

    def call(self, node: ast.expr) -> tuple[str, str]:
        if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
            raise ValueError("not a call with keywords")
        return _dotted(node.func), self._object({str(k.arg): k.value for k in node.keywords})

    def _object(self, values: Mapping[str, ast.expr]) -> str:
        return "{" + ", ".join(f"{json_text(k)}: {self._value(v)}" for k, v in values.items()) + "}"

    def _value(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name) and node.id in self._names:
            return json_text(self._names[node.id])
        if isinstance(node, ast.List | ast.Tuple):
            return "[" + ", ".join(map(self._value, node.elts)) + "]"
        if isinstance(node, ast.Dict):
            keys = [ast.literal_eval(k) if k is not None else None for k in node.keys]
            if not all(isinstance(k, str) for k in keys):
                raise ValueError("a key that is not a string, or ** in a dict")
            return self._object(dict(zip(map(str, keys), node.values, strict=True)))
        negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        number = node.operand if isinstance(node, ast.UnaryOp) and negative else node
        if isinstance(number, ast.Constant) and type(number.value) in (int, float):
            written = self._lines[number.lineno - 1][number.col_offset : number.end_col_offset].decode()
            if _JSON_NUMBER.fullmatch(written):
                return "-" * negative + written
        return json_text(ast.literal_eval(node))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("not a name")
