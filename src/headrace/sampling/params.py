"""What a caller may ask of one request. Names, defaults and ranges follow vLLM's SamplingParams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import ParameterError
from headrace.sampling.foreign import advice
from headrace.sampling.structured_outputs import StructuredOutputsParams

GREEDY_EPS = 1e-5  # a temperature below this is greedy: dividing by it would overflow
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100
INT64 = 2**63
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # as if there were none

LogitsProcessor = Callable[[list[int], Any], Any]  # (output ids so far, logits [vocab] float32) -> logits [vocab]


class AtMost(int):
    """A max_tokens that nobody has asked for: where the context leaves less, it is less, and no error."""


class _Named(msgspec.StructMeta):
    """Makes an error about a field of another engine name ours."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            for name, value in fields.items():
                if (instead := advice(name, cls.__struct_fields__)) is not None:
                    raise ParameterError(name, value, f"nothing here; {instead}") from None
            raise


class SamplingParams(msgspec.Struct, metaclass=_Named, kw_only=True, omit_defaults=True):
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
    min_tokens: int = 0
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
    # filled in by the engine, never by callers
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    bad_word_ids: list[list[int]] = msgspec.field(default_factory=list)
    sample_index: int = 0  # which of the n samples this is: part of the random counter

    def __post_init__(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        check_float("temperature", self.temperature, 0.0, 2.0, optional=True)
        check_float("top_p", self.top_p, 0.0, 1.0, optional=True, open_low=True)
        check_int("top_k", self.top_k, -1, 2**31 - 1, optional=True)
        check_float("min_p", self.min_p, 0.0, 1.0, optional=True)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, optional=True)
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"an integer in [0, max_tokens = {self.max_tokens}]")
        check_int("seed", self.seed, -INT64, INT64 - 1, optional=True)
        check_int("logprobs", self.logprobs, -1, MAX_LOGPROBS, optional=True)
        check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise ParameterError("truncate_prompt_tokens", 0, "-1 or an integer >= 1")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize",
                     "spaces_between_special_tokens"):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "true or false")
        if self.spaces_between_special_tokens and not self.skip_special_tokens:
            raise ParameterError("spaces_between_special_tokens", True, "false with skip_special_tokens false")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise ParameterError("structured_outputs", self.structured_outputs, "a StructuredOutputsParams")
            if self.ignore_eos:
                raise ParameterError("ignore_eos", True, "false with structured_outputs: the grammar decides where the end is")
        self._check_lists()

    def _check_lists(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        check_strings("stop", self.stop, MAX_STOP_STRINGS)
        check_strings("bad_words", self.bad_words, 1024)
        if self.stop and not self.detokenize:
            raise ParameterError("stop", self.stop, "none when detokenize is false (use stop_token_ids)")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is None:
                continue
            if not isinstance(ids, list | tuple):
                raise ParameterError(name, ids, "a list of token ids")
            setattr(self, name, list(ids))
            for i in ids:
                check_int(name, i, 0, 2**31 - 1)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParameterError("allowed_token_ids", [], "at least one token id")
        self.logit_bias = check_bias(self.logit_bias)
        processors = self.logits_processors
        if processors is not None and not (isinstance(processors, list | tuple) and all(map(callable, processors))):
            raise ParameterError("logits_processors", processors, "a list of callables")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParameterError unless every token id is below `vocab_size` and some token may be sampled."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for i in getattr(self, name) or ():
                if not 0 <= i < vocab_size:
                    raise ParameterError(name, i, f"token ids in [0, {vocab_size - 1}]")
        if self.allowed_token_ids is not None:
            banned = {word[0] for word in self.bad_word_ids if len(word) == 1}
            if self.min_tokens:
                banned.update(self.stop_token_ids or (), () if self.ignore_eos else self.eos_token_ids)
            if banned.issuperset(self.allowed_token_ids):
                allowed = "at least one id that bad_words and min_tokens do not ban"
                raise ParameterError("allowed_token_ids", self.allowed_token_ids, allowed)

    def resolved(self, defaults: dict[str, Any]) -> SamplingParams:
        """A copy in which every None that has a neutral value is replaced: by `defaults` (the checkpoint's
        generation_config), else by the neutral value. An explicit value wins, also when it is 0."""
        given = {k: v for k, v in defaults.items() if k in _NEUTRAL and v is not None}
        changes = {k: v for k, v in (_NEUTRAL | given).items() if getattr(self, k) is None}
        return msgspec.structs.replace(self, **changes)

    def told(self) -> dict[str, float]:
        """What decides how it samples, by name; without what changes nothing."""
        values = ((name, getattr(self, name)) for name in _NEUTRAL)
        return {k: v for k, v in values if v is not None and (v != _NEUTRAL[k] or k == "temperature")}

    @property
    def greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_EPS


def defaults_in_words(defaults: dict[str, Any]) -> str:
    """How a request samples that says nothing, where a model has these defaults."""
    told = SamplingParams().resolved(defaults).told()
    named = any(defaults.get(k) is not None for k in _NEUTRAL)
    return ", ".join(f"{k} {v:g}" for k, v in told.items()) + ("" if named else " (the model names none)")


def check_float(name, value, low, high, *, optional=False, open_low=False) -> None:
    if value is None and optional:
        return
    interval = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(name, value, interval)
    # written so that NaN fails: every comparison with it is false
    if not (low <= value <= high) or (open_low and value == low):
        raise ParameterError(name, shown(value), interval)


def check_int(name, value, low, high, *, optional=False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not (low <= value <= high):
        raise ParameterError(name, shown(value), f"an integer in [{low}, {high}]")


def shown(value):
    """`value` as an error message can hold it: Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return value


def check_bias(bias) -> dict[int, float] | None:
    """`logit_bias` with integer keys (JSON only has strings) and float values."""
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise ParameterError("logit_bias", bias, "a map of token id to number")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        check_int("logit_bias", token, 0, 2**31 - 1)
        check_float("logit_bias", value, -100.0, 100.0)
        if token in checked:
            raise ParameterError("logit_bias", key, "each token id once")
        checked[token] = float(value)
    return checked


def check_strings(name, value, most: int) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(s, str) for s in value):
        raise ParameterError(name, value, "a list of strings")
    if len(value) > most or any(not s or len(s) > 4096 for s in value):
        raise ParameterError(name, value, f"at most {most} non-empty strings of at most 4096 characters")
