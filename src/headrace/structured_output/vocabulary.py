"""A tokenizer as llguidance sees it: what each token adds to a text, which tokens are no text, and how a text is tokenized.

An added token that is not special is text like any other: where a grammar spells `<tool_call>`, the token of that name may
stand, and where the grammar forces that text, it does. A special token never is text, whatever it spells: a grammar names it
by its id. (llguidance's own reading of a tokenizer.json takes every added token in angle brackets for a special one, and yet
tokenizes what is forced with it.)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from llguidance import LLTokenizer

from headrace.model.formats.tokenizer_file import TokenizerExtras
from headrace.model.tokenizer import Tokenizer


class GrammarVocabulary:
    """What llguidance asks of a TokenizerWrapper, and the names of the tokens for those who write grammars."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]):
        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        tokenizer = Tokenizer(backend, TokenizerExtras())
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(i) for i in range(min(vocab_size, tokenizer.vocab_size))]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        nameless = {i for i, text in enumerate(self.tokens) if not text}
        for i in nameless:
            self.tokens[i] = b"<[%d]>" % i
        added = {i: token.content for i, token in backend.get_added_tokens_decoder().items() if i < vocab_size}
        self.special_token_ids = sorted(tokenizer.special_ids.intersection(added).union(nameless, eos_token_ids))
        self.special = {added[i]: i for i in self.special_token_ids if i in added}  # text -> id, of those that are no text
        self.added = {text: i for i, text in added.items()}
        _without_prefix(backend)
        backend.encode_special_tokens = True  # as texts: they would not be what the grammar forces
        self._backend = backend
        self.engine = LLTokenizer(self, eos_token=list(eos_token_ids))  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are those of `text`, in the middle of an output; the tokenizer's own where it changes nothing."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if all(i < len(self.tokens) for i in ids) and b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        return self.engine.greedy_tokenize(text)  # it normalizes, or eats spaces


def _without_prefix(backend: tokenizers.Tokenizer) -> None:
    """No space before what is encoded: it is not the beginning of a text."""
    parts = {"normalizer": _state(backend.normalizer), "pre_tokenizer": _state(backend.pre_tokenizer)}
    if not any(word in json.dumps(parts) for word in ('"Prepend"', '"Metaspace"', '"add_prefix_space": true')):
        return
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    changed = tokenizers.Tokenizer.from_str(json.dumps(empty | {k: _unprefixed(v) for k, v in parts.items()}))
    backend.normalizer, backend.pre_tokenizer = changed.normalizer, changed.pre_tokenizer


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _unprefixed(node: Any) -> Any:
    if isinstance(node, list):
        return [_unprefixed(n) for n in node if not (isinstance(n, dict) and n.get("type") == "Prepend")]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "Prepend":
        return None
    changed = {"prepend_scheme": "never", "add_prefix_space": False}
    return {k: changed[k] if k in changed else _unprefixed(v) for k, v in node.items()}
