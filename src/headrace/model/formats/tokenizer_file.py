"""What a tokenizer's file says besides its model, and how a broken one is told. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from headrace.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TokenizerExtras:
    """What belongs to a tokenizer besides its model.

    `prefix` and `suffix` are the special tokens put around a text; None leaves that to the backend's post-processor.
    """

    roles: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, eot_token ... -> text
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name; the usual one is "default"
    prefix: tuple[int, ...] | None = None
    suffix: tuple[int, ...] = ()
    unused: frozenset[int] = frozenset()  # ids that the vocabulary only pads itself with


def build_backend(path: Path, build) -> tokenizers.Tokenizer:
    """`build()`, its errors as CheckpointError. The library reports some faults by a Rust panic, a BaseException."""
    try:
        return build()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a usable tokenizer: {error}") from error


def rename_tokens(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """A copy that knows these added tokens by other spellings, and by these only. Raises ValueError if ids would change."""
    state = json.loads(backend.to_str())
    model, added = state["model"], state["added_tokens"]
    ids = {names.get(token["content"], token["content"]): token["id"] for token in added}
    if any(token["single_word"] for token in added if token["content"] in names):
        raise ValueError("some of its special tokens count between blanks only")
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):  # the library takes an added token's id from here
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()} | ids
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:  # one of the model's own pieces must not become the token either
        model["merges"] = [pair for pair in model["merges"] if not names.keys() & {*pair, "".join(pair)}]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    copy = tokenizers.Tokenizer.from_str(json.dumps(state))
    found = copy.encode("".join(names.values()), add_special_tokens=False).ids
    if any(copy.token_to_id(text) != i for text, i in ids.items()) or not set(found) >= {ids[n] for n in names.values()}:
        raise ValueError("the ids of special tokens change")
    return copy
