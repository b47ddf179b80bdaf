"""How a causal model judges whether a document answers a query: Qwen3-Reranker's prompt, and the two words that may follow it.

    head: the same for all documents of a query | the document's line | tail: the end of the turn, an answer begun

The head ends with its line, so that its ids do not depend on what follows: they are made once, and the prefix cache has them.
What is too long is cut in the document, never in the tail.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, NamedTuple

from headrace.conversation.literal_content import LiteralContent
from headrace.conversation.template import ChatTemplate
from headrace.errors import ParameterError

NAME = "qwen3-reranker"  # in the name of a model whose chat template does not tell
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
BEGIN = f"<|im_start|>system\n{TASK}<|im_end|>\n<|im_start|>user\n<Instruct>: "
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class QueryPrompt(NamedTuple):
    """What the prompts of one query have in common."""

    head: list[int]
    lead: str  # the beginning of the document's line
    lead_tokens: int
    tail: list[int]

    @property
    def num_tokens(self) -> int:
        """Without any document."""
        return len(self.head) + self.lead_tokens + len(self.tail)


class Reranker:
    """Prompts of pairs, and the ids of both answers. Safe to use from several threads."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None, literal: LiteralContent | None):
        """`template`: the checkpoint's own, if it takes pairs; None: the published form. Raises ParameterError."""
        words = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
        if any(len(ids) != 1 for ids in words):
            raise ParameterError("score_method", "yes-no", "embedding: `yes` and `no` are no single tokens of this model")
        self.yes, self.no = words[0][0], words[1][0]
        self._tokenizer, self._template, self._literal = tokenizer, template, literal
        self._place = secrets.token_hex(16)  # where the document will stand

    @classmethod
    def choose(
        cls, method: str, model_name: str, tokenizer: Any, template: ChatTemplate | None, literal: LiteralContent | None
    ) -> Reranker | None:
        """None: pairs are scored by embeddings. Raises ParameterError."""
        own = template if template is not None and takes_pairs(template.source()) else None
        named = NAME in model_name.lower().replace("_", "-")
        if method == "embedding" or (method == "auto" and own is None and not named):
            return None
        return cls(tokenizer, own, literal)

    def prompt(self, query: str, instruction: str | None) -> QueryPrompt:
        """Raises ParameterError."""
        text = self._published(query, instruction) if self._template is None else self._rendered(query, instruction)
        before, place, after = text.rpartition(self._place)
        if not place:
            raise ParameterError("query", "a query", "what the model's chat template shows together with a document")
        line = before.rfind("\n") + 1
        # a space in front of a word belongs to it
        lead_tokens = len(self._encode(before[line:].rstrip(" ")))
        return QueryPrompt(self._encode(before[:line]), before[line:], lead_tokens, self._encode(after))

    def pair(self, prompt: QueryPrompt, document: str, most: int | None = None) -> list[int]:
        """The ids of a prompt; `most`: tokens of the document at most."""
        text = document if self._literal is None else self._literal.mark(document)
        ids = self._encode(prompt.lead + text)
        return prompt.head + (ids if most is None else ids[: prompt.lead_tokens + most]) + prompt.tail

    def _published(self, query: str, instruction: str | None) -> str:
        given = [INSTRUCTION if instruction is None else instruction, query]
        if self._literal is not None:
            given = self._literal.mark(given)
        return f"{BEGIN}{given[0]}\n<Query>: {given[1]}\n<Document>: {self._place}{TAIL}"

    def _rendered(self, query: str, instruction: str | None) -> str:
        assert self._template is not None
        pair = [{"role": "query", "content": query}, {"role": "document", "content": self._place}]
        system = [] if instruction is None else [{"role": "system", "content": instruction}]
        return self._template.render([*system, *pair])

    def _encode(self, text: str) -> list[int]:
        """Without special tokens around it; `text` has the marks of `literal`."""
        if self._literal is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._literal.tokenizer.encode(self._literal.spelled(text), add_special_tokens=False)


def takes_pairs(template: str) -> bool:
    """Whether a chat template is one of a query and a document, answered by yes or no."""
    wanted = (r"""["']query["']""", r"""["']document["']""", r"""["']yes["'] or ["']no["']""")
    return all(re.search(pattern, template) for pattern in wanted)
