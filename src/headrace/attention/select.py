"""Which attention backend runs a model on a device, and why."""

from __future__ import annotations

import torch

from headrace.attention import AttentionBackend
from headrace.errors import ParameterError
from headrace.model.config import ModelConfig


def select_attention(name: str, model: ModelConfig, device: torch.device) -> tuple[AttentionBackend, str]:
    """The backend that `name` asks for ("auto": the best one here) and a sentence for the log."""
    if name not in ("auto", "torch"):
        raise ParameterError("attention_backend", name, "auto or torch")
    from headrace.attention.torch_backend import TorchAttention

    return TorchAttention(), "torch, the exact reference"
