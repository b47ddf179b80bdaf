"""An event loop whose clock jumps to the next timer instead of waiting: tests of timing that take no time and cannot be late."""

from __future__ import annotations

import asyncio
import selectors


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        found = super().select(0 if timeout is None or timeout > 0 else timeout)
        if not found:
            assert timeout is not None, "everybody waits, and nothing will happen"
            self.now += max(0.0, timeout)
        return found


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now
