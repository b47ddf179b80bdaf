"""Loads matrices that are held narrow: read in pieces, repacked once on their device, and cut for a rank.

The numbers are those of the file whatever the pieces, and whatever the number of ranks: quantizing looks at whole rows.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.decoder_weights import MATRICES, DecoderWeights
from headrace.model.formats.quantized_gguf import gguf_source
from headrace.model.formats.quantized_matrix import MatrixSource, Part, Rows
from headrace.model.formats.tensor_file import FLOATS, TensorEntry
from headrace.model.narrow import columns_of, compact, fitted, quantized, rows_of, stacked
from headrace.model.parts import place_in
from headrace.model.streaming import Chunk, ChunkQueue, DeviceWorker, load_chunks
from headrace.model.weight import Weight, dequantized
from headrace.model.weight_names import Slice, WeightSpec, made_kind

_CPU_PIECE = 1 << 22  # bytes
_DEVICE_PIECE = 1 << 25
_ALIGNED = 16  # bytes: where tensors begin in a buffer
Source = TensorEntry | MatrixSource


def narrow_sources(
    plan: Sequence[WeightSpec], entries: Mapping[str, Source], made: str | None, keep: bool
) -> dict[str, Source]:  # fmt: skip
    """`entries`, of which the matrices of `plan` are sources that give narrow weights.

    made: fp8, int8, int4: what becomes of floats (`made_kind`). `keep`: a file's own blocks stay as they are.
    """
    found = dict(entries)
    if made is None and not keep:
        return found
    for spec in plan:
        for name, _ in spec.sources:
            entry = found[name]
            if len(spec.shape) != 2 or spec.exact or spec.wide or isinstance(entry, MatrixSource):
                continue
            if keep and spec.target != "embedding" and (source := gguf_source(entry)) is not None:
                found[name] = source
            elif made is not None and entry.encoding.name in FLOATS and (kind := made_kind(spec, made)) is not None:
                found[name] = MatrixSource(name, entry.shape, {"data": Part(entry)}, partial(_quantize, kind=kind))
    return found


def _quantize(parts: Mapping[str, Rows], count: int, kind: str) -> Weight:
    return quantized(parts["data"].decoded(), kind)


def _floats(parts: Mapping[str, Rows], count: int) -> Weight:
    return Weight(parts["data"].decoded())


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a source, of which some become parts of the target."""

    source: MatrixSource
    read: range  # rows of the source
    parts: tuple[tuple[int, range], ...]  # the `number`th part: which of these, counted from the first one read
    columns: range | None
    target: str

    @property
    def reads(self) -> Iterator[tuple[Chunk, int]]:
        """What is read, and where in the buffer it lies."""
        place = 0
        for part in self.source.parts.values():
            count = part.entry.num_rows
            first, stop = (self.read.start // part.rows, -(-self.read.stop // part.rows)) if part.rows else (0, count)
            chunk = Chunk(part.entry, first, stop - first, self.target, 0)
            yield chunk, place
            place += -(-chunk.num_bytes // _ALIGNED) * _ALIGNED

    @property
    def num_bytes(self) -> int:
        return max(place + -(-chunk.num_bytes // _ALIGNED) * _ALIGNED for chunk, place in self.reads)

    def weight(self, raw: Tensor) -> Weight:
        """Of all that is read, of which there is one part."""
        ((_, weight),) = self.weights(raw)
        return weight

    def weights(self, raw: Tensor) -> list[tuple[int, Weight]]:
        """The parts, from the bytes that were read. Raises CheckpointError for scales that are not finite."""
        read = {
            role: Rows(chunk.entry, raw[place : place + chunk.num_bytes], chunk.num_rows)
            for role, (chunk, place) in zip(self.source.parts, self.reads, strict=True)
        }
        weight = self.source.read(read, len(self.read))
        for scales in (weight.scales, weight.zeros):
            if scales is not None and not torch.isfinite(scales).all():
                raise CheckpointError(f"{self.source.file}: {self.source.scale_names} holds scales that are not finite")
        weight = fitted(weight)
        parts = [(number, rows_of(weight, rows)) for number, rows in self.parts]
        return parts if self.columns is None else [(number, columns_of(part, self.columns)) for number, part in parts]


def load_matrices(
    plan: Sequence[WeightSpec], entries: Mapping[str, Source], dtype: torch.dtype, device: torch.device, keep: bool,
    progress: bool = False,
) -> dict[str, Weight]:  # fmt: skip
    """{target: weight} of a plan of matrices, each of which has a MatrixSource among its sources. Without `keep`, floats in
    `dtype`."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    limit, num_workers = (_CPU_PIECE, min(torch.get_num_threads(), 8)) if device.type == "cpu" else (_DEVICE_PIECE, 4)
    pieces = list(pieces_of(plan, entries, limit))
    weights = _Weights(plan, pieces, dtype, keep)
    queue = ChunkQueue(pieces)
    load_chunks(queue, lambda: _ToWeights(weights, device, queue.size), num_workers, progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return weights.made


def pieces_of(plan: Sequence[WeightSpec], entries: Mapping[str, Source], limit: int, together: int = 1) -> Iterator[Piece]:
    """The plan in pieces of about `limit` bytes, multiples of `together` rows or to a matrix's end. What can be read as a whole
    only is read once, however many parts of it the target has."""
    for spec in plan:
        number, wholes = 0, dict[tuple[str, range | None], list[Piece]]()
        for name, rows, columns in spec.reads:
            source = entries[name]
            if not isinstance(source, MatrixSource):  # beside others that are narrow
                source = MatrixSource(name, source.shape, {"data": Part(source)}, _floats)
            total, unit = source.shape[0], lcm(source.unit, together)
            if unit >= total:
                piece = Piece(source, range(total), ((number, rows),), columns, spec.target)
                wholes.setdefault((name, columns), []).append(piece)
                number += 1
                continue
            of_row = max(1, sum(part.entry.num_bytes for part in source.parts.values()) // total)
            step = max(1, limit // (of_row * unit)) * unit
            for first in range(rows.start // unit * unit, rows.stop, step):
                read = range(first, min(first + step, total, -(-rows.stop // unit) * unit))
                kept = range(max(rows.start - first, 0), min(rows.stop, read.stop) - first)
                yield Piece(source, read, ((number, kept),), columns, spec.target)
                number += 1
        for pieces in wholes.values():
            yield replace(pieces[0], parts=tuple(part for piece in pieces for part in piece.parts))


class _Weights:
    """Weights whose pieces come one by one, from several threads."""

    def __init__(self, plan: Sequence[WeightSpec], pieces: Sequence[Piece], dtype: torch.dtype, keep: bool):
        self.made: dict[str, Weight] = {}
        self._dtypes = {spec.target: torch.float32 if spec.exact else dtype for spec in plan}
        self._keep, self._lock = keep, threading.Lock()
        self._shapes = {spec.target: spec.shape for spec in plan}
        self._wide = {"embedding", *(spec.target for spec in plan if spec.wide or spec.exact)}
        self._parts: dict[str, list[Weight | None]] = {spec.target: [] for spec in plan}
        for piece in pieces:
            self._parts[piece.target] += [None] * len(piece.parts)

    def add(self, piece: Piece, number: int, weight: Weight) -> None:
        if not self._keep or piece.target in self._wide:
            weight = Weight(dequantized(weight, self._dtypes[piece.target])[:, : self._shapes[piece.target][1]])
        with self._lock:
            parts = self._parts[piece.target]
            parts[number] = weight
            whole = [part for part in parts if part is not None]
            if len(whole) < len(parts):
                return
            del self._parts[piece.target]
        made = compact(stacked(whole, self._dtypes[piece.target]), self._shapes[piece.target][0])
        with self._lock:
            self.made[piece.target] = made


class _ToWeights(DeviceWorker):
    """Makes weights of pieces, on the device."""

    def __init__(self, weights: _Weights, device: torch.device, size: int):
        super().__init__(size, device)
        self._weights = weights

    def put(self, chunk: Piece, staged: Tensor) -> None:
        raw = self.to_device(staged)
        for number, weight in chunk.weights(raw.clone() if raw is staged else raw):
            self._weights.add(chunk, number, weight)


def formats_of(weights: DecoderWeights) -> str:
    """In what the layers' matrices and the head are held, those of most numbers first."""
    sizes: Counter[str] = Counter()
    held = [getattr(layer, name) for layer in weights.layers for name in MATRICES]
    held += [w for layer in weights.layers for w in layer.more.values() if isinstance(w, Weight)]
    for weight in [weights.lm_head, *(w for w in held if w.data.numel())]:
        format_ = str(weight.data.dtype).removeprefix("torch.") if weight.kind == "float" else weight.kind
        sizes[format_] += weight.shape[0] * weight.shape[1]
    return ", ".join(format_ for format_, _ in sizes.most_common())


def part_of(whole: Weight, spec: WeightSpec, part: WeightSpec, dtype: torch.dtype) -> Weight:
    """What `part` has of the weight that `spec` describes."""
    if part.slices is None:
        return whole

    def cut(of: Slice) -> Weight:
        first = place_in(spec, of.name, of.rows.start)
        weight = rows_of(whole, range(first, first + len(of.rows)))
        return weight if of.columns is None else columns_of(weight, of.columns)

    return compact(stacked([cut(of) for of in part.slices], dtype), part.shape[0])
