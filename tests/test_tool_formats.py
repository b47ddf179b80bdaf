"""Tool calls and reasoning in the formats of single families: what templates and models write is read, wherever it is cut."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.conversation.answer import AnswerFormat
from headrace.conversation.argument_types import typed, types_of
from headrace.conversation.call_layouts import HERMES, LAYOUTS
from headrace.conversation.events import CallArguments, CallBegin
from headrace.conversation.json_reader import JsonObjectReader
from headrace.conversation.reasoning import REASONING_FORMATS, ReasoningParser, detect_reasoning_format
from headrace.conversation.template import ChatTemplate
from headrace.conversation.tool_formats import TOOL_PARSERS, detect_tool_parser
from headrace.conversation.tool_parser import STREAMED_FROM
from headrace.conversation.tool_prompt import shown_to, spoken_format
from headrace.conversation.tool_syntax import parse_json
from test_tools_parsers import call, cut, parse

# Templates that write calls, results and reasoning as those of the models do
CALLS = "{% for c in m.tool_calls or [] %}"
QWEN3_CODER = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS +
    "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n{% endfor %}</function>\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
GLM = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + CALLS +
    "\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)  # fmt: skip
DEEPSEEK_V3 = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'system' %}{{ m.content }}"
    "{% elif m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>{{ c.function.name }}\n```json\n{{ c.function.arguments }}\n```<｜tool▁call▁end｜>{{ '' if loop.last else '\n' }}"
    "{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK_V31 = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'system' %}{{ m.content }}"
    "{% else %}<｜Assistant｜></think>{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>" + CALLS +
    "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}{# thinking is defined #}"
)  # fmt: skip
KIMI = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_{{ m.role }}|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>" + CALLS + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)  # fmt: skip
GPT_OSS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.tool_calls %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    " to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
LLAMA4 = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n"
    "{% if m.tool_calls %}<|python_start|>{{ m.content }}<|python_end|>" + CALLS + '{"name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{% endfor %}{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)  # fmt: skip
GRANITE = (
    "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}{# respond only with <|tool_call|> #}{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
PHI4 = (
    "{% for m in messages %}{% if m.role == 'system' and 'tools' in m %}<|system|>{{ m.content }}<|tool|>{{ m.tools }}<|/tool|><|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "qwen3_coder": QWEN3_CODER, "glm45": GLM, "deepseek_v3": DEEPSEEK_V3, "kimi_k2": KIMI, "openai": GPT_OSS,
    "llama4_json": LLAMA4, "granite": GRANITE, "phi4_mini_json": PHI4,
    "deepseek_v31": DEEPSEEK_V31,
}  # fmt: skip
template_of = functools.cache(lambda name: ChatTemplate(TEMPLATES[name]))
USER = {"role": "user", "content": "hi"}

texts = st.text(st.sampled_from("ab\"\\{}[]<>/\n'é😀(),=| \t"), max_size=10) | st.sampled_from(
    ["2", "true", "null", "</tool_call>", "a </parameter> b", "<|call|>", "\n", " x ", "\\u00e9", '"q"', "<function=f>", "</think>"]
)
numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
VALUES = {
    "string": texts,
    "integer": st.integers(-(10**20), 10**20),
    "number": numbers,
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(anything, max_size=3),
    "object": st.dictionaries(texts, anything, max_size=3),
}


@st.composite
def typed_calls(draw) -> tuple[list[tuple[str, dict]], dict[str, dict]]:
    """Calls, and the schemas of the tools that they call."""
    schemas: dict[str, dict] = {}
    calls = []
    for name in draw(st.lists(st.sampled_from(["f", "get_weather", "a.b-c"]), min_size=1, max_size=3)):
        properties = schemas.setdefault(name, {"type": "object", "properties": {}})["properties"]
        arguments = {}
        for key in draw(st.lists(st.sampled_from(["a", "city", "new_string", "ü"]), unique=True, max_size=3)):
            kind = properties.setdefault(key, {"type": draw(st.sampled_from(list(VALUES)))})["type"]
            arguments[key] = draw(VALUES[kind])
        calls.append((name, arguments))
    return calls, schemas


def tool(name: str, schema: Mapping) -> dict:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


@settings(max_examples=200)
@given(st.sampled_from(sorted(TEMPLATES)), st.sampled_from(["", "Let me see."]), typed_calls(), st.data())
def test_what_the_template_writes_of_calls_is_read_as_them(name, text, wanted, data):
    """A conversation goes on as the model's own words do: what is rendered of an answer gives the same answer again."""
    calls, schemas = wanted
    calls = calls[:1] if name == "openai" else calls  # one call ends a turn there
    text = "" if name in ("openai", "llama4_json") else text  # whose templates make something else of it
    template = template_of(name)
    tools = [tool(n, s) for n, s in schemas.items()]
    functions = [{"name": n, "arguments": json.dumps(a, ensure_ascii=data.draw(st.booleans()))} for n, a in calls]
    answer = {"role": "assistant", "content": text or None}
    answer["tool_calls"] = [{"id": f"functions.{f['name']}:{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    shown, known = shown_to(template, [USER, answer], tools)
    begin = template.render(shown[:-1], tools=known)
    whole = template.render(shown, tools=known, add_generation_prompt=False)
    assert whole.startswith(begin)
    written = whole[len(begin) :]
    for end in ("<|im_end|>\n", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|call|>", "<|eot|>", "<|end_of_text|>\n", "<|end|>"):
        written = written.removesuffix(end)
    form = AnswerFormat.choose(TEMPLATES[name], tools=spoken_format(template))
    assert form.tools == name
    pieces = cut(written, data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    found = parse(form.parser(begin, schemas=schemas), *pieces)
    assert [e[1] for e in found if e[0] != "call"] == ([text] if text else [])
    assert [(e[2], json.loads(e[3])) for e in found if e[0] == "call"] == calls


NEW = sorted(set(TOOL_PARSERS) - {"hermes", "llama3_json", "mistral", "pythonic"})
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "\n", " ", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "f", "1", '"x"', "text", "é😀", "{", "}", '{"a": 1}', '{"a": "' + "long " * 30 + '"}', '{"a": [1, "\n\\u00e9',
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", "<|tool_call|>", "functools", "[", "]", ", ", '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "arguments": {"a": "' + "long " * 30, '"}, "id": 1}', "<|/tool_call|>", "<|start|>assistant", "<|channel|>", "analysis",
    "commentary", "final", " to=functions.f", "<|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<think>", "</think>",
    "<|python_start|>", "<|python_end|>", "[f(a=1)]", "<", "<|", "<tool_",
]  # fmt: skip
salads = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)
SCHEMAS = {"f": {"properties": {"a": {"type": "integer"}}}}


@settings(max_examples=300)
@given(st.sampled_from(NEW), st.sampled_from(["qwen3", None, "granite"]), salads, st.data())
def test_any_text_in_any_pieces_gives_the_same(name, reasoning, text, data):
    form = AnswerFormat("openai_gptoss" if name == "openai" and reasoning else reasoning, name)
    whole = parse(form.parser(schemas=SCHEMAS), text)
    assert parse(form.parser(schemas=SCHEMAS), *text) == whole
    pieces = cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parse(form.parser(schemas=SCHEMAS), *pieces) == whole


@settings(max_examples=250)
@given(st.sampled_from(sorted(REASONING_FORMATS)), st.sampled_from(["", "<think>\n", "x</think>\n\n"]), st.data())
def test_reasoning_in_any_pieces_is_the_same(kind, prompt, data):
    form = REASONING_FORMATS[kind]
    words = [*form.markers, *filter(None, form.answer), "a", " ", "\n", "<", "Here is", "é😀"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    whole = parse(ReasoningParser(kind, prompt), text)
    assert parse(ReasoningParser(kind, prompt), *text) == whole
    assert parse(ReasoningParser(kind, prompt), *cut(text, data.draw(st.lists(st.integers(0, len(text)))))) == whole


LONG = {"a": "é\n\"\\ " * 100, "city": "Rome", "new_string": "x</parameter>y " * 20}
ALL_STRINGS = {"f": {"properties": {key: {"type": "string"} for key in LONG}}}


def written(name: str, arguments: dict) -> str:
    """One call as the model writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    if name == "mistral":
        return f"[TOOL_CALLS]f[ARGS]{text}"
    if name in LAYOUTS or name == "hermes":
        return {**LAYOUTS, "hermes": HERMES}[name].written([("f", text)])
    if name == "qwen3_coder":
        values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    if name == "glm45":
        values = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
        return f"<tool_call>f{values}</tool_call>"
    return f'<|python_start|>{{"name": "f", "parameters": {text}}}<|python_end|>'


@pytest.mark.parametrize("name", [*NEW, "hermes", "mistral"])
def test_long_arguments_come_as_they_are_written_and_short_calls_whole(name):
    """A call that the end cuts off is not given out while it is short; of a long one there is the beginning."""
    form = AnswerFormat(None, name)
    answer = "Hm. " + written(name, LONG) if name != "openai" else written(name, LONG)
    sizes = []
    parser = form.parser(schemas=ALL_STRINGS)
    for c in answer:
        sizes += [len(e.text) for e in parser.push(c) if isinstance(e, CallArguments)]
    parser.finish()
    if not name.startswith("llama4"):  # whose calls are read as wholes
        assert len(sizes) > 300 and max(sizes) < STREAMED_FROM + 40
    whole = json.dumps(LONG, ensure_ascii=False)
    for end in range(0, len(answer), 17):
        found = [e for e in parse(form.parser(schemas=ALL_STRINGS), answer[:end]) if e[0] == "call"]
        if not found:
            continue
        ((_, _, function, arguments),) = found
        assert function == "f" and whole.startswith(arguments) and len(arguments) >= STREAMED_FROM
    short = written(name, {"city": "Rome"})
    for end in range(len(short)):
        found = [e for e in parse(form.parser(schemas=ALL_STRINGS), short[:end]) if e[0] == "call"]
        assert found in ([], [call(0, "f", {"city": "Rome"})])


json_salads = st.lists(st.sampled_from(['"a"', '"', "{", "}", "[", "]", ":", ",", " ", "\n", "1", "-", "1.5e", "true", "nul", "\\", "\\u00", "e9", "é"]), max_size=12)


@settings(max_examples=300)
@given(st.dictionaries(texts, anything, max_size=4) | json_salads.map(lambda parts: "{" + "".join(parts)), st.booleans(), st.data())
def test_an_object_in_pieces_is_what_a_parser_takes(value, ascii, data):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=ascii, indent=data.draw(st.sampled_from([None, 1])))
    try:
        parse_json(text)
        right = True
    except ValueError:
        right = False

    def read(pieces: list[str]) -> tuple[str, int]:
        reader, out, num_read = JsonObjectReader(), "", 0
        for piece in pieces:
            if reader.ended or reader.broken:
                break
            given_out, count = reader.push(piece)
            out, num_read = out + given_out, num_read + count
        return out, num_read if reader.ended else -1

    out, num_read = read([text])
    assert read(cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))) == (out, num_read) == read(list(text))
    if right:
        assert num_read == len(text.rstrip()) and json.loads(out) == json.loads(text, strict=False)
    elif num_read >= 0:  # an object, and something behind it
        assert parse_json(text[:num_read]) is not None and json.loads(out) == json.loads(text[:num_read], strict=False)


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"type": "string"}, "2", "2"), ({"type": "string"}, "null", "null"), ({"type": "string"}, " a\n", " a\n"),
        ({"type": "integer"}, "2", 2), ({"type": "integer"}, "1e20", 1e20), ({"type": "number"}, "two", "two"), ({"type": "boolean"}, "True", True),
        ({"type": "null"}, "None", None), ({"type": ["string", "null"]}, "null", None), ({"type": ["string", "null"]}, '"x"', '"x"'),
        ({"type": ["string", "integer"]}, "2", 2), ({"type": ["string", "integer"]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/o"}]}, '{"a": 1}', {"a": 1}), ({"$ref": "#/$defs/o"}, "{'a': None}", {"a": None}),
        ({"type": "array"}, "[1, 'x']", [1, "x"]), ({"type": "array"}, "(1, 2)", [1, 2]), ({"enum": ["a", 1]}, "1", 1), ({"enum": ["1"]}, "1", "1"),
        ({"const": 5}, "5", 5), ({}, "5", 5), ({}, "five", "five"), ({"type": "integer"}, '{"a": 1}', {"a": 1}), ({"$ref": "#/nowhere"}, "x", "x"),
        ({"$ref": "#/properties/a"}, "1", 1), ({"type": "integer"}, "__import__('os')", "__import__('os')"), ({"type": "number"}, "nan", "nan"),
        ({"type": 5}, "1", 1), (None, "5", "5"),
    ],
)  # fmt: skip
def test_untyped_text_becomes_what_the_schema_asks_for(schema, text, wanted):
    properties = {} if schema is None else {"a": schema}
    root = {"properties": properties, "$defs": {"o": {"type": "object"}}}
    got = json.loads(typed(text, types_of(root, "a")))
    assert got == wanted and type(got) is type(wanted)


def test_numbers_are_what_the_model_wrote():
    assert typed("0.10", frozenset({"number"})) == "0.10" and typed("1" * 5000, frozenset({"number"})) == "1" * 5000


QWEN = AnswerFormat("qwen3", "qwen3_coder")
OSS = AnswerFormat("openai_gptoss", "openai")
F = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}
ONE = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
DEEP = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (QWEN, f"{ONE}\n</tool_call>\n<tool_call>\n{ONE}\n</tool_call>\n", [call(0, "f", {"a": 1}), call(1, "f", {"a": 1})]),  # no opener
        (QWEN, f"<tool_call>{ONE}{ONE}</tool_call>", [call(0, "f", {"a": 1}), call(1, "f", {"a": 1})]),
        (QWEN, f"<think>I call\n<tool_call>\n{ONE}\n</tool_call>", [("reasoning", "I call"), call(0, "f", {"a": 1})]),
        (QWEN, "<think>Say <tool_call>?</think>No", [("reasoning", "Say <tool_call>?"), ("text", "No")]),
        (QWEN, "<function=f>\n<parameter=s>\nx\n</function>\n</tool_call>", [call(0, "f", {"s": "x"})]),  # no </parameter>
        (QWEN, "<function=f>\n<parameter=s>\nx\n<parameter=a>\n1\n</parameter>\n</tool_call>", [call(0, "f", {"s": "x", "a": 1})]),
        (QWEN, "<function=f>\n<parameter=s>\n\n\n x\n\n</parameter></function>", [call(0, "f", {"s": "\n\n x\n"})]),
        (QWEN, "Use <function=f> so", [("text", "Use <function=f> so")]),
        (QWEN, "<tool_call><function=f><parameter=s>rm -rf /", []),
        (AnswerFormat(None, "glm45"), "<tool_call>f</tool_call>So", [call(0, "f", {}), ("text", "So")]),
        (AnswerFormat(None, "glm45"), "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call>", [call(0, "f", {"s": "x"})]),
        (AnswerFormat(None, "glm45"), "<tool_call>{}</tool_call>", [("text", "<tool_call>{}</tool_call>")]),
        (AnswerFormat(None, "deepseek_v3"), f"{DEEP}\n{DEEP}", [call(0, "f", {}), call(1, "f", {})]),
        (AnswerFormat(None, "deepseek_v3"), "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", [call(0, "f", {})]),
        (AnswerFormat("deepseek_r1", "deepseek_v3"), f"Hm <｜tool▁calls▁begin｜>{DEEP}<｜tool▁calls▁end｜>", [("reasoning", "Hm"), call(0, "f", {})]),
        (AnswerFormat(None, "deepseek_v3"), "<｜tool▁calls▁begin｜>no", []),
        (AnswerFormat(None, "kimi_k2"), "<|tool_call_begin|>f<|tool_call_argument_begin|>[]", [("text", "<|tool_call_begin|>f<|tool_call_argument_begin|>[]")]),
        (AnswerFormat(None, "granite"), '<|tool_call|> [{"name": "f", "arguments": {"a": 1}, "id": "x"}] ', [call(0, "f", {"a": 1})]),
        (AnswerFormat(None, "granite"), '<tool_call>[{"arguments": {"a": 1}, "name": "f"}, {"name": "f"}]', [call(0, "f", {"a": 1}), call(1, "f", {})]),
        (AnswerFormat(None, "granite"), '<|tool_call|>[{"name": "f", "arguments": {"a": x}}]', [("text", '<|tool_call|>[{"name": "f", "arguments": {"a": x}}]')]),
        (AnswerFormat(None, "phi4_mini_json"), "functools is a module", [("text", "functools is a module")]),
        (AnswerFormat(None, "phi4_mini_json"), '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>', [call(0, "f", {})]),
        (AnswerFormat(None, "llama4_pythonic"), "<|python_start|>[f(a=1), f()]<|python_end|>", [call(0, "f", {"a": 1}), call(1, "f", {})]),
        (AnswerFormat(None, "llama4_json"), '{"name": "f", "parameters": {"a": 1}}{"name": "f", "parameters": {}}', [call(0, "f", {"a": 1}), call(1, "f", {})]),
        (OSS, ANALYSIS + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>', [("reasoning", "Hm."), ("call", 0, "f", '{"a":1}')]),
        (OSS, ANALYSIS + ' to=functions.f<|channel|>commentary json<|message|>{}', [("reasoning", "Hm."), call(0, "f", {})]),
        (OSS, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>", [("text", "I look.\n\nDone.")]),
        (OSS, "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>So", [("reasoning", "Hm."), ("text", "So")]),
        (OSS, '<|channel|>final {"a": 1}', [("text", '{"a": 1}')]),
        (OSS, "<|channel|>commentary to=python code<|message|>1+1", [("text", "1+1")]),
        (OSS, "<|channel|>commentary to=functions.f<|message|>not JSON<|call|>", [("text", "not JSON")]),
        (OSS, "<|channel|>analysis to=f<|message|>{}", [call(0, "f", {})]),
        (OSS, "Just text", [("text", "Just text")]),
        (OSS, "<|channel|>anal", []),
        (OSS, "<|channel|>analysis<|message|>Say <|call|> or <|end|>, then", [("reasoning", "Say <|call|> or <|end|>, then")]),
        (AnswerFormat("openai_gptoss", None), ANALYSIS + " to=functions.f<|channel|>commentary<|message|>{}", [("reasoning", "Hm."), ("text", "{}")]),
    ],
)  # fmt: skip
def test_cases(form, text, expected):
    for pieces in ([text], list(text)):
        assert parse(form.parser(schemas=F), *pieces) == expected


def test_what_breaks_is_text_and_what_is_out_stays():
    long = "x" * STREAMED_FROM
    text = f'<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{"s": "{long}", oh}}<|tool_call_end|> So'
    found = parse(TOOL_PARSERS["kimi_k2"](), text)
    assert found == [("call", 0, "f", f'{{"s": "{long}", '), ("text", "oh}<|tool_call_end|> So")]
    assert found == parse(TOOL_PARSERS["kimi_k2"](), *text)


def test_an_answer_of_harmony_may_go_on_in_the_middle_of_a_message():
    for channel, kind in (("final", "text"), ("analysis", "reasoning")):
        parser = OSS.parser(f"<|start|>assistant<|channel|>{channel}<|message|>The ")
        assert parse(parser, "sea.<|end|>") == [(kind, "sea.")]
    assert parse(AnswerFormat(None, "openai").parser(), ANALYSIS + "<|channel|>final<|message|>So") == [("text", "Hm.\n\nSo")]


@pytest.mark.parametrize(
    ("kind", "prompt", "text", "expected"),
    [
        ("granite", "", "Here is my thought process: A\n\nHere is my response: B", [("reasoning", "A"), ("text", "B")]),
        ("granite", "", "Here's my thought process:\nA\nHere is my response:\nB", [("reasoning", "A"), ("text", "B")]),
        ("granite", "", "<think>A</think>\n<response>\nB</response>", [("reasoning", "A"), ("text", "B")]),
        ("granite", "", "Here is my answer", [("text", "Here is my answer")]),
        ("gemma4", "", "<|channel>thought\nA\n<channel|>B", [("reasoning", "A"), ("text", "B")]),
        ("gemma4", "<|channel>thought\n<channel|>", "B", [("text", "B")]),
        ("generic", "<seed:think>", "A</seed:think>B", [("reasoning", "A"), ("text", "B")]),
        ("generic", "", "<reasoning>A </think> B</reasoning><answer>C</answer>\n", [("reasoning", "A </think> B"), ("text", "C\n")]),
        ("generic", "", "<thoughts>A</thoughts><resp", [("reasoning", "A"), ("text", "<resp")]),
        ("deepseek_v3", "<｜tool▁output▁end｜>", "B", [("text", "B")]),
    ],
)
def test_reasoning_cases(kind, prompt, text, expected):
    for pieces in ([text], list(text)):
        assert parse(ReasoningParser(kind, prompt), *pieces) == expected


def test_formats_are_found_in_templates():
    assert {name: detect_tool_parser(source) for name, source in TEMPLATES.items()} == {name: name for name in TEMPLATES}
    assert detect_tool_parser("<tool_call> <tool_sep> <arg_key>") is None  # another family's
    for source, kind in (
        (GPT_OSS, "openai_gptoss"), (DEEPSEEK_V31, "deepseek_v3"), ("<｜Assistant｜></think>", "deepseek_r1"), (GRANITE + "</think>", "granite"),
        ("<|channel>thought<channel|>", "gemma4"), ("</seed:think>", "generic"), ("</think>", "qwen3"), (KIMI, None),
    ):  # fmt: skip
        assert detect_reasoning_format(source) == kind


RESULT = {"role": "tool", "tool_call_id": "toolu_1", "content": "SUNNY"}
CALLED = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY = [USER, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, RESULT]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_is_given_what_it_would_drop(name):
    """Tools, calls, also those beside a text, and results come out, in the model's own format."""
    template, tools = template_of(name), [tool("f", {"properties": {"a": {"description": "WHAT"}}})]
    for content in (None, "BESIDE"):
        history = [USER, {**HISTORY[1], "content": content}, RESULT]
        shown, known = shown_to(template, history, tools)
        text = template.render(shown, tools=known)
        assert ("WHAT" in text) and (name == "openai" or (content or "") in text)
        assert "SUNNY" in text or name.startswith(("deepseek", "openai"))  # whose templates of this test show no results
        begin = text[text.index("hi") + 2 :]
        found = parse(AnswerFormat(None, name).parser("", schemas=F), begin)
        assert [e for e in found if e[0] == "call"] == [call(0, "f", {"a": 1})]


def test_ids_of_calls_are_those_that_kimi_knows():
    again = [{**HISTORY[1], "tool_calls": [{**CALLED, "id": "functions.f:7"}]}, {**RESULT, "tool_call_id": "functions.f:7"}]
    last = [{**HISTORY[1], "tool_calls": [{**CALLED, "id": None}]}]
    text = template_of("kimi_k2").render([*HISTORY, *again, *last])
    assert [part.split("<")[0] for part in text.split("<|tool_call_begin|>")[1:]] == ["functions.f:0", "functions.f:7", "functions.f:8"]
    assert "## Return of functions.f:0\nSUNNY" in text and "## Return of functions.f:7\n" in text
    parser = TOOL_PARSERS["kimi_k2"]()
    events = parser.push(written("kimi_k2", {"a": 1})) + parser.finish()
    assert [e.id for e in events if isinstance(e, CallBegin)] == ["functions.f:0"]


def test_a_turn_of_gpt_oss_goes_on_with_all_that_it_said():
    """Its template shows one call of a message, and refuses a text beside the thought before it."""
    refuses = "{% for m in messages %}{% if m.tool_calls and m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}{% endfor %}"
    results = "{% for m in messages %}{% if m.role == 'tool' %}R{{ m.content }}{% elif m.tool_calls %}{{ m.tool_calls[0].id }}{% endif %}{% endfor %}"
    calls = [{**CALLED, "id": f"c{i}"} for i in range(3)]
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls}
    replies = [{**RESULT, "tool_call_id": f"c{i}", "content": str(i)} for i in (0, 2, 1)]
    text = ChatTemplate(refuses + GPT_OSS + results).render([USER, answer, *replies, USER])
    assert "analysis<|message|>Hm.\n\nI look.<|end|>" in text and text.count(" to=functions.f<") == 3
    assert text.endswith("c0R0c1c2R2R1")
    several = GPT_OSS.replace("m.tool_calls[0].function.name", "m.tool_calls | map(attribute='function.name') | join")
    assert ChatTemplate(several).render([USER, answer, *replies]).count(" to=functions.fff<") == 1
