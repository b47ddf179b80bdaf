"""A JSON object that comes in pieces, given out as it comes: what is out is always the beginning of right JSON."""

from __future__ import annotations

import json
import re

from headrace.conversation.tool_syntax import MAX_DEPTH

MAX_WORD = 10_000  # characters of a number
_OUTSIDE = re.compile(r'[ \t\n\r]+|[{}\[\]:,"]|[-+.\w]+')
_INSIDE = re.compile(r'[^"\\\x00-\x1f]+|["\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
_FIRST = {"}": "first-key", "]": "first-value"}  # what is wanted where nothing stands between the brackets


class JsonObjectReader:
    """As strict as tool_syntax.parse_json(): line breaks in strings, which models write, are escaped on the way."""

    def __init__(self) -> None:
        self.ended = self.broken = False
        self.held = ""  # read, but not out: the beginning of an escape or of a number
        self._open: list[str] = []  # the closing brackets of what is open
        self._wanted = "{"  # one of: { key first-key : value first-value more
        self._in_string = False

    def push(self, text: str) -> tuple[str, int]:
        """What can be given out, and how much of `text` was read: less than all where the object has ended or broken."""
        begun = len(self.held)
        text, self.held, at = self.held + text, "", 0
        out: list[str] = []
        while at < len(text) and not self.ended:
            found = (_INSIDE if self._in_string else _OUTSIDE).match(text, at)
            if found is None and self._in_string and _ESCAPE_BEGUN.fullmatch(text, at):
                self.held = text[at:]
                break
            if found is not None and found.end() == len(text) and self._is_word(found[0]) and len(found[0]) < MAX_WORD:
                self.held = text[at:]
                break
            if found is None or not self._takes(found[0]):
                self.broken, self.held = True, text[at:begun]
                return "".join(out), max(at - begun, 0)
            out.append(json.dumps(found[0])[1:-1] if self._in_string and found[0] < " " else found[0])
            at = found.end()
        return "".join(out), (at if self.ended else len(text)) - begun

    def rest(self) -> str:
        """What is held, at the end of the output: the beginning of right JSON, too."""
        return self.held if self._in_string or self._wanted.endswith("value") else ""

    def _is_word(self, piece: str) -> bool:
        return not self._in_string and (piece[0].isalnum() or piece[0] in "-+._")

    def _takes(self, piece: str) -> bool:
        """Whether this may come now; then it has come."""
        if self._in_string:
            self._in_string = piece != '"'
            return True
        wanted = self._wanted
        if piece.isspace():
            return True
        if piece == '"' and wanted in ("key", "first-key", "value", "first-value"):
            self._in_string, self._wanted = True, ":" if wanted.endswith("key") else "more"
        elif piece in "{[" and (wanted == piece or wanted.endswith("value")) and len(self._open) < MAX_DEPTH:
            self._open.append("}" if piece == "{" else "]")
            self._wanted = "first-key" if piece == "{" else "first-value"
        elif piece in "}]" and self._open and piece == self._open[-1] and wanted in ("more", _FIRST[piece]):
            self._open.pop()
            self._wanted, self.ended = "more", not self._open
        elif piece == ":" and wanted == ":":
            self._wanted = "value"
        elif piece == "," and wanted == "more":
            self._wanted = "key" if self._open[-1] == "}" else "value"
        elif wanted.endswith("value") and _WORD.fullmatch(piece):
            self._wanted = "more"
        else:
            return False
        return True

