"""Calls whose arguments are JSON, between markers of their own: in a list of objects, or each behind its name."""

from __future__ import annotations

from headrace.conversation.piece_reader import NotACall, Reading
from headrace.conversation.tool_parser import ToolParser
from headrace.conversation.tool_syntax import MAX_NAME
from headrace.text.markers import Markers, MarkerScanner

MAX_NOISE = 64  # characters between the beginning of a section and its first call


class ListParser(ToolParser):
    """A marker, then `[{"name": ..., "arguments": {...}}, ...]` or one such object. The end tag may be missing."""

    closing = ""
    streams = True

    def _calls(self, marker: str) -> Reading[None]:
        yield from self._spaces()
        if (yield from self._next()) == "[":
            self._take()
            yield from self._list()
        else:
            yield from self._call_object()
        if self.closing:
            yield from self._spaces(self._give)  # kept for the case that other text follows
            if (yield from self._perhaps(self.closing)):
                self._space = []


class GraniteParser(ListParser):
    """`<|tool_call|>[...]`: Granite 3, which may write the marker in other ways, too."""

    opening = Markers(["<|tool_call|>", "<tool_call>", "<function_call>"])
    markers = ("<|tool_call|>",)


class Phi4Parser(ListParser):
    """`functools[...]`, or `<|tool_call|>[...]<|/tool_call|>`: Phi-4-mini."""

    opening = Markers(["functools", "<|tool_call|>"])
    closing = "<|/tool_call|>"
    markers = ("<|tool_call|>", closing)

    def _calls(self, marker: str) -> Reading[None]:
        if marker == "functools" and (yield from self._next()) != "[":
            raise NotACall
        yield from super()._calls(marker)


class SectionParser(ToolParser):
    """A section of calls, each between markers of its own. The section's markers may be missing, and the end of a call."""

    section = ("", "")
    call = ("", "", "")  # before it, before its arguments, behind it
    streams = True

    def _calls(self, marker: str) -> Reading[None]:
        begin, calls = self.call[0], 0
        while True:
            if marker != begin:
                noise, marker = yield from self._noise((begin, *self.section), 0 if calls else MAX_NOISE)
                if marker == self.section[1]:
                    if noise and not calls:
                        raise NotACall
                    if calls:
                        self._space = []
                    return
            if marker == begin:
                yield from self._one_call()
                calls += 1
                yield from self._spaces(self._give)
                marker = ""
                if not (yield from self._more()) or not (yield from self._begins(begin, self.section[1])):
                    return

    def _noise(self, markers: tuple[str, ...], most: int) -> Reading[tuple[str, str]]:
        """What stands before the next of these, but for blanks, and which it is. Raises NotACall."""
        scanner, text = MarkerScanner(markers), ""
        while True:
            yield from self._next()
            scan = scanner.push(self._take())
            text += scan.text.strip()
            if scan.marker is not None:
                return text, scan.marker
            if len(text) > most:
                raise NotACall

    def _one_call(self) -> Reading[None]:
        """Behind the marker that begins it."""
        raise NotImplementedError

    def _from_arguments(self, name: str, call_id: str | None = None) -> Reading[None]:
        """The arguments, and what blanks follow."""
        yield from self._object(name, call_id)
        self._give_call()
        yield from self._spaces(self._give)


class DeepSeekParser(SectionParser):
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`: DeepSeek V3.1; V3 and R1 write `function` for the
    name, and behind the separator the name, and the arguments in a fenced block.
    """

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    opening = Markers([section[0], call[0]])
    markers = (*section, *call)

    def _one_call(self) -> Reading[None]:
        yield from self._spaces()
        name, fenced = (yield from self._word()), False
        yield from self._one_of(self.call[1:2])
        yield from self._spaces()
        if (yield from self._next()) not in "{`":
            name = yield from self._word()
            yield from self._spaces()
        if (yield from self._next()) == "`":
            yield from self._one_of(("```json",))
            fenced = True
        yield from self._from_arguments(name)
        if fenced and (yield from self._perhaps("```")):
            yield from self._spaces(self._give)
        if (yield from self._perhaps(self.call[2])):
            self._space = []


class KimiParser(SectionParser):
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2. What stands before the
    arguments is the call's id, by which the conversation has to go on.
    """

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    opening = Markers([section[0], call[0]])
    markers = (*section, *call)

    def _one_call(self) -> Reading[None]:
        yield from self._spaces()
        call_id = yield from self._word()
        yield from self._spaces()
        yield from self._one_of(self.call[1:2])
        name, colon, number = call_id.removeprefix("functions.").rpartition(":")
        if not (colon and name and number.isdigit()):
            name, call_id = call_id.removeprefix("functions."), ""
        if not 0 < len(name) <= MAX_NAME:
            raise NotACall
        yield from self._from_arguments(name, call_id or None)
        if (yield from self._perhaps(self.call[2])):
            self._space = []
