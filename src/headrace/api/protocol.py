"""What clients may send, as strict msgspec structs: the bodies of completions and chat, and what others have of them.

Every field is one of
- served: it has an effect;
- ignored: OpenAI's API knows it and an answer without it is still right (marked so below);
- neutral only: known elsewhere, not served here, so accepted only with the value that asks for nothing (`checks.NEUTRAL`).
A field that would have no effect for want of another (truncation_side) is refused where it is read. What is not here at all
is left out and named in the answer's header, or refused (see unknown_fields). null always means: not given.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.conversation.tool_grammar import FunctionDef
from headrace.errors import ParameterError
from headrace.sampling.params import SamplingParams


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON object without unknown fields."""


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: usage so far on every chunk
    include_obfuscation: bool | None = None  # padding against traffic analysis; ours is never padded: true is refused


class SamplingFields(Body, kw_only=True):
    """The engine's sampling parameters that chat, completions and generate have in common."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    def sampling(self, **changes: Any) -> SamplingParams:
        """The parameters as given, `changes` over them. Raises ParameterError."""
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            allowed = "nothing without truncate_prompt_tokens"
            raise ParameterError("truncation_side", self.truncation_side, allowed)
        given = {f: v for f in _SAMPLING_NAMES if (v := getattr(self, f, None)) is not None}
        given.update(changes)
        return SamplingParams(**given)


_SAMPLING_NAMES = (*(f for f in SamplingFields.__struct_fields__ if f != "truncation_side"), "prompt_logprobs")


class OpenAIFields(SamplingFields, kw_only=True):
    """What /v1/completions, /v1/chat/completions and /v1/responses share beyond sampling."""

    model: str | None = None  # there is one
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    # ignored: bookkeeping, then hints about speed (/v1/responses gives some of them back)
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None  # /v1/responses serves it
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class GenerationFields(OpenAIFields, kw_only=True):
    """What /v1/completions and /v1/chat/completions share beyond that; unserved fields are in NEUTRAL."""

    # ignored: hints about speed and style
    prediction: dict[str, Any] | None = None
    verbosity: str | None = None
    # served
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None  # this and the next with use_beam_search
    early_stopping: bool | str | None = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    stream_interval: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any] | None = None  # text, texts, ids or lists of ids: told apart by `prompts`
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class CustomDef(Body, kw_only=True):
    """A tool whose input is any text."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class ChatTool(Body, kw_only=True):
    """One of the two, as `type` says: read in chat_tools."""

    type: Literal["function", "custom"] = "function"
    function: FunctionDef | None = None
    custom: CustomDef | None = None


class FunctionName(Body, kw_only=True):
    name: str


class AllowedTools(Body, kw_only=True):
    """Those of `tools` that may be called (auto) or must be (required)."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]  # only their names count: read in tool_choice_input


class ToolChoice(Body, kw_only=True):
    """One tool that must be called, or several that may be."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatReasoning(Body, kw_only=True):
    """How gateways ask for it."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # reasoning is thought and not shown
    summary: str | None = None  # ignored: reasoning is given in full
    max_tokens: Any = None  # refused


class Thinking(Body, kw_only=True):
    """How Anthropic's, DeepSeek's and GLM's APIs ask for it."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    display: str | None = None  # ignored: reasoning is given in full
    budget_tokens: int | None = None  # ignored: a bound that is rarely reached, and never exact
    clear_thinking: bool | None = None  # ignored: templates decide what they show of earlier turns


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions. The messages are checked by the chat template's reader."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ChatReasoning | None = None  # this and the next two: other servers' words for it
    thinking: bool | Thinking | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    moderation: Any = None
    documents: Any = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    return_prompt_text: Any = None
    echo: bool | None = None  # true is refused
