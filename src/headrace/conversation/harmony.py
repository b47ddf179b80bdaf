"""OpenAI's harmony format, in which gpt-oss writes: messages on channels, reasoning and calls among them.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>{...}<|call|>

One reader for all of it. Models write some headers wrongly: whatever can be read is, and nothing fails.
"""

from __future__ import annotations

import re

from headrace.conversation.events import Reasoning
from headrace.conversation.piece_reader import CutOff, NotACall, Reading
from headrace.conversation.tool_parser import ToolParser
from headrace.conversation.tool_syntax import MAX_NAME
from headrace.text.markers import Markers, MarkerScanner

MAX_HEADER = 2 * MAX_NAME
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
CHANNELS = ("analysis", "commentary", "final")
HEADERS = (CHANNEL, MESSAGE, CONSTRAIN, "to=")  # what a header begins with, behind the role
BREAK = "\n\n"  # between messages that come out as one text
_CHANNEL = re.compile(rf"\s*({'|'.join(CHANNELS)})")
_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)", re.ASCII)
_OTHER = re.compile(r"to=\S*|<\|constrain\|>\s*\w*|^\s*(json|assistant)\b")  # what a header says beside its channel


class HarmonyParser(ToolParser):
    """The output begins behind `<|start|>assistant`, so in a header. A call's end is its JSON's.

    A message to `functions.NAME`, or to the name of a tool, is a call if it is a JSON object; to anyone else it is text. A
    header that does not end becomes the beginning of its message.
    """

    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    streams = True
    # spelled out in a message, a marker is no end; what only stands between messages is
    _bodies = Markers(
        [end + begin for end in ENDS for begin in (START, CHANNEL)]
        + [START + "assistant", CHANNEL + "commentary to="]
        + [CHANNEL + name + MESSAGE for name in CHANNELS]
    )
    _headers = Markers([MESSAGE, START, *ENDS])

    def __init__(self, *, prompt: str = "", calls: bool = True, reasons: bool = True):
        """`reasons`: the analysis is reasoning, not text."""
        super().__init__()
        self._prompt, self._calls_wanted, self._reasons = prompt, calls, reasons
        self._begun = {True: False, False: False}  # whether there is reasoning, text
        self._is_new = True  # nothing of this message is out

    def _read(self) -> Reading[None]:
        _, start, header = self._prompt.rpartition(START)
        header, within, _ = header.partition(MESSAGE)
        end = MESSAGE if start and within else ""
        if not end and (yield from self._begins_header()):
            header, end = yield from self._header()
        elif not end:
            header, end = CHANNEL + "final", MESSAGE
        while True:
            channel, name, lead = self._told(header)
            self._is_new = True
            if end == MESSAGE:
                if not (name and (yield from self._call_to(name))):
                    yield from self._body(channel == "analysis" and not name)
            elif lead:
                self._say(lead, channel == "analysis")
                if end not in (START, *ENDS):  # the header was too long for one
                    yield from self._body(channel == "analysis")
            if end in ENDS:
                yield from self._perhaps(START)
            if not (yield from self._more()):
                return
            header, end = yield from self._header()

    def _begins_header(self) -> Reading[bool]:
        """Whether the output does; nothing is taken."""
        seen, found = "", False
        while not found and len(seen) < MAX_HEADER and (yield from self._more()):
            seen += self._text[self._at]
            self._at += 1
            found = seen.lstrip().startswith(HEADERS)
            if not any(word.startswith(seen.lstrip()[: len(word)]) for word in HEADERS):
                break
        self._text, self._at = seen + self._text[self._at :], 0
        return found

    def _header(self) -> Reading[tuple[str, str]]:
        """A header, and the marker that ends it: "" where the output ends first, or where it is too long for one."""
        scanner, text = MarkerScanner(self._headers), ""
        while len(text) < MAX_HEADER and (yield from self._more()):
            scan = scanner.push(self._text[self._at])
            self._at += 1
            text += scan.text
            if scan.marker is not None:
                return text, scan.marker
        return text + scanner.flush(), ""

    def _told(self, header: str) -> tuple[str, str, str]:
        """A header's channel, the function that it calls, and what stands behind the channel and is nothing of a header."""
        channel, name, (lead, *parts) = "final", "", header.split(CHANNEL)
        for part in parts:
            found = _CHANNEL.match(part)
            channel, lead = (found[1], part[found.end() :]) if found else (channel, part)
        for recipient in _RECIPIENT.findall(header):
            if self._calls_wanted and (recipient.startswith("functions.") or recipient in self.schemas):
                name = recipient.removeprefix("functions.")[:MAX_NAME]
        lead = _OTHER.sub("", lead).strip()
        unfinished = any(word.startswith(lead) for word in (*self.markers, *CHANNELS, "assistant"))
        return channel, name, "" if unfinished else lead

    def _call_to(self, name: str) -> Reading[bool]:
        """Whether the message is a call. If not, nothing of it is taken."""
        self._taken, self._json, self._head = [], None, None
        try:
            yield from self._object(name)
            self._give_call()
        except NotACall:
            self._text, self._at = "".join(self._taken) + self._text[self._at :], 0
            return False
        except CutOff:
            return True
        self._is_new = False
        yield from self._body(False)
        return True

    def _body(self, is_thought: bool) -> Reading[None]:
        """A message up to the next header, which is not taken."""
        scanner = MarkerScanner(self._bodies)
        while (yield from self._more()):
            scan = scanner.push(self._text[self._at :])
            self._text, self._at = scan.rest, 0
            self._say(scan.text, is_thought)
            if scan.marker is not None:
                end = next((e for e in ENDS if scan.marker.startswith(e)), "")
                self._text = scan.marker.removeprefix(end).removeprefix(START) + self._text
                return
        held = scanner.flush()
        if not held.startswith(ENDS):
            self._say(held, is_thought)

    def _say(self, text: str, is_thought: bool) -> None:
        is_thought &= self._reasons
        if text and self._is_new and self._begun[is_thought]:
            text = BREAK + text
        if not text:
            return
        self._is_new, self._begun[is_thought] = False, True
        if is_thought:
            self._events.append(Reasoning(text))
        else:
            self._give(text)
