"""Calls and thoughts: what a model thinks about calls stays thought, and a call in which its thought ends is one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.conversation.answer import AnswerFormat
from headrace.conversation.events import CallArguments, CallBegin, Reasoning
from headrace.conversation.tool_formats import TOOL_PARSERS
from test_tool_formats import ALL_STRINGS, FRAGMENTS, LONG
from test_tool_formats import written as written_of
from test_tools_parsers import call, cut, parse

NAMES = sorted(set(TOOL_PARSERS) - {"openai", "pythonic"})  # harmony has channels of its own, and the other no markers
THOUGHTS = {  # kind -> (what opens a thought, what closes it)
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "generic": ("<seed:think>", "</seed:think>"),
}
ROME = {"city": "Rome"}


def written(name: str, arguments: dict) -> str:
    if name == "llama3_json":
        return f'<|python_tag|>{{"name": "f", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'
    return written_of(name, arguments)


def forms():
    return [pytest.param(kind, name, id=f"{kind}-{name}") for name in NAMES for kind in THOUGHTS]


def found(kind: str, name: str, prompt: str, text: str) -> list[tuple]:
    """The events of the text, which are the same whole and character by character."""
    form = AnswerFormat(kind, name)
    whole = parse(form.parser(prompt, schemas=ALL_STRINGS), text)
    assert parse(form.parser(prompt, schemas=ALL_STRINGS), *text) == whole
    return whole


def begun(kind: str) -> list[tuple[str, str]]:
    """(end of the prompt, beginning of the output) of a thought: opened by the output, or by the prompt."""
    opening, _ = THOUGHTS[kind]
    return [("", f"{opening}\n"), (f"{opening}\n", "")]


@pytest.mark.parametrize(("kind", "name"), forms())
def test_what_is_thought_about_calls_is_no_call(kind, name):
    """Markers alone, whole calls and halves of them, also right before the thought ends."""
    marker, one, closing = TOOL_PARSERS[name].opening.strings[0], written(name, ROME), THOUGHTS[kind][1]
    half = one[: len(one) * 2 // 3]
    for thought in (f"I write {marker} here", f"Such as {one}, then I see", f"{one}\nis one", f"A half, {half}", f"It is {one}", f"So {one}{one}"):
        for prompt, opened in begun(kind):
            for answer in ("Hello", one, f"I look. {one}"):
                text = opened + thought + closing + answer
                head, *rest = found(kind, name, prompt, text)
                assert head == ("reasoning", thought), text
                calls = [call(0, "f", ROME)] if one in answer else []
                assert [e for e in rest if e[0] == "call"] == calls, text
                assert [e[0] for e in rest if e[0] != "call"] == ["text"] * (answer != one)


@pytest.mark.parametrize(("kind", "name"), forms())
def test_a_call_in_which_a_thought_ends_is_one(kind, name):
    """Models that leave out the end of their thought, and those that close it behind the call and say no more."""
    one, closing = written(name, ROME), THOUGHTS[kind][1]
    for prompt, opened in begun(kind):
        for end in ("", "\n", closing, f"\n{closing}\n\n"):
            assert found(kind, name, prompt, f"{opened}I look.\n\n{one}{end}") == [("reasoning", "I look."), call(0, "f", ROME)]
            assert found(kind, name, prompt, f"{opened}{one}{end}") == [call(0, "f", ROME)]
        mentioned = f"As {one} is one, I do so:"
        assert found(kind, name, prompt, f"{opened}{mentioned}\n{one}") == [("reasoning", mentioned), call(0, "f", ROME)]
        long = written(name, LONG)
        if closing not in long:
            events = found(kind, name, prompt, f"{opened}I look. {long}")
            assert [e[0] for e in events] == ["reasoning", "call"] and events[0][1] == "I look."
        cut_off = f"{opened}I look. {long[: len(long) * 2 // 3]}"
        assert [e[0] for e in found(kind, name, prompt, cut_off)] == ["reasoning"]


def test_a_thought_is_given_out_as_it_comes():
    """Nothing waits but what may be a call; what turns out to be none comes at once."""
    for name in NAMES:
        parser, one = AnswerFormat("qwen3", name).parser("<think>"), written(name, ROME)
        assert parse(parser, "ab")[0][1] == "ab"
        parser = AnswerFormat("qwen3", name).parser("<think>")
        assert parser.push(f"See {one}")[0].text == "See"
        events = parser.push(" ok so")
        assert "".join(e.text for e in events) == f" {one} ok so", name


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_has_waited_comes_in_one_piece(name):
    """Its arguments are no event for each character that they were read by: each is a message to a client that streams."""
    parser = AnswerFormat("qwen3", name).parser("<think>", schemas=ALL_STRINGS)
    text = f"I look. {written(name, LONG)}"
    events = [event for c in text for event in parser.push(c)] + parser.finish()
    assert [type(event) for event in events if not isinstance(event, Reasoning)] == [CallBegin, CallArguments]


def test_behind_a_grammar_that_ends_thoughts_there_is_no_call_in_one():
    one = written("hermes", ROME)
    parser = AnswerFormat("qwen3", "hermes").parser("<think>", constrained=True, thought_ends=True)
    assert parse(parser, f"It is {one}") == [("reasoning", f"It is {one}")]


WORDS = [*FRAGMENTS, "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "Here is my response:", "<|python_tag|>", *(written(n, ROME) for n in NAMES)]
salads = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)


@settings(max_examples=400)
@given(st.sampled_from(NAMES), st.sampled_from(sorted(THOUGHTS)), salads, st.booleans(), st.data())
def test_any_text_in_any_pieces_gives_the_same(name, kind, text, opened, data):
    form, (opening, _) = AnswerFormat(kind, name), THOUGHTS[kind]
    prompt, text = (opening, text) if opened else ("", opening + text)
    whole = parse(form.parser(prompt, schemas=ALL_STRINGS), text)
    assert parse(form.parser(prompt, schemas=ALL_STRINGS), *text) == whole
    pieces = cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parse(form.parser(prompt, schemas=ALL_STRINGS), *pieces) == whole


@settings(max_examples=300)
@given(st.sampled_from(NAMES), st.sampled_from(sorted(THOUGHTS)), salads, st.sampled_from(["", "Hello", "call"]), st.booleans(), st.data())
def test_a_thought_that_is_closed_is_whole(name, kind, thought, answer, opened, data):
    """Whatever stands in it, before an answer that is one."""
    opening, closing = THOUGHTS[kind]
    thought = "a" + thought.replace(closing, "").replace("</think>", "").replace("[/THINK]", "") + "z"
    one = written(name, ROME) if answer == "call" else answer
    prompt, text = (opening, "") if opened else ("", opening)
    text += thought + closing + one
    events = parse(AnswerFormat(kind, name).parser(prompt, schemas=ALL_STRINGS), *cut(text, data.draw(st.lists(st.integers(0, len(text))))))
    assert events[0] == ("reasoning", thought)
    assert events[1:] == ([call(0, "f", ROME)] if answer == "call" else [("text", "Hello")] if answer else [])
