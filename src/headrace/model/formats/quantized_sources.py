"""Finds the tensors that make up each quantized matrix of a checkpoint, checks them, and puts one source in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from headrace.errors import CheckpointError
from headrace.model.formats import quantized_fp4, quantized_fp8, quantized_packed, quantized_transposed
from headrace.model.formats.quantized_fields import INSTEAD
from headrace.model.formats.quantized_matrix import MatrixSource, Part, Read, Role, Rows
from headrace.model.formats.scheme import Quantization, Scheme
from headrace.model.formats.tensor_file import FLOATS, TensorEntry
from headrace.model.weight import Weight

Entries = Mapping[str, TensorEntry]
Sources = dict[str, TensorEntry | MatrixSource]

# Beside a weight, and not of it: what activations and caches are multiplied with, and sizes that are known.
_UNUSED = (
    ".input_scale", ".input_scale_2", ".input_scale_ub", ".input_zero_point", ".input_global_scale", ".activation_scale",
    ".output_scale", ".output_zero_point", ".prob_output_scale", ".weight_shape",
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale", ".k_zero_point", ".v_zero_point",
    ".kv_cache_scaling_factor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Format:
    roles: Callable[[Scheme, tuple[int, int]], dict[str, Role]]
    reader: Callable[[Scheme, tuple[int, int]], Read]


_FP8 = _Format(quantized_fp8.roles, quantized_fp8.reader)
_FORMATS: Mapping[str, _Format] = MappingProxyType({
    "fp8": _FP8, "int8": _FP8,
    "packed": _Format(quantized_packed.roles, quantized_packed.reader),
    "mxfp4": _Format(quantized_fp4.mxfp4_roles, quantized_fp4.mxfp4_reader),
    "nvfp4": _Format(quantized_fp4.nvfp4_roles, quantized_fp4.nvfp4_reader),
    "awq": _Format(quantized_transposed.awq_roles, quantized_transposed.awq_reader),
    "gptq": _Format(quantized_transposed.gptq_roles, quantized_transposed.gptq_reader),
})  # fmt: skip
# A module that has one of these is quantized, whatever the lists say.
_MARKS = (
    "weight_scale", "weight_scale_inv", "weight_packed", "weight_global_scale", "weight_scale_2", "qweight", "qzeros", "scales",
    "_weight_qdata", "_weight_scale",
)  # fmt: skip


def quantized_sources(
    entries: Entries, quantization: Quantization, matrices: Iterable[tuple[str, tuple[int, int]]]
) -> Sources:  # fmt: skip
    """`entries` with a source for each quantized one of the `matrices` (name and shape of its weight), and without what is
    beside them and not needed.

    Raises CheckpointError that names a tensor that is missing, misshapen or of another type, and for a matrix that is quantized
    although the config says that it is not.
    """
    found: Sources = {name: entry for name, entry in entries.items() if not name.endswith(_UNUSED)}
    keys = {entry.name: name for name, entry in entries.items()}  # a text part's tensors have other names in their file
    for name, shape in matrices:
        module = name.removesuffix(".weight")
        marks = [mark for mark in _MARKS if f"{module}.{mark}" in entries]
        weight = entries.get(name)
        if not marks and (weight is None or weight.encoding.name in FLOATS):
            continue  # missing, or not quantized: the loader says
        first = entries[f"{module}.{marks[0]}"] if marks else entries[name]
        names = {module, first.name.rpartition(".")[0]}
        scheme = quantization.scheme_of(*names)
        if scheme is None or quantization.ignores(*names):
            listed = "is among those that are not quantized" if scheme else "is in none of the groups that are"
            raise CheckpointError(f"{first.file}: there is a tensor {first.name!r}, but by config.json {module!r} {listed}")
        source = _source(module, shape, scheme, entries, first)
        for part in source.parts.values():
            del found[keys[part.entry.name]]
        found[name] = source
    return found


def _source(module: str, shape: tuple[int, int], scheme: Scheme, entries: Entries, first: TensorEntry) -> MatrixSource:
    if not scheme.bits:
        scheme = _by_shapes(module, shape, scheme, entries)
    format_, parts = _FORMATS.get(scheme.format), {}
    if format_ is None:
        raise CheckpointError(f"config.json: {module!r} is quantized by {scheme.format!r}, which is not supported: {INSTEAD}")
    for role, wanted in format_.roles(scheme, shape).items():
        if (part := _part(module, wanted, entries, first)) is not None:
            parts[role] = part
    return MatrixSource(f"{module}.weight", shape, parts, _checked(format_.reader(scheme, shape), scheme), scheme=scheme)


def _part(module: str, role: Role, entries: Entries, first: TensorEntry) -> Part | None:
    entry = next((entries[name] for suffix in role.suffixes if (name := f"{module}.{suffix}") in entries), None)
    if entry is None:
        if role.optional:
            return None
        raise CheckpointError(f"{first.file}: the tensor {f'{module}.{role.suffixes[0]}'!r} is missing beside {first.name!r}")
    for encodings, shape, rows in role.allowed:
        if entry.shape == shape and entry.encoding.name in encodings:
            return Part(entry, rows)
    wanted = " or ".join(f"{'/'.join(encodings)} {shape}" for encodings, shape, _ in role.allowed)
    held = f"is {entry.encoding.name} of shape {entry.shape}"
    raise CheckpointError(f"{entry.file}: the tensor {entry.name!r} {held}, quantization_config and config ask for {wanted}")


def _by_shapes(module: str, shape: tuple[int, int], scheme: Scheme, entries: Entries) -> Scheme:
    """Of a GPTQ file in which modules differ: bits and group are what the sizes of its tensors say."""
    columns = shape[1]
    data, scales = entries.get(f"{module}.qweight"), entries.get(f"{module}.scales")
    bits = 32 * data.num_rows // columns if data is not None else 4
    groups = scales.num_rows if scales is not None else 1
    if bits not in (4, 8):
        name = data.name if data is not None else module
        raise CheckpointError(f"{name!r} has {bits} bits, and 4 and 8 alone are supported: use a version with these")
    group = (scheme.tile or (1, 0))[1]
    if groups != (-(-columns // group) if group else 1):
        group = columns // groups if groups > 1 else 0
    return replace(scheme, bits=bits, tile=(1, group))


def _checked(read: Read, scheme: Scheme) -> Read:
    def checked(parts: Mapping[str, Rows], count: int) -> Weight:
        if "order" in parts:
            quantized_transposed.check_order(parts["order"], scheme.tile[1] if scheme.tile else 0)
        return read(parts, count)

    return checked
