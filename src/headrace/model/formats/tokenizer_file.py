"""What a tokenizer's file says besides its model, and how a broken one is told. Imports no torch."""

from __future__ import annotations

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
