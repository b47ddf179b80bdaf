"""Over real sockets: clients that go away, slow readers, deadlines, keep-alive comments, queue limits, keys."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from answers import error_of, joined, parse_events, parse_metrics
from fake_engine import FakeEngine
from headrace.api.config import ServerConfig
from headrace.api.context import ApiContext
from headrace.api.middleware import Gate
from headrace.config import EngineConfig
from server_driver import MODEL, serving, soon

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 4000}
RESPONSE = {"model": MODEL, "input": "hi"}


def endless(ids: list[int], params: Any) -> str:
    return "lorem ipsum " * 400


# ---------------------------------------------------------------------------------------------------------------------
# clients that go away


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/api/chat"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_its_request(path, stream, begun):
    engine = FakeEngine(script=endless, delay=0.01)
    async with serving(engine) as server:
        if not begun:
            engine.gate.clear()
        body = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSE, "/api/chat": CHAT}.get(path, COMPLETION)
        n = {} if path in ("/v1/responses", "/api/chat") else {"n": 2}
        _, writer = await server.connect(path, {**body, **n, "stream": stream})
        await soon(lambda: len(engine.active) == (n or {"n": 1})["n"] and (not begun or engine.yielded > 3))
        assert server.limits.active == len(engine.active)
        writer.transport.abort()
        await soon(lambda: not engine.active)
        await server.idle()
        assert len(engine.aborted) == (n or {"n": 1})["n"]
        page = (await server.client.get("/metrics")).text
        assert parse_metrics(page)[f'headrace:http_responses_total{{path="{path}",status="{200 if stream and begun else 499}"}}'] == 1


async def test_a_client_that_leaves_while_it_sends():
    engine = FakeEngine()
    async with serving(engine) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        async with asyncio.timeout(20):
            while 'status="499"' not in (page := (await server.client.get("/metrics")).text):
                await asyncio.sleep(0.005)
        assert (await server.client.post("/v1/completions", json=COMPLETION)).status_code == 200
        await server.idle()
        assert parse_metrics(page)['headrace:http_responses_total{path="/v1/completions",status="499"}'] == 1 and 'status="500"' not in page


async def test_a_stop_string_ends_the_engines_work():
    engine = FakeEngine(script=endless)
    async with serving(engine) as server:
        for stream in (False, True):
            response = await server.client.post("/v1/completions", json={**COMPLETION, "stop": "ipsum", "stream": stream})
            assert response.status_code == 200 and '"stop_reason":"ipsum"' in response.text
        await server.idle()
        assert len(engine.aborted) == 2 and engine.yielded < 30


# ---------------------------------------------------------------------------------------------------------------------
# readers


async def test_a_slow_reader_holds_back_only_itself():
    engine = FakeEngine(script=lambda i, p: "x" * 200_000, max_model_len=2**20, bursts=1)
    async with serving(engine) as server:
        body = {**COMPLETION, "max_tokens": 300_000, "stream": True, "stream_options": {"include_usage": True}}
        _, writer = await server.connect("/v1/completions", body)
        await soon(lambda: engine.yielded)
        taken = -1
        while taken != engine.yielded:  # until the buffers between the two are full
            taken = engine.yielded
            for _ in range(100):  # turns, of which the engine has as many, however busy the machine is
                await asyncio.sleep(0.003)
        assert 0 < taken < 150_000
        other = await server.client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 20})
        assert other.status_code == 200
        await asyncio.sleep(0.1)
        assert engine.yielded <= taken + 25
        writer.transport.abort()
        await server.idle()


async def test_a_reader_that_takes_nothing_is_dropped():
    engine = FakeEngine(script=lambda i, p: "x" * 200_000, max_model_len=2**20, bursts=1)
    async with serving(engine, write_timeout=0.3) as server:
        _, writer = await server.connect("/v1/completions", {**COMPLETION, "max_tokens": 300_000, "stream": True})
        await soon(lambda: bool(engine.aborted), 20)
        await server.idle()
        writer.transport.abort()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_comments_keep_a_silent_stream_open(path):
    engine = FakeEngine()
    async with serving(engine, keep_alive_interval=0.05) as server:
        engine.gate.clear()
        body = CHAT if path == "/v1/chat/completions" else COMPLETION
        async with server.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            pieces = response.aiter_text()
            first = await anext(pieces)
            assert set(first.split("\n\n")) == {": keep-alive", ""}
            engine.gate.set()
            rest = "".join([piece async for piece in pieces])
            assert parse_events(first + rest)
        await server.idle()


async def test_many_streams_at_once():
    engine = FakeEngine(delay=0.001, config=EngineConfig(max_num_seqs=200))
    async with serving(engine) as server:

        async def one(i: int) -> None:
            body = {**CHAT, "seed": i, "n": 2}
            streamed = await server.client.post("/v1/chat/completions", json={**body, "stream": True})
            whole = await server.client.post("/v1/chat/completions", json=body)
            events = parse_events(streamed.text)
            assert events.pop() is None
            texts = [c["content"] for c in joined(events)]  # type: ignore[arg-type]
            assert texts == [c["message"]["content"] for c in whole.json()["choices"]]

        await asyncio.gather(*(one(i) for i in range(60)))
        await server.idle()


@pytest.mark.parametrize("prompt", ["x" * 40_000, ["x" * 400] * 40], ids=["one", "many"])
async def test_large_prompts_do_not_hold_up_the_loop(prompt):
    """A long text, and many that are long together, are tokenized in a thread: health answers meanwhile."""
    engine = FakeEngine()
    begun, answered = threading.Event(), threading.Event()
    inner = engine.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        begun.set()
        assert answered.wait(20), "the loop was held up"
        return inner(text[:10], add_special_tokens)

    engine.tokenizer.encode = slow  # type: ignore[method-assign]
    async with serving(engine) as server:
        for path, body in (("/v1/completions", {**COMPLETION, "prompt": prompt}), ("/v1/embeddings", {"model": MODEL, "input": prompt})):
            begun.clear(), answered.clear()
            slow_one = asyncio.create_task(server.client.post(path, json=body))
            await soon(begun.is_set)
            assert (await server.client.get("/health")).status_code == 200
            answered.set()
            assert (await slow_one).status_code == 200


# ---------------------------------------------------------------------------------------------------------------------
# deadlines


@pytest.mark.parametrize(("own", "asked", "effective"), [(None, None, None), (5.0, None, 5.0), (None, b"7", 7.0), (5.0, b"7", 5.0), (5.0, b"3", 3.0)])
async def test_a_client_can_only_shorten_its_deadline(own, asked, effective):
    seen = []

    async def app(scope, receive, send) -> None:
        seen.append(scope["state"]["timeout"])

    gate = Gate(app, ApiContext(FakeEngine(), ServerConfig(request_timeout=own)))  # type: ignore[arg-type]
    headers = [(b"x-request-timeout", asked)] if asked else []
    await gate({"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}, None, None)  # type: ignore[arg-type]
    assert seen == [effective]


async def test_deadlines():
    engine = FakeEngine(script=endless, delay=0.01)
    async with serving(engine) as server:
        late = {"x-request-timeout": "0.15"}
        response = await server.client.post("/v1/completions", json=COMPLETION, headers=late)
        assert response.status_code == 504 and error_of(response)["code"] == "timeout"
        engine.gate.clear()
        response = await server.client.post("/v1/completions", json={**COMPLETION, "stream": True}, headers=late)
        assert response.status_code == 504 and error_of(response)["code"] == "timeout"
        response = await server.client.post("/v1/embeddings", json={"model": MODEL, "input": "x"}, headers={"x-request-timeout": "20"})
        assert response.status_code == 200
        await server.idle()
        for bad in ("0", "-1", "x", "nan", "inf", ""):
            response = await server.client.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout": bad})
            assert response.status_code == 400, bad
            error_of(response)


async def test_a_stream_that_has_begun_ends_as_length():
    engine = FakeEngine(script=endless, delay=0.01)
    async with serving(engine, request_timeout=1.0) as server:
        body = {**COMPLETION, "n": 3, "stream": True, "stream_options": {"include_usage": True}, "stop": ["ipsum?"]}
        response = await server.client.post("/v1/completions", json=body, headers={"x-request-timeout": "100"})
        events = parse_events(response.text)
        assert response.status_code == 200 and events.pop() is None
        usage = events.pop()
        choices = joined(events)  # type: ignore[arg-type]
        assert [c["finish_reason"] for c in choices] == ["length"] * 3
        assert all(endless([], None).startswith(c["content"]) and c["content"] for c in choices)
        assert usage["usage"]["completion_tokens"] == sum(len(c["content"]) for c in choices)  # type: ignore[index]
        response = await server.client.post("/v1/responses", json={**RESPONSE, "stream": True})
        last = parse_events(response.text)[-1]
        assert last["type"] == "response.incomplete"  # type: ignore[index]
        await server.idle()


async def test_the_deadline_of_a_blocked_reader_loses_no_text():
    engine = FakeEngine(script=lambda i, p: "0123456789" * 20_000, max_model_len=2**20, bursts=1)
    async with serving(engine, request_timeout=2.0) as server:
        reader, _ = await server.connect("/v1/completions", {**COMPLETION, "max_tokens": 200_000, "stream": True, "n": 2})
        await asyncio.sleep(2.3)
        data = b""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while not data.endswith(b"0\r\n\r\n"):
                data += await asyncio.wait_for(reader.read(2**16), 20)
        at = data.index(b"\r\n\r\n") + 4
        pieces = []
        while at < len(data):
            size, _, _ = data[at : at + 20].partition(b"\r\n")
            at += len(size) + 2
            pieces.append(data[at : at + int(size, 16)])
            at += int(size, 16) + 2
        text = b"".join(pieces)
        events = parse_events(text.decode())
        assert events.pop() is None
        for choice in joined(events):  # type: ignore[arg-type]
            assert choice["finish_reason"] == "length" and choice["content"] == ("0123456789" * 20_000)[: len(choice["content"])]
        await server.idle()


# ---------------------------------------------------------------------------------------------------------------------
# admission


@pytest.mark.parametrize("cores", [1, 3])
async def test_the_queue_is_bounded(cores):
    """It begins where the seats of all cores are taken."""
    engine = FakeEngine(config=EngineConfig(max_num_seqs=2))
    engine.state.drain_rate, engine.state.waiting_tokens, engine.state.num_cores = 10.0, 95, cores
    fits = 2 * cores + 3
    async with serving(engine, max_queued_requests=3) as server:
        engine.gate.clear()
        waiting = [asyncio.create_task(server.client.post("/v1/completions", json=COMPLETION)) for _ in range(fits)]
        await soon(lambda: len(engine.active) == fits)
        for stream in (False, True):
            response = await server.client.post("/v1/completions", json={**COMPLETION, "stream": stream})
            assert response.status_code == 429 and error_of(response)["code"] == "queue_full"
            assert response.headers["retry-after"] == "10"
        engine.gate.set()
        assert [r.status_code for r in await asyncio.gather(*waiting)] == [200] * fits
        assert (await server.client.post("/v1/completions", json={**COMPLETION, "n": 100})).status_code == 200
        await server.idle()


async def test_the_queued_tokens_are_bounded():
    engine = FakeEngine()
    async with serving(engine, max_queued_tokens=50) as server:
        engine.gate.clear()
        long = {**COMPLETION, "prompt": "x" * 60, "max_tokens": 10}
        first = asyncio.create_task(server.client.post("/v1/completions", json=long))
        await soon(lambda: len(engine.active) == 1)
        assert (await server.client.post("/v1/completions", json=long)).status_code == 429
        assert (await server.client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})).status_code == 429
        engine.gate.set()
        assert (await first).status_code == 200
        assert (await server.client.post("/v1/completions", json=long)).status_code == 200
        engine.script, engine.delay = endless, 0.01
        async with server.client.stream("POST", "/v1/completions", json={**long, "max_tokens": 4000, "stream": True}) as begun:
            await anext(begun.aiter_text())  # it waits no more
            assert (await server.client.post("/v1/completions", json=long)).status_code == 200
        await server.idle()


async def test_keys():
    engine = FakeEngine()
    async with serving(engine, api_keys=("one", "zwei-ü"), max_concurrent_per_key=1, cors_origins=("http://a",)) as server:
        good = {"authorization": "Bearer one"}
        for headers in ({}, {"authorization": "Bearer two"}, {"authorization": "one"}, {"authorization": "Basic one"}, {"authorization": b"\xff"}):
            for path in ("/v1/models", "/metrics", "/version", "/nothing", "/ready"):
                response = await server.client.get(path, headers=headers)
                assert response.status_code == 401 and error_of(response)["code"] == "invalid_api_key"
            assert (await server.client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 401
            assert (await server.client.get("/health", headers=headers)).status_code == 200
        assert (await server.client.get("/v1/models", headers=good)).status_code == 200
        for coding in ("utf-8", "latin-1"):
            other = {"authorization": "bearer zwei-ü".encode(coding)}
            assert (await server.client.get("/v1/models", headers=other)).status_code == 200
        engine.gate.clear()
        first = asyncio.create_task(server.client.post("/v1/completions", json=COMPLETION, headers=good))
        await soon(lambda: len(engine.active) == 1)
        response = await server.client.post("/v1/completions", json=COMPLETION, headers=good)
        assert response.status_code == 429 and "retry-after" in response.headers
        second = asyncio.create_task(server.client.post("/v1/completions", json=COMPLETION, headers=other))
        await soon(lambda: len(engine.active) == 2)
        engine.gate.set()
        assert (await first).status_code == (await second).status_code == 200
        assert (await server.client.post("/v1/completions", json=COMPLETION, headers=good)).status_code == 200
        preflight = {"origin": "http://a", "access-control-request-method": "POST"}
        response = await server.client.options("/v1/completions", headers=preflight)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "http://a"
        response = await server.client.get("/v1/models", headers={"origin": "http://a"})
        assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "http://a"


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/v1/models", "/v1/models/a//b", "/v1/chat/completions", "/nothing"])
async def test_no_spelling_of_a_path_goes_around_the_keys(path):
    """Slashes are dropped before a path is looked at, so that what asks for a key asks for it in every spelling."""
    async with serving(FakeEngine(), api_keys=("one",)) as server:
        for spelt in (path, path + "/", path.replace("/", "//"), "/health/.." + path, "/health/" + path, path + "//health"):
            for method in ("GET", "POST"):
                reader, _ = await server.connect(spelt, {}, method=method)
                status = int((await reader.readuntil(b"\r\n")).split()[1])
                assert (status == 401) == (spelt.replace("//", "/").rstrip("/") not in ("/health", "/ping")), (method, spelt)


async def test_request_ids_are_echoed():
    async with serving(FakeEngine()) as server:
        for stream in (False, True):
            response = await server.client.post(
                "/v1/chat/completions", json={**CHAT, "stream": stream}, headers={"x-request-id": "abc-1"}
            )
            assert response.headers["x-request-id"] == "abc-1"
        response = await server.client.get("/nothing", headers={"x-request-id": "abc-2"})
        assert response.headers["x-request-id"] == "abc-2"
        made = set()
        for bad in ("", "a b", "x" * 200):
            made.add((await server.client.get("/health", headers={"x-request-id": bad})).headers["x-request-id"])
        assert len(made) == 3 and not made & {"", "a b", "x" * 200}
        response = await server.client.post("/v1/completions", json={**COMPLETION, "request_id": "mine"})
        assert response.json()["id"] == "cmpl-mine"


async def test_unfinished_bodies_time_out():
    async with serving(FakeEngine(), body_timeout=0.1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        await reader.read()  # the server closes
        writer.close()
