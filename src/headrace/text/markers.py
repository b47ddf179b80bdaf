"""Strings found in a stream of text, wherever it is cut: stop strings, and the markers of reasoning and tool calls.

    ids -> detokenizer (holds incomplete characters) -> scanner (holds what may begin a stop string) -> delta
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.text.detokenizer import TextTokenizer, detokenizer


class Markers:
    """A set of non-empty strings as one Aho-Corasick automaton; immutable, shared by any number of scanners.

    Aho & Corasick, "Efficient string matching" (1975). Building costs one dictionary entry per character.
    """

    def __init__(self, strings: Iterable[str]):
        self.strings = tuple(dict.fromkeys(strings))
        if not all(self.strings):
            raise ValueError("an empty string cannot be searched for")
        self.edges: list[dict[str, int]] = [{}]
        self.depth = [0]  # of a state: how many of the last characters may begin a match
        self.match: list[str | None] = [None]  # the longest string that ends in a state
        for s in self.strings:
            self.match[self._insert(s)] = s
        self.fail = [0] * len(self.edges)
        self._link()
        # from the root most text is skipped at once: to the next character that begins any string
        self.first = re.compile("[" + "".join(re.escape(c) for c in self.edges[0]) + "]") if self.strings else None

    def _insert(self, s: str) -> int:
        state = 0
        for c in s:
            following = self.edges[state].get(c)
            if following is None:
                following = len(self.edges)
                self.edges[state][c] = following
                self.edges.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        return state

    def _link(self) -> None:
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            for c, following in self.edges[state].items():
                self.fail[following] = self.step(self.fail[state], c)
                queue.append(following)
            if self.match[state] is None:
                self.match[state] = self.match[self.fail[state]]

    def step(self, state: int, c: str) -> int:
        while True:
            following = self.edges[state].get(c)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


class Scan(NamedTuple):
    text: str  # certain to lie before any marker
    marker: str | None  # the marker that follows `text`
    rest: str  # what follows the marker, not looked at yet; "" without a marker


class MarkerScanner:
    """Finds the first of a set of strings in text that comes in pieces.

    First is what ends first; of several that end together, the longest (so the one that starts first). Only the
    longest suffix of the text that may still become a marker is held back. Linear in the text, whatever the pieces.
    """

    __slots__ = ("_held", "_state", "markers")

    def __init__(self, markers: Markers | Iterable[str]):
        self.markers = markers if isinstance(markers, Markers) else Markers(markers)
        self._state = 0
        self._held = ""

    @property
    def held(self) -> str:
        """What is held back: the beginning of a marker, perhaps."""
        return self._held

    def push(self, text: str) -> Scan:
        """Take the next piece. After a marker the scanner starts afresh: push `rest` again to go on."""
        m = self.markers
        if m.first is None:
            return Scan(text, None, "")
        state, i, n = self._state, 0, len(text)
        while i < n:
            if state == 0:
                hit = m.first.search(text, i)
                if hit is None:
                    i = n
                    break
                i = hit.start()
            state = m.step(state, text[i])
            i += 1
            marker = m.match[state]
            if marker is not None:
                seen = self._held + text[:i]
                self._state, self._held = 0, ""
                return Scan(seen[: len(seen) - len(marker)], marker, text[i:])
        seen = self._held + text if self._held else text
        self._state = state
        cut = len(seen) - m.depth[state]
        self._held = seen[cut:]
        return Scan(seen[:cut], None, "")

    def flush(self) -> str:
        """The text has ended: what was held is plain text."""
        held, self._held, self._state = self._held, "", 0
        return held


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
