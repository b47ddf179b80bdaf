"""A process that serves HTTP for an engine's client in its parent.

Started by `api_processes.parent` as `python -m headrace.api_processes.process IN OUT PARENT LISTENER NAME LOGLEVEL LOGFORMAT`;
LISTENER is the number of the inherited socket. The first message is a Start. It ends with its parent, whatever ended that: the
kernel is asked to, and its loop looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from headrace.api.app import create_app
from headrace.api.http_server import http_server
from headrace.api.tls import tls_context
from headrace.api_processes.counting import Questions, RemoteLimits, RemoteMetrics
from headrace.api_processes.wire import Alive, Cut, Fatal, Granted, Page, Refused, Start, Stop, ToChild, Up
from headrace.distributed.pipe import Pipe, connect
from headrace.distributed.remote_engine import RemoteEngine
from headrace.engine.wire import from_wire
from headrace.errors import HeadraceError
from headrace.extras import is_installed
from headrace.logs import configure
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
ALIVE_SECONDS = 0.5
PR_SET_PDEATHSIG = 1


def model_parts(start: Start) -> dict[str, Any]:
    """What a RemoteEngine must know of the model: read from its files, as EngineClient does."""
    checkpoint = resolve_checkpoint(start.engine)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    ends = checkpoint.end_token_ids(tokenizer.end_token_ids)
    return {
        "config": start.engine, "model_name": start.model_name, "tokenizer": tokenizer,
        "model_config": replace(model_config_from_hf(checkpoint.config), eos_token_ids=ends),
        "generation_defaults": start.generation_defaults,
    }  # fmt: skip


class HttpProcess:
    """From the first message to the exit code; belongs to the event loop that makes it."""

    def __init__(self, start: Start, parts: dict[str, Any], inbox: zmq.Socket, outbox: zmq.Socket, parent: int):
        self.parent, self.timeout, self.told_to_end = parent, start.timeout, False
        self.pipe = Pipe(inbox, outbox, ToChild, self.heard)
        self.questions = Questions(self.pipe.say)
        self.engine = RemoteEngine(self.pipe.say, start.state, **parts)
        limits = RemoteLimits(self.engine, start.server, self.questions)
        app = create_app(self.engine, start.server, RemoteMetrics(self.questions), limits)
        app.state.api.created = start.created
        level = "warning" if start.log_level == "info" else start.log_level  # of its start, the server's process tells once
        self.http = http_server(app, level, tls_context(start.certfile, start.keyfile))

    def heard(self, message: Any) -> None:
        if isinstance(message, Granted | Refused | Page):
            self.questions.answered(message)
        elif isinstance(message, Stop):
            self.told_to_end = self.http.should_exit = True
        elif isinstance(message, Cut):
            self.told_to_end = self.http.should_exit = self.http.force_exit = True
        else:
            self.engine.heard(message)

    async def run(self, listener: socket.socket, earlier: Sequence[Any]) -> int:
        """`earlier`: messages that came with the first."""
        for message in earlier:
            self.heard(message)
        serving = asyncio.create_task(self.http.serve(sockets=[listener]))
        signs = asyncio.create_task(self._signs(serving))
        await asyncio.wait({serving, signs, self.pipe.broken}, return_when=asyncio.FIRST_COMPLETED)
        error = next((e for t in (serving, signs, self.pipe.broken) if t.done() and (e := t.exception())), None)
        signs.cancel()
        if not self.told_to_end:
            why = "it has stopped" if error is None else f"{type(error).__name__}: {error}"
            self.pipe.say(Fatal(f"the HTTP server: {why}"))
        self.pipe.close(linger=1.0)
        return 0 if self.told_to_end else 1

    async def _signs(self, serving: asyncio.Task[None]) -> None:
        """Says that it takes connections, and that it lives; looks whether its parent does, and ends with it."""
        while not self.http.started and not serving.done():
            await asyncio.sleep(0.005)
        self.pipe.say(Up())
        while os.getppid() == self.parent:
            self.pipe.say(Alive())
            self.engine.lost = self.pipe.silence() > self.timeout
            await asyncio.sleep(ALIVE_SECONDS)
        os._exit(1)


def main(inbox_address: str, outbox_address: str, parent: int, number: int) -> int:
    for each in (signal.SIGINT, signal.SIGTERM):  # these are for the parent: it drains first
        signal.signal(each, signal.SIG_IGN)
    context = zmq.Context()
    inbox, outbox = connect(context, inbox_address, outbox_address, parent)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    try:
        start, *earlier = msgspec.msgpack.Decoder(list[ToChild], dec_hook=from_wire).decode(inbox.recv())
        assert isinstance(start, Start)
        parts = model_parts(start)
        loop = importlib.import_module("uvloop" if is_installed("uvloop") else "asyncio")

        async def run(first: Start) -> int:
            process = HttpProcess(first, parts, inbox, outbox, parent)
            return await process.run(socket.socket(fileno=number), earlier)

        return loop.run(run(start))
    except Exception as e:
        if not isinstance(e, HeadraceError):
            logger.exception("an HTTP process fails")
        if not outbox.closed:
            said = str(e) if isinstance(e, HeadraceError) else f"{type(e).__name__}: {e}"
            with contextlib.suppress(zmq.ZMQError):
                outbox.send(msgspec.msgpack.encode([Fatal(said)]), zmq.NOBLOCK)
        return 2
    finally:
        context.destroy(linger=1000)


if __name__ == "__main__":
    configure(sys.argv[5], *sys.argv[6:8])
    code = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # threads that still tokenize are not waited for
