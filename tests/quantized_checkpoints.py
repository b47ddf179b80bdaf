"""Packs tiny checkpoints in the formats that people download, each from its formula alone: a packer draws the stored numbers and
says what the matrix is that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_models import write_tiny

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
LINEAR = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj",
)  # fmt: skip
Packed = tuple[dict[str, Tensor], Tensor]  # what follows the module's name -> tensor; the matrix [out, in] in float32
Packer = Callable[[np.random.Generator, int, int], Packed]


def _floats(rng: np.random.Generator, *shape: int, high: float = 0.05) -> np.ndarray:
    return rng.uniform(high / 8, high, shape).astype(np.float32)


def _spread(values: np.ndarray, rows: int, columns: int, shape: tuple[int, int]) -> np.ndarray:
    """Each for a tile of rows and columns."""
    return np.kron(values.astype(np.float32), np.ones((rows, columns), np.float32))[: shape[0], : shape[1]]


def _words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """[..., n] unsigned -> int32 [..., n * bits / 32], the first number lowest; what is missing at the end is 0."""
    each = 32 // bits
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % each)])
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // each), np.uint32)
    for i in range(each):
        words |= numbers[..., i::each].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def _t(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _e4m3(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return _t(rng.normal(size=shape).astype(np.float32) * scale).to(torch.float8_e4m3fn)


def fp8(
    tile: tuple[int, int], suffix: str = "weight_scale", dtype: torch.dtype = torch.float32, vector: bool = False, static: bool = False,
    apart: bool = False,
) -> Packer:  # fmt: skip
    """tile: rows and columns of a scale, 0: all. `apart`: with ones between these in the scales' shape."""

    def pack(rng: np.random.Generator, rows: int, columns: int) -> Packed:
        high, wide = tile[0] or rows, tile[1] or columns
        data = _e4m3(rng, rows, columns)
        scale = _t(_floats(rng, -(-rows // high), -(-columns // wide))).to(dtype)
        matrix = data.float() * _t(_spread(scale.float().numpy(), high, wide, (rows, columns)))
        if vector:
            scale = scale.flatten() if scale.numel() > 1 else scale.reshape(())
        if apart:
            scale = scale[:, None, :, None]
        return {"weight": data, suffix: scale} | ({"input_scale": torch.tensor(0.5)} if static else {}), matrix

    return pack


def int8(group: int = 0, zeros: bool = False, together: int = 1, nothing: bool = False, bits: int = 8) -> Packer:
    """`together`: rows with one scale, 0: all; a single one has no dimensions. `nothing`: zero points are there, and are 0."""
    half = 1 << (bits - 1)

    def pack(rng: np.random.Generator, rows: int, columns: int) -> Packed:
        wide, high = group or columns, together or rows
        data = rng.integers(-half, half, (rows, columns), dtype=np.int8)
        scale = _t(_floats(rng, -(-rows // high), -(-columns // wide), high=0.01)).bfloat16()
        zero = rng.integers(-min(half, 20), min(half, 20), scale.shape).astype(np.int8) * zeros
        matrix = (data - _spread(zero, high, wide, data.shape)) * _spread(scale.float().numpy(), high, wide, data.shape)
        tensors = {"weight": _t(data), "weight_scale": scale} | ({"weight_zero_point": _t(zero)} if zeros or nothing else {})
        return {name: t if together else t.reshape(t.shape if t.numel() > 1 else ()) for name, t in tensors.items()}, _t(matrix)

    return pack


def packed(bits: int = 4, group: int = 0, zeros: bool = False) -> Packer:
    """compressed-tensors: signed numbers and zero points, stored with the middle added."""

    def pack(rng: np.random.Generator, rows: int, columns: int) -> Packed:
        wide, half = group or columns, 1 << (bits - 1)
        data = rng.integers(-half, half, (rows, columns))
        scale = _t(_floats(rng, rows, -(-columns // wide), high=0.2 / half)).bfloat16()
        zero = rng.integers(-half, half, scale.shape) * zeros
        matrix = (data - _spread(zero, 1, wide, data.shape)) * _spread(scale.float().numpy(), 1, wide, data.shape)
        tensors = {
            "weight_packed": _t(_words(data + half, bits)), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns]),
        }  # fmt: skip
        if zeros:
            tensors["weight_zero_point"] = _t(_words((zero + half).T, bits).T)
        return tensors, _t(matrix.astype(np.float32))

    return pack


def _codes(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensor, np.ndarray]:
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    return _t(codes[:, ::2] | codes[:, 1::2] << 4), np.array(E2M1, np.float32)[codes]


def mxfp4(rng: np.random.Generator, rows: int, columns: int) -> Packed:
    data, values = _codes(rng, rows, columns)
    scale = rng.integers(118, 124, (rows, -(-columns // 32)), dtype=np.uint8)
    matrix = values * _spread(2.0 ** (scale.astype(np.float32) - 127), 1, 32, values.shape)
    return {"weight_packed": data, "weight_scale": _t(scale)}, _t(matrix)


def renamed(pack: Packer, **names: str) -> Packer:
    def packed_otherwise(rng: np.random.Generator, rows: int, columns: int) -> Packed:
        tensors, matrix = pack(rng, rows, columns)
        return {names.get(name, name): tensor for name, tensor in tensors.items()}, matrix

    return packed_otherwise


def mxfp8(rng: np.random.Generator, rows: int, columns: int) -> Packed:
    data, scale = _e4m3(rng, rows, columns), rng.integers(118, 124, (rows, -(-columns // 32)), dtype=np.uint8)
    matrix = data.float() * _t(_spread(2.0 ** (scale.astype(np.float32) - 127), 1, 32, (rows, columns)))
    return {"weight": data, "weight_scale": _t(scale)}, matrix


def nvfp4(modelopt: bool = False, group: int = 16) -> Packer:
    def pack(rng: np.random.Generator, rows: int, columns: int) -> Packed:
        data, values = _codes(rng, rows, columns)
        scale, of_all = _e4m3(rng, rows, -(-columns // group), scale=40).abs(), torch.tensor([2.0**-11 if group == 32 else 0.0007 if modelopt else 1500.0])
        each = scale.float() * of_all if modelopt else scale.float() / of_all
        matrix = values * _spread(each.numpy(), 1, group, values.shape)
        names = ("weight", "weight_scale", "weight_scale_2") if modelopt else ("weight_packed", "weight_scale", "weight_global_scale")
        tensors = dict(zip(names, (data, scale, of_all.reshape(()) if modelopt else of_all), strict=True))
        return tensors | {"input_scale" if modelopt else "input_global_scale": torch.tensor([2.0])}, _t(matrix)

    return pack


def _in_out(rng: np.random.Generator, rows: int, columns: int, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers [in, out], zero points and scales [groups, out]."""
    groups = -(-columns // group)
    numbers, zeros = rng.integers(0, 1 << bits, (columns, rows)), rng.integers(1, 1 << bits, (groups, rows))
    return numbers, zeros, _floats(rng, groups, rows, high=0.4 / (1 << bits)).astype(np.float16)


def _matrix(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: int) -> Tensor:
    of_row = np.arange(len(numbers)) // group
    return _t(((numbers - zeros[of_row]) * scales[of_row].astype(np.float32)).T.astype(np.float32))


def awq(group: int = 32, signed: bool = False) -> Packer:
    """`signed`: of numbers from -8 to 7 in four bits each, whose zero points are 0."""

    def pack(rng: np.random.Generator, rows: int, columns: int) -> Packed:
        numbers, zeros, scales = _in_out(rng, rows, columns, 4, group)
        numbers, zeros = (numbers - 8, zeros * 0) if signed else (numbers, zeros)
        words = [_words(n.reshape(len(n), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]] & 15, 4)[..., 0] for n in (numbers, zeros)]
        return {"qweight": _t(words[0]), "qzeros": _t(words[1]), "scales": _t(scales)}, _matrix(numbers, zeros, scales, group)

    return pack


def gptq(bits: int = 4, group: int = 32, v2: bool = False) -> Packer:
    def pack(rng: np.random.Generator, rows: int, columns: int) -> Packed:
        wide = group if group > 0 else columns
        numbers, zeros, scales = _in_out(rng, rows, columns, bits, wide)
        tensors = {
            "qweight": _t(_words(numbers.T, bits).T), "qzeros": _t(_words(zeros - (not v2), bits)), "scales": _t(scales),
            "g_idx": _t((np.arange(columns) // wide).astype(np.int32)),
        }  # fmt: skip
        return tensors, _matrix(numbers, zeros, scales, wide)

    return pack


def compressed(format_: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False} | weights}
    group["input_activations"] = None if bits == 4 else {"num_bits": bits, "type": kind, "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


def quark(weight: dict[str, Any] | list[dict[str, Any]], **layers: Any) -> dict[str, Any]:
    """A quantization_config of AMD Quark. `layers`: weights of their own by the end of a name."""
    def layer(of: Any) -> dict[str, Any]:
        return {"weight": of, "bias": None, "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": True}, "output_tensors": None, "target_device": None}

    return {
        "quant_method": "quark", "quant_mode": "eager_mode", "exclude": ["lm_head"], "algo_config": None, "layer_type_quant_config": {},
        "layer_quant_config": {f"*{name}": layer(of) for name, of in layers.items()}, "global_quant_config": layer(weight), "version": "0.13",
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized", "weight_merge_groups": None},
    }  # fmt: skip


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    """A quantization_config of TorchAO."""
    return {"quant_method": "torchao", "modules_to_not_convert": None, "quant_type": {"default": of_torchao(kind, **data)}}


def of_torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": data}


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]  # quantization_config
    pack: Packer
    kinds: tuple[str, str]  # of the narrow weight, where rows of the matrix are multiples of 128 and where not
    beside: str = ""  # the file that holds the config, if that is not config.json
    more: dict[str, Any] = field(default_factory=dict)


_NVFP4 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int", "autoround_version": "0.9"}
_ROUND_FP = {"quant_method": "auto-round", "group_size": 32, "sym": True, "packing_format": "auto_round:llm_compressor", "act_bits": 4}
_QUARK_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0", "symmetric": None}
_QUARK_INT4 = {"qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": None}
_QUARK_NAMES = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}
PER_ROW, PER_TENSOR = of_torchao("PerRow", dim=-1), of_torchao("PerTensor")
_TORCHAO_NAMES = {"weight": "_weight_qdata", "weight_scale": "_weight_scale", "weight_zero_point": "_weight_zero_point"}
_INTX = {"intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"}, "weight_dtype": {"_data": "int4", "_type": "torch.dtype"}}
FORMATS: dict[str, Format] = {
    "fp8-block": Format(
        {**_FP8, "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        fp8((128, 128), "weight_scale_inv"), ("fp8", "fp8"),
    ),
    "fp8-tensor": Format({**_FP8, "activation_scheme": "static"}, fp8((0, 0), vector=True, static=True), ("fp8", "fp8")),
    "fp8-tensor-1": Format(_FP8, fp8((0, 0)), ("fp8", "fp8")),
    "fbgemm": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, fp8((1, 0)), ("fp8", "fp8")),
    "modelopt-fp8": Format(
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}, "producer": {"name": "modelopt"}},
        fp8((0, 0), vector=True, static=True), ("fp8", "fp8"), beside="hf_quant_config.json",
    ),
    "modelopt-fp8-rows": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]}, fp8((1, 0), vector=True), ("fp8", "fp8")
    ),
    "modelopt-fp8-block": Format(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head*"]}},
        fp8((128, 128), apart=True), ("fp8", "fp8"),
    ),
    "ct-fp8-dynamic": Format(compressed("float-quantized", 8, "float", strategy="channel"), fp8((1, 0), dtype=torch.bfloat16), ("fp8", "fp8")),
    "ct-fp8-static": Format(compressed("float-quantized", 8, "float", strategy="tensor"), fp8((0, 0), dtype=torch.bfloat16, static=True), ("fp8", "fp8")),
    "ct-fp8-block": Format(
        compressed("float-quantized", 8, "float", strategy="block", block_structure=[128, 128]), fp8((128, 128), dtype=torch.bfloat16), ("fp8", "fp8")
    ),
    "ct-fp8-naive": Format(compressed("naive-quantized", 8, "float", strategy="channel"), fp8((1, 0), vector=True), ("fp8", "fp8")),
    "ct-int8": Format(compressed("int-quantized", 8, strategy="channel"), int8(), ("int8", "int8")),
    "ct-int8-naive": Format(compressed("naive-quantized", 8, strategy="group", group_size=32, symmetric=False), int8(32, True), ("int8", "int8")),
    "ct-int4-bytes": Format(compressed("int-quantized", 4, strategy="group", group_size=32), int8(32, bits=4), ("int4", "int8")),
    "ct-int4-bytes-asym": Format(compressed("int-quantized", 4, strategy="channel", symmetric=False), int8(zeros=True, bits=4), ("int4", "int8")),
    "ct-int4-bytes-block": Format(
        compressed("naive-quantized", 4, strategy="block", block_structure=[64, 32], symmetric=False), int8(32, True, together=64, bits=4), ("int4", "int8"),
    ),
    "ct-pack4": Format(compressed("pack-quantized", 4, strategy="group", group_size=32, actorder="weight"), packed(4, 32), ("int4", "int8")),
    "ct-pack4-channel": Format(compressed("pack-quantized", 4, strategy="channel"), packed(), ("int4", "int8")),
    "ct-pack4-asym": Format(
        compressed("pack-quantized", 4, strategy="group", group_size=16, symmetric=False), packed(4, 16, True), ("int4", "int8")
    ),
    "ct-pack8-asym": Format(
        compressed("pack-quantized", 8, strategy="group", group_size=32, symmetric=False), packed(8, 32, True), ("int8", "int8")
    ),
    "ct-mxfp4": Format(compressed("mxfp4-pack-quantized", 4, "float", strategy="group", group_size=32), mxfp4, ("fp4", "int8")),
    "ct-mxfp8": Format(compressed("mxfp8-quantized", 8, "float", strategy="group", group_size=32, scale_dtype="torch.uint8"), mxfp8, ("fp8", "fp8")),
    "modelopt-mxfp8": Format({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}, mxfp8, ("fp8", "fp8")),
    "ct-nvfp4": Format(compressed("nvfp4-pack-quantized", 4, "float", **_NVFP4), nvfp4(), ("fp4", "int8")),
    "modelopt-nvfp4": Format(
        {"quant_algo": "NVFP4", "config_groups": {}, "ignore": ["lm_head"], "quant_method": "modelopt"}, nvfp4(True), ("fp4", "int8")
    ),
    "modelopt-fp4-only": Format(
        {"quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"], "quant_method": "modelopt_fp4"}, nvfp4(True), ("fp4", "int8")
    ),
    "modelopt-nvfp4-fp8": Format({"quant_algo": "W4A8_NVFP4_FP8", "ignore": ["lm_head"], "quant_method": "modelopt"}, nvfp4(True, 32), ("fp4", "int8")),
    "modelopt-mxfp4": Format(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_MXFP4_FP8", "group_size": 32, "exclude_modules": ["lm_head"]}},
        renamed(mxfp4, weight_packed="weight"), ("fp4", "int8"), beside="hf_quant_config.json",
    ),
    "modelopt-int8": Format({"quant_algo": "W8A16", "ignore": ["lm_head"], "quant_method": "modelopt"}, int8(), ("int8", "int8")),
    "sglang-mxfp8": Format({**_FP8, "quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, renamed(mxfp8, weight_scale="weight_scale_inv"), ("fp8", "fp8")),
    "mxfp8": Format({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, mxfp8, ("fp8", "fp8")),
    "sglang-int8": Format({"quant_method": "w8a8_int8", "activation_scheme": "dynamic"}, int8(), ("int8", "int8")),
    "sglang-int8-block": Format(
        {**_FP8, "quant_method": "blockwise_int8", "weight_block_size": [128, 128]}, renamed(int8(128, together=128), weight_scale="weight_scale_inv"), ("int8", "int8"),
    ),
    "awq": Format(_AWQ, awq(), ("int4", "int8")),
    "awq-old": Format({"w_bit": 4, "q_group_size": 48, "zero_point": False, "version": "GEMM"}, awq(48), ("int4", "int8"), beside="quant_config.json"),
    "gptq": Format(_GPTQ, gptq(), ("int4", "int8")),
    "gptq-old": Format({"bits": 4, "group_size": -1, "desc_act": True}, gptq(group=-1), ("int4", "int8"), beside="quantize_config.json"),
    "gptq-v2": Format({**_GPTQ, "checkpoint_format": "gptq_v2", "desc_act": True}, gptq(v2=True), ("int4", "int8")),
    "gptq-8": Format({**_GPTQ, "bits": 8}, gptq(8), ("int8", "int8")),
    "gptq-dynamic": Format({**_GPTQ, "dynamic": {r"+:.*\.down_proj": {"bits": 8}}}, gptq(8), ("int8", "int8")),
    "auto-round": Format({**_AUTO_ROUND, "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}, gptq(), ("int4", "int8")),
    "auto-round-gptqmodel": Format({**_AUTO_ROUND, "sym": False, "packing_format": "auto_round:gptqmodel"}, gptq(v2=True), ("int4", "int8")),
    "auto-round-mxfp4": Format({**_ROUND_FP, "data_type": "mx_fp", "bits": 4}, mxfp4, ("fp4", "int8")),
    "auto-round-mxfp8": Format({**_ROUND_FP, "data_type": "mx_fp", "bits": 8}, mxfp8, ("fp8", "fp8")),
    "auto-round-nvfp4": Format({**_ROUND_FP, "data_type": "nv_fp", "bits": 4, "group_size": 16}, nvfp4(), ("fp4", "int8")),
    "auto-round-fp8": Format(
        {**_ROUND_FP, "data_type": "fp", "bits": 8, "group_size": -1, "packing_format": "auto_round:fp8_static"},
        fp8((1, 0), dtype=torch.bfloat16, vector=True, static=True), ("fp8", "fp8"),
    ),
    "auto-round-fp8-block": Format(
        {**_ROUND_FP, "data_type": "fp", "bits": 8, "packing_format": "auto_round:fp8", "group_size": [128, 128], "weight_block_size": [128, 128]},
        fp8((128, 128), "weight_scale_inv", torch.bfloat16), ("fp8", "fp8"),
    ),
    "quark-fp8": Format(quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "ch_axis": None, "symmetric": True}), fp8((0, 0), vector=True, static=True), ("fp8", "fp8")),
    "quark-fp8-rows": Format(quark({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}), fp8((1, 0), vector=True), ("fp8", "fp8")),
    "quark-fp8-block": Format(quark({"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}), fp8((128, 128)), ("fp8", "fp8")),
    "quark-mxfp4": Format(quark(_QUARK_MXFP4), renamed(mxfp4, weight_packed="weight"), ("fp4", "int8")),
    "quark-nvfp4": Format(
        quark([{"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_format": "float32", "symmetric": None}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}]),
        renamed(nvfp4(True), input_scale="input_scale_2"), ("fp4", "int8"),
    ),
    "quark-int8": Format(quark({"dtype": "int8", "qscheme": "per_tensor", "symmetric": True}), int8(together=0, nothing=True), ("int8", "int8")),
    "quark-int8-asym": Format(quark({"dtype": "int8", "qscheme": "per_channel", "symmetric": False, "ch_axis": 0}), int8(zeros=True), ("int8", "int8")),
    "quark-int4": Format(quark({**_QUARK_INT4, "dtype": "int4", "symmetric": True}), renamed(awq(signed=True), **_QUARK_NAMES), ("int4", "int8")),
    "quark-uint4": Format(quark({**_QUARK_INT4, "dtype": "uint4", "symmetric": False}), renamed(awq(), **_QUARK_NAMES), ("int4", "int8")),
    "quark-awq": Format({**_AWQ, "zero_point": False, "pack_method": "reorder"}, awq(signed=True), ("int4", "int8")),
    "torchao-fp8": Format(
        torchao("Float8DynamicActivationFloat8WeightConfig", granularity=[PER_TENSOR, PER_ROW]), renamed(fp8((1, 0)), **_TORCHAO_NAMES), ("fp8", "fp8")
    ),
    "torchao-fp8-tensor": Format(torchao("Float8WeightOnlyConfig", granularity=PER_TENSOR), renamed(fp8((0, 0)), **_TORCHAO_NAMES), ("fp8", "fp8")),
    "torchao-int8": Format(torchao("Int8WeightOnlyConfig", group_size=None), renamed(int8(nothing=True), **_TORCHAO_NAMES), ("int8", "int8")),
    "torchao-int8-group": Format(
        torchao("Int8DynamicActivationInt8WeightConfig", granularity=of_torchao("PerGroup", group_size=32)),
        renamed(int8(32, nothing=True), **_TORCHAO_NAMES), ("int8", "int8"),
    ),
    "torchao-intx": Format(
        torchao("Int8DynamicActivationIntxWeightConfig", **_INTX, weight_granularity=of_torchao("PerGroup", group_size=32), weight_mapping_type={"_data": "ASYMMETRIC"}),
        renamed(int8(32, zeros=True, bits=4), **_TORCHAO_NAMES), ("int4", "int8"),
    ),
    "auto-round-awq": Format({**_AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, awq(), ("int4", "int8")),
}  # fmt: skip


@dataclass
class Tiny:
    """A checkpoint with what its matrices are in float32, by the name that each has in the unquantized model."""

    path: Path
    matrices: dict[str, Tensor]
    config: dict[str, Any]

    def change(self, edit: Callable[[dict[str, Tensor]], object]) -> None:
        """Its tensors, in place."""
        tensors = load_file(self.path / "model.safetensors")
        edit(tensors)
        save_file(tensors, self.path / "model.safetensors")

    def configure(self, quantization: Any) -> None:
        (self.path / "config.json").write_text(json.dumps(self.config | {"quantization_config": quantization}))


def write_quantized(
    path: Path, format_: Format, family: str = "qwen3", seed: int = 0, packer_of: Callable[[str], Packer | None] | None = None, **overrides: Any
) -> Tiny:
    """A tiny checkpoint of `family`, each linear layer in the format; `packer_of`: or as this says by its name, None: as it is."""
    write_tiny(family, path, **{"num_hidden_layers": 1, "tie_word_embeddings": False} | overrides)
    config, rng = json.loads((path / "config.json").read_text()), np.random.default_rng(seed)
    tiny = Tiny(path, load_file(path / "model.safetensors"), config)
    stored: dict[str, Tensor] = {}
    for name, tensor in tiny.matrices.items():
        module = name.removesuffix(".weight")
        pack = None if not module.endswith(LINEAR) or tensor.ndim != 2 else format_.pack if packer_of is None else packer_of(module)
        if pack is None:
            stored[name] = tensor
        else:
            parts, tiny.matrices[name] = pack(rng, *tensor.shape)
            stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")
    if format_.beside:
        (path / format_.beside).write_text(json.dumps(format_.config))
    else:
        tiny.configure(format_.config)
    return tiny
