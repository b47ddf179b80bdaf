"""What a checkpoint's quantization_config says: which of its matrices are quantized, and how. No torch, nothing is read.

Every method becomes the same: groups of modules, each with a Scheme, and a list of those that are left alone. What a Scheme's
tensors are called and how they become a Weight is in quantized_*.py, one file for each `format`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.formats.quantized_fields import INSTEAD, Fields
from headrace.model.formats.quantized_tools import auto_round, quark, torchao
from headrace.model.formats.safetensors_file import read_json
from headrace.model.formats.scheme import Modules, Quantization, Scheme, by_scheme

_BESIDE = (  # where older tools wrote what config.json does not say, what is in it for sure, and of which method it then is
    ("quantize_config.json", "bits", "gptq"), ("quant_config.json", "w_bit", "awq"),
    ("hf_quant_config.json", "quant_algo", "modelopt"),
)  # fmt: skip
_REFUSED: Mapping[str, str] = MappingProxyType({
    "bitsandbytes": "bitsandbytes weights are slow everywhere and made for training",
    "mxfp4": "mxfp4 is of gpt-oss's experts only, and this model has none",
    "mlx": "MLX's layout is that of Apple's machines",
})  # fmt: skip
_KNOWN: Mapping[str, str] = MappingProxyType({  # of others, in a word
    **dict.fromkeys(("exl2", "exl3"), "ExLlama's own layout"), "bitnet": "ternary weights", "fp_quant": "rotated weights",
    **dict.fromkeys(("aqlm", "vptq", "quip", "higgs"), "entries of codebooks"),
})  # fmt: skip
_ROTATIONS = ("rotation", "hadamard", "spinquant")  # AutoRound's


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Of a parsed `config.json`; None: its weights are floats. Raises CheckpointError for what is not supported, and why."""
    given, mlx = config.get("quantization_config") or config.get("compression_config"), config.get("quantization")
    if not given and isinstance(mlx, dict) and "bits" in mlx:
        given = mlx
    if not given:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: quantization_config is {given!r}, wanted an object")
    if isinstance(inner := given.get("quantization"), dict):  # of ModelOpt's older files
        given = {**given, **inner}
    method = given.get("quant_method") or given.get("method") or ("modelopt" if "quant_algo" in given else None)
    method = method or ("mlx" if {"bits", "group_size"} <= given.keys() else None)
    method = method.lower().replace("_tensors", "-tensors") if isinstance(method, str) else method
    parse = _METHODS.get(method) if isinstance(method, str) else None
    if method == "mxfp4" and not (config.get("num_local_experts") or config.get("num_experts")):
        parse = None
    if parse is None:
        known = f" ({_KNOWN[method]})" if isinstance(method, str) and method in _KNOWN else ""
        reason = _REFUSED.get(str(method), f"quantization_config has the method {method!r}{known}")
        raise CheckpointError(f"config.json: {reason}, which is not supported: {INSTEAD}")
    if config.get("model_type") == "gpt_oss" and method != "mxfp4":
        told = f"quantization_config has the method {method!r}, and gpt-oss is read in mxfp4 alone"
        raise CheckpointError(f"config.json: {told}: {INSTEAD}")
    fields = Fields(given, str(method))
    for name in given:
        if given[name] and any(word in str(name).lower() for word in _ROTATIONS):
            fields.refuse(name, "none: rotations of activations are not computed")
    return parse(fields)


def quantization_beside(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the quantization_config that a file beside a checkpoint's config.json holds."""
    if "quantization_config" in config or "compression_config" in config:
        return dict(config)
    for name, key, method in _BESIDE:
        if (path / name).exists():
            found = read_json(path / name)
            inner = found.get("quantization", found)
            if isinstance(inner, dict) and inner.get(key) is not None:
                return {**config, "quantization_config": {"quant_method": method, **inner}}
    return dict(config)


def _everywhere(fields: Fields, scheme: Scheme, ignored: str) -> Quantization:
    return Quantization(fields.where, (), scheme, Modules(fields.names(ignored)))


def _fp8(fields: Fields) -> Quantization:
    """Of Transformers, in blocks or of whole tensors; AutoFP8's and FBGEMM's; SGLang's, of int8, too. Static scales of
    activations are not used."""
    fields.one_of("fmt", "e4m3", "e4m3", "float8_e4m3fn")
    fields.one_of("activation_scheme", "dynamic", "dynamic", "static")
    block = fields.given.get("weight_block_size")
    usual = (1, 32) if fields.where == "mxfp8" else None
    tile = usual if block is None else fields.block("weight_block_size")
    lists = [name for name in ("modules_to_not_convert", "ignored_layers") if fields.given.get(name)]
    return _everywhere(fields, Scheme("int8" if "int8" in fields.where else "fp8", tile=tile), (lists or ["ignored_layers"])[0])


def _awq(fields: Fields) -> Quantization:
    version = next((name for name in ("version", "format", "checkpoint_format") if name in fields.given), "version")
    fields.one_of(version, "gemm", "gemm")
    bits = "w_bit" if "w_bit" in fields.given else "bits"
    fields.one_of(bits, None, 4)
    zeros = fields.one_of("zero_point", True, True, False)  # AutoAWQ's files have them either way, and unsigned numbers
    signed = fields.one_of("pack_method", None, None, "reorder") is not None and not zeros  # Quark's
    group = fields.count("q_group_size" if "q_group_size" in fields.given else "group_size")
    return _everywhere(fields, Scheme("awq", 4, (1, group), zeros=not signed, signed=signed), "modules_to_not_convert")


def _gptq(fields: Fields) -> Quantization:
    """With `desc_act` the order of columns is in the file: whether it is the usual one is seen when it is read."""
    layout = next((name for name in ("checkpoint_format", "format") if fields.given.get(name)), "checkpoint_format")
    version = fields.one_of(layout, "gptq", "gptq", "gptq_v2")
    fields.one_of("is_marlin_format", False, False)
    fields.one_of("pack_dtype", "int32", "int32")
    bits, group = fields.one_of("bits", None, 4, 8), fields.count("group_size")
    scheme = Scheme("gptq", bits, (1, group), zeros=True, zero_offset=1 if version == "gptq" else 0)
    if fields.given.get("dynamic"):  # other bits and groups here and there: by the shapes in the file
        scheme = replace(scheme, bits=0)
    return _everywhere(fields, scheme, "modules_to_not_convert")


def _mxfp4(fields: Fields) -> Quantization:
    """Of gpt-oss, whose experts' names tell them (see gpt_oss_experts.py)."""
    return _everywhere(fields, Scheme("mxfp4", 4, (1, 32)), "modules_to_not_convert")


def _modelopt(fields: Fields) -> Quantization:
    """One kind everywhere, or layers of several kinds, each named; of the latter some may be of no use here (drafting, vision),
    so that what is not supported is refused when it is read."""
    ignored, layers = "ignore" if "ignore" in fields.given else "exclude_modules", "quantized_layers"
    if fields.one_of("quant_algo", None, *_MODELOPT, "mixed_precision") != "mixed_precision":
        return _everywhere(fields, _modelopt_scheme(fields), ignored)
    named = ((name, _modelopt_scheme(fields.inside(layers).inside(name))) for name in fields.keys(layers))
    return Quantization(fields.where, by_scheme(named), None, Modules(fields.names(ignored)))


def _modelopt_scheme(fields: Fields) -> Scheme:
    kind = str(fields.given.get("quant_algo"))
    scheme = _MODELOPT.get(kind.lower(), Scheme(kind.upper()))
    grouped = scheme.format == "nvfp4" and fields.given.get("group_size") is not None
    return replace(scheme, tile=(1, fields.count("group_size"))) if grouped else scheme


_MODELOPT: Mapping[str, Scheme] = MappingProxyType({
    "fp8": Scheme("fp8", tile=(0, 0)), "fp8_per_channel_per_token": Scheme("fp8", tile=(1, 0)),
    "fp8_pb_wo": Scheme("fp8", tile=(128, 128)), "mxfp8": Scheme("fp8", tile=(1, 32)),
    "nvfp4": Scheme("nvfp4", 4, (1, 16)), "w4a16_nvfp4": Scheme("nvfp4", 4, (1, 16)),
    "w4a8_nvfp4_fp8": Scheme("nvfp4", 4, (1, 32)), "mxfp4": Scheme("mxfp4", 4, (1, 32)),
    "w4a8_mxfp4_fp8": Scheme("mxfp4", 4, (1, 32)), "w8a16": Scheme("int8", tile=(1, 0)),
})  # fmt: skip


def _compressed_tensors(fields: Fields) -> Quantization:
    sparse = fields.given.get("sparsity_config")
    if sparse and (not isinstance(sparse, dict) or sparse.get("format") not in (None, "dense")):
        fields.refuse("sparsity_config", "none")
    _check_transforms(fields)
    groups, rest = [], None
    for name in fields.inside("config_groups").given:
        group = fields.inside("config_groups").inside(name)
        if group.given.get("weights") is not None:  # else it is about attention and its cache
            scheme = _compressed_scheme(group, group.given.get("format") or fields.given.get("format"))
            groups.append((Modules(targets := group.names("targets")), scheme))
            rest = scheme if rest is None and "Linear" in targets else rest
    return Quantization(fields.where, tuple(groups), rest, Modules(fields.names("ignore")))


def _check_transforms(fields: Fields) -> None:
    """Rotations that are in the weights cancel each other (SpinQuant's R1 and R2); those of activations are not computed."""
    if not fields.given.get("transform_config") or not fields.inside("transform_config").given.get("config_groups"):
        return
    groups = fields.inside("transform_config").inside("config_groups")
    for applied in (groups.inside(name).given.get("apply") for name in groups.given):
        each = applied if isinstance(applied, list) else [None]
        if not all(isinstance(one, dict) and one.get("location") in ("weight_input", "weight_output") for one in each):
            fields.refuse("transform_config", "none, or rotations of weights alone")


def _compressed_scheme(group: Fields, format_: Any) -> Scheme:
    weights = group.inside("weights")
    found = Fields({**weights.given, "format": format_}, weights.where)
    allowed = _FORMATS.get(format_) if isinstance(format_, str) else None
    if allowed is None:
        found.refuse("format", " or ".join(_FORMATS))
    name, bits = allowed[found.one_of("type", "int", *allowed)]
    found.one_of("actorder", None, None, "weight", "static", False)  # the others shuffle columns between groups
    zeros = not found.one_of("symmetric", True, True, False)
    return Scheme(name, found.one_of("num_bits", None, *bits), _tile(found, name), zeros)


# Format -> by the type of its numbers, what it is to us, and its bits. Integers of 4 bits may be kept in bytes
_FORMATS: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]] = MappingProxyType({
    "float-quantized": {"float": ("fp8", (8,))}, "int-quantized": {"int": ("int8", (4, 8))},
    "naive-quantized": {"float": ("fp8", (8,)), "int": ("int8", (4, 8))}, "pack-quantized": {"int": ("packed", (4, 8))},
    "nvfp4-pack-quantized": {"float": ("nvfp4", (4,))}, "mxfp4-pack-quantized": {"float": ("mxfp4", (4,))},
    "mxfp8-quantized": {"float": ("fp8", (8,))},
})  # fmt: skip


def _tile(weights: Fields, name: str) -> tuple[int, int]:
    grouped = weights.given.get("group_size") not in (None, -1)
    fp4 = name in ("nvfp4", "mxfp4")
    default = "block" if weights.given.get("block_structure") else "group" if grouped or fp4 else "tensor"
    rows = () if fp4 else ("tensor", "channel") if name == "packed" else ("tensor", "channel", "block")
    match weights.one_of("strategy", default, *rows, "group", "tensor_group"):
        case "tensor":
            return 0, 0
        case "channel":
            return 1, 0
        case "block":
            return weights.block("block_structure")
    return 1, {"nvfp4": 16, "mxfp4": 32}[name] if not grouped and fp4 else weights.count("group_size")


_METHODS: Mapping[str, Callable[[Fields], Quantization]] = MappingProxyType({
    **dict.fromkeys(("fp8", "fbgemm_fp8", "mxfp8", "w8a8_fp8", "w8a8_int8", "blockwise_int8"), _fp8),
    "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq, "auto-round": auto_round, "modelopt": _modelopt,
    "modelopt_fp4": _modelopt, "mxfp4": _mxfp4, "quark": quark, "torchao": torchao,
})  # fmt: skip
