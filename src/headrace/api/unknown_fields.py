"""Fields that no body of ours has: clients send bookkeeping of their own, and a 400 for it would only shut them out.

One is refused when it is near a name that the body has (a typo) or is known to change an answer elsewhere. Any other is left
out, named in the response header `x-headrace-ignored` and counted, and so is one that asks for nothing: null, [] or {}. So are
tools of kinds that are run by their provider. vLLM's older words for structured_outputs are taken for that.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec import inspect

from headrace.api.protocol import ChatRequest, CompletionRequest
from headrace.api.responses_input import ResponsesRequest
from headrace.sampling.foreign import FOREIGN

GUIDED = ("guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar")
HEADER = b"x-headrace-ignored"
MAX_NAMED = 32  # in the header
# known elsewhere, and whoever sends them expects another text than without
CHANGES_ANSWERS = frozenset((
    # llama.cpp, koboldcpp, text-generation-webui, exllama
    "mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers", "dry_range", "xtc_probability", "xtc_threshold", "dynatemp_range",
    "dynatemp_exponent", "dynamic_temperature", "dynatemp_low", "dynatemp_high", "typical", "typical_p", "tfs", "tfs_z",
    "top_a", "top_n_sigma", "nsigma", "skew", "smoothing_factor", "smoothing_curve", "samplers", "sampler_order",
    "sampler_priority", "temperature_last", "repeat_last_n", "penalty_last_n", "repetition_penalty_range", "penalty_prompt",
    "n_keep", "t_max_predict_ms", "cfg_scale", "guidance_scale", "negative_prompt", "image_data", "images", "prompt_template",
    # Transformers
    "no_repeat_ngram_size", "encoder_repetition_penalty", "num_beams", "diversity_penalty", "eta_cutoff", "epsilon_cutoff",
    "penalty_alpha", "watermark", "max_time", "exponential_decay_length_penalty", "sequence_bias", "suppress_tokens",
    "forced_eos_token_id", "forced_bos_token_id", "renormalize_logits",
    # servers and gateways
    "lora", "lora_path", "lora_adapter", "adapter_id", "transforms", "plugins", "models", "mm_processor_kwargs", "system",
    "template", "raw", "context", "custom_logit_processor", "custom_params", "input_embeds", "search_parameters", "stop_regex",
    "forced_decoder_ids", "logits_processors", "guided_whitespace_pattern",
))  # fmt: skip

_BOOKKEEPING = frozenset((
    "user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "verbosity", "request_id", "speed",
))  # fmt: skip
# what another of our bodies has, and this one cannot do
_OF_OTHERS = frozenset(f for kind in (ChatRequest, CompletionRequest, ResponsesRequest) for f in kind.__struct_fields__)
MATTERS = (CHANGES_ANSWERS | FOREIGN.keys() | _OF_OTHERS) - _BOOKKEEPING


class Refused(Exception):
    """A field that is not left out: its place, its name, and what there is instead, if that is known."""

    def __init__(self, path: str, name: str, instead: str | None):
        super().__init__(path, name, instead)
        self.path, self.name, self.instead = path, name, instead


def in_our_words(document: Any, kind: inspect.Type) -> None:
    """In a decoded body of type `kind` that has structured_outputs, GUIDED of vLLM before 0.12 become that."""
    if not isinstance(document, dict) or all(f.encode_name != "structured_outputs" for f in getattr(kind, "fields", ())):
        return
    if not isinstance(others := document.get("structured_outputs") or {}, dict):
        return
    kinds = {name: name.removeprefix("guided_") for name in GUIDED if name in document}
    words = {name: kind for name, kind in kinds.items() if others.get(kind) is None}  # else it is refused by its name
    given = {kind: document.pop(name) for name, kind in words.items()}
    given = {kind: value for kind, value in given.items() if value is not None and value is not False}
    if given:
        document["structured_outputs"] = {**others, **given}


def leave_out(document: Any, kind: inspect.Type) -> list[str]:
    """Remove from a decoded body of type `kind` what is ignored; returns where it stood. Raises Refused."""
    found: list[str] = []
    if isinstance(document, dict) and (kinds := _kinds_of_tools(kind)):
        _leave_out_tools(document, kinds, found)
    _walk(document, kind, "", found)
    return list(dict.fromkeys(found))


def leave_out_of_part(part: Any, kind: inspect.Type, path: str) -> list[str]:
    """The same of a part of a body, at `path`, that the body's own type leaves open."""
    found: list[str] = []
    _walk(part, kind, path, found)
    return found


def _kinds_of_tools(kind: inspect.Type) -> list[Any]:
    """That a body takes. Nothing: it has none, or leaves their type open and sorts them itself."""
    tools = next((f.type for f in getattr(kind, "fields", ()) if f.encode_name == "tools"), None)
    lists = [m for m in getattr(tools, "types", (tools,)) if isinstance(m, inspect.ListType)]
    fields = [f for m in lists if isinstance(m.item_type, inspect.StructType) for f in m.item_type.fields]
    return [v for f in fields if f.encode_name == "type" and isinstance(f.type, inspect.LiteralType) for v in f.type.values]


def _leave_out_tools(body: dict[str, Any], kinds: Collection[Any], found: list[str]) -> None:
    """Tools of other kinds; a `tool_choice` that asks for one is refused by its type."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return
    foreign = [t for t in tools if isinstance(t, dict) and isinstance(t.get("type"), str) and t["type"] not in kinds]
    if not foreign:
        return
    found += [f"tools[{tool['type']}]" for tool in foreign]
    body["tools"] = [tool for tool in tools if tool not in foreign]
    if not body["tools"]:
        del body["tools"]
        if body.get("tool_choice") == "auto":
            del body["tool_choice"]


def _walk(value: Any, kind: inspect.Type, path: str, found: list[str]) -> None:
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for member in members:
        if isinstance(value, dict) and isinstance(member, inspect.StructType):
            known = {field.encode_name: field.type for field in member.fields}
            for name in [name for name in value if name not in known]:
                if value[name] not in (None, [], {}):
                    if name in MATTERS and not path:
                        raise Refused(path, name, None)
                    if name not in _BOOKKEEPING and (near := nearest(name, known)):
                        raise Refused(path, name, f"is it {near}?")
                found.append(f"{path}.{name}" if path else name)
                del value[name]
            for name, below in value.items():
                _walk(below, known[name], f"{path}.{name}" if path else name, found)
        elif isinstance(value, list) and isinstance(member, inspect.ListType):
            for item in value:
                _walk(item, member.item_type, f"{path}[]", found)


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that this one is probably meant to be: written in another style, or at most two letters away."""
    plain = _plain(name)
    for other in known:
        allowed = min(2, (min(len(plain), len(_plain(other))) - 1) // 2)  # of short names nearly all are two letters away
        if _distance(plain, _plain(other), allowed) <= allowed:
            return other
    return None


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _distance(a: str, b: str, limit: int) -> int:
    """Levenshtein's; more than `limit` where it is more."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        before, row[0] = row[0], i + 1
        for j, y in enumerate(b):
            before, row[j + 1] = row[j + 1], min(before + (x != y), row[j] + 1, row[j + 1] + 1)
    return row[-1]


def header_value(names: Collection[str]) -> bytes:
    """The names as a header may carry them: each shortened, of all at most MAX_NAMED."""
    shown = ["".join(c if c.isascii() and c.isprintable() and c not in ",;" else "?" for c in name[:64]) for name in names]
    return ", ".join([*shown[:MAX_NAMED], *(["..."] if len(shown) > MAX_NAMED else [])]).encode()
