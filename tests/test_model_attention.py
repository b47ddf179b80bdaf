"""The torch attention backend against attention written out row by row in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.attention.torch_backend import TorchAttention
from headrace.cache import fp8
from headrace.cache.kv_cache import KVCache
from headrace.cache.memory import zeros
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig, RopeConfig

DIM = 8


class Case:
    """Sequences (rows, context) with random keys in randomly placed blocks; everything else in the cache is NaN."""

    def __init__(
        self, shapes: list[tuple[int, int]], kv_heads: int, group: int, block_size: int, seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        self.shapes = sorted(shapes, key=lambda s: s[0] != 1)
        config = ModelConfig(
            family="llama", vocab_size=8, hidden_size=DIM, num_layers=1, num_heads=kv_heads * group,
            num_kv_heads=kv_heads, head_dim=DIM, intermediate_size=8, max_position=512, rope=RopeConfig(1e4, DIM),
        )  # fmt: skip
        blocks = [-(-context // block_size) for _, context in self.shapes]
        self.kv = KVCache(config, sum(blocks) + 2, block_size, dtype, torch.device("cpu"))
        self.kv.k[0].fill_(math.nan)
        self.kv.v[0].fill_(math.nan)
        free = list(range(sum(blocks) + 2))
        random.Random(seed).shuffle(free)
        g = torch.Generator().manual_seed(seed)
        tables = torch.full((len(shapes) + 3, max(blocks)), 10**6, dtype=torch.int32)  # unused entries lead nowhere
        slots = random.Random(seed + 1).sample(range(len(shapes) + 3), len(shapes))
        self.keys, self.values = [], []
        for slot, count, (_, context) in zip(slots, blocks, self.shapes, strict=True):
            mine = torch.tensor([free.pop() for _ in range(count)])
            tables[slot, :count] = mine
            at = (mine[:, None] * block_size + torch.arange(block_size)).flatten()[:context]
            k, v = torch.randn(2, context, kv_heads, DIM, generator=g)
            self.kv.write(0, k, v, at)
            if dtype == fp8.DTYPE:
                k, v = (fp8.dequantize(*fp8.quantize(x)) for x in (k, v))
            self.keys.append(k)
            self.values.append(v)
        counts = [rows for rows, _ in self.shapes]
        starts = torch.tensor([0, *counts]).cumsum(0)
        self.q = torch.randn(sum(counts), kv_heads * group, DIM, generator=g)
        self.batch = ForwardBatch(
            token_ids=torch.zeros(sum(counts), dtype=torch.int32),
            positions=torch.cat([torch.arange(c - r, c) for r, c in self.shapes]).int(),
            slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
            block_tables=tables,
            seq_slots=torch.tensor(slots, dtype=torch.int32),
            query_start=starts.int(),
            seq_lens=torch.tensor([c for _, c in self.shapes], dtype=torch.int32),
            num_decodes=sum(r == 1 for r in counts),
            query_lens=counts,
            context_lens=[c for _, c in self.shapes],
        )

    def run(self, backend: TorchAttention, **options) -> Tensor:
        backend.begin(self.batch, self.kv)
        return backend.attend(self.q, 0, self.kv, self.batch, **options)

    def expected(self, *, scale: float, window: int, softcap: float, sinks: Tensor | None = None) -> Tensor:
        rows, group = [], self.q.shape[1] // self.keys[0].shape[1]
        for (count, context), k, v in zip(self.shapes, self.keys, self.values, strict=True):
            for position in range(context - count, context):
                first = max(0, position - window + 1) if window else 0
                q = self.q[len(rows)].double()
                ks = k[first : position + 1].double().repeat_interleave(group, 1)
                vs = v[first : position + 1].double().repeat_interleave(group, 1)
                scores = torch.einsum("hd,thd->ht", q, ks) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.softmax(-1)
                if sinks is not None:
                    weights *= torch.sigmoid(scores.logsumexp(1) - sinks.double())[:, None]
                rows.append(torch.einsum("ht,thd->hd", weights, vs).flatten())
        return torch.stack(rows).float()


shape = st.integers(1, 40).flatmap(lambda context: st.tuples(st.sampled_from([1, 1, 2, 7, 40]), st.just(context)))


@settings(max_examples=60)
@given(
    shapes=st.lists(shape.map(lambda s: (min(s), s[1])), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3), group=st.integers(1, 4), block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.sampled_from([0, 1, 5, 17]), softcap=st.sampled_from([0.0, 2.0]), sinks=st.sampled_from([None, -30.0, 0.5, 30.0]),
    scratch=st.sampled_from([1, 3000, 1 << 20]), tile=st.sampled_from([3, 256]), dtype=st.sampled_from([torch.float32, fp8.DTYPE]),
)  # fmt: skip
def test_equals_the_definition(shapes, kv_heads, group, block_size, window, softcap, sinks, scratch, tile, dtype):
    case = Case(shapes, kv_heads, group, block_size, dtype=dtype)
    of_heads = None if sinks is None else sinks + torch.arange(kv_heads * group, dtype=torch.float32)
    options = {"scale": 0.4, "window": window, "softcap": softcap, "sinks": of_heads}
    got = case.run(TorchAttention(scratch, tile), **options)
    torch.testing.assert_close(got, case.expected(**options), rtol=1e-5, atol=1e-5)


def test_lengths_far_apart():
    """Several groups of decodes, out of order, with prefills behind them."""
    case = Case([(1, n) for n in (300, 2, 290, 7, 150, 301)] + [(90, 200), (5, 5)], 2, 3, 16)
    options = {"scale": 0.3, "window": 0, "softcap": 0.0}
    torch.testing.assert_close(case.run(TorchAttention(), **options), case.expected(**options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, fp8.DTYPE])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_broken_neighbour_stays_alone(softcap, dtype):
    """NaN in one sequence's keys and values does not reach the others, padded or not."""
    case = Case([(1, 30), (1, 33), (4, 9)], 1, 2, 4, dtype=dtype)
    options = {"scale": 0.3, "window": 0, "softcap": softcap}
    clean = case.run(TorchAttention(), **options)
    table = case.batch.block_tables[case.batch.seq_slots[1].long()]
    case.kv.k[0][table.long()] = math.nan
    case.kv.v[0][table.long()] = math.nan
    broken = case.run(TorchAttention(), **options)
    assert broken[1].isnan().all()
    others = [0, 2, 3, 4, 5]
    torch.testing.assert_close(broken[others], clean[others])


def test_memory_is_bounded():
    """What is gathered at once stays below scratch_bytes however many sequences decode together."""
    backend = TorchAttention(scratch_bytes=20_000)
    case = Case([(1, 50 + n) for n in range(40)], 2, 2, 16)
    case.run(backend, scale=0.3, window=0, softcap=0.0)
    assert max(t.numel() * t.itemsize for t in backend._scratch.values()) <= 20_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cache_starts_as_zeros(dtype, device):
    found = zeros((2, 3, 4), dtype, torch.device(device))
    assert (found.shape, found.dtype, found.device.type) == ((2, 3, 4), dtype, device)
    assert device == "meta" or not found.any()
