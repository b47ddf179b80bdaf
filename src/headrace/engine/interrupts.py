"""Ctrl-C at a place where it tears nothing."""

from __future__ import annotations

import _signal  # what `signal` wraps: that turns each handler into an enumeration's member, in vain, for 10 us a token
import signal
import threading
from types import FrameType
from typing import Any

_SIGINT = int(signal.SIGINT)


class uninterrupted:
    """Ctrl-C waits for the end of the block: inside a step it would tear books that all requests share. A second does not."""

    def __init__(self) -> None:
        self.pending = False
        self._before: Any = None

    def __enter__(self) -> uninterrupted:
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(_SIGINT)
            if callable(before):  # somebody in Python: the default one raises KeyboardInterrupt
                self._before = before
                _signal.signal(_SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(_SIGINT, self._before)
            if self.pending:
                self._before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            self._before(number, frame)
        self.pending = True
