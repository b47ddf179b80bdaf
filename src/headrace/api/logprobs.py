"""Log probabilities in the two shapes of the OpenAI API: parallel lists (completions) and a list of objects (chat)."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

from headrace.text.offsets import Place, TextOffsets
from headrace.text.stream import Delta, Logprob

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have

Entry = dict[int, Logprob]  # the actual token first, then the most likely ones
Span = tuple[int, int]  # characters of a text: begin and end


def _value(logprob: float) -> float:
    return min(0.0, max(LOWEST, logprob))


class LogprobFormat:
    """How tokens are shown: by text, or as `token_id:N` when the client asked for that."""

    def __init__(self, tokenizer: Any, *, as_ids: bool = False, skip_special_tokens: bool = True):
        self.tokenizer, self.as_ids, self.skip_special_tokens = tokenizer, as_ids, skip_special_tokens

    def token(self, token_id: int, logprob: Logprob, bare: bool = False) -> str:
        """`bare`: without the space that it begins with."""
        if self.as_ids:
            return f"token_id:{token_id}"
        text = logprob.decoded_token
        text = self.tokenizer.token_to_text(token_id) if text is None else text
        return text.removeprefix(" ") if bare else text


class CompletionLogprobs:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`, collected until taken. The text is that behind `prompt_ids`,
    unless the prompt is echoed: then it is part of the text."""

    def __init__(self, form: LogprobFormat, prompt_ids: Sequence[int] = ()):
        self.form = form
        self._text = TextOffsets(form.tokenizer, form.skip_special_tokens, prompt_ids)
        self._unplaced: deque[Entry] = deque()
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    @property
    def num_waiting(self) -> int:
        """Tokens that have not been taken."""
        return len(self._offsets) + len(self._unplaced)

    def add(self, delta: Delta) -> None:
        entries = delta.logprobs or []
        num_shown = len(entries) - delta.hides_last
        for entry in entries[:num_shown]:
            self._unplaced.append(entry)
            actual = next(iter(entry))
            self._place(self._text.push(actual, self.form.tokenizer.token_to_text(actual)))
        if delta.finish_reason is not None:
            self._place(self._text.finish())
        for entry in entries[num_shown:]:
            self._append(entry, self._text.num_out, False)

    def _place(self, places: Sequence[Place]) -> None:
        for place in places:
            self._append(self._unplaced.popleft(), *place)

    def add_prompt(self, ids: Sequence[int], entries: Sequence[Entry | None], text: str, spans: Sequence[Span] | None) -> None:
        """The tokens of an echoed prompt, sent as `text`; the first has no logprob. `spans`: where they lie in it; None if
        it is the text that the ids decode to."""
        form = self.form
        written = [form.tokenizer.token_to_text(i) for i in ids]
        if spans is None:
            pairs = zip(ids, written, strict=True)
            places = [place for i, w in pairs for place in self._text.push(i, w)] + self._text.finish()
        else:
            places = _places(text, written, spans)
        for token_id, entry, (offset, bare) in zip(ids, entries, places, strict=False):
            shown = {token_id: Logprob(0.0, None, None)} if entry is None else entry
            self._append(shown, min(offset, len(text)), bare)
            if entry is None:
                self._values[-1] = self._tops[-1] = None
        self._text = TextOffsets(form.tokenizer, form.skip_special_tokens, ids)
        self._text.num_out = len(text)

    def _append(self, entry: Entry, offset: int, bare: bool) -> None:
        """The tokens that could have stood in the place of the actual one are shown as it is: `bare` or not."""
        shown = [(self.form.token(i, p, bare), _value(p.logprob)) for i, p in entry.items()]
        self._tokens.append(shown[0][0])
        self._values.append(shown[0][1])
        top: dict[str, float] = {}
        for text, value in shown:
            top.setdefault(text, value)
        self._tops.append(dict(sorted(top.items(), key=lambda item: -item[1])))
        self._offsets.append(offset)

    def take(self, length: int, *, whole: bool) -> dict[str, list[Any]]:
        """Of the tokens that begin in the text that has been sent, `length` characters. Of all if that is the `whole` text:
        what begins behind its end was cut off with a stop string."""
        count = len(self._offsets) if whole else bisect_right(self._offsets, length)
        columns: dict[str, list[Any]] = {
            "tokens": self._tokens, "token_logprobs": self._values, "top_logprobs": self._tops, "text_offset": self._offsets,
        }  # fmt: skip
        taken = {name: column[:count] for name, column in columns.items()}
        taken["text_offset"] = [min(offset, length) for offset in taken["text_offset"]]
        for column in columns.values():
            del column[:count]
        return taken


def _places(text: str, written: Sequence[str], spans: Sequence[Span]) -> list[Place]:
    """Of each token of `text`, as TextOffsets has it."""
    offsets, end = [], 0
    for token, (start, stop) in zip(written, spans, strict=True):
        # one that is a part of a character begins where it ends, and the offsets of some tokenizers leave out spaces
        offsets.append(start if start >= end and text.startswith(token, start) else end)
        if token != " " or text.startswith(" ", start):  # else it is only what the tokenizer puts before a text
            end = max(end, stop)
    stops = [*offsets[1:], len(text)]
    return [(a, token == " " + text[a:b]) for token, a, b in zip(written, offsets, stops, strict=True)]


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

    def shown(token_id: int, p: Logprob) -> dict[str, Any]:
        return {"logprob": _value(p.logprob), "rank": p.rank, "decoded_token": form.token(token_id, p)}

    return [None if entry is None else {str(i): shown(i, p) for i, p in entry.items()} for entry in entries]
