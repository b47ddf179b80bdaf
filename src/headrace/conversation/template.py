"""Conversations to prompt text through the checkpoint's chat template.

What a template sees is what Transformers shows it, but for what clients send in a form that it does not take: see
message_forms.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from headrace.conversation.literal_content import LiteralContent
from headrace.conversation.message_forms import PROBE, MessageForms, check_messages, plain
from headrace.conversation.sandbox import BoundedSandbox, TemplateLimitError
from headrace.conversation.switches import ALLOWED_KWARGS
from headrace.errors import ParameterError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}) | set(
    SPECIAL_TOKENS
)
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # the space shows whether the template trims contents
FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)  # of a template


class ChatTemplate:
    """The chat template of a checkpoint: compiled once, used by any number of threads at a time.

    `templates` is jinja2 text, or named texts of which "tool_use" is taken when there are tools and else "default".
    `literal`: what is rendered is for its shown() and spelled(), which keep special tokens in the content as text.
    Raises ParameterError when there is none, or when it does not compile.
    """

    def __init__(
        self, templates: str | Mapping[str, str] | None, special_tokens: Mapping[str, str | None] | None = None, *,
        allowed_kwargs: Sequence[str] = ALLOWED_KWARGS, timeout: float = 5.0, max_chars: int = 8_000_000,
        literal: LiteralContent | None = None,
    ):  # fmt: skip
        if not templates:
            raise ParameterError("messages", "a conversation", "prompts only: the model has no chat template")
        self.sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        given = {name: token for name, token in (special_tokens or {}).items() if name in SPECIAL_TOKENS and token}
        # templates join these two without asking; of the others some templates have a default of their own
        self.special_tokens = {"bos_token": "", "eos_token": "", **given}
        self.allowed_kwargs = frozenset(allowed_kwargs) - RESERVED
        self.literal = literal
        self._sandbox = BoundedSandbox(timeout, max_chars)
        self._templates: dict[str, _Template] = {}
        for name, source in self.sources.items():
            try:
                self._templates[name] = _Template(self._sandbox, source, self.special_tokens)
            except (jinja2.TemplateError, RecursionError) as error:
                raise ParameterError("chat_template", name, f"a valid jinja2 template: {_clean(error)}") from None

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, templates: str | Mapping[str, str] | None = None, **options: Any
    ) -> ChatTemplate:
        """With the texts of a Tokenizer's special tokens; its own templates, where there are no others."""
        tokens = {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKENS}
        return cls(tokenizer.chat_templates if templates is None else templates, tokens, **options)

    def source(self, tools: bool = False) -> str:
        """The text of the template that is used with or without tools."""
        return self._select(tools).source

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template that is used without tools shows earlier calls."""
        return "tool_calls" in self.source()

    @cached_property
    def shows_tools(self) -> bool:
        """Whether tools as OpenAI's API describes them come out: there are templates of other shapes."""
        function = {"name": PROBE, "description": "d", "parameters": {"type": "object", "properties": {}}}
        try:
            return PROBE in self.render([{"role": "user", "content": "hi"}], tools=[{"type": "function", "function": function}])
        except ParameterError:
            return False

    @property
    def keeps_later_systems(self) -> bool:
        """Whether a system message in the middle of a conversation comes out where it stands."""
        return self._select(False).forms.keeps_later_systems()

    @property
    def takes_several_calls(self) -> bool:
        """Whether a message with two calls comes out as one."""
        return self._select(True).forms.takes_several_calls()

    def _select(self, tools: bool) -> _Template:
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        raise ParameterError("messages", "a conversation", f"the templates are named {sorted(self._templates)}")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True, continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The prompt text. Special tokens are in it: encode it without adding any.

        `continue_final_message`: the text ends with the last message's content, without what would end the turn.
        Raises ParameterError naming the field.
        """
        if continue_final_message and add_generation_prompt:
            raise ParameterError("continue_final_message", True, "false when add_generation_prompt is true")
        template = self._select(bool(tools))
        chat = check_messages(messages)
        variables = {
            **self._checked_kwargs(chat_template_kwargs),
            "tools": plain(list(tools), "tools") if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        chat = template.forms.adapt(chat)
        if self.literal is not None:  # now: JSON's escapes are undone
            variables, chat = self.literal.mark(variables), self.literal.mark(chat)
        variables |= self.special_tokens
        if not continue_final_message:
            return template.render({**variables, "messages": chat})
        content = _tag_final_message(chat)
        return _cut_at_tag(template.render({**variables, "messages": chat}), content)

    def _checked_kwargs(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        for name in kwargs or ():
            if name not in self.allowed_kwargs:
                allowed = ", ".join(sorted(self.allowed_kwargs)) or "nothing"
                raise ParameterError("chat_template_kwargs", name, f"the names {allowed}")
        return plain(dict(kwargs or {}), "chat_template_kwargs")


class _Template:
    """One compiled template and what its probes say."""

    def __init__(self, sandbox: BoundedSandbox, source: str, special_tokens: Mapping[str, str]):
        self.source, self._sandbox, self._special_tokens = source, sandbox, special_tokens
        self._compiled = sandbox.compile_template(source)
        self.forms = MessageForms(self._probe)

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._sandbox.render(self._compiled, variables)
        except TemplateLimitError as error:
            raise ParameterError("messages", "a conversation", f"less than this: {_clean(error)}") from None
        except (jinja2.TemplateError, *FAULTS) as error:
            refusal = isinstance(error, jinja2.TemplateError)
            told = f": {_clean(error)}" if refusal else f" (it fails with {type(error).__name__})"
        first = self._first_refused(variables)
        value = f"a message of the role {variables['messages'][first]['role']}"
        raise ParameterError(f"messages[{first}]", value, f"a conversation that the chat template accepts{told}")

    def _first_refused(self, variables: Mapping[str, Any]) -> int:
        """The message with which the refusal begins, found by halving: what is refused is so with more behind it."""
        chat, deadline = variables["messages"], time.thread_time() + self._sandbox.max_seconds

        def refused(count: int) -> bool:
            try:
                self._sandbox.render(self._compiled, {**variables, "messages": chat[:count], "add_generation_prompt": False})
            except (jinja2.TemplateError, *FAULTS):
                return True
            return False

        passes, fails = 0, len(chat)
        while fails - passes > 1 and time.thread_time() < deadline:
            middle = (passes + fails) // 2
            passes, fails = (passes, middle) if refused(middle) else (middle, fails)
        return fails - 1

    def _probe(self, chat: list[dict[str, Any]]) -> str | None:
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self._sandbox.render(self._compiled, {**variables, "messages": chat})
        except Exception:  # a template may fail in any way on a probe: then it says nothing
            return None


def _tag_final_message(chat: list[dict[str, Any]]) -> str:
    """Append the tag to the last message's text, in place; the text without it."""
    message = chat[-1]
    content = message.get("content")
    if isinstance(content, list) and content:
        text = content[-1]["text"]
        content[-1]["text"] = text + CONTINUE_TAG
        return text
    if not isinstance(content, str):
        raise ParameterError("continue_final_message", True, "a last message with content to continue")
    message["content"] = content + CONTINUE_TAG
    return content


def _cut_at_tag(text: str, content: str) -> str:
    tag = CONTINUE_TAG.strip()
    place = text.rfind(tag)
    if place < 0 or content.strip() not in text:
        raise ParameterError("continue_final_message", True, "a template that keeps the last message as it is")
    if text.startswith(CONTINUE_TAG, place):
        return text[:place]
    return text[:place].rstrip()  # the template trims contents, so it would have trimmed this one


def _clean(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + "..."
