"""From token ids to text, a piece at a time: whole characters only."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Protocol

MAX_BYTE_RUN = 64  # byte-fallback tokens held at most before what is whole of them is released
MAX_OPEN = 8  # tokens that may wait for the end of a character in a decoder of an unknown kind


class TextTokenizer(Protocol):
    """What a detokenizer needs to know of a tokenizer."""

    byte_level: bool  # decode(ids) is the UTF-8 text of all token_bytes, invalid bytes replaced
    special_ids: frozenset[int]  # dropped by decode() when skip_special_tokens
    special_texts: dict[str, int]  # how they are written -> id
    byte_fallback: dict[int, int]  # id -> byte, of the <0xNN> tokens of a decoder that joins runs of them

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes (byte-level BPE): one incremental UTF-8 decoder."""

    num_run, run_begins = 0, (0,)  # as WindowDetokenizer: what a byte is, those before it decide

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()):
        self._bytes_of = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in _tail(prompt_ids, self._skip, MAX_OPEN):
            self._decoder.decode(self._bytes_of(token_id))
        self._begun = _num_open(self._decoder)  # the prompt's end is not whole: what comes of it stands in the prompt

    @property
    def num_open(self) -> int:
        """Characters that have begun and are not out."""
        return _num_open(self._decoder) - self._begun

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skip else self._own(self._decoder.decode(self._bytes_of(token_id)))

    def _own(self, text: str) -> str:
        if text and self._begun:
            text, self._begun = text[self._begun :], 0
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
        self.run_begins: Sequence[int] = (0,)  # of the last run that ended: characters that begin before its nth byte

    def _context_of(self, tail: list[int]) -> list[int]:
        """The end of it: back to a token that has a text and is not of a run of bytes."""
        for start in range(len(tail) - 1, -1, -1):
            if tail[start] not in self._byte_of and self._decode(tail[start:]):
                return tail[start:]
        return tail

    @property
    def num_open(self) -> int:
        """Characters that have begun and are not out, before the run."""
        return self._num_held + (0 if self._long_run is None else _num_open(self._long_run))

    @property
    def num_run(self) -> int:
        """Bytes of the run that has not ended: only its end decides what characters they are."""
        return len(self._run)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        byte = self._byte_of.get(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        head = self._end_long_run()
        self._end_run()
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

    def _end_run(self, tail: int = 0) -> None:
        """`_pending` ends with a run to be decoded, all but its `tail` bytes. If it goes on with one that the prompt ends
        with, let `_shown` be what is the prompt's."""
        if size := len(self._run) - tail:
            valid = _is_utf8(self._prompt_run + self._run[:size])
            begins = [0, *itertools.accumulate(byte & 0xC0 != 0x80 or not valid for byte in self._run)]
            if self._prompt_run or not self._shown:
                length = len(self._decode(self._context + self._pending[: len(self._pending) - tail]))
                if self._prompt_run:
                    self._shown = length - begins[size]
                lost = self._shown + self._num_held + begins[size] - length  # a blank that a text does not begin with
                begins = [max(0, count - lost) for count in begins]
            self.run_begins = begins
        self._prompt_run = b""
        self._run.clear()

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
        self._long_run = codecs.getincrementaldecoder("utf-8")("replace")
        self._long_run.decode(bytes(self._run[len(self._run) - tail :]))
        self._end_run(tail)
        delta = self._decode(self._context + self._pending[: len(self._pending) - tail])[self._shown :]
        self._advance(self._pending[-1:])
        return delta

    def _end_long_run(self) -> str:
        if self._long_run is None:
            return ""
        text, self._long_run = self._long_run.decode(b"", True), None
        return text

    def finish(self) -> str:
        text = self._end_long_run()
        self._end_run()
        if self._pending:
            text += self._decode(self._context + self._pending)[self._shown :]
        self._pending, self._num_held = [], 0
        return text


def _tail(prompt_ids: Sequence[int], skip: frozenset[int], count: int) -> list[int]:
    """The last `count` ids of a prompt that have a text."""
    return list(itertools.islice((i for i in reversed(prompt_ids) if i not in skip), count))[::-1]


def _num_open(decoder: codecs.IncrementalDecoder) -> int:
    """Characters that the bytes it waits with make if nothing follows; half a surrogate pair is two."""
    return len(decoder.getstate()[0].decode("utf-8", "replace"))


def _is_utf8(data: bytes | bytearray) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def detokenizer(
    tokenizer: TextTokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
) -> ByteDetokenizer | WindowDetokenizer:
    """For what follows `prompt_ids`: its text is decode(prompt + output) behind decode(prompt)."""
    kind = ByteDetokenizer if tokenizer.byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens, prompt_ids)
