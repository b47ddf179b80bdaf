"""Several models in one server, over HTTP with engines without models: every API finds its own, whatever is in memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import httpx
import pytest

from headrace.several_models.app import keep_alive_seconds
from headrace.several_models.switch import State
from server_driver import soon
from several_world import World

HI = [{"role": "user", "content": "hi"}]
GENERATING = {
    "/v1/chat/completions": {"messages": HI}, "/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 64}, "/generate": {"prompt": "hi"},
    "/api/chat": {"messages": HI, "stream": False}, "/api/generate": {"prompt": "hi", "stream": False},
}  # fmt: skip
ENDS = {"/v1/chat/completions": "[DONE]", "/v1/responses": "response.completed", "/api/chat": '"done":true'}
OTHERS = {
    "/v1/embeddings": {"input": "hi"}, "/v1/rerank": {"query": "q", "documents": ["a", "b"]}, "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [104]}, "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/api/embed": {"input": "hi"}, "/api/embeddings": {"prompt": "hi"},
}  # fmt: skip


def over_http(test, **options) -> None:
    """Run with a world, which ends well."""

    async def all_of_it() -> None:
        world = World(**options)
        await world.models.start()
        try:
            await test(world)
        finally:
            await world.http.aclose()
            await world.models.close()
        assert all(client.closed and not client.active for client in world.clients)
        assert not any(entry.users or entry.waiters for entry in world.models.entries)

    asyncio.run(all_of_it())


# ---------------------------------------------------------------- which model


def test_every_api_is_answered_by_the_model_that_it_names():
    async def check(world: World) -> None:
        for path, body in GENERATING.items():
            for name, says in (("a", "I am a."), ("b", "I am b."), ("alias:7b", "I am a.")):
                answer = await world.ok(path, {**body, "model": name})
                assert says in answer.text, (path, answer.text)
                if path != "/generate":
                    assert answer.json()["model"] == name
        for path, body in OTHERS.items():
            for number, name in enumerate("ab"):
                await world.ok(path, {**body, "model": name})
                assert world.models.entries[number].state is State.LOADED

    over_http(check)


def test_a_model_that_is_loaded_again_is_the_one_that_was_found_at_the_start():
    """Not what the Hub has by then: the first client knows the commit."""

    async def check(world: World) -> None:
        world.models.served[0].client.config = dataclasses.replace(world.models.served[0].client.config, revision="c0ffee")
        for name in "aba":
            await world.ok("/v1/completions", {"model": name, "prompt": "hi"})
        assert [client.config.revision for client in world.clients if client.model_name == "a"] == ["c0ffee", "c0ffee"]

    over_http(check)


def test_streams_hold_their_model_until_their_end():
    async def check(world: World) -> None:
        for path in ("/v1/chat/completions", "/v1/responses", "/api/chat"):
            await world.ok("/v1/completions", {"model": "a", "prompt": "hi"})
            client = world.models.served[0].client
            client.gate.clear()
            stream = asyncio.create_task(world.ok(path, {**GENERATING[path], "model": "a", "stream": True}))
            await soon(lambda client=client: client.active)
            other = asyncio.create_task(world.ok("/v1/completions", {"model": "b", "prompt": "hi"}))
            await soon(lambda: world.models.entries[1].waiters)
            assert world.states() == ["loaded", "unloaded"] and not client.closed
            client.gate.set()
            assert ENDS[path] in (await stream).text
            await other
            assert world.states() == ["unloaded", "loaded"]

    over_http(check)


def test_a_response_in_the_background_holds_its_model_until_its_end():
    async def check(world: World) -> None:
        for stream in (False, True):
            await world.ok("/v1/completions", {"model": "a", "prompt": "hi"})
            client = world.models.served[0].client
            client.gate.clear()
            asked = asyncio.create_task(world.ok("/v1/responses", {"model": "a", "input": "hi", "background": True, "stream": stream, "request_id": "it"}))
            await soon(lambda client=client: client.active)
            other = asyncio.create_task(world.ok("/v1/completions", {"model": "b", "prompt": "hi"}))
            await soon(lambda: world.models.entries[1].waiters)
            assert world.states() == ["loaded", "unloaded"] and asked.done() is not stream
            client.gate.set()
            await asyncio.gather(asked, other)
            assert world.states() == ["unloaded", "loaded"]
            shown = (await world.http.get("/v1/responses/resp_it")).json()
            assert shown["status"] == "completed" and shown["output"][0]["content"][0]["text"] == "I am a."
        assert not world.models.entries[0].users

    over_http(check)


def test_a_name_that_no_model_has_is_a_404_in_the_form_of_each_api_and_loads_nothing():
    async def check(world: World) -> None:
        for path, body in {**GENERATING, **OTHERS}.items():
            answer = await world.http.post(path, json={**body, "model": "c"})
            assert answer.status_code == 404, path
            error = answer.json()["error"]
            assert error == "model 'c' not found" if path.startswith("/api/") else "`c` does not exist" in error["message"]
        assert (await world.http.get("/v1/models/c")).status_code == 404
        assert world.states() == ["unloaded"] * 2

    over_http(check)


def test_an_adapters_name_means_its_model_and_survives_it():
    """The second model's adapters come, answer, stay while it is not loaded, and go; nobody's name is given to another."""

    async def check(world: World) -> None:
        async def post(path: str, **body) -> tuple[int, str]:
            answer = await world.http.post(path, json=body, headers={"authorization": "Bearer boss"})
            return answer.status_code, answer.text

        async def load(name: str, **more) -> tuple[int, str]:
            return await post("/v1/load_lora_adapter", lora_name=name, lora_path=f"/{name}", **more)

        status, text = await load("x")
        assert status == 400 and "a name is needed" in text
        assert (await load("x", model="b"))[0] == 200 and (await load("y", model="x"))[0] == 200
        for taken in ("a", "alias:7b"):
            status, text = await load(taken, model="b")
            assert status == 400 and "another model of this server" in text
        assert (await load("b", model="b"))[0] == 400
        asked = {"prompt": "hi"}
        for _ in range(2):  # the first takes the second model's place
            assert "I am a." in (await world.ok("/v1/completions", {**asked, "model": "a"})).text
            assert world.states() == ["loaded", "unloaded"]
            cards = {card["id"]: card for card in (await world.http.get("/v1/models")).json()["data"]}
            assert [*cards] == ["a", "alias:7b", "b", "x", "y"] and (cards["x"]["parent"], cards["x"]["root"]) == ("b", "/x")
            assert (await load("x", model="a"))[0] == 400
            for path, body in GENERATING.items():
                assert "I am b with x." in (await world.ok(path, {**body, "model": "x"})).text, path
        assert (await world.http.get("/v1/models/y")).json()["id"] == "y"
        assert (await load("x"))[0] == 200, "of the model that has it"
        assert (await post("/v1/unload_lora_adapter", lora_name="x"))[0] == 200
        assert (await world.http.post("/v1/completions", json={**asked, "model": "x"})).status_code == 404
        assert (await load("x", model="a"))[0] == 200 and (await post("/v1/embeddings", input="hi", model="x"))[0] == 400
        for name, model in (("alias:7b:latest", "b"), ("b:latest", "a"), ("z", "a"), ("z:latest", "b")):
            assert (await load(name, model=model))[0] == 200
            assert f"I am {model} with {name}." in (await world.ok("/v1/completions", {**asked, "model": name, "max_tokens": 99})).text, "as it is written"
        for name, said in (("alias:7b", "I am a."), ("b", "I am b."), ("z", "I am a with z.")):
            assert said in (await world.ok("/v1/completions", {**asked, "model": name})).text

    over_http(check, admin_keys=("boss",))


def test_without_a_name_the_default_answers_or_the_names_are_told():
    async def refused(world: World) -> None:
        answer = await world.http.post("/v1/completions", json={"prompt": "hi"})
        assert answer.status_code == 400 and "a, alias:7b, b" in answer.text and answer.json()["error"]["param"] == "model"
        assert (await world.http.post("/v1/completions", json={"prompt": "hi", "model": ""})).status_code == 404
        answer = await world.http.post("/v1/completions", json={"prompt": "hi", "model": 7})
        assert answer.status_code == 400 and "model: Expected `str | null`, got `int`" in answer.text

    async def default(world: World) -> None:
        assert "I am b." in (await world.ok("/v1/completions", {"prompt": "hi"})).text
        assert (await world.http.post("/v1/completions", json={"prompt": "hi", "model": "gpt-4"})).status_code == 404

    async def any_name(world: World) -> None:
        answer = await world.ok("/v1/completions", {"prompt": "hi", "model": "gpt-4"})
        assert "I am b." in answer.text and answer.json()["model"] == "b"
        assert "I am a." in (await world.ok("/v1/completions", {"prompt": "hi", "model": "a"})).text
        assert (await world.http.get("/v1/models/gpt-4")).json()["id"] == "b"

    over_http(refused)
    over_http(default, default="b")
    over_http(any_name, default="b", any_name=True)


def test_ollama_finds_models_with_and_without_a_tag():
    async def check(world: World) -> None:
        for name in ("b", "b:latest", "alias:7b"):
            assert (await world.ok("/api/chat", {"messages": HI, "model": name, "stream": False})).json()["model"] == name
        assert (await world.http.post("/api/chat", json={"messages": HI, "model": "alias"})).status_code == 404

    over_http(check)


def test_a_kept_response_is_found_and_continued_by_whichever_model():
    async def check(world: World) -> None:
        first = (await world.ok("/v1/responses", {"model": "a", "input": "hi"})).json()
        second = (await world.ok("/v1/responses", {"model": "b", "input": "and?", "previous_response_id": first["id"]})).json()
        assert world.states() == ["unloaded", "loaded"] and "I am a." in world.clients[1].tokenizer.decode(world.clients[1].prompts[-1])
        for one in (first, second):
            assert (await world.http.get(f"/v1/responses/{one['id']}")).json()["model"] == one["model"]
        assert (await world.http.delete(f"/v1/responses/{second['id']}")).status_code == 200

    over_http(check)


# ---------------------------------------------------------------- what is said of them


def test_lists_tell_states_and_nobody_who_asks_what_there_is_loads_anything():
    async def check(world: World) -> None:
        for path in ("/v1/models", "/v1/models/alias:7b", "/api/tags", "/api/ps", "/ready", "/health", "/metrics", "/glass/events"):
            await world.http.get(path)
        shown = (await world.ok("/api/show", {"model": "a"})).json()
        assert shown["model_info"]["llama.context_length"] == 4096 and "completion" in shown["capabilities"]
        assert world.states() == ["unloaded"] * 2 and (await world.http.get("/api/ps")).json() == {"models": []}
        await world.ok("/v1/completions", {"model": "alias:7b", "prompt": "hi"})
        world.held.clear()
        waiting = asyncio.create_task(world.ok("/v1/completions", {"model": "b", "prompt": "hi"}))
        await soon(lambda: world.states() == ["unloaded", "loading"])
        cards = {card["id"]: card for card in (await world.http.get("/v1/models")).json()["data"]}
        assert {name: card["state"] for name, card in cards.items()} == {"a": "unloaded", "alias:7b": "unloaded", "b": "loading"}
        world.held.set()
        await waiting
        assert (await world.http.get("/v1/models/b")).json()["state"] == "loaded"
        [running] = (await world.http.get("/api/ps")).json()["models"]
        assert running["model"] == "b:latest" and running["expires_at"].startswith("9999")
        assert [m["model"] for m in (await world.http.get("/api/tags")).json()["models"]] == ["a:latest", "alias:7b", "b:latest"]
        anthropic = (await world.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert [m["id"] for m in anthropic["data"]] == ["a", "alias:7b", "b"] == [anthropic["first_id"], "alias:7b", anthropic["last_id"]]

    over_http(check)


def test_the_server_is_ready_when_its_pinned_models_are_loaded():
    async def check(world: World) -> None:
        await soon(lambda: world.states()[0] == "loaded")
        assert (await world.http.get("/ready")).json() == {"ready": True, "draining": False, "models": {"a": "loaded", "b": "unloaded"}}
        world.models.served[0].client.state.progressing = False
        assert (await world.http.get("/ready")).status_code == 503
        world.models.draining = True
        assert (await world.http.get("/health")).status_code == 200
        assert (await world.http.post("/v1/completions", json={"model": "a", "prompt": "hi"})).json()["error"]["code"] == "draining"

    async def none_is(world: World) -> None:
        assert (await world.http.get("/ready")).status_code == 200

    over_http(check, pinned="a", room=2)
    over_http(none_is)


def test_metrics_have_each_model_by_its_label_and_never_go_back():
    async def page(world: World) -> dict[str, str]:
        answer = await world.http.get("/metrics")
        assert answer.status_code == 200, answer.text
        assert len([line for line in answer.text.splitlines() if line.startswith("# TYPE headrace:http_responses_total")]) == 1
        return dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))

    async def check(world: World) -> None:
        for name in "aabbb":
            await world.ok("/v1/completions", {"model": name, "prompt": "hi"})
        for _ in range(2):
            found = await page(world)
            for name, count in (("a", "2.0"), ("b", "3.0")):
                assert found[f'headrace:request_success_total{{engine="0",finished_reason="stop",model_name="{name}"}}'] == count
                assert found[f'headrace:model_loads_total{{model_name="{name}"}}'] == "1.0"
            assert found['headrace:http_responses_total{path="/v1/completions",status="200"}'] == "5.0", "of the server, of no model"
            assert [k for k, v in found.items() if "model_state" in k and v == "1.0"] == [
                f'headrace:model_state{{model_name="{name}",state="{state}"}}' for name, state in zip("ab", world.states(), strict=True)
            ]
            await world.ok("/api/generate", {"model": "b", "keep_alive": 0})
            await soon(lambda: world.states() == ["unloaded"] * 2)

    over_http(check)


# ---------------------------------------------------------------- who waits, who is refused


def test_a_load_that_fails_is_a_503_with_its_reason_and_leaves_the_others_alone():
    async def check(world: World) -> None:
        world.broken["b"] = "weights take 5.00 GiB"
        await world.ok("/v1/completions", {"model": "a", "prompt": "hi"})
        for _ in range(2):
            answer = await world.http.post("/v1/completions", json={"model": "b", "prompt": "hi"})
            assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 5
            assert answer.json()["error"]["code"] == "model_load_failed" and "weights take 5.00 GiB" in answer.text
        card = (await world.http.get("/v1/models/b")).json()
        assert card["state"] == "failed" and "5.00" in card["error"]
        await world.ok("/v1/completions", {"model": "a", "prompt": "hi"})
        assert len(world.clients) == 2, "it was not tried at each request"

    over_http(check, room=2)


def test_too_many_who_wait_are_refused_at_once_and_a_deadline_or_a_client_ends_waiting():
    async def check(world: World) -> None:
        world.held.clear()
        body = {"model": "a", "prompt": "hi"}
        waiting = [asyncio.create_task(world.http.post("/v1/completions", json=body)) for _ in range(2)]
        await soon(lambda: world.models.switch.num_waiting == 2)
        answer = await world.http.post("/v1/completions", json=body)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_queue_full" and "retry-after" in answer.headers
        waiting[0].cancel()
        await soon(lambda: world.models.switch.num_waiting == 1)
        late = await world.http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.05"})
        assert late.status_code == 504 and world.models.switch.num_waiting == 1
        world.held.set()
        assert (await waiting[1]).status_code == 200

    over_http(check, max_waiting=2)


def test_a_client_that_hangs_up_while_its_model_loads_waits_no_longer():
    async def check(world: World) -> None:
        world.held.clear()
        messages = [{"type": "http.request", "body": b'{"model":"a","prompt":"hi"}'}, {"type": "http.disconnect"}]
        gone, sent = asyncio.Event(), []

        async def receive():
            if len(messages) == 1:
                await gone.wait()
            return messages.pop(0)

        async def send(message) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": [],
            "client": None, "server": None, "scheme": "http", "root_path": "", "http_version": "1.1", "asgi": {"version": "3.0"}, "state": {},
        }  # fmt: skip
        request = asyncio.create_task(world.app(scope, receive, send))
        await soon(lambda: world.models.switch.num_waiting == 1)
        bodies = world.app.state.api.bodies
        assert bodies.held == len(b'{"model":"a","prompt":"hi"}'), "of those who wait, too"
        gone.set()
        await request
        assert world.models.switch.num_waiting == 0 and not sent and bodies.held == 0
        world.held.set()

    over_http(check)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": "a", "model": "b", "prompt": "hi"}', b'{"model": "a", "prompt": "\xff"}'])
def test_a_body_that_is_none_is_a_400(body):
    async def check(world: World) -> None:
        answer = await world.http.post("/v1/completions", content=body)
        assert answer.status_code == 400, answer.text

    over_http(check)


def test_neither_strangers_nor_pages_of_other_sites_have_models_loaded():
    async def check(world: World) -> None:
        body = json.dumps({"model": "a", "prompt": "hi"})
        assert (await world.http.post("/v1/completions", content=body)).status_code == 401
        headers = {"authorization": "Bearer k", "origin": "http://elsewhere", "content-type": "text/plain"}
        assert (await world.http.post("/v1/completions", content=body, headers=headers)).status_code == 400
        assert world.states() == ["unloaded"] * 2
        headers = {"authorization": "Bearer k"}
        assert (await world.http.post("/v1/completions", content=body, headers=headers)).status_code == 200

    over_http(check, api_keys=("k",))


def test_an_engine_that_ends_for_good_ends_its_own_requests_alone():
    async def check(world: World) -> None:
        for name in "ab":
            await world.ok("/v1/completions", {"model": name, "prompt": "hi"})
        world.models.served[0].client.on_give_up("30 deaths of the core within 60 s")
        await soon(lambda: world.states()[0] == "failed")
        answer = await world.http.post("/v1/completions", json={"model": "a", "prompt": "hi"})
        assert answer.status_code == 503 and "30 deaths" in answer.text
        await world.ok("/v1/completions", {"model": "b", "prompt": "hi"})
        assert (await world.http.get("/ready")).status_code == 200

    over_http(check, room=2)


# ---------------------------------------------------------------- keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0), ("0", 0), (300, 300), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), (-1, -1), ("-1", -1), ("-1s", -1), ("100ms", 0.1), (None, None)],
)
def test_keep_alive_is_read_as_ollama_reads_it(value, seconds):
    assert keep_alive_seconds(value) == seconds


def test_keep_alive_unloads_keeps_and_is_refused_by_name():
    async def check(world: World) -> None:
        chat = {"model": "a", "messages": HI, "stream": False}
        for keep in (0, "0s"):
            await world.ok("/api/chat", {**chat, "keep_alive": keep})
            await soon(lambda: world.states()[0] == "unloaded")
        loaded = (await world.ok("/api/generate", {"model": "a", "keep_alive": "10m"})).json()
        assert loaded["done_reason"] == "load" and world.states()[0] == "loaded"
        [running] = (await world.http.get("/api/ps")).json()["models"][:1]
        assert not running["expires_at"].startswith("9999")
        gone = (await world.ok("/api/generate", {"model": "a", "keep_alive": 0})).json()
        assert (gone["done_reason"], gone["response"]) == ("unload", "")
        await soon(lambda: world.states()[0] == "unloaded")
        count = len(world.clients)
        assert (await world.ok("/api/chat", {"model": "b", "messages": [], "keep_alive": 0})).json()["done_reason"] == "unload"
        assert len(world.clients) == count and world.states()[1] == "unloaded", "what is not loaded is not loaded for that"
        for bad in ("soon", True, [], "5 parsecs", 1e300):
            answer = await world.http.post("/api/chat", json={**chat, "keep_alive": bad})
            assert answer.status_code == 400 and "keep_alive" in answer.text, bad

    over_http(check)


def test_the_page_sees_the_engine_of_the_model_that_it_asks_for():
    async def check(world: World) -> None:
        assert (await world.http.get("/glass/events?model=b")).status_code == 503
        assert (await world.http.get("/glass/events?model=c")).status_code == 404
        assert (await world.http.get("/glass/text?id=x")).status_code == 403
        await world.ok("/v1/completions", {"model": "b", "prompt": "hi"})
        answer = await world.http.get("/glass/events?model=b&core=7")
        assert answer.status_code == 400 and "core: one of 0" in answer.text
        with contextlib.suppress(httpx.HTTPError):
            await world.http.get("/page/app.js")

    over_http(check, room=2)
