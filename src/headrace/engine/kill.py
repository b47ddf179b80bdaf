"""A core ended as `kill -9` ends it: for the page's scene in which its streams go on elsewhere."""

from __future__ import annotations

from headrace.engine.client import EngineClient
from headrace.engine.core_process import CoreProcess


def kill_core(client: EngineClient, number: int) -> bool:
    """False: there is no core of this number now, or it is none of this server's own processes."""
    core = client.core(number)
    if not isinstance(core, CoreProcess) or core.exited or core.ready is None:
        return False
    core.process.kill()
    return True
