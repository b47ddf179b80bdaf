"""The application of one HTTP process, its engine in the parent, and its ends: told to, lost, or failed."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import zmq

from headrace.api.app import create_app
from headrace.api.http_server import http_server
from headrace.api.tls import tls_context
from headrace.api_processes.counting import Questions, RemoteLimits, RemoteMetrics
from headrace.api_processes.glass import RemoteGlass
from headrace.api_processes.wire import Alive, Answer, Cut, Fatal, Start, Stop, ToChild, Up
from headrace.distributed.pipe import Pipe
from headrace.distributed.remote_engine import RemoteEngine
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.tokenizer import Tokenizer

ALIVE_SECONDS = 0.5


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
        glass = RemoteGlass(self.questions) if start.server.page else None
        app = create_app(self.engine, start.server, RemoteMetrics(self.questions), limits, glass)
        app.state.api.created = start.created
        level = "warning" if start.log_level == "info" else start.log_level  # of its start, the server's process tells once
        self.http = http_server(app, level, tls_context(start.certfile, start.keyfile))

    def heard(self, message: Any) -> None:
        if isinstance(message, Answer):
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
