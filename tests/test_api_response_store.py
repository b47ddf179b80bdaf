"""/v1/responses that are kept: continued, shown, listed, deleted; within bounds, and each key its own."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import openai
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from answers import error_of
from fake_engine import FakeEngine
from headrace.api.response_store import ITEM_BYTES, ResponseStore, chain
from server_driver import MODEL, serving, soon
from test_api_responses import call, prompt, scripted
from test_api_tools_http import make, responses_both_ways

PATH = "/v1/responses"


def test_a_conversation_is_continued():
    api = scripted(f"<think>so</think>Well.{call('f')}", "It is two.", "Bye.")
    tools = [{"type": "function", "name": "f"}]
    first = api.ok(PATH, {"input": "ONE", "instructions": "FIRST", "tools": tools})
    assert first["store"] is True and first["previous_response_id"] is None
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "TWO"}
    second = api.ok(PATH, {"input": [output], "previous_response_id": first["id"], "instructions": "SECOND", "tools": tools})
    shown = prompt(api)
    order = ["SECOND", "ONE", "Well.so", "'f'", "TWO"]
    assert [shown.index(text) for text in order] == sorted(shown.index(text) for text in order) and "FIRST" not in shown
    third = api.ok(PATH, {"input": "THREE", "previous_response_id": second["id"]})
    shown = prompt(api)
    assert "SECOND" not in shown and "TOOLS" not in shown and third["previous_response_id"] == second["id"]
    order = ["ONE", "TWO", "It is two.", "THREE"]
    assert [shown.index(text) for text in order] == sorted(shown.index(text) for text in order)
    assert api.request("GET", f"{PATH}/{third['id']}").json() == third


def referred(*items: dict) -> list[dict]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def test_items_of_answers_are_referred_to():
    """As clients do that keep the conversation by its ids: what the model is shown is the same."""
    api = scripted(f"<think>so</think>Well.{call('f')}", "It is two.", "It is two.", "Bye.")
    tools = [{"type": "function", "name": "f"}]
    items = api.ok(PATH, {"input": "ONE", "tools": tools})["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    one, two = {"role": "user", "content": "ONE"}, {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "TWO"}
    api.ok(PATH, {"input": [one, *items, two], "tools": tools})
    whole = prompt(api)
    body = {"input": [one, *referred(*items[:2]), {"id": items[2]["id"]}, two], "tools": tools}
    assert api.ok(f"{PATH}/input_tokens", body)["input_tokens"] == len(api.engine.prompts[-1])
    second = api.ok(PATH, body)
    assert prompt(api) == whole
    listed = api.request("GET", f"{PATH}/{second['id']}/input_items?order=asc").json()["data"]
    assert listed[1:4] == items, "what is kept has them in full"
    api.ok(PATH, {"input": referred(*second["output"]), "previous_response_id": second["id"]})
    for wrong, status, code in (
        (referred(items[0], items[0]), 400, "invalid_value"), (referred({"id": "rs_none"}), 404, "item_not_found"),
        (referred(listed[0]), 404, "item_not_found"), ([{"type": "item_reference"}], 400, "missing_required_parameter"),
    ):  # fmt: skip
        error = error_of(answer := api.post(PATH, {"input": wrong}))
        assert (answer.status_code, error["code"], error["param"]) == (status, code, f"input[{len(wrong) - 1}].id")
    first = api.app.state.api.responses.having(0, items[0]["id"])
    assert api.request("DELETE", f"{PATH}/{first.key[1]}").status_code == 200
    assert api.post(PATH, {"input": referred(items[1])}).status_code == 404
    assert [item["id"] for item in listed[1:4]] == [item["id"] for item in items]


def test_tools_that_stood_in_the_input_stay():
    api = scripted("x", call("n__f"))
    tools = [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}]
    first = api.ok(PATH, {"input": [{"type": "additional_tools", "tools": tools}, {"role": "user", "content": "hi"}]})
    (item,) = api.ok(PATH, {"input": "go", "previous_response_id": first["id"]})["output"]
    assert (item["namespace"], item["name"]) == ("n", "f")


def test_streamed_responses_are_kept_as_they_ended():
    api = make("text" * 10)
    for most in (5, 100):
        final = api.events(PATH, {"input": "hi", "max_output_tokens": most})[-1]["response"]
        assert final["store"] is True and api.request("GET", f"{PATH}/{final['id']}").json() == final
    whole = responses_both_ways(api, {"input": "hi", "previous_response_id": final["id"]})
    assert whole["previous_response_id"] == final["id"]
    failing = make("text" * 10)
    failing.engine.fail = lambda n: "error" if n else None
    failed = failing.events(PATH, {"input": "hi"})[-1]["response"]
    assert failed["status"] == "failed" and failing.request("GET", f"{PATH}/{failed['id']}").json() == failed


def test_what_is_not_to_be_kept_is_not():
    api = make("x")
    response = api.ok(PATH, {"input": "hi", "store": False})
    assert response["store"] is False and not len(api.app.state.api.responses)
    assert api.request("GET", f"{PATH}/{response['id']}").status_code == 404
    error = error_of(answer := api.post(PATH, {"input": "hi", "previous_response_id": response["id"]}))
    assert answer.status_code == 404 and (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_a_server_that_keeps_nothing_says_so():
    api = make("x", responses_store_bytes=0)
    response = responses_both_ways(api, {"input": "hi"})
    assert response["store"] is False and api.request("GET", f"{PATH}/{response['id']}").status_code == 404
    error = error_of(api.post(PATH, {"input": "hi", "previous_response_id": response["id"]}))
    assert error["param"] == "previous_response_id" and "keeps no responses" in error["message"]
    error = error_of(api.post(PATH, {"input": referred({"id": "msg_x"})}))
    assert error["param"] == "input[0].type" and "keeps no responses" in error["message"]


def test_what_is_too_large_is_answered_and_not_kept():
    api = make("x" * 50, responses_store_bytes=2500)
    assert responses_both_ways(api, {"input": "hi" * 900})["store"] is False  # it does not even begin
    assert responses_both_ways(api, {"input": "hi", "metadata": {"k": "v" * 2000}})["store"] is False  # it does not fit at its end
    assert responses_both_ways(api, {"input": "hi"})["store"] is True
    store = api.app.state.api.responses
    assert 0 < store.num_bytes <= 2500


def test_deleting():
    api = make("x")
    first = api.ok(PATH, {"input": "hi"})
    second = api.ok(PATH, {"input": "hi", "previous_response_id": first["id"]})
    assert api.request("DELETE", f"{PATH}/{first['id']}").json() == {"id": first["id"], "object": "response.deleted", "deleted": True}
    for method in ("GET", "DELETE"):
        answer = api.request(method, f"{PATH}/{first['id']}")
        assert answer.status_code == 404 and error_of(answer)["code"] == "response_not_found"
    assert api.request("GET", f"{PATH}/{second['id']}").json() == second
    error = error_of(api.post(PATH, {"input": "hi", "previous_response_id": second["id"]}))
    assert error["code"] == "previous_response_not_found"  # its beginning is gone


def test_input_items_in_pages():
    api = make("x")
    items = [{"role": "user", "content": f"{i}"} for i in range(45)]
    response = api.ok(PATH, {"input": [*items, {"type": "message", "id": "msg_mine", "role": "user", "content": "last"}]})
    url = f"{PATH}/{response['id']}/input_items"
    for order in ("asc", "desc"):
        seen, after = [], ""
        while True:
            page = api.request("GET", f"{url}?order={order}&limit=20{after}").json()
            seen += page["data"]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        texts = [item["content"] for item in seen]
        assert texts == [*map(str, range(45)), "last"][:: 1 if order == "asc" else -1]
        assert len({item["id"] for item in seen}) == 46 and {item["type"] for item in seen} == {"message"}
    assert api.request("GET", url).json()["data"][0]["id"] == "msg_mine"
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
        answer = api.request("GET", f"{url}?{query}")
        assert answer.status_code == 400 and error_of(answer)["param"] == param


def test_what_is_not_served_is_refused():
    api = make("x")
    response_id = api.ok(PATH, {"input": "hi"})["id"]
    for query in ("stream=true", "starting_after=3"):
        answer = api.request("GET", f"{PATH}/{response_id}?{query}")
        assert answer.status_code == 400 and error_of(answer)["param"] == query.split("=")[0]
    assert api.request("POST", f"{PATH}/{response_id}/cancel").status_code == 400
    assert api.request("POST", f"{PATH}/resp_none/cancel").status_code == 404


def test_each_key_sees_its_own():
    api = make("x", api_keys=("a", "b"))

    def ask(key: str, method: str, path: str, body: dict | None = None):
        return api.request(method, path, json=body and {"model": MODEL, **body}, headers={"authorization": f"Bearer {key}"})

    mine = ask("a", "POST", PATH, {"input": "hi", "request_id": "same"}).json()
    assert ask("b", "POST", PATH, {"input": "yours", "request_id": "same"}).json()["id"] == mine["id"]
    assert ask("a", "GET", f"{PATH}/{mine['id']}/input_items").json()["data"][0]["content"][0]["text"] == "hi"
    other = ask("a", "POST", PATH, {"input": "hi"}).json()["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert ask("b", method, f"{PATH}/{other}{path}").status_code == 404
    assert ask("b", "POST", PATH, {"input": "hi", "previous_response_id": other}).status_code == 404
    assert ask("a", "GET", f"{PATH}/{other}").status_code == 200


async def test_while_it_runs_and_when_its_client_leaves():
    engine = FakeEngine(script=lambda ids, params: "text" * 20)
    async with serving(engine) as server:
        engine.gate.clear()
        body = {"model": MODEL, "input": "hi", "request_id": "it", "stream": True}
        _, writer = await server.connect(PATH, body)
        await soon(lambda: engine.active)
        shown = (await server.client.get(f"{PATH}/resp_it")).json()
        assert (shown["status"], shown["output"], shown["store"]) == ("in_progress", [], True)
        assert (await server.client.delete(f"{PATH}/resp_it")).status_code == 400
        error = error_of(await server.client.post(PATH, json={"model": MODEL, "input": "x", "previous_response_id": "resp_it"}))
        assert "in progress" in error["message"]
        writer.transport.abort()
        await server.idle()
        assert (await server.client.get(f"{PATH}/resp_it")).status_code == 404
        whole = asyncio.create_task(server.client.post(PATH, json={**body, "stream": False}))
        await soon(lambda: engine.active)
        assert (await server.client.get(f"{PATH}/resp_it")).json()["status"] == "in_progress"
        engine.gate.set()
        assert (await server.client.get(f"{PATH}/resp_it")).json()["id"] == (await whole).json()["id"]


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_one_that_runs(stream):
    engine = FakeEngine(script=lambda ids, params: "text" * 999, bursts=1, delay=0.002)
    async with serving(engine) as server:
        reader, writer = await server.connect(PATH, {"model": MODEL, "input": "hi", "request_id": "it", "stream": stream})
        await soon(lambda: engine.active)
        data = b""
        while stream and b"output_text.delta" not in data:
            data += await asyncio.wait_for(reader.read(2**16), 20)
        cancelled = await server.client.post(f"{PATH}/resp_it/cancel")
        shown = cancelled.json()
        assert (cancelled.status_code, shown["status"], shown["id"], shown["output"]) == (200, "cancelled", "resp_it", [])
        while not data.endswith(b"0\r\n\r\n" if stream else b"}"):
            data += await asyncio.wait_for(reader.read(2**16), 20)
        writer.close()
        await server.idle()
        assert engine.aborted
        if stream:
            *_, error, failed = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
            assert (error["type"], error["code"], failed["type"]) == ("error", "cancelled", "response.failed")
            assert failed["response"] == shown
        else:
            assert data.startswith(b"HTTP/1.1 409 ") and b'"code":"cancelled"' in data
        assert (await server.client.get(f"{PATH}/resp_it")).json() == shown
        store = server.app.state.api.responses
        assert store.num_bytes == sum(stored.size for stored in store._kept.values())
        again = await server.client.post(f"{PATH}/resp_it/cancel")
        assert again.status_code == 400 and "has ended" in error_of(again)["message"]
        body = {"model": MODEL, "input": "x", "previous_response_id": "resp_it", "max_output_tokens": 2}
        assert (await server.client.post(PATH, json=body)).status_code == 200


async def test_cancelling_one_for_which_there_is_no_room():
    engine = FakeEngine()
    async with serving(engine, responses_store_bytes=700) as server:
        engine.gate.clear()
        asked = asyncio.create_task(server.client.post(PATH, json={"model": MODEL, "input": "hi", "request_id": "it"}))
        await soon(lambda: engine.active)
        shown = (await server.client.post(f"{PATH}/resp_it/cancel")).json()
        assert (shown["id"], shown["status"], shown["store"]) == ("resp_it", "cancelled", False)
        assert (await asked).status_code == 409 and not server.app.state.api.responses.num_bytes


async def test_by_the_sdk():
    engine = FakeEngine(script=lambda ids, params: "ok")
    async with serving(engine) as server, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k", max_retries=0) as client:
        first = await client.responses.create(model=MODEL, input="ONE")
        second = await client.responses.create(model=MODEL, input="TWO", previous_response_id=first.id)
        assert "ONE" in engine.tokenizer.decode(engine.prompts[-1]) and (await client.responses.retrieve(second.id)) == second
        assert [item.content[0].text async for item in client.responses.input_items.list(second.id)] == ["TWO"]
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(first.id)


class Bounds(RuleBasedStateMachine):
    """Whatever comes, the bounds hold, what runs stays, and what is kept can be continued from its beginning."""

    def __init__(self):
        super().__init__()
        self.store = ResponseStore(400 + 2 * ITEM_BYTES, 6)
        self.running, self.ended, self.deleted, self.count = [], [], set(), 0
        self.grown = Counter()

    def resource(self, size: int) -> bytes:
        self.count += 1
        output = b'{"id":"i%d"}' % self.count if size % 2 else b""
        return b'{"output":[' + output + b'],"x":"' + b"x" * size + b'"}'

    @rule(size=st.integers(0, 120), reserve=st.sampled_from([0, 64]), data=st.data())
    def begin(self, size, reserve, data):
        kept = [s for s in self.ended if not s.gone and chain(s) is not None]
        previous = data.draw(st.sampled_from([None, *kept]))
        self.count += 1
        there = set(self.store._kept.values())
        stored = self.store.begin((0, f"{self.count}"), [{"x": "x" * size}], previous, dict, reserve)
        if stored is not None:
            self.running.append(stored)
        else:
            assert set(self.store._kept.values()) == there, "for nothing"

    @rule(size=st.integers(0, 120), data=st.data())
    def end(self, size, data):
        if self.running:
            stored = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            there = set(self.store._kept.values())
            if self.store.end(stored, self.resource(size)):
                self.ended.append(stored)
                return
            assert set(self.store._kept.values()) == there
            if stored.reserve:
                assert size % 2 or size > 40
                self.running.append(stored)
            else:
                self.store.release(stored)

    @rule(size=st.integers(-60, 120), data=st.data())
    def grow(self, size, data):
        if kept := list(self.store._kept.values()):
            stored = data.draw(st.sampled_from(kept))
            size = max(size, -self.grown[stored])
            if self.store.grow(stored, size):
                self.grown[stored] += size
            else:
                assert size > 0 and list(self.store._kept.values()) == kept
            assert not stored.gone

    @rule(data=st.data())
    def leave(self, data):
        if self.running:
            self.store.release(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(data=st.data())
    def delete(self, data):
        if kept := [s for s in self.ended if not s.gone]:
            stored = data.draw(st.sampled_from(kept))
            self.deleted.add(stored)
            self.store.remove(stored)

    @invariant()
    def bounds(self):
        assert self.store.num_bytes <= 400 + 2 * ITEM_BYTES and len(self.store) <= 6
        kept = list(self.store._kept.values())
        assert set(self.store._by_item.values()) == {s for s in kept if s.ids} and all((0, i) in self.store._by_item for s in kept for i in s.ids)
        assert self.store.num_bytes == sum(s.size for s in kept)
        assert all(not s.gone and s in kept for s in self.running)
        for s in kept:
            assert s.children == sum(other.previous is s for other in kept)
            link = s.previous
            while link is not None:
                assert not link.gone or link in self.deleted
                link = link.previous


TestBounds = Bounds.TestCase


def test_the_least_recently_used_end_goes_first():
    store = ResponseStore(10**6, 4)

    def add(name: str, previous=None):
        stored = store.begin((0, name), [], previous, dict)
        assert stored is not None and store.end(stored, b'{"output":[]}')
        return stored

    a = add("a")
    b = add("b", a)
    c, d = add("c"), add("d")
    store.find((0, "c"))
    e = add("e")
    assert b.gone and not a.gone and not c.gone  # a stood longest, but b was its end
    store.find((0, "a"))
    f = add("f")
    assert d.gone and not any(s.gone for s in (a, c, e, f))


def test_for_what_has_no_room_in_any_case_nothing_goes():
    """A conversation that goes on stays, whatever else is asked for."""
    store = ResponseStore(1000)

    def add(name: str, size: int):
        stored = store.begin((0, name), [], None, dict)
        assert stored is not None and store.end(stored, b'{"output":[]%s}' % (b" " * size))
        return stored

    begun, other = add("begun", 500), add("other", 200)
    running = store.begin((0, "running"), [], begun, dict)
    assert running is not None and store.begin((0, "new"), [{"x": "x" * 700}], None, dict) is None and not other.gone
    assert not store.grow(running, 700) and not store.end(running, b'{"output":[]%s}' % (b" " * 700)) and not other.gone
    assert store.grow(running, 400) and other.gone and not begun.gone
    assert store.end(running, b'{"output":[]}') and not store.grow(begun, 500) and not running.gone
