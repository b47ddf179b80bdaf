"""Integers that were written with a point: `5.0` is 5 to JSON Schema, and to the readers of OpenAI's and vLLM's bodies."""

from __future__ import annotations

from typing import Any

from msgspec import inspect

EXACT = 2**53  # from here on a float may stand for another integer than the one that was written


def whole(value: Any) -> Any:
    """A float as the integer that it certainly is; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT else value


def as_integers(value: Any, kind: inspect.Type) -> Any:
    """A decoded `value`, with floats that are whole numbers made integers where `kind` has integers and no floats.

    Dicts and lists are changed in place.
    """
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, float):
        kinds = set(map(type, members))
        return whole(value) if inspect.IntType in kinds and inspect.FloatType not in kinds else value
    for member in members:
        if isinstance(value, dict) and isinstance(member, inspect.StructType | inspect.DictType):
            known = {f.encode_name: f.type for f in member.fields} if isinstance(member, inspect.StructType) else {}
            for name, below in value.items():
                if (type_below := known.get(name, getattr(member, "value_type", None))) is not None:
                    value[name] = as_integers(below, type_below)
        elif isinstance(value, list) and isinstance(member, inspect.ListType):
            value[:] = [as_integers(item, member.item_type) for item in value]
    return value
