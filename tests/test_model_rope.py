"""Every rope scaling, past the original context length, against Transformers: tables and whole logits."""

from __future__ import annotations

import pytest
import torch

from headrace.model.config import RopeConfig
from headrace.model.rope import rope_tables
from model_harness import Sequences, load_tiny
from test_model_families import assert_close, reference, tokens
from tiny_models import write_tiny

ORIGINAL = 32  # context length before scaling
LLAMA_DIM, PHI_DIM = 16, 12  # rotated dimensions of the tiny models
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}

# name -> (family, config settings, rope settings)
SCALINGS = {
    "linear": ("llama", {}, {"rope_type": "linear", "factor": 4.0}),
    "llama3": ("llama", {"max_position_embeddings": 256}, {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    }),
    "yarn": ("qwen2", {}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}),
    "yarn-all": ("qwen3", {"max_position_embeddings": 256}, {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False,
    }),
    "yarn-attention-factor": ("qwen3", {"max_position_embeddings": 128}, {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3,
    }),
    "longrope": ("phi3", {"max_position_embeddings": 128, "original_max_position_embeddings": ORIGINAL}, {
        "rope_type": "longrope", "partial_rotary_factor": 0.5, **FACTORS,
    }),
    "gemma3-linear": ("gemma3", {"max_position_embeddings": 256}, {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }),
}  # fmt: skip


def models(tmp_path, family, settings, rope):
    import transformers

    settings = {"max_position_embeddings": ORIGINAL, **settings}
    if "full_attention" not in rope:
        rope = {"rope_theta": 10000.0, **rope}
    path = write_tiny(family, tmp_path, rope_parameters=rope, **settings)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return *load_tiny(path), theirs


@pytest.mark.parametrize("name", SCALINGS)
def test_past_the_original_length(name, tmp_path):
    config, weights, theirs = models(tmp_path, *SCALINGS[name])
    assert config.max_position > ORIGINAL
    ids = tokens(3 * ORIGINAL + 5)
    run = Sequences(config, weights, max_len=config.max_position)
    ours = [run.step([(0, ids[start : start + 37])])[0] for start in range(0, len(ids), 37)]
    assert_close(torch.cat(ours), reference(theirs, ids))


def test_longrope_short_factors_when_the_context_is_short(tmp_path):
    config, weights, theirs = models(tmp_path, *SCALINGS["longrope"])
    ids = tokens(ORIGINAL)
    (ours,) = Sequences(config, weights, max_len=ORIGINAL).step([(0, ids)])
    assert_close(ours, reference(theirs, ids))


@pytest.mark.parametrize("length", [ORIGINAL, 3 * ORIGINAL])
def test_dynamic_is_that_of_a_sequence_of_max_model_len(length, tmp_path):
    config, weights, theirs = models(tmp_path, "llama", {}, {"rope_type": "dynamic", "factor": 4.0})
    assert config.max_position == 4 * ORIGINAL
    ids = tokens(length)
    run = Sequences(config, weights, max_len=length)
    ours = [run.step([(0, ids[:20])])[0], run.step([(0, ids[20:])])[0]]
    assert_close(torch.cat(ours), reference(theirs, ids))


def test_dynamic_below_the_original_length_is_unscaled(tmp_path):
    config, weights, theirs = models(tmp_path, "llama", {}, {"rope_type": "dynamic", "factor": 4.0})
    ids = tokens(11)
    (ours,) = Sequences(config, weights, max_len=ORIGINAL).step([(0, ids)])
    assert_close(ours, reference(theirs, ids))


def test_old_and_new_spelling_mean_the_same(tmp_path):
    from headrace.model.families import model_config_from_hf

    base = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 32, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    old = {**base, "rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {**base, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}
    assert model_config_from_hf(old) == model_config_from_hf(new)
    assert model_config_from_hf(old).rope == RopeConfig(500000.0, 16, "linear", 64, (("factor", 2.0),))
    gemma = {**base, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "num_key_value_heads": 1, "num_hidden_layers": 6}
    old = {**gemma, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {**gemma, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }}  # fmt: skip
    assert model_config_from_hf(old) == model_config_from_hf(new)
    assert model_config_from_hf(old).rope_of(0).theta == 1e4
    assert model_config_from_hf(old).rope_of(5).theta == 1e6


def test_tables_do_not_depend_on_what_lies_behind():
    """A longer table begins with the shorter one, for every kind that is not pinned to the length."""
    for kind, params in (
        ("default", ()), ("linear", (("factor", 2.0),)),
        ("yarn", (("factor", 4.0), ("original_max_position_embeddings", 64))),
    ):  # fmt: skip
        rope = RopeConfig(10000.0, 16, kind, 64, params)
        for short, long in zip(rope_tables(rope, 50), rope_tables(rope, 300), strict=True):
            assert short.dtype == torch.float32
            assert torch.equal(short, long[:50])
