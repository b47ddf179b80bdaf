"""What rounding costs: the embedded model's predictions on real text, by the native step and by torch, against float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace import LLM
from headrace.config import EngineConfig
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.decoder_weights import MATRICES
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.narrow import quantized
from headrace.model.weight import Weight, dequantized
from model_harness import Sequences
from quality import Divergence, logits_of, real_texts

pytest.importorskip("headrace.native._step", reason="no compiler: the native step was not built")
SMALL = {"device": "cpu", "max_model_len": 256, "num_kv_blocks": 32, "max_num_seqs": 1}
MODES = {  # name -> options, largest mean KL
    "default": ({}, 0.0005),
    "int8 activations": ({"activation_dtype": "int8"}, 0.004),
    "float32": ({"dtype": "float32"}, 1e-8),
    "torch, FP8 cache": ({"dtype": "float32", "enforce_eager": True, "kv_cache_dtype": "fp8"}, 0.01),
}


@pytest.fixture(scope="module")
def reference(smollm2):
    """Pieces of text with the logits after each of their tokens."""
    with LLM(smollm2, dtype="float32", enforce_eager=True, **SMALL) as llm:
        texts = [llm.tokenizer.encode(text[2000:])[:128] for text in real_texts().values()]
        return [(ids, logits_of(llm, ids)) for ids in texts[:1] + texts[-3:]]


@pytest.fixture(scope="module")
def weights(smollm2):
    """The model's config, and its weights in float32."""
    checkpoint = resolve_checkpoint(EngineConfig(model=smollm2))
    config = model_config_from_hf(checkpoint.config)
    return config, load_model(checkpoint, config, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("mode", MODES)
def test_predictions_stay_near_float32(smollm2, reference, mode):
    options, most = MODES[mode]
    found = Divergence()
    with LLM(smollm2, **SMALL, **options) as llm:
        for ids, want in reference:
            found.add(want, logits_of(llm, ids), ids)
    summary = found.summary()
    assert summary["positions"] == 512
    assert summary["kl_mean"] <= most, summary
    assert summary["agreement_where_clear"] >= 0.99, summary


@pytest.mark.parametrize(("kind", "most", "agreement"), [("int8", 0.02, 0.93), ("fp8", 0.1, 0.85), ("int4", 1.0, 0.5)])
def test_floats_that_are_quantized_when_they_are_loaded_stay_near(smollm2, reference, weights, kind, most, agreement):
    """As on a GPU: each row by itself, and a head in int8. These floats were quantized once before, so int4 rounds to two grids."""

    def rounded(weight: Weight, kind: str = kind) -> Weight:
        return Weight(dequantized(quantized(weight.data, kind), torch.float32))

    config, floats = weights
    layers = [replace(layer, **{name: rounded(getattr(layer, name)) for name in MATRICES}) for layer in floats.layers]
    found = Divergence()
    for ids, want in reference[1:2]:
        changed = replace(floats, layers=layers, lm_head=rounded(floats.lm_head, "int8"))
        (logits,) = Sequences(config, changed, max_len=len(ids)).step([(0, ids)])
        found.add(want, logits, ids)
    summary = found.summary()
    assert summary["kl_mean"] <= most and summary["agreement"] >= agreement, summary
