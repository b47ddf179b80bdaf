"""Calls whose arguments stand each between tags of its own, as plain text: what they are, the tool's schema says."""

from __future__ import annotations

from headrace.conversation.argument_types import string_piece, typed, types_of
from headrace.conversation.piece_reader import NotACall, Reading
from headrace.conversation.tool_parser import ToolParser
from headrace.conversation.tool_syntax import MAX_NAME, json_text
from headrace.text.markers import Markers, MarkerScanner


class TaggedParser(ToolParser):
    """The tags of one format. A value ends at its own tag or, where that is missing, at one that can only stand behind it.

    A call is complete with its last tag: without that the output may have ended in the middle of it.
    """

    name_end = ""  # behind the name; "": the name ends at a blank or a tag
    key = ("", "")  # around an argument's name
    value = ""  # before a value; "": it follows the key
    value_end = ""
    other_ends: tuple[tuple[str, str, tuple[str, ...]], ...] = ()  # of a value: (end, the tag in it, what has to follow)
    call_end: tuple[str, ...] = ()  # of these, one ends a call
    closing = ""  # behind calls; "": there is nothing
    trims = False  # one line break at each end of a value belongs to its tags

    def _calls(self, marker: str) -> Reading[None]:
        yield from self._before_name(marker)
        name = yield from self._word()
        if self.name_end:
            yield from self._one_of((self.name_end,))
        yield from self._spaces()
        if (yield from self._next()) != "<":
            raise NotACall
        tags = (self.key[0], *self.call_end)
        tag, count = (yield from self._one_of(tags)), 0
        while tag == self.key[0]:
            key = yield from self._key()
            if not count:
                self._open(name)
            self._add(f"{', ' if count else '{'}{json_text(key)}: ")
            count += 1
            tag = yield from self._value(types_of(self.schemas.get(name), key), tags)
        if not count:
            self._open(name)
        self._add("}" if count else "{}")
        self._give_call()
        if self.closing and tag != self.closing:
            yield from self._spaces(self._give)  # kept for the case that other text follows
            if (yield from self._perhaps(self.closing)):
                self._space = []

    def _before_name(self, marker: str) -> Reading[None]:
        """What stands between the marker and the name."""
        yield from self._spaces()

    def _key(self) -> Reading[str]:
        key = ""
        while not key.endswith(self.key[1]):
            c = yield from self._next()
            if len(key) > MAX_NAME or c == "\n":
                raise NotACall
            key += self._take()
        key = key.removesuffix(self.key[1]).strip()
        if self.value:
            yield from self._spaces()
            yield from self._one_of((self.value,))
        return key

    def _value(self, types: frozenset[str], tags: tuple[str, ...]) -> Reading[str]:
        """The value is added to the call; the tag behind it, which is taken.

        The value's end is one only where a tag follows: models write about tags, too.
        """
        others = {marker: (tag, following) for marker, tag, following in self.other_ends}
        scanner = MarkerScanner([self.value_end, *others])
        text = _Value(self, types, self.trims)
        while True:
            yield from self._next()
            scan = scanner.push(self._text[self._at :])
            self._take(len(self._text) - self._at - len(scan.rest))
            text.push(scan.text)
            if scan.marker is None:
                continue
            tag, following = others.get(scan.marker, ("", tags))
            if not following or (yield from self._begins(*following)):
                break
            text.push(scan.marker)
        if not tag:
            yield from self._spaces()
            tag = yield from self._one_of(tags)
        text.end()
        return tag


class _Value:
    """A value on its way into the call: strings piece by piece, all else when it is whole."""

    def __init__(self, parser: ToolParser, types: frozenset[str], trims: bool):
        self._add, self._types, self._trims = parser._add, types, trims
        self._pieces: list[str] = []
        self._begun = not trims  # the line break at its beginning is gone
        self._break = ""  # perhaps the one at its end
        self._is_string = types == {"string"}
        if self._is_string:
            self._add('"')

    def push(self, text: str) -> None:
        if not self._begun and text:
            text, self._begun = text.removeprefix("\n"), True
        text = self._break + text
        self._break = "\n" if self._trims and text.endswith("\n") else ""
        self._put(text[: len(text) - len(self._break)])

    def _put(self, text: str) -> None:
        if self._is_string:
            self._add(string_piece(text))
        else:
            self._pieces.append(text)

    def end(self) -> None:
        self._add('"' if self._is_string else typed("".join(self._pieces), self._types))


class Qwen3CoderParser(TaggedParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`: Qwen3-Coder, Qwen 3.5 and later,
    Nemotron 3. The outer tags may be missing.
    """

    opening = Markers([space + tag for space in ("", "\n", "\n\n") for tag in ("<tool_call>", "<function=")])
    markers = ("<tool_call>", "</tool_call>")
    name_end = ">"
    key, value_end = ("<parameter=", ">"), "</parameter>"
    other_ends = (("\n<parameter=", "<parameter=", ()), ("\n</function>", "</function>", ("</tool_call>",)))
    call_end, closing = ("</function>", "</tool_call>"), "</tool_call>"
    trims = True

    def _before_name(self, marker: str) -> Reading[None]:
        if marker.strip() == "<tool_call>":
            yield from self._spaces()
            yield from self._one_of(("<function=",))


class GlmParser(TaggedParser):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`: GLM 4.5 and later; up to 4.6 there
    are line breaks between the tags.
    """

    opening = Markers(["<tool_call>", "\n<tool_call>"])
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    key, value, value_end = ("<arg_key>", "</arg_key>"), "<arg_value>", "</arg_value>"
    other_ends = (("\n<arg_key>", "<arg_key>", ()), ("</tool_call>", "</tool_call>", ("<tool_call>",)))
    call_end = ("</tool_call>",)
