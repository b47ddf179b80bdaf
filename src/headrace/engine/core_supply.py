"""Where supervisors' cores come from: whatever starts them, one can stand by that has imported everything already."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from headrace.engine.supervision import Core

logger = logging.getLogger(__name__)


class StandbySupply:
    """A new core each time, or the one that stands by. `spawn` starts one, and raises OSError or HeadraceError if it cannot.
    `first`: one that has been started already. `reserve` starts the one that stands by while no death is near; None: `spawn`
    does."""

    def __init__(
        self, spawn: Callable[[], Awaitable[Core]], first: Core | None = None,
        reserve: Callable[[], Awaitable[Core]] | None = None,
    ):  # fmt: skip
        self._spawn, self._first, self._reserve = spawn, first, reserve or spawn
        self._standby: asyncio.Task[Core | None] | None = None

    async def take(self, number: int) -> Core:
        first, self._first = self._first, None
        if first is not None and not first.exited:
            return first
        standby, self._standby = self._standby, None  # who comes while we wait for it gets another
        if standby is not None:
            try:
                await asyncio.wait({standby})
            except asyncio.CancelledError:
                await _end(standby)
                raise
            core = None if standby.cancelled() else standby.result()
            if core is not None and not core.exited:
                return core
            if core is not None:
                await core.kill()
        return await self._spawn()

    def prepare(self, number: int, delay: float) -> None:
        """Have a standby in `delay` seconds: one for all slots. Without a delay a death may be near, and it makes haste."""
        if self._standby is None:
            self._standby = asyncio.create_task(self._stand_by(delay))

    def release(self, number: int) -> None:
        pass

    async def _stand_by(self, delay: float) -> Core | None:
        """None if there cannot be one: a restart takes longer then."""
        await asyncio.sleep(delay)
        try:
            return await (self._reserve if delay else self._spawn)()
        except Exception as e:
            logger.warning("no process can stand by for a restart: %s", e)
            return None

    async def close(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            await first.kill()
        standby, self._standby = self._standby, None
        if standby is not None:
            await _end(standby)


async def _end(standby: asyncio.Task[Core | None]) -> None:
    standby.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        if core := await standby:
            await core.kill()
