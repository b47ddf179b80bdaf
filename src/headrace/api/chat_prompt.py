"""From messages to token ids: template and tokenizer, in one of the context's threads."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.api.context import ApiContext
from headrace.api.errors import bad_request
from headrace.api.protocol import ChatRequest, TokenizeRequest
from headrace.conversation.tool_grammar import Tool
from headrace.conversation.tool_prompt import shown_to


class Conversation(msgspec.Struct, kw_only=True):
    """What the chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None  # None: the model is not shown any
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = False  # the template has put them in already
    truncated: bool = False  # the prompt will be cut to what fits

    @classmethod
    def of(
        cls, body: ChatRequest | TokenizeRequest, tools: list[Tool] | None, kwargs: dict[str, Any] | None, truncated: bool
    ) -> Conversation:
        """That of a body. Raises ApiError."""
        continued = bool(body.continue_final_message)
        if continued and body.add_generation_prompt:
            text = "continue_final_message and add_generation_prompt cannot both be true."
            raise bad_request(text, "continue_final_message", "invalid_value")
        return cls(
            messages=body.messages or [],
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=continued,
            template_kwargs=kwargs,
            add_special_tokens=bool(body.add_special_tokens),
            truncated=truncated,
        )


async def prompt_of(ctx: ApiContext, conversation: Conversation) -> tuple[list[int], str]:
    """Render and tokenize: the ids, and the end of the text. Raises ParameterError or ApiError naming the field."""
    return await ctx.in_thread(_prompt_of, ctx, conversation)


def _prompt_of(ctx: ApiContext, c: Conversation) -> tuple[list[int], str]:
    template = ctx.chat_template
    messages, tools = shown_to(template, c.messages, _without_nulls(c.tools) if c.tools else None)
    if not ctx.template_knows_developers:  # many would drop such a message silently
        messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
    text = template.render(
        messages,
        tools=tools,
        add_generation_prompt=c.add_generation_prompt and not c.continue_final_message,
        continue_final_message=c.continue_final_message,
        chat_template_kwargs=c.template_kwargs,
    )
    if (literal := template.literal) is None:
        return ctx.encode(text, c.add_special_tokens, "messages", c.truncated), text[-400:]
    shown = literal.shown(text)
    if not c.truncated:
        ctx.check_length(shown, "messages")
    return literal.tokenizer.encode(literal.spelled(text), c.add_special_tokens), shown[-400:]


def _without_nulls(tools: list[Tool]) -> list[dict[str, Any]]:
    """Tools as their client wrote them: templates print what they are given."""
    plain = []
    for tool in tools:
        function = {k: v for k, v in msgspec.to_builtins(tool.function).items() if v is not None}
        plain.append({"type": tool.type, "function": function})
    return plain
