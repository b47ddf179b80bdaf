"""langchain-openai against a server: invoke, stream, tools, structured output, embeddings. Arguments: URL/v1 and model."""

import importlib.metadata
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = sys.argv[1:3]
QUESTION = [HumanMessage("What is the capital of France?")]


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)


@tool(args_schema=Place)
def get_weather(city: str) -> str:
    """Weather of a city."""
    return "sunny"


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    population: int = Field(ge=0, le=99999999)


for more in ({"stream_usage": True}, {"use_responses_api": True}):
    llm = ChatOpenAI(base_url=URL, api_key="x", model=MODEL, temperature=0, max_tokens=300, max_retries=0, **more)
    whole = llm.invoke(QUESTION)
    streamed = None
    for chunk in llm.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert whole.text and streamed.text == whole.text
    assert whole.usage_metadata["output_tokens"] == streamed.usage_metadata["output_tokens"] > 0
    forced = llm.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(QUESTION)
    call = forced.tool_calls[0]
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)
    assert llm.bind_tools([get_weather]).invoke([*QUESTION, forced, ToolMessage("sunny", tool_call_id=call["id"])]) is not None
    for method in ("json_schema", "function_calling"):
        found = llm.with_structured_output(City, method=method, strict=True).invoke("Tell me of Paris.")
        assert isinstance(found, City), (method, found)
vectors = OpenAIEmbeddings(base_url=URL, api_key="x", model=MODEL, check_embedding_ctx_length=False).embed_documents(["a", "b"])
assert len(vectors) == 2 and abs(sum(v * v for v in vectors[0]) - 1) < 1e-3
print(f"langchain-openai {importlib.metadata.version('langchain-openai')}: chat and responses, tools, schemas, embeddings")
