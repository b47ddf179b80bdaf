"""What all parsers of tool calls share.

All parsers are linear scanners with a little state. A call is given out when it is complete: a client never gets the
beginning of a call that then turns out to be broken or cut off. But where a grammar makes the calls, which can then only be
cut off, the arguments are given out as they are written, and what there is of them at the end stays.
- What looked like a call but is not well-formed is plain text, every character of it.
- A call that the output ends in the middle of is dropped if its format marks calls (its beginning is no answer), and
  plain text if the format does not (it may be anything).
- White space between calls, before the first and after the last is dropped when there is no other text there.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable

from headrace.conversation.events import CallArguments, CallBegin, Event, Text
from headrace.conversation.tool_syntax import MAX_NAME, BracketScanner, cut_off, read_call
from headrace.text.markers import Markers, MarkerScanner


def random_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Nine letters and digits, the only ids that Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


Handler = Callable[[str, list[Event]], str]  # takes text, adds events, gives back what it did not take


class ToolParser:
    """State of one output. What push() and finish() return is, joined, the same for every way to cut the text.

    A subclass names the markers that open a call and has a handler for each state within one; it calls _take() for
    what it consumes, then _call() when a call is complete, or _reject() when what was taken is none.
    """

    opening = Markers([])
    markers: tuple[str, ...] = ()  # of these some may be special tokens: then the text must be decoded with them
    constrained = False  # the calls obey a grammar of tool_grammar

    def __init__(self, new_id: Callable[[], str] = random_id):
        self.num_calls = 0
        self.new_id = new_id
        self._scanner = MarkerScanner(self.opening)
        self._handler: Handler = self._plain
        self._taken: list[str] = []  # of the call that is being read
        self._space: list[str] | None = []  # white space not given out yet; None: text has come since the last call

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            text = self._handler(text, events)
        return events

    def finish(self) -> list[Event]:
        """The output has ended."""
        events: list[Event] = []
        if self._taken:
            self._end_within(events)
        else:
            self._give(self._scanner.flush(), events)
        space = "".join(self._space or ())
        if space and not self.num_calls:
            events.append(Text(space))
        self._space = None
        return events

    def _end_within(self, events: list[Event]) -> None:
        """The output has ended in a call."""
        self._reject(events)

    # ------------------------------------------------------------------------------------------- for the subclasses

    def _plain(self, text: str, events: list[Event]) -> str:
        scan = self._scanner.push(text)
        self._give(scan.text, events)
        if scan.marker is not None:
            self._taken = [scan.marker]
            self._opened()
        return scan.rest

    def _opened(self) -> None:
        """Set the handler of what follows the opening marker."""
        raise NotImplementedError

    def _give(self, text: str, events: list[Event]) -> None:
        if self._space is not None:
            stripped = text.lstrip()
            self._space.append(text[: len(text) - len(stripped)])
            if not stripped:
                return
            text, self._space = "".join((*self._space, stripped)), None
        if text:
            events.append(Text(text))

    def _take(self, text: str, end: int) -> str:
        self._taken.append(text[:end])
        return text[end:]

    def _call(self, name: str, arguments: str, events: list[Event], call_id: str | None = None) -> None:
        self._begin_call(name, events, call_id)
        events.append(CallArguments(self.num_calls - 1, arguments))

    def _begin_call(self, name: str, events: list[Event], call_id: str | None = None) -> None:
        events.append(CallBegin(self.num_calls, call_id or self.new_id(), name))
        self.num_calls += 1
        self._taken, self._space = [], []
        self._handler = self._plain

    def _reject(self, events: list[Event]) -> None:
        taken, self._taken = "".join(self._taken), []
        self._handler = self._plain
        self._give(taken, events)


# what the grammars put before the arguments
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([\w.:/-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD = 2 * MAX_NAME  # characters: no more is looked at again with each piece of text


class JsonObjectParser(ToolParser):
    """What the formats share that write a call as a JSON object."""

    argument_keys: tuple[str, ...] = ("arguments", "parameters")

    def _start_object(self) -> None:
        """The next character is the object's opening bracket."""
        self._object: list[str] = []
        self._size = 0  # of the object so far
        self._brackets = BracketScanner()
        self._handler = self._in_object

    def _in_object(self, text: str, events: list[Event]) -> str:
        if self.constrained and self._size < _MAX_HEAD:
            so_far = "".join((*self._object, text))
            if head := _HEAD.match(so_far, 0, _MAX_HEAD):
                self._begin_call(head.group(1), events)
                self._start_arguments(enclosed=True)
                return so_far[head.end() :]
        end = self._brackets.push(text)
        taken = len(text) if end < 0 else end
        self._object.append(text[:taken])
        self._size += taken
        text = self._take(text, taken)
        if self._brackets.too_deep:
            self._reject(events)
        elif end >= 0:
            self._read_object(events)
        return text

    def _read_object(self, events: list[Event]) -> None:
        try:
            call = read_call("".join(self._object), self.argument_keys)
        except (ValueError, RecursionError):
            call = None
        if call is None:
            self._reject(events)
            return
        self._call(*call, events)
        self._after_call()

    def _start_arguments(self, *, enclosed: bool) -> None:
        """The next character is the opening bracket of the arguments of the call that has begun."""
        self._brackets, self._enclosed = BracketScanner(), enclosed
        self._handler = self._in_arguments

    def _in_arguments(self, text: str, events: list[Event]) -> str:
        end = self._brackets.push(text)
        if end < 0:
            end = len(text)
        elif self._enclosed:
            self._handler = self._behind_arguments
        else:
            self._end_call()
        events.append(CallArguments(self.num_calls - 1, text[:end]))
        return text[end:]

    def _behind_arguments(self, text: str, events: list[Event]) -> str:
        """The call's object has still to end."""
        rest = text.lstrip()
        if rest:
            self._end_call()
        return rest.removeprefix("}")

    def _end_call(self) -> None:
        self._handler = self._plain
        self._after_call()

    def _after_call(self) -> None:
        """Set the handler of what follows a call, if that is not plain text."""

    def _expect_object(self, text: str, events: list[Event]) -> str:
        """After a marker: white space, then an object."""
        stripped = text.lstrip()
        rest = self._take(text, len(text) - len(stripped))
        if rest.startswith("{"):
            self._start_object()
        elif rest:
            self._reject(events)
        return rest

    def _end_within(self, events: list[Event]) -> None:
        if self._handler == self._expect_object or (self._handler == self._in_object and self._unfinished()):
            self._taken = []
        else:
            self._reject(events)

    def _unfinished(self) -> bool:
        return cut_off("".join(self._object))
