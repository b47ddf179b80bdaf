"""The anthropic package against a server: messages whole and streamed, tools, counting, models, errors. Arguments: URL/v1 and model."""

import sys

import anthropic

URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
HI = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"model": MODEL, "extra_body": {"temperature": 0}, "max_tokens": 24}  # the package no longer knows temperature
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"name": "get_weather", "description": "Weather", "input_schema": WEATHER}]
client = anthropic.Anthropic(base_url=URL, api_key="x", max_retries=0)


def messages() -> None:
    whole = client.messages.create(messages=HI, **SHORT)
    with client.messages.stream(messages=HI, **SHORT) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text == streamed.content[0].text
    assert streamed.stop_reason == whole.stop_reason and streamed.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=HI).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def tools() -> None:
    options = {**SHORT, "max_tokens": 300, "messages": HI, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    [call] = [block for block in whole.content if block.type == "tool_use"]
    assert call.name == "get_weather" and isinstance(call.input["city"], str) and whole.stop_reason == "tool_use"
    assert [b.input for b in streamed.content if b.type == "tool_use"] == [call.input]
    history = [*HI, {"role": "assistant", "content": [b.to_dict() for b in whole.content]},
               {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}]  # fmt: skip
    assert client.messages.create(messages=history, tools=TOOLS, **SHORT).content is not None


def models() -> None:
    assert MODEL in [m.id for m in client.models.list()] and client.models.retrieve(MODEL).id == MODEL


def errors() -> None:
    for kind, fields in (
        (anthropic.BadRequestError, {"extra_body": {"temperature": 5}}), (anthropic.BadRequestError, {"messages": []}),
        (anthropic.NotFoundError, {"model": "other"}), (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "x " * 50_000}]}),
    ):  # fmt: skip
        try:
            client.messages.create(**{**SHORT, "messages": HI, **fields})
        except kind as e:
            assert e.request_id and e.body["error"]["message"]
        else:
            raise AssertionError(fields)


for check in (messages, tools, models, errors):
    check()
print(f"anthropic {anthropic.__version__}: 4 checks")
