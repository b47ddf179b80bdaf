"""What a field of a request may be: ids, ranges, types and counts; errors name the field, the value and what is allowed."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ParameterError
from headrace.sampling.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100
INT64 = 2**63


def packed(ids: Sequence[int]) -> array:
    """Token ids as int32, as they go from here to the device, the prefix index and other processes. Raises ParameterError."""
    if isinstance(ids, array):
        return ids
    try:
        return array("i", struct.pack(f"{len(ids)}i", *ids))  # a third of the time of array("i", ids)
    except struct.error:
        raise ParameterError("prompt_ids", ids, "token ids: integers in [0, 2^31)") from None


def checked_ids(ids: Sequence[int], vocab_size: int, field: str = "prompt", valid: np.ndarray | None = None) -> array:
    """The ids packed. Raises ParameterError naming `field` unless all are integers in [0, vocab_size), and `valid`
    (bool [vocab_size]; None: all are).

    Long prompts come here: no loop in Python, and what is packed already costs next to nothing.
    """
    try:
        if not isinstance(ids, array):
            msgspec.convert(ids, list[int])  # the quickest to see that none is a bool, or some other thing like an integer
            ids = packed(ids)
        values = np.frombuffer(ids, np.int32)
        in_range = values.size == 0 or 0 <= values.min() <= values.max() < vocab_size
        if in_range and (valid is None or valid[values].all()):
            return ids
    except (msgspec.ValidationError, ParameterError):
        pass
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), None)
    if wrong is not None or valid is None:
        raise ParameterError(field, wrong, f"token ids in [0, {vocab_size - 1}]")
    known = f"token ids in [0, {int(valid.nonzero()[0].max(initial=0))}] that the tokenizer has a token for"
    raise ParameterError(field, next(i for i in ids if not valid[i]), known)


def check_params(p: Any) -> None:
    """All fields of a SamplingParams (whose file imports this one); what may be written in several ways is put
    into one. Raises ParameterError."""
    check_int("n", p.n, 1, MAX_N)
    check_float("temperature", p.temperature, 0.0, 2.0, optional=True)
    check_float("top_p", p.top_p, 0.0, 1.0, optional=True, open_low=True)
    check_int("top_k", p.top_k, -1, 2**31 - 1, optional=True)
    check_float("min_p", p.min_p, 0.0, 1.0, optional=True)
    check_float("presence_penalty", p.presence_penalty, -2.0, 2.0)
    check_float("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    check_float("repetition_penalty", p.repetition_penalty, 1e-6, 1e6, optional=True)
    check_int("min_tokens", p.min_tokens, 0, 2**31 - 1)
    check_int("max_tokens", p.max_tokens, 1, 2**31 - 1, optional=True)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise ParameterError("min_tokens", p.min_tokens, f"an integer in [0, max_tokens = {p.max_tokens}]")
    check_int("seed", p.seed, -INT64, INT64 - 1, optional=True)
    check_int("logprobs", p.logprobs, -1, MAX_LOGPROBS, optional=True)
    check_int("prompt_logprobs", p.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
    check_int("truncate_prompt_tokens", p.truncate_prompt_tokens, -1, 2**31 - 1, optional=True)
    if p.truncate_prompt_tokens == 0:
        raise ParameterError("truncate_prompt_tokens", 0, "-1 or an integer >= 1")
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize",
                 "spaces_between_special_tokens"):  # fmt: skip
        if not isinstance(getattr(p, name), bool):
            raise ParameterError(name, getattr(p, name), "true or false")
    if not isinstance(p.lora, str):
        raise ParameterError("lora", p.lora, "the name of an adapter")
    if p.spaces_between_special_tokens and not p.skip_special_tokens:
        raise ParameterError("spaces_between_special_tokens", True, "false with skip_special_tokens false")
    if p.structured_outputs is not None:
        if not isinstance(p.structured_outputs, StructuredOutputsParams):
            raise ParameterError("structured_outputs", p.structured_outputs, "a StructuredOutputsParams")
        if p.ignore_eos:
            raise ParameterError("ignore_eos", True, "false with structured_outputs: the grammar decides where the end is")
    _check_lists(p)


def _check_lists(p: Any) -> None:
    if isinstance(p.stop, str):
        p.stop = [p.stop]
    check_strings("stop", p.stop, MAX_STOP_STRINGS)
    check_strings("bad_words", p.bad_words, 1024)
    if p.stop and not p.detokenize:
        raise ParameterError("stop", p.stop, "none when detokenize is false (use stop_token_ids)")
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(p, name)
        if ids is None:
            continue
        if not isinstance(ids, list | tuple):
            raise ParameterError(name, ids, "a list of token ids")
        setattr(p, name, list(ids))
        for i in ids:
            check_int(name, i, 0, 2**31 - 1)
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise ParameterError("allowed_token_ids", [], "at least one token id")
    p.logit_bias = check_bias(p.logit_bias)
    processors = p.logits_processors
    if processors is not None and not (isinstance(processors, list | tuple) and all(map(callable, processors))):
        raise ParameterError("logits_processors", processors, "a list of callables")


def check_vocabulary(p: Any, vocab_size: int, num_tokens: int | None = None) -> None:
    """Raise ParameterError unless every token id is below `vocab_size` and some token may be sampled, of `num_tokens` (all)."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for i in getattr(p, name) or ():
            if not 0 <= i < vocab_size:
                raise ParameterError(name, i, f"token ids in [0, {vocab_size - 1}]")
    banned = {word[0] for word in p.bad_word_ids if len(word) == 1}
    banned.update(held_off(p))
    if p.allowed_token_ids is not None and banned.issuperset(p.allowed_token_ids):
        allowed = "at least one id that bad_words and min_tokens do not ban"
        raise ParameterError("allowed_token_ids", p.allowed_token_ids, allowed)
    if len(banned) >= (num_tokens or vocab_size):
        field, value = ("min_tokens", p.min_tokens) if p.min_tokens else ("bad_words", p.bad_words)
        raise ParameterError(field, value, "what leaves a token beside stop_token_ids, end tokens and bad_words")


def held_off(p: Any) -> list[int]:
    """The stop ids and end tokens that may not come before `min_tokens` others have."""
    return [*(p.stop_token_ids or ()), *(() if p.ignore_eos else p.eos_token_ids)] if p.min_tokens else []


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
