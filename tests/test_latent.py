"""Multi-head latent attention: law 1, what it costs in the cache, and the files that it comes in."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from drafting import drafting_core
from engine_driver import assert_all_same, complete, lonely_answers, make_core, make_requests, run
from headrace.attention.flash import Dense
from headrace.attention.latent_torch import TorchLatentAttention
from headrace.cache.kv_cache import KVCache
from headrace.config import EngineConfig
from headrace.engine.build import build_engine
from headrace.engine.messages import EngineRequest
from headrace.errors import CheckpointError, ParameterError
from headrace.kernels.latent_rows import latent_rope_write_reference
from headrace.model import latent as latent_model
from headrace.model.checkpoint import Checkpoint, resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.row_elements import row_elements
from headrace.model.shard import sizes_of
from headrace.model.weight import Weight
from headrace.sampling.params import SamplingParams
from model_harness import Sequences
from quantized_checkpoints import FORMATS, write_quantized
from tiny_models import VOCAB, write_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_tiny("deepseek_v3", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, first_k_dense_replace=1))


@pytest.fixture(scope="module")
def make(model):
    return partial(make_core, model)


@pytest.fixture(scope="module")
def alone(make):
    return lonely_answers(make)


SCHEDULES = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "blocks of 1, no prefix cache": {"block_size": 1, "num_kv_blocks": 1024, "enable_prefix_caching": False},
    "tiny pool, chunks of 5": {"num_kv_blocks": 11, "max_num_batched_tokens": 5},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_gives_the_same_tokens(make, alone, schedule):
    core = make(**SCHEDULES[schedule])
    if "tiny pool" in schedule:  # admission learns to expect short outputs, then long ones come
        short = complete(SamplingParams(max_tokens=1))
        run(core, [EngineRequest(f"short {i}", [i], short, i) for i in range(150)])
    assert_all_same(run(core, make_requests(1, 10, VOCAB)), alone(1, 10), schedule)
    assert (core.scheduler.stats.num_preemptions > 0) == ("tiny pool" in schedule)


def test_speculation_and_cached_prompts_change_nothing(model, alone):
    itself = {"speculative_method": "draft_model", "speculative_model": model}
    core = drafting_core(model, overlap=True, **itself)
    assert_all_same(run(core, make_requests(1, 10, VOCAB)), alone(1, 10), "drafts of itself")
    assert core.speculator is not None and core.speculator.stats.num_accepted_tokens > 0
    again = run(core, make_requests(1, 10, VOCAB))
    assert_all_same(again, alone(1, 10), "warm")
    assert sum(result.cached for result in again.values()) > 0


class Expanded(TorchLatentAttention):
    """Leaves the first rows of fresh prompts to keys and values of heads, as a card's backend does with long ones."""

    def begin(self, batch, kv):
        super().begin(batch, kv)
        self.dense, first = [], batch.num_decodes
        for rows, context in zip(batch.query_lens[first:], batch.context_lens[first:], strict=True):
            if rows == context >= 4:
                self.dense.append(Dense(first, 1, rows // 4 * 4))
            first += rows
        self.keeps_own = bool(self.dense)

    def attend(self, q, *given, **options):
        for part in self.dense:
            assert q[part.first_row : part.first_row + part.rows, :, : self.rank].isnan().all(), "nobody needs these"
        return super().attend(q.nan_to_num(0.0), *given, **options)

    def attend_dense(self, part, q, k, v, scale):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(0, 1)


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
def test_keys_and_values_of_heads_say_the_same(family, tmp_path, monkeypatch):
    """Fresh prompts beside decodes and chunks, some rows of one prompt by each way."""

    def keeping(q, queries, row, positions, cos, sin, norm, cache, slots, sizes, keep=False):
        q[:, :, : sizes.rank] = torch.nan
        latent_rope_write_reference(q, queries, row, positions, cos, sin, norm, cache, slots, sizes)
        return cache.flatten(0, 2)[slots] if keep else None

    monkeypatch.setattr(latent_model, "latent_rope_write", keeping)
    path = write_tiny(family, tmp_path / "model", num_hidden_layers=2)
    config = model_config_from_hf(checkpoint_of(path).config)
    weights = load_model(checkpoint_of(path), config, torch.float32, CPU)
    ids = [[3 + i for i in range(count)] for count in (18, 7, 24)]
    work = [[(0, ids[0])], [(0, [5]), (1, ids[1]), (2, ids[2])], [(1, [9] * 3), (0, [8])]]
    logits = []
    for attention in (None, Expanded(config.latent.rank)):
        run = Sequences(config, weights, max_len=64, attention=attention)
        logits.append(torch.cat([rows for step in work for rows in run.step(step)]))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def checkpoint_of(path: Path | str, **options) -> Checkpoint:
    return resolve_checkpoint(EngineConfig(model=str(path), **options))


def test_a_token_costs_one_latent_and_one_key(model):
    """(32 + 16) numbers a layer, whatever the heads; DeepSeek V3's 576 in 61 layers, of 16 bits."""
    config = model_config_from_hf(checkpoint_of(model).config)
    assert KVCache.bytes_per_block(config, 8, torch.float32) == 2 * 8 * (32 + 16) * 4
    cache = KVCache(config, 3, 8, torch.float32, CPU)
    assert sum(t.numel() for t in cache.k + cache.v) == 3 * 2 * 8 * 48


KIMI_K2 = {  # as published, as far as attention goes
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1, "n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "max_position_embeddings": 131072, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def test_published_sizes():
    """576 numbers a token and layer, and as many heads as ranks like; queries and keys are longer by what yarn says."""
    config = model_config_from_hf(KIMI_K2)
    assert KVCache.bytes_per_block(config, 1, torch.bfloat16) == 61 * 576 * 2
    assert {2, 4, 8, 16} <= set(sizes_of(config))
    assert config.attn_scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    latent = config.latent
    assert latent is not None
    attended = config.num_heads * (latent.row + latent.rank + latent.value)  # queries that meet latents, and what attention gives
    expanded = config.num_heads * (latent.row + 3 * latent.query + latent.nope + 3 * latent.value)
    assert row_elements(config) >= 2 * config.hidden_size + max(attended, expanded)


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}])
def test_narrow_caches_are_refused(model, options):
    with pytest.raises(ParameterError, match=r"kv_cache_dtype.*auto"):
        build_engine(EngineConfig(model=model, device="cpu", **options))


def test_layers_that_draft_are_left_out(tmp_path, caplog):
    path = write_tiny("glm4_moe_lite", tmp_path / "model", num_hidden_layers=1, num_nextn_predict_layers=1)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.1.eh_proj.weight": torch.zeros(3, 4)}, path / "model.safetensors")
    config = model_config_from_hf(checkpoint_of(path).config)
    with caplog.at_level(logging.INFO):
        load_model(checkpoint_of(path), config, torch.float32, CPU)
    assert "model.layers.1." in caplog.text
    edited = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (path / "config.json").write_text(json.dumps(edited))
    with pytest.raises(CheckpointError, match="eh_proj"):
        load_model(checkpoint_of(path), config, torch.float32, CPU)


def test_narrow_files_are_narrow_but_for_what_is_absorbed(tmp_path):
    """FP8 in blocks of 128, of which heads and both latents are no multiples."""
    sizes = {"hidden_size": 256, "q_lora_rank": 160, "kv_lora_rank": 96, "qk_nope_head_dim": 40, "v_head_dim": 56}
    path = write_quantized(tmp_path / "model", FORMATS["fp8-block"], "deepseek_v3", **sizes, num_hidden_layers=2).path
    checkpoint = checkpoint_of(path)
    config = model_config_from_hf(checkpoint.config)
    ids = [[3, 5, 8, 13, 21], [34]]

    def logits(narrow: bool) -> torch.Tensor:
        weights = load_model(checkpoint, config, torch.float32, CPU, narrow=narrow)
        layer = weights.layers[1]
        kinds = [layer.qkv.kind, layer.o.kind, layer.more["q_b"].kind, layer.more["kv_b"].kind]
        assert kinds == (["fp8"] * 3 if narrow else ["float"] * 3) + ["float"]
        run = Sequences(config, weights, max_len=16)
        return torch.cat([run.step([(0, part)])[0] for part in ids])

    torch.testing.assert_close(logits(True), logits(False), rtol=1e-5, atol=1e-5)


def test_quantizing_leaves_what_is_absorbed(model):
    weights = load_model(checkpoint_of(model), model_config_from_hf(checkpoint_of(model).config), torch.float32, CPU,
                         quantization="int8", narrow=True)  # fmt: skip
    kept = {name: value.kind for name, value in weights.layers[0].more.items() if isinstance(value, Weight)}
    assert kept == {"q_b": "int8", "kv_b": "float"}


@pytest.mark.parametrize("change, named", [
    ({"attention_bias": True}, "attention_bias"), ({"topk_method": "greedy"}, "topk_method"),
    ({"scoring_func": "softmax"}, "scoring_func"), ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"), ({"kv_lora_rank": None}, "kv_lora_rank"), ({"moe_layer_freq": 2}, "moe_layer_freq"),
])  # fmt: skip
def test_what_is_not_served_is_named(model, change, named):
    with pytest.raises(CheckpointError, match=named):
        model_config_from_hf(checkpoint_of(model).config | change)
