"""Rows of a checkpoint to the packed matrices of a native model: as they are stored where the step multiplies that, in threads
that read, convert and pack a chunk at a time, so that the weights are never in memory twice."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.errors import CapacityError
from headrace.model.checkpoint import Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.families import weight_plan
from headrace.model.formats.blocks import decode_rows
from headrace.model.formats.quantized_matrix import MatrixSource
from headrace.model.formats.tensor_file import Encoding, TensorEntry, head_order
from headrace.model.loader import checked_plan, load_tensors, random_tensors, with_quantized
from headrace.model.narrow_loader import Piece, Source, pieces_of
from headrace.model.rope_layout import in_halves
from headrace.model.streaming import Chunk, ChunkQueue, ChunkWorker, chunks_of, load_chunks
from headrace.model.weight import dequantized
from headrace.model.weight_names import WeightSpec
from headrace.native.load import Library
from headrace.native.narrow import Rounded, blocks_of, encoding_of, halves_of
from headrace.native.precision import FLOATS, STORED, Precision

logger = logging.getLogger(__name__)
STRIP = 16  # rows that are packed together
_CHUNK = 1 << 19  # bytes read at once, and at least a strip
_MATRICES = MappingProxyType({"qkv": "QKV", "o": "O", "gate_up": "GATE_UP", "down": "DOWN"})
_DTYPES = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a target of the weight plan goes: the layer, or -1 for the whole model, and the native name."""

    layer: int
    name: str

    @classmethod
    def of(cls, target: str, tied: bool) -> Place:
        """`tied`: the embedding is the head, too."""
        if target.startswith("layers."):
            _, index, name = target.split(".")
            return cls(int(index), _MATRICES.get(name, name.upper()))
        return cls(-1, {"embedding": "HEAD" if tied else "EMBEDDING", "lm_head": "HEAD"}.get(target, target.upper()))


class Kept(NamedTuple):
    """A tensor of the file, or several that make up a matrix."""

    source: Source
    first_row: int  # of the target
    rows: int
    encoding: str
    format: str


class Weights:
    """A checkpoint's weights, in the formats that they will be kept in; nothing is read before `load`.

    Raises CheckpointError as load_model does.
    """

    def __init__(self, source: Checkpoint, config: ModelConfig, precision: Precision, library: Library):
        self.source, self.config, self.precision, self.library = source, config, precision, library
        plan = weight_plan(config)
        dummy = source.format == "dummy"
        found: dict[str, Source] = {**_dummy_entries(source, config, plan)} if dummy else with_quantized(source, plan)
        self.entries = {name: in_halves(entry, name, config) for name, entry in found.items()}
        plan = checked_plan(source, plan, self.entries)
        head = next((spec for spec in plan if spec.target == "lm_head"), None)
        if head is not None and source.format != "dummy" and _same_bytes(*(self._first(s) for s in (plan[0], head))):
            plan.remove(head)  # tied, but written out twice
            head = None
        self.tied = head is None
        self.matrices = [spec for spec in plan if len(spec.shape) == 2]
        self.vectors = [spec for spec in plan if len(spec.shape) == 1]

        self.kept = {spec.target: list(self._kept(spec)) for spec in self.matrices}

    def _first(self, spec: WeightSpec) -> Source:
        return self.entries[spec.sources[0][0]]

    def _kept(self, spec: WeightSpec) -> Iterator[Kept]:
        """What makes up a matrix, each with the format that it is kept in."""
        row = 0
        for name, rows in spec.sources:
            encoding = encoding_of(self.entries[name])
            format_ = self.precision.format_of(encoding, Place.of(spec.target, self.tied).name == "EMBEDDING")
            yield Kept(self.entries[name], row, rows, encoding, format_)
            row += rows

    @property
    def num_bytes(self) -> int:
        """Of the matrices, packed."""
        return sum(map(self._bytes_of, self.matrices))

    @property
    def unread_bytes(self) -> int:
        """Of an embedding that is no head: a step reads a few rows of it."""
        return sum(self._bytes_of(spec) for spec in self.matrices if Place.of(spec.target, self.tied).name == "EMBEDDING")

    def _bytes_of(self, spec: WeightSpec) -> int:
        extension, columns = self.library.extension, spec.shape[1]
        packed = [(extension.Format[kept.format], kept.rows, columns) for kept in self.kept[spec.target]]
        return sum(extension.packed_bytes(*of) for of in packed)

    def describe(self) -> str:
        """The formats of the matrices, those of most bytes first."""
        sizes: dict[str, int] = {}
        for spec in self.matrices:
            for kept in self.kept[spec.target]:
                sizes[kept.format] = sizes.get(kept.format, 0) + kept.rows * spec.shape[1]
        return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))

    def load(self, model: Any, threads: int, progress: bool = False) -> None:
        """Add every matrix to `model`, a native Model, and fill it."""
        extension = self.library.extension
        unknown = set()
        try:
            for spec in self.matrices:
                place = Place.of(spec.target, self.tied)
                unknown |= {kept.encoding for kept in self.kept[spec.target] if kept.encoding not in STORED}
                parts = [(extension.Format[kept.format], kept.rows) for kept in self.kept[spec.target]]
                model.add_matrix(place.layer, extension.MatrixName[place.name], parts, spec.shape[1])
        except MemoryError as error:
            raise CapacityError(f"the weights of {self.num_bytes / 2**30:.2f} GiB cannot be allocated") from error
        if unknown and self.precision.weights == "stored":
            names = ", ".join(sorted(unknown))
            logger.warning("the native step has no product for %s: such weights are kept as float32", names)
        if self.source.format == "dummy":
            self._load_random(model)
            return
        plain = {name: entry for name, entry in self.entries.items() if isinstance(entry, TensorEntry)}
        wholes = [spec for spec in self.matrices if all(name in plain for name, _ in spec.sources)]
        narrow = [spec for spec in self.matrices if spec not in wholes]
        chunks = chunks_of(wholes, plain, _CHUNK, STRIP), pieces_of(narrow, self.entries, _CHUNK, STRIP)
        queue, rounded = ChunkQueue(chain(*chunks)), Rounded()
        load_chunks(queue, lambda: _Packer(model, self, queue.size, rounded), min(threads, 8), progress)
        if str(rounded):
            what = "rounded to float16, by 1/2048 of each at most: --dtype float32 keeps them"
            logger.warning("%s are no float16 numbers and are %s", rounded, what)
        vectors = load_tensors(self.vectors, plain, torch.float32, torch.device("cpu"))
        self._set_vectors(model, vectors.items())

    def _set_vectors(self, model: Any, vectors: Iterable[tuple[str, Tensor]]) -> None:
        for target, vector in vectors:
            place = Place.of(target, self.tied)
            if "NORM" in place.name:
                vector = vector + self.config.norm_offset
            model.set_vector(place.layer, self.library.extension.VectorName[place.name], vector.numpy())

    def _load_random(self, model: Any) -> None:
        """Weights that were never trained, in the floats of the config and then converted as those of a file are."""
        dtype = _DTYPES[self.kept[self.matrices[0].target][0].encoding]
        specs = {spec.target: spec for spec in self.matrices}
        for target, tensor in random_tensors(self.source, self.config, weight_plan(self.config), dtype, torch.device("cpu")):
            if (spec := specs.get(target)) is None:
                self._set_vectors(model, [(target, tensor.float())])
                continue
            for kept in self.kept[spec.target]:
                rows = tensor[kept.first_row : kept.first_row + kept.rows]
                self.fill(model, target, kept.first_row, _converted(rows, kept.format, self.library))

    def fill(self, model: Any, target: str, row: int, raw: np.ndarray) -> None:
        place = Place.of(target, self.tied)
        model.fill(place.layer, self.library.extension.MatrixName[place.name], row, raw)


class _Packer(ChunkWorker):
    """Converts chunks to the formats that their matrices have, and has them packed."""

    def __init__(self, model: Any, weights: Weights, size: int, rounded: Rounded):
        super().__init__(size)
        self._model, self._weights, self._rounded = model, weights, rounded
        self._kept = {kept.source.name: kept for found in weights.kept.values() for kept in found}

    def put(self, chunk: Chunk | Piece, staged: Tensor) -> None:
        if isinstance(chunk, Piece):
            kept = self._kept[chunk.source.parts["data"].entry.name if chunk.source.scheme is None else chunk.source.name]
            raw, row = self._narrow(chunk, kept, staged), kept.first_row + chunk.read.start
        else:
            kept, row = self._kept[chunk.entry.name], chunk.target_row
            raw = rows_in_format(chunk.entry, staged, chunk.num_rows, kept.format, self._weights.library)
        self._weights.fill(self._model, chunk.target, row, raw)

    def _narrow(self, piece: Piece, kept: Kept, staged: Tensor) -> np.ndarray:
        weight = piece.weight(staged)
        if kept.encoding in FLOATS:  # beside what is narrow
            return _converted(weight.data, kept.format, self._weights.library)
        if kept.format == "F16":
            return _bytes(halves_of(weight, kept.source.name, self._rounded))
        if kept.format in FLOATS:
            return _converted(dequantized(weight, torch.float32), kept.format, self._weights.library)
        return blocks_of(weight, kept.format, kept.source.name, self._rounded)


def rows_in_format(entry: TensorEntry, staged: Tensor, num_rows: int, format_: str, library: Library) -> np.ndarray:
    """`num_rows` rows of a tensor, whole heads where its rotary halves are interleaved, as rows of `format_`:
    uint8 [num_rows, bytes]."""
    encoding = entry.encoding.name
    if STORED.get(encoding) != format_ or entry.shift:
        return _converted(decode_rows(entry, staged, num_rows), format_, library)
    raw = staged.numpy().reshape(num_rows, entry.row_bytes)
    if entry.head_dim:
        heads = raw.reshape(num_rows // entry.head_dim, entry.head_dim, entry.row_bytes)
        raw = np.ascontiguousarray(heads[:, head_order(entry.head_dim, entry.rotary)]).reshape(num_rows, entry.row_bytes)
    return raw if encoding == format_ else _RECODED[encoding](raw)


def _converted(rows: Tensor, format_: str, library: Library) -> np.ndarray:
    """Rows of floats [n, inputs] in another format."""
    if format_ in FLOATS:
        return _bytes(rows.to(_DTYPES[format_]))
    if rows.dtype not in _DTYPES.values():
        rows = rows.float()
    extension: ModuleType = library.extension
    source = next(name for name, dtype in _DTYPES.items() if dtype == rows.dtype)
    out = np.empty((len(rows), extension.raw_row_bytes(extension.Format[format_], rows.shape[1])), np.uint8)
    extension.quantize_rows(
        str(library.path), extension.Format[source], _bytes(rows).reshape(-1), rows.shape[1], extension.Format[format_],
        out.reshape(-1),
    )  # fmt: skip
    return out


def _bytes(rows: Tensor) -> np.ndarray:
    return rows.contiguous().view(torch.uint8).numpy()


def _q8_0(scales: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Rows of Q8_0 of scales [n, blocks, 2] bytes and int8 values [n, blocks, 32]."""
    return np.concatenate([scales, values.view(np.uint8)], axis=2).reshape(len(scales), -1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes [n, blocks, 16] -> [n, blocks, 32]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=2)


def _q5_0_as_q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(len(raw), -1, 22)
    fifth = np.unpackbits(blocks[:, :, 2:6], axis=2, bitorder="little") << 4
    return _q8_0(blocks[:, :, :2], (_nibbles(blocks[:, :, 6:]) | fifth).astype(np.int8) - np.int8(16))


_IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl_as_q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(len(raw), -1, 18)
    return _q8_0(blocks[:, :, :2], _IQ4_NL_VALUES[_nibbles(blocks[:, :, 2:])])


# Of encodings whose values another format holds as well.
_RECODED = MappingProxyType({"Q5_0": _q5_0_as_q8_0, "IQ4_NL": _iq4_nl_as_q8_0})


def _dummy_entries(source: Checkpoint, config: ModelConfig, plan: list[WeightSpec]) -> dict[str, TensorEntry]:
    """What a file of a dummy checkpoint would hold: floats of the config's dtype."""
    name, item = {"float32": ("F32", 4), "float16": ("F16", 2)}.get(config.dtype, ("BF16", 2))
    tied = source.ties_head(config.family)
    return {
        tensor: TensorEntry(tensor, (rows, *spec.shape[1:]), Encoding(name, 1, item), source.path, 0, 0)
        for spec in plan
        if not (spec.optional and tied)
        for tensor, rows in spec.sources
    }


def _same_bytes(one: Source, other: Source) -> bool:
    """Whether two tensors of files hold the same: the first row tells nearly always."""
    if isinstance(one, MatrixSource) or isinstance(other, MatrixSource):
        return False
    if (one.shape, one.encoding, one.shift) != (other.shape, other.encoding, other.shift):
        return False
    with one.file.open("rb", buffering=0) as first, other.file.open("rb", buffering=0) as second:
        first.seek(one.offset)
        second.seek(other.offset)
        left, size = one.num_bytes, one.row_bytes
        while left > 0:
            a, b = first.read(min(size, left)), second.read(min(size, left))
            if a != b or not a:
                return False
            left, size = left - len(a), _CHUNK
    return True
