"""Errors as clients see them: one JSON shape, OpenAI's types and string codes, no exception text that is not ours."""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from headrace.errors import CapacityError, EngineClosedError, EngineDeadError, ParameterError

TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 499: "client_closed_request", 501: "not_implemented_error",
    503: "service_unavailable_error", 504: "timeout_error",
}  # fmt: skip

ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ApiError(Exception):
    """An answer other than 200. `param` names the field of the body, `code` is a stable string for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> bytes:
        """The JSON document; never fails, whatever characters the message holds."""
        kind = TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        fields = {"message": _clean(self.message), "type": kind, "param": self.param and _clean(self.param), "code": self.code}
        return msgspec.json.encode({"error": fields})

    def anthropic(self, request_id: str = "") -> bytes:
        """As Anthropic's API has it."""
        fallback = "invalid_request_error" if self.status < 500 else "api_error"
        error = {"type": ANTHROPIC_TYPES.get(self.status, fallback), "message": _clean(self.message)}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def ollama(self) -> bytes:
        """As Ollama's API has it: the field has no place but the text."""
        named = self.param is None or self.param in self.message
        return msgspec.json.encode({"error": _clean(self.message if named else f"{self.param}: {self.message}")})

    def response(self, scope: Scope) -> Response:
        """In the form of the API that was asked."""
        path, request_id = scope["path"], scope.get("state", {}).get("request_id", "")
        body = self.anthropic(request_id) if path.startswith("/v1/messages") else self.body()
        if path.startswith("/api/"):
            body = self.ollama()
        return Response(body, self.status, headers=self.headers, media_type="application/json")


NOT_SERVED = {  # paths of OpenAI's API, and what there is instead
    "/v1/responses/compact": " (there is no compaction: whoever shortens a conversation sends what is left of it)",
    "/v1/conversations": " (previous_response_id goes on from a response)",
}


def unknown_path(scope: Scope) -> ApiError:
    """There is nothing at this path; of the APIs below /v1 what there is."""
    path, text = scope["path"], "There is nothing at this path."
    if path.startswith("/v1/"):
        paths = dict.fromkeys(route.path for route in scope["app"].routes)
        served = [one for one in paths if one.startswith("/v1/") and "{" not in one]
        instead = next((told for begin, told in NOT_SERVED.items() if path.startswith(begin)), "")
        text = f"There is nothing at {path[:100]}{instead}. Served are {', '.join(served)}."
    return ApiError(404, text, code="unknown_path")


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def invalid(param: str, why: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{param}: {why}", param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    return invalid(param, why, "unsupported_parameter")


def unknown(param: str) -> ApiError:
    return bad_request(f"Unknown field `{param}`.", param, "unknown_parameter")


def allowed_only(param: str, when: str) -> ApiError:
    return bad_request(f"{param} is allowed only {when}.", param, "invalid_value")


def unavailable(message: str, retry_after: int, code: str = "not_ready") -> ApiError:
    return ApiError(503, message, code=code, headers={"retry-after": str(retry_after)})


def too_many(message: str, retry_after: int, code: str = "rate_limit_exceeded") -> ApiError:
    return ApiError(429, message, code=code, headers={"retry-after": str(retry_after)})


def as_api_error(exc: BaseException) -> ApiError:
    """What the client is told about an exception. Only texts that Headrace wrote for its callers are passed on."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, ParameterError):
        return ApiError(400, str(exc), param=exc.field, code="invalid_value")
    if isinstance(exc, CapacityError):
        return ApiError(400, str(exc), code="context_length_exceeded")
    if isinstance(exc, EngineClosedError):
        return unavailable("The server is shutting down: the request was cut off.", 5, "shutting_down")
    if isinstance(exc, EngineDeadError):
        return unavailable("The engine is not running.", 5, "engine_dead")
    return ApiError(500, "Internal error.", code="internal_error")
