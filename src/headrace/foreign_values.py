"""What other servers and libraries (vLLM, SGLang) call values of options: who gives one of theirs is told ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_OPTIONS = ("dtype", "kv_cache_dtype", "quantization")
_VALUES: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(("half", "fp16"), "float16"), **dict.fromkeys(("float", "fp32"), "float32"), "bf16": "bfloat16",
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"), "fp8"),
    **dict.fromkeys(("ptpc_fp8", "w8a8_fp8"), "fp8"), **dict.fromkeys(("w8a8_int8", "experts_int8"), "int8"),
    "int8_per_channel_weight_only": "int8", "bitsandbytes": "int4, of a checkpoint of floats", "auto_awq": "awq",
    **dict.fromkeys(("auto_gptq", "marlin"), "gptq"), "compressed_tensors": "compressed-tensors", "gpt_oss_mxfp4": "mxfp4",
})  # fmt: skip


def instead_of_value(option: str, value: Any) -> str:
    """What to give instead of `value`, where others know it; else nothing."""
    advice = _VALUES.get(value.lower()) if option in _OPTIONS and isinstance(value, str) else None
    return f" (here: {advice})" if advice else ""
