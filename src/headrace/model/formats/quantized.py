"""What a checkpoint's quantization_config says: which of its matrices are quantized, and how. No torch, nothing is read.

Every method becomes the same: groups of modules, each with a Scheme, and a list of those that are left alone. What a Scheme's
tensors are called and how they become a Weight is in quantized_*.py, one file for each `format`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from headrace.errors import CheckpointError
from headrace.model.formats.safetensors_file import read_json

_INSTEAD = "use the unquantized checkpoint with --quantization int4, int8 or fp8, or one of FP8, AWQ, GPTQ, compressed-tensors"
_BESIDE = (  # where older tools wrote what config.json does not say, what is in it for sure, and of which method it then is
    ("quantize_config.json", "bits", "gptq"), ("quant_config.json", "w_bit", "awq"),
    ("hf_quant_config.json", "quant_algo", "modelopt"),
)  # fmt: skip
_REFUSED: Mapping[str, str] = MappingProxyType({
    "bitsandbytes": "bitsandbytes weights are slow everywhere and made for training",
    "mxfp4": "mxfp4 is of gpt-oss's experts only, and this model has none",
})  # fmt: skip
# A checkpoint comes from anywhere, and its patterns are tried at the name of every matrix.
_MOST_STEPS, _NAME = 10**8, 64  # characters of such a name
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix [O, I] is quantized.

    `tile`: rows and columns that one scale stands for, 0: all. None: the file decides between all and one row.
    """

    format: str  # fp8, int8, packed, mxfp4, nvfp4, awq, gptq
    bits: int = 8  # 0: by the shapes in the file
    tile: tuple[int, int] | None = None
    zeros: bool = False  # asymmetric
    zero_offset: int = 0  # added to the zero points that are stored


@dataclass(frozen=True, slots=True)
class Quantization:
    """Of a checkpoint. `groups`: targets and the scheme of each; a target is a module, "re:" and a pattern, or a class."""

    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """Of a linear layer: a group that names it goes before one that means all."""
        for is_target in (_names, lambda target, _: target == "Linear"):
            for targets, scheme in self.groups:
                if any(is_target(target, module) for target in targets):
                    return scheme
        return None

    def ignores(self, module: str) -> bool:
        return any(_names(entry, module) for entry in self.ignored)


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Of a parsed `config.json`; None: its weights are floats. Raises CheckpointError for what is not supported, and why."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: quantization_config is {given!r}, wanted an object")
    method = given.get("quant_method") or given.get("method") or ("modelopt" if "quant_algo" in given else None)
    parse = _METHODS.get(method) if isinstance(method, str) else None
    if method == "mxfp4" and not (config.get("num_local_experts") or config.get("num_experts")):
        parse = None
    if parse is None:
        reason = _REFUSED.get(str(method), f"quantization_config has the method {method!r}")
        raise CheckpointError(f"config.json: {reason}, which is not supported: {_INSTEAD}")
    return parse(_Fields(given, str(method)))


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


def _names(target: str, module: str) -> bool:
    """Whether an entry of a list means a module: by its pattern, its name, its parent's, or the end of either."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    if "*" in target:
        return fnmatchcase(module, target)
    return f".{target}." in f".{module}."


def _most_steps(pattern: str) -> float:
    """How often a pattern may be tried at a name before it is known not to match: repeats of one another, and all choices."""
    plain = _ATOM.sub("x", pattern)
    if re.search(r"\)\s*[*+{]|\(\?\w*x", plain):
        return math.inf  # a repeated group, which may repeat in it, or a pattern with blanks and comments in it
    repeats = len(re.findall(r"(?<!\()[*+?{]", plain))
    return math.comb(_NAME + repeats, repeats) * math.prod(1 + part.count("|") for part in plain.split("("))


class _Fields:
    """The entries of a quantization_config, or of an object in it, each checked when it is read."""

    def __init__(self, given: Mapping[str, Any], where: str):
        self.given, self.where = given, where

    def refuse(self, name: str, wanted: str) -> NoReturn:
        value = self.given.get(name)
        raise CheckpointError(f"config.json: {self.where} quantization: {name} is {value!r}, wanted {wanted}: {_INSTEAD}")

    def one_of(self, name: str, default: Any, *allowed: Any) -> Any:
        """Numbers are not flags: 1 is not True."""
        value = self.given.get(name)
        value = default if value is None else value.lower() if isinstance(value, str) else value
        if not any(value == each and type(value) is type(each) for each in allowed):
            self.refuse(name, " or ".join(map(str, allowed)))
        return value

    def count(self, name: str) -> int:
        """A number of columns; 0: of the whole row, which is written as -1."""
        value = self.given.get(name)
        if type(value) is not int or not (value == -1 or 0 < value < 1 << 24):
            self.refuse(name, "a positive number, or -1 for the whole row")
        return max(value, 0)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of modules; patterns are compiled to see that they are some."""
        found = self.given.get(name) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            self.refuse(name, "a list of names")
        for each in found:
            try:
                pattern = re.compile(each.removeprefix("re:") if each.startswith("re:") else "").pattern
            except (re.error, RecursionError, OverflowError) as error:
                raise CheckpointError(f"config.json: {name} has {each[:200]!r}, no pattern: {error}") from error
            if _most_steps(pattern) > _MOST_STEPS:
                raise CheckpointError(f"config.json: {name} has {each[:200]!r}, a pattern that takes too long: fewer repeats")
        return tuple(found)

    def inside(self, name: str) -> _Fields:
        value = self.given.get(name)
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return _Fields(value, f"{self.where} {name}")


def _everywhere(fields: _Fields, scheme: Scheme, ignored: str) -> Quantization:
    return Quantization(fields.where, ((("Linear",), scheme),), fields.names(ignored))


def _fp8(fields: _Fields) -> Quantization:
    """Of Transformers, in blocks or of whole tensors; AutoFP8's and FBGEMM's. Static scales of activations are not used."""
    fields.one_of("fmt", "e4m3", "e4m3", "float8_e4m3fn")
    fields.one_of("activation_scheme", "dynamic", "dynamic", "static")
    block = fields.given.get("weight_block_size")
    tile = None if block is None else _block(fields, "weight_block_size")
    lists = [name for name in ("modules_to_not_convert", "ignored_layers") if fields.given.get(name)]
    return _everywhere(fields, Scheme("fp8", tile=tile), (lists or ["ignored_layers"])[0])


def _block(fields: _Fields, name: str) -> tuple[int, int]:
    block = fields.given.get(name)
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or not 0 < n < 1 << 24 for n in block):
        fields.refuse(name, "[rows, columns]")
    return block[0], block[1]


def _awq(fields: _Fields) -> Quantization:
    version = next((name for name in ("version", "format", "checkpoint_format") if name in fields.given), "version")
    fields.one_of(version, "gemm", "gemm")
    bits = "w_bit" if "w_bit" in fields.given else "bits"
    fields.one_of(bits, None, 4)
    fields.one_of("zero_point", True, True, False)  # the file has them either way
    group = fields.count("q_group_size" if "q_group_size" in fields.given else "group_size")
    return _everywhere(fields, Scheme("awq", 4, (1, group), zeros=True), "modules_to_not_convert")


def _gptq(fields: _Fields) -> Quantization:
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


def _auto_round(fields: _Fields) -> Quantization:
    """AutoRound's, packed like GPTQ or AWQ. What it leaves alone (`extra_config`: 16 bits) has no scale in the file."""
    fields.one_of("data_type", "int", "int")
    fields.one_of("backend", "auto", "auto")  # older ones pack otherwise
    packing = fields.one_of("packing_format", "auto_round:auto_gptq", "auto_round:auto_gptq", "auto_round:auto_awq")
    awq, group = packing.endswith("awq"), fields.count("group_size")
    bits = fields.one_of("bits", None, *((4,) if awq else (4, 8)))
    extra = fields.inside("extra_config").given.values() if fields.given.get("extra_config") else ()
    if any(isinstance(each, dict) and each.get("bits", bits) not in (bits, 16, 32) for each in extra) and not awq:
        bits = 0  # by the shapes in the file
    scheme = Scheme("awq" if awq else "gptq", bits, (1, group), zeros=True, zero_offset=0 if awq else 1)
    return _everywhere(fields, scheme, "modules_to_not_convert")


def _mxfp4(fields: _Fields) -> Quantization:
    """Of gpt-oss, whose experts' names tell them (see gpt_oss_experts.py)."""
    return _everywhere(fields, Scheme("mxfp4", 4, (1, 32)), "modules_to_not_convert")


def _modelopt(fields: _Fields) -> Quantization:
    kind = fields.one_of("quant_algo", None, "fp8", "nvfp4")
    scheme = Scheme("fp8", tile=(0, 0))
    if kind == "nvfp4":
        grouped = fields.given.get("group_size")
        scheme = Scheme("nvfp4", 4, (1, 16 if grouped is None else fields.count("group_size")))
    return _everywhere(fields, scheme, "ignore" if "ignore" in fields.given else "exclude_modules")


def _compressed_tensors(fields: _Fields) -> Quantization:
    for name, key in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        inner = fields.given.get(name)
        if inner and (not isinstance(inner, dict) or inner.get(key) not in (None, {}, "dense")):
            fields.refuse(name, "none")
    groups = []
    for name in fields.inside("config_groups").given:
        group = fields.inside("config_groups").inside(name)
        if group.given.get("weights") is not None:
            default = fields.given.get("format")
            groups.append((group.names("targets"), _compressed_scheme(group, group.given.get("format") or default)))
    if not groups:
        fields.refuse("config_groups", "groups with weights")
    return Quantization(fields.where, tuple(groups), fields.names("ignore"))


def _compressed_scheme(group: _Fields, format_: Any) -> Scheme:
    weights = group.inside("weights")
    found = _Fields({**weights.given, "format": format_}, weights.where)
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
})  # fmt: skip


def _tile(weights: _Fields, name: str) -> tuple[int, int]:
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
            return _block(weights, "block_structure")
    return 1, {"nvfp4": 16, "mxfp4": 32}[name] if not grouped and fp4 else weights.count("group_size")


_METHODS: Mapping[str, Callable[[_Fields], Quantization]] = MappingProxyType({
    "fp8": _fp8, "fbgemm_fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq,
    "auto-round": _auto_round, "modelopt": _modelopt, "modelopt_fp4": _modelopt, "mxfp4": _mxfp4,
})  # fmt: skip
