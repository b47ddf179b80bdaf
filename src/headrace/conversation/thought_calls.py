"""Calls in which a thought ends: models write them there and leave out the thought's end, or close it behind them.

What a model thinks about calls looks the same, so what follows decides. Calls are calls where the output ends behind them, or
the thought does and the output says no more; with anything else behind them they are something that was thought. So what may
be such calls waits, and nothing else does: text behind a marker that cannot be a call is given out at once.
"""

from __future__ import annotations

from headrace.conversation.events import CallArguments, CallBegin, Event, Reasoning, Text
from headrace.conversation.tool_parser import ToolParser
from headrace.conversation.tool_syntax import parse_json
from headrace.text.markers import MarkerScanner


class ThoughtCalls:
    """State of one output, whose reasoning has been split off. Linear in the text, wherever it is cut."""

    def __init__(self, tools: ToolParser):
        """`tools`: reads the answer, and the calls that there are in it."""
        self._tools = tools
        self._scanner = MarkerScanner(tools.opening)
        self.num_calls = 0
        self._space = ""  # behind what is out
        self._trial: ToolParser | None = None  # reads what waits, from a marker on
        self._waiting: list[str] = []  # a marker, then characters
        self._calls: list[Event] = []  # that it has found
        self._num_sure = 0  # of what waits: up to the last event of a call

    def read(self, events: list[Event]) -> list[Event]:
        """The same events, without what waits; an answer behind the thought tells that no call was meant."""
        given: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                self._think(event.text, given)
            else:
                given += [*self._thought(), event]
        return given

    def finish(self) -> list[Event]:
        """The output has ended."""
        if self._trial is not None and (calls := _whole(self._calls + self._trial.finish())):
            self.num_calls = self._trial.num_calls
            return calls
        return self._thought()

    def _thought(self) -> list[Event]:
        """All that waits."""
        text = "".join((self._space, *self._waiting, self._scanner.flush()))
        self._space, self._trial, self._waiting = "", None, []
        return [Reasoning(text)] if text else []

    def _think(self, text: str, given: list[Event]) -> None:
        while text:
            if self._trial is not None:
                text = self._try(text, given)
                continue
            scan = self._scanner.push(text)
            self._give(scan.text, given)
            text = scan.rest
            if scan.marker is not None:
                self._trial, self._waiting, self._calls, self._num_sure = self._tools.fresh(), [scan.marker], [], 0
                self._trial.push(scan.marker)

    def _give(self, text: str, given: list[Event]) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            given.append(Reasoning(kept))

    def _try(self, text: str, given: list[Event]) -> str:
        """Read on, character by character, until it is no call; what is to be read then."""
        assert self._trial is not None
        for i, c in enumerate(text):
            self._waiting.append(c)
            found = self._trial.push(c)
            if not found:
                continue
            if not any(isinstance(e, Text) for e in found):
                self._calls += found
                self._num_sure = len(self._waiting)
                continue
            self._trial = None
            if self._calls:  # behind the last of them another one may begin
                thought, rest = self._waiting[: self._num_sure], self._waiting[self._num_sure :]
            else:
                seen = "".join(e.text for e in found if isinstance(e, Text))
                raw = "".join(self._waiting)
                thought, rest = ([seen], [raw[len(seen) :]]) if raw.startswith(seen) else ([raw], [])
            self._waiting = []
            self._give("".join(thought), given)
            return "".join((*rest, text[i + 1 :]))
        return ""


def _whole(events: list[Event]) -> list[Event]:
    """The calls, each with its arguments in one piece; none where there is anything else, or one that is cut off."""
    begun, pieces = list[CallBegin](), list[list[str]]()
    for event in events:
        if isinstance(event, CallBegin):
            begun.append(event)
            pieces.append([])
        elif isinstance(event, CallArguments):
            pieces[event.index].append(event.text)
        else:
            return []
    arguments = ["".join(of_one) for of_one in pieces]
    try:
        if not all(isinstance(parse_json(text), dict) for text in arguments):
            return []
    except (ValueError, RecursionError):
        return []
    return [event for begin, text in zip(begun, arguments, strict=True) for event in (begin, CallArguments(begin.index, text))]
