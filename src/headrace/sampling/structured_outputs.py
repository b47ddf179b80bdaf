"""What a caller may ask the output to be; names as in vLLM's StructuredOutputsParams."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from headrace.errors import ParameterError

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_BYTES = 256 * 1024  # of a schema or grammar
MAX_DEPTH = 64  # of a schema
MAX_CHOICES = 4096
INTEGERS = range(-(2**63), 2**64)  # of a schema: what crosses the border to the core


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Exactly one of the kinds. Raises ParameterError otherwise, and for what is too large or too deep.

    json: a JSON schema (object, bool or text); json_object: true, any JSON object; regex: a regular expression that the
    whole output matches; choice: one of these texts; grammar: Lark or GBNF text; structural_tag: {"structures": [{"begin",
    "schema", "end"}], "triggers": [...]}, free text in which what follows a trigger is a tag whose content obeys its schema.
    """

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [k for k in KINDS if getattr(self, k) is not None]
        if len(given) != 1:
            raise ParameterError("structured_outputs", given, "exactly one of " + ", ".join(KINDS))
        kind = given[0]
        value = getattr(self, kind)
        if kind in ("json", "structural_tag"):
            setattr(self, kind, _document(kind, value))
        elif kind in ("regex", "grammar"):
            if not isinstance(value, str) or not 0 < _size(value) <= MAX_BYTES:
                raise ParameterError(f"structured_outputs.{kind}", value, f"a text of 1 to {MAX_BYTES} bytes")
        elif kind == "choice":
            texts = isinstance(value, list | tuple) and value and all(isinstance(c, str) and c for c in value)
            if not texts or len(value) > MAX_CHOICES or not 0 < sum(map(_size, value)) <= MAX_BYTES:
                raise ParameterError("structured_outputs.choice", value, f"1 to {MAX_CHOICES} non-empty texts")
        elif value is not True:
            raise ParameterError("structured_outputs.json_object", value, "true")

    @property
    def kind(self) -> str:
        return next(k for k in KINDS if getattr(self, k) is not None)

    def key(self) -> str:
        """The same text for the same spec."""
        return json.dumps([self.kind, getattr(self, self.kind)], sort_keys=False)


def _document(kind: str, value: Any) -> Any:
    """The JSON document `value`, parsed if it is text, within the limits."""
    field = f"structured_outputs.{kind}"
    if isinstance(value, str):
        if not 0 < _size(value) <= MAX_BYTES:
            raise ParameterError(field, value, f"at most {MAX_BYTES} bytes")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise ParameterError(field, value, f"a JSON document ({e})") from None
    if not isinstance(value, dict | bool):
        raise ParameterError(field, value, "a JSON object")
    _check_nodes(field, value)
    try:
        size = _size(json.dumps(value, allow_nan=False, ensure_ascii=False))
    except (ValueError, TypeError, RecursionError) as e:
        raise ParameterError(field, value, f"a JSON document ({e})") from None
    if not 0 < size <= MAX_BYTES:
        raise ParameterError(field, f"{size} bytes", f"at most {MAX_BYTES} bytes")
    return value


def _check_nodes(field: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        for node in level:
            if isinstance(node, int) and node not in INTEGERS:
                raise ParameterError(field, f"an integer of {node.bit_length()} bits", "integers of 64 bits at most")
        level = [
            inner for outer in level if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]  # fmt: skip
        if not level:
            return
    raise ParameterError(field, "a document that is nested too deeply", f"at most {MAX_DEPTH} levels")


def _size(text: str) -> int:
    """Bytes in UTF-8; -1 for what is no Unicode text (half of a surrogate pair)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return -1
