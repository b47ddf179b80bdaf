"""The outermost layer, plain ASGI: request ids, API keys, header limits, deadlines, concurrency per key, the access log."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import time
import uuid
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.context import ApiContext
from headrace.api.errors import ApiError, invalid
from headrace.api.lifeline import when_over
from headrace.api.page_files import is_page
from headrace.api.unknown_fields import HEADER, header_value
from headrace.metrics.prometheus import PROBES

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping"})  # liveness probes carry no key
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # these change the server for everybody
_SLASHES = re.compile("/{2,}")
_ONE_MODEL = re.compile("/+v1/+models/(.*[^/].*)", re.DOTALL)
CLIENT_GONE = 499  # is counted for who went before he got an answer, as nginx does
MAX_TIMEOUT = 7 * 24 * 3600.0


class Gate:
    """Every request passes here first and every answer last."""

    def __init__(self, app: ASGIApp, ctx: ApiContext):
        self.app, self.ctx = app, ctx
        self._digests, self._of_admins = _digests(ctx.config.api_keys), _digests(ctx.config.admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1000})
                return
            return await self.app(scope, receive, send)
        arrival = time.monotonic()
        scope["path"] = plain_path(scope["path"])
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of equal names counts
        request_id = _request_id(headers.get(b"x-request-id"))
        status = CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", request_id)]
                if scope["path"].startswith("/v1/messages"):
                    own.append((b"request-id", request_id))  # as its clients call it
                if ignored := scope["state"].get("ignored"):
                    own.append((HEADER, header_value(ignored)))
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        key, state = None, scope.setdefault("state", {})
        try:
            counted = self._key_of(scope, headers)
            if counted is not None:
                await self.ctx.limits.enter(counted)
                key = counted
            state["arrival"], state["timeout"] = arrival, self._timeout(headers.get(b"x-request-timeout"))
            state["request_id"] = request_id.decode()
            with self.ctx.bodies.body() as state["body"]:
                await self.app(scope, receive, send_with_id)
        except ApiError as error:
            await error.response(scope)(scope, receive, send_with_id)
        except Exception:
            status = 500 if status == CLIENT_GONE else status
            raise
        finally:
            if key is not None:
                when_over(scope, partial(self.ctx.limits.leave, key))
            self.ctx.metrics.answered(scope["path"], status, state.get("ignored", ()))
            quiet = scope["path"] in PROBES or scope["path"].startswith("/page/")
            level = logging.DEBUG if quiet else logging.INFO
            seconds = time.monotonic() - arrival
            logger.log(level, "%s %s %s %d %.3fs", request_id.decode(), scope["method"], shown(scope["path"]), status, seconds)

    def _key_of(self, scope: Scope, headers: dict[bytes, bytes]) -> int | None:
        """Checks before anything is read. Returns the key under which the request is to count as in progress, if it is."""
        if sum(len(k) + len(v) for k, v in scope["headers"]) > self.ctx.config.max_header_bytes:
            raise ApiError(431, "The headers are too large.", code="headers_too_large", headers={"connection": "close"})
        key, admin = 0, scope["path"] in ADMIN_PATHS
        digests = self._of_admins if admin else self._digests
        if admin and not digests:
            text = "This server has no key for its operator (--admin-key): what changes it is closed."
            raise ApiError(403, text, code="no_admin_key")
        if digests and not self._open(scope["path"]):
            found = self._key(headers, digests)
            if found is None:
                kind = "key of the operator (--admin-key)" if admin else "API key"
                text = f"A valid {kind} is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`."
                raise ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            if admin:  # not one of those who are counted
                return None
            scope["state"]["key"] = key = found
        ends = scope["path"].endswith("/cancel")  # what is in progress, also where no more may be
        return None if self.ctx.config.max_concurrent_per_key is None or scope["method"] != "POST" or ends else key

    def _open(self, path: str) -> bool:
        return path in OPEN_PATHS or (self.ctx.config.page and is_page(path))

    def _key(self, headers: dict[bytes, bytes], digests: list[tuple[int, bytes]]) -> int | None:
        """Index of the key; every key is compared, in time that does not depend on the content."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = headers.get(b"x-api-key", b"")
        given = hashlib.sha256(token.strip()).digest()
        found = None
        for index, digest in digests:
            if hmac.compare_digest(given, digest):
                found = index
        return found

    def _timeout(self, header: bytes | None) -> float | None:
        """Seconds for this request: the shorter of the client's and the server's."""
        own = self.ctx.config.request_timeout
        if header is None:
            return own
        try:
            asked = float(header)
        except ValueError:
            asked = math.nan
        if not 0 < asked <= MAX_TIMEOUT:
            raise invalid("X-Request-Timeout", f"seconds in (0, {MAX_TIMEOUT:g}].")
        return asked if own is None else min(asked, own)


def _digests(keys: tuple[str, ...]) -> list[tuple[int, bytes]]:
    """(index of the key, digest); what is not ASCII comes as UTF-8 from some clients and as Latin-1 from others."""
    return [
        (index, hashlib.sha256(form).digest())
        for index, key in enumerate(keys)
        for form in {key.encode(), key.encode("latin-1" if max(key) <= "\xff" else "utf-8")}
    ]


def plain_path(path: str) -> str:
    """Without the doubled and trailing slashes that joining a base URL leaves. A redirect would lose bodies of POSTs.

    What follows /v1/models/ is a model's name, which may itself be a path.
    """
    if found := _ONE_MODEL.fullmatch(path):
        return "/v1/models/" + found[1].rstrip("/")
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def shown(path: str) -> str:
    """For a line of the log, which a path with a line break in it must not become two of."""
    return path if path.isprintable() else path.encode("unicode_escape").decode()


def _request_id(header: bytes | None) -> bytes:
    if header is not None and 1 <= len(header) <= 128 and all(0x21 <= c <= 0x7E for c in header):
        return header
    return uuid.uuid4().hex.encode()
