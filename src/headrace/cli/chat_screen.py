"""What `headrace chat` shows: Markdown through rich on a terminal, the bare text elsewhere."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from typing import Any, TextIO

from headrace.cli.streams import for_stream, harmless

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_LIST_ITEM = re.compile(r"[-+*\d]")


class PlainScreen:
    """The answers and nothing else on `out`; the rest on `err`."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, show_reasoning: bool = True):
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._show_reasoning = show_reasoning
        self._any = False

    def begin(self) -> None:
        self._any = False

    def push(self, text: str, reasoning: bool) -> None:
        if text:
            stream = self._err if reasoning else self._out
            if not reasoning or self._show_reasoning:
                stream.write(for_stream(text, stream))
                stream.flush()
            self._any = self._any or not reasoning

    def end(self) -> None:
        self._out.write("\n")
        self._out.flush()

    def note(self, text: str) -> None:
        print(for_stream(text, self._err), file=self._err, flush=True)


class RichScreen:
    """Markdown, block by block: finished blocks are printed for good, only the last one is drawn anew as it grows.

    So the cost of a token does not grow with the answer, and an answer longer than the screen scrolls as usual.
    """

    def __init__(self, show_reasoning: bool = True, console=None):
        from rich.console import Console
        from rich.live import Live

        self.console = console or Console()
        self._show_reasoning = show_reasoning
        self._live: Live | None = None
        self._ended_by: Any = signal.SIG_DFL  # what SIGTERM did before
        self._text, self._reasoning = "", False

    def begin(self) -> None:
        from rich.live import Live

        self._text, self._reasoning = "", False
        self._live = Live(console=self.console, refresh_per_second=12, transient=True, vertical_overflow="crop")
        self._ended_by = signal.signal(signal.SIGTERM, self._show_cursor)
        self._live.start()

    def push(self, text: str, reasoning: bool) -> None:
        if not text or (reasoning and not self._show_reasoning):
            return
        if reasoning != self._reasoning:
            self._print(self._text)
            self._text, self._reasoning = "", reasoning
        self._text += harmless(text)
        *finished, self._text = split_blocks(self._text)
        for block in finished:
            self._print(block)
        assert self._live is not None
        # what does not fit above the bottom line would be cut off: show the newest lines
        shown = "\n".join(self._text.split("\n")[-max(self.console.height - 2, 1) :])
        self._live.update(self._render(shown))

    def end(self) -> None:
        if self._live is not None:
            self._live.update("")
            self._live.stop()
            self._live = None
            signal.signal(signal.SIGTERM, self._ended_by)
        self._print(self._text)
        self._text = ""

    def _show_cursor(self, number: int, frame: Any) -> None:
        """It is hidden while an answer is drawn. Not by rich, which the signal may have come into the middle of."""
        os.write(self.console.file.fileno(), b"\x1b[?25h")
        signal.signal(number, self._ended_by)
        os.kill(os.getpid(), number)

    def note(self, text: str) -> None:
        from rich.markup import escape

        self.console.print(f"[dim]{escape(harmless(text))}[/dim]", highlight=False)

    def _print(self, text: str) -> None:
        if text.strip():
            self.console.print(self._render(text))
            self.console.print()

    def _render(self, text: str):
        from rich.markdown import Markdown
        from rich.text import Text

        return Text(text.strip("\n"), style="dim italic") if self._reasoning else Markdown(text)


def split_blocks(text: str) -> list[str]:
    """A growing Markdown text as blocks; of these all but the last are final: what follows cannot change them.

    A block ends at an empty line outside of a fence. A list or an indented block may go on after the empty line, so the
    line after it must have begun, at the left margin, with something that is not a list item.
    """
    blocks: list[str] = []
    fence, begin, at = None, 0, 0
    lines = text.split("\n")
    for line, following in itertools.pairwise(lines):
        at += len(line) + 1
        mark = _FENCE.match(line)
        if mark and (fence is None or (mark[1][0] == fence[0] and len(mark[1]) >= len(fence))):
            fence = mark[1] if fence is None else None
        alone = bool(following) and not following[0].isspace() and not _LIST_ITEM.match(following)
        if fence is None and not line.strip() and alone:
            blocks.append(text[begin:at])
            begin = at
    return [*blocks, text[begin:]]
