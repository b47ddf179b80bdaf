"""Chat templates: what Transformers renders, within limits, with contents and arguments in the form a template knows."""

from __future__ import annotations

import concurrent.futures
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.conversation.message_forms import check_messages
from headrace.conversation.template import ChatTemplate
from headrace.conversation.tool_prompt import shown_to, with_tools
from headrace.errors import ParameterError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last_user = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last_user %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- message.content or '' }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- (call.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nYear: " + date_string }}
{%- if messages[0]['role'] == 'system' %}
    {{- "\\n" + messages[0]['content']|trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools is not none %}
    {{- "\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("One call at a time!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content']|trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' ~ tools|tojson ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if system is defined and loop.first else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- call.function|tojson }}{%- if call.id|length != 9 %}{{- raise_exception("ids have 9 characters") }}{%- endif %}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content|trim + eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' ~ {"content": message.content}|tojson ~ '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, assistant and tool roles') }}{%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

PARTS = """{%- for message in messages %}
{{- '<' + message.role + '>' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
    {%- for part in message.content %}{%- if part.type == 'text' %}{{- '(' + part.text + ')' }}{%- endif %}{%- endfor %}
{%- endif %}
{%- endfor %}"""

ONLY_PARTS = """{%- for message in messages %}{{- '<' + message.role + '>' }}
{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{%- endfor %}"""

STRING_ARGUMENTS = """{%- for m in messages %}{{- m.role + ':' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{- c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}{%- endfor %}
{%- endfor %}"""

TEMPLATES = {
    "chatml": CHATML, "hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "parts": PARTS,
}  # fmt: skip

TOOL = {"type": "function", "function": {"name": "f", "description": "é < & '", "parameters": {"type": "object"}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"q": "a<b>é", "n": [1, None]}}}
USER, ASSISTANT = {"role": "user", "content": " Hi <there> "}, {"role": "assistant", "content": " Hello. "}
SYSTEM, CALLING = {"role": "system", "content": "Be brief."}, {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": '{"r": 1}'}
CONVERSATIONS = [
    [USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT, USER, ASSISTANT],
    [USER, CALLING, RESULT], [USER, {**CALLING, "content": None}, RESULT, ASSISTANT, USER], [ASSISTANT], [USER, USER],
    [USER, {**ASSISTANT, "reasoning_content": "Hm.\n"}], [USER, {**ASSISTANT, "reasoning": "Hm."}],
    [{"role": "critic", "content": "x"}],
]  # fmt: skip


def by_transformers(source: str, messages: list[dict], **options) -> str | None:
    messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
    try:
        return render_jinja_template([messages], chat_template=source, **TOKENS, **options)[0][0]
    except Exception:
        return None


def by_headrace(source: str, messages: list[dict], **options) -> str | None:
    try:
        return ChatTemplate(source, TOKENS).render(messages, **options)
    except ParameterError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(name):
    rendered = 0
    for messages in CONVERSATIONS:
        for tools in (None, [TOOL]):
            for prompt in (True, False):
                options = {"tools": tools, "add_generation_prompt": prompt}
                ours = by_headrace(TEMPLATES[name], messages, **options)
                assert ours == by_transformers(TEMPLATES[name], messages, **options)
                rendered += ours is not None
    assert rendered >= 12


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["The answer is", "The answer is: ", "a CONTINUE_FINAL_MESSAGE_TAG b", "x\n"])
def test_continued_messages_end_with_their_content(name, content):
    messages = [USER, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ours = by_headrace(TEMPLATES[name], messages, **options)
    assert ours == by_transformers(TEMPLATES[name], messages, **options)
    assert ours is not None and ours.endswith((content, content.rstrip()))


@settings(max_examples=80)
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(st.text(max_size=20), min_size=1, max_size=3))
def test_any_text_comes_through(name, contents):
    messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    text = by_headrace(TEMPLATES[name], messages)
    assert text == by_transformers(TEMPLATES[name], messages, add_generation_prompt=True)
    assert text is not None and all(c.strip() in text for c in contents)


# ---------------------------------------------------------------------------------------------------------------------
# what clients send, in the form that the template knows


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": t} for t in texts]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_are_joined_for_templates_that_know_strings_only(role):
    def chat(content):
        message = {"role": role, "content": content, **({"tool_call_id": "abcdefghi"} if role == "tool" else {})}
        return {"system": [message, USER], "user": [message], "assistant": [USER, message],
                "tool": [USER, CALLING, message]}[role]  # fmt: skip

    for name in ("chatml", "hermes", "llama3", "mistral"):
        source = TEMPLATES[name]
        assert by_headrace(source, chat(parts("One.", "Two."))) == by_headrace(source, chat("One.\nTwo."))
    if role != "tool":
        assert f"<{role}>(One.)(Two.)" in (by_headrace(PARTS, chat(parts("One.", "Two."))) or "")
    assert f"<{role}>One" in (by_headrace(ONLY_PARTS, chat("One")) or "") or role == "tool"


def test_earlier_arguments_come_as_objects_or_as_text():
    as_text = {**CALL, "function": {"name": "f", "arguments": json.dumps(CALL["function"]["arguments"])}}
    texts = [{"role": "assistant", "tool_calls": [as_text]}, CALLING]
    for name in ("hermes", "llama3", "mistral"):
        first, second = (by_headrace(TEMPLATES[name], [USER, m, RESULT]) for m in texts)
        assert first == second and '{"q": "a<b>é", "n": [1, null]}' in (second or "")
    assert '```json\n{"q": "' in (by_headrace(STRING_ARGUMENTS, [USER, texts[0], RESULT]) or "")
    broken = {**CALL, "function": {"name": "f", "arguments": '{"q": '}}
    assert '{\\"q\\": ' in (by_headrace(HERMES, [USER, {"role": "assistant", "tool_calls": [broken]}]) or "")


def test_the_callers_messages_are_left_alone():
    messages = [USER, {"role": "assistant", "content": parts("a"), "tool_calls": [CALL]}]
    before = json.dumps(messages)
    by_headrace(HERMES, messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


# ---------------------------------------------------------------------------------------------------------------------
# switches, names, refusals


def test_switches_from_an_allow_list():
    template = ChatTemplate(HERMES, TOKENS, allowed_kwargs=("enable_thinking", "messages", "bos_token"))
    assert template.render([USER], chat_template_kwargs={"enable_thinking": False}).endswith("</think>\n\n")
    assert template.render([USER], chat_template_kwargs={"enable_thinking": True}) == template.render([USER])
    for name in ("messages", "bos_token", "tools", "add_generation_prompt", "x"):
        with pytest.raises(ParameterError) as error:
            template.render([USER], chat_template_kwargs={name: 1})
        assert error.value.field == "chat_template_kwargs" and "enable_thinking" in error.value.allowed
    with pytest.raises(ParameterError):
        template.render([USER], chat_template_kwargs={"enable_thinking": object()})


def test_named_templates():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools|length }} tools"})
    assert template.render([USER]) == "plain" and template.render([USER], tools=[TOOL, TOOL]) == "2 tools"
    assert ChatTemplate({"rag": "only one"}).render([USER]) == "only one"
    with pytest.raises(ParameterError, match="rag"):
        ChatTemplate({"rag": "a", "tool_use": "b"}).render([USER])
    assert template.source(tools=True) == "{{ tools|length }} tools"
    for nothing in (None, "", {}):
        with pytest.raises(ParameterError, match="no chat template"):
            ChatTemplate(nothing)
    with pytest.raises(ParameterError, match="jinja2"):
        ChatTemplate("{% if %}")


def test_special_tokens_that_the_tokenizer_lacks():
    source = "[{{ bos_token + eos_token }}{{ pad_token }}{{ 'default' if cls_token is not defined else cls_token }}]"
    assert ChatTemplate(source, {"pad_token": None}).render([USER]) == "[default]"
    assert ChatTemplate(source, {"bos_token": "a", "cls_token": "b", "x": "c"}).render([USER]) == "[ab]"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"), ("Hi", "messages"), ([1], "messages[0]"), ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"), ([{"role": "user", "content": 3}], "messages[0].content"),
        ([USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
         "messages[1].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "x", "name": object()}], "messages[0].name"),
        ([{"role": "user" * 50, "content": "x"}], "messages[0].role"),
    ],
)  # fmt: skip
def test_messages_that_are_none(messages, field):
    with pytest.raises(ParameterError) as error:
        ChatTemplate(CHATML).render(messages)
    assert error.value.field == field


def test_refusals_of_templates_are_told_and_faults_are_not_echoed():
    with pytest.raises(ParameterError, match="roles must alternate") as error:
        ChatTemplate(GEMMA).render([USER, USER])
    assert error.value.field == "messages[1]"
    with pytest.raises(ParameterError, match="TypeError") as error:
        ChatTemplate("{{ 'a' + 1 }}").render([USER])
    assert "concatenate" not in str(error.value)
    for options in ({"continue_final_message": True},
                    {"continue_final_message": True, "add_generation_prompt": False}):  # fmt: skip
        with pytest.raises(ParameterError, match="continue_final_message"):
            ChatTemplate(CHATML).render([USER, {"role": "assistant", "tool_calls": [CALL]}], **options)
    with pytest.raises(ParameterError, match="continue_final_message"):
        ChatTemplate("nothing").render([USER], add_generation_prompt=False, continue_final_message=True)


# ---------------------------------------------------------------------------------------------------------------------
# the sandbox

FOR = "{% for a in range(9000) %}"
HOSTILE = {
    "loops": FOR * 4 + "{% endfor %}" * 4,
    "loops over nothing": "{% set r = range(9000)|list %}{% for a in r %}{% for b in r %}{% for c in r if false %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "output": FOR * 2 + "{{ 'x' * 1000 }}" + "{% endfor %}" * 2,
    "recursion": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "multiplied": "{{ 'x' * 10**10 }}",
    "a list multiplied": "{{ ([1] * 10**10)|length }}",
    "doubled": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "added": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "nested": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested json": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x|tojson }}",
    "power": "{{ 9 ** 99999 }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%999999999d'|format(1) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 999999999) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "center": "{{ 'x'|center(10**10) }}",
    "indent": "{{ 'x'|indent(10**10, true) }}",
    "replace": "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "replace filter": "{{ ('x' * 10**6)|replace('x', 'y' * 10**6) }}",
    "join": "{{ range(90000)|list|join('x' * 10**6) }}",
    "str join": "{{ ('x' * 10**6).join(['y'] * 90000) }}",
    "join of what a filter gives": "{{ range(90000)|map('string')|join('x' * 10**6) }}",
    "replace by names": "{{ ('x' * 10**6)|replace(new='y' * 10**6, old='x') }}",
    "indent with a text": "{{ ('\n' * 10**6)|indent('x' * 10**6) }}",
    "wordwrap": "{{ ('x ' * 10**5)|wordwrap(1, wrapstring='x' * 10**6) }}",
    "translate": "{{ ('x' * 10**6).translate({120: 'y' * 10**6}) }}",
    "expandtabs": "{{ ('\t' * 10**5).expandtabs(10**5) }}",
    "sum": "{{ ([[1] * 10**4] * 10**4)|sum(start=[])|length }}",
    "bytes": "{{ 'x'.encode().ljust(10**10) }}",
    "to_bytes": "{{ (5).to_bytes(10**10, 'big')|length }}",
    "map": "{{ ['x']|map('center', 10**10)|list }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "range": "{% for i in range(10**10) %}{% endfor %}",
    "class": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}{{ undefined.x }}",
    "mutation": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_ended(name):
    started = time.thread_time()
    with pytest.raises(ParameterError):
        ChatTemplate(HOSTILE[name], timeout=0.3, max_chars=2_000_000).render([USER])
    assert time.thread_time() - started < 2


ORDINARY = (
    "5000000 * 0.5", "0.5 * 5000000", "2 ** 62 * 7", "2 ** -1", "'ab' * 3", "3 * 'ab'", "'ab' * -1", "[1, 2] * 2", "'a' * true",
    "'%d %s' % (1700000000, 'x')", "'%5.2f|%-4s|' % (3.14159, 'a')", "'%s'|format(1700000000)", "'%(a)s'|format(a='x')",
    "'{:>5}|{a}'.format(7, a='b')", "'a\nb\n\nc'|indent", "'a\nb'|indent(2, true)", "'a\nb'|indent(width='> ', blank=true)",
    "'a b c'|replace(' ', '')", "'aaa'|replace('a', 'bb', 2)", "'aaa'|replace(new='b', old='a')", "''|replace('', 'x')",
    "'a b'.replace(' ', '--')", "'abc'.replace('', '-')", "[1, 2]|join", "[1, 2]|join(', ')", "'abc'|join('-')",
    "[{'a': 1}, {'a': 2}]|join('+', attribute='a')", "[1, 2]|map('string')|join(d='/')", "','.join(['a', 'b'])",
    "', '.join([1, 2]|map('string'))", "''.join({'a': 1})", "[1, 2, 3]|sum", "[{'a': 1}, {'a': 2}]|sum('a')",
    "[[1], [2]]|sum(start=[])", "nothing|join(',')", "nothing|replace('a', 'b')", "none|string", "1700000000|string",
    "[1, {'a': none}]|pprint", "'a b c d'|wordwrap(3)", "'a b c d'|wordwrap(3, wrapstring='|')", "'abcdef'|truncate(3, true, '')",
    "[1, 2, 3]|batch(2, 0)|list", "[1, 2, 3]|slice(2)|list", "'x'|center(5)", "'x'.ljust(3) ~ 'y'.rjust(3) ~ '7'.zfill(3)",
    "'a\tb'.expandtabs() ~ 'a\tb'.expandtabs(2)", "'a' ~ 1 ~ none ~ [2] ~ nothing", "('a' ~ 'b') ~ ('c' ~ (1 + 1))",
)  # fmt: skip


@pytest.mark.parametrize("expression", ORDINARY)
def test_what_is_small_is_as_in_jinja2(expression):
    source = "{% for i in range(2) %}{{ " + expression + " }};{% endfor %}"
    assert ChatTemplate(source).render([USER]) == ImmutableSandboxedEnvironment().from_string(source).render()


def test_limits_are_per_render():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", timeout=1, max_chars=100)
    for _ in range(3):
        with pytest.raises(ParameterError, match="100 characters"):
            template.render([{"role": "user", "content": "x" * 101}])
        assert template.render([{"role": "user", "content": "x" * 100}]) == "x" * 100


def test_threads_share_a_template():
    template = ChatTemplate(HERMES, TOKENS)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: template.render([{"role": "user", "content": str(i)}]), range(200)))
    assert [t.split("\n")[1] for t in texts] == [f"{i}<|im_end|>" for i in range(200)]


# ---------------------------------------------------------------------------------------------------------------------
# what clients send in the fields that may be null, empty or missing

FIRST = "{%- for m in messages %}{{- '<' + m.role + '>' }}"
STYLES = {  # each fails, or loses something, with some form of what says nothing
    "adds content": FIRST + "{{- m.content + '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "prints content": FIRST + "{{- m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "calls if content is none": FIRST
    + "{%- if m['content'] is none %}{% for c in m.tool_calls or [] %}{{ c['function'].name + c['function'].arguments }}{% endfor %}"
    + "{%- else %}{{- m['content'] }}{% endif %}{% endfor %}",
    "calls if defined": FIRST
    + "{%- if m.tool_calls is defined and m.tool_calls is not none %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    + "{%- else %}{{- m.content | trim }}{% endif %}{% endfor %}",
    "parts": FIRST + "{%- if m.content is string %}{{- m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    + "{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "only parts": FIRST + "{%- for p in m.content %}{{ p.text }}{% endfor %}"
    + "{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "first part": FIRST + "{%- if m.content is string %}{{- m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    + "{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "short ids": FIRST + "{%- for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
    + "{{- c.function | tojson ~ c.id }}{% endfor %}{{- (m.content or '') ~ (m.tool_call_id or '') }}{% endfor %}",
    "names": FIRST + "{{- m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    + "{%- if m.role == 'tool' %}{{- m.name + '()' }}{% endif %}{% endfor %}",
    "reasoning": FIRST + "{%- if m.reasoning_content is defined %}{{- m.reasoning_content.strip() }}{% endif %}{{- m.content or '' }}"
    + "{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "gets content": FIRST + "{{- m.get('content') }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "mistral": MISTRAL, "hermes": HERMES,
}  # fmt: skip
CALLED = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "CITY"}'}}
NOTHING = dict.fromkeys(("name", "refusal", "function_call", "audio", "reasoning_content", "reasoning", "tool_call_id"))


def answered(call: dict, result: object = "SUNNY", **assistant: object) -> list[dict]:
    return [
        {"role": "user", "content": "hi"}, {"role": "assistant", **assistant, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_nothing_in_every_form(style):
    """Calls and results come out, whatever stands for no content, and always as the same text."""
    function = CALLED["function"]
    histories = [
        *(answered(CALLED, content=c) for c in (None, "", [])), answered(CALLED), answered(CALLED, content=None, **NOTHING),
        answered({**CALLED, "function": {**function, "arguments": {"q": "CITY"}}}), answered(CALLED, parts("SUNNY")),
        answered({**CALLED, "index": None}),
    ]  # fmt: skip
    texts = {by_headrace(STYLES[style], history) for history in histories}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text is not None and "look_up" in text and "CITY" in text and "SUNNY" in text and "None" not in text
    assert "'q'" not in text
    if style == "names":
        assert text.endswith("look_up()")


@pytest.mark.parametrize("style", STYLES)
def test_what_says_nothing_does_not_hide_what_does(style):
    def text(*messages: dict) -> str | None:
        return by_headrace(STYLES[style], [{"role": "user", "content": "hi"}, *messages])

    plain = text({"role": "assistant", "content": "FINE"})
    assert plain is not None and "FINE" in plain
    for fields in ({"tool_calls": []}, {"tool_calls": None}, NOTHING, {"content": None, "refusal": "FINE"}, {"content": parts("FINE")}):
        assert text({"role": "assistant", "content": "FINE", **fields}) == plain, fields
    empty = [by_headrace(STYLES[style], answered(CALLED, result)) for result in (None, "", [])]
    assert len(set(empty)) == 1 and empty[0] is not None and "None" not in empty[0]
    no_arguments = [by_headrace(STYLES[style], answered({**CALLED, "function": {"name": "f", "arguments": a}})) for a in (None, "", "{}", {})]
    assert len(set(no_arguments)) == 1 and no_arguments[0] is not None and "null" not in no_arguments[0]


def test_no_parts_are_an_empty_text():
    for style in ("parts", "first part", "adds content"):
        texts = [by_headrace(STYLES[style], [{"role": "user", "content": c}]) for c in ("", [])]
        assert texts[0] == texts[1] == "<user>"


def test_ids_are_left_alone_where_no_probe_passes():
    picky = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.function.name != 'look_up' %}"
    picky += "{{ raise_exception('who?') }}{% endif %}{{ c.id }}{% endfor %}{% endfor %}"
    assert by_headrace(picky, answered(CALLED, content="x")) == CALLED["id"]


def test_numbers_that_json_has_not_stay_as_they_are_written():
    text = by_headrace(HERMES, answered({**CALLED, "function": {"name": "f", "arguments": '{"a": 1e999}'}}))
    assert text is not None and "Infinity" not in text and "1e999" in text


def test_a_refusal_names_the_message_with_which_it_begins():
    broken = [USER, ASSISTANT] * 6 + [ASSISTANT] + [USER, ASSISTANT] * 6
    with pytest.raises(ParameterError, match="roles must alternate") as error:
        ChatTemplate(GEMMA).render(broken)
    assert error.value.field == "messages[12]"
    with pytest.raises(ParameterError) as error:
        ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.missing.name }}{% endfor %}").render([USER])
    assert error.value.field == "messages[0]"


# ---------------------------------------------------------------------------------------------------------------------
# templates that know no tools


@pytest.mark.parametrize("system", [[], [SYSTEM], [{"role": "developer", "content": parts("Be", "brief.")}]], ids=len)
def test_tools_and_calls_are_spelled_for_templates_that_know_none(system):
    """One system message, all calls and results as text, and roles in turn, as such templates want them."""
    history = [*system, *answered(CALLED, parts("SUNNY"), content=parts("Let me", "see.")), {**RESULT, "content": None}, USER, ASSISTANT, USER]
    told = with_tools(history, [TOOL])
    assert [m["role"] for m in told] == [system[0]["role"] if system else "system", "user", "assistant", "user", "assistant", "user"]
    head, call, results = told[0]["content"], told[2]["content"], told[3]["content"]
    assert "<tools>" in head and json.dumps(TOOL, ensure_ascii=False) in head and head.startswith("Be") == bool(system)
    assert call == 'Let me\nsee.\n<tool_call>\n{"name": "look_up", "arguments": {"q": "CITY"}}\n</tool_call>'
    assert results == "<tool_response>\nSUNNY\n</tool_response>\n<tool_response>\n\n</tool_response>\n" + USER["content"]
    assert with_tools(history, []) == (told[1:] if not system else [{**check_messages(system)[0]}, *told[1:]])
    with pytest.raises(ParameterError, match=r"messages\[0\].content"):
        with_tools([{"role": "user", "content": [5]}], [])


def test_tools_in_another_shape_are_not_shown_to_a_template():
    """Command R's template wants `name` and `parameter_definitions` at the top of a tool, and fails without them."""
    cohere = "{% for t in tools or [] %}{{ t.name + t.parameter_definitions }}{% endfor %}{{ messages[0].content }}"
    assert not ChatTemplate({"default": "{{ messages[0].content }}", "tool_use": cohere}).shows_tools
    assert not ChatTemplate("{# tools #}{{ messages[0].content }}").shows_tools
    assert ChatTemplate(HERMES).shows_tools and ChatTemplate(MISTRAL).shows_tools


def test_a_template_is_given_what_it_would_drop_as_text():
    for source, tools, spelled in ((HERMES, [TOOL], False), (HERMES, None, False), (CHATML, [TOOL], True), (CHATML, None, True)):
        template = ChatTemplate(source, TOKENS)
        text = template.render(*(shown := shown_to(template, answered(CALLED), tools))[:1], tools=shown[1])
        assert '"look_up", "arguments": {"q": "CITY"}' in text and "SUNNY" in text
        assert (tools is None) or '"description": "é < & \'"' in text
        assert (shown[1] is None) if spelled else shown == (answered(CALLED), tools)
