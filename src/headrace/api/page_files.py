"""The page at `/`: static files of this package, sent as they are, with headers that keep what runs in them at home."""

from __future__ import annotations

import os
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from headrace.api.errors import ApiError

FOLDER = Path(__file__).with_name("page")
# not left to the system's own table, which may be any
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".json": "application/json", ".txt": "text/plain; charset=utf-8", ".woff2": "font/woff2",
    ".md": "text/markdown; charset=utf-8",
}  # fmt: skip
HEADERS = {
    # nothing from elsewhere and nothing inline: what a model writes cannot run, load or send anything
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "accept-ranges": "none",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304
}


def is_page(path: str) -> bool:
    """Whether a path belongs to the page. Its files are public; what they ask the server for needs a key as ever."""
    return path == "/" or path.startswith("/page/")


def page_routes() -> list[BaseRoute]:
    return [Route("/", Index(), methods=["GET"]), Mount("/page", Files(directory=FOLDER, follow_symlink=True))]


class Index:
    """`/` as an ASGI application: the page for browsers; programs, which do not ask for HTML, are told as anywhere else."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        if "text/html" in Request(scope).headers.get("accept", ""):
            response = FileResponse(FOLDER / "index.html")
            _label(response.headers, FOLDER / "index.html")
        else:
            text = "There is nothing at this path; a browser finds a page here."
            response = ApiError(404, text, code="unknown_path").response(scope)
        response.headers["vary"] = "accept"
        await response(_whole(scope), receive, send)


class Files(StaticFiles):
    """Everything below /page; what is not there is the HTTPException of any unknown path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(_whole(scope), receive, send)

    def file_response(self, full_path: str | os.PathLike[str], *args, **kwargs) -> Response:
        response = super().file_response(full_path, *args, **kwargs)
        _label(response.headers, Path(full_path))
        return response


def _whole(scope: Scope) -> Scope:
    """Without `Range`: no file is so large that a part of it would be of use."""
    return {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"range"]}


def _label(headers: MutableHeaders, path: Path) -> None:
    headers.update(HEADERS)
    if "content-type" in headers:  # a 304 has none
        headers["content-type"] = MEDIA_TYPES.get(path.suffix, "application/octet-stream")
