"""Standard input, output and error in whatever state a command finds them: closed, full, non-blocking, of another encoding.

Results go to standard output: where they cannot be written the command ends with one line. What goes to standard error
is never worth ending for.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any

from headrace.errors import HeadraceError
from headrace.files import decode_text

# as `cat -v` shows those of ASCII, a question mark for the others; a return of the carriage, which would write over what stands
# there, is left out
CONTROLS = {i: f"^{chr(i ^ 64)}" for i in (*range(32), 127) if chr(i) not in "\t\n"} | dict.fromkeys(range(0x80, 0xA0), "?")
CONTROLS[ord("\r")] = ""


class StreamError(HeadraceError):
    """Standard input cannot be read or standard output not be written; the message is for a human."""


class ReaderLeft(StreamError):
    """Whoever read standard output has closed it: nobody is there to tell."""


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Stand in for the interpreter's own streams while a command runs; what a caller put into their place stays."""
    _occupy_closed_descriptors()
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is not None and sys.stdin is sys.__stdin__:
        sys.stdin = _text(_Input(0, "r", closefd=False), before[0])
    if sys.stdout is sys.__stdout__:
        raw: io.FileIO = _Output(1, "w", closefd=False) if before[1] is not None else _Closed(1, "w", closefd=False)
        sys.stdout = _text(raw, before[1])
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_BestEffort(2, "w", closefd=False), before[2])
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def check_output() -> None:
    """Raise StreamError before anything slow is done whose result could not be written."""
    if isinstance(getattr(sys.stdout, "buffer", None), _Closed):
        raise _cannot_write("it is closed")


def holds_unicode(stream: Any) -> bool:
    """Whether every text can be written there."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf")


def harmless(text: str) -> str:
    """A model's text for a terminal: there escape sequences, which it may have read in a prompt, could name the window, fill
    the clipboard or hide what is above."""
    return text.translate(CONTROLS)


def for_stream(text: str, stream: Any) -> str:
    """`harmless` where it is a terminal; a file or a program gets the text as it is."""
    return harmless(text) if stream.isatty() else text


def read_all() -> str:
    """Standard input up to its end."""
    if (stream := sys.stdin) is None or stream.closed:
        raise StreamError("standard input: it is closed")
    try:
        data = stream.buffer.read() if hasattr(stream, "buffer") else stream.read().encode()
        return decode_text(data, "utf-8" if holds_unicode(stream) else stream.encoding)
    except (OSError, ValueError) as e:
        raise StreamError(f"standard input: {_reason(e)}") from None


def read_line() -> str:
    """The next line of standard input with its end; "" after the last."""
    try:
        return sys.stdin.readline()
    except (OSError, ValueError) as e:
        raise StreamError(f"standard input: {_reason(e)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"it is not valid {error.encoding}"
    return getattr(error, "strerror", None) or str(error)


def _cannot_write(why: str) -> StreamError:
    return StreamError(f"standard output: it cannot be written ({why})")


def _occupy_closed_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed, lest the next file or socket becomes a standard stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)


class _Text(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except UnicodeEncodeError as e:
            bad = e.object[e.start]
            why = f"its encoding {self.encoding} has no {bad!a}; PYTHONIOENCODING=utf-8 or a UTF-8 locale writes all text"
            raise _cannot_write(why) from None


def _text(raw: io.FileIO, like: Any) -> io.TextIOWrapper:
    """`raw` with the encoding of the stream that it replaces (None: that was closed)."""
    encoding, errors = (like.encoding, like.errors) if like is not None else ("utf-8", "strict")
    if isinstance(raw, _Input):
        return io.TextIOWrapper(io.BufferedReader(raw), encoding, "strict")
    errors = "backslashreplace" if isinstance(raw, _BestEffort) else errors
    return _Text(raw, encoding, errors, write_through=True)  # nothing is left for the exit to flush


class _Input(io.FileIO):
    """Waits for input where a non-blocking descriptor has none yet."""

    def readinto(self, buffer: Any, /) -> int:
        while (count := super().readinto(buffer)) is None:
            select.select([self], [], [])
        return count

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(2**16), b""))

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(buffer)])


class _Output(io.FileIO):
    """Writes all of it, waiting where a non-blocking descriptor is full."""

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        while rest:
            try:
                written = super().write(rest)
            except BrokenPipeError:
                raise ReaderLeft("standard output: its reader has left") from None
            except OSError as e:
                raise _cannot_write(e.strerror or str(e)) from None
            if written is None:
                select.select([], [self], [])
            else:
                rest = rest[written:]
        return len(data)


class _Closed(io.FileIO):
    """Standard output that was closed when the command began."""

    def write(self, data: Any, /) -> int:
        raise _cannot_write("it is closed")


class _BestEffort(_Output):
    def write(self, data: Any, /) -> int:
        with contextlib.suppress(StreamError):
            super().write(data)
        return len(data)
