"""Ends a request's work when its client has gone or its deadline has passed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive, Scope

from headrace.api.errors import ApiError, ClientGone


class DeadlinePassed(ApiError):
    """The request's time is over; a 504 unless tokens have been sent."""

    def __init__(self) -> None:
        super().__init__(504, "The deadline of the request has passed.", code="timeout")


def when_over(scope: Scope, call: Callable[[], object]) -> None:
    """To be called when a request has been answered: at once, or at the end of the task that goes on without its connection."""
    task: asyncio.Task[None] | None = scope["state"].get("beyond")
    if task is None:
        call()
    else:
        task.add_done_callback(lambda _: call())


class Lifeline:
    """`async with Lifeline(receive, seconds)`: cancels the body of the block, which then raises ClientGone or DeadlinePassed.

    The body of the request must have been read: from then on `receive` only tells of the disconnect.
    """

    def __init__(self, receive: Receive, seconds: float | None):
        self._receive, self._seconds = receive, seconds
        self._why: ApiError | ClientGone | None = None
        self._task: asyncio.Task[None] | None = None  # that runs the block
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Lifeline:
        if self._why is not None:
            raise self._why
        self._task = asyncio.current_task()
        if self._seconds is not None:
            if self._seconds <= 0:
                raise DeadlinePassed
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._deadline)
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGone())

    def _deadline(self) -> None:
        self.end(DeadlinePassed())

    def end(self, why: ApiError | ClientGone) -> None:
        """Cancel the block, or keep it from beginning; it raises `why`. The first reason counts. Not to be called from the
        block itself."""
        if self._why is None:
            self._why = why
            if self._task is not None:
                self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        assert self._task is not None
        # a cancellation that came from elsewhere as well (shutdown) goes on
        if self._why is not None and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._why from None
