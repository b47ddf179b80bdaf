"""The text of one output, as its ids come, up to its stop strings.

    ids -> detokenizer (holds incomplete characters) -> scanner (holds what may begin a stop string) -> delta
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from headrace.text.detokenizer import TextTokenizer, detokenizer
from headrace.text.markers import MarkerScanner


class TextDelta(NamedTuple):
    text: str
    stop_hit: str | None  # the stop string that ended the text
    num_ids: int  # how many of the pushed ids the text took; fewer than pushed only when a stop string was hit


class TextStream:
    """The text of one output, from its token ids: push() as they come, finish() at the end.

    Joined, the deltas are what tokenizer.decode(prompt + output) has behind decode(prompt), cut at the first stop string:
    the one that ends first, and of those that end together the longest. With `include_stop` the text ends with the stop
    string, else just before it. No delta holds a part of a character or of a stop string that a later one would complete.
    Special tokens that are dropped from the text still complete the stop strings that hold them: to the scanner each is
    one surrogate, which no decoded text contains. Work is linear in the number of ids.
    """

    __slots__ = ("_detokenizer", "_include_stop", "_marks", "_scanner", "_written", "stop_hit")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ):
        self._detokenizer = detokenizer(tokenizer, skip_special_tokens, prompt_ids)
        specials = tokenizer.special_texts if stop and skip_special_tokens else {}
        held = sorted((text for text in specials if any(text in s for s in stop)), key=len, reverse=True)
        marks = {text: chr(0xD800 + i) for i, text in enumerate(held[:1024])}
        self._marks = {specials[text]: mark for text, mark in marks.items()}
        self._written = {s: s for s in stop}  # as the scanner sees it -> as it was asked for
        for s in stop if marks else ():
            self._written[re.sub("|".join(map(re.escape, marks)), lambda m: marks[m[0]], s)] = s
        self._scanner = MarkerScanner(self._written)
        self._include_stop = include_stop
        self.stop_hit: str | None = None

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Take ids; after a stop string nothing more is taken."""
        if self.stop_hit is not None:
            return TextDelta("", self.stop_hit, 0)
        parts: list[str] = []
        for i, token_id in enumerate(ids):
            piece = self._marks.get(token_id) or self._detokenizer.push(token_id)
            if piece and self._scan(piece, parts):
                return TextDelta("".join(parts), self.stop_hit, i + 1)
        return TextDelta("".join(parts), None, len(ids))

    def may_stop_at(self, token_id: int) -> bool:
        """Whether the token, which is not shown, is in a stop string."""
        return token_id in self._marks

    def _scan(self, piece: str, parts: list[str]) -> bool:
        text, hit, _ = self._scanner.push(piece)
        parts.append(self._shown(text))
        if hit is None:
            return False
        self.stop_hit = self._written[hit]
        if piece in self._marks.values():  # nothing after it completes what waits for its end
            parts.append(self._detokenizer.finish())
        if self._include_stop:
            parts.append(self.stop_hit)
        return True

    def _shown(self, text: str) -> str:
        for mark in self._marks.values():
            text = text.replace(mark, "")
        return text

    def finish(self) -> str:
        """What was held: an unfinished character (as U+FFFD) and what could have begun a stop string.

        The last character may itself complete a stop string: look at `stop_hit` afterwards.
        """
        if self.stop_hit is not None:
            return ""
        parts: list[str] = []
        if not self._scan(self._detokenizer.finish(), parts):
            parts.append(self._shown(self._scanner.flush()))
        return "".join(parts)


def continuation(tokenizer: TextTokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to that of a prompt."""
    stream = TextStream(tokenizer, prompt_ids=prompt_ids)
    return stream.push(ids).text + stream.finish()
