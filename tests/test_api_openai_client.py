"""The official Python client where the judges do not look: tools and reasoning in a loop, streamed; errors, also in a stream."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from fake_engine import TEMPLATE, FakeEngine
from server_driver import MODEL, serving

openai = pytest.importorskip("openai")
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}


@contextlib.asynccontextmanager
async def client_of(script=lambda ids, params: "Grüße, 漢字 😀!", **options) -> AsyncIterator:
    engine = FakeEngine(script=script, **options)
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> </think> #}"}
    async with serving(engine, api_keys=("secret",)) as server, openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="secret", max_retries=0
    ) as client:
        yield client


async def test_tools_in_a_loop():
    def script(ids, params):
        text = bytes(i for i in ids if i < 256)
        return "It is 1." if b"<tool_response>" in text or b"RESULT" in text else CALL

    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    async with client_of(script) as client:
        first = (await client.chat.completions.create(model=MODEL, messages=HI, tools=tools)).choices[0]
        assert first.finish_reason == "tool_calls" and json.loads(first.message.tool_calls[0].function.arguments) == {"a": 1}
        async with client.chat.completions.stream(model=MODEL, messages=HI, tools=tools) as helper:
            streamed = (await helper.get_final_completion()).choices[0]
        assert streamed.message.tool_calls[0].function.name == "f"
        answer = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "RESULT"}
        history = [*HI, first.message.model_dump(), answer]
        second = (await client.chat.completions.create(model=MODEL, messages=history, tools=tools)).choices[0]
        assert second.message.content == "It is 1." and second.message.tool_calls is None


async def test_response_tools_and_reasoning():
    tools = [{"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}]
    async with client_of(lambda ids, params: f"<think>hm</think>{CALL}") as client:
        async with client.responses.stream(model=MODEL, input="hi", tools=tools) as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "function_call"]
        items = [{"role": "user", "content": "hi"}, *[i.model_dump(exclude_none=True) for i in final.output]]
        items.append({"type": "function_call_output", "call_id": final.output[1].call_id, "output": "1"})
        assert (await client.responses.create(model=MODEL, input=items, tools=tools)).status == "completed"


async def test_errors():
    async with client_of() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=HI, temperature=5)
        assert caught.value.param == "temperature" and caught.value.request_id
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()


async def test_error_in_a_stream():
    async with client_of(fail=lambda at: "error" if at > 4 else None) as client:
        for create in (
            client.chat.completions.create(model=MODEL, messages=HI, stream=True),
            client.completions.create(model=MODEL, prompt="hi", stream=True, max_tokens=100),
        ):
            with pytest.raises(openai.APIError):
                async for _ in await create:
                    pass
