"""Experts as gpt-oss's files have them: all of a layer in one tensor, gate and up rows in turns; floats as [in, out], or MXFP4.

MXFP4 is two tensors, blocks [experts, out, in / 32, 16] of two codes of e2m1 a byte, the low one first, and scales
[experts, out, in / 32], powers of two for 32 inputs each. An expert at a time is put into the order of `Weight`, so that
nothing is there twice but one layer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from headrace.errors import CheckpointError
from headrace.model.formats.blocks import powers_of_two
from headrace.model.formats.quantized import quantization_of
from headrace.model.formats.quantized_matrix import MatrixSource, Part, Rows, nibbles
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.narrow import of_filled_e2m1
from headrace.model.weight import Weight
from headrace.model.weight_names import PART, WeightSpec

GROUP = 32  # inputs with one scale
MATRICES = ("experts_gate_up", "experts_down")


def gpt_oss_sources(
    entries: Mapping[str, TensorEntry], plan: Sequence[WeightSpec]
) -> dict[str, TensorEntry | MatrixSource]:  # fmt: skip
    """`entries`, in which each expert of `plan` has its own matrices and biases as the plan wants them.

    Raises CheckpointError that names a tensor of MXFP4 that is missing or misshapen.
    """
    found: dict[str, TensorEntry | MatrixSource] = dict(entries)
    for spec in plan:
        kind, interleaved = spec.target.rpartition(".")[2], "gate_up" in spec.target
        if not kind.startswith("experts_"):
            continue
        for name, rows in spec.sources:
            match = PART.fullmatch(name)
            assert match is not None
            entry, whole, number = entries.get(name), match[1], int(match[2])
            if entry is None and kind in MATRICES and (f"{whole}_blocks" in entries or f"{whole}_scales" in entries):
                sizes = (len(spec.sources), rows, spec.shape[1])
                found[name] = _mxfp4(entries, name, whole, number, sizes, interleaved)
                found.pop(f"{whole}_blocks", None)
                found.pop(f"{whole}_scales", None)
            elif entry is not None and kind not in MATRICES:
                found[name] = replace(entry, head_dim=rows) if interleaved and entry.shape == (rows,) else entry
            elif entry is not None:
                if entry.shape != (wanted := (spec.shape[1], rows)):
                    raise CheckpointError(
                        f"{entry.file}: the tensor {whole!r} has experts of shape {entry.shape}, the config asks for {wanted}"
                    )
                found[name] = replace(entry, shape=wanted[::-1], transposed=True, head_dim=rows if interleaved else 0)
    return found


def _mxfp4(
    entries: Mapping[str, TensorEntry], name: str, whole: str, number: int, sizes: tuple[int, int, int], interleaved: bool
) -> MatrixSource:  # fmt: skip
    """Expert `number` of so many, of a matrix [out, in]: `sizes`."""
    count, rows, columns = sizes
    if columns % GROUP:
        raise CheckpointError(f"config.json: {columns} inputs of {whole!r} are no multiple of {GROUP}, as MXFP4 has them")
    groups = columns // GROUP
    parts = {}
    for role, suffix, shape, encodings in (
        ("data", "blocks", (count, rows, groups, GROUP // 2), ("U8",)),
        ("scale", "scales", (count, rows, groups), ("U8", "F8_E8M0")),
    ):
        entry = entries.get(f"{whole}_{suffix}")
        if entry is None:
            other = {"blocks": "scales", "scales": "blocks"}[suffix]
            beside = entries[f"{whole}_{other}"]
            raise CheckpointError(f"{beside.file}: the tensor '{whole}_{suffix}' is missing beside '{whole}_{other}'")
        if entry.shape != shape or entry.encoding.name not in encodings:
            raise CheckpointError(
                f"{entry.file}: the tensor {entry.name!r} is {entry.encoding.name} of shape {entry.shape}, the config asks for "
                f"{'/'.join(encodings)} {shape}"
            )
        size = entry.row_bytes
        own = replace(entry, shape=(rows, size // rows), offset=entry.offset + number * size, num_bytes=size)
        parts[role] = Part(own)
    return MatrixSource(name, (rows, columns), parts, partial(_read, interleaved), heads=rows if interleaved else 0)


def _read(interleaved: bool, parts: Mapping[str, Rows], count: int) -> Weight:
    """w = e2m1 * 2^(scale - 127)."""
    codes, scales = nibbles(parts["data"].decoded()), powers_of_two(parts["scale"].raw.view(count, -1))
    if interleaved:
        codes, scales = (rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) for rows in (codes, scales))
    return of_filled_e2m1(codes, scales, GROUP)


def random_mxfp4(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> Weight:
    """A matrix that was never trained, in MXFP4: of about the deviation that random floats get."""
    rows, columns = shape
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device, generator=generator)
    scales = torch.full((rows, columns // GROUP), 2.0**-7, device=device)
    return of_filled_e2m1(nibbles(codes), scales, GROUP)


def is_random_mxfp4(config: Mapping[str, Any], spec: WeightSpec) -> bool:
    """Whether a file with this config.json would have the weight in MXFP4."""
    quantization = quantization_of(config)
    return quantization is not None and quantization.method == "mxfp4" and spec.target.rpartition(".")[2] in MATRICES
