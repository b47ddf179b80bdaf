"""Run our parsers over the recorded model outputs of the `canitoolcall` wheel; not a test.

    pip download --no-deps -d DIR canitoolcall && unzip -q DIR/canitoolcall-*.whl -d DIR/canitoolcall
    python tests/conformance/canitoolcall_fixtures.py DIR/canitoolcall

Each output of the families that we support is parsed whole, character by character and in random pieces; the wheel's own
checks judge the results. Exits 1 if any fixture fails; `soft` counts those that differ in white space only.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import sys

from headrace.conversation.answer import AnswerFormat
from headrace.conversation.events import CallArguments, CallBegin, Reasoning, Text

FORMATS = {  # what detection from the models' own templates gives, by the beginnings of the models' names
    "qwen3-hermes": {"": AnswerFormat("qwen3", "hermes")},
    "llama": {
        "meta-llama/Llama-4": AnswerFormat(None, "llama4_pythonic"),
        "": AnswerFormat(None, "llama3_json"),
    },
    "mistral": {
        "mistralai/Magistral-Small-2506": AnswerFormat("qwen3", "mistral"),
        "": AnswerFormat("mistral", "mistral"),
    },
    "qwen3-xml": {"Qwen/Qwen3-Coder": AnswerFormat(None, "qwen3_coder"), "": AnswerFormat("qwen3", "qwen3_coder")},
    "glm": {"": AnswerFormat("qwen3", "glm45")},
    "kimi": {"moonshotai/Kimi-K2-Instruct": AnswerFormat(None, "kimi_k2"), "moonshotai/Kimi-K2": AnswerFormat("qwen3", "kimi_k2")},
    "deepseek": {
        "deepseek-ai/DeepSeek-V3.1": AnswerFormat("deepseek_v3", "deepseek_v31"),
        "deepseek-ai/DeepSeek-V3.2": None,
        "deepseek-ai/DeepSeek-V3": AnswerFormat(None, "deepseek_v3"),
        "deepseek-ai/DeepSeek-R1": AnswerFormat("deepseek_r1", "deepseek_v3"),
    },
    "gpt-oss": {"": AnswerFormat("openai_gptoss", "openai")},
}


OURS = ("gpt-oss/llamacpp-builtin-python-recipient",)  # a message to a tool that nobody offered: text here, dropped there


def format_of(fixture) -> AnswerFormat | None:
    """None: a model whose calls we do not read."""
    for begin, form in FORMATS.get(fixture.family, {}).items():
        if fixture.models[0].startswith(begin):
            return form
    return None


def parse(fixture, family, pieces, types) -> object:
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in fixture.tools or ()}
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = next((m.default_generation_prompt for m in family.reference_models if m.repo in fixture.models), "")
    parser = format_of(fixture).parser(prompt or "", schemas=schemas)
    events = [e for piece in pieces for e in parser.push(piece)] + parser.finish()
    calls: dict[int, list[str]] = {}
    for e in events:
        if isinstance(e, CallBegin):
            calls[e.index] = [e.name, ""]
        elif isinstance(e, CallArguments):
            calls[e.index][1] += e.text
    return types.ParseResult(
        content="".join(e.text for e in events if isinstance(e, Text)) or None,
        reasoning_content="".join(e.text for e in events if isinstance(e, Reasoning)) or None,
        tool_calls=[types.ParsedToolCall(name=name, arguments_raw=text) for name, text in calls.values()],
    )


def cuts(text: str):
    yield "char", list(text)
    for seed in range(5):
        rng, pieces, at = random.Random(seed), [], 0
        while at < len(text):
            pieces.append(text[at : (at := at + rng.randint(1, 20))])
        yield f"rand:{seed}", pieces


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("wheel", type=pathlib.Path, help="the unpacked wheel")
    args = arguments.parse_args()
    sys.path.insert(0, str(args.wheel))
    from canitoolcall import checks, fixtures, results

    count: collections.Counter = collections.Counter()
    for fixture in fixtures.load_fixtures():
        if format_of(fixture) is None or fixture.id in OURS:
            continue
        family = fixtures.load_family(fixture.family)
        observation = results.Observation(
            nonstream=parse(fixture, family, [fixture.raw_output], results),
            streams={name: parse(fixture, family, pieces, results) for name, pieces in cuts(fixture.raw_output)},
        )
        rows = checks.run_checks(fixture, family, observation)
        bad = [r for r in rows if r.status not in (results.Status.PASS, results.Status.SOFT_PASS)]
        soft = any(r.status is results.Status.SOFT_PASS for r in rows)
        count["failed" if bad else "soft" if soft else "passed"] += 1
        for row in (bad or [r for r in rows if r.status is results.Status.SOFT_PASS])[:2]:
            print(f"{fixture.id}: {row.check} {row.strategy} {row.status.value}: {row.detail}")
    print(dict(count))
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
