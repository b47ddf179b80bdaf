"""Families with mixtures of experts in GGUF files, as llama.cpp's converter writes them, load as their Hugging Face checkpoints do."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace.config import EngineConfig
from headrace.errors import CheckpointError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.weight import Weight, dequantized
from test_loader_gguf_families import assert_same_model, convert
from tiny_models import write_tiny

SIGMOID = gguf.ExpertGatingFuncType.SIGMOID
# family -> settings of the tiny checkpoint that its GGUF can express
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []}, "qwen2_moe": {"decoder_sparse_step": 1}, "mixtral": {"sliding_window": None},
    "olmoe": {}, "glm4_moe": {}, "minimax_m2": {}, "hunyuan_v1_moe": {}, "ernie4_5_moe": {},
}  # fmt: skip


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts of a layer in one tensor, and names as the converter looks them up."""
    found, experts = {}, defaultdict(dict)
    for name, tensor in tensors.items():
        before, mark, after = name.partition(".experts.")
        number, _, part = after.partition(".")
        if mark:
            experts[f"{before}.experts.{part}"][int(number)] = tensor
        elif name.endswith("e_score_correction_bias"):
            found[name.removesuffix("_bias") + ".bias"] = tensor.flatten()
        elif name.endswith("shared_expert_gate.weight"):
            found[name] = tensor.flatten()
        else:
            found[name] = tensor
    return found | {name: torch.stack([of[i] for i in range(len(of))]) for name, of in experts.items()}


def describe(writer: gguf.GGUFWriter, config: Any, gating: Any = SIGMOID) -> None:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    kind = config.model_type
    if kind not in ("mixtral", "olmoe"):
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind in ("glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gating)
        writer.add_expert_weights_norm(True)
    if kind == "glm4_moe":
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if kind == "ernie4_5_moe":
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)


@pytest.mark.parametrize("family", SETTINGS)
def test_a_gguf_is_the_checkpoint_that_it_was_made_from(family: str, tmp_path: Path):
    source = write_tiny(family, tmp_path / "hf", **SETTINGS[family])
    assert_same_model(source, convert(family, source, tmp_path / "model.gguf", together, describe))


def loaded(path: Path, **options: Any):
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    config = model_config_from_hf(checkpoint.config)
    return load_model(checkpoint, config, torch.float32, torch.device("cpu"), **options)


YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 0.5,
    "mscale_all_dim": 0.5,
}  # fmt: skip
LATENT = {"deepseek_v2": {"rope_parameters": YARN, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}, "deepseek_v3": {}}


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("family", LATENT)
def test_latent_attention_as_older_and_newer_files_have_it(family: str, by_head: bool, tmp_path: Path):
    """By head: keys' parts of the latent turned by a quarter, which may be quantized."""
    source = write_tiny(family, tmp_path / "hf", **LATENT[family])
    nope = LATENT[family].get("qk_nope_head_dim", 24)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = together(tensors)
        for name in [name for name in found if by_head and ".kv_b_proj." in name]:
            heads = found.pop(name).unflatten(0, (4, -1))
            found[name.replace("kv_b", "k_b")] = heads[:, :nope].transpose(1, 2).contiguous()
            found[name.replace("kv_b", "v_b")] = heads[:, nope:].contiguous()
        return found

    def describe_latent(writer: gguf.GGUFWriter, config: Any) -> None:
        query, value, row = nope + config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank + config.qk_rope_head_dim
        for key, number in {"attention.key_length": row if by_head else query, "rope.dimension_count": config.qk_rope_head_dim}.items():
            writer.kv_data[0][f"deepseek2.{key}"].value = number
        writer.add_value_length(config.kv_lora_rank if by_head else value)
        if by_head:
            writer.add_key_length_mla(query)
            writer.add_value_length_mla(value)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        if config.q_lora_rank:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(SIGMOID if family == "deepseek_v3" else gguf.ExpertGatingFuncType.SOFTMAX)
        if family == "deepseek_v3":
            writer.add_expert_weights_norm(config.norm_topk_prob)
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
        else:
            writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])

    path = convert(family, source, tmp_path / "model.gguf", change, describe_latent)
    assert_same_model(source, path, **({"family": f"{family}_by_head"} if by_head else {}))
    if not by_head or family != "deepseek_v2":
        return

    kind, rounded = gguf.GGMLQuantizationType.Q8_0, {}

    def pack(name: str, data: np.ndarray) -> tuple[np.ndarray, Any]:
        if "attn_k_b" not in name:
            return data, None
        packed = gguf.quantize(data, kind)
        rounded[name] = torch.from_numpy(gguf.dequantize(packed, kind))
        return packed, kind

    path = convert(family, source, tmp_path / "packed.gguf", change, describe_latent, pack)
    for narrow in (False, True):
        for i, layer in enumerate(loaded(path, narrow=narrow).layers):
            ours = layer.more["kv_b"].data.unflatten(0, (4, -1))[:, :nope]
            assert torch.equal(ours, rounded[f"blk.{i}.attn_k_b.weight"].transpose(1, 2))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantized_experts_are_each_their_own_numbers(kind: str, tmp_path: Path):
    """Of three dimensions in the file; kept narrow, too. The router stays what it is."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    source = write_tiny("qwen3_moe", tmp_path / "hf", **SETTINGS["qwen3_moe"], **sizes, num_hidden_layers=1)
    plain = loaded(source).layers[0].more
    packed: dict[str, np.ndarray] = {}
    type_ = gguf.GGMLQuantizationType[kind]

    def pack(name: str, data: np.ndarray) -> tuple[np.ndarray, Any]:
        if "_exps" not in name:
            return data, None
        packed[name] = gguf.quantize(data, type_)
        return packed[name], type_

    path = convert("qwen3_moe", source, tmp_path / "model.gguf", together, describe, pack)
    floats = {name: torch.from_numpy(gguf.dequantize(data, type_)) for name, data in packed.items()}
    both = torch.cat([floats["blk.0.ffn_gate_exps.weight"], floats["blk.0.ffn_up_exps.weight"]], 1)
    for narrow in (False, True):
        more = loaded(path, narrow=narrow).layers[0].more
        assert torch.equal(dequantized(more["experts_gate_up"], torch.float32), both.flatten(0, 1))
        assert torch.equal(dequantized(more["experts_down"], torch.float32), floats["blk.0.ffn_down_exps.weight"].flatten(0, 1))
        assert torch.equal(more["router"].data, plain["router"].data)
        assert isinstance(more["experts_down"], Weight) and (more["experts_down"].kind != "float") == narrow


def test_layers_that_guess_further_tokens_are_left_unread(tmp_path: Path):
    """They count among the file's blocks."""
    source = write_tiny("glm4_moe", tmp_path / "hf", num_hidden_layers=2)

    def more_blocks(writer: gguf.GGUFWriter, config: Any) -> None:
        describe(writer, config)
        writer.kv_data[0]["glm4moe.block_count"].value = 3
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "attn_norm"):
            writer.add_tensor(f"blk.2.{name}.weight", np.ones((96, 192), np.float32))

    assert_same_model(source, convert("glm4_moe", source, tmp_path / "model.gguf", together, more_blocks))


def test_other_routers_and_lone_experts_are_refused(tmp_path: Path):
    source = write_tiny("glm4_moe", tmp_path / "hf")

    softmax = partial(describe, gating=gguf.ExpertGatingFuncType.SOFTMAX)
    with pytest.raises(CheckpointError, match="expert_gating_func is 1, supported: 2"):
        loaded(convert("glm4_moe", source, tmp_path / "a.gguf", together, softmax))

    def flat(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: t[0] if t.ndim == 3 else t for name, t in together(tensors).items()}

    with pytest.raises(CheckpointError, match=r"ffn_down_exps.* has shape .*of each expert"):
        loaded(convert("glm4_moe", source, tmp_path / "b.gguf", flat, describe))
