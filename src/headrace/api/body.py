"""From the bytes of a request to a typed body: size, time, media type and strict JSON are checked here, and what msgspec says
of a body becomes an error of ours: the field, what it got, what is allowed."""

from __future__ import annotations

import asyncio
import json
import re
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import Request

from headrace.api.bodies import Body
from headrace.api.config import ServerConfig
from headrace.api.errors import ApiError, ClientGone, bad_request
from headrace.api.unknown_fields import Refused, in_our_words, leave_out, leave_out_of_part
from headrace.api.whole_numbers import as_integers
from headrace.sampling.foreign import advice

T = TypeVar("T")
_PLACE = re.compile(r" - at `([^`]*)`$")
_NAME = re.compile(r"(?:unknown|required) field `([^`]*)`")
_STEP = re.compile(r"([^.\[\]]+)|\[[^\]]*\]")
_UNKNOWN = re.compile(r"unknown field `|Invalid enum value .* - at `\$\.tools\[")
_WITH_POINT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_NUMBERS = re.compile(rb"\[[\d\s,]*\]")
_NEVER_JSON = ("multipart/", "image/", "audio/", "video/", "font/")


async def read_json(request: Request, kind: type[T], config: ServerConfig) -> T:
    """The body as a `kind`. Raises ApiError: 400 for anything that is not such a document, 408, 413, 503.

    Unknown fields that are ignored are named in the request's state, for the header of the answer.
    """
    check_media_type(request)
    ignored: list[str] | None = [] if config.unknown_fields == "ignore" else None
    body = decode(await read_body(request, config), kind, ignored)
    if ignored:
        request.state.ignored = ignored
    return body


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body, of at most `max_body_bytes`, received within `body_timeout`, where others leave room for it."""
    limit = config.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(config.body_timeout):
            return await _received(request, limit)
    except TimeoutError:
        text = f"The body did not arrive within {config.body_timeout:g} seconds."
        raise ApiError(408, text, code="body_timeout", headers={"connection": "close"}) from None


async def _received(request: Request, limit: int) -> bytes:
    held: Body = request.state.body
    data, more = bytearray(), True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part, more = message.get("body", b""), message.get("more_body", False)
        if len(data) + len(part) > limit:
            raise _too_large(limit)
        held.reach(len(data) + len(part))
        data += part
    return bytes(data)


def decode(data: bytes, kind: type[T], ignored: list[str] | None = None) -> T:
    """Strict JSON (no NaN, no lone surrogates, no repeated keys) as a `kind`. Its unknown fields are refused; with `ignored`
    only those that might matter, and the others are added to it (see unknown_fields)."""
    if not data.strip():
        raise bad_request("The body is empty; a JSON object is expected.", code="invalid_json")
    try:
        try:
            result = msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            strange = _UNKNOWN.search(str(error)) and (ignored is not None or b'"guided_' in data)
            if not strange and not _WITH_POINT.match(str(error)):
                raise
            result = _mended(data, kind, ignored)
        _check_keys(data)
    except msgspec.ValidationError as error:
        raise from_validation(error, kind) from None
    except Refused as refused:
        raise _refusal(refused, kind) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise bad_request("The body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None
    except _RepeatedKey as error:
        raise bad_request(f"The key `{error}` stands twice in one object.", str(error), "invalid_json") from None
    return result


def _check_keys(data: bytes) -> None:
    """Raises _RepeatedKey. Without the lists of token ids, which take most of the time: without them keys may become equal that
    were not, as "a[1]" and "a[2]", but none that were equal different."""
    try:
        json.loads(_NUMBERS.sub(b"[]", data), object_pairs_hook=_unique)
    except _RepeatedKey:
        json.loads(data, object_pairs_hook=_unique)


def _mended(data: bytes, kind: Any, ignored: list[str] | None) -> Any:
    """Without unknown fields, unless they are to be refused, and with integers where `5.0` was written for one."""
    document = msgspec.json.decode(data)
    in_our_words(document, _type_info(kind))
    if ignored is not None:
        ignored += leave_out(document, _type_info(kind))
    document = as_integers(document, _type_info(kind))
    return msgspec.json.decode(msgspec.json.encode(document), type=kind)


def read_part(value: Any, kind: Any, place: str, ignored: list[str] | None) -> Any:
    """A part of a body whose type the body leaves open, read as strictly as a `kind`; `ignored` as in decode()."""
    try:
        if ignored is not None:
            ignored += leave_out_of_part(value, _type_info(kind), re.sub(r"\d+", "", place))
        return msgspec.convert(value, kind)
    except Refused as refused:
        raise _refusal(refused, kind) from None
    except msgspec.ValidationError as error:
        inner = from_validation(error, kind)
        path, between = (f"{place}.{inner.param}", ".") if inner.param else (place, ": ")
        raise ApiError(400, place + between + inner.message, param=path, code=inner.code) from None


def _refusal(refused: Refused, kind: Any) -> ApiError:
    path = f"{refused.path}.{refused.name}" if refused.path else refused.name
    instead = refused.instead or advice(refused.name, getattr(kind, "__struct_fields__", ()))
    text = f"Object contains unknown field `{refused.name}`" + (f"; {instead}" if instead else "")
    return ApiError(400, f"{path}: {text}", param=path, code="unknown_parameter")


class _RepeatedKey(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> None:
    """Called for each object; the values are not kept, msgspec has built them already."""
    if len(pairs) > 1:
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKey(key[:100])
            seen.add(key)


def check_media_type(request: Request) -> None:
    """JSON counts whatever it is called: `curl -d` names it a form. But scripts of foreign pages can send forms and plain
    text without asking first, so that what comes from a browser must be called JSON.
    """
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        text = f"Content-Encoding is {coding[:100]!r}; send the body as it is."
        raise ApiError(415, text, code="unsupported_content_encoding", headers={"accept-encoding": "identity"})
    header = request.headers.get("content-type")
    if header is None:
        if "origin" in request.headers:
            raise bad_request("Content-Type is missing; send application/json.", code="invalid_content_type")
        return
    kind, _, rest = header.partition(";")
    kind = kind.strip().lower()
    named = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if kind.startswith(_NEVER_JSON) or (not named and "origin" in request.headers):
        raise bad_request(f"Content-Type is {header[:100]!r}; send application/json.", code="invalid_content_type")
    for parameter in rest.lower().split(";"):
        name, _, value = parameter.strip().partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise bad_request("Content-Type: the charset of JSON is UTF-8.", code="invalid_content_type")


def _too_large(limit: int) -> ApiError:
    # the rest of the body is not read: the connection cannot be used again
    text = f"The body is larger than {limit} bytes."
    return ApiError(413, text, code="body_too_large", headers={"connection": "close"})


def from_validation(error: msgspec.ValidationError, kind: Any) -> ApiError:
    """msgspec names the place as `$.messages[0].content`; `param` becomes `messages[0].content`."""
    text = str(error)
    path = (m.group(1) if (m := _PLACE.search(text)) else "").removeprefix("$").lstrip(".")
    text = _PLACE.sub("", text)
    code = "invalid_value"
    if name := _NAME.search(text):
        unknown = "unknown field" in text
        if unknown and not path and (instead := advice(name.group(1), getattr(kind, "__struct_fields__", ()))):
            text += f"; {instead}"
        path = f"{path}.{name.group(1)}" if path else name.group(1)
        code = "unknown_parameter" if unknown else "missing_required_parameter"
    if text.startswith("Invalid enum value") and (values := _literals(kind, path)):
        text += ", allowed: " + ", ".join(map(str, values))
    return ApiError(400, f"{path}: {text}" if path else text, param=path or None, code=code)


@cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _literals(kind: Any, path: str) -> list[Any]:
    """The values that a Literal at `path` allows."""
    here = [_type_info(kind)]
    for step in _STEP.finditer(path):
        here = [below for t in _members(here) for below in _below(t, step.group(1))]
    return [value for t in _members(here) if isinstance(t, inspect.LiteralType) for value in t.values]


def _members(types: list[inspect.Type]) -> list[inspect.Type]:
    return [m for t in types for m in (t.types if isinstance(t, inspect.UnionType) else (t,))]


def _below(t: inspect.Type, name: str | None) -> list[inspect.Type]:
    """The type of the field `name`, or of the items if that is None."""
    if isinstance(t, inspect.StructType):
        return [f.type for f in t.fields if f.encode_name == name]
    return [t.item_type] if isinstance(t, inspect.ListType) and name is None else []
