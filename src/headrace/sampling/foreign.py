"""What other engines call the fields of a request: an error about one names the field to use."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from headrace.errors import ParameterError

_KINDS = ("regex", "choice", "grammar", "structural_tag", "json_object")
# their name -> ours, and how its value differs
FOREIGN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict", "max_completion_tokens", "max_gen_len", "max_output_tokens",
                     "max_tokens_to_sample"), ("max_tokens", "")),
    **dict.fromkeys(("min_new_tokens", "min_length"), ("min_tokens", "")),
    **{f"guided_{kind}": ("structured_outputs", f'as {{"{kind}": ...}}') for kind in (*_KINDS, "json")},
    **{kind: ("structured_outputs", f'as {{"{kind}": ...}}') for kind in _KINDS},
    **dict.fromkeys(("json_schema", "format", "schema"), ("structured_outputs", 'as {"json": ...}')),
    "ebnf": ("structured_outputs", 'as {"grammar": ...}'), "guided_decoding": ("structured_outputs", ""),
    **dict.fromkeys(("repeat_penalty", "rep_pen", "repetition_penality"), ("repetition_penalty", "")),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words", "stop_sequence"), ("stop", "")),
    **dict.fromkeys(("eos_token_id", "stop_ids", "stop_token_id"), ("stop_token_ids", "as a list")),
    "logits_bias": ("logit_bias", ""), "bad_words_ids": ("bad_words", "as texts"),
    **dict.fromkeys(("num_return_sequences", "num_completions", "candidate_count", "best_of"), ("n", "")),
    "do_sample": ("temperature", "0 for the likeliest tokens, more to sample"), "random_seed": ("seed", ""),
    **dict.fromkeys(("n_probs", "top_n_tokens", "num_logprobs", "return_logprob"), ("logprobs", "")),
    "typical_p": ("top_p", "which is the nearest"), "ignore_eos_token": ("ignore_eos", ""),
    **dict.fromkeys(("truncate", "prompt_truncate_len"), ("truncate_prompt_tokens", "")),
    "no_stop_trim": ("include_stop_str_in_output", ""), "json_mode": ("response_format", 'as {"type": "json_object"}'),
    "system_prompt": ("messages", "of the role system"),
    **dict.fromkeys(("prefill", "assistant_prefix", "response_prefix"), ("continue_final_message", "on a last message")),
    **dict.fromkeys(("enable_thinking", "thinking", "thinking_budget"), ("chat_template_kwargs", "if its template has it")),
    "inputs": ("prompt", ""), "parameters": ("", "its fields belong at the top of the body"),
    "options": ("", "its fields belong at the top of the body"), "extra_body": ("", "its fields belong at the top of the body"),
    **dict.fromkeys(("sampling_params", "generation_config"), ("", "its fields belong at the top of the body")),
    "num_ctx": ("", "the context is the server's: --max-model-len"), "keep_alive": ("", "it is of Ollama's API"),
}  # fmt: skip


def advice(name: str, fields: Container[str]) -> str | None:
    """What to use instead of the field `name` where there are `fields`; None for what is not known elsewhere."""
    if name in fields or name not in FOREIGN:
        return None
    ours, how = FOREIGN[name]
    if ours == "max_tokens" and "max_output_tokens" in fields:
        ours = "max_output_tokens"  # of Responses
    if not ours:
        return how
    return f"use {ours} {how}".strip() if ours in fields else None


class NamesOurs(msgspec.StructMeta):
    """Makes an error about a field of another engine name ours. One that is None asks for nothing."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            theirs = FOREIGN.keys() - {*cls.__struct_fields__}
            asked = {name: value for name, value in fields.items() if value is not None or name not in theirs}
            if len(asked) < len(fields):
                return cls(*args, **asked)
            for name, value in fields.items():
                if (instead := advice(name, cls.__struct_fields__)) is not None:
                    raise ParameterError(name, value, f"nothing here; {instead}") from None
            raise
