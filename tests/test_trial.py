"""What runs before a capture: two layers for all where all are alike, and afterwards all again."""

from __future__ import annotations

import pytest

from headrace.attention.torch_backend import TorchAttention
from headrace.model.decoder import Decoder
from headrace.worker.trial import ENOUGH, are_alike, in_short
from model_harness import load_tiny
from tiny_models import write_tiny


def decoder_of(family: str, path, **changes) -> Decoder:
    config, weights = load_tiny(write_tiny(family, path, **changes))
    return Decoder(config, weights, TorchAttention())


def test_two_layers_do_for_layers_that_are_alike(tmp_path):
    decoder = decoder_of("llama", tmp_path, num_hidden_layers=4)
    layers, writing = decoder.layers, decoder.writing
    assert are_alike(decoder) and len(layers) == writing == 4
    with pytest.raises(ZeroDivisionError), in_short(decoder):
        assert decoder.layers == layers[:ENOUGH] and decoder.writing == ENOUGH
        raise ZeroDivisionError
    assert decoder.layers is layers and decoder.writing == writing


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "smollm3"])
def test_layers_that_differ_are_all_tried(family, tmp_path):
    decoder = decoder_of(family, tmp_path)
    layers = decoder.layers
    assert not are_alike(decoder)
    with in_short(decoder):
        assert decoder.layers is layers
