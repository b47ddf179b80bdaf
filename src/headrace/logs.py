"""What log lines look like, in every process: a text for people, or one JSON object a line for programs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from functools import partial
from typing import Any

FORMATS = ("text", "json")
TEXT = "%(asctime)s.%(msecs)03d %(levelname)s {part}: %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"
LOST = "%d lines of the log were not taken, and are lost"
PATIENCE = 0.2  # seconds that lines wait for room
REFILL = 0.02  # of that, for each second that has gone by: a reader that is slow holds up no more than a fiftieth of the time


class JsonLines(logging.Formatter):
    """{"time", "level", "process", "logger", "message"} and, where there is one, {"exception"}."""

    def __init__(self, part: str):
        super().__init__()
        self.part = part

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z", "level": record.levelname, "process": self.part,
            "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class TextLines(logging.Formatter):
    def __init__(self, part: str):
        super().__init__(TEXT.format(part=part), TIME)
        self.part = part


class Lines(logging.StreamHandler):
    """To stderr, but never held up by it: a terminal that is stopped (Ctrl-S), a pipe whose reader has stopped, the socket of a
    journal that hangs must not stop streams. Lines for which there is no room are lost, and counted where there is again."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = 0
        self._torn = False  # the last line has no end
        self._known: Any = None  # the stream that `_own` belongs to
        self._own: Callable[[bytes], int] | None = None
        self._patience, self._asked = PATIENCE, 0.0  # what was left of it, and when

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._lost:  # the line that says so is how it is found out whether there is room again
                if not self._put(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, LOST, (self._lost,), None))):
                    self._lost += 1
                    return
                self._lost = 0
            self._lost += not self._put(self.format(record))
        except Exception:
            self.handleError(record)

    def _put(self, line: str) -> bool:
        """Whether all of it has been taken."""
        text = "\n" * self._torn + line + self.terminator
        if (own := self._without_waiting()) is None:
            self.stream.write(text)
            self.flush()
            return True
        data, now = text.encode(self.stream.encoding or "utf-8", "backslashreplace"), time.monotonic()
        self._patience = min(PATIENCE, self._patience + REFILL * (now - self._asked))
        self._asked = now
        while data:
            try:
                data = data[own(data) :]
                self._torn = bool(data)
            except BlockingIOError:
                if self._patience <= 0:
                    return False
                time.sleep(PATIENCE / 20)
                before, self._asked = self._asked, time.monotonic()
                self._patience -= self._asked - before
        return True

    def _without_waiting(self) -> Callable[[bytes], int] | None:
        """Writes what there is room for to the terminal, pipe or socket that is stderr, or raises BlockingIOError. It is opened
        again, or asked each time: a flag of stderr would be everybody's who has it. None: it is something else."""
        if self._known is not self.stream:
            self._known, self._own = self.stream, None
            with contextlib.suppress(AttributeError, OSError, ValueError):  # no file, or it cannot be opened again
                number = self.stream.fileno()
                mode = os.fstat(number).st_mode
                if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
                    self._own = partial(os.write, os.open(f"/proc/self/fd/{number}", flags))
                elif stat.S_ISSOCK(mode):  # it cannot be opened again
                    self._own = partial(_send, socket.socket(fileno=os.dup(number)))
        return self._own


def _send(there: socket.socket, data: bytes) -> int:
    return there.send(data, socket.MSG_DONTWAIT)


def settings() -> tuple[str, str, str]:
    """What this process calls itself (nothing, where others have decided what its lines look like), and level and form of its
    lines: for `configure` in another one."""
    level = logging.getLevelName(logging.getLogger("headrace").getEffectiveLevel())
    ours = [h.formatter for h in logging.getLogger().handlers if isinstance(h.formatter, JsonLines | TextLines)]
    part, is_json = (ours[0].part, isinstance(ours[0], JsonLines)) if ours else ("", False)
    return part, level if level in logging.getLevelNamesMapping() else "INFO", FORMATS[is_json]


def configure(part: str, level: str, form: str = "text") -> None:
    """All loggers of this process, the libraries' too, write to stderr. `part`: what this process calls itself."""
    if logging.getLogger().handlers:  # whoever runs us in a process of his own has decided
        return
    handler = Lines()
    handler.setFormatter(_formatter(part, form == "json"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def rename(part: str) -> None:
    """This process calls itself something else from now on."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_formatter(part, isinstance(handler.formatter, JsonLines)))


def _formatter(part: str, as_json: bool) -> logging.Formatter:
    return JsonLines(part) if as_json else TextLines(part)
