"""The official Python client against the server: types, streams, tools, errors, embeddings."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
import uvicorn

from api_client import MODEL
from fake_engine import TEMPLATE, FakeEngine
from headrace.api.app import create_app
from headrace.api.config import ServerConfig

openai = pytest.importorskip("openai")
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}


def run(test, script=lambda ids, params: "Grüße, 漢字 😀!", **options):
    async def main():
        engine = FakeEngine(script=script, **options)
        engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> </think> #}"}
        app = create_app(engine, ServerConfig(api_keys=("secret",)))
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
        task = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0) as client:
            with contextlib.ExitStack() as stack:
                stack.callback(lambda: setattr(server, "should_exit", True))
                await test(client)
        await task

    asyncio.run(main())


def test_chat():
    async def test(client):
        whole = await client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2, n=2)
        assert whole.choices[1].message.content == "Grüße, 漢字 😀!" and whole.choices[0].finish_reason == "stop"
        assert whole.choices[0].logprobs.content[0].top_logprobs and whole.usage.total_tokens > 0
        text, last = "", None
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            last = chunk
        assert text == whole.choices[0].message.content and last.usage.completion_tokens == len(text.encode()) + 1
        async with client.chat.completions.stream(model=MODEL, messages=HI) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].message.content == text

    run(test)


def test_tools_in_a_loop():
    def script(ids, params):
        return "It is 1." if b"<tool_response>" in bytes(i for i in ids if i < 256) or b"RESULT" in bytes(i for i in ids if i < 256) else CALL

    async def test(client):
        tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
        first = (await client.chat.completions.create(model=MODEL, messages=HI, tools=tools)).choices[0]
        assert first.finish_reason == "tool_calls" and json.loads(first.message.tool_calls[0].function.arguments) == {"a": 1}
        async with client.chat.completions.stream(model=MODEL, messages=HI, tools=tools) as helper:
            streamed = (await helper.get_final_completion()).choices[0]
        assert streamed.message.tool_calls[0].function.name == "f"
        answer = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "RESULT"}
        history = [*HI, first.message.model_dump(), answer]
        second = (await client.chat.completions.create(model=MODEL, messages=history, tools=tools)).choices[0]
        assert second.message.content == "It is 1." and second.message.tool_calls is None

    run(test, script)


def test_completions_models_and_embeddings():
    async def test(client):
        whole = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, echo=True)
        assert [c.index for c in whole.choices] == [0, 1] and whole.choices[1].text.startswith("b")
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True, max_tokens=100)
        assert "".join([c.choices[0].text async for c in stream]) == "Grüße, 漢字 😀!"
        assert [m.id async for m in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        plain = await client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
        packed = await client.embeddings.create(model=MODEL, input=["a", "b"])  # the client asks for base64
        for x, y in zip(plain.data, packed.data, strict=True):
            assert x.embedding == pytest.approx(y.embedding, abs=1e-6) and sum(v * v for v in x.embedding) == pytest.approx(1)

    run(test)


def test_responses():
    async def test(client):
        whole = await client.responses.create(model=MODEL, input="hi")
        assert whole.output_text == "Grüße, 漢字 😀!" and whole.status == "completed"
        async with client.responses.stream(model=MODEL, input="hi") as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            assert "".join(deltas) == (await stream.get_final_response()).output_text == whole.output_text

    run(test)


def test_response_tools_and_reasoning():
    async def test(client):
        tools = [{"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}]
        async with client.responses.stream(model=MODEL, input="hi", tools=tools) as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "function_call"]
        items = [{"role": "user", "content": "hi"}, *[i.model_dump(exclude_none=True) for i in final.output]]
        items.append({"type": "function_call_output", "call_id": final.output[1].call_id, "output": "1"})
        assert (await client.responses.create(model=MODEL, input=items, tools=tools)).status == "completed"

    run(test, lambda ids, params: f"<think>hm</think>{CALL}")


def test_errors():
    async def test(client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=HI, temperature=5)
        assert caught.value.param == "temperature" and caught.value.request_id
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HI)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()

    run(test)


def test_error_in_a_stream():
    async def test(client):
        for create in (
            client.chat.completions.create(model=MODEL, messages=HI, stream=True),
            client.completions.create(model=MODEL, prompt="hi", stream=True, max_tokens=100),
        ):
            with pytest.raises(openai.APIError):
                async for _ in await create:
                    pass

    run(test, fail=lambda at: "error" if at > 4 else None)
