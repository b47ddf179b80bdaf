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

from headrace.kernels.delta_layer import CHUNK, LENGTH_EPS, DeltaLayer, Rows
from headrace.kernels.delta_triton import delta_rule_triton, plan_chunks
from headrace.kernels.launch import on_gpu


def delta_rule(
    layer: DeltaLayer, projected: Tensor, gates: Tensor, inputs: Tensor, states: Tensor, batch: Rows,
    chunks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The rows of a step through a layer: [T, value_heads * value_dim] in the rows' dtype, normed by head and gated.

    projected [T, >= channels + value_heads * value_dim]: q, k, v before the convolution, then z; gates [T, 2 * value_heads]: b,
    a; both may be parts of wider rows. inputs [rows, ring, channels] and states [rows, value_heads, key_dim, value_dim] float32
    are those of a StatePool and go on to the end of each sequence. A sequence that begins at position 0 begins with nothing.
    `chunks`: `chunk_table` of the batch, which all layers share.
    """
    if on_gpu(projected):
        return delta_rule_triton(layer, projected, gates, inputs, states, batch, chunks)
    return delta_rule_reference(layer, projected, gates, inputs, states, batch)


def chunk_table(batch: Rows) -> Tensor | None:
    """Of the sequences with several rows; None: there are none, or nobody needs it."""
    if not on_gpu(batch.positions):
        return None
    return plan_chunks(batch)


def delta_rule_reference(
    layer: DeltaLayer, projected: Tensor, gates: Tensor, inputs: Tensor, states: Tensor, batch: Rows
) -> Tensor:
    """See `delta_rule`. No row is padded."""
    slots, decodes, width = batch.seq_slots.long(), batch.num_decodes, layer.value_heads * layer.value_dim
    mixed, z = projected[:, : layer.channels], projected[:, layer.channels : layer.channels + width]
    b, a = gates.float().split(layer.value_heads, 1)
    beta, g = b.sigmoid(), -layer.decay.exp() * F.softplus(a + layer.bias)
    out = torch.empty((len(mixed), layer.value_heads, layer.value_dim))
    if decodes:
        one = slice(0, decodes)
        out[one] = _decode(layer, mixed[one], g, beta, inputs, states, batch.positions[one].long(), slots[one])
    row = decodes
    for slot, count in zip(slots[decodes:].tolist(), batch.query_lens[decodes:], strict=True):
        of, start = slice(row, row + count), int(batch.positions[row])
        q, k, v = _heads(layer, _convolved(layer, mixed[of], inputs[slot], start))
        state = states[slot] if start else torch.zeros_like(states[slot])
        first = 0
        while first < count:
            last = min(count, first + CHUNK - (start + first) % CHUNK)
            part, rows = slice(first, last), slice(row + first, row + last)
            out[rows], state = chunk(q[part], k[part], v[part], g[rows], beta[rows], state)
            first = last
        states[slot] = state
        row += count
    return gated_norm(layer, out, z)


def gated_norm(layer: DeltaLayer, out: Tensor, z: Tensor) -> Tensor:
    """norm * out / rms(out) * silu(z): out [T, value_heads, value_dim], z [T, value_heads * value_dim] -> as z, its dtype."""
    normed = F.rms_norm(out, (layer.value_dim,), layer.norm, layer.eps).flatten(1)
    return (normed * F.silu(z.float())).to(z.dtype)


def _convolved(layer: DeltaLayer, mixed: Tensor, inputs: Tensor, start: int) -> Tensor:
    """Rows [n, channels] of one sequence, from position `start` on, behind what `inputs` [ring, channels] remembers."""
    ring, count, kernel = inputs.shape[0], mixed.shape[0], layer.conv.shape[1]
    before = torch.arange(start - kernel + 1, start)
    window = torch.cat([inputs[before % ring].masked_fill((before < 0)[:, None], 0.0), mixed])
    kept = torch.arange(max(0, count - ring), count)
    inputs[(start + kept) % ring] = mixed[kept]
    return F.silu((window.float().unfold(0, kernel, 1) * layer.conv).sum(-1))


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
    layer: DeltaLayer, mixed: Tensor, g: Tensor, beta: Tensor, inputs: Tensor, states: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    """One row of each of D sequences -> out [D, value heads, value_dim]."""
    ring, kernel, count = inputs.shape[1], layer.conv.shape[1], len(mixed)
    before = positions[:, None] + torch.arange(1 - kernel, 0)
    window = inputs[slots[:, None], before % ring].masked_fill((before < 0)[..., None], 0.0)
    window = torch.cat([window, mixed[:, None]], 1).float()  # [D, kernel, channels]
    inputs[slots, positions % ring] = mixed
    q, k, v = _heads(layer, F.silu((window * layer.conv.T).sum(1)))
    state = states[slots].masked_fill((positions == 0)[:, None, None, None], 0.0) * g[:count, :, None, None].exp()
    correction = beta[:count, :, None] * (v - (state * k[..., None]).sum(-2))
    state += k[..., None] * correction[..., None, :]
    states[slots] = state
    return (state * q[..., None]).sum(-2)


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
