"""An answer in a format may have reasoning before it, which the format does not hold: by each kind of reasoning, and in each API."""

from __future__ import annotations

import json

import pytest

from fake_engine import TEMPLATE, ByteTokenizer, FakeEngine
from headrace.api.structured import Structure, renamed
from headrace.conversation.answer import AnswerFormat
from headrace.conversation.events import Reasoning, Text
from headrace.conversation.reasoned_grammar import answer_alone, behind_reasoning
from headrace.conversation.reasoning import REASONING_FORMATS
from headrace.conversation.tool_grammar import calls_or_answer
from headrace.errors import ParameterError
from server_driver import Api
from structured_driver import compiled, encode, special_of, takes, with_tokens
from test_structured_tools import BODY_TOOLS, FORMAT, HI, TOOLS, WRITTEN

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ANSWER, THOUGHT = '{"n": 3}', 'Let me see.\n{"n": no} < é 漢'
BLOCKS = [(kind, block[0][0], block[1][-1]) for kind, form in REASONING_FORMATS.items() for block in form.blocks if kind != "openai_gptoss"]


def read(kind: str, prompt: str, text: str) -> tuple[str, str]:
    parser = AnswerFormat(kind, None).parser(prompt, tools=False)
    events = parser.push(text) + parser.finish()
    return "".join(e.text for e in events if isinstance(e, Reasoning)), "".join(e.text for e in events if isinstance(e, Text))


@pytest.mark.parametrize(("kind", "opening", "closing"), BLOCKS)
def test_reasoning_comes_before_the_answer(kind, opening, closing):
    implied = REASONING_FORMATS[kind].implied
    matcher = compiled(grammar=behind_reasoning(answer_alone(SCHEMA), kind, "<user>hi<assistant>", json.dumps))
    for space in ("", "\n\n"):
        whole = f"{opening}{THOUGHT}{closing}{space}{ANSWER}"
        assert takes(matcher, whole) and takes(matcher, whole.removeprefix(opening)) == implied
        assert read(kind, "", whole) == (THOUGHT, ANSWER)
    assert takes(matcher, ANSWER) != implied
    wrong = (f"{opening}{THOUGHT}{closing}\nhello", f"{opening}{THOUGHT}{ANSWER}", f"{ANSWER}x", f"{opening}{THOUGHT}{closing}\n" + '{"n": "x"}')
    assert [w for w in wrong if takes(matcher, w)] == []


@pytest.mark.parametrize(("kind", "opening", "closing"), BLOCKS)
def test_the_prompt_may_have_opened_or_closed_it(kind, opening, closing):
    matcher = compiled(grammar=behind_reasoning(answer_alone(SCHEMA), kind, f"<assistant>{opening}\n", json.dumps))
    assert takes(matcher, f"{THOUGHT}{closing}\n\n{ANSWER}") and not takes(matcher, ANSWER)
    assert read(kind, f"<assistant>{opening}\n", f"{THOUGHT}{closing}\n\n{ANSWER}") == (THOUGHT, ANSWER)
    plain = answer_alone(SCHEMA)
    assert behind_reasoning(plain, kind, f"<assistant>{opening}\n\n{closing}\n\n", json.dumps) == plain


@pytest.mark.parametrize("within", ["</thoughts>so</seed:think>", "<seed:think>so</seed:think>", "[/THINK]"])
def test_a_thought_that_the_prompt_opens_ends_with_its_own_marker(within):
    """What ends others is a part of it: for the grammar, and for who reads it."""
    prompt, text = "<assistant><think>\n", f"{within} on</think>\n{ANSWER}"
    assert takes(compiled(grammar=behind_reasoning(answer_alone(SCHEMA), "generic", prompt, json.dumps)), text)
    assert read("generic", prompt, text) == (f"{within} on", ANSWER)


def test_markers_that_are_tokens():
    tokens = {"<think>": 3, "</think>": 4}
    for prompt, head in (("hi", [3]), ("<think>\n", []), ("<think>", [3])):
        lark = behind_reasoning(answer_alone(SCHEMA), "qwen3", prompt, lambda marker: f"<[{tokens[marker]}]>")
        matcher = compiled(grammar=lark)
        assert matcher.accept([*head, *encode(THOUGHT), 4, *encode("\n\n" + ANSWER)]) and matcher.complete
        assert not compiled(grammar=lark).accept([*head, *encode(THOUGHT), 4, *encode("hello")])


def test_a_marker_that_is_a_token_and_a_word():
    tokens = {"<|channel>": 3, "<channel|>": 4}
    for prompt, head in (("<|turn>model\n", [3, *encode("thought\n")]), ("<|turn>model\n<|channel>thought\n", []), ("<|channel>thought", [3, *encode("thought")])):
        lark = behind_reasoning(answer_alone(SCHEMA), "gemma4", prompt, special_of(tokens))
        matcher = compiled(grammar=lark)
        assert matcher.accept([*head, *encode(THOUGHT), 4, *encode(ANSWER)]) and matcher.complete, prompt


def test_harmony_answers_in_its_final_message():
    tokens = {"<|channel|>": 3, "<|message|>": 4, "<|end|>": 5, "<|start|>": 6, "<|constrain|>": 7}
    special = special_of(tokens)
    thought = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    final = f"<|channel|>final<|message|>{ANSWER}"
    lark = calls_or_answer("openai", TOOLS, True, special, SCHEMA)
    matcher = compiled(grammar=behind_reasoning(lark, "openai_gptoss", "<|start|>assistant", special))
    for text in (final, thought + final, thought + thought + final.replace("<|message|>", " <|constrain|>json<|message|>"), WRITTEN["openai"], thought + WRITTEN["openai"]):
        copy = matcher.fork()
        assert copy.accept(with_tokens(text, tokens)) and copy.complete, text
    for text in (ANSWER, final.replace("3", '"x"'), thought, final + thought):
        copy = matcher.fork()
        assert not (copy.accept(with_tokens(text, tokens)) and copy.complete), text
    assert read("openai_gptoss", "<|start|>assistant", thought + final) == (THOUGHT, ANSWER)
    assert behind_reasoning(lark, "openai_gptoss", "<|start|>assistant", json.dumps) == lark  # its markers are no tokens


def api_of(said: str, template: str = TEMPLATE + "{# <tool_call> </think> #}") -> Api:
    engine = FakeEngine(script=lambda ids, params: said, supports_structured=True)
    engine.tokenizer.chat_templates = {"default": template}
    return Api(engine)


@pytest.mark.parametrize("tools", [[], BODY_TOOLS])
def test_in_each_api(tools):
    form = {"type": "json_schema", "name": "x", "schema": FORMAT["json_schema"]["schema"]}
    api = api_of('<think>hm</think>\n\n{"name": "Rome"}')
    message = api.ok("/v1/chat/completions", {"messages": HI, "tools": tools, "response_format": FORMAT})["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", '{"name": "Rome"}')
    matcher = compiled(grammar=api.engine.params[-1].structured_outputs.grammar)
    assert takes(matcher, '<think>hm</think>\n\n{"name": "Rome"}') and takes(matcher, '{"name": "Rome"}') and not takes(matcher, "hm")
    assert takes(matcher, f"<think>hm</think>\n\n{WRITTEN['hermes']}") == bool(tools)
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    items = api.ok("/v1/responses", {"input": "hi", "tools": flat, "text": {"format": form}})["output"]
    assert [item["type"] for item in items] == ["reasoning", "message"] and items[1]["content"][0]["text"] == '{"name": "Rome"}'
    asked = {"messages": HI, "max_tokens": 99, "thinking": {"type": "adaptive"}, "output_config": {"format": {k: form[k] for k in ("type", "schema")}}}
    blocks = api.ok("/v1/messages", asked)["content"]
    assert [(block["type"], block.get("thinking", block.get("text"))) for block in blocks] == [("thinking", "hm"), ("text", '{"name": "Rome"}')]


def test_where_the_output_obeys_from_its_first_token():
    api = api_of('{"name": "Rome"}')
    schema = FORMAT["json_schema"]["schema"]
    begun = [*HI, {"role": "assistant", "content": '{"na'}]
    for path, body in (
        ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"json": schema}}),
        ("/v1/chat/completions", {"messages": begun, "response_format": FORMAT, "continue_final_message": True}),
        ("/v1/messages", {"messages": begun, "max_tokens": 9, "thinking": {"type": "adaptive"}, "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("/v1/chat/completions", {"messages": HI, "response_format": FORMAT, "reasoning_effort": "none"}),
        ("/v1/chat/completions", {"messages": HI, "response_format": FORMAT, "chat_template_kwargs": {"enable_thinking": False}}),
        ("/api/chat", {"messages": HI, "format": schema, "stream": False, "think": False}),
    ):
        api.ok(path, body)
        assert api.engine.params[-1].structured_outputs.kind == "json", path
    closed = api_of('{"name": "Rome"}', TEMPLATE + "{# </think> #}<think>\n\n</think>\n\n")
    closed.ok("/v1/chat/completions", {"messages": HI, "response_format": FORMAT})
    assert closed.engine.params[-1].structured_outputs.kind == "json"


def test_a_thought_that_the_prompt_opens_whatever_the_switches_say_ends_before_the_answer():
    """Models that only reason have no switch."""
    schema = FORMAT["json_schema"]["schema"]
    form = {"type": "json_schema", "schema": schema}
    api = api_of('hm</think>\n\n{"name": "Rome"}', TEMPLATE + "{# </think> #}<think>\n")
    message = api.ok("/v1/chat/completions", {"messages": HI, "response_format": FORMAT, "reasoning_effort": "none"})["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", '{"name": "Rome"}')
    matcher = compiled(grammar=api.engine.params[-1].structured_outputs.grammar)
    assert takes(matcher, 'hm</think>\n\n{"name": "Rome"}') and not takes(matcher, '{"name": "Rome"}')
    blocks = api.ok("/v1/messages", {"messages": HI, "max_tokens": 99, "output_config": {"format": form}})["content"]
    assert [(block["type"], block.get("thinking", block.get("text"))) for block in blocks] == [("thinking", "hm"), ("text", '{"name": "Rome"}')]


@pytest.mark.parametrize("tools", [[], BODY_TOOLS])
@pytest.mark.parametrize(("wrong", "is_placed"), [({"type": "frob"}, True), ({"type": "object", "required": "💧" * 50}, False)])
def test_what_cannot_be_compiled_is_named_as_it_was_asked_for(tools, wrong, is_placed):
    """Also where the backend does not say which part of the grammar it is."""
    api = api_of("{}")
    api.ok("/v1/chat/completions", {"messages": HI, "tools": tools, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}})
    lark = api.engine.params[-1].structured_outputs.grammar
    with pytest.raises(ParameterError) as told:
        compiled(grammar=lark)
    error = renamed(told.value, Structure("grammar", lark, "tools" if tools else "response_format", "response_format"))
    if tools and not is_placed:
        assert (error.field, error.value) == ("tools", "their parameters, or the schema of response_format")
    else:
        assert (error.field, error.value) == ("response_format", "the schema")


class HarmonyTokenizer(ByteTokenizer):
    """The markers of gpt-oss are tokens of their own."""

    marks = {f"<|{name}|>": 400 + i for i, name in enumerate(("channel", "message", "end", "start", "constrain"))}  # noqa: RUF012
    special_ids = added_ids = ByteTokenizer.special_ids | frozenset(marks.values())

    def encode(self, text, add_special_tokens=True):
        return [self.marks[text]] if text in self.marks else super().encode(text, add_special_tokens)


def test_gpt_oss_has_no_switch_and_answers_in_a_message():
    api = api_of(f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}")
    api.engine.tokenizer = HarmonyTokenizer(TEMPLATE + "{# <|channel|>analysis <|channel|>commentary #}")
    form = {"type": "json_schema", "schema": SCHEMA}
    api.ok("/v1/messages", {"messages": HI, "max_tokens": 9, "output_config": {"format": form}})
    assert "analysis" in api.engine.params[-1].structured_outputs.grammar
    answer = api.ok("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_object"}, "reasoning_effort": "none"})
    assert "analysis" in api.engine.params[-1].structured_outputs.grammar and answer["choices"][0]["message"]["content"] == ANSWER
    for think in (None, False, "low"):
        answer = api.ok("/api/chat", {"messages": HI, "format": SCHEMA, "stream": False, "think": think})
        assert "analysis" in api.engine.params[-1].structured_outputs.grammar and answer["message"]["content"] == ANSWER
