"""What other servers and libraries (vLLM, SGLang) call values of options: who gives one of theirs is told ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_OPTIONS = ("dtype", "kv_cache_dtype", "quantization")
_QUANTIZED = (
    "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed", "mxfp4",
    "gguf", "fbgemm_fp8", "auto-round", "moe_wna16",
)  # fmt: skip
_VALUES: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(("half", "fp16"), "float16"), **dict.fromkeys(("float", "fp32"), "float32"), "bf16": "bfloat16",
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"), "fp8"),
    "int8_per_channel_weight_only": "int8", "bitsandbytes": "int4, of a checkpoint of floats",
    **dict.fromkeys(_QUANTIZED, "a quantized checkpoint needs no option"),
})  # fmt: skip


def instead_of_value(option: str, value: Any) -> str:
    """What to give instead of `value`, where others know it; else nothing."""
    advice = _VALUES.get(value.lower()) if option in _OPTIONS and isinstance(value, str) else None
    return f" (here: {advice})" if advice else ""
