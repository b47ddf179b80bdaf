"""Checkpoints of models that see images, as Transformers writes them: their text part runs alone, and the log says so."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.errors import CheckpointError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.formats.quantized import quantization_of
from headrace.model.loader import load_model
from headrace.model.text_part import text_config
from test_model_families import tokens
from tiny_models import VOCAB, write_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_OWN: dict[str, dict[str, Any]] = {"Gemma4": {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
}}  # fmt: skip
WRAPPED = {
    "Mistral3": ("ministral3", "pixtral", {}),
    "Llava": ("mistral", "clip_vision_model", {}),
    "Gemma3": ("gemma3_text", "siglip_vision_model", {"mm_tokens_per_image": 4}),
    "Gemma4": ("gemma4_text", "gemma4_vision", {}),
}


@pytest.fixture(scope="module", params=WRAPPED)
def wrapped(request, tmp_path_factory):
    """(the checkpoint's directory, Transformers' model)"""
    import transformers

    text, vision, more = WRAPPED[request.param]
    parts = {"text_config": {"model_type": text, **_TEXT, **_OWN.get(request.param, {})}, "vision_config": {"model_type": vision, **_VISION}}
    config = getattr(transformers, f"{request.param}Config")(**parts, image_token_index=5, **more)
    torch.manual_seed(3)
    model = getattr(transformers, f"{request.param}ForConditionalGeneration")(config).float().eval()
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path, model


def _published(path: Path, to: Path) -> Path:
    """The same with the names of Transformers 5 in the place of those of Transformers 4, or the other way round."""
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    names |= {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."}
    names |= {"embed_vision.": "model.embed_vision."}
    tensors = load_file(path / "model.safetensors")
    if not any(name.startswith("language_model.") for name in tensors):
        names = {theirs: ours for ours, theirs in names.items()}
    found = {}
    for name, tensor in tensors.items():
        prefix = next(prefix for prefix in names if name.startswith(prefix))
        found[names[prefix] + name.removeprefix(prefix)] = tensor
    to.mkdir()
    save_file(found, to / "model.safetensors")
    for file in path.glob("*.json"):
        (to / file.name).write_text(file.read_text())
    return to


def test_the_text_part_says_what_transformers_says(wrapped, tmp_path, caplog):
    path, model = wrapped
    prompt = [id for id in tokens(25) if id != 5]
    with torch.no_grad():
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "headrace.engine.build"), LLM(str(path), device="cpu", num_kv_blocks=20) as llm:
        (out,) = llm.generate([prompt], params, use_tqdm=False)
    assert list(out.outputs[0].token_ids) == wanted[0, len(prompt) :].tolist()
    assert "images are not served" in caplog.text
    one, other = (resolve_checkpoint(EngineConfig(model=str(p))) for p in (path, _published(path, tmp_path / "other")))
    assert one.config == other.config
    assert one.tensors().keys() == other.tensors().keys()


def test_keys_of_layers_that_read_those_of_others_are_left_in_the_file(wrapped, tmp_path):
    path, _ = wrapped
    if path.name.startswith("Gemma4"):  # published files have them
        odd = _published(path, tmp_path / "odd")
        unread = {f"language_model.model.layers.3.self_attn.{name}.weight": torch.ones(2) for name in ("k_proj", "v_proj", "k_norm")}
        save_file({**load_file(odd / "model.safetensors"), **unread}, odd / "model.safetensors")
        checkpoint = resolve_checkpoint(EngineConfig(model=str(odd)))
        config = model_config_from_hf(checkpoint.config)
        weights = load_model(checkpoint, config, torch.float32, torch.device("cpu"))
        assert weights.layers[3].qkv.data.shape[0] == config.at(3).q_size and weights.layers[3].k_norm is None


def test_what_is_not_vision_and_not_known_is_still_refused(wrapped, tmp_path):
    path, _ = wrapped
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    odd = _published(path, tmp_path / "odd")
    save_file({**load_file(odd / "model.safetensors"), "audio_tower.x": torch.ones(2)}, odd / "model.safetensors")
    odd_one = replace(checkpoint, path=odd)
    with pytest.raises(CheckpointError, match=r"audio_tower\.x.* is unexpected"):
        load_model(odd_one, model_config_from_hf(odd_one.config), torch.float32, torch.device("cpu"))


def test_the_config_of_all_goes_for_its_text_part():
    gemma = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16", "eos_token_id": [1, 106],
        "text_config": gemma | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["model.language_model.layers.3.mlp.down_proj", "lm_head"]},
    }  # fmt: skip
    model = model_config_from_hf(config)
    assert (model.vocab_size, model.num_heads, model.num_kv_heads, model.head_dim) == (262_208, 8, 4, 256)
    assert (model.dtype, model.eos_token_ids, model.max_position) == ("bfloat16", (1, 106), 131_072)
    quantization = quantization_of(text_config(config))
    assert quantization is not None and quantization.ignores("model.layers.3.mlp.down_proj")
    assert not quantization.ignores("model.layers.2.mlp.down_proj")


@pytest.mark.parametrize(("architecture", "text", "message"), [
    ("Mistral3ForConditionalGeneration", None, "text_config is None"),
    ("Mistral3ForConditionalGeneration", {"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    ("PaliGemmaForConditionalGeneration", {"model_type": "gemma"}, "PaliGemmaForConditionalGeneration is not supported"),
])  # fmt: skip
def test_another_is_refused_by_name(architecture, text, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": text}))
    with pytest.raises(CheckpointError, match=message):
        model_config_from_hf(resolve_checkpoint(EngineConfig(model=str(tmp_path))).config)
