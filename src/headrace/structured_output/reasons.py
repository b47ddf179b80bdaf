"""Why a spec cannot be had, in words of those who wrote it: the backend's own speak of its insides."""

from __future__ import annotations

import re

from headrace.errors import ParameterError
from headrace.sampling.structured_outputs import StructuredOutputsParams

# what the backend says -> what it means, the first that is found
_MEANINGS = (
    (("NoExtension",), "no text can satisfy it"),
    (("Too many items", "ParserTooComplex", "row item limit", "MaxTokens"),
     "it is too ambiguous, or repeats without an end: the parser would have to follow too many ways at once"),
    (("LexerTooComplex", "fuel exhausted", "lexer error", "too big (limit"),
     "its patterns are too large when they are put together"),
    (("InternalError", "EndOfSentence"), "the parser failed"),
)  # fmt: skip
_LISTING = re.compile(r"\n\s+\d+ \| .*", re.DOTALL)  # the lines of a grammar that the user did not write
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_OF_REGEX = re.compile(r'invalid regex "(?:[^"\\]|\\.)*" \(in regex\): ')
_TOKENS = re.compile(r"; following special tokens are available:.*", re.DOTALL)


def refused(spec: StructuredOutputsParams, why: str) -> ParameterError:
    return ParameterError(f"structured_outputs.{spec.kind}", getattr(spec, spec.kind), f"what can be compiled ({why})")


def reason_of(error: ParameterError) -> str:
    """Why refused() has refused."""
    return error.allowed.removeprefix("what can be compiled (").removesuffix(")")


def in_words(why: str, kind: str) -> str:
    """`kind` is that of the spec. For a grammar the places in it are kept; its lines are the user's."""
    for words, meaning in _MEANINGS:
        if any(word in why for word in words):
            return meaning
    why = _TOKENS.sub(" (the tokenizer has none of that name)", why.split("<state>")[0])
    if kind == "grammar":
        return why.strip()
    why = _OF_REGEX.sub("", _PLACE.sub("", _LISTING.sub("", why)))
    return why.removeprefix("failed to compile JSON schema: ").strip()
