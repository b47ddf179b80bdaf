"""Ollama's API, by Ollama's own client."""

from __future__ import annotations

import json
import re
from datetime import datetime

import httpx
import ollama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engine import TEMPLATE, FakeEngine
from headrace.api.ollama_input import Call, CallFunction, Message, conversation
from headrace.config import EngineConfig
from server_driver import LOOP, MODEL, Api
from structured_driver import compiled, takes

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {
    "name": "f", "description": "does f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ü😀"}}\n</tool_call>'
VARIES = ("created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
PLAIN = TEMPLATE + "{# nothing #}"


def make(text: str = "Hello.", template: str = TEMPLATE + "{# <tool_call> </think> #}", **options) -> Api:
    engine = FakeEngine(script=lambda ids, params: text)
    engine.supports_structured = True
    engine.tokenizer.chat_templates = {"default": template}
    return Api(engine, **options)


def call(api: Api, name: str, *args, **fields):
    """A method of the client; of a stream all that comes."""

    async def work():
        async with ollama.AsyncClient("http://test", transport=httpx.ASGITransport(api.app)) as c:
            found = await getattr(c, name)(*args, **fields)
            return [piece async for piece in found] if fields.get("stream") else found

    return LOOP.run(work())


def chat(api: Api, **fields):
    return call(api, "chat", **{"model": MODEL, "messages": HI, **fields})


def generate(api: Api, **fields):
    return call(api, "generate", **{"model": MODEL, "prompt": "hi", **fields})


def joined(pieces: list) -> dict:
    """The pieces put together as the whole answer has them; checks that the last one ends it, and no other."""
    assert [p["done"] or False for p in pieces] == [False] * (len(pieces) - 1) + [True]
    found = pieces[-1].model_dump(exclude_none=True)
    parts = [p.model_dump(exclude_none=True) for p in pieces]
    if "message" in found:
        messages = [p["message"] for p in parts]
        found["message"] = {"role": "assistant", "content": "".join(m.get("content", "") for m in messages)}
        if thinking := "".join(m.get("thinking", "") for m in messages):
            found["message"]["thinking"] = thinking
        if calls := [c for m in messages for c in m.get("tool_calls", ())]:
            found["message"]["tool_calls"] = calls
    else:
        found["response"] = "".join(p["response"] for p in parts)
        if thinking := "".join(p.get("thinking", "") for p in parts):
            found["thinking"] = thinking
    if logprobs := [entry for p in parts for entry in p.get("logprobs", ())]:
        found["logprobs"] = logprobs
    return found


def both_ways(api: Api, ask=chat, **fields):
    whole, stream = ask(api, **fields), joined(ask(api, **fields, stream=True))
    expected = whole.model_dump(exclude_none=True)
    for found in (stream, expected):
        assert all(isinstance(found.pop(name), str if name == "created_at" else int) for name in VARIES)
    assert stream == expected
    return whole


def prompt(api: Api) -> str:
    return api.engine.tokenizer.decode(api.engine.prompts[-1], skip_special_tokens=False)


@pytest.mark.parametrize("ask", [chat, generate])
def test_text_and_counts(ask):
    api = make()
    answer = both_ways(api, ask)
    assert (answer.message.content if ask is chat else answer.response) == "Hello."
    assert (answer.model, answer.done, answer.done_reason) == (MODEL, True, "stop")
    assert answer.prompt_eval_count == len(api.engine.prompts[-1]) and answer.eval_count == len("Hello.") + 1
    parts = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
    assert 0 < parts <= answer.total_duration + 3
    assert "<|im_start|>user\nhi<|im_end|>" in prompt(api)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_lines_are_the_default(path):
    body = {"messages": HI} if "chat" in path else {"prompt": "hi"}
    response = make().post(path, body)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert len(lines) > 1 and lines[-1]["done"] and not any(line["done"] for line in lines[:-1])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z", lines[0]["created_at"])
    assert make().post(path, {**body, "stream": None}).headers["content-type"] == "application/x-ndjson"
    assert make().post(path, {**body, "stream": False}).headers["content-type"] == "application/json"


def test_silences_do_not_break_the_lines():
    api = make(keep_alive_interval=0.02)
    api.engine.delay = 0.1
    response = api.post("/api/chat", {"messages": HI})
    assert " " in response.text.splitlines()[0][:1]
    assert joined(chat(api, stream=True))["message"]["content"] == "Hello."


def test_thinking_and_calls():
    api = make(f"<think>so</think>Well.{CALL}{CALL}")
    message = both_ways(api, tools=[TOOL]).message
    assert (message.thinking, message.content) == ("so", "Well.")
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [("f", {"a": "ü😀"})] * 2
    assert "TOOLS" in prompt(api) and "does f" in prompt(api)
    calls = [p["message"]["tool_calls"] for p in map(json.loads, api.post("/api/chat", {"messages": HI, "tools": [TOOL]}).text.splitlines())
             if "tool_calls" in p["message"]]  # fmt: skip
    assert [c[0]["function"]["index"] for c in calls] == [0, 1] and all(c[0]["id"] for c in calls)


def test_a_call_that_was_cut_off_is_none():
    answer = both_ways(make(CALL), tools=[TOOL], options={"num_predict": 50})
    assert not answer.message.tool_calls and answer.done_reason == "length"
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # what a grammar makes comes as it is written
    body = {"messages": HI, "tools": [strict], "options": {"num_predict": 50}, "stream": False}
    message = make(CALL).ok("/api/chat", body)["message"]
    assert "tool_calls" not in message and message["content"].startswith('{"name": "f", "arguments": {"a": ')


def test_a_function_as_a_tool():
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        return city

    api = make()
    chat(api, tools=[weather])
    assert '"weather"' in prompt(api) and "where" in prompt(api)


@settings(max_examples=50)
@given(pieces=st.lists(st.sampled_from(["text ", "\n", CALL, "<tool_call>", "{", "<think>", "</think>", "é😀", "<tool_"]), max_size=6),
       most=st.integers(1, 200), tools=st.booleans(), ask=st.sampled_from([chat, generate]), logprobs=st.booleans())  # fmt: skip
def test_streamed_equals_whole(pieces, most, tools, ask, logprobs):
    more = {"tools": [TOOL]} if tools and ask is chat else {}
    more |= {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    answer = both_ways(make("".join(pieces)), ask, options={"num_predict": most}, **more)
    assert answer.eval_count == len(answer.logprobs or ()) or not logprobs


def test_a_conversation_with_results():
    calls = [Call(function=CallFunction(name="f", arguments={"a": 1})), Call(function=CallFunction(name="g")), Call(function=CallFunction(name="f"), id="x")]
    told = conversation([
        Message(role="SYSTEM", content="s"), Message(role="user", content="u"), Message(role="assistant", thinking="t", tool_calls=calls),
        Message(role="tool", content="of g", tool_name="g"), Message(role="tool", content="of f"), Message(role="tool", content="of x", tool_name="f"),
        Message(role="assistant", tool_calls=calls[:1]), Message(role="tool", content="again"), Message(role="tool", content="y", tool_call_id="y"),
    ])  # fmt: skip
    assert [m["role"] for m in told] == ["system", "user", "assistant", "tool", "tool", "tool", "assistant", "tool", "tool"]
    assert told[2]["reasoning_content"] == "t" and told[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert [c["id"] for c in told[2]["tool_calls"]] == ["call_0", "call_1", "x"]
    assert [m["tool_call_id"] for m in told if m["role"] == "tool"] == ["call_1", "call_0", "x", "call_3", "y"]


def test_the_clients_own_answer_goes_back():
    api = make(f"<think>so</think>{CALL}")
    answer = chat(api, tools=[TOOL])
    assert chat(api, tools=[TOOL], messages=[*HI, answer.message, {"role": "tool", "tool_name": "f", "content": "result"}]).done
    assert "result" in prompt(api)


def test_options():
    api = make()
    chat(api, options={"num_predict": 9.0, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 7, "stop": ["x"], "num_ctx": 4096.0,
                       "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "mirostat": 0, "typical_p": 1.0})  # fmt: skip
    p = api.engine.params[-1]
    assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.stop) == (9, 0.5, 5, 0.5, 0.1, 7, ["x"])
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.1, 0.5, 0.25)
    for unlimited in ({}, {"num_predict": -1}, {"num_predict": -2}, {"num_predict": 0}, {"num_predict": 10**6}, {"seed": -1, "stop": []}):
        chat(api, options=unlimited)
        p = api.engine.params[-1]
        assert p.max_tokens == api.engine.max_model_len - len(api.engine.prompts[-1]) and p.seed is None and not p.stop


def test_what_nobody_says_is_the_models_else_the_apis():
    api = make()
    api.engine.generation_defaults = {"temperature": 0.3}
    chat(api)
    p = api.engine.params[-1]
    assert (p.temperature, p.top_k, p.top_p) == (0.3, 40, 0.9)


def test_what_has_no_effect_is_named():
    response = make().post("/api/chat", {"messages": [{**HI[0], "mood": 1}], "keep_alive": "5m", "options": {"num_gpu": 1, "zzz": 2, "repeat_last_n": 64}})
    assert response.status_code == 200
    assert set(response.headers["x-headrace-ignored"].split(", ")) == {"messages[].mood", "options.num_gpu", "options.zzz", "options.repeat_last_n"}


@pytest.mark.parametrize(("path", "fields", "named"), [
    ("chat", {"options": {"temperature": 3}}, "options.temperature"), ("chat", {"options": {"num_predict": "x"}}, "options.num_predict"),
    ("chat", {"options": {"num_ctx": 10**6}}, "options.num_ctx"), ("chat", {"options": {"temprature": 1}}, "options.temprature"),
    ("chat", {"options": {"repetition_penalty": 1.1}}, "options.repetition_penalty"), ("chat", {"options": {"mirostat": 2}}, "options.mirostat"),
    ("chat", {"options": {"stop": [""]}}, "options.stop"), ("chat", {"options": {"stop": 5}}, "options.stop"), ("chat", {"options": []}, "options"),
    ("chat", {"options": {"seed": 2**70}}, "options.seed"), ("chat", {"options": {"num_predict": -3}}, "options.num_predict"),
    ("chat", {"format": "xml"}, "format"), ("chat", {"format": 5}, "format"), ("chat", {"think": "hard"}, "think"),
    ("chat", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("chat", {"top_logprobs": 2}, "top_logprobs"), ("chat", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"), ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, "messages[0].tool_calls[0].function.arguments"),
    ("chat", {"tools": [{"function": {"name": "bad name"}}]}, "tools[0].function.name"), ("chat", {"stream": "yes"}, "stream"),
    ("chat", {"max_tokens": 3}, "max_tokens"), ("chat", {"modle": "x"}, "modle"), ("chat", {"template": "x"}, "template"),
    ("generate", {"suffix": "x"}, "suffix"), ("generate", {"template": "x"}, "template"), ("generate", {"context": [1]}, "context"),
    ("generate", {"images": ["aGk="]}, "images"), ("generate", {"raw": True, "system": "x"}, "system"), ("generate", {"raw": True, "think": True}, "think"),
    ("generate", {"prompt": "x" * 10**5}, "prompt"), ("generate", {"system": "x" * 10**5}, "system"), ("generate", {"prompt": 5}, "prompt"),
    ("embed", {}, "input"), ("embed", {"input": 5}, "input"), ("embed", {"input": ["x" * 5000], "truncate": False}, "input"), ("embed", {"input": "x", "dimensions": 3}, "dimensions"),
    ("show", {"verbos": True}, "verbos"),
])  # fmt: skip
def test_refusals_name_the_field(path, fields, named):
    base = {"chat": {"messages": HI}, "generate": {"prompt": "hi"}}.get(path, {})
    for stream in ({"stream": False}, {}) if base and "stream" not in fields else ({},):
        response = make().post(f"/api/{path}", {**base, **stream, **fields})
        assert response.status_code == 400 and set(response.json()) == {"error"}
        assert named in response.json()["error"]


def test_neutral_values_are_no_refusals():
    both_ways(make(), generate, suffix="", template="", system="", context=[], images=[], raw=False, format="", think=False)


@pytest.mark.parametrize(("think", "shown"), [(None, "True|True|"), (True, "True|True|"), (False, "False|False|"), ("low", "True|True|low")])
def test_thinking_is_on_where_the_model_can(think, shown):
    api = make(template="{{ enable_thinking }}|{{ thinking }}|{{ reasoning_effort }}|{{ messages[0].content }}{# </think> #}")
    for ask in (chat, generate):
        ask(api, think=think)
        assert prompt(api) == shown + "|hi"
    chat(api, format="json", think=False)
    assert prompt(api) == "False|False||hi"


def test_thinking_of_a_model_that_cannot():
    api = make(template=PLAIN)
    assert chat(api, think=False).done
    with pytest.raises(ollama.ResponseError, match=f"'{MODEL}' does not support thinking") as told:
        chat(api, think=True)
    assert told.value.status_code == 400


def test_formats():
    api = make('{"a": 1}')
    both_ways(api, format="json", think=False)
    assert api.engine.params[-1].structured_outputs.json_object
    both_ways(api, generate, format={"type": "object"}, think=False)
    assert api.engine.params[-1].structured_outputs.json == {"type": "object"}
    both_ways(api, generate, format="json", raw=True)
    assert api.engine.params[-1].structured_outputs.json_object


@pytest.mark.parametrize("think", [None, True])
def test_a_format_holds_for_what_comes_behind_the_thought(think):
    api = make('<think>hm</think>\n{"a": 1}')
    for ask in (chat, generate):
        found = both_ways(api, ask, format={"type": "object"}, think=think)
        said = found.message if ask is chat else found
        assert (said.thinking, said.content if ask is chat else said.response) == ("hm", '{"a": 1}')
        matcher = compiled(grammar=api.engine.params[-1].structured_outputs.grammar)
        assert takes(matcher, '<think>hm</think>\n{"a": 1}') and not takes(matcher, "hm")


def test_raw_and_system():
    api = make("<think>as it is")
    assert both_ways(api, generate, raw=True).response == "<think>as it is" and prompt(api) == "<bos>hi"
    generate(api, system="be brief")
    assert "<|im_start|>system\nbe brief<|im_end|>" in prompt(api)


def test_nothing_to_say_loads_the_model():
    api = make()
    for answer in (chat(api, messages=[]), chat(api, messages=[], stream=True)[0], generate(api, prompt=""), call(api, "generate", MODEL, keep_alive=0)):
        assert (answer.done, answer.done_reason) == (True, "load")
    assert not api.engine.prompts


def test_names_with_a_tag():
    api = make()
    assert chat(api, model=f"{MODEL}:latest").model == f"{MODEL}:latest"
    assert chat(make(served_model_names=("m:latest",)), model="m").model == "m"
    assert chat(make(any_model_name=True), model="other").model == MODEL
    with pytest.raises(ollama.ResponseError, match="model 'other' not found") as told:
        chat(api, model="other")
    assert told.value.status_code == 404
    assert chat(api, model=f"{MODEL}:latest", stream=True)[-1].done


def test_embeddings():
    api = make()
    one, two = call(api, "embed", MODEL, "a"), call(api, "embed", MODEL, ["a", "bb"])
    assert two.embeddings[0] == one.embeddings[0] and len(two.embeddings) == 2 and two.prompt_eval_count == 5 and two.total_duration > 0
    assert abs(sum(x * x for x in one.embeddings[0]) - 1) < 1e-6
    assert call(api, "embeddings", MODEL, "a").embedding == one.embeddings[0]
    assert call(api, "embed", MODEL, []).embeddings == [] == call(api, "embed", MODEL, "").embeddings
    long = call(api, "embed", MODEL, "x" * 5000)
    assert long.prompt_eval_count == api.engine.max_model_len - 1


def test_models():
    api = make()
    [model] = call(api, "list").models
    assert (model.model, len(model.digest), model.details.family) == (f"{MODEL}:latest", 64, "llama") and isinstance(model.modified_at, datetime)
    [running] = call(api, "ps").models
    assert (running.name, running.context_length, running.digest) == (f"{MODEL}:latest", api.engine.max_model_len, model.digest)
    shown = call(api, "show", f"{MODEL}:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"] and shown.template == api.engine.tokenizer.chat_templates["default"]
    assert shown.modelinfo["llama.context_length"] == api.engine.max_model_len and shown.modelinfo["general.architecture"] == "llama"
    assert shown.parameters.splitlines() == ["temperature 0.8", "top_p 0.9", "top_k 40"]
    assert api.post("/api/show", {"model": None, "name": MODEL}).status_code == 200
    assert "thinking" not in call(make(template=PLAIN), "show", MODEL).capabilities
    version = api.request("GET", "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    for path in ("/api/version", "/api/tags"):
        assert api.request("HEAD", path).status_code == 200


@pytest.mark.parametrize(("name", "size"), [("m-00002-of-00002.gguf", 7), ("other.gguf", 16), (".", 23)])
def test_a_models_size_is_that_of_all_its_files(tmp_path, name, size):
    for number, file in enumerate(("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf", "readme")):
        (tmp_path / file).write_bytes(b"x" * (3, 4, 16, 99)[number])
    api = make()
    api.engine.config = EngineConfig(model=str(tmp_path / name))
    assert call(api, "list").models[0].size == size


def test_before_the_model_is_loaded():
    api = make()
    api.engine.state.loaded = False
    assert call(api, "list").models[0].model == f"{MODEL}:latest" and call(api, "ps").models == []
    response = api.post("/api/chat", {"messages": HI})
    assert response.status_code == 503 and set(response.json()) == {"error"}


def test_models_are_not_managed():
    api = make()
    assert call(api, "pull", MODEL).status == "success" and call(api, "pull", f"{MODEL}:latest", stream=True)[-1].status == "success"
    for name, args in (("pull", ("other",)), ("push", (MODEL,)), ("create", ("new", None, MODEL)), ("copy", (MODEL, "new")), ("delete", (MODEL,))):
        with pytest.raises(ollama.ResponseError, match="this server") as told:
            call(api, name, *args)
        assert told.value.status_code == 501


def test_errors_have_the_apis_shape():
    api = make(api_keys=("secret",))
    for response, status in (
        (api.post("/api/chat", {"messages": HI}), 401), (make().request("GET", "/api/nothing"), 404), (make().request("GET", "/api/chat"), 405),
        (make().request("POST", "/api/chat", content=b"{"), 400),
    ):  # fmt: skip
        assert response.status_code == status and set(response.json()) == {"error"} and isinstance(response.json()["error"], str)
    assert api.post("/api/chat", {"messages": HI}, headers={"authorization": "Bearer secret"}).status_code == 200


def test_a_failure_in_a_stream_is_a_line():
    api = make("long enough to be told in several pieces")
    api.engine.fail = lambda n: "error" if n else None
    lines = [json.loads(line) for line in api.post("/api/chat", {"messages": HI}).text.splitlines()]
    assert lines[0]["message"]["content"] and set(lines[-1]) == {"error"}
    with pytest.raises(ollama.ResponseError):
        chat(api, stream=True)


def test_a_deadline_ends_a_stream_as_a_length():
    api = make("x" * 200)
    api.engine.delay = 0.02
    body = {"messages": HI}
    lines = [json.loads(line) for line in api.post("/api/chat", body, headers={"x-request-timeout": "1"}).text.splitlines()]
    assert (lines[-1]["done"], lines[-1]["done_reason"]) == (True, "length")


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 130), st.floats(allow_nan=False, allow_infinity=False),
              st.text(max_size=6), st.sampled_from(["json", "user", "tool", "low", MODEL])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(
        st.sampled_from(["role", "content", "tool_calls", "function", "name", "arguments", "type", "images", "num_predict", "stop", "seed", "temperature"]),
        st.text(max_size=3)), inner, max_size=4)),
    max_leaves=8,
)  # fmt: skip
FIELDS = ["model", "name", "messages", "prompt", "input", "system", "raw", "tools", "stream", "format", "options", "think", "logprobs", "top_logprobs",
          "truncate", "shift", "keep_alive", "dimensions", "suffix", "context", "images", "priority", "cache_salt", "verbose"]  # fmt: skip
FUZZED = make("Hi.<think>x</think><tool_call>{")


@settings(max_examples=300)
@given(path=st.sampled_from(["chat", "generate", "embed", "embeddings", "show", "pull"]), known=st.booleans(),
       extra=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3))  # fmt: skip
def test_fuzzed_bodies_never_fail(path, known, extra):
    base = {"chat": {"messages": HI}, "generate": {"prompt": "hi"}, "embed": {"input": "hi"}}.get(path, {}) if known else {}
    response = FUZZED.post(f"/api/{path}", {**base, **extra})
    assert response.status_code in (200, 400, 404) or (path, response.status_code) == ("pull", 501), response.text
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert (response.status_code == 200) == all("error" not in line for line in lines)
