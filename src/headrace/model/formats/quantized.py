"""What a checkpoint's quantization_config says: which of its matrices are quantized, and how. No torch, nothing is read.

Every method becomes the same: groups of modules, each with a Scheme, and a list of those that are left alone. What a Scheme's
tensors are called and how they become a Weight is in quantized_*.py, one file for each `format`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from headrace.errors import CheckpointError
from headrace.model.formats.safetensors_file import read_json

INSTEAD = "use the unquantized checkpoint with --quantization int4, int8 or fp8, or one of FP8, AWQ, GPTQ, compressed-tensors"
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


class Modules:
    """What a list means: an entry is a pattern ("re:", or with *), or a name, a parent's or the end of either. Names are looked
    up, as there may be thousands on the list and ten times as many in a model."""

    def __init__(self, entries: Collection[str] = ()):
        patterns = [entry for entry in entries if entry.startswith("re:") or "*" in entry]
        self._names = frozenset(entries).difference(patterns)
        self._patterns = [re.compile(entry[3:] if entry.startswith("re:") else translate(entry)) for entry in patterns]
        self._known = {"": False}

    def have(self, module: str) -> bool:
        return self._named(module) or any(pattern.match(module) for pattern in self._patterns)

    def _named(self, module: str) -> bool:
        """By the end of its own name, or as what it is part of, which is asked for once."""
        if module not in self._known:
            parts = module.split(".")
            ends = (".".join(parts[first:]) for first in range(len(parts)))
            self._known[module] = not self._names.isdisjoint(ends) or self._named(module.rpartition(".")[0])
        return self._known[module]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Of a checkpoint. `groups`: some of its linear layers and their scheme, each; `rest`: of those that are in none."""

    method: str
    groups: tuple[tuple[Modules, Scheme], ...] = ()
    rest: Scheme | None = None
    ignored: Modules = field(default_factory=Modules)

    @property
    def schemes(self) -> list[Scheme]:
        return [*(scheme for _, scheme in self.groups), *([self.rest] if self.rest is not None else [])]

    def scheme_of(self, *names: str) -> Scheme | None:
        """Of a linear layer: by its name, and by that in its file, where it may be another."""
        return next((scheme for modules, scheme in self.groups if any(map(modules.have, names))), self.rest)

    def ignores(self, *names: str) -> bool:
        return any(map(self.ignored.have, names))


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Of a parsed `config.json`; None: its weights are floats. Raises CheckpointError for what is not supported, and why."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: quantization_config is {given!r}, wanted an object")
    if isinstance(inner := given.get("quantization"), dict):  # of ModelOpt's older files
        given = {**given, **inner}
    method = given.get("quant_method") or given.get("method") or ("modelopt" if "quant_algo" in given else None)
    method = method.lower().replace("_tensors", "-tensors") if isinstance(method, str) else method
    parse = _METHODS.get(method) if isinstance(method, str) else None
    if method == "mxfp4" and not (config.get("num_local_experts") or config.get("num_experts")):
        parse = None
    if parse is None:
        reason = _REFUSED.get(str(method), f"quantization_config has the method {method!r}")
        raise CheckpointError(f"config.json: {reason}, which is not supported: {INSTEAD}")
    if config.get("model_type") == "gpt_oss" and method != "mxfp4":
        told = f"quantization_config has the method {method!r}, and gpt-oss is read in mxfp4 alone"
        raise CheckpointError(f"config.json: {told}: {INSTEAD}")
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
        raise CheckpointError(f"config.json: {self.where} quantization: {name} is {value!r}, wanted {wanted}: {INSTEAD}")

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

    def names(self, name: str) -> list[str]:
        """A list of modules."""
        found = self.given.get(name) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            self.refuse(name, "a list of names")
        return self._checked(name, found)

    def keys(self, name: str) -> list[str]:
        """Modules that are the names in an object."""
        return self._checked(name, list(self.inside(name).given))

    def _checked(self, name: str, found: list[str]) -> list[str]:
        """Patterns are compiled to see that they are some."""
        for each in found:
            try:
                pattern = re.compile(each.removeprefix("re:") if each.startswith("re:") else "").pattern
            except (re.error, RecursionError, OverflowError) as error:
                raise CheckpointError(f"config.json: {name} has {each[:200]!r}, no pattern: {error}") from error
            if _most_steps(pattern) > _MOST_STEPS:
                raise CheckpointError(f"config.json: {name} has {each[:200]!r}, a pattern that takes too long: fewer repeats")
        return found

    def inside(self, name: str) -> _Fields:
        value = self.given.get(name)
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return _Fields(value, f"{self.where} {name}")


def _everywhere(fields: _Fields, scheme: Scheme, ignored: str) -> Quantization:
    return Quantization(fields.where, (), scheme, Modules(fields.names(ignored)))


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
    """One kind everywhere, or layers of several kinds, each named; of the latter some may be of no use here (drafting, vision),
    so that what is not supported is refused when it is read."""
    ignored, layers = "ignore" if "ignore" in fields.given else "exclude_modules", "quantized_layers"
    if fields.one_of("quant_algo", None, *_MODELOPT, "mixed_precision") != "mixed_precision":
        return _everywhere(fields, _modelopt_scheme(fields), ignored)
    named: dict[Scheme, list[str]] = {}
    for name in fields.keys(layers):
        named.setdefault(_modelopt_scheme(fields.inside(layers).inside(name)), []).append(name)
    groups = tuple((Modules(names), scheme) for scheme, names in named.items())
    return Quantization(fields.where, groups, None, Modules(fields.names(ignored)))


def _modelopt_scheme(fields: _Fields) -> Scheme:
    kind = str(fields.given.get("quant_algo"))
    scheme = _MODELOPT.get(kind.lower(), Scheme(kind.upper()))
    grouped = scheme.format == "nvfp4" and fields.given.get("group_size") is not None
    return replace(scheme, tile=(1, fields.count("group_size"))) if grouped else scheme


_MODELOPT: Mapping[str, Scheme] = MappingProxyType({
    "fp8": Scheme("fp8", tile=(0, 0)), "fp8_per_channel_per_token": Scheme("fp8", tile=(1, 0)),
    "fp8_pb_wo": Scheme("fp8", tile=(128, 128)), "mxfp8": Scheme("fp8", tile=(1, 32)),
    "nvfp4": Scheme("nvfp4", 4, (1, 16)), "w4a16_nvfp4": Scheme("nvfp4", 4, (1, 16)),
})  # fmt: skip


def _compressed_tensors(fields: _Fields) -> Quantization:
    for name, key in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        inner = fields.given.get(name)
        if inner and (not isinstance(inner, dict) or inner.get(key) not in (None, {}, "dense")):
            fields.refuse(name, "none")
    groups, rest = [], None
    for name in fields.inside("config_groups").given:
        group = fields.inside("config_groups").inside(name)
        if group.given.get("weights") is not None:  # else it is about attention and its cache
            scheme = _compressed_scheme(group, group.given.get("format") or fields.given.get("format"))
            groups.append((Modules(targets := group.names("targets")), scheme))
            rest = scheme if rest is None and "Linear" in targets else rest
    return Quantization(fields.where, tuple(groups), rest, Modules(fields.names("ignore")))


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
    "mxfp8-quantized": {"float": ("fp8", (8,))},
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
