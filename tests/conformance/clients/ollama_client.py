"""The ollama package against a server: chat, generate, embed, what is said of models, errors. Arguments: URL/v1 and model."""

import importlib.metadata
import sys

import ollama

URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
HI = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"model": MODEL, "options": {"temperature": 0, "num_predict": 24}}
client = ollama.Client(host=URL)


def chat() -> None:
    whole = client.chat(messages=HI, **SHORT)
    pieces = list(client.chat(messages=HI, stream=True, **SHORT))
    assert "".join(p.message.content for p in pieces) == whole.message.content
    assert pieces[-1].done and pieces[-1].eval_count == whole.eval_count and whole.total_duration > 0


def generate() -> None:
    whole = client.generate(prompt="Once", **SHORT)
    assert "".join(p.response for p in client.generate(prompt="Once", stream=True, **SHORT)) == whole.response
    form = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"], "additionalProperties": False}
    shaped = client.generate(prompt="A city?", format=form, model=MODEL, options={"temperature": 0, "num_predict": 300})
    assert shaped.response.startswith("{") and '"city"' in shaped.response


def models() -> None:
    names = [m.model for m in client.list().models]
    assert any(name.removesuffix(":latest") == MODEL for name in names)
    shown = client.show(MODEL)
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] > 0 and "completion" in shown.capabilities
    assert client.ps().models


def embed() -> None:
    two = client.embed(model=MODEL, input=["a", "b"]).embeddings
    assert len(two) == 2 and all(abs(sum(x * x for x in v) - 1) < 1e-3 for v in two)


def errors() -> None:
    for status, call in (
        (404, lambda: client.chat(model="other", messages=HI)),
        (400, lambda: client.chat(model=MODEL, messages=HI, options={"temperature": -5})),
    ):
        try:
            call()
        except ollama.ResponseError as e:
            assert e.status_code == status and e.error
        else:
            raise AssertionError(status)


for check in (chat, generate, models, embed, errors):
    check()
print(f"ollama {importlib.metadata.version('ollama')}: 5 checks")
