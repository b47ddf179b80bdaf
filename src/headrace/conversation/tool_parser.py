"""What all parsers of tool calls share.

A format is a generator that reads the text as if it were all there; where it is not, the generator waits. A call is given out
when it is complete: a client does not get the beginning of a call that then turns out to be broken or cut off. There are two
exceptions, in which the arguments are given out as they are written, and what there is of them at the end stays:
- where a grammar makes the calls, which can then only be cut off;
- where a format reads its arguments piece by piece (_object(), _add()) and they are long (STREAMED_FROM). What is out is
  always the beginning of right JSON: arguments that break are left unfinished, and what follows is plain text.

Apart from these:
- What looked like a call but is not well-formed is plain text, every character of it.
- A call that the output ends in the middle of is dropped if its format marks calls (its beginning is no answer), and
  plain text if the format does not (it may be anything).
- White space between calls, before the first and after the last is dropped when there is no other text there.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from headrace.conversation.events import CallArguments, CallBegin, Event, Text
from headrace.conversation.json_reader import JsonObjectReader
from headrace.conversation.piece_reader import CutOff, NotACall, PieceReader, Reading
from headrace.conversation.tool_syntax import MAX_NAME, BracketScanner, cut_off, has_arguments, parse_json, read_call
from headrace.text.markers import Markers, MarkerScanner

# what the grammars put before the arguments
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([\w.:/-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD = 2 * MAX_NAME  # characters: no more is looked at again with each piece of text
STREAMED_FROM = 128  # characters of arguments that are held until the call is complete


def random_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Nine letters and digits, the only ids that Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolParser(PieceReader):
    """State of one output. What push() and finish() return is, joined, the same for every way to cut the text.

    A subclass names the markers that open calls and reads them in _calls(), with what stands in the second part here.
    """

    opening = Markers([])
    markers: tuple[str, ...] = ()  # of these some may be special tokens: then the text must be decoded with them
    unmarked = ""  # the characters that calls without a marker begin with, at the beginning of the output
    constrained = False  # the calls obey a grammar of tool_grammar
    or_answer = False  # by which an answer in JSON may stand for them: it may look like a call, but not to one of the tools
    streams = False  # the arguments in JSON objects are given out as they come, once they are long
    schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # a tool's name -> what its arguments are
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    new_id: Callable[[], str] = staticmethod(random_id)  # of a call that has none of its own

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self._events: list[Event] = []
        self._json: list[str] | None = None  # of its object, as far as that is there
        self._head: tuple[str, str | None] | None = None  # name and id of a call that has been read so far, and is not out
        self._held: list[str] = []  # its arguments
        self._num_held = 0  # characters
        self._space: list[str] | None = []  # white space not given out yet; None: text has come since the last call
        self._reading = self._read()

    def fresh(self) -> ToolParser:
        """Another one, at the beginning."""
        other = type(self)()
        other.constrained, other.or_answer, other.schemas = self.constrained, self.or_answer, self.schemas
        return other

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
        self._taken, self._json, self._head = [marker], None, None
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

    def _bracketed(self, scanner: BracketScanner, pieces: list[str]) -> Reading[str]:
        """A bracketed value, of which `pieces` have been taken; the others are added to them. Raises NotACall."""
        scanner.push("".join(pieces))
        ended, size = False, sum(map(len, pieces))
        while not ended:
            yield from self._next()
            if (self.constrained or self.streams) and size < _MAX_HEAD and (yield from self._given_out(pieces)):
                return ""
            piece, ended = self._piece(scanner)
            pieces.append(piece)
            size += len(piece)
            if scanner.too_deep:
                raise NotACall
        return "".join(pieces)

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
        if call is None or not self._may_call(call[0]) or (needs_arguments and not has_arguments(text, self.argument_keys)):
            raise NotACall
        self._call(*call)

    def _may_call(self, name: str) -> bool:
        return not self.or_answer or name in self.schemas

    def _list(self) -> Reading[None]:
        """Calls as objects in a list whose bracket has been taken. Raises NotACall."""
        following = ","
        while following == ",":
            yield from self._call_object()
            yield from self._spaces()
            if not (yield from self._more()) or (following := self._text[self._at]) not in ",]":
                return
            self._at += 1
            self._taken = [following]

    def _given_out(self, pieces: list[str]) -> Reading[bool]:
        """Whether a call begins with `pieces` and what is there, as nearly all do; then it is given out as it comes."""
        taken = sum(map(len, pieces))
        so_far = "".join(pieces) + self._text[self._at :]
        head = _HEAD.match(so_far, 0, _MAX_HEAD)
        if head is None or not self._may_call(head[1]):
            return False
        self._taken.append(so_far[taken : head.end()])
        self._text, self._at = so_far[head.end() :], 0
        if not self.constrained:
            yield from self._object(head[1])
            yield from self._members()
            self._give_call()
            return True
        self._begin(head[1])
        yield from self._arguments()
        yield from self._spaces()
        yield from self._perhaps("}")
        self._taken = []
        return True

    def _members(self) -> Reading[None]:
        """What else an object says behind its arguments. Raises NotACall."""
        scanner, pieces, ended = BracketScanner(), ['{"":0'], False
        scanner.push(pieces[0])
        while not ended:
            yield from self._next()
            piece, ended = self._piece(scanner)
            pieces.append(piece)
        try:
            parse_json("".join(pieces))
        except (ValueError, RecursionError):
            raise NotACall from None

    def _object(self, name: str, call_id: str | None = None) -> Reading[None]:
        """The arguments of a call that is given out by _give_call() or, once they are long, as they come. Raises NotACall."""
        yield from self._expect("{")
        self._open(name, call_id)
        reader = JsonObjectReader()
        while not reader.ended:
            if not (yield from self._more()):
                if self._head is None:
                    self._add(reader.rest())
                raise CutOff
            text, num_read = reader.push(self._text[self._at :])
            self._take(num_read)
            self._add(text)
            if reader.broken:
                if held := reader.held:  # is looked at again
                    self._taken = ["".join(self._taken)[: -len(held)]]
                    self._text, self._at = held + self._text[self._at :], 0
                raise NotACall

    def _open(self, name: str, call_id: str | None = None) -> None:
        self._head, self._held, self._num_held = (name, call_id), [], 0

    def _add(self, arguments: str) -> None:
        """To the open call."""
        if self._head is None:
            if arguments:
                self._events.append(CallArguments(self.num_calls - 1, arguments))
            self._taken = []
            return
        self._held.append(arguments)
        self._num_held += len(arguments)
        if self.constrained or self._num_held >= STREAMED_FROM:
            self._give_call()

    def _give_call(self) -> None:
        """The open call is complete, or long."""
        if self._head is not None:
            head, self._head = self._head, None
            self._begin(*head)
            self._add("".join(self._held))

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
