"""Conversations to prompt text through the checkpoint's chat template.

What a template sees is what Transformers shows it, with two adaptations to what clients send, each decided once per
template by rendering a small probe: content parts are joined for templates that know strings only (and strings wrapped
for those that know parts only), and the arguments of earlier tool calls are given as an object or as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from headrace.api.template_sandbox import BoundedSandbox, TemplateLimitError
from headrace.errors import ParameterError

# What `chat_template_kwargs` of a request may set unless the operator says otherwise: switches of known templates.
# The arguments that are Headrace's own (messages, tools, documents, add_generation_prompt, the special tokens) never.
ALLOWED_KWARGS = (
    "enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking", "clear_thinking",
    "keep_past_thinking", "truncate_history_thinking", "skip_thinking", "date_string", "model_identity",
    "builtin_tools", "custom_tools", "tools_in_user_message",
)  # fmt: skip
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}) | set(
    SPECIAL_TOKENS
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # the space shows whether the template trims contents
MAX_DEPTH = 64
MAX_ROLE = 64  # characters
PROBE = "zq7probe"


class ChatTemplate:
    """The chat template of a checkpoint: compiled once, used by any number of threads at a time.

    `templates` is jinja2 text, or named texts of which "tool_use" is taken when there are tools and else "default".
    Raises ParameterError when there is none, or when it does not compile.
    """

    def __init__(
        self, templates: str | Mapping[str, str] | None, special_tokens: Mapping[str, str | None] | None = None, *,
        allowed_kwargs: Sequence[str] = ALLOWED_KWARGS, timeout: float = 5.0, max_chars: int = 8_000_000,
    ):  # fmt: skip
        if not templates:
            raise ParameterError("messages", "a conversation", "prompts only: the model has no chat template")
        self.sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        given = {name: token for name, token in (special_tokens or {}).items() if name in SPECIAL_TOKENS and token}
        # templates join these two without asking; of the others some templates have a default of their own
        self.special_tokens = {"bos_token": "", "eos_token": "", **given}
        self.allowed_kwargs = frozenset(allowed_kwargs) - RESERVED
        self._sandbox = BoundedSandbox(timeout, max_chars)
        self._templates: dict[str, _Template] = {}
        for name, source in self.sources.items():
            try:
                self._templates[name] = _Template(self._sandbox, source, self.special_tokens)
            except (jinja2.TemplateError, RecursionError) as error:
                raise ParameterError("chat_template", name, f"a valid jinja2 template: {_clean(error)}") from None

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, **options: Any) -> ChatTemplate:
        """From a Tokenizer: its `chat_templates` and its special tokens' texts."""
        tokens = {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKENS}
        return cls(tokenizer.chat_templates, tokens, **options)

    def source(self, tools: bool = False) -> str:
        """The text of the template that is used with or without tools."""
        return self._select(tools).source

    def _select(self, tools: bool) -> _Template:
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        raise ParameterError("messages", "a conversation", f"the templates are named {sorted(self._templates)}")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
        continue_final_message: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None,
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
            **self.special_tokens,
            "tools": plain(list(tools), "tools") if tools else None,
            "documents": plain(list(documents), "documents") if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        chat = template.adapt(chat)
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
        self._knows: dict[str, bool] = {}  # answers of the probes, each computed when first needed

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._sandbox.render(self._compiled, variables)
        except TemplateLimitError as error:
            raise ParameterError("messages", "a conversation", f"less than this: {_clean(error)}") from None
        except jinja2.TemplateError as error:
            allowed = f"a conversation that the chat template accepts: {_clean(error)}"
            raise ParameterError("messages", "a conversation", allowed) from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            allowed = f"a conversation that the chat template accepts (it fails with {type(error).__name__})"
            raise ParameterError("messages", "a conversation", allowed) from None

    # ---------------------------------------------------------------------------------- what the template understands

    def adapt(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for message in chat:
            content, role = message.get("content"), message["role"]
            if isinstance(content, list) and not self.takes_parts(role):
                message["content"] = "\n".join(part["text"] for part in content)
            elif isinstance(content, str) and not self.takes_strings(role):
                message["content"] = [{"type": "text", "text": content}]
            for call in message.get("tool_calls") or ():
                function = call.get("function", call)
                function["arguments"] = self._adapt_arguments(function.get("arguments"))
        return chat

    def _adapt_arguments(self, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) and self.takes_argument_objects() else arguments

    def takes_parts(self, role: str) -> bool:
        """Whether the text of a list of parts comes out, and nothing else of the list."""
        return self._ask(f"parts of {role}", role, [{"type": "text", "text": PROBE}], False)

    def takes_strings(self, role: str) -> bool:
        return self._ask(f"strings of {role}", role, PROBE, True) or not self.takes_parts(role)

    def _ask(self, key: str, role: str, content: Any, default: bool) -> bool:
        if role not in ROLES:
            return default
        if key not in self._knows:
            text = self._probe(_probe_chat(role, content))
            self._knows[key] = default if text is None else PROBE in text and "'text'" not in text and '"text"' not in text
        return self._knows[key]

    def takes_argument_objects(self) -> bool:
        """Whether a call's arguments are to be an object; JSON text where an object fails or prints as Python does."""
        if "arguments" not in self._knows:
            text = self._probe(_probe_call({PROBE: PROBE}))
            as_object = text is not None and PROBE in text and f"'{PROBE}'" not in text
            if not as_object:
                text = self._probe(_probe_call(json.dumps({PROBE: PROBE})))
                as_object = text is None or PROBE not in text
            self._knows["arguments"] = as_object
        return self._knows["arguments"]

    def _probe(self, chat: list[dict[str, Any]]) -> str | None:
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self._sandbox.render(self._compiled, {**variables, "messages": chat})
        except Exception:  # a template may fail in any way on a probe: then it says nothing
            return None


def _probe_chat(role: str, content: Any) -> list[dict[str, Any]]:
    message = {"role": role, "content": content}
    user = {"role": "user", "content": "hi" if isinstance(content, str) else [{"type": "text", "text": "hi"}]}
    if role in ("system", "developer"):
        return [message, user]
    if role == "assistant":
        return [user, message]
    if role in ("tool", "function"):
        call = _probe_call({})[1]
        return [user, call, {**message, "name": "f", "tool_call_id": call["tool_calls"][0]["id"]}]
    return [message]


def _probe_call(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "1"},
    ]


# ---------------------------------------------------------------------------------------------------------------------
# messages


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """A copy made of JSON types only: nothing else may reach a template. Raises ParameterError."""
    if depth > MAX_DEPTH:
        raise ParameterError(field, "a deeply nested value", f"at most {MAX_DEPTH} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(type(k) is str for k in value):
            raise ParameterError(field, list(value), "text as keys")
        return {k: plain(v, f"{field}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, f"{field}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise ParameterError(field, type(value).__name__, "JSON values")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A plain copy as templates expect it: absent instead of null, text parts only, reasoning under its known names.

    Raises ParameterError naming the place.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ParameterError("messages", messages, "a list of at least one message")
    return [_check_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _check_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ParameterError(field, message, "an object with role and content")
    checked = {k: v for k, v in plain(message, field).items() if v is not None}
    role = checked.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE:
        raise ParameterError(f"{field}.role", role, "a role, such as " + ", ".join(ROLES))
    content = checked.get("content")
    if isinstance(content, list):
        checked["content"] = [_check_part(p, f"{field}.content[{i}]") for i, p in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise ParameterError(f"{field}.content", content, "text or a list of text parts")
    elif content is None and not checked.get("tool_calls") and role != "assistant":
        raise ParameterError(f"{field}.content", None, "text or a list of text parts")
    calls = checked.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
        raise ParameterError(f"{field}.tool_calls", calls, "a list of objects")
    for i, call in enumerate(calls):
        if not isinstance(call.get("function", call), dict):
            raise ParameterError(f"{field}.tool_calls[{i}].function", call["function"], "an object")
    reasoning = next((checked[name] for name in REASONING_FIELDS if name in checked), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _check_part(part: Any, field: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise ParameterError(field, part, "an object with type and text")
    kind = part.get("type", "text")
    name = "refusal" if kind == "refusal" else "text"
    if kind not in TEXT_PARTS and kind != "refusal":
        raise ParameterError(f"{field}.type", kind, "text (this model takes no other kind of content)")
    if not isinstance(part.get(name), str):
        raise ParameterError(f"{field}.{name}", part.get(name), "text")
    return {"type": "text", "text": part[name]}


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
