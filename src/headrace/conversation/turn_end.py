"""Which tokens end an assistant's turn, asked of the chat template: it writes them after a message of his.

A checkpoint's files may name no end token, or that of its base model only; a chat would then go on with both roles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from headrace.conversation.template import ChatTemplate
from headrace.errors import ParameterError

QUESTION, THOUGHT, ANSWER, VALUES = "zq7question", "zq7thought", "zq7answer", ("zq7first", "zq7second")
SECONDS = 0.5  # of one render: a template that needs more says nothing
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": _PARAMETERS}}


def end_token_ids(tokenizer: Any, templates: str | Mapping[str, str] | None = None) -> set[int]:
    """By the tokenizer's own chat templates, or by those given. Empty where there are none or they fail."""
    try:
        template = ChatTemplate.from_tokenizer(tokenizer, templates, timeout=SECONDS)
    except ParameterError:
        return set()
    probe = TemplateProbe(template, tokenizer)
    return {token for token in (probe.after_answer(), probe.after_calls()) if token is not None}


class TemplateProbe:
    """A template and the tokenizer whose added tokens are looked for in what it renders."""

    def __init__(self, template: ChatTemplate, tokenizer: Any):
        self.template, self.tokenizer = template, tokenizer

    def after_answer(self) -> int | None:
        """The added token that ends the answer: of several in a row the one that ends a user's message too, for others may
        close a part of the message only; none that also stands between the thought and the answer."""
        before, answer, tail = self._render({"content": ANSWER}).rpartition(ANSWER)
        header, tokens = before.rpartition(QUESTION)[2], self._leading(tail)
        closers = self._leading(header)
        if not answer or not tokens or self._opens(before, tokens[0]):
            return None
        if tail.strip() == header.strip():  # the next turn is opened whatever the template is told
            token = tokens[0] if len(tokens) > 1 else None
        elif shared := list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, closers, strict=False))):
            token = shared[-1][0]
        else:
            token = closers[0] if closers and closers[0] in tokens else tokens[0]
        text = self._render({"content": ANSWER, "reasoning_content": THOUGHT}).rpartition(ANSWER)[0]
        return None if THOUGHT in text and token in self._tokens(text.rpartition(THOUGHT)[2]) else token

    def after_calls(self) -> int | None:
        """The special token behind all calls, where it is not behind each of them. (Harmony ends a call by another token
        than an answer.) Templates that refuse two calls are asked about one."""
        text = (self.template.takes_several_calls and self._render(_calls(VALUES))) or self._render(_calls(VALUES[:1]))
        last = VALUES[1] if VALUES[1] in text else VALUES[0]
        before, value, tail = text.rpartition(last)
        ids = self._ids(tail)
        if not value or not ids or ids[-1] not in self.tokenizer.special_ids or self._opens(before, ids[-1]):
            return None
        token = ids[-1]
        header, _, between = before.rpartition(QUESTION)[2].partition(VALUES[0])
        return None if token in self._tokens(header)[1:] + self._tokens(between) else token

    def _opens(self, before: str, token: int) -> bool:
        """Whether a conversation begins with this token: then it opens the next turn."""
        prefix = before.partition(QUESTION)[0]
        return token in self._leading(prefix) and token != self.tokenizer.bos_token_id

    def _render(self, message: dict[str, Any]) -> str:
        """A question and this answer, "" where the template fails."""
        chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", **message}]
        tools = [_TOOL] if "tool_calls" in message else None
        try:
            return self.template.render(chat, add_generation_prompt=False, tools=tools)
        except ParameterError:
            return ""

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.strip(), add_special_tokens=False)

    def _tokens(self, text: str) -> list[int]:
        """The added tokens in a text."""
        return [i for i in self._ids(text) if i in self.tokenizer.added_ids]

    def _leading(self, text: str) -> list[int]:
        """The added tokens that a text begins with, but for blanks."""
        found: list[int] = []
        for token in self._ids(text):
            if token in self.tokenizer.added_ids:
                found.append(token)
            elif self.tokenizer.token_to_text(token).strip():
                break
        return found


def _calls(values: Sequence[str]) -> dict[str, Any]:
    functions = [{"name": "f", "arguments": json.dumps({"x": value})} for value in values]
    calls = [{"id": f"call{i:05}", "type": "function", "function": f} for i, f in enumerate(functions, 1)]
    return {"content": "", "tool_calls": calls}
