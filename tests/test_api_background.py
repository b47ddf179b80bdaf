"""/v1/responses in the background: made without their connection, left and taken up again, ended by somebody else, within bounds."""

from __future__ import annotations

import asyncio
import json
import random

import openai
import pytest

from answers import error_of, parse_events
from fake_engine import TEMPLATE, FakeEngine
from headrace.api.response_store import ResponseStore
from headrace.api.responses_background import Recorder
from server_driver import MODEL, Served, serving, soon

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ü\\n\\n😀"}}\n</tool_call>'
ENDED = ("completed", "incomplete", "failed", "cancelled")


def engine(text: str = "Let us see: " + "one two three " * 5, **options) -> FakeEngine:
    made = FakeEngine(script=lambda ids, params: text, **options)
    made.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> </think> #}"}
    return made


async def ask(server: Served, body: dict | None = None, status: int = 200, **headers: str) -> dict:
    answer = await server.client.post(PATH, json={"model": MODEL, "input": "hi", "background": True, **(body or {})}, headers=headers)
    assert answer.status_code == status, answer.text
    return error_of(answer) if status >= 400 else answer.json()


async def shown(server: Served, response_id: str) -> dict:
    return (await server.client.get(f"{PATH}/{response_id}")).json()


async def ended(server: Served, response_id: str) -> dict:
    async with asyncio.timeout(20):
        while (found := await shown(server, response_id))["status"] not in ENDED:
            await asyncio.sleep(0.005)
    return found


async def events(server: Served, response_id: str, after: int | None = None) -> list[dict]:
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    answer = await server.client.get(f"{PATH}/{response_id}", params=query)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream", answer.text
    return parse_events(answer.text) if answer.text else []  # type: ignore[return-value]


def said(response: dict) -> list:
    """What it says, without what is another one's each time."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]


async def test_it_waits_runs_and_ends_without_its_connection():
    fake = engine(f"<think>so</think>Well.{CALL}")
    async with serving(fake) as server:
        fake.gate.clear()
        body = {"instructions": "Be.", "tools": [{"type": "function", "name": "f"}], "metadata": {"k": "v"}}
        first = await ask(server, body)
        assert (first["status"], first["background"], first["store"], first["output"], first["usage"]) == ("queued", True, True, [], None)
        await soon(lambda: fake.active)
        assert await shown(server, first["id"]) == first and server.limits.active == 1
        error = error_of(await server.client.post(PATH, json={"model": MODEL, "input": "x", "previous_response_id": first["id"]}))
        assert "in progress" in error["message"]
        fake.fail = lambda at: fake.gate.clear()  # no failure: behind the first tokens there is a pause
        fake.gate.set()
        await soon(lambda: fake.yielded)
        assert {**first, "status": "in_progress"} == await shown(server, first["id"])
        fake.fail = lambda at: None
        fake.gate.set()
        last = await ended(server, first["id"])
        await server.idle()
        plain = (await server.client.post(PATH, json={"model": MODEL, "input": "hi", **body})).json()
        assert said(last) == said(plain) and last["usage"] == plain["usage"] and not plain["background"]
        assert last["status"] == "completed" and last["completed_at"] and not server.app.state.api.tasks
        output = {"type": "function_call_output", "call_id": last["output"][-1]["call_id"], "output": "2"}
        again = await ask(server, {"input": [output], "previous_response_id": last["id"], "max_output_tokens": 3})
        assert (await ended(server, again["id"]))["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [s["content"][0]["text"] for s in (await server.client.get(f"{PATH}/{last['id']}/input_items")).json()["data"]] == ["hi"]


async def test_a_stream_is_taken_up_again_behind_each_of_its_events():
    fake = engine(f"<think>so</think>Well.\n\n{CALL}")
    async with serving(fake) as server:
        answer = await server.client.post(PATH, json={"model": MODEL, "input": "hi", "background": True, "stream": True})
        told = parse_events(answer.text)
        assert [e["sequence_number"] for e in told] == list(range(len(told)))
        assert [e["type"].removeprefix("response.") for e in told[:3]] == ["created", "queued", "in_progress"]
        assert [e["response"]["status"] for e in told[:3]] == ["queued", "queued", "in_progress"]
        final = told[-1]["response"]
        assert told[-1]["type"] == "response.completed" and await shown(server, final["id"]) == final
        for after in (None, *range(len(told) + 2)):
            assert await events(server, final["id"], after) == told[0 if after is None else after + 1 :]
        plain = parse_events((await server.client.post(PATH, json={"model": MODEL, "input": "hi", "stream": True})).text)
        assert sum(e["type"] == "response.output_text.delta" for e in told) > 1
        assert "".join(e.get("delta", "") for e in told) == "".join(e.get("delta", "") for e in plain)
        kinds = [[e["type"] for e in x if not e["type"].endswith("delta")] for x in (told, plain)]
        assert [k for k in kinds[0] if k != "response.queued"] == kinds[1]


async def test_readers_leave_and_come_back_while_it_runs():
    """Each from where he was, several at once; nobody holds it up, and it goes on without any."""
    fake = engine("word " * 60, bursts=2, delay=0.001)
    rng = random.Random(1)
    async with serving(fake) as server:
        _, writer = await server.connect(PATH, {"model": MODEL, "input": "hi", "background": True, "stream": True, "request_id": "it"})
        await soon(lambda: fake.yielded > 3)
        writer.transport.abort()

        async def read() -> list[dict]:
            found: list[dict] = []
            while not found or found[-1]["type"] != "response.completed":
                query = {"stream": "true"} | ({"starting_after": str(len(found) - 1)} if found else {})
                most = rng.randint(1, 30)
                async with server.client.stream("GET", f"{PATH}/resp_it", params=query) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: "):
                            found.append(json.loads(line[6:]))
                            most -= 1
                            if not most:
                                break
            return found

        readers = await asyncio.gather(*(read() for _ in range(5)))
        assert all(found == readers[0] for found in readers) and readers[0] == await events(server, "resp_it")
        assert readers[0][-1]["response"] == await shown(server, "resp_it") and not fake.aborted
        await server.idle()


@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.parametrize("stream", [True, False])
async def test_somebody_ends_it(when, stream):
    fake = engine("text" * 999, bursts=1, delay=0.001)
    async with serving(fake) as server:
        if when == "before":
            fake.gate.clear()
        if stream:
            reader = asyncio.create_task(server.client.post(PATH, json={"model": MODEL, "input": "hi", "background": True, "stream": True, "request_id": "it"}))
        else:
            await ask(server, {"request_id": "it"})
        await soon(lambda: fake.active if when == "before" else fake.yielded > 3)
        cancelled = [await server.client.post(f"{PATH}/resp_it/cancel") for _ in range(2)]
        assert [c.status_code for c in cancelled] == [200, 200] and cancelled[0].json() == cancelled[1].json() == await shown(server, "resp_it")
        assert (cancelled[0].json()["status"], cancelled[0].json()["output"]) == ("cancelled", [])
        await server.idle()
        await soon(lambda: not server.app.state.api.tasks)
        assert fake.aborted and await shown(server, "resp_it") == cancelled[0].json()
        if stream:
            *_, error, failed = told = parse_events((await reader).text)
            assert (error["type"], error["code"], failed["type"]) == ("error", "cancelled", "response.failed")
            assert failed["response"] == cancelled[0].json() and await events(server, "resp_it") == told
        fake.gate.set()
        other = await ask(server, {"max_output_tokens": 2})
        last = await ended(server, other["id"])
        assert (await server.client.post(f"{PATH}/{other['id']}/cancel")).json() == last, "what has ended stays as it is"


async def test_one_that_is_ended_before_it_has_begun():
    """By a request that was there already, for an id that it could know."""
    fake = engine()
    async with serving(fake) as server:
        store = server.app.state.api.responses
        begin = store.begin

        def begin_and_end(*args):
            stored = begin(*args)
            asyncio.get_running_loop().call_soon(lambda: stored.cancel())  # before any task that is made from here on
            return stored

        store.begin = begin_and_end
        response = await ask(server)
        assert (await ended(server, response["id"]))["status"] == "cancelled"
        await server.idle()
        assert not fake.prompts and not server.app.state.api.tasks


async def test_deleting_ends_it():
    fake = engine(delay=0.001)
    async with serving(fake) as server:
        fake.gate.clear()
        response = await ask(server)
        await soon(lambda: fake.active)
        assert (await server.client.delete(f"{PATH}/{response['id']}")).json()["deleted"] is True
        await server.idle()
        await soon(lambda: not server.app.state.api.tasks)
        assert (await server.client.get(f"{PATH}/{response['id']}")).status_code == 404 and server.app.state.api.responses.num_bytes == 0


async def test_who_reads_one_that_is_deleted_reads_its_end():
    fake = engine("word " * 900, bursts=1, delay=0.001)
    async with serving(fake, responses_store_bytes=1 << 16) as server:
        told: list[dict] = []

        async def read() -> None:
            body = {"model": MODEL, "input": "hi", "background": True, "stream": True, "request_id": "it"}
            async with server.client.stream("POST", PATH, json=body) as answer:
                async for line in answer.aiter_lines():
                    told.extend([json.loads(line[6:])] if line.startswith("data: ") else [])

        reader = asyncio.create_task(read())
        await soon(lambda: len(told) > 3)
        stored = server.app.state.api.responses.find((0, "resp_it"))
        await soon(lambda: stored.recorder._left < 600 and not fake.gate.clear())  # and then nothing more comes
        assert (await server.client.delete(f"{PATH}/resp_it")).status_code == 200
        await reader
        assert told[-1]["type"] == "response.failed" and told[-1]["response"]["status"] == "cancelled"
        assert [e["sequence_number"] for e in told] == list(range(len(told))) and server.app.state.api.responses.num_bytes == 0


async def test_what_cannot_be_is_refused_by_name():
    fake = engine()
    async with serving(fake) as server:
        done = await ask(server, {"stream": False})
        await ended(server, done["id"])
        plain = (await server.client.post(PATH, json={"model": MODEL, "input": "hi"})).json()["id"]
        for path, field in (
            (f"{done['id']}?stream=true", "stream"), (f"{plain}?stream=true", "stream"), (f"{done['id']}?stream=yes", "stream"),
            (f"{done['id']}?include_obfuscation=true", "include_obfuscation"),
            (f"{done['id']}?starting_after=3", "starting_after"), (f"{done['id']}?stream=true&starting_after=-1", "starting_after"),
            (f"{done['id']}?stream=true&starting_after=x", "starting_after"), (f"{done['id']}?stream=1&starting_after=9999999999", "starting_after"),
        ):  # fmt: skip
            answer = await server.client.get(f"{PATH}/{path}")
            assert answer.status_code == 400 and error_of(answer)["param"] == field, path
        error = await ask(server, {"store": False}, 400)
        assert error["param"] == "background" and "store is true" in error["message"]
        assert (await ask(server, {"background": "yes"}, 400))["param"] == "background"
        assert (await ask(server, {"request_id": "a/b"}, 400))["param"] == "request_id"  # nobody could ask for it
        assert (await ask(server, {"stream_options": {}}, 400))["param"] == "stream_options"
        assert (await ask(server, {"model": "none"}, 404))["param"] == "model"
        fake.gate.clear()
        await ask(server, {"request_id": "it"})
        assert (await ask(server, {"request_id": "it"}, 400))["param"] == "request_id"
        fake.gate.set()
        await ended(server, "resp_it")
        await ask(server, {"request_id": "it"})
    async with serving(engine(), responses_store_bytes=0) as server:
        error = await ask(server, {}, 400)
        assert error["param"] == "background" and "keeps no responses" in error["message"] and "api-processes" in error["message"]
        assert not server.engine.prompts


async def test_each_key_has_its_own_and_no_more_than_it_may():
    fake = engine()
    keys = [{"authorization": f"Bearer {key}"} for key in "ab"]
    async with serving(fake, api_keys=("a", "b"), max_concurrent_per_key=1) as server:
        fake.gate.clear()
        mine = await ask(server, {"stream": False}, **keys[0])
        assert "in progress" in (await ask(server, {}, 429, **keys[0]))["message"]
        yours = await ask(server, {}, **keys[1])
        for method, path in (("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await server.client.request(method, f"{PATH}/{mine['id']}{path}", headers=keys[1])
            assert (answer.status_code, error_of(answer)["code"]) == (404, "response_not_found"), path
        answer = await server.client.post(f"{PATH}/{mine['id']}/cancel", headers=keys[0])  # with all that he may have in progress
        assert answer.status_code == 200 and answer.json()["status"] == "cancelled"
        fake.gate.set()
        await server.idle()
        await soon(lambda: not server.app.state.api.tasks)
        await ask(server, {}, **keys[0])
        await server.idle()
        assert (await server.client.get(f"{PATH}/{yours['id']}", headers=keys[1])).json()["status"] == "completed"
        await soon(lambda: not any(server.limits._in_progress.values()))


async def test_a_full_queue_refuses_it_at_once_and_keeps_nothing():
    fake = engine()
    fake.config = type(fake.config)(max_num_seqs=1)
    async with serving(fake, max_queued_requests=0) as server:
        fake.gate.clear()
        first = await ask(server)
        for stream in (False, True):
            assert (await ask(server, {"stream": stream}, 429))["code"] == "queue_full"
        assert len(server.app.state.api.responses) == 1
        fake.gate.set()
        assert (await ended(server, first["id"]))["status"] == "completed"


async def test_who_is_not_let_in_has_nothing_of_others_removed():
    """However often he asks again, also by the id of what is there."""
    fake = engine(max_model_len=65536)
    fake.config = type(fake.config)(max_num_seqs=1)
    async with serving(fake, max_queued_requests=0, responses_store_bytes=20_000) as server:
        done = [(await server.client.post(PATH, json={"model": MODEL, "input": f"{i}", "request_id": f"{i}"})).json() for i in range(3)]
        fake.gate.clear()
        first = await ask(server)
        for body in ({"background": True}, {"background": True, "stream": True}, {"stream": True}, {}):
            for input_, request_id in (("x" * 8_000, None), ("x", "1")):
                answer = await server.client.post(PATH, json={"model": MODEL, "input": input_, "request_id": request_id, **body})
                assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
        assert [await shown(server, response["id"]) for response in done] == done
        fake.gate.set()
        assert (await ended(server, first["id"]))["status"] == "completed"
        await server.idle()
        answer = await server.client.post(PATH, json={"model": MODEL, "input": "x"}, headers={"x-request-timeout": "0.000001"})
        assert answer.status_code == 504
        await server.idle()


async def test_a_deadline_cuts_it_as_it_does_a_stream():
    fake = engine("text" * 999, bursts=1)
    async with serving(fake) as server:
        fake.gate.clear()
        none = await ended(server, (await ask(server, **{"x-request-timeout": "0.05"}))["id"])
        assert (none["status"], none["error"]["code"]) == ("failed", "timeout")
        fake.gate.set()
        fake.delay = 0.002
        for stream in (False, True):
            answer = await server.client.post(
                PATH, json={"model": MODEL, "input": "hi", "background": True, "stream": stream, "request_id": "it"}, headers={"x-request-timeout": "1"},
            )  # fmt: skip
            assert answer.status_code == 200
            some = await ended(server, "resp_it")
            text = some["output"][0]["content"][0]["text"]
            assert some["status"] == "incomplete" and 0 < len(text) < 3996 and ("text" * 999).startswith(text)
        last = parse_events(answer.text)[-1]
        assert (last["type"], last["response"]) == ("response.incomplete", some), "who reads it reads its end"
        await server.idle()


async def test_a_readers_own_deadline_is_told_him():
    fake = engine("text" * 999, bursts=1)
    async with serving(fake) as server:
        fake.gate.clear()
        reader = asyncio.create_task(server.client.post(PATH, json={"model": MODEL, "input": "hi", "background": True, "stream": True, "request_id": "it"}))
        await soon(lambda: fake.active)
        answer = await server.client.get(f"{PATH}/resp_it?stream=true", headers={"x-request-timeout": "0.1"})
        assert [e["type"] for e in parse_events(answer.text)] == ["response.created", "response.queued", "error"]
        assert parse_events(answer.text)[-1]["code"] == "timeout"
        fake.gate.set()
        assert parse_events((await reader).text)[-1]["type"] == "response.completed"


async def test_what_fails_says_so():
    fake = engine("text" * 99, bursts=1)
    async with serving(fake) as server:
        for at in (0, 5):
            fake.fail = lambda n, at=at: "error" if n >= at else None
            last = await ended(server, (await ask(server))["id"])
            assert (last["status"], last["error"], last["output"]) == ("failed", {"code": "engine_error", "message": "NaN logits"}, [])
            answer = await server.client.post(PATH, json={"model": MODEL, "input": "hi", "background": True, "stream": True})
            *_, error, failed = parse_events(answer.text)
            assert (error["code"], failed["type"]) == ("engine_error", "response.failed") and await shown(server, failed["response"]["id"]) == failed["response"]
        fake.fail = lambda n: 1 / 0
        assert (await ended(server, (await ask(server))["id"]))["error"] == {"code": "internal_error", "message": "Internal error."}
        await server.idle()


async def test_what_is_kept_is_bounded():
    """Events go first, then the answer, which says so; and nothing is let in that could not even fail."""
    fake = engine("word " * 400, bursts=1)
    async with serving(fake, responses_store_bytes=40_000) as server:
        store = server.app.state.api.responses
        answer = await server.client.post(PATH, json={"model": MODEL, "input": "hi", "background": True, "stream": True})
        *_, first, error = parse_events(answer.text)
        assert (error["type"], error["code"]) == ("error", "events_not_kept") and first["sequence_number"] >= 1
        (response_id,) = {stored.key[1] for stored in store._kept.values()}
        last = await ended(server, response_id)
        assert last["output"][0]["content"][0]["text"] == "word " * 400 and store.num_bytes < 8000
        answer = await server.client.get(f"{PATH}/{response_id}?stream=true")
        assert answer.status_code == 400 and error_of(answer)["param"] == "stream"
        fake.gate.clear()
        running = [(await ask(server))["id"] for _ in range(8)]
        error = await ask(server, {}, 429)
        assert error["code"] == "store_full" and "--responses-store-bytes" in error["message"]
        assert (await ask(server, {"input": "x" * 40_000}, 400))["param"] == "input"
        fake.gate.set()
        assert [(await ended(server, r))["status"] for r in running] == ["completed"] * 8
        await soon(lambda: not server.app.state.api.tasks)
        assert store.num_bytes == sum(stored.size for stored in store._kept.values()) <= 40_000
    fake = engine("word " * 4000, bursts=10**5, max_model_len=1 << 16)
    async with serving(fake, responses_store_bytes=95_000) as server:  # for its events, or for it
        answer = await server.client.post(PATH, json={"model": MODEL, "input": "hi", "background": True, "stream": True, "request_id": "it"})
        last = await ended(server, "resp_it")
        assert last["status"] == "completed" and last["output"][0]["content"][0]["text"] == "word " * 4000
        assert parse_events(answer.text)[-1]["code"] == "events_not_kept" and server.app.state.api.responses.num_bytes < 22_000
    fake = engine("word " * 780)
    async with serving(fake, responses_store_bytes=5000) as server:
        (large, small) = [await ended(server, (await ask(server, {"max_output_tokens": n}))["id"]) for n in (3901, 20)]
        assert (large["status"], large["error"]["code"], large["output"]) == ("failed", "store_full", [])
        assert small["status"] == "incomplete" and small["output"]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_nothing_is_lost_and_all_is_given_back(seed):
    """Many are asked for, read, left, ended, deleted and fail, in a store that is often full."""
    rng = random.Random(seed)
    fake = FakeEngine(bursts=2, delay=0.0005)
    known: dict[str, dict] = {}  # what is known of those that were not deleted
    fake.fail = lambda n: "error" if rng.random() < 0.002 else None

    async def one(server: Served) -> None:
        await asyncio.sleep(rng.random() / 4)
        body = {"input": "x" * rng.randint(1, 2000), "max_output_tokens": rng.randint(1, 60), "seed": rng.randint(0, 9), "stream": rng.random() < 0.6}
        if known and rng.random() < 0.3:
            body["previous_response_id"] = rng.choice(list(known))
        found: list[dict] = []
        if body["stream"]:
            most = rng.randint(1, 40)
            async with server.client.stream("POST", PATH, json={"model": MODEL, "background": True, **body}) as answer:
                if answer.status_code != 200:
                    assert answer.status_code in (400, 404, 429), await answer.aread()
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        found.append(json.loads(line[6:]))
                        if len(found) == most:
                            break
            response_id = found[0]["response"]["id"]
        else:
            answer = await server.client.post(PATH, json={"model": MODEL, "background": True, **body})
            if answer.status_code != 200:
                assert answer.status_code in (400, 404, 429), answer.text
                return
            response_id = answer.json()["id"]
        await asyncio.sleep(rng.random() / 30)
        what = rng.random()
        if what < 0.2:
            await server.client.delete(f"{PATH}/{response_id}")
            return
        if what < 0.4:
            assert (await server.client.post(f"{PATH}/{response_id}/cancel")).status_code in (200, 404)
        while (answer := await server.client.get(f"{PATH}/{response_id}")).status_code == 200 and answer.json()["status"] not in ENDED:
            await asyncio.sleep(0.003)
        if answer.status_code != 200:
            assert answer.status_code == 404  # others came after it, and the store is small
            return
        known[response_id] = last = answer.json()
        if body["stream"]:
            query = {"stream": "true", "starting_after": str(len(found) - 1)} if found else {"stream": "true"}
            answer = await server.client.get(f"{PATH}/{response_id}", params=query)
            if answer.status_code == 200 and not (found and found[-1]["type"] == "error"):
                found += parse_events(answer.text) if answer.text else []  # type: ignore[arg-type]
                if found[-1].get("code") != "events_not_kept":
                    assert [e["sequence_number"] for e in found] == list(range(len(found))) and found[-1]["response"] == last

    async with serving(fake, responses_store_bytes=150_000, max_queued_requests=40) as server:
        await asyncio.gather(*(one(server) for _ in range(120)))
        await server.idle()
        context = server.app.state.api
        await soon(lambda: not context.tasks)
        store = context.responses
        kept = list(store._kept.values())
        assert kept and store.num_bytes == sum(s.size for s in kept) <= 150_000 and all(s.now is None and not s.gone for s in kept)
        for s in kept:
            assert s.recorder is None or (s.recorder.ended and (s.recorder.events is None or s.recorder._left >= 0))
            if s.key[1] in known:
                assert json.loads(s.document()) == known[s.key[1]]
        assert known


def test_what_a_recorder_takes_it_gives_back():
    rng = random.Random(5)
    for most in (300, 3000, 30_000, 10**6):
        store = ResponseStore(most)
        old = store.begin((0, "old"), [], None, dict)
        assert old is not None and store.end(old, b'{"output":[]}')
        stored = store.begin((0, "it"), [], None, dict)
        assert stored is not None
        stored.recorder = recorder = Recorder(store, stored, keep=True)
        told: list[bytes] = []
        for n in range(300):
            if n == 200:
                assert store.end(stored, b'{"output":[]}')
            some = [b"data: " + b"x" * rng.randint(0, 50) + b"\n\n" for _ in range(rng.randint(0, 3))]
            told += some
            recorder.write(b"".join(some))
            assert store.num_bytes == sum(s.size for s in store._kept.values()) <= most and not stored.gone
            assert recorder.events is None or recorder.events == told
        recorder.end()
        assert (recorder.events is None) == (most < 10**6)
        held = 0 if recorder.events is None else sum(map(len, told)) + 64 * len(told)
        assert stored.size == 2 + len(b'{"output":[]}') + held and store.num_bytes <= most
        store.remove(stored)
        recorder.write(b"data: x\n\n")
        assert store.num_bytes == sum(s.size for s in store._kept.values())


async def test_a_server_that_ends_ends_it(caplog):
    fake = engine()
    fake.gate.clear()
    with caplog.at_level("INFO"):
        async with serving(fake) as server:
            response = await ask(server, {"request_id": "cut"})
            other = await ask(server, {"request_id": "deleted"})
            await soon(lambda: len(fake.active) == 2)
            await server.client.delete(f"{PATH}/{other['id']}")
            await soon(lambda: len(server.app.state.api.tasks) == 1)
            await server.app.state.api.close()
        assert not fake.active and len(fake.aborted) == 2 and not server.app.state.api.tasks
    assert "1 background responses are cut off" in caplog.text and f"background {response['id']} queued" in caplog.text
    assert "background resp_deleted cancelled" in caplog.text and "Traceback" not in caplog.text


async def test_by_the_sdk():
    fake = engine("word " * 40, delay=0.001)
    async with serving(fake) as server, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k", max_retries=0) as client:
        response = await client.responses.create(model=MODEL, input="hi", background=True)
        assert response.status == "queued" and response.background
        while response.status in ("queued", "in_progress"):
            response = await client.responses.retrieve(response.id)
        assert response.status == "completed" and response.output_text == "word " * 40
        stream = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 9:
                break
        await stream.close()
        first = seen[0].response.id
        async for event in await client.responses.retrieve(first, stream=True, starting_after=seen[-1].sequence_number):
            seen.append(event)
        assert [e.sequence_number for e in seen] == list(range(len(seen))) and seen[-1].type == "response.completed"
        assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == seen[-1].response.output_text == "word " * 40
        taken_up: list[int] = []
        async with client.responses.stream(response_id=first, starting_after=5) as events_from_there:
            async for event in events_from_there:
                taken_up.append(event.sequence_number)
            assert (await events_from_there.get_final_response()).output_text == "word " * 40
        assert taken_up == [e.sequence_number for e in seen[6:]]
        fake.gate.clear()
        running = await client.responses.create(model=MODEL, input="hi", background=True)
        ends = [await client.responses.cancel(running.id) for _ in range(2)]
        assert [e.status for e in ends] == ["cancelled"] * 2
        await client.responses.delete(running.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(running.id)


async def test_metrics_count_it():
    fake = engine()
    async with serving(fake) as server:
        await ended(server, (await ask(server))["id"])
        page = (await server.client.get("/metrics")).text
        assert 'request_success_total{engine="0",finished_reason="stop",model_name="fake/model"} 1.0' in page, page


async def test_a_slow_reader_holds_only_himself():
    fake = engine("word " * 400, bursts=1)
    async with serving(fake, write_timeout=1) as server:
        await server.connect(PATH, {"model": MODEL, "input": "hi", "background": True, "stream": True, "request_id": "it"})
        assert (await ended(server, "resp_it"))["status"] == "completed"

