"""What /v1/responses takes: its body. Its input items are read in responses_messages, its tools in responses_tools."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.api.errors import allowed_only, invalid, unsupported
from headrace.api.protocol import Body, Effort, OpenAIFields
from headrace.api.structured import Structure, from_response_format, json_schema
from headrace.conversation.tool_grammar import FunctionDef

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
# what `include` may name; but for the first two they concern tools that are not run here
INCLUDABLE = (
    LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
)  # fmt: skip
Summary = Literal["auto", "concise", "detailed", "none"]


class FlatTool(FunctionDef, kw_only=True):
    """A function, of a namespace or of none."""

    type: Literal["function"] = "function"
    defer_loading: bool | msgspec.UnsetType | None = msgspec.UNSET  # ignored: nothing here would look for it later


class CustomTool(Body, kw_only=True):
    """A tool whose input is any text."""

    name: str
    type: Literal["custom"] = "custom"
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    format: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    defer_loading: bool | msgspec.UnsetType | None = msgspec.UNSET


class Namespace(Body, kw_only=True):
    """Tools of one origin, such as a server that an agent is connected to."""

    name: str
    tools: list[dict[str, Any]]
    type: Literal["namespace"] = "namespace"
    description: str | msgspec.UnsetType | None = msgspec.UNSET


class FlatToolChoice(Body, kw_only=True):
    """One tool that must be called, or several that may be: read in tool_choice_input."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    name: str | msgspec.UnsetType = msgspec.UNSET
    namespace: str | msgspec.UnsetType | None = msgspec.UNSET
    mode: Literal["auto", "required"] | msgspec.UnsetType = msgspec.UNSET
    tools: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class TextOptions(Body, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None  # ignored


class ReasoningOptions(Body, kw_only=True):
    effort: Effort | None = None
    summary: Summary | None = None  # whatever it says, the summary is the whole reasoning
    generate_summary: Summary | None = None  # its older name


class ResponsesFields(OpenAIFields, kw_only=True):
    """What a response and the count of its input have in common. `store` is served, here alone."""

    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None  # read in responses_tools
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # given back: it counts tools run by the server, and there are none
    previous_response_id: str | None = None
    background: bool | None = None
    # refused unless they ask for nothing
    conversation: Any = None
    prompt: Any = None
    truncation: Literal["disabled", "auto"] | None = None


class ResponsesRequest(ResponsesFields, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]


class InputTokensRequest(ResponsesFields, kw_only=True):
    """POST /v1/responses/input_tokens: the same body, but that what there is so far may be all of the input."""

    input: str | list[dict[str, Any]] | None = None


def check_unserved(body: ResponsesFields) -> None:
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise unsupported(name, "not supported; send the whole input, or previous_response_id")
    if body.background and body.store is False:
        raise allowed_only("background", "when store is true: whoever asked is not there to take the response")
    if body.background and "/" in (body.request_id or ""):
        raise invalid("request_id", "no slash with background: the response is at a path with its id.")
    if body.truncation == "auto":
        raise unsupported("truncation", "only disabled: a prompt is never cut silently (truncate_prompt_tokens cuts it)")
    if body.n not in (None, 1):
        raise unsupported("n", "one response for each request")
    if body.max_tokens is not None:
        raise unsupported("max_tokens", "it is called max_output_tokens here")
    for value in body.include or ():
        if value not in INCLUDABLE:
            raise invalid("include", f"allowed are {', '.join(INCLUDABLE)}.")


def structure(text: TextOptions | None) -> Structure | None:
    """`text.format`, whose json_schema is flat."""
    form = text.format if text is not None else None
    if form is not None and form.get("type") == "json_schema":
        flat = {k: v for k, v in form.items() if k != "type"}
        return json_schema(flat, "text.format", "text.format")
    return from_response_format(form, "text.format")
