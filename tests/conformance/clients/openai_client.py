"""The openai package against a server: every endpoint, whole and streamed, tools, schemas, errors. Arguments: URL/v1 and model."""

import asyncio
import json
import sys

import openai

URL, MODEL = sys.argv[1:3]
HI = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"model": MODEL, "temperature": 0, "max_tokens": 24}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}}]
client = openai.OpenAI(base_url=URL, api_key="x", max_retries=0)


def chat() -> None:
    whole = client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=2, **SHORT)
    text = whole.choices[0].message.content
    chunks = list(client.chat.completions.create(messages=HI, stream=True, stream_options={"include_usage": True}, **SHORT))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    assert "".join(t.token for t in whole.choices[0].logprobs.content).startswith(text[:8])
    with client.chat.completions.stream(messages=HI, **SHORT) as stream:
        stream.until_done()
        assert stream.current_completion_snapshot.choices[0].message.content == text


def tools() -> None:
    call = client.chat.completions.create(messages=HI, tools=TOOLS, tool_choice="required", **SHORT | {"max_tokens": 300})
    found = call.choices[0].message.tool_calls[0]
    assert found.function.name == "get_weather" and "city" in json.loads(found.function.arguments)
    history = [*HI, call.choices[0].message, {"role": "tool", "tool_call_id": found.id, "content": "sunny"}]
    assert client.chat.completions.create(messages=history, tools=TOOLS, **SHORT).choices[0].message
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(messages=HI, tools=TOOLS, tool_choice=named, **SHORT | {"max_tokens": 300}) as stream:
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.name == "get_weather"


def schemas() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    answer = client.chat.completions.create(messages=HI, response_format=form, **SHORT | {"max_tokens": 300})
    assert isinstance(json.loads(answer.choices[0].message.content)["city"], str)
    answer = client.responses.create(
        model=MODEL, input="Weather in Paris?", temperature=0, max_output_tokens=300,
        text={"format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}},
    )  # fmt: skip
    assert isinstance(json.loads(answer.output_text)["city"], str)


def completions() -> None:
    whole = client.completions.create(prompt=["Once", "The sea"], logprobs=1, echo=True, **SHORT)
    assert [c.index for c in whole.choices] == [0, 1] and whole.choices[1].text.startswith("The sea")
    plain = client.completions.create(prompt="Once", **SHORT).choices[0].text
    assert "".join(c.choices[0].text for c in client.completions.create(prompt="Once", stream=True, **SHORT)) == plain
    assert whole.choices[0].text == "Once" + plain


def responses() -> None:
    options = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        events = list(stream)
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text


def models_and_embeddings() -> None:
    assert MODEL in [m.id for m in client.models.list()] and client.models.retrieve(MODEL).id == MODEL
    packed = client.embeddings.create(model=MODEL, input=["a", "b"]).data
    plain = client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float").data
    assert all(
        abs(p - q) < 1e-6 for x, y in zip(packed, plain, strict=True) for p, q in zip(x.embedding, y.embedding, strict=True)
    )


def errors() -> None:
    for kind, call in (
        (openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=HI, temperature=5)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=[])),
        (openai.NotFoundError, lambda: client.chat.completions.create(model="other", messages=HI)),
    ):
        try:
            call()
        except kind as e:
            assert e.request_id and e.body["message"]
        else:
            raise AssertionError(kind)


async def many() -> None:
    """Streams at the same time give what each gives alone, and a stream that is left does not disturb the others."""
    other = openai.AsyncOpenAI(base_url=URL, api_key="x", max_retries=0)

    async def one(i: int) -> str:
        stream = await other.chat.completions.create(messages=[{"role": "user", "content": f"Say {i}"}], stream=True, **SHORT)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            if i == 3:
                await stream.close()
                break
        return text

    together = await asyncio.gather(*map(one, range(6)))
    assert together[0] == await one(0) and together[5] == await one(5)


for check in (chat, tools, schemas, completions, responses, models_and_embeddings, errors):
    check()
asyncio.run(many())
print(f"openai {openai.__version__}: 8 checks")
