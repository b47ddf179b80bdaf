"""litellm against a server, as an openai and as a hosted_vllm endpoint. Arguments: URL/v1 and model."""

import importlib.metadata
import json
import sys

import litellm

URL, MODEL = sys.argv[1:3]
HI = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
litellm.telemetry = False

for provider in ("openai", "hosted_vllm"):
    common = {
        "model": f"{provider}/{MODEL}",
        "api_base": URL,
        "api_key": "x",
        "temperature": 0,
        "max_tokens": 300,
        "num_retries": 0,
    }
    whole = litellm.completion(messages=HI, **common)
    text = whole.choices[0].message.content
    chunks = list(litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **common))
    assert text or MODEL == "tiny"  # whose weights are random
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == whole.usage.completion_tokens
    call = litellm.completion(messages=HI, tools=TOOLS, tool_choice="required", **common).choices[0].message.tool_calls[0]
    assert "city" in json.loads(call.function.arguments)
    completed = litellm.text_completion(prompt="Once", **{**common, "model": f"text-completion-openai/{MODEL}"})
    assert completed.choices[0].text or MODEL == "tiny"
    vectors = litellm.embedding(
        model=f"{provider}/{MODEL}", input=["a", "b"], api_base=URL, api_key="x", encoding_format="float"
    ).data  # fmt: skip
    assert len(vectors) == 2
    try:
        litellm.completion(messages=HI, **{**common, "temperature": 5})
        raise AssertionError("temperature 5 was taken")
    except litellm.BadRequestError:
        pass
print(
    f"litellm {importlib.metadata.version('litellm')}: openai and hosted_vllm: chat, stream, tools, completions, embeddings, errors"
)
