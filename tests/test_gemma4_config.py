"""Gemma 4's layers have the sizes that Transformers reads in a config, of published files and of its own."""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import pytest

from headrace.errors import CheckpointError
from headrace.model.families import model_config_from_hf

BASE: dict[str, Any] = {  # the fields of published files
    "model_type": "gemma4_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 512,
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 4096,
}  # fmt: skip
GIVEN: dict[str, list[Any]] = {
    "num_global_key_value_heads": [..., None, 2], "attention_k_eq_v": [..., False, True], "num_kv_shared_layers": [..., 0, 6],
    "use_double_wide_mlp": [..., True], "global_head_dim": [..., 32],
    "layer_types": [..., ["sliding_attention", "full_attention", "sliding_attention"] * 4],
}  # fmt: skip


def test_layers_are_of_the_sizes_that_transformers_reads():
    import transformers

    for values in random.Random(4).sample(list(itertools.product(*GIVEN.values())), 12):
        given = dict(zip(GIVEN, values, strict=True))
        config = {name: value for name, value in (BASE | given).items() if value is not ...}
        theirs = transformers.Gemma4TextConfig(**copy.deepcopy({k: v for k, v in config.items() if k != "model_type"}))
        saved = json.loads(theirs.to_json_string(use_diff=False))
        for form in (config, saved):
            model = model_config_from_hf(form)
            assert model.per_layer is not None
            for layer, sizes in enumerate(model.per_layer.sizes):
                own, shared = theirs.per_layer_config[layer], theirs.kv_sharing_modes[layer] == "reuse"
                full = theirs.layer_types[layer] == "full_attention"
                assert sizes.head_dim == own.head_dim, given
                assert sizes.kv_heads == (0 if shared else own.num_key_value_heads), given
                assert sizes.inner == theirs.intermediate_size * (2 if theirs.use_double_wide_mlp and shared else 1)
                assert shared or sizes.values == (not (theirs.attention_k_eq_v and full))
                assert model.window(layer) == (0 if full else 512)
                assert theirs.kv_sharing_modes[sizes.source] == ("store" if shared else theirs.kv_sharing_modes[layer])
                assert theirs.layer_types[sizes.source] == theirs.layer_types[layer]
            assert model.rope.dim == next(s.head_dim for s, w in zip(model.per_layer.sizes, model.windows, strict=True) if not w)


@pytest.mark.parametrize("change, named", [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"), ({"attention_bias": True}, "attention_bias"),
    ({"num_kv_shared_layers": 12}, "num_kv_shared_layers"), ({"num_kv_shared_layers": 11}, "none to share with"),
    ({"per_layer_config": [1]}, "per_layer_config"), ({"per_layer_config": {"5": 3}}, "per_layer_config of layer 5"),
    ({"enable_moe_block": True}, "num_experts"), ({"num_key_value_heads": 3}, "no multiple"),
])  # fmt: skip
def test_what_is_wrong_is_named(change, named):
    with pytest.raises(CheckpointError, match=named):
        model_config_from_hf(BASE | change)
