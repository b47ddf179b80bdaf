"""Text files that options name: UTF-8, with or without a byte-order mark; anything else is an error that names the file."""

from __future__ import annotations

import codecs
from pathlib import Path

from headrace.errors import ParameterError

_OTHER_MARKS = (  # the longer ones first: UTF-32 begins like UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip


def read_text(option: str, path: str) -> str:
    """The text of the file that `option` names, line ends as \\n. Raises ParameterError."""
    try:
        return decode_text(Path(path).read_bytes())
    except OSError as e:
        raise ParameterError(option, path, f"a file that can be read ({e.strerror or e})") from None
    except ValueError as e:
        raise ParameterError(option, path, f"a UTF-8 text file ({e})") from None


def decode_text(data: bytes, encoding: str = "utf-8") -> str:
    """Without a byte-order mark, line ends as \\n. Raises ValueError for what is not a text in `encoding`."""
    for mark, name in _OTHER_MARKS:
        if data.startswith(mark):
            raise ValueError(f"this is {name}")
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode(encoding)
    except UnicodeDecodeError as e:
        raise ValueError(f"byte {e.start} is not valid {encoding}") from None
    if "\0" in text:
        raise ValueError("it holds NUL characters: binary, or UTF-16 without a mark")
    return text.replace("\r\n", "\n").replace("\r", "\n")
