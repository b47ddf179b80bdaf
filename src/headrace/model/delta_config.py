"""What a model's gated delta nets are: the layers that keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Alike in all layers that are one; `layers` says which. Each key head serves so many neighbouring value heads."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # tokens that the convolution sees, the row's own among them
    layers: tuple[bool, ...]
    by_key_head: bool = False  # in the file the projections' rows are sorted by key head, then by what they are (Qwen3-Next)

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def q_size(self) -> int:
        """Of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def v_size(self) -> int:
        """Of all values, and of what gates them."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """That go through the convolution: queries, keys, values."""
        return 2 * self.q_size + self.v_size

    @property
    def row_elements(self) -> int:
        """Numbers of a row between a layer's normed input and its output: both products' rows, what the convolution gives, and
        what the rows of a chunk become before the state is met."""
        return 2 * self.channels + 4 * self.v_size + self.value_heads * (self.key_dim + 8)

    @property
    def on_cards(self) -> bool:
        """Whether the kernels of a GPU take heads of these sizes."""
        return all(16 <= size <= 128 and size & (size - 1) == 0 for size in (self.key_dim, self.value_dim))

    def part(self, size: int) -> DeltaConfig:
        """Of one of `size` ranks."""
        return replace(self, key_heads=self.key_heads // size, value_heads=self.value_heads // size)
