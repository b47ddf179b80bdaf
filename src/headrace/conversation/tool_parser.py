"""What all parsers of tool calls share.

A format is a generator that reads the text as if it were all there; where it is not, the generator waits. A call is given out
when it is complete: a client never gets the beginning of a call that then turns out to be broken or cut off. But where a
grammar makes the calls, which can then only be cut off, the arguments are given out as they are written, and what there is
of them at the end stays.
- What looked like a call but is not well-formed is plain text, every character of it.
- A call that the output ends in the middle of is dropped if its format marks calls (its beginning is no answer), and
  plain text if the format does not (it may be anything).
- White space between calls, before the first and after the last is dropped when there is no other text there.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Generator
from typing import TypeVar

from headrace.conversation.events import CallArguments, CallBegin, Event, Text
from headrace.conversation.tool_syntax import MAX_NAME, BracketScanner, cut_off, has_arguments, read_call
from headrace.text.markers import Markers, MarkerScanner

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where it waits for more text
NAME = frozenset(string.ascii_letters + string.digits + "_-.:/")
# what the grammars put before the arguments
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([\w.:/-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD = 2 * MAX_NAME  # characters: no more is looked at again with each piece of text


def random_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Nine letters and digits, the only ids that Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class NotACall(Exception):
    """What has been taken is none."""


class CutOff(Exception):
    """The output has ended within a call."""


class ToolParser:
    """State of one output. What push() and finish() return is, joined, the same for every way to cut the text.

    A subclass names the markers that open calls and reads them in _calls(), with what stands in the second part here.
    """

    opening = Markers([])
    markers: tuple[str, ...] = ()  # of these some may be special tokens: then the text must be decoded with them
    unmarked = ""  # the characters that calls without a marker begin with, at the beginning of the output
    constrained = False  # the calls obey a grammar of tool_grammar
    argument_keys: tuple[str, ...] = ("arguments", "parameters")

    def __init__(self, new_id: Callable[[], str] = random_id):
        self.num_calls, self.new_id = 0, new_id
        self._events: list[Event] = []
        self._text, self._at = "", 0  # the last piece, and how far it has been read
        self._ended = False
        self._taken: list[str] = []  # of the call that is being read
        self._json: list[str] | None = None  # of its object, as far as that is there
        self._space: list[str] | None = []  # white space not given out yet; None: text has come since the last call
        self._reading = self._read()

    def push(self, text: str) -> list[Event]:
        self._text, self._at, self._events = text, 0, []
        next(self._reading, None)
        return self._events

    def finish(self) -> list[Event]:
        """The output has ended."""
        self._ended = True
        events = self.push("")
        space = "".join(self._space or ())
        if space and not self.num_calls:
            events.append(Text(space))
        self._space = None
        return events

    def _read(self) -> Reading[None]:
        scanner = MarkerScanner(self.opening)
        if self.unmarked:
            yield from self._spaces(self._give)
            if (yield from self._more()) and self._text[self._at] in self.unmarked:
                yield from self._try_calls("")
        while (yield from self._more()):
            scan = scanner.push(self._text[self._at :])
            self._text, self._at = scan.rest, 0
            self._give(scan.text)
            if scan.marker is not None:
                yield from self._try_calls(scan.marker)
        self._give(scanner.flush())

    def _try_calls(self, marker: str) -> Reading[None]:
        self._taken, self._json = [marker], None
        try:
            yield from self._calls(marker)
        except NotACall:
            self._give("".join(self._taken))
        except CutOff:
            may_be_call = bool(marker) or self.num_calls > 0
            if not may_be_call or (self._json is not None and not cut_off("".join(self._json))):
                self._give("".join(self._taken))
        self._taken = []

    def _give(self, text: str) -> None:
        if self._space is not None:
            stripped = text.lstrip()
            self._space.append(text[: len(text) - len(stripped)])
            if not stripped:
                return
            text, self._space = "".join((*self._space, stripped)), None
        if text:
            self._events.append(Text(text))

    def _calls(self, marker: str) -> Reading[None]:
        """The calls behind a marker, or behind none. Raises NotACall and CutOff."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------- what formats are made of

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

    def _bracketed(self, scanner: BracketScanner, pieces: list[str]) -> Reading[str]:
        """A bracketed value, of which `pieces` have been taken; the others are added to them. Raises NotACall."""
        scanner.push("".join(pieces))
        ended = False
        while not ended:
            yield from self._next()
            if self.constrained and (yield from self._given_out(pieces)):
                return ""
            piece, ended = self._piece(scanner)
            pieces.append(piece)
            if scanner.too_deep:
                raise NotACall
        return "".join(pieces)

    def _piece(self, scanner: BracketScanner) -> tuple[str, bool]:
        """What is there of a bracketed value, which is taken, and whether it is the end of it."""
        rest = self._text[self._at :]
        end = scanner.push(rest)
        return self._take(len(rest) if end < 0 else end), end >= 0

    def _call_object(self, head: str = "", *, needs_arguments: bool = False) -> Reading[None]:
        """A call as a JSON object, of which `head` has been taken. Raises NotACall."""
        if not head:
            yield from self._expect("{")
        self._json = [head]
        text = yield from self._bracketed(BracketScanner(), self._json)
        if not text:
            return
        try:
            call = read_call(text, self.argument_keys)
        except (ValueError, RecursionError):
            call = None
        if call is None or (needs_arguments and not has_arguments(text, self.argument_keys)):
            raise NotACall
        self._call(*call)

    def _given_out(self, pieces: list[str]) -> Reading[bool]:
        """Whether a grammar's call begins with `pieces` and what is there; then it is given out as it comes."""
        if sum(map(len, pieces)) >= _MAX_HEAD:
            return False
        so_far = "".join(pieces) + self._text[self._at :]
        head = _HEAD.match(so_far, 0, _MAX_HEAD)
        if head is None:
            return False
        self._text, self._at = so_far[head.end() :], 0
        self._begin(head[1])
        yield from self._arguments()
        yield from self._spaces()
        yield from self._perhaps("}")
        self._taken = []
        return True

    def _begin(self, name: str, call_id: str | None = None) -> None:
        self._events.append(CallBegin(self.num_calls, call_id or self.new_id(), name))
        self.num_calls += 1
        self._taken, self._space, self._json = [], [], None

    def _call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        self._begin(name, call_id)
        self._events.append(CallArguments(self.num_calls - 1, arguments))

    def _arguments(self) -> Reading[None]:
        """Of the call that has begun: given out as they come."""
        scanner, ended = BracketScanner(), False
        while not ended:
            yield from self._next()
            piece, ended = self._piece(scanner)
            self._events.append(CallArguments(self.num_calls - 1, piece))
            self._taken = []
