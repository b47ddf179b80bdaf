"""The gated delta rule against its definition, row by row in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.cache.state_pool import LayerStates
from headrace.kernels import delta_prompts, delta_triton
from headrace.kernels.delta_layer import DeltaLayer
from headrace.kernels.delta_prompts import plan_chunks
from headrace.kernels.delta_rule import delta_rule_reference
from headrace.kernels.delta_triton import delta_rule_triton

RING = 4


@dataclass
class Batch:
    positions: Tensor
    seq_slots: Tensor
    query_lens: list[int]
    num_decodes: int
    num_verified: int
    query_start: Tensor
    seq_lens: Tensor
    context_bound: int = 0


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


def layer_for(rule: str) -> DeltaLayer:
    """The interpreter takes its time for each head."""
    return make_layer() if rule == "torch" else make_layer(1, 2)


class Run:
    """Sequences that go on, step by step; what others left in their slots is not a number."""

    def __init__(self, layer: DeltaLayer, slots: int, rule=delta_rule_reference, dtype: torch.dtype = torch.float32, drafts: int = 0):
        self.layer, self.rule = layer, rule
        ring = (RING + 2 * drafts + 1, layer.channels + 2 * layer.value_heads) if drafts else (RING, layer.channels)
        inputs = torch.full((slots, *ring), torch.nan, dtype=dtype)
        states = torch.full((slots, layer.value_heads, layer.key_dim, layer.value_dim), torch.nan)
        behind = torch.full((slots, layer.value_heads), 99, dtype=torch.int32) if drafts else None
        self.kept = LayerStates(inputs, states, behind)
        self.lengths = [0] * slots
        self.apart = False  # each row is a sequence, as in captured steps
        self.padded: tuple[int, int] | None = None  # sequences and rows of a captured step with prompts; see `captured`

    def step(self, work: list[tuple[int, Tensor, Tensor]], verified: int = 0) -> list[Tensor]:
        """(slot, next rows, their gates), those of one row first -> out of each; of the first `verified` drafts may follow."""
        counts = [len(rows) for _, rows, _ in work]
        positions = [self.lengths[slot] + i for (slot, _, _), n in zip(work, counts, strict=True) for i in range(n)]
        for (slot, _, _), count in zip(work, counts, strict=True):
            self.lengths[slot] += count
        batch = Batch(
            torch.tensor(positions, dtype=torch.int32), torch.tensor([slot for slot, _, _ in work], dtype=torch.int32), counts,
            next((i for i, n in enumerate(counts) if n != 1), len(counts)), verified, torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor([self.lengths[slot] for slot, _, _ in work], dtype=torch.int32),
        )  # fmt: skip
        if self.apart:
            batch = Batch(
                batch.positions, batch.seq_slots.repeat_interleave(torch.tensor(counts)), [1] * len(positions), len(positions), 0,
                torch.arange(len(positions) + 1, dtype=torch.int32), batch.positions + 1,
            )  # fmt: skip
        rows, gates = (torch.cat([w[i] for w in work]) for i in (1, 2))
        if self.padded is not None:
            batch, rows, gates = captured(batch, *self.padded, rows, gates, len(self.kept.states) - 1)
        batch = Batch(**{name: x.to(self.kept.states.device) if isinstance(x, Tensor) else x for name, x in vars(batch).items()})
        out = self.rule(self.layer, rows, gates, self.kept, batch)
        assert not out[sum(counts) :].any(), "padded rows are zeros"
        return list(out[: sum(counts)].split(counts))


def captured(
    batch: Batch, more: int, padding: int, rows: Tensor, gates: Tensor, dummy: int
) -> tuple[Batch, Tensor, Tensor]:
    """The same as a captured step with prompts has it: `more` padded sequences behind it, the last of which has `padding` rows;
    how many rows each sequence has is known to the device alone."""
    empty, count = torch.zeros(more, dtype=torch.int32), len(rows)
    stops = torch.cat([torch.full((more - 1,), count), torch.tensor([count + padding])]).int()
    seqs = len(batch.seq_slots) + more
    some = batch.query_start.diff().min() <= 2
    batch = Batch(
        torch.cat([batch.positions, torch.zeros(padding, dtype=torch.int32)]), torch.cat([batch.seq_slots, empty + dummy]), [],
        seqs if some else 0, 0, torch.cat([batch.query_start, stops]), torch.cat([batch.seq_lens, empty]), 4096,
    )  # fmt: skip
    return batch, torch.cat([rows, rows[:1].expand(padding, -1)]), torch.cat([gates, gates[:1].expand(padding, -1)])


def random_rows(layer: DeltaLayer, count: int) -> tuple[Tensor, Tensor]:
    """A part of wider rows, and gates that let much be forgotten, or nothing."""
    width = layer.channels + layer.value_heads * layer.value_dim
    return torch.randn(count, width + 5)[:, :width], torch.randn(count, 2 * layer.value_heads) * 3


def in_triton(layer: DeltaLayer, rows: Tensor, gates: Tensor, kept: LayerStates, batch: Batch) -> Tensor:
    return delta_rule_triton(layer, rows, gates, kept, batch, plan_chunks(batch))


RULES = {"torch": delta_rule_reference, "triton": in_triton}
CUTS = {"whole": [150], "at edges": [64, 64, 22], "anywhere": [1, 62, 1, 70, 1], "few at a time": [5] * 30}


@pytest.mark.parametrize("cuts, rule", [*((cuts, "torch") for cuts in CUTS), ("whole", "triton"), ("anywhere", "triton")])
def test_chunks_and_single_rows(cuts: str, rule: str) -> None:
    torch.manual_seed(1)
    layer, steps = layer_for(rule), CUTS[cuts]
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
    layer = layer_for(rule)
    sequences = {slot: random_rows(layer, count) for slot, count in ((0, 71), (2, 3), (3, 7))}
    run, found = Run(layer, 4, RULES[rule]), {slot: [] for slot in sequences}
    for counts in ((30, 1, 1), (40, 1, 5), (1, 1, 1)):
        work = []
        for slot, count in sorted(zip(sequences, counts, strict=True), key=lambda of: of[1] != 1):
            part = slice(run.lengths[slot], run.lengths[slot] + count)
            work.append((slot, *(x[part] for x in sequences[slot])))
        for (slot, _, _), out in zip(work, run.step(work), strict=True):
            found[slot].append(out)
    for slot, parts in found.items():
        torch.testing.assert_close(torch.cat(parts).double(), by_definition(layer, *sequences[slot]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_wrong_drafts_leave_nothing_behind(rule: str) -> None:
    """Rows of a prompt, of drafts of which some are right, of a prompt behind them, and of another sequence beside all these."""
    torch.manual_seed(3)
    layer, drafts = make_layer(1, 1 if rule == "triton" else 4), 3
    rows, gates = random_rows(layer, 40)
    other = random_rows(layer, 20)
    run, found, beside = Run(layer, 3, RULES[rule], drafts=drafts), [], []
    # how many rows, how many of them are right, whether they may be wrong; 0 right ones: the step came to nothing
    steps = [(5, 5, False), (4, 2, True), (4, 4, True), (2, 0, True), (1, 1, True), (6, 6, False), (2, 1, True)]
    for count, right, may_be_wrong in steps:
        begin, run.apart = run.lengths[1], may_be_wrong and len(found) % 2 == 0
        mine = [x[begin : begin + count].clone() for x in (rows, gates)]
        for x in mine:
            x[right + (not right) :] = torch.randn_like(x[right + (not right) :])
        at = run.lengths[2]
        work = [(1, *mine), (2, *(x[at : at + 2] for x in other))]
        outs = run.step(work, verified=2 if may_be_wrong else 0)
        run.lengths[1], run.lengths[2] = begin + right, at + (1 if may_be_wrong else 2)
        found.append(outs[0][:right])
        beside.append(outs[1][: 1 if may_be_wrong else 2])
    for got, of in ((torch.cat(found), (rows, gates)), (torch.cat(beside), other)):
        want = by_definition(layer, *(x[: len(got)] for x in of))
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("drafts", [0, 2])
def test_captured_steps_with_prompts(monkeypatch, drafts: int) -> None:
    """Rows of one, of two and of many, a sequence that begins and those that go on, each beside padded ones; nothing of these
    is written. A step without few rows has no kernel for them."""
    monkeypatch.setattr(delta_prompts, "STATE_COLUMNS", 16)
    torch.manual_seed(6)
    layer = make_layer(1, 1)
    sequences = [random_rows(layer, 90) for _ in range(3)]
    run, found = Run(layer, 4, in_triton, drafts=drafts), [[], [], []]
    for counts, padded in (((66, 1, 0), (2, 7)), ((1, 2, 1), (1, 12)), ((3, 70, 4), (3, 1)), ((1, 1, 5), (2, 0))):
        run.padded = padded
        work = [(slot, *(x[run.lengths[slot] : run.lengths[slot] + n] for x in sequences[slot])) for slot, n in enumerate(counts) if n]
        for (slot, *_), out in zip(work, run.step(work), strict=True):
            found[slot].append(out)
    for parts, of in zip(found, sequences, strict=True):
        got = torch.cat(parts)
        torch.testing.assert_close(got.double(), by_definition(layer, *(x[: len(got)] for x in of)), rtol=1e-4, atol=1e-4)
    assert run.kept.states[3].isnan().all() and run.kept.inputs[3].isnan().all(), "the slot of padded rows"


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(2, 300), st.integers(0, 200)), max_size=12), st.integers(0, 40))
def test_most_chunks(prompts: list[tuple[int, int]], singles: int) -> None:
    """A captured step has room for the chunks of whatever prompts it may hold."""
    chunks = sum(-(-(start % 64 + count) // 64) for count, start in prompts)
    assert chunks <= delta_prompts.most_chunks(sum(count for count, _ in prompts) + singles, len(prompts) + singles)


def test_many_decodes_are_closed_by_a_kernel_of_their_own(monkeypatch) -> None:
    """Columns in parts, alone and beside a prompt."""
    monkeypatch.setattr(delta_triton, "decode_tile", lambda layer, rows: (16, 2) if rows > 1 else (32, 4))
    monkeypatch.setattr(delta_prompts, "STATE_COLUMNS", 16)
    torch.manual_seed(5)
    layer = layer_for("triton")
    sequences = [random_rows(layer, 12) for _ in range(3)]
    run, found = Run(layer, 3, in_triton), [[], [], []]
    for counts in ((5, 4, 3), (1, 1, 6)):
        work = [(slot, *(x[run.lengths[slot] : run.lengths[slot] + count] for x in sequences[slot])) for slot, count in enumerate(counts)]
        for slot, out in enumerate(run.step(work)):
            found[slot].append(out)
    for parts, of in zip(found, sequences, strict=True):
        got = torch.cat(parts)
        torch.testing.assert_close(got.double(), by_definition(layer, *(x[: len(got)] for x in of)), rtol=1e-4, atol=1e-4)
