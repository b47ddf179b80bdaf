"""pydantic-ai against a server: text, streams, a tool, typed output, over chat and over responses. Arguments: URL/v1 and model."""

import asyncio
import contextlib
import importlib.metadata
import sys
from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput, UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

URL, MODEL = sys.argv[1:3]
QUESTION = "What is the capital of France?"
SETTINGS = {"temperature": 0.0, "max_tokens": 300}


class City(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    large: bool


async def check(model) -> None:
    agent = Agent(model, model_settings=SETTINGS)
    whole = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as stream:
        streamed = "".join([piece async for piece in stream.stream_text(delta=True)])
    assert whole.output and streamed == whole.output and whole.usage.output_tokens > 0
    for kind in (ToolOutput(City), NativeOutput(City)):
        found = await Agent(model, output_type=kind, model_settings=SETTINGS).run("Tell me of Paris.")
        assert isinstance(found.output, City), found
    with_tool = Agent(model, model_settings=SETTINGS)
    called = []

    @with_tool.tool_plain
    def get_weather(city: str) -> str:
        """Weather of a city."""
        called.append(city)
        return "sunny"

    # a small model may call the tool for ever, or wrongly: what matters is that every answer was understood
    with contextlib.suppress(UsageLimitExceeded, UnexpectedModelBehavior):
        await with_tool.run("Use get_weather for Paris.", usage_limits=UsageLimits(request_limit=2))


provider = OpenAIProvider(base_url=URL, api_key="x")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    asyncio.run(check(kind(MODEL, provider=provider)))
print(f"pydantic-ai {importlib.metadata.version('pydantic-ai-slim')}: chat and responses: text, stream, typed output, tools")
