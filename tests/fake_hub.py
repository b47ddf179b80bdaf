"""A Hugging Face Hub on this machine, as far as huggingface-hub's real client asks one for models."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """`files`: repository -> file -> content, of the `commit` that main is; `past`: of earlier ones. `cut`: file -> bytes after which the connection breaks, once. `ranges`: what was asked for."""

    def __init__(self, files: dict[str, dict[str, bytes]]):
        self.files, self.cut = files, dict[str, int]()
        self.commit, self.past = COMMIT, dict[str, dict[str, dict[str, bytes]]]()
        self.ranges: list[tuple[str, str | None]] = []
        routes = [
            Route("/api/models/{org}/{repo}", self._info), Route("/api/models/{org}/{repo}/revision/{revision}", self._info),
            Route("/api/models/{org}/{repo}/tree/{revision}", self._tree),
            Route("/{org}/{repo}/resolve/{revision}/{file:path}", self._file, methods=["GET", "HEAD"]),
        ]  # fmt: skip
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", lifespan="off"))

    def __enter__(self) -> FakeHub:
        self._socket = self._server.config.bind_socket()
        self._socket.listen(64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def commit_to(self, files: dict[str, dict[str, bytes]]) -> None:
        """Main is another commit now, with these."""
        self.past[self.commit] = self.files
        self.commit, self.files = f"{len(self.past):040x}", files

    def _revision(self, request: Request) -> str:
        revision: str = request.path_params.get("revision", "main")
        return self.commit if revision == "main" else revision

    def _of(self, request: Request) -> dict[str, bytes] | None:
        revision = self._revision(request)
        files = self.files if revision == self.commit else self.past.get(revision, {})
        return files.get(f"{request.path_params['org']}/{request.path_params['repo']}")

    async def _info(self, request: Request) -> Response:
        revision = self._revision(request)
        if revision not in (self.commit, *self.past):
            return JSONResponse({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        if (files := self._of(request)) is None:
            return JSONResponse({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return JSONResponse({"id": "x/y", "sha": revision, "siblings": [{"rfilename": name} for name in files]})

    async def _tree(self, request: Request) -> Response:
        files = self._of(request) or {}
        entries = []
        for name, data in files.items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            if is_large(name):
                entry["lfs"] = {"oid": etag_of(name, data), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return JSONResponse(entries)

    async def _file(self, request: Request) -> Response:
        name = request.path_params["file"]
        data = (self._of(request) or {}).get(name)
        if data is None:
            return JSONResponse({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        asked = request.headers.get("range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        headers = {"ETag": f'"{etag_of(name, data)}"', "X-Repo-Commit": self._revision(request), "Content-Length": str(len(data) - start), "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return Response(headers=headers)
        self.ranges.append((name, asked))
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        end = self.cut.get(name, len(data))

        async def body():
            for at in range(start, end, 2**16):
                yield data[at : min(at + 2**16, end)]
            if end < len(data):
                raise ConnectionError("the line is cut")

        return StreamingResponse(body(), 206 if asked else 200, headers)


def is_large(name: str) -> bool:
    return name.endswith((".gguf", ".safetensors"))


def etag_of(name: str, data: bytes) -> str:
    return (hashlib.sha256 if is_large(name) else hashlib.sha1)(data).hexdigest()
