"""Published files of Qwen3.5: wrapped names, all experts in two tensors, what is ignored; they hold what plain ones do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import EngineConfig
from headrace.errors import CheckpointError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.weight import Weight
from tiny_models import write_tiny


def load(path: Path) -> DecoderWeights:
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    return load_model(checkpoint, model_config_from_hf(checkpoint.config), torch.float32, torch.device("cpu"))


def wrap(path: Path) -> None:
    """As it is published: the text part of a model that sees images."""
    tensors, wrapped = load_file(path / "model.safetensors"), {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        if ".mlp.experts." in name:
            prefix, _, rest = name.partition(".mlp.experts.")
            kind = "down_proj" if "down" in rest else "gate_up_proj"
            experts.setdefault(f"{prefix}.mlp.experts.{kind}", []).append((rest, tensor))
        else:
            wrapped[name] = tensor
    for name, parts in experts.items():
        parts.sort(key=lambda part: (int(part[0].split(".")[0]), "up" in part[0]))
        rows = [tensor for _, tensor in parts]
        each = 2 if "gate_up" in name else 1
        wrapped[name] = torch.stack([torch.cat(rows[i : i + each]) for i in range(0, len(rows), each)])
    wrapped |= {"mtp.fc.weight": torch.zeros(3, 3), "model.visual.pos_embed.weight": torch.zeros(2, 2)}
    save_file(wrapped, path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    name = text.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    config = {"architectures": [name], "model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_wrapped_file_holds_what_a_plain_one_does(family: str, tmp_path: Path) -> None:
    path = write_tiny(family, tmp_path)
    plain = load(path)
    wrap(path)
    wrapped = load(path)
    assert torch.equal(plain.embedding, wrapped.embedding) and torch.equal(plain.lm_head.data, wrapped.lm_head.data)
    for one, other in zip(plain.layers, wrapped.layers, strict=True):
        assert one.more.keys() == other.more.keys()
        for a, b in [(one.qkv, other.qkv), (one.o, other.o), *((one.more[name], other.more[name]) for name in one.more)]:
            assert torch.equal(a.data if isinstance(a, Weight) else a, b.data if isinstance(b, Weight) else b)


def test_quantizing_leaves_the_gates_alone(tmp_path: Path) -> None:
    checkpoint = resolve_checkpoint(EngineConfig(model=str(write_tiny("qwen3_next", tmp_path))))
    config = model_config_from_hf(checkpoint.config)
    weights = load_model(checkpoint, config, torch.float32, torch.device("cpu"), quantization="int8", narrow=True)
    for layer in (layer for layer in weights.layers if layer.more.get("delta_conv") is not None):
        assert (layer.qkv.kind, layer.o.kind, layer.more["delta_gates"].kind) == ("int8", "int8", "float")
        assert all(layer.more[name].dtype == torch.float32 for name in ("delta_conv", "delta_decay", "delta_bias", "delta_norm"))


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    path = write_tiny("qwen3_5", tmp_path)
    config = json.loads((path / "config.json").read_text())
    for change, message in (
        ({"linear_num_value_heads": 5}, "5 linear_num_value_heads are no multiple of 2"), ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["linear_attention"] * 2}, "wanted 3 times"), ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["linear_attention"] * 3}, "no layer with attention"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            model_config_from_hf(config | change)
