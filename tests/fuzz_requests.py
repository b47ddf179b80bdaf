"""Requests of all kinds to every path: right ones, right ones with something wrong in them, and what is no request at all.

What is drawn is decided by the random generator alone. BODIES and PLAIN name every path that the server has (a test compares).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MODEL = "tiny"
HI = [{"role": "user", "content": "the mill"}]
TOOL = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": TOOL}}
PAIR = [{"type": "text", "text": "the"}, {"type": "text", "text": "water 🙂"}]
PAST = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": PAIR},
    {"role": "assistant", "content": "well"}, {"role": "user", "content": "turns"},
]  # fmt: skip
RERANKS: list[dict[str, Any]] = [{"query": "q", "documents": ["a", "b"]}, {"query": "q", "documents": [{"text": "a"}], "top_n": 1}]
SCORES: list[dict[str, Any]] = [{"text_1": "a", "text_2": ["b", "c"]}, {"queries": ["a"], "documents": ["b"]}]
BODIES: dict[str, list[dict[str, Any]]] = {  # right ones; each is answered with a 200
    "/v1/chat/completions": [
        {"messages": HI, "max_tokens": 3}, {"messages": PAST, "max_tokens": 4, "n": 2, "temperature": 1.0, "seed": 1, "logprobs": True, "top_logprobs": 2},
        {"messages": HI, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}, {"messages": HI, "max_tokens": 30, "response_format": SCHEMA},
        {"messages": HI, "max_tokens": 5, "stop": ["e"], "logit_bias": {"5": -100}, "presence_penalty": 0.5, "user": "u", "metadata": {"a": "b"}},
        {"messages": HI, "max_tokens": 4, "tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "text"}}}], "tool_choice": "none"},
    ],
    "/v1/completions": [
        {"prompt": "the wheel", "max_tokens": 4}, {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1, "echo": True}, {"prompt": [5, 6, 7], "max_tokens": 3},
        {"prompt": "of", "max_tokens": 4, "stream": True, "n": 2, "seed": 3}, {"prompt": "of", "max_tokens": 3, "structured_outputs": {"regex": "[ab]+"}},
        {"prompt": "a", "max_tokens": 3, "min_tokens": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "prompt_logprobs": 1},
    ],
    "/v1/responses": [
        {"input": "the mill", "max_output_tokens": 3}, {"input": "a", "max_output_tokens": 3, "background": True, "stream": True},
        {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 3, "stream": True},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}], "instructions": "i", "store": False, "max_output_tokens": 3},
    ],
    "/v1/responses/input_tokens": [{"input": "x"}, {"input": [{"role": "user", "content": "hi"}], "instructions": "i", "tools": [{"type": "function", "name": "f"}]}],
    "/v1/messages": [
        {"messages": HI, "max_tokens": 3}, {"messages": HI, "max_tokens": 3, "stream": True, "system": "s", "thinking": {"type": "adaptive"}},
        {"messages": [{"role": "user", "content": PAIR}], "max_tokens": 3, "stop_sequences": ["e"], "metadata": {"user_id": "u"}},
    ],
    "/v1/messages/count_tokens": [{"messages": HI}, {"messages": HI, "system": [{"type": "text", "text": "s"}]}],
    "/v1/embeddings": [{"input": "a"}, {"input": ["a", "b"], "encoding_format": "base64"}, {"input": [[1, 2], [3]]}],
    "/v1/rerank": RERANKS, "/v2/rerank": RERANKS, "/rerank": RERANKS, "/v1/score": SCORES, "/score": SCORES,
    "/tokenize": [{"prompt": "the"}, {"messages": HI, "return_token_strs": True}],
    "/detokenize": [{"tokens": [5, 6]}],
    "/generate": [{"prompt": "the", "max_tokens": 3}],
    "/api/chat": [
        {"messages": HI, "options": {"num_predict": 3}}, {"messages": HI, "stream": False, "options": {"num_predict": 3, "seed": 1}},
        {"messages": HI, "stream": False, "format": TOOL, "options": {"num_predict": 20}},
    ],
    "/api/generate": [{"prompt": "the", "options": {"num_predict": 3}}, {"prompt": "the", "stream": False, "raw": True, "options": {"num_predict": 3}}],
    "/api/embed": [{"input": ["a", "b"]}], "/api/embeddings": [{"prompt": "a"}], "/api/show": [{}, {"verbose": True}], "/api/pull": [{"stream": False}],
}  # fmt: skip
PLAIN = {  # the others -> methods
    "/v1/models": ("GET",), "/v1/models/{id:path}": ("GET",), "/v1/responses/{id}": ("GET", "DELETE", "POST"), "/v1/responses/{id}/cancel": ("POST",),
    "/v1/responses/{id}/input_items": ("GET",), "/api/tags": ("GET",), "/api/ps": ("GET",), "/api/version": ("GET",), "/api/push": ("POST",),
    "/api/create": ("POST",), "/api/copy": ("POST",), "/api/delete": ("DELETE",), "/api/blobs/{digest}": ("POST", "GET"), "/health": ("GET",), "/ping": ("GET",), "/ready": ("GET",),
    "/version": ("GET",), "/metrics": ("GET",), "/": ("GET",), "/page": ("GET",), "/glass/server": ("GET",), "/glass/kill-core": ("POST",),
    "/glass/events": ("GET",), "/glass/text": ("GET",), "/v1/load_lora_adapter": ("POST",), "/v1/unload_lora_adapter": ("POST",),
}  # fmt: skip
NOT_HERE = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/")  # a documented 501
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 0.5, -0.5, 1e308, 1e-320, "", "x", "\x00", "\ud800", "💧" * 50, "the " * 2000, "null", "1",
    [], [None], [[]], [[[]]], [1, "a"], {}, {"a": {}}, {"type": None}, {"type": "text"}, [{}], ["a"] * 300, list(range(600)), {"": ""}, {"type": "function"},
]  # fmt: skip
RAW_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"00", b"0x1", b"1" * 5000, b"'a'", b"undefined", b"\xff", b'"\\ud800"', b"[" * 2000, b'{"a":' * 2000)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "get", "P" * 300)
PATHS = (
    "//", "/v1", "/v1/", "/v1//models", "/V1/MODELS", "/v1/models/", "/v1/models/%00", "/v1/models/..%2f..%2fetc", "/page/../../etc/passwd", "/page/%2e%2e/x",
    "/page/index.html", "/page/none.js", "/page/%ff%fe", "/v1/chat/completions/", "/v1/responses/%F0%9F/input_items", "/v1/chat/completions?" + "a=b&" * 500,
    "/" + "x" * 5000, "/glass/events?core=-1", "/glass/events?core=99999999999999999999", "/glass/events?core=x", "/glass/text?id=x&start=-5&stop=1e9",
    "/v1/responses/x/input_items?limit=0&order=up&after=x", "/v1/responses/x?stream=true&starting_after=-1", "/v1/models?limit=x", "*", "http://other/v1/models",
)  # fmt: skip
HEADERS = (
    b"content-type: text/plain", b"content-type: application/json; charset=utf-16", b"content-type: multipart/form-data; boundary=x", b"content-encoding: gzip",
    b"accept: text/html", b"authorization: Bearer \xff", b"authorization: Basic Og==", b"x-request-id: " + b"i" * 3000, b"x-request-id: \xc3\xbc", b"x-request-timeout: -1",
    b"x-request-timeout: nan", b"x-request-timeout: 1e99", b"x-priority: x", b"traceparent: 00-0-0-0", b"anthropic-version: 2023-06-01", b"expect: 100-continue",
    b"connection: close", b"connection: upgrade\r\nupgrade: websocket", b"transfer-encoding: chunked", b"content-length: -1", b"content-length: 99999999999999",
    b"a: " + b"b" * 70_000, b"no colon", b"\r\n", b"host: other", b"origin: http://other", b"range: bytes=5-1", b"if-none-match: *", b"x: \x00",
)  # fmt: skip

UNCLEAR = (b"content-length: 99", b"transfer-encoding", b"expect:", b"upgrade:")


@dataclass(frozen=True)
class Drawn:
    """For which server: `names` of models that answer everything; `adapters`, which not every path takes, and of which "b" comes and
    goes; `operator`: the header with the operator's key."""

    names: tuple[str, ...] = (MODEL,)
    adapters: tuple[str, ...] = ()
    operator: bytes = b""


ALONE = Drawn()


@dataclass
class Shot:
    """Bytes for a connection. `ends`: the client closes after so many of them, without an answer; `reads`: or after so many bytes of
    the answer. `right`: it must be a 200."""

    data: bytes
    path: str
    right: bool = False
    ends: int | None = None
    reads: int | None = None

    @property
    def unclear(self) -> bool:
        """Whether the message ends, or where: there may be no answer."""
        head = self.data.partition(b"\r\n\r\n")[0].lower()
        return self.data[:4] == b"HEAD" or any(name in head for name in UNCLEAR)


def shot(rng: random.Random, server: Drawn = ALONE) -> Shot:
    if server.operator and rng.random() < 0.05:
        return _of_operator(rng, server.operator)
    kind = rng.choices(("right", "mutated", "raw", "broken", "plain", "method", "path", "header", "cut", "left"), (30, 34, 6, 6, 6, 3, 4, 5, 3, 3))[0]
    if kind == "plain":
        path, methods = rng.choice(list(PLAIN.items()))
        where = _filled(rng, path)
        if path == "/glass/events" and len(server.names) > 1:
            where += "?model=" + rng.choice((*server.names, "none"))
        return Shot(request(rng.choice(methods), where, b"", _header(rng)), path, reads=2000 if path == "/glass/events" else None)
    if kind == "path":
        return Shot(request(rng.choice(("GET", "POST")), rng.choice(PATHS), b"{}"), "a strange path", reads=3000)
    path = rng.choice(list(BODIES))
    name = rng.choice((*server.names, *server.adapters))
    body = {"model": name, **rng.choice(BODIES[path])}
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if kind == "right":
        return Shot(request("POST", path, data, OFFER * (rng.random() < 0.1)), path, right=name in server.names)
    if kind == "mutated":
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            body = mutated(rng, body)
        return Shot(request("POST", path, json.dumps(body).encode()), path)
    if kind == "raw":
        return Shot(request("POST", path, _with_raw(rng, data)), path)
    if kind == "broken":
        return Shot(request("POST", path, _broken(rng, data)), path)
    if kind == "method":
        return Shot(request(rng.choice(METHODS), path, data), path, reads=3000)
    if kind == "header":
        return Shot(request("POST", path, data, rng.choice(HEADERS)), path, reads=3000)
    whole = request("POST", path, data)
    return Shot(whole, path, ends=rng.randrange(len(whole))) if kind == "cut" else Shot(whole, path, reads=rng.randrange(300))


def _of_operator(rng: random.Random, key: bytes) -> Shot:
    """Whoever of several is first has the adapter loaded or gone: a 4xx is as right."""
    path = rng.choice(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
    body: dict[str, Any] = {"lora_name": "b"}
    if path == "/v1/load_lora_adapter":
        body |= {"lora_path": rng.choice(("two", "two", "one", "none", "../one", "broken")), "load_inplace": rng.random() < 0.7}
    if rng.random() < 0.3:
        body = mutated(rng, body)
    return Shot(request("POST", path, json.dumps(body).encode(), key), path)


def request(method: str, path: str, body: bytes, header: bytes = b"") -> bytes:
    own = b"" if b"content-length" in header or b"transfer-encoding" in header else b"content-length: %d\r\n" % len(body)
    kind = b"" if b"content-type" in header else b"content-type: application/json\r\n"
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n".encode() + own + kind + (header + b"\r\n" if header else b"") + b"\r\n" + body


def _filled(rng: random.Random, path: str) -> str:
    names = ("resp_1", MODEL, "a b".replace(" ", "%20"), "sha256:0", "%F0%9F%99%82", "x" * 200)
    for place in ("{id:path}", "{id}", "{digest}"):
        path = path.replace(place, rng.choice(names))
    return path


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAA"  # Java's, which may be left alone


def _header(rng: random.Random) -> bytes:
    return rng.choice((b"", b"", b"accept: text/html", b"anthropic-version: 2023-06-01"))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with every key in it."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


FIELDS = sorted({str(key) for bodies in BODIES.values() for body in bodies for holder, key in _places(body) if isinstance(holder, dict)} | {
    "tools", "tool_choice", "functions", "audio", "modalities", "suffix", "best_of", "use_beam_search", "length_penalty", "bad_words", "allowed_token_ids",
    "stop_token_ids", "ignore_eos", "echo", "priority", "cache_salt", "truncate_prompt_tokens", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "reasoning", "reasoning_effort", "include", "previous_response_id", "conversation", "background", "think", "keep_alive", "images",
    "context", "template", "dimensions", "instruction", "max_tokens_per_doc", "request_id", "temprature", "output_config", "text", "truncation", "parallel_tool_calls",
})  # fmt: skip
VALUES: list[Any] = [*STRANGE, [FUNCTION], SCHEMA, HI, PAIR, "auto", "required", "none", "high", {"type": "json_object"}, {"json": TOOL}, {"regex": "("}, {"grammar": "root ::= \"a\""}, {"choice": ["a"]}]  # fmt: skip


def mutated(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A copy in which one thing is another, is gone, or is new."""
    body = json.loads(json.dumps(body))
    if not body:
        return {"model": rng.choice(VALUES)}
    holder, key = rng.choice(list(_places(body)))
    how = rng.random()
    if how < 0.5:
        holder[key] = rng.choice(VALUES)
    elif how < 0.6:
        del holder[key]
    elif how < 0.95:
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    elif isinstance(holder, list):
        holder *= rng.choice((2, 50))
    else:
        holder[key] = [holder[key]] * 3
    return body


def _with_raw(rng: random.Random, data: bytes) -> bytes:
    """A value, or the beginning of what follows, replaced by what JSON does not have, or hardly."""
    at = rng.choice([i for i, c in enumerate(data) if c == ord(":")])
    stop = min((i for i in (data.find(b",", at), data.find(b"}", at)) if i >= 0), default=len(data))
    return data[: at + 1] + rng.choice(RAW_NUMBERS) + data[stop:]


def _broken(rng: random.Random, data: bytes) -> bytes:
    how = rng.randrange(4)
    if how == 0:
        return data[: rng.randrange(len(data))]
    if how == 1:
        return rng.randbytes(rng.randrange(200))
    if how == 2:
        return rng.choice((b"", b"null", b"[]", b"0", b'""', b"{}", b"\xef\xbb\xbf{}", b"{}{}", b'{"model":"tiny","model":"tiny"}', data + b"}", data.decode().encode("utf-16")))
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
