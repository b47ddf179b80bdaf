"""Calls the application without a network: one request, one whole answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message


@dataclass(slots=True)
class InProcessAnswer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def post(app: ASGIApp, path: str, body: bytes) -> InProcessAnswer:
    """Whoever is cancelled here takes the request with him."""
    answer = InProcessAnswer()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await asyncio.get_running_loop().create_future()  # this client never leaves
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message.get("headers", ())}
        else:
            answer.body += message.get("body", b"")

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None, "server": None, "state": {},
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    await app(scope, receive, send)
    return answer
