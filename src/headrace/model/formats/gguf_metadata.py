"""Checked reading of a GGUF file's metadata under the prefix of its architecture."""

from __future__ import annotations

import math
import struct
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.formats.gguf import GgufFile


class Metadata:
    """Typed access to the metadata under the architecture's prefix."""

    def __init__(self, gguf: GgufFile):
        self.gguf, self.prefix = gguf, gguf.architecture + "."

    def has_tensor(self, name: str) -> bool:
        return name in self.gguf.tensors

    def get(self, key: str) -> Any:
        return self.gguf.metadata.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None, uneven: bool = False) -> int:
        """A count. Some files give one per layer: taken if all are equal; if they may be `uneven`, the first."""
        value = self.get(key)
        if isinstance(value, list) and value and (uneven or all(v == value[0] for v in value)):
            value = value[0]
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise CheckpointError(f"{self.gguf.path}: {self.prefix + key} is {value!r}, not a positive integer")
        return value

    def integers(self, key: str, layers: int) -> list[int]:
        """A count of each layer."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers or any(isinstance(v, bool) or not isinstance(v, int) or not 0 < v < 1 << 31 for v in values):
            raise CheckpointError(f"{self.gguf.path}: {self.prefix + key} is {value!r}, not a positive integer of each layer")
        return values

    def vector(self, name: str) -> list[float]:
        """What a small tensor holds."""
        gguf = self.gguf
        entry = gguf.tensors.get(name)
        if entry is None or len(entry.shape) != 1 or entry.encoding.name != "F32" or entry.num_rows > 1 << 12:
            raise CheckpointError(f"{gguf.path}: no small F32 vector {name!r}")
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            raw = file.read(entry.num_bytes)
        if len(raw) != entry.num_bytes:
            raise CheckpointError(f"{entry.file}: the file ends inside {name!r}")
        return list(struct.unpack(f"<{entry.num_rows}f", raw))

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.gguf.path}: {self.prefix + key} is {value!r}, not a finite number")
        return float(value)

    def token(self, name: str) -> int | None:
        """The id under `tokenizer.ggml.<name>_token_id`; an id outside of the vocabulary counts as absent."""
        value = self.gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        vocabulary = self.gguf.metadata.get("tokenizer.ggml.tokens")
        size = len(vocabulary) if isinstance(vocabulary, list) else 0
        return value if type(value) is int and 0 <= value < size else None

    def pattern(self, key: str, layers: int, period: int) -> list[bool]:
        """A mark of each layer; a number n, or `period` where nothing is said: of all but every n-th."""
        value = self.get(key)
        if isinstance(value, list) and len(value) == layers and all(isinstance(mark, bool | int) for mark in value):
            return [bool(mark) for mark in value]
        if isinstance(value, list):
            raise CheckpointError(f"{self.gguf.path}: {self.prefix + key} is {value!r}, not a mark of each of {layers} layers")
        period = self.integer(key, period)
        return [(layer + 1) % period != 0 for layer in range(layers)]
