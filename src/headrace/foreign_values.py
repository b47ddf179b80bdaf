"""What other servers and libraries (vLLM, SGLang) call values of options: what means the same is taken, else ours is told."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_FLOATS = {**dict.fromkeys(("half", "fp16"), "float16"), **dict.fromkeys(("float", "fp32"), "float32"), "bf16": "bfloat16"}
# option -> their value, in small letters -> ours, which gives the same
SYNONYMS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "dtype": _FLOATS,
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "fp32": "float32", "bf16": "bfloat16"},
    "quantization": {
        "auto_awq": "awq", "auto_gptq": "gptq", "compressed_tensors": "compressed-tensors", "gpt_oss_mxfp4": "mxfp4",
    },
    "load_format": {"mistral": "auto", **dict.fromkeys(("fastsafetensors", "runai_streamer", "instanttensor"), "safetensors")},
    "attention_backend": {"triton_attn": "triton"},
    "tool_parser": {"qwen3_xml": "qwen3_coder", "glm47": "glm45"}, "reasoning_parser": {"gptoss": "openai_gptoss"},
})  # fmt: skip
# what is another thing there -> what is nearest here
_NEAREST: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "kv_cache_dtype": dict.fromkeys(("fp8_e5m2", "fp8_inc", "fp8_ds_mla"), "fp8"),
    "quantization": {
        **dict.fromkeys(("fp8_e5m2", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "ptpc_fp8", "w8a8_fp8"), "fp8"),
        **dict.fromkeys(("w8a8_int8", "experts_int8", "int8_per_channel_weight_only"), "int8"), "marlin": "gptq",
        "bitsandbytes": "int4, of a checkpoint of floats", "none": "without the option; none decodes a quantized file",
    },
    "load_format": {"bitsandbytes": "auto, with --quantization int4 of a checkpoint of floats"},
    "attention_backend": dict.fromkeys((
        "flash_attn", "flash_attn_mla", "flashinfer", "flashinfer_mla", "flashmla", "cutlass_mla", "triton_mla",
        "flex_attention", "xformers", "torch_sdpa",
    ), "auto"),
})  # fmt: skip


def ours_of_value(option: str, value: str) -> str:
    """Of a value in whatever case, and of a synonym of one, the value; what is neither in small letters."""
    value = value if value == "None" else value.lower()  # which is Python's: vLLM takes it for an option that is not given
    return SYNONYMS.get(option, {}).get(value, value)


def instead_of_value(option: str, value: Any) -> str:
    """What to give instead of `value`, where others know it; else nothing."""
    advice = _NEAREST.get(option, {}).get(value.lower()) if isinstance(value, str) else None
    return f" (here: {advice})" if advice else ""


def synonyms_in_words(option: str) -> str:
    """As help has them; nothing where there are none."""
    named: dict[str, list[str]] = {}
    for theirs, ours in SYNONYMS.get(option, {}).items():
        named.setdefault(ours, []).append(theirs)
    return ", ".join(f"{' and '.join(theirs)} for {ours}" for ours, theirs in named.items())
