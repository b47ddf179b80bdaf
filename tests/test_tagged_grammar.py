"""Strict tools in formats of tags and in harmony: what the grammar takes is what the parser reads as a call that obeys its schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import error_of
from fake_engine import TEMPLATE, FakeEngine
from headrace.conversation.answer import AnswerParser
from headrace.conversation.events import CallArguments, CallBegin, Text
from headrace.conversation.tagged_grammar import NotStrict
from headrace.conversation.tool_formats import TOOL_PARSERS
from headrace.conversation.tool_grammar import FunctionDef, Tool, calls_or_answer, free_calls
from server_driver import Api
from structured_driver import compiled, encode, special_of, takes, with_tokens

WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"}, "lines": {"type": "integer", "minimum": 1, "maximum": 99}, "mode": {"enum": ["new", "old", None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["path", "lines"], "additionalProperties": False, "$defs": {"tag": {"enum": ["x", "y"]}},
}  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {"write": WRITE, "now": {"type": "object"}}
TOOLS = [Tool(function=FunctionDef(name=name, parameters=schema)) for name, schema in SCHEMAS.items()]
FORMATS = ("qwen3_coder", "glm45")
PLAIN, TOKENS = json.dumps, {"<tool_call>": 3, "</tool_call>": 4, "<arg_key>": 5, "</arg_key>": 6, "<arg_value>": 7, "</arg_value>": 8}


special = special_of(TOKENS)


def ids_of(text: str) -> list[int]:
    return with_tokens(text, TOKENS)


def call_of(form: str, name: str, arguments: dict[str, Any]) -> str:
    raw = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if form == "glm45":
        inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in raw.items())
        return f"<tool_call>{name}\n{inner}</tool_call>"
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in raw.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def read(form: str, answer: str) -> tuple[list[tuple[str, Any]], str]:
    parser = TOOL_PARSERS[form]()
    parser.constrained, parser.schemas = True, SCHEMAS
    events = parser.push(answer) + parser.finish()
    names = [e.name for e in events if isinstance(e, CallBegin)]
    arguments = ["".join(a.text for a in events if isinstance(a, CallArguments) and a.index == i) for i in range(len(names))]
    return list(zip(names, map(json.loads, arguments), strict=True)), "".join(e.text for e in events if isinstance(e, Text))


MATCHERS = {(form, how): compiled(grammar=free_calls(form, TOOLS, True, how)) for form in FORMATS for how in (PLAIN, special)}
VALUES = {
    "path": st.text(max_size=9) | st.sampled_from(["", "\n", "a\nb", "null", "3", "</file>", "<x", "a <function", '"q"']),
    "lines": st.integers(-1, 120) | st.sampled_from(["3 ", "x", 2.5, None]), "mode": st.sampled_from(["new", "old", None, "other", 1]),
    "tags": st.lists(st.sampled_from(["x", "y", "z"]), max_size=2) | st.just("x"), "note": st.none() | st.text(max_size=5),
    "more": st.just("x"),
}  # fmt: skip
LESS = {k: v for k, v in VALUES.items() if k not in ("path", "lines")}
DRAWN = st.fixed_dictionaries({}, optional=VALUES) | st.fixed_dictionaries({k: VALUES[k] for k in ("path", "lines")}, optional=LESS)


@given(st.sampled_from(FORMATS), DRAWN)
@settings(max_examples=80)
def test_what_is_taken_is_read_and_obeys(form, drawn):
    arguments = {key: drawn[key] for key in [*WRITE["properties"], "more"] if key in drawn}
    call = call_of(form, "write", arguments)
    plain, tokens = takes(MATCHERS[form, PLAIN], call), MATCHERS[form, special].fork()
    assert (tokens.accept(ids_of(call)) and tokens.complete) == plain
    [(name, found)], text = read(form, call)
    assert (name, text) == ("write", "")
    if plain:
        jsonschema.Draft202012Validator(WRITE).validate(found)
    elif jsonschema.Draft202012Validator(WRITE).is_valid(found):
        assert any(word in str(value) for word in "<\ud800" for value in arguments.values()) or arguments.get("lines") in ("3 ",), arguments


@pytest.mark.parametrize("how", [PLAIN, special], ids=["texts", "tokens"])
@pytest.mark.parametrize("form", FORMATS)
def test_calls_stand_beside_any_text(form, how):
    matcher, one = MATCHERS[form, how], compiled(grammar=free_calls(form, TOOLS, False, how))
    call, other = call_of(form, "write", {"path": "é", "lines": 3}), call_of(form, "now", {"zone": "UTC", "x": 1})
    encoded = encode if how is PLAIN else ids_of

    def fits(matcher, text: str) -> bool:
        copy = matcher.fork()
        return copy.accept(encoded(text)) and copy.complete

    for text in ("", "a < b\n\n", call, f"Let me see.\n{call}\n", other, call_of(form, "now", {}), "no </function> here"):
        assert fits(matcher, text) and fits(one, text), text
    assert fits(matcher, f"{call}\n{other}\nDone.") and not fits(one, call + call)
    for text in (call.replace("write", "rite"), call.replace("path", "pat"), call_of(form, "write", {"path": "x"}), call[:-14], "<tool_call> x"):
        assert not fits(matcher, text), text
    if form == "qwen3_coder":
        assert not fits(matcher, call.replace("<tool_call>\n", "")), "the parser would read it"


MARKS = {"<|channel|>": 3, "<|message|>": 4, "<|end|>": 5, "<|start|>": 6, "<|constrain|>": 7}


def test_messages_of_harmony():
    matcher = compiled(grammar=free_calls("openai", TOOLS, True, lambda m: f"<[{MARKS[m]}]>"))
    write, json_ = '{"path": "é", "lines": 3}', [7, *encode("json")]
    thought, said = [3, *encode("analysis"), 4, *encode("hm")], [3, *encode("final"), 4, *encode("So. to=functions.write")]
    preamble = [3, *encode("commentary"), 4, *encode("I write.")]
    next_ = [5, 6, *encode("assistant")]
    call = [3, *encode("commentary to=functions.write"), *encode(" "), *json_, 4, *encode(write)]
    other = [*encode(" to=functions.now"), 3, *encode("commentary"), *encode(" json"), 4, *encode("{}")]
    for ids, good in (
        (said, True), ([*thought, *next_, *said], True), (call, True), ([*thought, *next_, *preamble, *next_, *call], True),
        ([*thought, *next_, *other], True), (other, True), ([*call, *next_, *said], False), ([*thought, *next_], False),
        ([3, *encode("commentary to=functions.rite"), 4, *encode("{}")], False), (call[:-1], False), ([], False),
        ([*call[:-1], *encode(', "x": 1}')], False), ([3, *encode("analysis to=functions.write"), 4, *encode("x")], False),
    ):  # fmt: skip
        copy = matcher.fork()
        assert (copy.accept(ids) and copy.complete) == good, ids
    with pytest.raises(NotStrict, match="no tokens"):
        free_calls("openai", TOOLS, True, PLAIN)
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>{write}"
    parser = AnswerParser(None, TOOL_PARSERS["openai"]())
    assert [e.name for e in parser.push(text) + parser.finish() if isinstance(e, CallBegin)] == ["write"]


@pytest.mark.parametrize("how", [PLAIN, special])
@pytest.mark.parametrize("form", FORMATS)
def test_calls_or_an_answer_in_its_format(form, how):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    matcher = compiled(grammar=calls_or_answer(form, TOOLS, True, how, schema))
    call = call_of(form, "write", {"path": "a", "lines": 3})
    for answer, good in ((call, True), (call + call, True), (f"{call}\n{call}", True), ('{"n": 1}', True), ("x" + call, False), (call + '{"n": 1}', False), ("", False)):
        copy, ids = matcher.fork(), ids_of(answer) if how is special else encode(answer)
        assert (copy.accept(ids) and copy.complete) == good, answer
    assert read(form, '{"n": 1}') == ([], '{"n": 1}') and len(read(form, f"{call}\n{call}")[0]) == 2


REFUSED = [
    {"type": "string", "pattern": "a+"}, {"type": ["string", "integer"]}, {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    {"enum": ["1", 2]}, {"enum": ["a<b"]}, {"type": "string", "maxLength": 3},
]  # fmt: skip
NO_SCHEMAS = [
    {"properties": {"a": 5}}, {"properties": [1]}, {"properties": {"a": {"type": "string"}}, "required": 5}, {"properties": {"a": {"$ref": 5}}},
    {"properties": {"a": {"$ref": "#/nowhere"}}}, {"properties": {"a": {"anyOf": 5}}}, {"properties": {"a>": {}}}, {"properties": {"": {}}},
    {"anyOf": []}, {"additionalProperties": {"type": "integer"}},
]  # fmt: skip


@pytest.mark.parametrize("parameters", [*({"properties": {"a": node}} for node in REFUSED), *NO_SCHEMAS], ids=str)
def test_what_cannot_be_held_to_is_a_400_that_says_so(parameters):
    engine = FakeEngine(script=lambda *_: "x", supports_structured=True)
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> <arg_key> #}"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    answer = Api(engine).post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "tools": tools})
    error = error_of(answer)
    assert answer.status_code == 400 and error["param"] == "tools" and "strict in the format of this model's calls (glm45)" in error["message"]


@pytest.mark.parametrize("form", FORMATS)
def test_through_the_server(form):
    engine = FakeEngine(script=lambda *_: "So.\n" + call_of(form, "write", {"path": "a\nb", "lines": 3}), supports_structured=True)
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> <arg_key> <function= <parameter= #}"}
    tools = [{"type": "function", "function": {"name": n, "parameters": s, "strict": n == "write"}} for n, s in SCHEMAS.items()]
    api = Api(engine, tool_parser=form)
    message = api.ok("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "tools": tools})["choices"][0]["message"]
    assert message["content"] == "So." and json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"path": "a\nb", "lines": 3}
    matcher = compiled(grammar=engine.params[-1].structured_outputs.grammar)
    assert takes(matcher, call_of(form, "now", {"anything": "1"})) and not takes(matcher, call_of(form, "write", {"path": "x"}))
