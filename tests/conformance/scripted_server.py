"""A server whose model knows the answers of `canitoolcall probe`: so the probe judges the HTTP layer, not a small model.

    python tests/conformance/scripted_server.py

Everything but the engine is the real server; what the model would write is looked up by the question, in the format of
Qwen and Hermes models, with reasoning before one of the calls.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import uvicorn

from fake_engine import TEMPLATE, FakeEngine
from headrace.api.app import create_app

MODEL = "scripted"
EVENT = {
    "title": "Design review", "start": "2026-10-01T15:00:00Z", "location": {"city": "Berlin", "room": "4.12"},
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
}  # fmt: skip
NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}


def call(name: str, **arguments: object) -> str:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


ANSWERS = {  # a part of the prompt -> what the model writes; the last that is found counts
    "weather in Paris right now": call("get_weather", city="Paris"),
    "in Paris and in Tokyo": call("get_weather", city="Paris") + "\n" + call("get_weather", city="Tokyo", unit="c"),
    "17 + 25": "42",
    "titled 'Design review'": call("create_event", **EVENT),
    "Save a note titled": call("save_note", **NOTE),
    "What time is it on the server": call("get_server_time"),
    "something about Lisbon": call("get_weather", city="Lisbon"),
    '"temp_c": 18': "It is 18 degrees in Paris and the sky is clear.",
    "9.11 or 9.9": "<think>\n9.9 is 9.90, which is more than 9.11.\n</think>\n\n" + call("record_answer", answer="9.9"),
}


def answer(ids: list[int], params: object) -> str:
    prompt = bytes(i for i in ids if i < 256).decode("utf-8", "replace")
    return [text for part, text in ANSWERS.items() if part in prompt or part in prompt.replace('\\"', '"')][-1:][0]


def main() -> None:
    engine = FakeEngine(script=answer, model_name=MODEL, max_model_len=32768, supports_structured=True)
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> </think> #}"}
    uvicorn.run(create_app(engine), host="127.0.0.1", port=0, log_level="info", access_log=False)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
