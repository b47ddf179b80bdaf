"""A step is run before it is captured, so that its kernels are compiled and loaded: two of layers that are alike do for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from headrace.model.decoder import Decoder
from headrace.model.linear import NarrowLinear
from headrace.model.mixer import SelfAttention
from headrace.model.mlp import DenseMlp

ENOUGH = 2  # the last one computes fewer rows


def are_alike(decoder: Decoder) -> bool:
    """Whether all layers launch the same kernels; of several ranks, and with narrow weights, that is not looked into."""
    config = decoder.config
    if len(set(config.windows or ())) > 1 or config.rope_layers or decoder.vocab is not None or decoder.adapters is not None:
        return False
    return all(
        type(layer.mixer) is SelfAttention and type(layer.mlp) is DenseMlp and not any(
            isinstance(part, NarrowLinear) for part in (layer.mixer.qkv, layer.mixer.out, layer.mlp.gate_up, layer.mlp.down)
        )
        for layer in decoder.layers
    )  # fmt: skip


@contextlib.contextmanager
def in_short(decoder: object) -> Iterator[None]:
    """Within this a decoder whose layers are alike runs the first two, and what they give is of no use."""
    if not isinstance(decoder, Decoder) or len(decoder.layers) <= ENOUGH or not are_alike(decoder):
        yield
        return
    fast, layers, writing = getattr(decoder, "fast", None), decoder.layers, decoder.writing
    decoder.layers, decoder.writing = layers[:ENOUGH], ENOUGH
    if fast is not None:
        fast.depth = ENOUGH
    try:
        yield
    finally:
        decoder.layers, decoder.writing = layers, writing
        if fast is not None:
            fast.depth = None
