"""Grammars by llguidance (github.com/guidance-ai/llguidance): Earley parsing over a lexer of derivatives, masks in Rust."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from headrace.errors import ParameterError
from headrace.structured_output.params import StructuredOutputsParams

# JSON allows any amount of white space between tokens; a model that likes it would never come to an end
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"


class Matcher:
    """Where one output stands in its grammar. Not shared between outputs."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def fork(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Move on; False if the grammar does not allow these (the matcher is of no use afterwards)."""
        return self._matcher.consume_tokens(list(token_ids))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def valid_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these could come next."""
        return self._matcher.validate_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever is sampled."""
        return self._matcher.compute_ff_tokens()

    @property
    def ended(self) -> bool:
        """Only the end token may follow."""
        return self._matcher.is_stopped()

    def fill(self, row: np.ndarray) -> None:
        """Write the mask of the next token to row [ceil(V / 32)] int32: bit set means allowed."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.size * row.itemsize)


class LLGuidance:
    """Compiles wishes for one tokenizer."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    def compile(self, wish: StructuredOutputsParams) -> Matcher:
        """A matcher at the beginning of the output. Raises ParameterError with the backend's reason.

        The interpreter lock is free during the construction; llguidance's own limits bound time and size.
        """
        field = f"structured_outputs.{wish.kind}"
        value = getattr(wish, wish.kind)
        try:
            grammar = _grammar(wish.kind, value)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        except (ValueError, KeyError, TypeError, AssertionError) as e:
            raise ParameterError(field, value, f"what can be compiled ({e})") from None
        if matcher.is_error():
            raise ParameterError(field, value, f"what can be compiled ({matcher.get_error().strip()})")
        return Matcher(matcher)


def _grammar(kind: str, value: Any) -> str:
    if kind == "json":
        return _schema(value)
    if kind == "json_object":
        return _schema({"type": "object"})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in value))
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(any_to_lark(value))
    return _tags(value)


def _schema(schema: Any) -> str:
    if schema is False:
        raise ValueError("the schema false allows nothing")
    return LLMatcher.grammar_from_json_schema(
        {} if schema is True else schema, overrides={"whitespace_pattern": WHITESPACE, "lenient": False}
    )


def _tags(value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("structures"), list):
        raise ValueError("structures: a list of {begin, schema, end} is needed")
    triggers = value.get("triggers") or []
    tags = []
    for structure in value["structures"]:
        begin = structure["begin"]
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin!r}")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=structure.get("schema") or {}, end=structure["end"]))
    return StructTag.to_grammar(tags, assume_special=False)
