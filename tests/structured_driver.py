"""Grammars in tests: a backend over a small byte-level vocabulary, and what it takes of a text."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.sampling.structured_outputs import StructuredOutputsParams
from headrace.structured_output.llguidance_backend import LLGuidance, Matcher
from tiny_models import VOCAB, write_tokenizer

EOS = 2


@functools.cache
def tokenizer():
    from tokenizers import Tokenizer

    with tempfile.TemporaryDirectory() as path:
        write_tokenizer(path)
        return Tokenizer.from_file(str(Path(path) / "tokenizer.json"))


@functools.cache
def backend() -> LLGuidance:
    return LLGuidance(tokenizer().to_str(), VOCAB, [EOS])


@functools.lru_cache(4096)
def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def with_tokens(text: str, tokens: Mapping[str, int]) -> list[int]:
    """`text`, in which each of `tokens` is one of its own."""
    for marker, token in tokens.items():
        head, found, tail = text.partition(marker)
        if found:
            return [*with_tokens(head, tokens), token, *with_tokens(tail, tokens)]
    return encode(text)


def special_of(tokens: Mapping[str, int]) -> Callable[[str], str]:
    """How a grammar names a marker: as the token that it is, or as a text."""
    return lambda marker: f"<[{tokens[marker]}]>" if marker in tokens else json.dumps(marker)


def decode(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=True)


def compiled(**wish: Any) -> Matcher:
    return backend().compile(StructuredOutputsParams(**wish))


def takes(matcher: Matcher, text: str) -> bool:
    """Whether `text` is all that the output may be."""
    copy = matcher.fork()
    return copy.accept(encode(text)) and copy.complete


def in_order(schema: Any, document: Any) -> Any:
    """`document` with the properties of its top object in the schema's order, which grammars take for every schema."""
    if not isinstance(document, dict) or not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        return document
    names = [*schema.get("properties", {}), *schema.get("required", [])]
    first = {name: document[name] for name in dict.fromkeys(names) if name in document}
    return first | {k: v for k, v in document.items() if k not in first}


def spelled(document: Any) -> list[str]:
    """The document as JSON in three styles. Printable characters stand for themselves: grammars take no \\u for them."""
    styles: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 2}]
    return list(dict.fromkeys(json.dumps(document, ensure_ascii=False, **style) for style in styles))
