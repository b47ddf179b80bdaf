"""In which numbers the native step keeps a model's weights and its cache, and multiplies: from the options and the file.

No torch: the server asks this before it says that it listens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from headrace.config import EngineConfig
from headrace.errors import ParameterError
from headrace.model.checkpoint import Checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.formats.quantized import quantization_of
from headrace.model.formats.scheme import Scheme
from headrace.model.formats.tensor_file import FLOATS

OTHER = "narrow"  # what safetensors hold for which there is no format
GROUP = 32  # inputs that share a scale in a native format

# What a file may hold and the step multiplies as it is -> the format that holds the same values
STORED: Mapping[str, str] = MappingProxyType({
    **{name: name for name in (*FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")},
    "Q5_0": "Q8_0",  # five bits of eight
    "IQ4_NL": "Q8_0",  # sixteen values of 256
    "Q4_Z": "Q4_Z", "F8": "F8",  # of quantized safetensors
    OTHER: "F16",  # rounded, to 11 bits
})  # fmt: skip
_MADE = {"int8": "Q8_0", "int4": "Q4_1"}  # by --quantization, from floats


@dataclass(frozen=True, slots=True)
class Precision:
    """`weights`: the format that every matrix gets, "stored": as the file has it. `rounding`: what the inputs of products with
    integer weights are rounded to. `cache`: of keys and values."""

    weights: str  # stored, F32, BF16, Q8_0, Q4_1
    rounding: str  # FLOAT, INT16, INT8
    cache: str  # float32, bfloat16, int8

    def format_of(self, encoding: str, of_embedding: bool = False) -> str:
        """The format in which a matrix is kept that a file holds as `encoding`. Embeddings of their own are only looked up, so
        they are never rounded."""
        if self.weights == "stored" or (of_embedding and self.weights in _MADE.values()):
            return STORED.get(encoding, "F32")
        return self.weights


def stored_encodings(checkpoint: Checkpoint) -> frozenset[str]:
    """Of the matrices in the checkpoint's files; of a dummy one the floats that its config names. No tensor is read."""
    if checkpoint.format == "dummy":
        dtype = model_config_from_hf(checkpoint.config).dtype
        return frozenset({{"float32": "F32", "float16": "F16"}.get(dtype, "BF16")})
    encodings = frozenset(entry.encoding.name for entry in checkpoint.tensors().values() if len(entry.shape) > 1)
    if (quantization := quantization_of(checkpoint.config)) is not None:
        return encodings & set(FLOATS) | {encoding_of_scheme(scheme) for scheme in quantization.schemes}
    return encodings


def encoding_of_scheme(scheme: Scheme) -> str:
    """What quantized safetensors hold, by the name of the format that holds the same."""
    if (scheme.tile or (1, 0))[1] % GROUP:
        return OTHER
    match scheme.format:
        case "fp8":
            return "F8"
        case "mxfp4" | "nvfp4":
            return "Q8_0"  # twice e2m1 is an integer
        case "int8" if scheme.bits == 8:
            return OTHER if scheme.zeros else "Q8_0"
    if scheme.bits == 8:  # of GPTQ the zero points say: it always has some
        return OTHER if scheme.zeros and scheme.format != "gptq" else "Q8_0"
    return "Q4_Z" if scheme.zeros else "Q4_0"


def choose_precision(config: EngineConfig, encodings: Collection[str]) -> Precision:
    """What the options ask for, of a file with matrices in `encodings`. Raises ParameterError where that is not possible.

    By default a file runs as it is stored: floats of 32 bits exactly, everything else with keys and values in bfloat16.
    """
    if config.kv_cache_dtype == "fp8":
        others = "auto, float32, bfloat16 or int8 in the native CPU step: fp8 is for GPUs, and for torch (enforce_eager)"
        raise ParameterError("kv_cache_dtype", config.kv_cache_dtype, others)
    quantized = sorted(set(encodings) - set(FLOATS))
    if config.quantization == "fp8":
        allowed = "none, int8, int4 or bf16 on a CPU; fp8 on a GPU, or in plain torch (enforce_eager)"
        raise ParameterError("quantization", config.quantization, allowed)
    if config.quantization in _MADE and quantized:
        held = f"the file is quantized already ({', '.join(quantized)}), and weights are never rounded twice"
        raise ParameterError("quantization", config.quantization, f"none, or nothing for this model: {held}")
    weights = _weights(config, quantized)
    formats = {Precision(weights, "", "").format_of(encoding) for encoding in encodings}
    rounding = "FLOAT" if formats <= {*FLOATS, "F8"} else "INT16"
    if config.activation_dtype != "auto":
        if rounding == "FLOAT":
            kept = "auto: this model's weights are kept as floats, which multiply floats"
            raise ParameterError("activation_dtype", config.activation_dtype, kept)
        rounding = config.activation_dtype.upper()
    exact = config.dtype == "float32" or (config.dtype == "auto" and formats == {"F32"})
    cache = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "float32" if exact else "bfloat16"
    return Precision(weights, rounding, cache)


def _weights(config: EngineConfig, quantized: Collection[str]) -> str:
    if config.quantization in _MADE:
        return _MADE[config.quantization]
    if config.quantization == "bf16" or config.dtype == "bfloat16":
        return "BF16"
    if config.dtype == "float32" or (config.quantization == "none" and quantized):
        return "F32"
    return "stored"


def for_draft(config: EngineConfig, encodings: Collection[str]) -> EngineConfig:
    """The options as far as they concern a draft model: what was asked of the target's weights may not be possible for its own,
    and its drafts need not be exact."""
    quantized = set(encodings) - set(FLOATS)
    quantization = None if quantized else config.quantization
    floats = not quantized and quantization not in _MADE
    return replace(config, quantization=quantization, activation_dtype="auto" if floats else config.activation_dtype)
