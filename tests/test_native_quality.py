"""What rounding costs: the embedded model's predictions on real text, by the native step and by torch, against float32."""

from __future__ import annotations

import pytest

from headrace import LLM
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
