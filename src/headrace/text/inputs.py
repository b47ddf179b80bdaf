"""From what a caller gives (text or ids, parameters with gaps) to what the core takes (ids, complete parameters)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from headrace.errors import ParameterError
from headrace.sampling.checks import check_vocabulary, checked_ids
from headrace.sampling.params import AtMost, SamplingParams

if TYPE_CHECKING:
    from headrace.model.tokenizer import Tokenizer

Ids = TypeVar("Ids", list[int], array)
Prompt = str | list[int] | dict[str, Any]


class GivenPrompt(NamedTuple):
    """A prompt as it was given to the offline API, with its ids."""

    text: str | None
    ids: list[int]
    cache_salt: str = ""


class InputProcessor:
    """Knows the tokenizer, the checkpoint's defaults and the limits; used by the offline API and the server alike."""

    def __init__(
        self, tokenizer: Tokenizer | None, generation_defaults: dict[str, Any], eos_token_ids: tuple[int, ...], vocab_size: int,
        max_model_len: int,
    ):  # fmt: skip
        self.tokenizer, self.defaults, self.eos_token_ids = tokenizer, generation_defaults, list(eos_token_ids)
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.valid = None if tokenizer is None else tokenizer.valid_ids(vocab_size)
        self.num_tokens = vocab_size if self.valid is None else int(self.valid.sum())

    def read(self, prompt: Prompt) -> GivenPrompt:
        """Raises ParameterError for what is no prompt."""
        text, ids, salt = None, None, ""
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, dict):
            if unknown := set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}:
                raise ParameterError("prompt", sorted(unknown), "the keys prompt, prompt_token_ids and cache_salt")
            text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt", "")
        else:
            ids = prompt
        if not isinstance(ids, Iterable) or isinstance(ids, bytes):
            if not isinstance(text, str):
                raise ParameterError("prompt", prompt, "a text, a list of token ids, or a dict with one of these")
            ids = self.tokenize(text)
        return GivenPrompt(text, ids.tolist() if hasattr(ids, "tolist") else list(ids), salt)  # an array, as of numpy

    def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise ParameterError("prompt", prompt, "token ids only: the engine was made with skip_tokenizer_init")
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def prompt(self, given: list[int], params: SamplingParams) -> array:
        """The prompt as it will run: packed, truncated where asked. Raises ParameterError on a prompt that cannot run."""
        ids = self.cut(self.check_ids(given), params)
        if len(ids) >= self.max_model_len:
            raise ParameterError(
                "prompt",
                f"{len(ids)} tokens",
                f"at most {self.max_model_len - 1} tokens: the context of {self.max_model_len} must hold the prompt and "
                f"at least one output token (truncate_prompt_tokens cuts a prompt)",
            )
        return ids

    def cut(self, ids: Ids, params: SamplingParams, side: str | None = None) -> Ids:
        """Truncated where `params` ask for it, on the left unless `side` is "right"."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep == -1:
            keep = max(1, self.max_model_len - (params.max_tokens or 1))
        return ids[:keep] if side == "right" else ids[-keep:]

    def check_ids(self, ids: Sequence[int], field: str = "prompt") -> array:
        """The ids packed. Raises ParameterError."""
        if not ids:
            raise ParameterError(field, "an empty prompt", "at least one token")
        return checked_ids(ids, self.vocab_size, field, self.valid)

    def complete(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """`params` with nothing left open: defaults, end tokens, bad words as ids, and a bounded max_tokens."""
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            checked_ids(list(getattr(params, field) or ()), self.vocab_size, field, self.valid)
        max_tokens = self.max_tokens(params, prompt_len)
        if params.min_tokens > max_tokens:
            raise ParameterError("min_tokens", params.min_tokens, f"at most {max_tokens}: the context leaves no room for more")
        done = msgspec.structs.replace(
            params.resolved(self.defaults),
            detokenize=params.detokenize and self.tokenizer is not None,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_token_ids(params),
            eos_token_ids=self.eos_token_ids,
            bad_word_ids=self._bad_word_ids(params.bad_words or []),
        )
        check_vocabulary(done, self.vocab_size, self.num_tokens)
        return done

    def _stop_token_ids(self, params: SamplingParams) -> list[int] | None:
        """With those of stop strings that are just a special token, which the text does not show."""
        if self.tokenizer is None or not (params.stop and params.skip_special_tokens):
            return params.stop_token_ids
        found = (self.tokenizer.special_texts.get(s) for s in params.stop)
        ids = [*(params.stop_token_ids or []), *(i for i in found if i is not None and i < self.vocab_size)]
        return list(dict.fromkeys(ids)) or None

    def max_tokens(self, params: SamplingParams, prompt_len: int) -> int:
        """As many as are asked for, and what fits if that is left open. Raises ParameterError if these do not fit."""
        asked, room = params.max_tokens, self.max_model_len - prompt_len
        if asked is None or (isinstance(asked, AtMost) and asked > room):
            return room
        if asked > room:
            context = f"the context of {self.max_model_len} tokens holds the prompt of {prompt_len} and the output"
            raise ParameterError("max_tokens", asked, f"at most {room}: {context}")
        return int(asked)

    def _bad_word_ids(self, words: list[str]) -> list[list[int]]:
        """Each word as the ids it has at the start of a text and after a space, where these differ.

        What has an id beyond the model's vocabulary (of a tokenizer with more tokens) is never generated anyway.
        """
        found: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self.tokenize(text, add_special_tokens=False)
                if ids and ids not in found and max(ids) < self.vocab_size:
                    found.append(ids)
        return found
