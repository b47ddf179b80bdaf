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

FAMILIES = ("qwen3-hermes", "llama", "mistral")


def format_of(fixture) -> AnswerFormat:
    """What detection from the models' own templates gives."""
    model = fixture.models[0]
    if fixture.family == "qwen3-hermes":
        return AnswerFormat("qwen3", "hermes")
    if fixture.family == "llama":
        return AnswerFormat(None, "pythonic" if "Llama-4" in model else "llama3_json")
    return AnswerFormat("qwen3" if "Magistral-Small-2506" in model else "mistral", "mistral")


def parse(fixture, pieces, types) -> object:
    parser = format_of(fixture).parser(fixture.generation_prompt or "")
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
        if fixture.family not in FAMILIES:
            continue
        family = fixtures.load_family(fixture.family)
        observation = results.Observation(
            nonstream=parse(fixture, [fixture.raw_output], results),
            streams={name: parse(fixture, pieces, results) for name, pieces in cuts(fixture.raw_output)},
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
