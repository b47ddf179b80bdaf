"""Each family converted to GGUF, as llama.cpp's converter does it, loads as its Hugging Face checkpoint does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

import loader_files as files
from headrace.config import EngineConfig
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.weight import Weight
from tiny_models import write_tiny

NAMES = {
    "olmo3": "olmo2", "ministral3": "mistral3", "hunyuan_v1_dense": "hunyuan-dense", "cohere": "command-r",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "mixtral": "llama", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2",
    "hunyuan_v1_moe": "hunyuan-moe", "ernie4_5_moe": "ernie4_5-moe", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
}  # others' are theirs
INTERLEAVED = {"llama", "mixtral", "granite", "smollm3", "ministral3"}
PLUS_ONE = {"gemma2", "gemma3", "nemotron"}
WINDOWED = {"gemma2", "gemma3", "olmo3", "exaone4", "cohere2"}
LAYER_NORM = {"starcoder2": "norm_epsilon", "nemotron": "norm_eps", "cohere": "layer_norm_eps", "cohere2": "layer_norm_eps"}
# family -> settings of the tiny checkpoint that its GGUF can express
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "olmo2": {}, "granite": {}, "phi3": {},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3": {
        "query_pre_attn_scalar": 16, "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "olmo3": {}, "exaone4": {}, "smollm3": {"no_rope_layers": None, "num_hidden_layers": 5}, "seed_oss": {"mlp_bias": False},
    "ministral3": {}, "glm4": {"attention_bias": True}, "ernie4_5": {"use_bias": False}, "hunyuan_v1_dense": {},
    "starcoder2": {"sliding_window": 4096}, "nemotron": {}, "cohere": {}, "cohere2": {},
}  # fmt: skip


def convert(
    family: str, source: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
    describe: Callable[[gguf.GGUFWriter, Any], None] | None = None, pack: Callable[[str, Any], tuple[Any, Any]] | None = None,
) -> Path:  # fmt: skip
    """The GGUF of a Hugging Face checkpoint, with the package's own table of tensor names.

    `change` makes the file's tensors of the checkpoint's, `describe` writes more of the config, `pack` quantizes.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(source)
    writer = gguf.GGUFWriter(str(path), NAMES.get(family, family))
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if family in LAYER_NORM:
        writer.add_layer_norm_eps(getattr(config, LAYER_NORM[family]))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if family == "gemma3":
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
    elif family.startswith("hunyuan"):
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2)))
    else:
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "olmo3":
        writer.add_rope_scaling_attn_factors(1.2079441541679836)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family == "ministral3":
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if family == "exaone4":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family == "cohere2":
        writer.add_sliding_window_pattern(2)
    if family in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if family in WINDOWED:
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    arch = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == NAMES.get(family, family))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    if describe is not None:
        describe(writer, config)
    for name, tensor in change(load_file(source / "model.safetensors")).items():
        data = tensor.numpy()
        if family in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            data = files.interleave(data, head_dim)
        if family in PLUS_ONE and name.endswith("norm.weight"):
            data = data + 1
        found, kind = names.get_name(name, try_suffixes=(".weight", ".bias")), None
        if pack is not None:
            data, kind = pack(found, data)
        writer.add_tensor(found, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", SETTINGS)
def test_a_gguf_is_the_checkpoint_that_it_was_made_from(family: str, tmp_path: Path):
    source = write_tiny(family, tmp_path / "hf", **SETTINGS[family])
    assert_same_model(source, convert(family, source, tmp_path / "model.gguf"))


def assert_same_model(source: Path, path: Path, **differs: Any) -> None:
    """Its config but for what `differs`, and its weights."""
    configs, weights = [], []
    for model in (source, path):
        checkpoint = resolve_checkpoint(EngineConfig(model=str(model)))
        configs.append(model_config_from_hf(checkpoint.config))
        weights.append(load_model(checkpoint, configs[-1], torch.float32, torch.device("cpu")))
    for field in fields(configs[0]):
        if field.name not in ("dtype", "bos_token_id", "eos_token_ids"):  # the tokenizer's part, which is not converted
            ours, expected = getattr(configs[1], field.name), differs.get(field.name, getattr(configs[0], field.name))
            assert leaves(ours) == leaves(expected), field.name
    compare(weights[1], weights[0])


def leaves(value: Any) -> list[Any]:
    """What a setting consists of; the file's numbers are of single precision."""
    if is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in fields(value))
    if isinstance(value, tuple):
        return [len(value), *(leaf for part in value for leaf in leaves(part))]
    return [pytest.approx(value) if isinstance(value, float) else value]


def compare(ours: Any, expected: Any) -> None:
    assert torch.equal(ours.embedding, expected.embedding)
    assert torch.equal(ours.lm_head.data, expected.lm_head.data)
    torch.testing.assert_close(ours.final_norm, expected.final_norm, atol=1e-6, rtol=0)
    for layer, wanted in zip(ours.layers, expected.layers, strict=True):
        for field in fields(wanted):
            a, b = getattr(layer, field.name), getattr(wanted, field.name)
            if b is None:
                assert a is None, field.name
            elif field.name == "more":
                assert a.keys() == b.keys()
                for name, value in b.items():
                    torch.testing.assert_close(getattr(a[name], "data", a[name]), getattr(value, "data", value), atol=0, rtol=0)
            else:
                a, b = (x.data if isinstance(x, Weight) else x for x in (a, b))
                torch.testing.assert_close(a, b, atol=1e-6 if "norm" in field.name else 0, rtol=0)
