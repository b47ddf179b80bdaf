"""The HTTP server under the application: uvicorn, with the options that all processes that serve share."""

from __future__ import annotations

import contextlib
import ssl

import uvicorn
from starlette.applications import Starlette


def http_server(app: Starlette, log_level: str, tls: ssl.SSLContext | None) -> uvicorn.Server:
    """Not started. It leaves signals to its process, which drains first."""
    options = uvicorn.Config(
        app, log_config=None, log_level=log_level, access_log=False, lifespan="on", timeout_keep_alive=75, server_header=False
    )
    options.load()
    options.ssl = tls
    server = uvicorn.Server(options)
    server.capture_signals = contextlib.nullcontext  # type: ignore
    return server
