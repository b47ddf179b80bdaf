"""Writes LoRA adapters as PEFT saves them, and checkpoints with their products merged in: a reference of its own kind."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    path: Path, base: str | Path, *, r: int = 4, alpha: float = 8.0, targets: tuple[str, ...] = ALL, seed: int = 0,
    layers: tuple[int, ...] | None = None, size: float = 0.5, experts: bool = False, **config: Any,
) -> str:  # fmt: skip
    """Of random numbers, large enough to change what a tiny model says; `rank_pattern` and the rest of `config` as in PEFT.
    `experts`: also of each that tokens choose, by itself."""
    path.mkdir(parents=True, exist_ok=True)
    whole = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none",
        "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
        "init_lora_weights": True, "layers_to_transform": layers, "inference_mode": True, **config,
    }  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(Path(base) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if ".experts" in module and not experts:
            continue
        if module.rpartition(".")[2] in targets and (layers is None or int(module.split(".")[2]) in layers):
            rank = _of(whole["rank_pattern"], module, r)
            a = torch.randn(rank, weight.shape[1], generator=generator) / math.sqrt(weight.shape[1])
            b = torch.randn(weight.shape[0], rank, generator=generator) * size / math.sqrt(rank)
            tensors[f"base_model.model.{module}.lora_A.weight"], tensors[f"base_model.model.{module}.lora_B.weight"] = a, b
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(whole))
    return str(path)


def merged(path: Path, base: str | Path, adapter: str | Path) -> str:
    """The checkpoint `base` with W + scale * B A."""
    shutil.copytree(base, path)
    config, weights = json.loads((Path(adapter) / "adapter_config.json").read_text()), load_file(path / "model.safetensors")
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    for name in [name for name in tensors if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[name].double(), tensors[name.replace("lora_A", "lora_B")].double()
        alpha, rank = _of(config["alpha_pattern"], module, config["lora_alpha"]), len(a)
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + scale * b @ a).float()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def _of(pattern: dict[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in pattern.items() if f".{module}".endswith(f".{key}")), default)
