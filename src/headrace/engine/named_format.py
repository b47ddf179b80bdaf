"""A `quantization` that names what the file is already, as command lines for other servers have it: it asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from headrace.config import EngineConfig
from headrace.errors import ParameterError
from headrace.model.checkpoint import MADE, Checkpoint
from headrace.model.formats.quantized import quantization_of

# Values that only name a file -> what it goes by then: one of these (see _names)
FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    **dict.fromkeys(("awq", "awq_marlin"), ("awq",)), **dict.fromkeys(("gptq", "gptq_marlin"), ("gptq",)),
    "moe_wna16": ("awq", "gptq"), **dict.fromkeys(("auto-round", "inc"), ("auto-round",)),
    **{name: (name,) for name in ("compressed-tensors", "modelopt", "modelopt_fp8", "modelopt_mxfp8", "fbgemm_fp8", "mxfp4")},
    **{name: (name,) for name in ("quark", "torchao", "gguf")},
    "modelopt_fp4": ("modelopt_nvfp4",), "modelopt_mixed": ("modelopt",),
})  # fmt: skip


def without_named_format(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """`config` without a `quantization` that says what the checkpoint is. Raises ParameterError for a format that it is not in.

    Dummy weights are floats, which fp8, int8 and int4 work on, whatever the file is in whose place they are.
    """
    value = config.quantization
    if value is None or (value not in FORMATS and (value not in MADE or checkpoint.format == "dummy")):
        return config
    names = _names(checkpoint)
    if not set(names).isdisjoint(FORMATS.get(value, (value,))):
        return replace(config, quantization=None)
    if value in MADE:
        return config  # what becomes of floats; where there are none it is refused (options.py)
    allowed = "none" if names else ", ".join(MADE) + " (on a CPU int8, int4)"
    numbers = f" ({names[1]})" if names[1:] and names[1] != names[0] else ""
    this = f"is in {names[0]}{numbers}, which needs no option" if names else "holds floats"
    why = f"{value} names a format of files, and this file {this}"
    raise ParameterError("quantization", value, f"{allowed}, or nothing for this model: {why}")


def _names(checkpoint: Checkpoint) -> list[str]:
    """What a quantized file goes by: its method, and where all of it is alike, the kind of its numbers and its layout."""
    if checkpoint.gguf is not None:
        return ["gguf"]
    quantization = quantization_of(checkpoint.config)
    if quantization is None or not quantization.schemes:
        return []
    method, schemes = quantization.method.replace("modelopt_fp4", "modelopt"), quantization.schemes
    layouts = {"mxfp8" if (scheme.format, scheme.tile) == ("fp8", (1, 32)) else scheme.format for scheme in schemes}
    numbers = {scheme.format if "fp" in scheme.format else f"int{scheme.bits}" for scheme in schemes}
    of_all = [*layouts, *(f"{method}_{name}" for name in layouts)] if len(layouts) == 1 else []
    return [method, *(numbers if len(numbers) == 1 else ()), *of_all]
