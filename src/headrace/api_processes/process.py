"""A process that serves HTTP for an engine's client in its parent.

Started by `api_processes.parent` as `python -m headrace.api_processes.process IN OUT PARENT LISTENER NAME LOGLEVEL LOGFORMAT`;
LISTENER is the number of the inherited socket. It connects before it imports what takes time. It ends with its parent, whatever
ended that: the kernel is asked to, and its loop looks.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys

import msgspec
import zmq

from headrace.distributed.pipe import connect
from headrace.engine.wire import from_wire
from headrace.errors import HeadraceError
from headrace.extras import is_installed
from headrace.logs import configure
from headrace.parent import end_with_parent, leave_signals_to_parent

logger = logging.getLogger(__name__)


def main(inbox_address: str, outbox_address: str, parent: int, number: int) -> int:
    leave_signals_to_parent()
    context = zmq.Context()
    inbox, outbox = connect(context, inbox_address, outbox_address, parent)
    end_with_parent()
    if os.getppid() != parent:
        return 1
    try:
        from headrace.api_processes.application import HttpProcess, model_parts
        from headrace.api_processes.wire import Start, ToChild

        start, *earlier = msgspec.msgpack.Decoder(list[ToChild], dec_hook=from_wire).decode(inbox.recv())
        assert isinstance(start, Start)
        parts = model_parts(start)
        loop = importlib.import_module("uvloop" if is_installed("uvloop") else "asyncio")

        async def run(first: Start) -> int:
            process = HttpProcess(first, parts, inbox, outbox, parent)
            return await process.run(socket.socket(fileno=number), earlier)

        return loop.run(run(start))
    except Exception as e:
        from headrace.api_processes.wire import Fatal

        known = isinstance(e, HeadraceError)
        if not known:
            logger.exception("an HTTP process fails")
        with contextlib.suppress(zmq.ZMQError):  # it may be closed
            outbox.send(msgspec.msgpack.encode([Fatal(str(e) if known else f"{type(e).__name__}: {e}")]), zmq.NOBLOCK)
        return 2
    finally:
        context.destroy(linger=1000)


if __name__ == "__main__":
    configure(sys.argv[5], *sys.argv[6:8])
    code = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # threads that still tokenize are not waited for
