"""Log probabilities in the two shapes of the OpenAI API: parallel lists (completions) and a list of objects (chat)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.text.detokenizer import TextOffsets
from headrace.text.output import Logprob

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have

Entry = dict[int, Logprob]  # the actual token first, then the most likely ones


def _value(logprob: float) -> float:
    return min(0.0, max(LOWEST, logprob))


class LogprobFormat:
    """How tokens are shown: by text, or as `token_id:N` when the client asked for that."""

    def __init__(self, tokenizer: Any, *, as_ids: bool = False, skip_special_tokens: bool = True):
        self.tokenizer, self.as_ids, self.skip_special_tokens = tokenizer, as_ids, skip_special_tokens

    def token(self, token_id: int, logprob: Logprob) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        text = logprob.decoded_token
        return self.tokenizer.token_to_text(token_id) if text is None else text


class CompletionLogprobs:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`, collected until taken. The text is that behind `prompt_ids`,
    unless the prompt is echoed: then it is part of the text."""

    def __init__(self, form: LogprobFormat, prompt_ids: Sequence[int] = ()):
        self.form = form
        self._text = TextOffsets(form.tokenizer, form.skip_special_tokens, prompt_ids)
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, entries: Sequence[Entry]) -> None:
        form = self.form
        for entry in entries:
            actual = next(iter(entry))
            self._append(actual, form.token(actual, entry[actual]), _value(entry[actual].logprob))
            top: dict[str, float] = {}
            for token_id, p in entry.items():
                top.setdefault(form.token(token_id, p), _value(p.logprob))
            self._tops.append(dict(sorted(top.items(), key=lambda item: -item[1])))

    def add_prompt(self, ids: Sequence[int], entries: Sequence[Entry | None], num_chars: int) -> None:
        """The tokens of an echoed prompt, sent as text of `num_chars`; the first has no logprob."""
        for token_id, entry in zip(ids, entries, strict=False):
            if entry is None:
                unknown = Logprob(0.0, None, None)
                self._append(token_id, self.form.token(token_id, unknown), None)
                self._tops.append(None)
            else:
                self.add([entry])
        self._text = TextOffsets(self.form.tokenizer, self.form.skip_special_tokens, ids)
        self._text.num_out = num_chars

    def _append(self, token_id: int, text: str, value: float | None) -> None:
        self._tokens.append(text)
        self._values.append(value)
        self._offsets.append(self._text.push(token_id))

    def take(self) -> dict[str, list[Any]]:
        taken: dict[str, list[Any]] = {
            "tokens": self._tokens, "token_logprobs": self._values, "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }  # fmt: skip
        self._clear()
        return taken


class ChatLogprobs:
    """`{token, logprob, bytes, top_logprobs}` for each token, collected until taken.

    `top` entries at most, most likely first. The sampled token is always among them, with the very same value: when it
    is not one of the most likely, it takes the place of the last.
    """

    def __init__(self, form: LogprobFormat, top: int):
        self.form, self.top = form, top
        self._content: list[dict[str, Any]] = []

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            shown = [self._one(i, p) for i, p in entry.items()]
            actual = shown[0]
            rest = sorted(shown[1:], key=lambda e: -e["logprob"])
            chosen: list[dict[str, Any]] = []
            if self.top:
                # the engine reports the actual token first and the `top` most likely ones: it may be one of these
                chosen = sorted([actual, *rest[: self.top - 1]], key=lambda e: -e["logprob"])
            self._content.append({**actual, "top_logprobs": chosen})

    def _one(self, token_id: int, p: Logprob) -> dict[str, Any]:
        data = self.form.tokenizer.token_bytes(token_id)
        return {"token": self.form.token(token_id, p), "logprob": _value(p.logprob), "bytes": list(data)}

    def take(self) -> list[dict[str, Any]]:
        taken, self._content = self._content, []
        return taken


def prompt_logprobs(entries: Sequence[Entry | None], form: LogprobFormat) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per position, token id -> {logprob, rank, decoded_token}; the first is null."""
    return [
        None
        if entry is None
        else {
            str(i): {"logprob": _value(p.logprob), "rank": p.rank, "decoded_token": form.token(i, p)}
            for i, p in entry.items()
        }
        for entry in entries
    ]
