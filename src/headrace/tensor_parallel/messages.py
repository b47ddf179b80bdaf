"""What rank 0 tells the others to do, one frame of the ring each, and what these say of themselves: msgpack, never pickle.

Begin        the options: build what runs the steps
Replay       a step of decodes as a captured one, which the message names: captured now if it is not there yet
Place        the requests of any other step
Compute      that step, as a captured one or up to its logits
Sample       the rows of the last step, if it ends with the logits
Capture      a step that nobody needs yet, at the start or while there is nothing else to do
LoadAdapter  an adapter into a slot, or (UnloadAdapter) out of it
End          nothing more will come
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np

from headrace.config import EngineConfig
from headrace.lora.version import Version
from headrace.scheduler.plan import StepPlan


class Begin(msgspec.Struct, tag=True, array_like=True):
    config: EngineConfig
    port: int  # on the loopback, where the ranks find each other


class Decodes(msgspec.Struct, tag=True, array_like=True):
    """A captured step of decodes: the fields of cuda_graphs.Key."""

    rows: int
    context: int
    tail: str
    related: bool
    adapted: bool


class Prompts(msgspec.Struct, tag=True, array_like=True):
    """A captured step with prompts: the fields of prompt_graphs.PromptKey."""

    tokens: int
    seqs: int
    decodes: bool
    context: int
    tail: str


class Replay(msgspec.Struct, tag=True, array_like=True):
    plan: StepPlan
    step: Decodes


class Place(msgspec.Struct, tag=True, array_like=True):
    plan: StepPlan


class Compute(msgspec.Struct, tag=True, array_like=True):
    step: Prompts | None  # None: kernel by kernel


class Sample(msgspec.Struct, tag=True, array_like=True):
    edited: bool  # rank 0 has masks of grammars or users' functions for the rows


class Capture(msgspec.Struct, tag=True, array_like=True):
    step: Decodes | Prompts


class LoadAdapter(msgspec.Struct, tag=True, array_like=True):
    version: Version
    slot: int


class UnloadAdapter(msgspec.Struct, tag=True, array_like=True):
    digest: str


class End(msgspec.Struct, tag=True, array_like=True):
    pass


ToRank = Begin | Replay | Place | Compute | Sample | Capture | LoadAdapter | UnloadAdapter | End


class Here(msgspec.Struct, tag=True):
    """A rank has imported everything and looks for the others."""


class Built(msgspec.Struct, tag=True):
    """It can run steps."""


class LastWords(msgspec.Struct, tag=True):
    """It ends because of this. `refused`: options or memory do not allow it, and another try would end in the same way."""

    error: str
    refused: bool


FromRank = Here | Built | LastWords


def to_wire(value: Any) -> Any:
    """For encoders: arrays as type, shape and bytes, packed ids as their bytes."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"a {type(value).__name__} does not travel")


def from_wire(kind: type, value: Any) -> Any:
    """For decoders: the reverse."""
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype).reshape(shape)
    if kind is array:
        return array("i", value)
    raise NotImplementedError(f"a {kind.__name__} does not travel")
