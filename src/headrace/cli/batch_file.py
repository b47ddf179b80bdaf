"""OpenAI's batch files: lines in, each checked alone; lines out, each written whole, in a file that a second run goes on with.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_..", "custom_id": "a", "response": {"status_code": 200, "request_id": "..", "body": {...}}, "error": null}

A line that cannot be run has an `error` {"code", "message"} instead of a response.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from headrace.cli.streams import holds_unicode
from headrace.errors import HeadraceError, ParameterError

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v2/rerank",
    "/rerank", "/score",
)  # fmt: skip
MAX_LINE = 64 * 2**20
RETRIED = (408, 429, 499)  # and 5xx: not the request's fault
BEGIN = b'{"id":"batch_req_'  # of every line that is written


class BatchLine(msgspec.Struct):
    """A line of the input, its body unread."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: bool | None = None


class BadLine(Exception):
    """A line that is not run: the reason, and its custom_id if it has one."""

    def __init__(self, custom_id: str | None, code: str, message: str):
        super().__init__(message)
        self.custom_id, self.code, self.message = custom_id, code, message


class Response(msgspec.Struct, omit_defaults=True):
    status_code: int
    request_id: str
    body: msgspec.Raw
    ignored: str | None = None  # fields of the body that were left out

    @property
    def failed(self) -> bool:
        return self.status_code >= 400

    @property
    def final(self) -> bool:
        """Whether another run would get the same."""
        return self.status_code < 500 and self.status_code not in RETRIED


class OutputLine(msgspec.Struct):
    id: str
    custom_id: str | None
    response: Response | None
    error: dict[str, str] | None

    @classmethod
    def of(cls, custom_id: str | None, response: Response | None, error: dict[str, str] | None = None) -> OutputLine:
        return cls(f"batch_req_{uuid.uuid4().hex}", custom_id, response, error)

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.failed


def read_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Each without its end; None stands for one of more than MAX_LINE bytes."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE:
            yield line.removesuffix(b"\n")
            continue
        while not line.endswith(b"\n") and (line := file.readline(2**20)):
            pass
        yield None


def parse(number: int, line: bytes | None) -> BatchLine:
    """Raises BadLine. Lines count from 1."""
    place = f"line {number}"
    if line is None:
        raise BadLine(None, "line_too_long", f"{place}: more than {MAX_LINE} bytes")
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    try:
        found = msgspec.json.decode(line, type=BatchLine)
        body = msgspec.json.decode(found.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        known = isinstance(error, msgspec.ValidationError)
        why = str(error) if known else f"this is not JSON ({error})"
        raise BadLine(_custom_id(line), "invalid_line", f"{place}: {why}") from None
    if not found.custom_id:
        raise BadLine(None, "invalid_line", f"{place}: custom_id is empty")
    if found.method != "POST":
        raise BadLine(found.custom_id, "invalid_line", f"{place}: method: got {found.method[:200]!r}, allowed: POST")
    if found.url not in URLS:
        raise BadLine(found.custom_id, "invalid_url", f"{place}: url: got {found.url[:200]!r}, allowed: {', '.join(URLS)}")
    if body.stream:
        raise BadLine(found.custom_id, "invalid_line", f"{place}: body.stream: got true, allowed: false; a file is no stream")
    return found


def _custom_id(line: bytes) -> str | None:
    """Of a line that is otherwise bad."""
    with contextlib.suppress(Exception):
        found = msgspec.json.decode(line).get("custom_id")
        return found if isinstance(found, str) else None
    return None


class Ids(set[bytes]):
    """Many custom_ids, each as 16 bytes."""

    def take(self, custom_id: str) -> bool:
        """False if it is there already."""
        before = len(self)
        self.add(self.digest(custom_id))
        return len(self) > before

    def has(self, custom_id: str) -> bool:
        return self.digest(custom_id) in self

    @staticmethod
    def digest(custom_id: str) -> bytes:
        return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Output(Protocol):
    """Where answers go. `answered`: those that were there before; `num_failed`: how many of them are errors."""

    answered: Ids
    num_failed: int

    def write(self, line: OutputLine) -> None: ...

    def close(self) -> None: ...


class StandardOutput:
    def __init__(self) -> None:
        self.answered, self.num_failed = Ids(), 0

    def write(self, line: OutputLine) -> None:
        sys.stdout.write(_text(line, holds_unicode(sys.stdout)) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        pass


def _text(line: OutputLine, unicode: bool) -> str:
    text = msgspec.json.encode(line).decode()
    return text if unicode else "".join(c if c.isascii() else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    units = c.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


class OutputFile:
    """Lines that another run has answered stay; what it left half written, or would be answered otherwise now, goes.

    Raises ParameterError for a file that is something else, and when another run writes it.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self.answered, self.num_failed = Ids(), 0
        try:
            self._file = self._open()
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode) and self._read_old():  # a pipe or a device has nothing old
                self._mend()
        except OSError as e:
            raise ParameterError("--output", path, f"a file that can be written ({e.strerror or e})") from None

    def _open(self) -> BinaryIO:
        file = open(self.path, "a+b", buffering=0)  # noqa: SIM115  (closed by close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ParameterError("--output", str(self.path), "a file that no other run is writing") from None
        return file

    def _old_lines(self) -> Iterator[tuple[bytes, OutputLine | None]]:
        """With what they say; None: torn off, which only the last one may be."""
        with open(self.path, "rb") as file:
            for number, first in enumerate(iter(partial(file.readline, len(BEGIN)), b""), 1):
                line = first
                try:
                    if first != BEGIN:  # whatever it is, it need not have an end
                        raise msgspec.DecodeError("another form")
                    line += file.readline()
                    yield line, msgspec.json.decode(line, type=OutputLine)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    if line.endswith(b"\n") or not (line.startswith(BEGIN) or BEGIN.startswith(line)):
                        allowed = f"what an earlier run has written, or a new file (its line {number} is something else)"
                        raise ParameterError("--output", str(self.path), allowed) from None
                    yield line, None

    def _read_old(self) -> bool:
        """Whether something must go, or lacks its end."""
        dirty = False
        for line, found in self._old_lines():
            if _stays(found) and found is not None and found.custom_id is not None:
                self.answered.take(found.custom_id)
                self.num_failed += found.failed
                dirty |= not line.endswith(b"\n")
            else:
                dirty = True
        return dirty

    def _mend(self) -> None:
        """The lines that stay, in a new file that takes the place of the old one."""
        beside = self.path.with_name(self.path.name + ".new")
        with open(beside, "wb") as file:
            file.writelines(line.removesuffix(b"\n") + b"\n" for line, found in self._old_lines() if _stays(found))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)
        self._file.close()
        self._file = self._open()

    def write(self, line: OutputLine) -> None:
        rest = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as e:
            raise HeadraceError(f"{self.path}: it cannot be written any further ({e.strerror or e})") from None

    def close(self) -> None:
        self._file.close()


def _stays(found: OutputLine | None) -> bool:
    return found is not None and found.custom_id is not None and found.response is not None and found.response.final


def raw(body: bytes) -> msgspec.Raw:
    """An answer's body, which may be of no form at all."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.Raw(msgspec.json.encode(body.decode("utf-8", "replace")))
    return msgspec.Raw(body)


def error_of(bad: BadLine) -> dict[str, Any]:
    return {"code": bad.code, "message": bad.message}
