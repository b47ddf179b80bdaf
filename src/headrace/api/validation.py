"""msgspec's complaints about a body as our errors: the field, what it got, what is allowed."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from headrace.api.errors import ApiError
from headrace.sampling.foreign import advice

_PLACE = re.compile(r" - at `([^`]*)`$")
_NAME = re.compile(r"(?:unknown|required) field `([^`]*)`")
_STEP = re.compile(r"([^.\[\]]+)|\[[^\]]*\]")


def from_validation(error: msgspec.ValidationError, kind: Any) -> ApiError:
    """msgspec names the place as `$.messages[0].content`; `param` becomes `messages[0].content`."""
    text = str(error)
    path = (m.group(1) if (m := _PLACE.search(text)) else "").removeprefix("$").lstrip(".")
    text = _PLACE.sub("", text)
    code = "invalid_value"
    if name := _NAME.search(text):
        unknown = "unknown field" in text
        if unknown and not path and (instead := advice(name.group(1), getattr(kind, "__struct_fields__", ()))):
            text += f"; {instead}"
        path = f"{path}.{name.group(1)}" if path else name.group(1)
        code = "unknown_parameter" if unknown else "missing_required_parameter"
    if text.startswith("Invalid enum value") and (values := _literals(kind, path)):
        text += ", allowed: " + ", ".join(map(str, values))
    return ApiError(400, f"{path}: {text}" if path else text, param=path or None, code=code)


@cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _literals(kind: Any, path: str) -> list[Any]:
    """The values that a Literal at `path` allows."""
    here = [_type_info(kind)]
    for step in _STEP.finditer(path):
        here = [below for t in _members(here) for below in _below(t, step.group(1))]
    return [value for t in _members(here) if isinstance(t, inspect.LiteralType) for value in t.values]


def _members(types: list[inspect.Type]) -> list[inspect.Type]:
    return [m for t in types for m in (t.types if isinstance(t, inspect.UnionType) else (t,))]


def _below(t: inspect.Type, name: str | None) -> list[inspect.Type]:
    """The type of the field `name`, or of the items if that is None."""
    if isinstance(t, inspect.StructType):
        return [f.type for f in t.fields if f.encode_name == name]
    return [t.item_type] if isinstance(t, inspect.ListType) and name is None else []
