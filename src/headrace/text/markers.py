"""Strings found in a stream of text, wherever it is cut: stop strings, and the markers of reasoning and tool calls."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


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
