"""The gated delta rule against its definition, row by row in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headrace.kernels.delta_layer import DeltaLayer
from headrace.kernels.delta_rule import delta_rule_reference
from headrace.kernels.delta_triton import delta_rule_triton, plan_chunks

RING = 4


@dataclass
class Batch:
    positions: Tensor
    seq_slots: Tensor
    query_lens: list[int]
    num_decodes: int
    query_start: Tensor
    seq_lens: Tensor


def make_layer(key_heads: int = 2, value_heads: int = 4, key_dim: int = 16, value_dim: int = 32) -> DeltaLayer:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return DeltaLayer(
        key_heads, value_heads, key_dim, value_dim, torch.randn(channels, RING) * 0.5, torch.randn(value_heads) - 1,
        torch.randn(value_heads), torch.rand(value_dim) + 0.5, 1e-6,
    )  # fmt: skip


def by_definition(layer: DeltaLayer, projected: Tensor, gates: Tensor) -> Tensor:
    """One whole sequence: every number of every row for itself."""
    x, gates, keys = projected.double(), gates.double(), layer.key_heads * layer.key_dim
    group, v_begin, z_begin = layer.value_heads // layer.key_heads, 2 * keys, layer.channels
    rows = torch.nn.functional.pad(x[:, : layer.channels].T[None], (RING - 1, 0))
    mixed = torch.nn.functional.silu(torch.nn.functional.conv1d(rows, layer.conv.double()[:, None], groups=layer.channels)[0].T)
    out = torch.empty(len(x), layer.value_heads * layer.value_dim, dtype=torch.float64)
    for head in range(layer.value_heads):
        state = torch.zeros(layer.key_dim, layer.value_dim, dtype=torch.float64)
        k_at, v_at = head // group * layer.key_dim, head * layer.value_dim
        for t, row in enumerate(mixed):
            q, k = row[k_at : k_at + layer.key_dim], row[keys + k_at : keys + k_at + layer.key_dim]
            q, k = q / math.sqrt(q.dot(q) + 1e-6) / math.sqrt(layer.key_dim), k / math.sqrt(k.dot(k) + 1e-6)
            v = row[v_begin + v_at : v_begin + v_at + layer.value_dim]
            beta, a = gates[t, head].sigmoid(), gates[t, layer.value_heads + head]
            state *= math.exp(-math.exp(layer.decay[head]) * math.log1p(math.exp(a + layer.bias[head])))
            state += torch.outer(k, beta * (v - state.T @ k))
            o = state.T @ q
            z = x[t, z_begin + v_at : z_begin + v_at + layer.value_dim]
            normed = o / math.sqrt(o.square().mean() + layer.eps) * layer.norm.double()
            out[t, v_at : v_at + layer.value_dim] = normed * torch.nn.functional.silu(z)
    return out


class Run:
    """Sequences that go on, step by step; what others left in their slots is not a number."""

    def __init__(self, layer: DeltaLayer, slots: int, rule=delta_rule_reference, dtype: torch.dtype = torch.float32):
        self.layer, self.rule = layer, rule
        self.inputs = torch.full((slots, RING, layer.channels), torch.nan, dtype=dtype)
        self.states = torch.full((slots, layer.value_heads, layer.key_dim, layer.value_dim), torch.nan)
        self.lengths = [0] * slots

    def step(self, work: list[tuple[int, Tensor, Tensor]]) -> list[Tensor]:
        """(slot, next rows, their gates), those of one row first -> out of each."""
        counts = [len(rows) for _, rows, _ in work]
        positions = [self.lengths[slot] + i for (slot, _, _), n in zip(work, counts, strict=True) for i in range(n)]
        for (slot, _, _), count in zip(work, counts, strict=True):
            self.lengths[slot] += count
        batch = Batch(
            torch.tensor(positions, dtype=torch.int32), torch.tensor([slot for slot, _, _ in work], dtype=torch.int32), counts,
            sum(n == 1 for n in counts), torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor([self.lengths[slot] for slot, _, _ in work], dtype=torch.int32),
        )  # fmt: skip
        batch = Batch(**{name: x.to(self.states.device) if isinstance(x, Tensor) else x for name, x in vars(batch).items()})
        rows, gates = (torch.cat([w[i] for w in work]) for i in (1, 2))
        return list(self.rule(self.layer, rows, gates, self.inputs, self.states, batch).split(counts))


def random_rows(layer: DeltaLayer, count: int) -> tuple[Tensor, Tensor]:
    """A part of wider rows, and gates that let much be forgotten, or nothing."""
    width = layer.channels + layer.value_heads * layer.value_dim
    return torch.randn(count, width + 5)[:, :width], torch.randn(count, 2 * layer.value_heads) * 3


def in_triton(layer: DeltaLayer, rows: Tensor, gates: Tensor, inputs: Tensor, states: Tensor, batch: Batch) -> Tensor:
    return delta_rule_triton(layer, rows, gates, inputs, states, batch, plan_chunks(batch))


RULES = {"torch": delta_rule_reference, "triton": in_triton}
CUTS = {"whole": [150], "at edges": [64, 64, 22], "anywhere": [1, 62, 1, 1, 70, 1, 14], "few at a time": [5] * 30}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cuts", CUTS)
def test_chunks_and_single_rows(cuts: str, rule: str) -> None:
    torch.manual_seed(1)
    layer, steps = make_layer(), CUTS[cuts]
    if rule == "triton" and cuts == "few at a time":  # the interpreter takes its time
        steps = steps[:3]
    rows, gates = random_rows(layer, sum(steps))
    want, run, begin, found = by_definition(layer, rows, gates), Run(layer, 3, RULES[rule]), 0, []
    for count in steps:
        part = slice(begin, begin + count)
        found += run.step([(1, rows[part], gates[part])])
        begin += count
    torch.testing.assert_close(torch.cat(found).double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_several_sequences_in_one_step(rule: str) -> None:
    torch.manual_seed(2)
    layer = make_layer()
    sequences = {slot: random_rows(layer, count) for slot, count in ((0, 90), (2, 40), (3, 9))}
    run, found = Run(layer, 4, RULES[rule]), {slot: [] for slot in sequences}
    for counts in ((30, 1, 1), (1, 30, 1), (1, 1, 1), (50, 1, 5), (8, 7, 1)):
        work = []
        for slot, count in sorted(zip(sequences, counts, strict=True), key=lambda of: of[1] != 1):
            part = slice(run.lengths[slot], run.lengths[slot] + count)
            work.append((slot, *(x[part] for x in sequences[slot])))
        for (slot, _, _), out in zip(work, run.step(work), strict=True):
            found[slot].append(out)
    for slot, parts in found.items():
        torch.testing.assert_close(torch.cat(parts).double(), by_definition(layer, *sequences[slot]), rtol=1e-4, atol=1e-4)
