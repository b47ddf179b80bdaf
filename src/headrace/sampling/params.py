"""What a caller may ask of one request. Names, defaults and ranges follow vLLM's SamplingParams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.sampling.checks import check_params
from headrace.sampling.foreign import NamesOurs
from headrace.sampling.structured_outputs import StructuredOutputsParams

GREEDY_EPS = 1e-5  # a temperature below this is greedy: dividing by it would overflow
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # of what models name

LogitsProcessor = Callable[[list[int], Any], Any]  # (output ids so far, logits [vocab] float32) -> logits [vocab]


class AtMost(int):
    """A max_tokens that nobody has asked for: where the context leaves less, it is less, and no error."""


class SamplingParams(msgspec.Struct, metaclass=NamesOurs, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request; ranges are checked when it is made, ids against the vocabulary at admission.

    `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` are None until somebody sets them: then the
    checkpoint's generation_config.json decides, and the neutral value where it is silent (`resolved`).
    Raises ParameterError naming the field, the value and the range.
    """

    n: int = 1
    temperature: float | None = None  # [0, 2]; 0 = greedy
    top_p: float | None = None  # (0, 1]
    top_k: int | None = None  # 0 and -1: off
    min_p: float | None = None  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2], over output tokens
    frequency_penalty: float = 0.0  # [-2, 2], over output tokens
    repetition_penalty: float | None = None  # [1e-6, 1e6], over prompt and output
    logit_bias: dict[int, float] | None = None  # token id -> [-100, 100]
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int = 0  # before which no end token, stop id or stop string counts
    max_tokens: int | None = AtMost(16)  # None: up to the context
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # 0: the sampled token only; -1: the whole vocabulary
    prompt_logprobs: int | None = None  # not -1: a prompt times a vocabulary is more than any memory plan holds
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False  # none are put there: true is refused where it would show
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None  # keep the last k; -1: what fits the context
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Any = None  # list[LogitsProcessor]; in-process engines only: no function crosses the border
    lora: str = ""  # the name of its adapter; inside of an engine the digest of what that was when the request came
    # filled in by the engine, never by callers
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    bad_word_ids: list[list[int]] = msgspec.field(default_factory=list)
    sample_index: int = 0  # which of the n samples this is: part of the random counter

    def __post_init__(self) -> None:
        check_params(self)

    def resolved(self, defaults: dict[str, Any]) -> SamplingParams:
        """A copy in which every None that has a neutral value is replaced: by `defaults` (the checkpoint's
        generation_config), else by the neutral value. An explicit value wins, also when it is 0."""
        given = {k: v for k, v in defaults.items() if k in NEUTRAL and v is not None}
        changes = {k: v for k, v in (NEUTRAL | given).items() if getattr(self, k) is None}
        return msgspec.structs.replace(self, **changes)

    def told(self) -> dict[str, float]:
        """What decides how it samples, by name; without what changes nothing."""
        values = ((name, getattr(self, name)) for name in NEUTRAL)
        return {k: v for k, v in values if v is not None and (v != NEUTRAL[k] or k == "temperature")}


def defaults_in_words(defaults: dict[str, Any]) -> str:
    """How a request samples that says nothing, where a model has these defaults."""
    told = SamplingParams().resolved(defaults).told()
    named = any(defaults.get(k) is not None for k in NEUTRAL)
    return ", ".join(f"{k} {v:g}" for k, v in told.items()) + ("" if named else " (the model names none)")
