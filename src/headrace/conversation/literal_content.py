"""Special tokens that are spelled out in a conversation's content, kept as text: nobody's content can end his turn.

The content is marked before the template renders: a mark stands before each spelling of a special token. What the template
writes has none, so its special tokens are told from the content's, and are spelled in a secret way for a copy of the
tokenizer that knows no other spelling. All else of that copy is as it was, so all other text has the usual ids.
"""

from __future__ import annotations

import itertools
import re
import secrets
from functools import cached_property
from typing import Any

from headrace.errors import ParameterError
from headrace.model.tokenizer import Tokenizer

FORMS = ("token", "text")  # of special_tokens_in_content


class LiteralContent:
    """For one tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer):
        self._original = tokenizer
        nonce = secrets.token_hex(8)  # content that holds a secret spelling would be a token
        self._secret = {text: f"\ufdd0{nonce}{i}\ufdd1" for text, i in tokenizer.special_texts.items()}
        self._mark = str(secrets.randbelow(9 * 10**19) + 10**19)  # digits come unchanged through filters of any kind
        spelled = _any_of(sorted(self._secret)) or "(?!)"
        self._begins = re.compile(f"(?=({spelled}))")
        self._written = re.compile(f"(?<!{self._mark}){spelled}")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The copy, made at first use: for a large vocabulary that takes seconds. Raises ParameterError if it is not exact."""
        try:
            return self._original.renamed(self._secret)
        except ValueError as error:
            name = "special_tokens_in_content"
            raise ParameterError(name, "text", f"token: this tokenizer has no exact copy ({error})") from None

    def mark(self, value: Any) -> Any:
        """A copy of plain values with the marks; of parts that a template may join without a seam too."""
        if isinstance(value, str):
            return self._begins.sub(self._mark, value)
        if isinstance(value, dict):
            return {self.mark(k): self.mark(v) for k, v in value.items()}
        if not isinstance(value, list):
            return value
        marked = [self.mark(v) for v in value]
        texts = [v["text"] for v in value if isinstance(v, dict) and isinstance(v.get("text"), str)]
        if len(texts) < len(value):
            return marked
        spans = [m.span(1) for m in self._begins.finditer("".join(texts))]
        for part, seam in zip(marked, itertools.accumulate(map(len, texts)), strict=True) if spans else ():
            if any(begin < seam < end for begin, end in spans):
                part["text"] += self._mark
        return marked

    def shown(self, rendered: str) -> str:
        """The text without marks."""
        return rendered.replace(self._mark, "")

    def spelled(self, rendered: str) -> str:
        """The text for `tokenizer`, whose ids are those of the checkpoint's."""
        return self.shown(self._written.sub(lambda found: self._secret[found[0]], rendered))


def _any_of(texts: list[str]) -> str:
    """A pattern of the longest of these sorted texts, as a tree: there are tokenizers with thousands of special tokens."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[-1], strict=False))
    shared = "".join(pair[0] for pair in alike)
    rests = [text[len(shared) :] for text in texts]
    branches = [_any_of(list(group)) for first, group in itertools.groupby(rests, lambda rest: rest[:1]) if first]
    if not branches:
        return re.escape(shared)
    return f"{re.escape(shared)}(?:{'|'.join(branches)}){'?' if '' in rests else ''}"
