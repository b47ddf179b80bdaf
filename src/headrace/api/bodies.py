"""Memory for the bodies of requests that are not admitted yet, of all together: each has a bound, and connections are many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.api.errors import ApiError, unavailable

SMALL = 64 * 2**10  # bytes of a body that may use what no larger one can
LEAST = 64 * 2**20  # bytes for all
LARGEST = 16  # or for so many of the largest, if that is more


class Body:
    """What one request has taken of them: while it is received, waits for its model, is rendered and tokenized."""

    def __init__(self, bodies: Bodies):
        self._bodies, self.size = bodies, 0

    def reach(self, size: int) -> None:
        """It has so many bytes now, or had them already. Raises the 503 of a body for which there is no room."""
        bodies, count = self._bodies, max(0, size - self.size)
        most = bodies.most if size <= SMALL else bodies.most * 3 // 4
        if count and bodies.held + count > most:
            raise _no_room(bodies.held, most)
        self.size += count
        bodies.held += count

    def release(self) -> None:
        """The request is admitted, and other bounds hold it, or it is over."""
        self._bodies.held -= self.size
        self.size = 0


class Bodies:
    """Counts the bytes that are there, not what was announced: who sends nothing holds nothing. A quarter is for small bodies:
    they come in, however many large ones come slowly."""

    def __init__(self, max_body_bytes: int):
        self.most = max(LEAST, LARGEST * max_body_bytes)
        self.held = 0

    @contextmanager
    def body(self) -> Iterator[Body]:
        """Of a request, until its end at the latest."""
        body = Body(self)
        try:
            yield body
        finally:
            body.release()


def _no_room(held: int, most: int) -> ApiError:
    # the connection stays: the server reads the rest and keeps none of it, where a close would reset who is still writing
    text = f"Bodies of {held} bytes are being received or prepared; for one as large at most {most} may be."
    return unavailable(text, 5, "too_many_bodies")
