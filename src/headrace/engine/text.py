"""From token ids to text, a piece at a time: whole characters only, stop strings found wherever they lie.

One automaton over text (`MarkerScanner`) finds stop strings here and the markers of reasoning and tool calls in `api`.

    ids -> detokenizer (holds incomplete characters) -> scanner (holds what may begin a stop string) -> delta
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

MAX_BYTE_RUN = 64  # byte-fallback tokens held at most before what is whole of them is released
MAX_OPEN = 8  # tokens that may wait for the end of a character in a decoder of an unknown kind


class TextTokenizer(Protocol):
    """What a TextStream needs to know of a tokenizer."""

    byte_level: bool  # decode(ids) is the UTF-8 text of all token_bytes, invalid bytes replaced
    special_ids: frozenset[int]  # dropped by decode() when skip_special_tokens
    special_texts: dict[str, int]  # how they are written -> id
    byte_fallback: dict[int, int]  # id -> byte, of the <0xNN> tokens of a decoder that joins runs of them

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


# ---------------------------------------------------------------------------------------------------------------------
# strings in a stream of text


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


# ---------------------------------------------------------------------------------------------------------------------
# ids to text


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes (byte-level BPE): one incremental UTF-8 decoder."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()):
        self._bytes_of = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in _tail(prompt_ids, self._skip, MAX_OPEN):
            self._decoder.decode(self._bytes_of(token_id))
        self._begun = self._is_open  # the prompt's last character is not whole: what comes of it stands in the prompt

    @property
    def _is_open(self) -> bool:
        return bool(self._decoder.getstate()[0])

    @property
    def num_open(self) -> int:
        """Characters that have begun and are not out."""
        return int(self._is_open and not self._begun)

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skip else self._own(self._decoder.decode(self._bytes_of(token_id)))

    def _own(self, text: str) -> str:
        if text and self._begun:
            self._begun = False
            return text[1:]
        return text

    def finish(self) -> str:
        return self._own(self._decoder.decode(b"", final=True))


class WindowDetokenizer:
    """For every other tokenizer: decodes a small window, the last token as context and what has no text yet.

    The context, at first the end of the prompt, makes the decoder treat what follows as not being the first (no leading
    space is dropped, words are joined as in the middle of a text). Byte-fallback tokens are decoded when their run has
    ended, because decode() replaces all bytes of a run that is not valid UTF-8 as a whole. A run longer than MAX_BYTE_RUN
    is released character by character; only there the text may differ from decode(), and only where the run is not valid.
    Of a run that began in the prompt, the characters that begin there are the prompt's.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._byte_of = tokenizer.byte_fallback
        self._context = self._context_of(_tail(prompt_ids, self._skip, MAX_BYTE_RUN))  # tokens whose text is out
        self._shown = len(self._decode(self._context))  # how much of the decoded context and pending tokens is out
        run = itertools.takewhile(lambda byte: byte is not None, map(self._byte_of.get, reversed(self._context)))
        self._prompt_run = bytes(run)[::-1]  # type: ignore[arg-type]
        self._pending: list[int] = []  # tokens whose text is not out
        self._num_held = 0  # characters of those before the run
        self._run = bytearray()  # bytes of the run that `_pending` ends with
        self._long_run: codecs.IncrementalDecoder | None = None  # set while in a run that was released

    def _context_of(self, tail: list[int]) -> list[int]:
        """The end of it: back to a token that has a text and is not of a run of bytes."""
        for start in range(len(tail) - 1, -1, -1):
            if tail[start] not in self._byte_of and self._decode(tail[start:]):
                return tail[start:]
        return tail

    @property
    def num_open(self) -> int:
        """Characters that have begun and are not out."""
        return self._num_held + _num_begun(self._run)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        byte = self._byte_of.get(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        head = self._end_long_run()
        self._end_prompt_run(self._run)
        self._run.clear()
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith("�") and len(self._pending) < MAX_OPEN:
            self._num_held = max(0, len(text) - self._shown)
            return head  # bytes of a character, perhaps, though this decoder is not known to make such
        if len(text) > self._shown:
            delta = text[self._shown :]
            self._advance(self._context_of(self._context + self._pending))
            return head + delta
        if not self._context:
            self._advance(self._pending)  # without text, it is the first all the same
        elif self._without_text(token_id):
            self._pending.pop()  # kept, it would only make the window grow
        return head

    def _without_text(self, token_id: int) -> bool:
        """Whether the last pending token has no text now and none when others follow."""
        before, after = self._context + self._pending[:-1], self._context
        return self._decode([*before, token_id, *after]) == self._decode(before + after)

    def _advance(self, context: list[int]) -> None:
        self._context, self._pending, self._num_held = context, [], 0
        self._shown = len(self._decode(context))

    def _end_prompt_run(self, run: bytes | bytearray) -> None:
        """`_pending` is `run` and goes on with one that the prompt ends with: let `_shown` be what is the prompt's."""
        if self._prompt_run and run:
            try:
                (self._prompt_run + run).decode()
                num_own = _num_begun(run)
            except UnicodeDecodeError:
                num_own = len(run)
            self._shown = len(self._decode(self._context + self._pending[: len(run)])) - num_own
        self._prompt_run = b""

    def _push_byte(self, token_id: int, byte: int) -> str:
        if self._long_run is not None:
            return self._long_run.decode(bytes([byte]))
        self._pending.append(token_id)
        self._run.append(byte)
        return self._release_run() if len(self._run) >= MAX_BYTE_RUN else ""

    def _release_run(self) -> str:
        """Let the run go, but for an incomplete last character; what follows of it is decoded as plain UTF-8."""
        tail = 0
        whole = self._prompt_run + self._run
        try:
            whole.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                tail = len(whole) - error.start
        split = len(self._pending) - tail
        self._end_prompt_run(self._run[: len(self._run) - tail])
        delta = self._decode(self._context + self._pending[:split])[self._shown :]
        self._long_run = codecs.getincrementaldecoder("utf-8")("replace")
        self._long_run.decode(bytes(self._run[len(self._run) - tail :]))
        self._advance(self._pending[-1:])
        self._run.clear()
        return delta

    def _end_long_run(self) -> str:
        if self._long_run is None:
            return ""
        text, self._long_run = self._long_run.decode(b"", True), None
        return text

    def finish(self) -> str:
        text = self._end_long_run()
        self._end_prompt_run(self._run)
        if self._pending:
            text += self._decode(self._context + self._pending)[self._shown :]
        self._pending, self._run = [], bytearray()
        return text


def _tail(prompt_ids: Sequence[int], skip: frozenset[int], count: int) -> list[int]:
    """The last `count` ids of a prompt that have a text."""
    return list(itertools.islice((i for i in reversed(prompt_ids) if i not in skip), count))[::-1]


def _num_begun(data: bytes | bytearray) -> int:
    """Characters that begin in UTF-8 bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def detokenizer(
    tokenizer: TextTokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
) -> ByteDetokenizer | WindowDetokenizer:
    """For what follows `prompt_ids`: its text is decode(prompt + output) behind decode(prompt)."""
    kind = ByteDetokenizer if tokenizer.byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens, prompt_ids)


class TextOffsets:
    """Where in the text each token begins: behind all characters that begin in the tokens before it."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()):
        self._detokenizer = detokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self.num_out = 0  # characters

    def push(self, token_id: int) -> int:
        offset = self.num_out + self._detokenizer.num_open
        self.num_out += len(self._detokenizer.push(token_id))
        return offset


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
