"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"): a layer's memory is one matrix S a value head.

    S <- S exp(g) + k (beta (v - (S exp(g))^T k))^T      o = S^T q        g < 0: what fades; beta: how much is corrected

q, k and v come out of a causal convolution over the last few rows, q and k with a length of 1 (q then divided by
sqrt(key_dim)). Here in torch, in float32: row by row, which is the definition, and for prompts in chunks. In a chunk with S
before it, and G the running sum of g, every row's correction follows from those of the rows before it:

    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_i . k_j) u_j)     a triangular system
    o_i = exp(G_i) S^T q_i + sum over j <= i of exp(G_i - G_j) (q_i . k_j) u_j
    S  <- exp(G_last) S + sum over j of exp(G_last - G_j) k_j u_j^T

Chunks end where the position is a multiple of CHUNK, wherever a prompt was cut: sums are formed in the same order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.cache.state_pool import LayerStates
from headrace.kernels.delta_layer import CHUNK, LENGTH_EPS, DeltaLayer, Rows
from headrace.kernels.delta_prompts import plan_chunks
from headrace.kernels.delta_triton import delta_rule_triton
from headrace.kernels.launch import on_gpu


def delta_rule(
    layer: DeltaLayer, projected: Tensor, gates: Tensor, kept: LayerStates, batch: Rows, chunks: Tensor | None = None
) -> Tensor:
    """The rows of a step through a layer: [T, value_heads * value_dim] in the rows' dtype, normed by head and gated.

    projected [T, >= channels + value_heads * value_dim]: q, k, v before the convolution, then z; gates [T, 2 * value_heads]: b,
    a; both may be parts of wider rows. What is `kept` of each sequence goes on to the end of its rows; where there may be
    drafts (LayerStates.behind), of the first `num_verified` sequences, and of those of one row, up to their first row. A
    sequence that begins at position 0 begins with nothing. `chunks`: `chunk_table` of the batch, which all layers share.
    """
    if on_gpu(projected):
        return delta_rule_triton(layer, projected, gates, kept, batch, chunks)
    return delta_rule_reference(layer, projected, gates, kept, batch)


def chunk_table(batch: Rows) -> Tensor | None:
    """Of the sequences with several rows; None: there are none, or nobody needs it."""
    return plan_chunks(batch) if on_gpu(batch.positions) else None


def delta_rule_reference(layer: DeltaLayer, projected: Tensor, gates: Tensor, kept: LayerStates, batch: Rows) -> Tensor:
    """See `delta_rule`. No row is padded."""
    width, decodes = layer.value_heads * layer.value_dim, batch.num_decodes if kept.behind is None else 0
    mixed, z = projected[:, : layer.channels], projected[:, layer.channels : layer.channels + width]
    out = torch.empty((len(mixed), layer.value_heads, layer.value_dim))
    if decodes:
        one = slice(0, decodes)
        positions, slots = batch.positions[one].long(), batch.seq_slots[one].long()
        out[one] = _decode(layer, mixed[one], gates[one], kept, positions, slots)
    row = decodes
    for slot, count, certain in _runs(batch, decodes, kept.behind is None):
        rows, start = slice(row, row + count), int(batch.positions[row])
        sequence = _Sequence(layer, kept, slot)
        if kept.behind is not None:
            sequence.catch_up(start)
        out[rows] = (sequence.prompt if certain else sequence.verify)(mixed[rows], gates[rows], start)
        row += count
    return gated_norm(layer, out, z)


def _runs(batch: Rows, first: int, certain: bool) -> list[tuple[int, int, bool]]:
    """(slot, rows, whether they are certain) of the sequences from `first` on; a slot's own that are to be verified are one."""
    runs: list[tuple[int, int, bool]] = []
    for i, (slot, count) in enumerate(zip(batch.seq_slots.tolist(), batch.query_lens, strict=True)):
        right = certain or i >= max(batch.num_decodes, batch.num_verified)
        if i >= first and runs and runs[-1][0] == slot and not right:
            runs[-1] = (slot, runs[-1][1] + count, right)
        elif i >= first:
            runs.append((slot, count, right))
    return runs


class _Sequence:
    """One that goes on."""

    def __init__(self, layer: DeltaLayer, kept: LayerStates, slot: int):
        self.layer, self.inputs, self.state = layer, kept.inputs[slot], kept.states[slot]
        self.behind = None if kept.behind is None else kept.behind[slot]

    def catch_up(self, start: int) -> None:
        """Of the rows that the state is behind it is known by now that they are right."""
        assert self.behind is not None
        first, layer = int(self.behind[0]) if start else 0, self.layer
        if not start:
            self.state.zero_()
        if first < start:
            rows = self.inputs[torch.arange(first, start) % len(self.inputs)]
            mixed, gates = rows.split([layer.channels, 2 * layer.value_heads], 1)
            self.state.copy_(self._rows(mixed, gates, first)[1])
        self.behind.fill_(start)

    def verify(self, mixed: Tensor, gates: Tensor, start: int) -> Tensor:
        """Rows that may be wrong: the state stays what it was before them."""
        out = self._rows(mixed, gates, start)[0]
        self._remember(mixed, gates, start)
        return out

    def _rows(self, mixed: Tensor, gates: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """One by one, from the state -> (their outputs, the state behind them)."""
        g, beta = fading(self.layer, gates)
        q, k, v = _heads(self.layer, self._convolved(mixed, start))
        outs, state = [], self.state
        for i in range(len(mixed)):
            out, state = step(q[i], k[i], v[i], g[i], beta[i], state)
            outs.append(out)
        return torch.stack(outs), state

    def prompt(self, mixed: Tensor, gates: Tensor, start: int) -> Tensor:
        """Rows that are certain, in chunks."""
        g, beta = fading(self.layer, gates)
        q, k, v = _heads(self.layer, self._convolved(mixed, start))
        state = self.state if start else torch.zeros_like(self.state)
        first, outs = 0, []
        while first < len(mixed):
            last = min(len(mixed), first + CHUNK - (start + first) % CHUNK)
            part = slice(first, last)
            out, state = chunk(q[part], k[part], v[part], g[part], beta[part], state)
            outs.append(out)
            first = last
        self.state.copy_(state)
        self._remember(mixed, gates, start)
        if self.behind is not None:
            self.behind.fill_(start + len(mixed))
        return torch.cat(outs)

    def _convolved(self, mixed: Tensor, start: int) -> Tensor:
        """Rows [n, channels] from position `start` on, behind what the ring remembers."""
        kernel = self.layer.conv.shape[1]
        before = torch.arange(start - kernel + 1, start)
        old = self.inputs[before % len(self.inputs), : mixed.shape[1]].masked_fill((before < 0)[:, None], 0.0)
        return F.silu((torch.cat([old, mixed]).float().unfold(0, kernel, 1) * self.layer.conv).sum(-1))

    def _remember(self, mixed: Tensor, gates: Tensor, start: int) -> None:
        ring, width = self.inputs.shape
        last = torch.arange(max(0, len(mixed) - ring), len(mixed))
        rows = mixed[last] if width == mixed.shape[1] else torch.cat([mixed[last], gates[last]], 1)
        self.inputs[(start + last) % ring] = rows


def fading(layer: DeltaLayer, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Gates [T, 2 * value_heads] -> (g, beta) of the rule, both [T, value_heads] float32."""
    b, a = gates.float().split(layer.value_heads, 1)
    return -layer.decay.exp() * F.softplus(a + layer.bias), b.sigmoid()


def gated_norm(layer: DeltaLayer, out: Tensor, z: Tensor) -> Tensor:
    """norm * out / rms(out) * silu(z): out [T, value_heads, value_dim], z [T, value_heads * value_dim] -> as z, its dtype."""
    normed = F.rms_norm(out, (layer.value_dim,), layer.norm, layer.eps).flatten(1)
    return (normed * F.silu(z.float())).to(z.dtype)


def _heads(layer: DeltaLayer, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the convolution gave [n, channels] -> q, k [n, value heads, key_dim], v [n, value heads, value_dim]."""
    size = layer.key_heads * layer.key_dim
    q, k, v = rows.split([size, size, layer.channels - 2 * size], 1)
    q, k = (x.unflatten(1, (layer.key_heads, layer.key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS) for x in (q, k))
    group = layer.value_heads // layer.key_heads
    q, k = (q * layer.key_dim**-0.5).repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    return q, k, v.unflatten(1, (layer.value_heads, layer.value_dim))


def _decode(
    layer: DeltaLayer, mixed: Tensor, gates: Tensor, kept: LayerStates, positions: Tensor, slots: Tensor
) -> Tensor:
    """One row of each of D sequences -> out [D, value heads, value_dim]."""
    inputs, states = kept.inputs, kept.states
    ring, kernel = inputs.shape[1], layer.conv.shape[1]
    before = positions[:, None] + torch.arange(1 - kernel, 0)
    window = inputs[slots[:, None], before % ring].masked_fill((before < 0)[..., None], 0.0)
    window = torch.cat([window, mixed[:, None]], 1).float()  # [D, kernel, channels]
    inputs[slots, positions % ring] = mixed
    q, k, v = _heads(layer, F.silu((window * layer.conv.T).sum(1)))
    g, beta = fading(layer, gates)
    state = states[slots].masked_fill((positions == 0)[:, None, None, None], 0.0)
    out, states[slots] = step(q, k, v, g, beta, state)
    return out


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One row, or one of each of several sequences: q, k [..., heads, key_dim], v [..., heads, value_dim], g, beta
    [..., heads], state [..., heads, key_dim, value_dim] before it -> (out [..., heads, value_dim], the state behind it)."""
    state = state * g[..., None, None].exp()
    correction = beta[..., None] * (v - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * correction[..., None, :]
    return (state * q[..., None]).sum(-2), state


def chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of one chunk: q, k [n, heads, key_dim], v [n, heads, value_dim], g, beta [n, heads], state [heads, key_dim,
    value_dim] before it -> (out [n, heads, value_dim], the state behind it)."""
    q, k, v, beta = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), beta.T[..., None]
    total = g.T.cumsum(1)[..., None]  # [heads, n, 1]
    faded = (total - total.mT).tril().exp().tril()  # [heads, n, n]: from the column's row to the row's
    system = (beta * (k @ k.mT) * faded).tril(-1)
    wanted = beta * (v - total.exp() * (k @ state))
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = total.exp() * (q @ state) + ((q @ k.mT) * faded) @ u
    last = total[:, -1:]
    return out.transpose(0, 1), last.exp() * state + (k * (last - total).exp()).mT @ u
