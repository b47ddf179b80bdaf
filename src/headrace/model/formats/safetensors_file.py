"""Finds the tensors of a safetensors checkpoint, single or sharded, and checks their places against the file sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.formats.tensor_file import Encoding, TensorEntry, num_elements, overlap

_MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_ENCODINGS: dict[str, Encoding] = {
    name: Encoding(name, 1, size)
    for name, size in (
        ("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2), ("I64", 8), ("I32", 4), ("U8", 1), ("I8", 1), ("BOOL", 1),
        ("F8_E4M3", 1), ("F8_E8M0", 1),
    )
}  # fmt: skip


LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise CheckpointError if a file starts as the pointers do that a clone without Git LFS leaves in the files' places."""
    if start.startswith(LFS_POINTER):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError naming the file."""
    try:
        raw = path.read_bytes()
        refuse_lfs_pointer(path, raw)
        value = json.loads(raw.decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def find_tensors(directory: Path) -> dict[str, TensorEntry]:
    """All tensors of the checkpoint in `directory`: of the shards that the index names, of model.safetensors, or of the
    only *.safetensors file. Raises CheckpointError."""
    index_path = directory / INDEX_NAME
    if index_path.exists():
        return _sharded(directory, index_path)
    if (directory / SINGLE_NAME).exists():
        return read_header(directory / SINGLE_NAME)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    if files:
        raise CheckpointError(f"{directory} has {len(files)} *.safetensors files but no {INDEX_NAME}")
    others = sorted(p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in directory.glob(pattern))
    hint = f" ({others[0]} is pickled, which Headrace never loads)" if others else ""
    raise CheckpointError(f"{directory} has no {SINGLE_NAME} and no {INDEX_NAME}{hint}")


def _sharded(directory: Path, index_path: Path) -> dict[str, TensorEntry]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: no weight_map")
    headers: dict[str, dict[str, TensorEntry]] = {}
    entries: dict[str, TensorEntry] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index_path}: tensor {name!r} is in {shard!r}, no safetensors file's name")
        if shard not in headers:
            if not (directory / shard).exists():
                raise CheckpointError(f"{directory / shard} does not exist, but {INDEX_NAME} names it for {name!r}")
            headers[shard] = read_header(directory / shard)
        if name not in headers[shard]:
            raise CheckpointError(f"{directory / shard}: no tensor {name!r}, though {INDEX_NAME} says so")
        entries[name] = headers[shard][name]
    return entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises CheckpointError if a size or an offset does not fit the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
            refuse_lfs_pointer(path, head)
            header_bytes = int.from_bytes(head[:8], "little")
            if size < 8 or header_bytes > min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{path}: truncated or not safetensors: {size} bytes, header of {header_bytes}")
            file.seek(8)
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    entries = {name: _entry(path, name, info, start, size) for name, info in header.items()}
    if shared := overlap(entries.values()):
        raise CheckpointError(f"{path}: {shared}")
    return entries


def _entry(path: Path, name: str, info: Any, start: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name!r} has no dtype, shape and data_offsets") from error
    if any(type(n) is not int or not 0 <= n < 1 << 48 for n in (*shape, begin, end)) or len(shape) > 8:
        raise CheckpointError(f"{path}: tensor {name!r} has shape {shape} and offsets {begin!r}, {end!r}")
    encoding = _ENCODINGS.get(dtype) if isinstance(dtype, str) else None
    if encoding is None:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype!r} ({', '.join(_ENCODINGS)} are supported)")
    if end - begin != num_elements(shape) * encoding.block_bytes:
        raise CheckpointError(f"{path}: tensor {name!r}: {end - begin} bytes do not hold shape {shape} of {dtype}")
    if start + end > size:
        raise CheckpointError(f"{path}: truncated: tensor {name!r} ends at byte {start + end} of {size}")
    return TensorEntry(name, shape, encoding, path, start + begin, end - begin)
