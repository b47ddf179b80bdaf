"""What AutoRound, AMD's Quark and TorchAO write into a quantization_config: each has layers of their own beside the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from headrace.model.formats.quantized_fields import Fields
from headrace.model.formats.scheme import Modules, Quantization, Scheme, by_scheme


def auto_round(fields: Fields) -> Quantization:
    """AutoRound's, packed like GPTQ, AWQ, compressed-tensors or FP8 files. What it leaves alone (`extra_config`: 16 bits) has
    no scale in the file, and of what it has in other bits the names say so, or of integers the shapes."""
    scheme, named = _auto_round_scheme(fields), list[tuple[str, Scheme]]()
    for name in fields.keys("extra_config") if fields.given.get("extra_config") else ():
        own = Fields({**fields.given, **fields.inside("extra_config").inside(name).given}, f"{fields.where} {name}")
        if own.given.get("bits") in (16, 32) or all(own.given.get(key) == fields.given.get(key) for key in _OWN):
            continue
        if scheme.format == "gptq":
            scheme = replace(scheme, bits=0)
        else:
            named.append((name, _auto_round_scheme(own)))
    return Quantization(fields.where, by_scheme(named), scheme, Modules(fields.names("modules_to_not_convert")))


def _auto_round_scheme(fields: Fields) -> Scheme:
    match fields.one_of("data_type", "int", "int", "fp", *_MX_FP, *_NV_FP):
        case "fp":
            fields.one_of("packing_format", "auto_round:fp8", "auto_round:fp8", "auto_round:fp8_static")
            fields.one_of("bits", None, 8)
            block = fields.given.get("weight_block_size")
            return Scheme("fp8", tile=None if block is None else fields.block("weight_block_size"))
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


def quark(fields: Fields) -> Quantization:
    """AMD Quark's: layers of their own by patterns, of which the first counts, and the rest. What is said of attention and its
    cache is not used, as with the others."""
    fields.inside("export").one_of("weight_format", "real_quantized", "real_quantized")
    if fields.given.get("layer_type_quant_config"):
        fields.refuse("layer_type_quant_config", "none")
    algorithms = fields.given.get("algo_config")
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(algorithm, dict) and any(algorithm.get(name) for name in ("r4", "online_r1_rotation", "online_config")):
            fields.refuse("algo_config", "no rotations of activations (r4, online_r1_rotation)")
    layers = fields.keys("layer_quant_config") if fields.given.get("layer_quant_config") else ()
    named = [(name, _quark_scheme(fields, fields.inside("layer_quant_config").inside(name))) for name in layers]
    of_rest = fields.given.get("global_quant_config") is not None
    rest = _quark_scheme(fields, fields.inside("global_quant_config")) if of_rest else None
    return Quantization(fields.where, _in_order(named), rest, Modules(fields.names("exclude")))


def _in_order(named: Iterable[tuple[str, Scheme | None]]) -> tuple[tuple[Modules, Scheme], ...]:
    """Of names and patterns of which the first counts: one group of those in a row that are alike: there may be many."""
    alike = groupby(named, key=lambda one: one[1])
    return tuple((Modules([name for name, _ in these]), scheme) for scheme, these in alike if scheme is not None)


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
    tile = {"per_tensor": (0, 0), "per_channel": (1, 0)}.get(scheme) or weight.block("block_size")
    return Scheme("int8" if kind == "int8" else "fp8", tile=tile, zeros=zeros and kind == "int8")


def torchao(fields: Fields) -> Quantization:
    """TorchAO's safetensors, of what is a byte for each number. Of layers of their own names come before patterns."""
    default, ignored = fields.inside("quant_type").inside("default"), Modules(fields.names("modules_to_not_convert"))
    if default.given.get("_type") not in ("FqnToConfig", "ModuleFqnToConfig"):
        return Quantization(fields.where, (), _torchao_scheme(default), ignored)
    data = default.inside("_data")
    table = next((name for name in ("fqn_to_config", "module_fqn_to_config") if data.given.get(name)), "fqn_to_config")
    each = data.inside(table)
    schemes = {name: _torchao_scheme(each.inside(name)) for name in data.keys(table) if each.given[name] is not None}
    rest = schemes.pop("_default", None)
    named = sorted(schemes.items(), key=lambda one: one[0].startswith("re:"))
    return Quantization(fields.where, _in_order(named), rest, ignored)


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
