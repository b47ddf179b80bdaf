"""Grammars of tool calls in each format: what a random model writes under them is read as calls that obey their schemas."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jsonschema
import pytest

from answers import error_of, joined
from engine_driver import make_core, run
from fake_engine import TEMPLATE, FakeEngine
from headrace.conversation.events import CallArguments, CallBegin, Text
from headrace.conversation.tool_formats import TOOL_PARSERS, JsonListParser, ToolParser
from headrace.conversation.tool_grammar import FunctionDef, Tool, calls_or_answer, forced_calls, free_calls
from server_driver import Api
from structured_driver import EOS, compiled, decode, encode, takes
from test_structured_generation import constrained
from tiny_models import write_tiny

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"leaf": {"$ref": "#/$defs/leaf"}, "inner": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["leaf", "inner"],
    "additionalProperties": False,
    "$defs": {"leaf": {"enum": ["#/x", 1], "description": "::= not GBNF"}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": CITY,
    "plant.tree": TREE,
    "now": {"type": "object", "additionalProperties": False},
}
TOOLS = [Tool(function=FunctionDef(name=n, parameters=s)) for n, s in SCHEMAS.items()]
LAID_OUT = ["granite", "kimi_k2", "openai"]  # these stand for all of call_layouts
FORMATS = ["hermes", "llama3_json", "mistral", "mistral 11", "pythonic", *LAID_OUT, None]


def text(marker: str) -> str:
    return json.dumps(marker)


def grammar(make, form: str | None, many: bool, tools=TOOLS) -> str:
    return make(form and form.split()[0], tools, many, text, args_tags=form == "mistral 11")


def reader(form: str | None) -> ToolParser:
    return JsonListParser() if form in ("pythonic", None) else TOOL_PARSERS[form.split()[0]]()


def read(form: str | None, answer: str, constrained: bool = False) -> tuple[list[tuple[str, Any]], str]:
    """Calls, and the text beside them."""
    parser = reader(form)
    parser.constrained = constrained
    events = parser.push(answer) + parser.finish()
    names = [e.name for e in events if isinstance(e, CallBegin)]
    arguments = ["".join(a.text for a in events if isinstance(a, CallArguments) and a.index == i) for i in range(len(names))]
    plain = "".join(e.text for e in events if isinstance(e, Text))
    return list(zip(names, map(json.loads, arguments), strict=True)), plain


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    core = make_core(str(write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)), max_model_len=500)
    yield core
    core.close()


@pytest.mark.parametrize(("form", "many"), [(f, m) for f in FORMATS for m in (True, False) if m or f not in LAID_OUT])
def test_forced_calls_are_calls(core, form, many):
    wish = {"grammar": grammar(forced_calls, form, many)}
    requests = [constrained(f"r{i}", wish, seed=i, max_tokens=300, logit_bias={EOS: 6.0}) for i in range(5)]
    ended = 0
    for result in run(core, requests).values():
        if result.finish_reason == "stop":
            ended += 1
            calls, plain = read(form, decode(result.ids[:-1]))
            assert calls and plain == ""
            assert read(form, decode(result.ids[:-1]), constrained=True) == (calls, "")
            assert (many and form != "openai") or len(calls) == 1
            for name, arguments in calls:
                jsonschema.Draft202012Validator(SCHEMAS[name]).validate(arguments)
    assert ended >= 2


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Köln", "days": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]',
    "mistral 11": '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 3}',
    None: '[{"name": "weather", "parameters": {"city": "Köln", "days": 3}}]',
    "llama4_pythonic": '{"name": "weather", "parameters": {"city": "Köln", "days": 3}}',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]',
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Köln", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Köln", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Köln", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln", "days": 3}',
}
BETWEEN = {"hermes": "\n", "llama3_json": "; ", "llama4_pythonic": "; ", "mistral 11": ""}


@pytest.mark.parametrize("form", list(WRITTEN))
def test_what_models_write_is_taken(form):
    one, several = (compiled(grammar=grammar(forced_calls, form, many)) for many in (False, True))
    call = WRITTEN[form]
    assert takes(one, call) and takes(several, call)
    wrong = (
        call.replace(" 3", ' "3"'),
        call.replace("weather", "wether"),
        call.replace('"days"', '"dais"'),
        "no call",
        call[:-1],
        "",
    )
    assert [w for w in wrong if takes(one, w) or takes(several, w)] == []
    assert not takes(several, call + "\n\n" + call)
    if form in BETWEEN:
        assert takes(several, call + BETWEEN[form] + call) and not takes(one, call + BETWEEN[form] + call)


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral 11", "kimi_k2", "openai", None])
def test_a_function_without_parameters_is_called_without_arguments(form):
    """So OpenAI's API has it; under a schema of any object a small model goes on for ever."""
    bare, of_any = (Tool(function=FunctionDef(name="weather", parameters=p)) for p in (None, {}))
    call = WRITTEN[form].replace('{"city": "Köln", "days": 3}', "{}")
    for tool, good in ((bare, False), (of_any, True)):
        matcher = compiled(grammar=grammar(forced_calls, form, False, [tool]))
        assert takes(matcher, call)
        assert takes(matcher, WRITTEN[form]) == good


@pytest.mark.parametrize("parameters", [{"enum": ["Rome", {"city": "Rome"}]}, {"type": ["object", "string"], "maxLength": 3}, {"const": 5}])
def test_arguments_are_an_object_whatever_else_a_schema_allows(parameters):
    """A call by its name alone came with a text, or with nothing, for arguments."""
    assert FunctionDef(name="f", parameters=parameters).schema == {**parameters, "type": "object"}


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "granite", "phi4_mini_json", "deepseek_v3", "kimi_k2"])
def test_strict_calls_stand_beside_any_text(form):
    matcher = compiled(grammar=grammar(free_calls, form, True))
    call = WRITTEN[form]
    for answer in ("", "hello", "é 漢字 \n < 3 [1] }", call, call + BETWEEN.get(form, "") + call):
        assert takes(matcher, answer), answer
    assert not takes(matcher, call.replace(" 3", ' "3"'))
    assert not takes(matcher, call.replace("weather", "wether"))
    if form in ("hermes", "granite"):
        assert takes(matcher, f"Let me see.\n{call}\nDone.") and takes(matcher, "<tool_cal")
    if form == "hermes":
        assert not takes(matcher, "a <tool_call> b")


def test_special_tokens_are_markers():
    """With a token for each marker: text cannot hold it, and what follows it is a call."""
    tokens = {"[TOOL_CALLS]": 3, "[ARGS]": 4}
    lark = free_calls("mistral", TOOLS, True, lambda m: f"<[{tokens[m]}]>", args_tags=True)
    matcher = compiled(grammar=lark)
    call = [3, *encode("weather"), 4, *encode('{"city": "x", "days": 1}')]
    for ids, good in (
        (encode("hello"), True),
        ([*encode("hello"), *call, *call], True),
        ([*call, *encode("text")], False),
        ([3, *encode("wether"), 4], False),
        ([4], False),
    ):
        copy = matcher.fork()
        assert (copy.accept(ids) and copy.complete) == good, ids


def test_markers_of_a_section_are_special_tokens():
    """Kimi's, beside reasoning: a section is nothing but calls, and text holds none of its tokens."""
    marks = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
             "<|tool_call_end|>", "<think>", "</think>")  # fmt: skip
    begin, end, call_begin, arguments, call_end, think, thought = tokens = range(3, 10)
    special = dict(zip(marks, tokens, strict=True))
    call = [call_begin, *encode("functions.weather:0"), arguments, *encode('{"city": "x", "days": 1}'), call_end]
    matcher = compiled(grammar=free_calls("kimi_k2", TOOLS, True, lambda m: f"<[{special[m]}]>", reasoning=("<think>", "</think>")))
    forced = compiled(grammar=forced_calls("kimi_k2", TOOLS, True, lambda m: f"<[{special[m]}]>"))
    section = [begin, *call, *call, end]
    for ids, good in (
        ([], True), (encode("hello"), True), (section, True), ([think, *encode("hm"), thought, *encode("So."), *section], True),
        ([begin, end], False), ([begin, *encode("x")], False), (call, False), (section[:-1], False),
    ):  # fmt: skip
        copy, other = matcher.fork(), forced.fork()
        assert (copy.accept(ids) and copy.complete) == good, ids
        assert (other.accept(ids) and other.complete) == (ids == section), ids


# ---------------------------------------------------------------------------------------------------------------------
# through the server

HI = [{"role": "user", "content": "hi"}]
BODY_TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
TEMPLATES = {
    "hermes": TEMPLATE + "{# <tool_call> </think> #}",
    "llama3_json": TEMPLATE + "{# <|python_tag|> #}",
    "mistral": TEMPLATE + "{# [TOOL_CALLS] #}",
    "mistral 11": TEMPLATE + "{# [TOOL_CALLS] [ARGS] #}",
    "granite": TEMPLATE + "{# <|tool_call|> <|start_of_role|> #}",
    "kimi_k2": TEMPLATE + "{# <|tool_calls_section_begin|> #}",
    "deepseek_v3": TEMPLATE + "{# <｜tool▁call▁begin｜> ```json #}",
    "openai": TEMPLATE + "{# <|channel|>commentary <|channel|>analysis #}",
    None: TEMPLATE,
}


def api_of(form: str | None, answer: str) -> Api:
    engine = FakeEngine(script=lambda ids, params: answer, supports_structured=True)
    engine.tokenizer.chat_templates = {"default": TEMPLATES[form]}
    return Api(engine, tool_parser="auto" if form else None)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
@pytest.mark.parametrize("form", [form for form in TEMPLATES if form])
def test_calls_are_forced_in_the_format_of_the_model(form, choice):
    api = api_of(form, WRITTEN[form])
    answer = api.ok("/v1/chat/completions", {"messages": HI, "tools": BODY_TOOLS, "tool_choice": choice})["choices"][0]
    call = answer["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Köln", "days": 3})
    assert answer["message"]["content"] is None
    assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    wish = api.engine.params[-1].structured_outputs
    assert wish.kind == "grammar"
    matcher = compiled(grammar=wish.grammar)
    assert takes(matcher, WRITTEN[form])
    other = WRITTEN[form].replace("weather", "now").replace('{"city": "Köln", "days": 3}', "{}")
    assert takes(matcher, other) == (choice == "required")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
@pytest.mark.parametrize("form", ["hermes", "deepseek_v3", "kimi_k2", "qwen3_coder"])
def test_forced_calls_come_behind_a_thought_that_the_prompt_has_opened(form, choice):
    """A model that has begun to think in the prompt would write them amid its thought."""
    call = WRITTEN.get(form) or (ARGUMENTS if choice != "required" else WRITTEN[None])
    engine = FakeEngine(script=lambda ids, params: f"Let me see <\n</think>\n\n{call}", supports_structured=True)
    engine.tokenizer.chat_templates = {"default": "{# </think> #}" + TEMPLATE + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"}
    api = Api(engine, tool_parser=form)
    body = {"messages": HI, "tools": BODY_TOOLS, "tool_choice": choice}
    message = api.ok("/v1/chat/completions", body)["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    assert (message["reasoning"], function["name"], json.loads(function["arguments"]), message["content"]) == ("Let me see <", "weather", {"city": "Köln", "days": 3}, None)
    matcher = compiled(grammar=api.engine.params[-1].structured_outputs.grammar)
    assert takes(matcher, f"Let me see <\n</think>\n\n{call}") and not takes(matcher, call) and not takes(matcher, "Let me see</think>hello")
    deltas = [choice["delta"] for chunk in api.events("/v1/chat/completions", body) for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Let me see <" and any("tool_calls" in delta for delta in deltas)
    cut = api.ok("/v1/chat/completions", {**body, "max_tokens": 9})["choices"][0]
    assert (cut["finish_reason"], cut["message"]["reasoning"], "tool_calls" in cut["message"]) == ("length", "Let me se", False)
    engine.script = lambda ids, params: f"Perhaps {call}"
    cut = api.ok("/v1/chat/completions", {**body, "max_tokens": len(f"Perhaps {call}".encode())})["choices"][0]
    assert (cut["finish_reason"], cut["message"]["reasoning"], "tool_calls" in cut["message"]) == ("length", f"Perhaps {call}", False)
    engine.script = lambda ids, params: call
    message = api.ok("/v1/chat/completions", {**body, "reasoning_effort": "none"})["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "weather" and "reasoning" not in message
    wish = api.engine.params[-1].structured_outputs
    assert takes(compiled(**{wish.kind: getattr(wish, wish.kind)}), call)


@pytest.mark.parametrize("form", ["hermes", "mistral", "deepseek_v3", "kimi_k2"])
def test_strict_calls_come_behind_a_thought_that_the_prompt_has_opened(form):
    """What a model thinks of markers is free, where its tokenizer has them as texts; its calls are held to their schemas."""
    call = WRITTEN[form]
    thought = f"I write {TOOL_PARSERS[form].markers[0]} so: {call.replace('3', '77')}. Well"
    engine = FakeEngine(script=lambda ids, params: f"{thought}</think>\n\nI look. {call}", supports_structured=True)
    engine.tokenizer.chat_templates = {"default": "{# </think> #}" + TEMPLATE + "<think>\n"}
    api = Api(engine, tool_parser=form)
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in BODY_TOOLS]
    message = api.ok("/v1/chat/completions", {"messages": HI, "tools": tools})["choices"][0]["message"]
    (called,) = message["tool_calls"]
    assert (message["reasoning"], message["content"].strip()) == (thought, "I look.")
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("weather", {"city": "Köln", "days": 3})
    matcher = compiled(grammar=api.engine.params[-1].structured_outputs.grammar)
    assert takes(matcher, f"{thought}</think>\n\nI look. {call}") and takes(matcher, f"{thought}</think>Hello")
    assert not takes(matcher, f"{thought}</think>{call.replace('3', '77')}") and not takes(matcher, thought)


ARGUMENTS = '{"city": "Köln", "days": 3}'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
@pytest.mark.parametrize("form", list(TEMPLATES))
def test_a_forced_call_that_is_cut_keeps_what_there_is(form, choice):
    named = choice != "required"
    text = ARGUMENTS if form is None and named else WRITTEN[form]
    api = api_of(form, text)
    begin = len(text[: text.index(ARGUMENTS)].encode())
    for most in (1, max(1, begin), begin + 1, begin + 9, begin + 14, begin + len(ARGUMENTS) - 1):
        body = {"messages": HI, "tools": BODY_TOOLS, "tool_choice": choice, "max_tokens": most}
        answer = api.ok("/v1/chat/completions", body)["choices"][0]
        written = text.encode()[begin:most].decode("utf-8", "replace")
        calls = answer["message"].get("tool_calls", [])
        assert [c["function"] for c in calls] == ([{"name": "weather", "arguments": written}] if named or written else [])
        assert answer["finish_reason"] == "length" and not answer["message"]["content"]
        events = api.events("/v1/chat/completions", body)
        streamed = joined(events)[0]
        assert (streamed["finish_reason"], streamed["content"]) == ("length", "")
        assert [(c["name"], c["arguments"]) for c in streamed["tool_calls"]] == [tuple(c["function"].values()) for c in calls]
        tools = [{"type": "function", **t["function"]} for t in BODY_TOOLS]
        flat = {"type": "function", "name": "weather"} if named else choice
        response = api.ok("/v1/responses", {"input": "hi", "tools": tools, "tool_choice": flat, "max_output_tokens": most})
        assert response["status"] == "incomplete"
        items = [(i["name"], i["arguments"], i["status"]) for i in response["output"] if i["type"] == "function_call"]
        assert items == [(*c["function"].values(), "incomplete") for c in calls]


@pytest.mark.parametrize("how", [{"tool_choice": "required"}, {}], ids=["required", "strict"])
def test_arguments_under_a_grammar_are_streamed(how):
    api = api_of("hermes", WRITTEN["hermes"])
    tools = [{"type": "function", "function": {**t["function"], "strict": not how}} for t in BODY_TOOLS]
    events = api.events("/v1/chat/completions", {"messages": HI, "tools": tools, **how})
    assert sum("tool_calls" in c["delta"] for e in events for c in e["choices"]) > 5
    assert joined(events)[0]["tool_calls"][0]["arguments"] == ARGUMENTS


def test_strict_tools_are_constrained_and_the_others_are_not():
    api = api_of("hermes", f"<think>hm</think>So.\n{WRITTEN['hermes']}")
    tools = [{"type": "function", "function": {**BODY_TOOLS[0]["function"], "strict": True}}, *BODY_TOOLS[1:]]
    answer = api.ok("/v1/chat/completions", {"messages": HI, "tools": tools})["choices"][0]
    assert answer["message"]["reasoning"] == "hm" and answer["message"]["content"] == "So."
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"
    matcher = compiled(grammar=api.engine.params[-1].structured_outputs.grammar)
    assert takes(matcher, WRITTEN["hermes"]) and takes(matcher, "only text")
    assert not takes(matcher, WRITTEN["hermes"].replace("3", '"3"'))
    assert takes(matcher, '<tool_call>\n{"name": "now", "arguments": {"anything": [1]}}\n</tool_call>')
    api.ok("/v1/chat/completions", {"messages": HI, "tools": BODY_TOOLS})
    assert api.engine.params[-1].structured_outputs is None
    error = error_of(api.post("/v1/chat/completions", {"messages": HI, "tools": tools, "structured_outputs": {"regex": "a"}}))
    assert error["param"] == "structured_outputs"


ANSWER = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "parameters": {"type": "integer"}}, "required": ["name"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}


@pytest.mark.parametrize("form", list(filter(None, WRITTEN)))
def test_calls_or_an_answer_in_its_format(form):
    matcher = compiled(grammar=grammar(partial(calls_or_answer, answer=ANSWER), form, True))
    call, answers = WRITTEN[form], ('{"name": "Rome"}', '{"parameters": 3, "name": "Rome"}')
    assert takes(matcher, call)
    for answer in answers:
        assert takes(matcher, answer)
        assert read(form, answer, constrained=True) == ([], answer)
    wrong = (call.replace(" 3", ' "3"'), call.replace("weather", "wether"), f"{call}\n{answers[0]}", answers[0] + call, '{"name": 3}', "hello", "")
    assert [w for w in wrong if takes(matcher, w)] == []


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("said", [WRITTEN["hermes"], '{"name": "Rome"}'])
def test_a_model_with_tools_and_a_format_calls_or_answers(strict, said):
    """As agents ask: tools until the answer is known, and then that in their schema."""
    api = api_of("hermes", said)
    tools = [{"type": "function", "function": {**t["function"], "strict": strict}} for t in BODY_TOOLS]
    flat = [{"type": "function", **t["function"]} for t in tools]
    own = [{"name": t["name"], "input_schema": t["parameters"]} for t in flat]
    choice = api.ok("/v1/chat/completions", {"messages": HI, "tools": tools, "response_format": FORMAT})["choices"][0]
    matcher = compiled(grammar=api.engine.params[-1].structured_outputs.grammar)
    assert takes(matcher, WRITTEN["hermes"]) and takes(matcher, '{"name": "Rome"}') and not takes(matcher, "Rome")
    assert takes(matcher, WRITTEN["hermes"].replace("3", '"3"')) != strict
    form = {"type": "json_schema", "name": "x", "schema": ANSWER}
    response = api.ok("/v1/responses", {"input": "hi", "tools": flat, "text": {"format": form}})
    message = api.ok("/v1/messages", {"messages": HI, "max_tokens": 200, "tools": own, "output_config": {"format": {k: form[k] for k in ("type", "schema")}}})
    ollama = api.ok("/api/chat", {"messages": HI, "tools": tools, "format": ANSWER, "stream": False})["message"]
    if said == WRITTEN["hermes"]:
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert [item["type"] for item in response["output"]] == ["function_call"]
        assert [block["type"] for block in message["content"]] == ["tool_use"] and ollama["tool_calls"]
    else:
        assert (choice["finish_reason"], choice["message"]["content"], ollama["content"]) == ("stop", said, said)
        assert response["output"][0]["content"][0]["text"] == message["content"][0]["text"] == said
        assert not choice["message"].get("tool_calls")


@pytest.mark.parametrize("form", ["llama3_json", "llama4_pythonic", "hermes"])
@pytest.mark.parametrize("rest", ['{"x": 1}}', '{"x": 1}, "why": "so"}', '[1, 2], "why": "so"}', '"y'])
def test_an_answer_that_looks_like_a_call_to_what_is_no_tool(form, rest):
    """As of agents that say in JSON of their own what is to be done."""
    said = '{"name": "Rome", "parameters": ' + rest
    api = Api(FakeEngine(script=lambda ids, params: said, supports_structured=True), tool_parser=form)
    body = {"messages": HI, "tools": BODY_TOOLS, "response_format": {"type": "json_object"}}
    message = api.ok("/v1/chat/completions", body)["choices"][0]["message"]
    assert message["content"] == said and "tool_calls" not in message
    deltas = [choice["delta"] for chunk in api.events("/v1/chat/completions", body) for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == said and not any("tool_calls" in delta for delta in deltas)


def test_a_format_beside_calls_that_are_forced_or_have_no_grammar():
    """There is no answer that it could be of; or no call."""
    api = api_of("hermes", WRITTEN["hermes"])
    body = {"messages": HI, "tools": BODY_TOOLS, "response_format": FORMAT}
    assert api.ok("/v1/chat/completions", {**body, "tool_choice": "required"})["choices"][0]["message"]["tool_calls"]
    assert not takes(compiled(grammar=api.engine.params[-1].structured_outputs.grammar), '{"name": "Rome"}')
    engine = FakeEngine(script=lambda ids, params: '{"name": "Rome"}', supports_structured=True)
    engine.tokenizer.chat_templates = {"default": TEMPLATE}
    api = Api(engine, tool_parser="pythonic")
    tools = [{"type": "function", "function": {**t["function"], "strict": True}} for t in BODY_TOOLS]
    answer = api.ok("/v1/chat/completions", {"messages": HI, "tools": tools, "response_format": FORMAT})
    assert answer["choices"][0]["message"]["content"] == '{"name": "Rome"}' and api.engine.params[-1].structured_outputs.kind == "json"


def test_without_grammars_strict_and_forced_tools_are_refused():
    api = api_of("hermes", "x")
    api.engine.supports_structured = False
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert error_of(api.post("/v1/chat/completions", {"messages": HI, "tools": strict}))["param"] == "tools"
    body = {"messages": HI, "tools": BODY_TOOLS, "tool_choice": "required"}
    assert error_of(api.post("/v1/chat/completions", body))["param"] == "tool_choice"
    body = {"messages": HI, "tools": BODY_TOOLS, "response_format": FORMAT}
    assert error_of(api.post("/v1/chat/completions", body))["param"] == "response_format"
