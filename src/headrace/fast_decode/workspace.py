"""What kernels of a fused decode step leave to each other: buffers for all its steps, of which one uses the first rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.products import Tile, num_splits
from headrace.fast_decode.rounded_tile import PAIR_ROWS
from headrace.fast_decode.skinny_gemm import row_block
from headrace.fast_decode.tiles import StepTiles
from headrace.kernels.split import SplitSpace, num_slots
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import DecoderWeights


class Chunks(NamedTuple):
    """Sizes of activations in FP8, [chunks, rows] each; None: they are in the model's numbers. `normed`: of what qkv reads."""

    normed: Tensor | None
    normed_of_o: Tensor | None
    attended: Tensor | None
    inner: Tensor | None


NO_CHUNKS = Chunks(None, None, None, None)


class Workspace:
    """Of up to `rows` rows by the tiles of `steps`, (rows, tiles) of each; `row_splits`: at most so many programs of attention
    for all rows together; `rounds`: activations between products may be FP8."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, rows: int, steps: Sequence[tuple[int, StepTiles]], row_splits: int,
        logits_dtype: torch.dtype, device: torch.device, rounds: bool,
    ):  # fmt: skip
        self.config, hidden = config, config.hidden_size
        residuals = [(n, tile) for n, step in steps for tile in (step.o, step.down)]
        column_tiles = max(-(-hidden // tile.block_n) for _, tile in residuals)
        dtype, f32 = weights.embedding.dtype, torch.float32

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.residual = empty(rows, hidden, dtype=f32)
        self.normed = empty(rows, hidden)
        self.sumsq_o, self.sumsq_down = (empty(rows * column_tiles, dtype=f32) for _ in range(2))
        slabs = max(num_splits(step.qkv) for _, step in steps)
        self.qkv = empty(slabs * rows * max(layer.qkv.shape[0] for layer in weights.layers), dtype=f32)
        parts = 0 if config.norm_place == "pre" else max(num_splits(tile) for _, tile in residuals)
        self.parts = empty(parts * rows * hidden, dtype=f32)  # of a product whose sum is normed
        self.attended = empty(rows, config.q_size)
        self.inner = empty(rows, config.intermediate_size)
        widths = (hidden, config.q_size, config.intermediate_size) if rounds else (0, 0, 0)
        codes = max(rows, 2 * min(rows, PAIR_ROWS))
        self.rounded = tuple(empty(codes * width, dtype=torch.float8_e4m3fn) for width in widths)
        self.sizes = tuple(empty(width // 64, row_block(rows), dtype=f32) for width in widths)
        self.logits = empty(rows, weights.lm_head.shape[0], dtype=logits_dtype)
        split = [(n, tile) for n, tile in residuals if not isinstance(tile, GemvTile) and tile.splits > 1]
        sums = max(num_slots(rows), row_splits) * config.num_heads
        self.space = SplitSpace(  # of all kernels: they run in order
            max([sums * config.head_dim, *(tile.partial_elements(n, hidden) for n, tile in split)]),
            max([rows * config.num_heads, *(tile.row_tiles(n) * -(-hidden // tile.block_n) for n, tile in split)]),
            device, lse=sums,
        )  # fmt: skip

    @property
    def tensors(self) -> list[Tensor]:
        own = [t for t in vars(self).values() if isinstance(t, Tensor)]
        return [*own, *self.rounded, *self.sizes, *self.space.tensors]

    def codes(self, rows: int) -> list[Tensor]:
        """Where activations in FP8 lie, [rows, width] or of pairs [2, rows, width]: normed, attended, inside the MLP."""
        config, apart = self.config, (2,) if rows <= PAIR_ROWS else ()
        widths = (config.hidden_size, config.q_size, config.intermediate_size)
        return [
            buffer[: width * math.prod((*apart, rows))].view(*apart, rows, width)
            for buffer, width in zip(self.rounded, widths, strict=True)
        ]

    def chunks(self, step: StepTiles) -> Chunks:
        """Where their sizes lie, by the columns of the products that make them."""
        normed, attended, inner = self.sizes
        hidden, config = self.config.hidden_size, self.config
        return Chunks(
            normed[: hidden // step.down.block_n], normed[: hidden // step.o.block_n], attended[: config.num_heads],
            inner[: config.intermediate_size // step.gate_up.block_n],
        )  # fmt: skip

    def squares(self, buffer: Tensor, rows: int, tile: Tile) -> Tensor:
        """Where a product with that tile leaves the sums of squares of the residual."""
        tiles = -(-self.config.hidden_size // tile.block_n)
        return buffer[: rows * tiles].view(rows, tiles)
