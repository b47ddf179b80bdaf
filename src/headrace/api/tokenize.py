"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.chat_prompt import Conversation, check_messages, prompt_of
from headrace.api.context import ApiContext
from headrace.api.errors import bad_request
from headrace.api.protocol import DetokenizeRequest, TokenizeRequest
from headrace.api.service import json_response
from headrace.engine.messages import checked_ids


async def tokenize(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, TokenizeRequest, ctx.config)
    ctx.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give prompt or messages: one of them.", "prompt", "invalid_value")
    if body.chat_template is not None:
        raise bad_request("chat_template: a request may not bring its own template.", "chat_template", "unsupported_parameter")
    if body.prompt is not None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name):
                raise bad_request(f"{name} is allowed only with messages.", name, "invalid_value")
        special = body.add_special_tokens is not False
        [ids] = await ctx.tokenize([body.prompt], special=special, field="prompt", truncated=True)
    else:
        ids, _ = await prompt_of(ctx, _conversation(body))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": ctx.engine.max_model_len, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = [ctx.engine.tokenizer.token_to_text(i) for i in ids]
    return json_response(answer)


def _conversation(body: TokenizeRequest) -> Conversation:
    assert body.messages is not None
    check_messages(body.messages)
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt cannot both be true."
        raise bad_request(text, "continue_final_message", "invalid_value")
    return Conversation(
        messages=body.messages,
        tools=body.tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continued,
        template_kwargs=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
        truncated=True,
    )


async def detokenize(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, DetokenizeRequest, ctx.config)
    ctx.check_model(body.model)
    tokenizer = ctx.engine.tokenizer
    checked_ids(body.tokens, tokenizer.vocab_size, "tokens", tokenizer.valid_ids(tokenizer.vocab_size))
    text = await ctx.in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return json_response({"prompt": text})
