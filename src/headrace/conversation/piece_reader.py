"""Text that comes in pieces, read as if it were all there: where it is not, a generator waits."""

from __future__ import annotations

import string
from collections.abc import Callable, Generator
from typing import TypeVar

from headrace.conversation.tool_syntax import MAX_NAME, BracketScanner

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where it waits for more text
NAME = frozenset(string.ascii_letters + string.digits + "_-.:/")


class NotACall(Exception):
    """What has been taken is none."""


class CutOff(Exception):
    """The output has ended within a call."""


class PieceReader:
    """What the readers of calls are made of."""

    def __init__(self) -> None:
        self._text, self._at = "", 0  # the last piece, and how far it has been read
        self._ended = False
        self._taken: list[str] = []  # of the call that is being read

    def _more(self) -> Reading[bool]:
        """Whether there is a next character."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def _next(self) -> Reading[str]:
        """The next character, which is not taken. Raises CutOff."""
        if not (yield from self._more()):
            raise CutOff
        return self._text[self._at]

    def _take(self, count: int = 1) -> str:
        """The next characters: part of the call."""
        piece = self._text[self._at : self._at + count]
        self._at += len(piece)
        self._taken.append(piece)
        return piece

    def _spaces(self, give: Callable[[str], None] | None = None) -> Reading[None]:
        """White space, taken, or else given to `give`."""
        while (yield from self._more()) and self._text[self._at].isspace():
            rest = self._text[self._at :]
            space = rest[: len(rest) - len(rest.lstrip())]
            (give or self._taken.append)(space)
            self._at += len(space)

    def _expect(self, character: str) -> Reading[None]:
        """White space, then this, which is not taken. Raises NotACall."""
        yield from self._spaces()
        if (yield from self._next()) != character:
            raise NotACall

    def _word(self) -> Reading[str]:
        """A name. Raises NotACall."""
        word = ""
        while (yield from self._next()) in NAME and len(word) < MAX_NAME:
            word += self._take()
        if not word:
            raise NotACall
        return word

    def _one_of(self, words: tuple[str, ...]) -> Reading[str]:
        """One of these, of which none begins another. Raises NotACall."""
        seen = ""
        while seen not in words:
            c = yield from self._next()
            if not any(word.startswith(seen + c) for word in words):
                raise NotACall
            seen += self._take()
        return seen

    def _perhaps(self, word: str) -> Reading[bool]:
        """Skip `word` if it is there; its beginning at the end of the output is no text."""
        seen = ""
        while seen != word:
            if not (yield from self._more()):
                return False
            if not word.startswith(seen + self._text[self._at]):
                self._text, self._at = seen + self._text[self._at :], 0
                return False
            seen += self._text[self._at]
            self._at += 1
        return True

    def _begins(self, *words: str) -> Reading[bool]:
        """Whether one of these comes next, perhaps behind blanks, or could come if the output went on. Nothing is taken."""
        blanks, seen, found = [], "", False
        while not found and (yield from self._more()):
            c = self._text[self._at]
            self._at += 1
            if not seen and c.isspace():
                blanks.append(c)
                continue
            seen += c
            found = seen in words
            if not any(word.startswith(seen) for word in words):
                break
        else:
            found = True
        self._text, self._at = "".join((*blanks, seen, self._text[self._at :])), 0
        return found

    def _piece(self, scanner: BracketScanner) -> tuple[str, bool]:
        """What is there of a bracketed value, which is taken, and whether it is the end of it."""
        rest = self._text[self._at :]
        end = scanner.push(rest)
        return self._take(len(rest) if end < 0 else end), end >= 0
