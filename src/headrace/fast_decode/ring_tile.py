"""The tile of ring_gemm.py, apart from the kernel: that needs Gluon, and a card that has what it is for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.fast_decode.skinny_gemm import AllRows, GemmTile
from headrace.fast_decode.wide_gemm import WideTile
from headrace.kernels.launch import capability, next_power_of_2, takes_gluon
from headrace.model.config import ModelConfig
from headrace.model.weight import Weight

MAX_ROWS = 64
CLUSTERS = (2, 4, 8)  # programs that one may have, on any card
KEYS = 64  # of a step of attention: a block of the cache


@dataclass(frozen=True, slots=True)
class RingTile(AllRows):
    """One program's work: block_n columns of all rows over 1 / splits of K, `stages` steps of block_k on their way, as many
    before the wait. `behind`: a step's products run while the next one's tile is waited for; their place is free a step later.
    `cluster`: of up to 32 rows, splits that add to the residual join over distributed shared memory (kernels/cluster.py).
    """

    block_n: int
    block_k: int
    splits: int
    stages: int
    behind: bool = False
    cluster: bool = False

    def __post_init__(self) -> None:
        if self.cluster and self.splits not in CLUSTERS:
            raise ValueError(f"{self.splits} splits are no cluster, which has {CLUSTERS} programs")

    @property
    def num_warps(self) -> int:
        """Four for each 64 columns, the tensor cores' left operand: with fewer, sums of 128 columns leave no registers."""
        return self.block_n // 16

    @property
    def num_stages(self) -> int:
        """Of Triton's own pipeline."""
        return 1

    def otherwise(self, x: Tensor, gated: bool) -> GemmTile | WideTile:
        """What multiplies by the same parts of K where the kernel does not run, and where adapters add to the product."""
        rows, width = x.shape
        if rows > 32 and width % 8 == 0 and runs(x):
            return WideTile(64, self.block_n, 128, self.splits, 4, 4)
        steps = -(-width // (self.block_k * self.splits))
        if gated:
            return GemmTile(self.block_n, self.block_k, 1, 4, 4, touch=2)
        early, stages = (steps, 2) if steps <= 6 else (2, 3)
        return GemmTile(self.block_n, self.block_k, self.splits, 4, stages, prefetch=early)


@dataclass(frozen=True, slots=True)
class RingAttention:
    """attention_ring.py, attention_ring_fp8.py: `ring` tiles of KEYS tokens are on their way, `chunk` of them are weighed
    together; splits are chosen so that about so many programs run. `few`: with contexts of up to so many tokens, where the
    programs that share a sequence are a cluster (a power of two of them, each with `chunk` tiles at least); 0: no cluster."""

    chunk: int
    ring: int
    programs: int
    few: int = 0

    def __post_init__(self) -> None:
        if self.chunk > self.ring:
            raise ValueError(f"of {self.chunk} tiles weighed together {self.ring} are asked for: the others never come")

    @property
    def block_n(self) -> int:
        return KEYS

    def cluster(self, pairs: int) -> int:
        """Its programs, where so many pairs of a sequence and a key-value head are attended to."""
        return min(CLUSTERS[-1], 1 << (max(1, self.programs // pairs).bit_length() - 1))


def ring_attention_suits(config: ModelConfig) -> bool:
    """Whether attention_ring.py is for the heads of a model."""
    group, turned = config.num_heads // config.num_kv_heads, {config.rope_of(i).dim for i in range(config.num_layers)}
    plain = not config.sinks and not config.attn_gate and config.delta is None
    return plain and group <= 8 and config.head_dim in (64, 128, 256) and turned == {config.head_dim}


def fp8_rings_suit(config: ModelConfig) -> bool:
    """Whether attention_ring_fp8.py is for them (with windows and soft caps it has not run on a card)."""
    plain = not config.attn_softcap and not any(config.window(layer) for layer in range(config.num_layers))
    return plain and config.head_dim == 128 and ring_attention_suits(config)


def row_block(rows: int) -> int:
    """Rows of a program's tile when there are `rows`."""
    return max(8, next_power_of_2(rows))


def runs(x: Tensor) -> bool:
    """Whether kernels in Gluon for Hopper run on what x lies on, in bfloat16."""
    return x.dtype == torch.bfloat16 and capability(x.device)[0] == 9 and takes_gluon()


def takes(weight: Weight, x: Tensor) -> bool:
    """Whether ring_gemm.py is for these: rows of whole 16 bytes."""
    return weight.kind == "float" and x.shape[-1] % 8 == 0 and runs(x)
