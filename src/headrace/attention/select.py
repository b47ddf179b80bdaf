"""Which attention backend runs a model on a device, and why."""

from __future__ import annotations

import torch

from headrace.cache import fp8
from headrace.errors import ParameterError
from headrace.kernels.launch import capability
from headrace.model.attention import AttentionBackend
from headrace.model.config import ModelConfig
from headrace.model.latent_config import refuse_narrow_cache


def choose_cache_dtype(wanted: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of keys and values where torch and our kernels compute in `dtype`. Raises ParameterError for a card without FP8."""
    if wanted != "fp8":
        return dtype
    if device.type == "cuda" and capability(device) < (8, 9):
        raise ParameterError("kv_cache_dtype", wanted, "auto on this GPU: FP8 needs compute capability 8.9")
    return fp8.DTYPE


def select_attention(
    name: str, model: ModelConfig, device: torch.device, cache_dtype: torch.dtype | None = None
) -> tuple[AttentionBackend, str]:
    """The backend that `name` asks for ("auto": the fastest one here by the measurements) and a sentence for the log.

    Raises ParameterError for a backend that cannot run this model on this device.
    """
    refuse_narrow_cache(model.latent, "fp8" if cache_dtype == fp8.DTYPE else "auto")
    if device.type != "cuda":
        if name not in ("auto", "torch"):
            raise ParameterError("attention_backend", name, f"auto or torch on {device.type}")
        if model.latent is not None:
            from headrace.attention.latent_torch import TorchLatentAttention

            return TorchLatentAttention(model.latent.rank), "torch, the exact reference, over latents"
        from headrace.attention.torch_backend import TorchAttention

        return TorchAttention(), "torch, the exact reference"
    return _select_cuda(name, model, device, cache_dtype == fp8.DTYPE)


def _select_cuda(name: str, model: ModelConfig, device: torch.device, narrow: bool) -> tuple[AttentionBackend, str]:
    if name == "torch":  # its plan is made of numbers that the host must know: steps could be neither captured nor overlapped
        raise ParameterError("attention_backend", name, "auto, triton, cudnn or fa3 on a GPU: torch runs on a CPU only")
    if model.delta is not None and not model.delta.on_cards:
        sizes = f"{model.delta.key_dim} and {model.delta.value_dim}"
        raise ParameterError("device", device.type, f"cpu: no GPU kernel takes delta heads of {sizes} dimensions")
    if model.latent is not None:
        if name not in ("auto", "triton"):
            raise ParameterError("attention_backend", name, "auto or triton for a model with latent attention")
        from headrace.attention.latent_triton import TritonLatentAttention, expands

        if name == "auto" and expands(model, device):
            return TritonLatentAttention(model, device, True), "Triton over latents; cuDNN for long fresh prompts"
        return TritonLatentAttention(model, device), "Triton over latents for everything"
    if model.head_dim > 512:
        raise ParameterError("device", device.type, f"cpu: no GPU kernel takes a head_dim of {model.head_dim}")
    from headrace.attention.triton_backend import TritonAttention

    if narrow and model.per_layer is not None:
        raise ParameterError("kv_cache_dtype", "fp8", "auto: this model's layers have heads of different sizes")
    refusal = "they do not read keys and values in FP8" if narrow else _refusal(model, device)
    if refusal and name not in ("auto", "triton"):
        raise ParameterError("attention_backend", name, f"auto or triton here: {refusal}")
    if narrow:
        from headrace.attention.widened import WidenedAttention

        return WidenedAttention(model, device), f"Triton for everything: {refusal}"
    if name == "triton":
        return TritonAttention(model, device), "Triton, as asked for"
    if refusal:
        return TritonAttention(model, device), f"Triton for everything: {refusal}"
    from headrace.attention.flash import CudnnAttention, FlashAttention3, find_flash_attention_3

    if name != "cudnn":
        forward, source = find_flash_attention_3()
        if forward is not None:
            why = f"FlashAttention-3 ({source}) for prefill, fastest there; Triton for decode, fastest there"
            return FlashAttention3(model, device, forward), why
        if name == "fa3":
            raise ParameterError("attention_backend", name, f"auto, cudnn or triton here: FlashAttention-3 is {source}")
        # cuDNN builds a plan for each new shape of prompts, for which all that run would wait
        return TritonAttention(model, device), f"Triton for everything: FlashAttention-3 is {source}"
    missing = "" if torch.backends.cudnn.is_available() else "this torch has no cuDNN"
    if model.head_dim > 128 and model.windows:
        missing = f"cuDNN is not used at head_dim {model.head_dim} beside windows"
    if missing:
        raise ParameterError("attention_backend", name, f"auto or triton here: {missing}")
    return CudnnAttention(model, device), "cuDNN for long fresh prompts, Triton for decode and all other prefill, as asked for"


def _refusal(model: ModelConfig, device: torch.device) -> str:
    """Why neither FlashAttention-3 nor cuDNN should serve this model here; empty if they may."""
    major, minor = capability(device)
    if major != 9:
        return f"the others were measured on sm_90 only, this is sm_{major}{minor}"
    if model.head_dim not in (64, 128, 256):
        return f"the others are built for head_dim 64, 128 and 256, not {model.head_dim}"
    if model.per_layer is not None:
        return "the model's layers are of different sizes"
    if model.sinks:
        return "the model has attention sinks"
    if model.attn_softcap:
        return "the model caps its attention scores"
    if model.windows and all(model.windows):
        return "every layer has a window"
    return ""
