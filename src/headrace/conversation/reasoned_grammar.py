"""The grammar of an answer in a format where the model may reason first: what it thinks is free, what it answers is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.conversation.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START
from headrace.conversation.reasoning import REASONING_FORMATS
from headrace.conversation.tool_grammar import Special, answer_rule

ANY = "/(.|\\n)*/"


def answer_alone(schema: dict[str, Any]) -> str:
    """Lark in which the output is JSON of the schema."""
    return f"%llguidance {{}}\nstart: answer\n{answer_rule(schema)}"


def behind_reasoning(lark: str, kind: str, prompt_end: str, special: Special) -> str:
    """`lark`, whose start is an `answer` or calls or that, behind reasoning in the format of this kind.

    Within the block if the prompt has opened it, and as it is if the prompt has closed it.
    """
    head, _, rest = lark.partition("start: ")
    body, _, rules = rest.partition("\n")
    made = _harmony(body, special) if kind == "openai_gptoss" else _blocks(kind, body, prompt_end.rstrip(), special)
    return lark if made is None else "\n".join((f"{head}start: {made[0]}", *made[1:], rules))


def _blocks(kind: str, body: str, prompt_end: str, special: Special) -> list[str] | None:
    """The start, and rules for it."""
    form = REASONING_FORMATS[kind]
    inside = form.opened_by(prompt_end)
    if not inside and prompt_end.endswith(tuple(closing for _, closings in form.blocks for closing in closings)):
        return None
    found, rules = [], [f"THOUGHT: {ANY}", "SPACE: /[ \\t\\r\\n]{1,8}/"]
    for i, (openings, closings) in enumerate(form.blocks_behind(prompt_end)):
        opened, closed = _either(openings, special), _either(closings, special)
        # text up to a marker that is text, too, ends with it
        rules.append(f"thought_{i}{'' if closed.startswith('(<') else '[lazy]'}: THOUGHT {closed}")
        if not inside:
            found.append(f"{opened} thought_{i}")
        else:  # some write once more what the prompt has opened
            found.append(f"{opened}? thought_{i}" if opened.startswith("(<") else f"thought_{i}")
    start = f"({' | '.join(found)}) SPACE?"
    return [f"{start} ({body})" if inside else f"({start})? ({body})", *rules]


def _either(markers: Sequence[str], special: Special) -> str:
    """A marker may be a token and a word behind it."""
    written = (" ".join(special(part) for part in re.split("(?<=>)", marker) if part) for marker in markers)
    return f"({' | '.join(written)})"


def _harmony(body: str, special: Special) -> list[str] | None:
    """Messages on other channels before the answer, which is the final one, or a call. None: its markers are no tokens."""
    begin, message, end, start, constrain = marks = [special(m) for m in (CHANNEL, MESSAGE, ENDS[0], START, CONSTRAIN)]
    if not all(mark.startswith("<") for mark in marks):
        return None
    said = f'{begin} ("analysis" | "commentary") {message} THOUGHT {end} {start} "assistant"'
    final = body.replace("answer", f'{begin} "final" kind {message} answer')
    return [f"({said})* ({final})", f"THOUGHT: {ANY}", f'kind: " "? ({constrain}? "json")?']
