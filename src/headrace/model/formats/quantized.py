"""What a checkpoint's quantization_config says: which of its matrices are quantized, and how. No torch, nothing is read.

Every method becomes the same: groups of modules, each with a Scheme, and a list of those that are left alone. What a Scheme's
tensors are called and how they become a Weight is in quantized_*.py, one file for each `format`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.formats.quantized_fields import INSTEAD, Fields
from headrace.model.formats.safetensors_file import read_json

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
    signed: bool = False  # awq: its 4-bit numbers, and their zero points, are from -8 to 7


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
    tile = usual if block is None else _block(fields, "weight_block_size")
    lists = [name for name in ("modules_to_not_convert", "ignored_layers") if fields.given.get(name)]
    return _everywhere(fields, Scheme("int8" if "int8" in fields.where else "fp8", tile=tile), (lists or ["ignored_layers"])[0])


def _block(fields: Fields, name: str) -> tuple[int, int]:
    block = fields.given.get(name)
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or not 0 < n < 1 << 24 for n in block):
        fields.refuse(name, "[rows, columns]")
    return block[0], block[1]


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


def _auto_round(fields: Fields) -> Quantization:
    """AutoRound's, packed like GPTQ, AWQ, compressed-tensors or FP8 files. What it leaves alone (`extra_config`: 16 bits) has
    no scale in the file, and of what it has in other bits the names say so, or of integers the shapes."""
    scheme, named = _auto_round_scheme(fields), dict[Scheme, list[str]]()
    for name in fields.keys("extra_config") if fields.given.get("extra_config") else ():
        own = Fields({**fields.given, **fields.inside("extra_config").inside(name).given}, f"{fields.where} {name}")
        if own.given.get("bits") in (16, 32) or all(own.given.get(key) == fields.given.get(key) for key in _OWN):
            continue
        if scheme.format == "gptq":
            scheme = replace(scheme, bits=0)
        else:
            named.setdefault(_auto_round_scheme(own), []).append(name)
    groups = tuple((Modules(names), of_these) for of_these, names in named.items())
    return Quantization(fields.where, groups, scheme, Modules(fields.names("modules_to_not_convert")))


def _auto_round_scheme(fields: Fields) -> Scheme:
    match fields.one_of("data_type", "int", "int", "fp", *_MX_FP, *_NV_FP):
        case "fp":
            fields.one_of("packing_format", "auto_round:fp8", "auto_round:fp8", "auto_round:fp8_static")
            fields.one_of("bits", None, 8)
            block = fields.given.get("weight_block_size")
            return Scheme("fp8", tile=None if block is None else _block(fields, "weight_block_size"))
        case "int":
            return _auto_round_integers(fields)
        case data_type:
            fields.one_of("packing_format", None, "auto_round:llm_compressor")
            nvfp4 = data_type in _NV_FP
            bits = fields.one_of("bits", None, *((4,) if nvfp4 else (4, 8)))
            fields.one_of("group_size", None, 16 if nvfp4 else 32)
            if nvfp4:
                return Scheme("nvfp4", 4, (1, 16))
            return Scheme("mxfp4", 4, (1, 32)) if bits == 4 else Scheme("fp8", tile=(1, 32))


_OWN = ("data_type", "bits", "group_size")
_MX_FP, _NV_FP = ("mx_fp", "mx_fp4", "mx_fp8", "mx_fp_rceil"), ("nv_fp", "nv_fp4")


def _auto_round_integers(fields: Fields) -> Scheme:
    fields.one_of("backend", "auto", "auto")  # older ones pack otherwise
    kinds = ("auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq")  # the second is GPTQ's version 2
    packing = fields.one_of("packing_format", kinds[0], *kinds)
    awq, group = packing == kinds[2], fields.count("group_size")
    bits = fields.one_of("bits", None, *((4,) if awq else (4, 8)))
    return Scheme("awq" if awq else "gptq", bits, (1, group), zeros=True, zero_offset=1 if packing == kinds[0] else 0)


def _quark(fields: Fields) -> Quantization:
    """AMD Quark's: layers of their own by patterns, of which the first counts, and the rest. What is said of attention and its
    cache is not used, as with the others."""
    fields.inside("export").one_of("weight_format", "real_quantized", "real_quantized")
    if fields.given.get("layer_type_quant_config"):
        fields.refuse("layer_type_quant_config", "none")
    algorithms = fields.given.get("algo_config")
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(algorithm, dict) and any(algorithm.get(name) for name in ("r4", "online_r1_rotation", "online_config")):
            fields.refuse("algo_config", "no rotations of activations (r4, online_r1_rotation)")
    groups, ignored = list[tuple[Modules, Scheme]](), Modules(fields.names("exclude"))
    for name in fields.keys("layer_quant_config") if fields.given.get("layer_quant_config") else ():
        if (scheme := _quark_scheme(fields, fields.inside("layer_quant_config").inside(name))) is not None:
            groups.append((Modules([name]), scheme))
    of_rest = fields.given.get("global_quant_config") is not None
    rest = _quark_scheme(fields, fields.inside("global_quant_config")) if of_rest else None
    return Quantization(fields.where, tuple(groups), rest, ignored)


def _quark_scheme(fields: Fields, layer: Fields) -> Scheme | None:
    """None: its weights are floats."""
    given = layer.given.get("weight")
    if given is None:
        return None
    parts = given if isinstance(given, list) else [given]
    if len(parts) not in (1, 2) or not all(isinstance(part, dict) for part in parts):
        layer.refuse("weight", "an object, or two of them")
    weight, *of_scales = (Fields(part, f"{layer.where} weight") for part in parts)
    kind = weight.one_of("dtype", None, *(("fp4",) if of_scales else ("fp8_e4m3", "int8", "int4", "uint4", "fp4")))
    schemes = {"fp8_e4m3": ("per_tensor", "per_channel", "per_block"), "int8": ("per_tensor", "per_channel")}
    scheme = weight.one_of("qscheme", None, *schemes.get(kind, ("per_group",)))
    weight.one_of("ch_axis", *((0, 0) if scheme == "per_channel" else (-1, -1, 1)))
    zeros = weight.one_of("symmetric", True, True, False) is False
    if of_scales:
        of_scales[0].one_of("dtype", None, "fp8_e4m3")
        of_scales[0].one_of("qscheme", None, "per_tensor")
        return Scheme("nvfp4", 4, (1, weight.one_of("group_size", None, 16)))
    if kind == "fp4":
        weight.one_of("scale_format", None, "e8m0")
        return Scheme("mxfp4", 4, (1, weight.one_of("group_size", None, 32)))
    if kind in ("int4", "uint4"):
        fields.inside("export").one_of("pack_method", "reorder", "reorder")
        return Scheme("awq", 4, (1, weight.count("group_size")), zeros or kind == "uint4", signed=kind == "int4")
    tile = {"per_tensor": (0, 0), "per_channel": (1, 0)}.get(scheme) or _block(weight, "block_size")
    return Scheme("int8" if kind == "int8" else "fp8", tile=tile, zeros=zeros and kind == "int8")


def _torchao(fields: Fields) -> Quantization:
    """TorchAO's safetensors, of what is a byte for each number. Of layers of their own names come before patterns."""
    default, ignored = fields.inside("quant_type").inside("default"), Modules(fields.names("modules_to_not_convert"))
    if default.given.get("_type") not in ("FqnToConfig", "ModuleFqnToConfig"):
        return Quantization(fields.where, (), _torchao_scheme(default), ignored)
    data = default.inside("_data")
    table = next((name for name in ("fqn_to_config", "module_fqn_to_config") if data.given.get(name)), "fqn_to_config")
    each = data.inside(table)
    schemes = {name: _torchao_scheme(each.inside(name)) for name in data.keys(table) if each.given[name] is not None}
    rest = schemes.pop("_default", None)
    groups = tuple((Modules([name]), schemes[name]) for name in sorted(schemes, key=lambda name: name.startswith("re:")))
    return Quantization(fields.where, groups, rest, ignored)


def _torchao_scheme(config: Fields) -> Scheme:
    kind = config.given.get("_type")
    if not isinstance(kind, str) or kind not in _TORCHAO:
        config.refuse("_type", " or ".join(_TORCHAO))
    data, (layout, granularity, mapping) = config.inside("_data"), _TORCHAO[kind]
    of = data.given.get(granularity)  # of activations and of weights, or one of both
    tiles = Fields({granularity: of[-1] if isinstance(of, list) and of else of}, data.where)
    group = None
    if of is not None and (inside := tiles.inside(granularity)).one_of("_type", None, *_TORCHAO_TILES) == "pergroup":
        group = inside.inside("_data").count("group_size")
    bits = 8
    if mapping:
        data.inside("intx_packing_format").one_of("_data", None, "unpacked_to_int8")
        bits = 4 if data.inside("weight_dtype").given.get("_data") == "int4" else 8
    zeros = bool(mapping) and data.inside(mapping).one_of("_data", None, "symmetric", "asymmetric") != "symmetric"
    return Scheme(layout, bits, None if group is None else (1, group), zeros)


_TORCHAO_TILES = ("pertensor", "perrow", "peraxis", "pergroup")
# What it is to us, and what are called how many share a scale and whether there are zero points
_TORCHAO: Mapping[str, tuple[str, str, str]] = MappingProxyType({
    "Float8WeightOnlyConfig": ("fp8", "granularity", ""),
    "Float8DynamicActivationFloat8WeightConfig": ("fp8", "granularity", ""),
    "Int8WeightOnlyConfig": ("int8", "granularity", ""), "Int8DynamicActivationInt8WeightConfig": ("int8", "granularity", ""),
    "IntxWeightOnlyConfig": ("int8", "granularity", "mapping_type"),
    "Int8DynamicActivationIntxWeightConfig": ("int8", "weight_granularity", "weight_mapping_type"),
})  # fmt: skip


def _mxfp4(fields: Fields) -> Quantization:
    """Of gpt-oss, whose experts' names tell them (see gpt_oss_experts.py)."""
    return _everywhere(fields, Scheme("mxfp4", 4, (1, 32)), "modules_to_not_convert")


def _modelopt(fields: Fields) -> Quantization:
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
            return _block(weights, "block_structure")
    return 1, {"nvfp4": 16, "mxfp4": 32}[name] if not grouped and fp4 else weights.count("group_size")


_METHODS: Mapping[str, Callable[[Fields], Quantization]] = MappingProxyType({
    **dict.fromkeys(("fp8", "fbgemm_fp8", "mxfp8", "w8a8_fp8", "w8a8_int8", "blockwise_int8"), _fp8),
    "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq, "auto-round": _auto_round, "modelopt": _modelopt,
    "modelopt_fp4": _modelopt, "mxfp4": _mxfp4, "quark": _quark, "torchao": _torchao,
})  # fmt: skip
