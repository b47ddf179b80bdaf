"""Tool calls and reasoning in answers: what is written comes out, however the text is cut, and nothing is lost."""

from __future__ import annotations

import gc
import itertools
import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.conversation.answer import AnswerFormat, AnswerParser
from headrace.conversation.events import CallArguments, CallBegin, Event, Reasoning, Text
from headrace.conversation.reasoning import REASONING_FORMATS, ReasoningParser
from headrace.conversation.tool_formats import TOOL_PARSERS, JsonListParser, NamedCallParser
from headrace.errors import ParameterError

NAMES = ["hermes", "llama3_json", "mistral", "pythonic"]  # for the others see test_tool_formats


def merged(events: list[Event]) -> list[tuple]:
    """Events with neighbours of a kind joined, as a client would join the deltas; ids left out."""
    found: list[list] = []
    for e in events:
        if isinstance(e, CallBegin):
            found.append(["call", e.index, e.name, ""])
        elif isinstance(e, CallArguments):
            assert found[-1][:2] == ["call", e.index]
            found[-1][3] += e.text
        else:
            kind = "text" if isinstance(e, Text) else "reasoning"
            assert e.text, "an empty delta"
            if found and found[-1][0] == kind:
                found[-1][1] += e.text
            else:
                found.append([kind, e.text])
    return [tuple(f) for f in found]


def parse(parser, *pieces: str) -> list[tuple]:
    return merged([e for piece in pieces for e in parser.push(piece)] + parser.finish())


def tools(name: str, *pieces: str) -> list[tuple]:
    return parse(TOOL_PARSERS[name](), *pieces)


def call(index: int, name: str, arguments: dict) -> tuple:
    return "call", index, name, json.dumps(arguments, ensure_ascii=False)


def cut(text: str, at: list[int]) -> list[str]:
    return [text[a:b] for a, b in itertools.pairwise([0, *sorted(at), len(text)])]


# ---------------------------------------------------------------------------------------------------------------------
# written by a model of each format, read back

texts = st.text(st.sampled_from("ab \n.,;{}é😀"), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(st.sampled_from("ab\"\\{}[]<>/\n'é😀(),="), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_", min_size=1, max_size=3), inner, max_size=3),
    max_leaves=6,
)
keywords = st.from_regex(r"[ab_]{1,3}", fullmatch=True)
calls = st.tuples(st.from_regex(r"[a-c]{1,3}_?[a-c]", fullmatch=True), st.dictionaries(keywords, json_values, max_size=3))


def dump(name: str, arguments: dict, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def write(name: str, text: str, wanted: list[tuple[str, dict]]) -> str:
    """The answer as a model of that kind writes it: text, then calls."""
    if not wanted:
        return text
    if name == "hermes":
        return text + "".join(f"\n<tool_call>\n{dump(*c)}\n</tool_call>" for c in wanted)
    if name == "llama3_json":
        return text + "<|python_tag|>" + "; ".join(dump(*c, "parameters") for c in wanted)
    if name == "mistral":
        return text + "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a, ensure_ascii=False)}" for n, a in wanted)
    listed = ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in wanted)
    return text + f"<|python_start|>[{listed}]<|python_end|>"


@settings(max_examples=200)
@given(st.sampled_from(NAMES), st.sampled_from(["", "Let me see. ", "é😀\n\nfirst:"]), st.lists(calls, max_size=3), st.data())
def test_what_is_written_is_read(name, text, wanted, data):
    answer = write(name, text, wanted)
    expected = [("text", text)] if text else []
    expected += [call(i, n, a) for i, (n, a) in enumerate(wanted)]
    pieces = cut(answer, data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    assert tools(name, *pieces) == expected


WRITTEN_VALUES = [
    "1e999", "-0", "0.0", "1.0", "1", "1E+2", "10000000000000000000000000001", "0.1000000000000000055511151231257827", "1" * 5000,
    '"\\u00e9\\/"', '{ "b" :1,"a":\t2 }', '{"a": 1, "a": 2}', '"\\ud800"', "[1e-7,-1.50]", "[ ]",
]  # fmt: skip


@pytest.mark.parametrize("value", WRITTEN_VALUES, ids=lambda v: v[:30])
def test_arguments_are_what_the_model_wrote(value):
    """Not a character of a value is changed, whatever another program would make of it."""
    arguments = f'{{"x": {value} , "x":{value}}}'
    call = f'{{"type": "function", "name": "f", "KEY": {arguments}, "id": 1e999}}'
    within = f'{{"id": 5, "function": {{"KEY":{arguments} ,"name":"f"}}}}'
    for written in (call, within):
        body = written.replace("KEY", "arguments")
        assert tools("hermes", f"<tool_call>{body}</tool_call>") == [("call", 0, "f", arguments)]
        assert tools("mistral", f"[TOOL_CALLS][{body}]") == [("call", 0, "f", arguments)]
        assert tools("llama3_json", written.replace("KEY", "parameters")) == [("call", 0, "f", arguments)]
    as_text = call.replace(arguments, json.dumps(arguments)).replace("KEY", "arguments")
    assert tools("hermes", f"<tool_call>{as_text}</tool_call>") == [("call", 0, "f", arguments)]
    assert tools("mistral", f"[TOOL_CALLS]f[ARGS]{arguments}") == [("call", 0, "f", arguments)]


def test_line_breaks_in_strings_are_the_only_change():
    assert tools("hermes", '<tool_call>{"name": "f", "arguments": {"a":\n "b\n\tc\\"" }}') == [
        ("call", 0, "f", '{"a":\n "b\\n\\tc\\"" }')
    ]


@pytest.mark.parametrize(
    ("written", "json_text"),
    [("1e999", "1e999"), ("-0", "-0"), ("- 1.0", "-1.0"), ("1", "1"), ("1" * 40, "1" * 40), ("1_000", "1000"), ("0x1F", "31"), (".5", "0.5"),
     ("{'b': 1e2, 'a': [True, None, ()]}", '{"b": 1e2, "a": [true, null, []]}'), ("'é' 'x'", '"éx"'), ("\"\\n\"", '"\\n"')],
)  # fmt: skip
def test_numbers_of_python_are_what_the_model_wrote(written, json_text):
    assert tools("pythonic", f"[f(x={written})]") == [("call", 0, "f", f'{{"x": {json_text}}}')]


@pytest.mark.parametrize("value", ["nan", "float('inf')", "1j", "{1: 2}", "{**a}", "b'x'", "x", "f'{1}'", "1 if 2 else 3", ".5e999"])
def test_what_json_cannot_say_is_no_call(value):
    text = f"[f(x={value})]"
    assert tools("pythonic", text) == [("text", text)]


JSON_NAMES = ["hermes", "llama3_json", "mistral", "mistral list", "list"]
spaces = st.sampled_from(["", " ", "\n", " \t\r\n"])


def write_constrained(name: str, spelled: list[tuple[str, str]], space: str) -> str:
    """Calls as the grammars of tool_grammar have them; the arguments are JSON text."""
    if name == "mistral":
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in spelled)
    key = "arguments" if name in ("hermes", "mistral list") else "parameters"
    objects = [f'{{{space}"name"{space}:{space}"{n}"{space},{space}"{key}":{space}{a}{space}}}' for n, a in spelled]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects)
    if name == "llama3_json":
        return "; ".join(objects)
    return "[TOOL_CALLS]" * (name == "mistral list") + f"[{', '.join(objects)}]"


@settings(max_examples=300)
@given(st.sampled_from(JSON_NAMES), st.lists(calls, min_size=1, max_size=3), spaces, st.booleans(), st.data())
def test_arguments_of_constrained_calls_come_as_they_are_written(name, wanted, space, ascii, data):
    """In any pieces, and up to any end: what is there of a call is the beginning of what would have come."""
    indent = data.draw(st.sampled_from([None, 1]))
    spelled = [(n, json.dumps(a, ensure_ascii=ascii, indent=indent)) for n, a in wanted]
    answer = write_constrained(name, spelled, space)

    def read(*pieces: str) -> list[tuple]:
        parser = JsonListParser() if name == "list" else TOOL_PARSERS[name.split()[0]]()
        parser.constrained = True
        return parse(parser, *pieces)

    whole = [("call", i, n, a) for i, (n, a) in enumerate(spelled)]
    assert read(*cut(answer, data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))) == read(*answer) == whole
    end = data.draw(st.integers(0, len(answer)))
    at = data.draw(st.lists(st.integers(0, end), max_size=4))
    found = [e for e in read(*cut(answer[:end], at)) if e[0] == "call"]
    assert len(found) <= len(whole)
    for i, (got, full) in enumerate(zip(found, whole, strict=False)):
        assert got[:3] == full[:3] and (full[3].startswith(got[3]) if i == len(found) - 1 else got == full)
    assert bool(found) == (end > answer.index(spelled[0][1])), "a call begins with its arguments"


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "\n<tool_call>", "<tool", '{"name": "f", "arguments": {"a": "<tool_call>"}}', "{", "}",
    '"name"', '{"name": "f"', '"}', "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f", " ", "\n", "[", "]", ",", ";", "(a=1)",
    "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[f(a='x]'), g()]", "[f(", "text", "\\", "'", '{"a": 1}', "<th",
    '[{"name": "g", "arguments": null}, {"name": "h"}]', "<think>", "</think>", "[THINK]", "[/THINK]", "{}", "é😀",
]  # fmt: skip
salads = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@settings(max_examples=200)
@given(st.sampled_from(NAMES), salads, st.data())
def test_any_text_in_any_pieces_gives_the_same(name, text, data):
    whole = tools(name, text)
    assert tools(name, *text) == whole
    assert tools(name, *cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))) == whole


@settings(max_examples=250)
@given(st.sampled_from(sorted(REASONING_FORMATS)), st.sampled_from(["", "<think>\n", "x</think>\n\n"]), salads, st.data())
def test_reasoning_in_any_pieces_is_the_same(kind, prompt, text, data):
    whole = parse(ReasoningParser(kind, prompt), text)
    assert parse(ReasoningParser(kind, prompt), *text) == whole
    assert parse(ReasoningParser(kind, prompt), *cut(text, data.draw(st.lists(st.integers(0, len(text)))))) == whole


@settings(max_examples=200)
@given(st.sampled_from(NAMES), salads, st.data())
def test_reasoning_and_calls_together_in_any_pieces_are_the_same(name, text, data):
    form = AnswerFormat("qwen3", name)
    whole = parse(form.parser(), text)
    assert parse(form.parser(), *cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))) == whole


MARKERS = {
    "hermes": ("<tool_call>", "\n<tool_call>"), "llama3_json": ("<|python_tag|>",), "mistral": ("[TOOL_CALLS]",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
}  # fmt: skip


@settings(max_examples=200)
@given(st.sampled_from(NAMES), salads)
def test_without_calls_nothing_is_lost_but_a_call_that_the_end_cuts_off(name, text):
    events = tools(name, text)
    if any(e[0] == "call" for e in events):
        return
    given_out = "".join(e[1] for e in events)
    lost = text[len(given_out) :]
    assert text.startswith(given_out) and (not lost or lost.lstrip().startswith(MARKERS[name]))


EXAMPLES = {
    "hermes": 'Hi.\n<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>\n<tool_call>{"name": "g", '
    '"arguments": {}}</tool_call>\nDone',
    "llama3_json": '{"name": "f", "parameters": {"x": "a;{"}}; {"name": "g", "parameters": {}}',
    "mistral": 'Hi.[TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}}, {"name": "g", "arguments": {}}]Done',
    "pythonic": " [f(x='a]\\'', y={'k': [1, True]}), g()] Done",
}


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_in_two_and_in_three(name):
    text = EXAMPLES[name]
    whole = tools(name, text)
    assert [e[2] for e in whole if e[0] == "call"] == ["f", "g"]
    for i in range(len(text) + 1):
        assert tools(name, text[:i], text[i:]) == whole
        for j in range(i, len(text) + 1, 7):
            assert tools(name, text[:i], text[i:j], text[j:]) == whole


# ---------------------------------------------------------------------------------------------------------------------
# single cases


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', [call(0, "f", {})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [call(0, "f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [call(0, "f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}', [call(0, "f", {})]),
        ("hermes", "<tool_call>no</tool_call>", [("text", "<tool_call>no</tool_call>")]),
        ("hermes", '<tool_call>{"a": NaN}</tool_call>', [("text", '<tool_call>{"a": NaN}</tool_call>')]),
        ("hermes", "a < b <tool", [("text", "a < b <tool")]),
        ("hermes", 'A\n<tool_call>\n{"name": "f", "argu', [("text", "A")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}!', [("text", '<tool_call>{"name": "f", "arguments": [1]}!')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n\nAnd?', [call(0, "f", {}), ("text", "\n\nAnd?")]),
        ("hermes", "  \n", [("text", "  \n")]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', [call(0, "f", {"a": 1})]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', [call(0, "f", {})]),
        ("llama3_json", '{"type": "function", "function": {"name": "f", "parameters": {}}}', [call(0, "f", {})]),
        ("llama3_json", '{"name": "Ada", "age": 3}', [("text", '{"name": "Ada", "age": 3}')]),
        ("llama3_json", '{"capital": "Paris', [("text", '{"capital": "Paris')]),
        ("llama3_json", '{"name": "f", "parameters": {"a"', [("text", '{"name": "f", "parameters": {"a"')]),
        ("llama3_json", 'Hm <|python_tag|>{"name": "f", "parameters": {"a"', [("text", "Hm ")]),
        ("llama3_json", "<|python_tag|>print(1)", [("text", "<|python_tag|>print(1)")]),
        ("llama3_json", 'I use {"name": "f", "parameters": {}}', [("text", 'I use {"name": "f", "parameters": {}}')]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', [call(0, "f", {"a": 1})]),
        ("mistral", "A[TOOL_CALLS]", [("text", "A")]),
        ("mistral", "[TOOL_CALLS] not json", [("text", "[TOOL_CALLS] not json")]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arg', [call(0, "f", {})]),
        ("mistral", "[TOOL_CALLS]f[WHAT]{}", [("text", "[TOOL_CALLS]f[WHAT]{}")]),
        ("pythonic", "[f(a=-1.5, b=None, c=true)]", [call(0, "f", {"a": -1.5, "b": None, "c": True})]),
        ("pythonic", "[a.b(x=1)]", [call(0, "a.b", {"x": 1})]),
        ("pythonic", "[f(1)]", [("text", "[f(1)]")]),
        ("pythonic", "[f(a=b)]", [("text", "[f(a=b)]")]),
        ("pythonic", "[f(a=__import__('os').system('x'))]", [("text", "[f(a=__import__('os').system('x'))]")]),
        ("pythonic", "[Note] see", [("text", "[Note] see")]),
        ("pythonic", "[f(a=1), g(", [("text", "[f(a=1), g(")]),
        ("pythonic", "[f(a=" + "(" * 500 + ")" * 500 + ")]", [("text", "[f(a=" + "(" * 500 + ")" * 500 + ")]")]),
    ],
)  # fmt: skip
def test_cases(name, text, expected):
    assert tools(name, text) == expected


def test_arguments_are_json_that_can_be_sent():
    ((_, _, _, arguments),) = tools("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d", "b": "é"}}</tool_call>')
    arguments.encode()
    assert json.loads(arguments) == {"a": "\ud83d", "b": "é"}


def test_plain_text_is_not_held():
    parser = TOOL_PARSERS["llama3_json"]()
    assert parser.push("The ") == [Text("The ")]
    assert parser.push('{"name"') == [Text('{"name"')]
    for name, start in (("llama3_json", '{"capital": '), ("pythonic", "[Note that")):
        assert merged(TOOL_PARSERS[name]().push(start)) == [("text", start)]


def test_ids_are_new_for_each_call_and_short_for_mistral():
    text = EXAMPLES["mistral"]
    ids = [e.id for _ in range(2) for e in TOOL_PARSERS["mistral"]().push(text) if isinstance(e, CallBegin)]
    assert len(set(ids)) == 4 and all(len(i) == 9 and i.isalnum() for i in ids)
    events = TOOL_PARSERS["mistral"]().push("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}")
    assert events == [CallBegin(0, "abcdefghi", "f"), CallArguments(0, "{}")]


def seconds_of(name: str, pieces: list[str]) -> float:
    """Of this process alone, and without the collection of what other tests have left."""
    gc.disable()
    try:
        started = time.process_time()
        tools(name, *pieces)
        return time.process_time() - started
    finally:
        gc.enable()


@pytest.mark.parametrize("name", NAMES)
def test_work_is_linear_in_the_text(name):
    opening = {"hermes": '<tool_call>{"a', "llama3_json": '<|python_tag|>{"a', "mistral": '[TOOL_CALLS]f[ARGS]{"a',
               "pythonic": "[f(a='"}[name]  # fmt: skip
    for body in ("b", "\\", "{", opening, " ", "\n"):
        seconds = []
        for n in (4_000, 32_000):
            pieces = [opening, *itertools.repeat(body, n // len(body))]
            seconds.append(min(seconds_of(name, pieces) for _ in range(2)))
        assert seconds[1] < 24 * seconds[0] + 0.05, f"{body!r}: {seconds}; 8 is linear, 64 quadratic"


def test_required_and_named_calls():
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    expected = [call(0, "f", {"a": 1}), call(1, "g", {})]
    assert parse(JsonListParser(), text) == parse(JsonListParser(), *text) == parse(JsonListParser(), " ", text) == expected
    assert parse(NamedCallParser("f"), '{"a"', ": 1}") == [("call", 0, "f", '{"a": 1}')]


# ---------------------------------------------------------------------------------------------------------------------
# reasoning


@pytest.mark.parametrize(
    ("kind", "prompt", "text", "expected"),
    [
        ("qwen3", "", "<think>\nA\nB\n</think>\n\nC", [("reasoning", "A\nB"), ("text", "C")]),
        ("qwen3", "<think>\n", "A</think>C", [("reasoning", "A"), ("text", "C")]),
        ("qwen3", "<think>\n\n</think>\n\n", "C", [("text", "C")]),
        ("qwen3", "", "C <think>", [("text", "C <think>")]),
        ("qwen3", "", " <thi", [("text", " <thi")]),
        ("qwen3", "", "<think>\n\n</think>\n\nC", [("text", "C")]),
        ("qwen3", "", "<think>\nA </thin", [("reasoning", "A </thin")]),
        ("qwen3", "<think>\n", "<think>\nA</think>C", [("reasoning", "A"), ("text", "C")]),
        ("deepseek_r1", "<｜Assistant｜>", "A</think>C", [("reasoning", "A"), ("text", "C")]),
        ("deepseek_r1", "<｜Assistant｜>", "<think>A</think>C", [("reasoning", "A"), ("text", "C")]),
        ("deepseek_r1", "<｜Assistant｜></think>", "C", [("text", "C")]),
        ("mistral", "[/INST]", "[THINK]A[/THINK]C", [("reasoning", "A"), ("text", "C")]),
    ],
)
def test_reasoning_cases(kind, prompt, text, expected):
    assert parse(ReasoningParser(kind, prompt), text) == expected


def test_markers_in_reasoning_are_reasoning():
    parser = AnswerFormat("qwen3", "hermes").parser("<think>")
    text = '<tool_call>{"name": "f"}</tool_call></think>\n<tool_call>{"name": "g"}</tool_call>'
    assert parse(parser, text) == [("reasoning", '<tool_call>{"name": "f"}</tool_call>'), call(0, "g", {})]
    assert parser.num_calls == 1


def test_formats_are_chosen_by_name_or_by_template():
    qwen = "{{ '<tool_call>' }} {{ '<think>' + r + '</think>' }}"
    assert AnswerFormat.choose(qwen) == AnswerFormat("qwen3", "hermes")
    assert AnswerFormat.choose(qwen, None, "mistral") == AnswerFormat(None, "mistral")
    assert AnswerFormat.choose("[TOOL_CALLS] [THINK]") == AnswerFormat("mistral", "mistral")
    assert AnswerFormat.choose("<｜Assistant｜></think>") == AnswerFormat("deepseek_r1", None)
    assert AnswerFormat.choose(None) == AnswerFormat(None, None)
    for option in ({"tools": "hermés"}, {"reasoning": "x"}):
        with pytest.raises(ParameterError):
            AnswerFormat.choose("", **option)
    tokenizer = SimpleNamespace(special_ids={7, 9}, encode=lambda text, add_special_tokens: [len(text)] * (1 + ("<" in text)))
    # one token each, whose id is the marker's length: [THINK] and [CALL_ID] are special, what holds `<` is two tokens
    assert AnswerFormat("mistral", None).needs_special_tokens(tokenizer)
    assert not AnswerFormat("mistral", None).needs_special_tokens(tokenizer, reasoning=False)
    assert AnswerFormat("qwen3", "mistral").needs_special_tokens(tokenizer)
    assert not AnswerFormat("qwen3", "mistral").needs_special_tokens(tokenizer, tools=False)
    assert not AnswerFormat("qwen3", "hermes").needs_special_tokens(tokenizer)
    plain = AnswerParser(None, None)
    assert plain.push("<think>") == [Text("<think>")] and plain.finish() == []
    assert isinstance(ReasoningParser("qwen3", "<think>").push("a")[0], Reasoning)
