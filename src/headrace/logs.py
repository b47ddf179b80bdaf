"""What log lines look like, in every process: a text for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import select
import time

FORMATS = ("text", "json")
TEXT = "%(asctime)s.%(msecs)03d %(levelname)s {part}: %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"
LOST = "%d lines of the log were not taken, and are lost"
PIECE = 4096  # bytes, which a pipe that has room takes at once
PATIENCE = 0.2  # seconds that a line waits for room, unless there was none for the one before


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
    """To stderr, but never held up by it: a terminal that is stopped (Ctrl-S) and a pipe whose reader has stopped must not stop
    streams. Lines for which there is no room are lost, and counted where there is room again."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = 0
        self._torn = False  # the last line has no end

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._lost and self._has_room(0.0):
                lost, self._lost = self._lost, 0
                self._write(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, LOST, (lost,), None)))
            self._write(self.format(record))
        except Exception:
            self.handleError(record)

    def _write(self, line: str) -> None:
        text = "\n" * self._torn + line + self.terminator
        size = PIECE if text.isascii() else PIECE // 4
        for start in range(0, len(text), size):
            if not self._has_room(0.0 if self._lost else PATIENCE):
                self._lost, self._torn = self._lost + 1, self._torn or start > 0
                return
            self.stream.write(text[start : start + size])
            self.flush()
        self._torn = False

    def _has_room(self, seconds: float) -> bool:
        try:
            looked = select.poll()
            looked.register(self.stream.fileno(), select.POLLOUT)
        except (AttributeError, OSError, ValueError):  # no file
            return True
        return bool(looked.poll(1000 * seconds))


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
