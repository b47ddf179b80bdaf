"""The native step's law in changing company: whatever happens to the cores, each request's answer is the same bits as alone."""

from __future__ import annotations

import pytest

from engine_driver import make_core
from schedule_soak import Soak

pytest.importorskip("headrace.native._step", reason="no compiler: the native step was not built")


@pytest.mark.parametrize("mode", [
    {"dtype": "auto", "quantization": "int8"},
    {"dtype": "auto", "quantization": "int4", "activation_dtype": "int8", "kv_cache_dtype": "int8"},
], ids=["int16", "int8"])  # fmt: skip
def test_requests_in_dying_cores_answer_as_alone(model, mode):
    def core(**options):
        return make_core(str(model), skip_tokenizer_init=True, block_size=16, **mode, **options)

    soak = Soak(core, seed=5, different=25, turns_to_kill=60)
    soak.run(200)
    assert not soak.differing, soak.differing[0]
    assert soak.counts["resumed"] > 5 and soak.counts["kills"] > 2, soak.counts
