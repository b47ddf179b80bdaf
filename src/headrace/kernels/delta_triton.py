"""The gated delta rule on a card (see delta_rule.py): single rows in one kernel, prompts in chunks of 64 rows.

    rows of decodes   _decode   a program a row and value head, or part of one: convolution, state read and written once
                      _verify   the same where some rows may be wrong: the state is made of those before them only
    rows of prompts             see delta_prompts.py
    all rows          _gate     norm and gate, where they have not been part of the others
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.cache.state_pool import LayerStates
from headrace.kernels.delta_layer import LENGTH_EPS, DeltaLayer, Rows
from headrace.kernels.delta_prompts import fading, first_prompt, run_prompts
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, pdl, tl

GATE_ROWS = 16


def delta_rule_triton(
    layer: DeltaLayer, projected: Tensor, gates: Tensor, kept: LayerStates, batch: Rows, chunks: Tensor | None = None
) -> Tensor:
    """See `delta_rule`. `chunks`: see `plan_chunks`; needed where a sequence is a prompt. Padded rows touch no state; in a
    captured step with prompts (ForwardBatch.context_bound), where the last sequence has them, they become zeros."""
    rows, alone = projected.shape[0], batch.num_decodes
    out = torch.empty((rows, layer.value_heads * layer.value_dim), dtype=projected.dtype, device=projected.device)
    sizes = dict(
        KEY_HEADS=layer.key_heads, VALUE_HEADS=layer.value_heads, KEY_DIM=layer.key_dim, VALUE_DIM=layer.value_dim,
        KERNEL=layer.conv.shape[1], RING=kept.inputs.shape[1], WIDTH=kept.inputs.shape[2],
    )  # fmt: skip
    weights = layer.conv, layer.decay, layer.bias, layer.norm
    strides = projected.stride(0), gates.stride(0), layer.eps, LENGTH_EPS
    options = dict(num_warps=8 if layer.key_dim * layer.value_dim > 4096 else 4, **pdl(projected))
    count, any_rows = batch.seq_slots.shape[0], batch.context_bound > 0
    places = batch.positions, batch.seq_slots, batch.seq_lens, batch.query_start
    if kept.behind is not None:
        alone = first_prompt(batch)
        _verify[(count * layer.value_heads,)](
            projected, gates, kept.inputs, kept.states, kept.behind, *places, *weights, out, *strides, alone, **sizes,
            ANY=any_rows, **options,
        )  # fmt: skip
    elif alone:
        columns, options["num_warps"] = decode_tile(layer, alone)
        _decode[(alone * layer.value_heads * (layer.value_dim // columns),)](
            projected, gates, kept.inputs, kept.states, *places, *weights, out, *strides, **sizes, COLUMNS=columns,
            ANY=any_rows, **options,
        )  # fmt: skip
    prompts = any_rows or alone < count
    if prompts:
        assert chunks is not None
        run_prompts(layer, projected, gates, kept, batch, chunks, out, sizes, first_prompt(batch))
    closed = not any_rows and (kept.behind is not None or (alone > 0 and decode_tile(layer, alone)[0] == layer.value_dim))
    first = sum(batch.query_lens[:alone]) if closed else 0
    if prompts or not first:
        _gate[(-(-(rows - first) // GATE_ROWS) * layer.value_heads,)](
            projected, out, layer.norm, batch.query_start, projected.stride(0), layer.eps, first, rows, count - 1, **sizes,
            ROWS=GATE_ROWS, ANY=any_rows, **(options | {"num_warps": 4}),
        )  # fmt: skip
    return out


def decode_tile(layer: DeltaLayer, rows: int) -> tuple[int, int]:
    """Columns of a head, and warps, of a program of `_decode`: small ones fit beside those of the product before them, and load
    their part of the state while it ends. All of a head in one took 6.1 us where these and `_gate` take 4.4 (one row, 32 heads
    of 128, H200); of 32 rows 89 and 42."""
    columns = 32 if rows <= 4 else 64
    return (columns, 2) if layer.value_dim > columns else (layer.value_dim, 4)


@jit
def _remembered(ring, conv, at, position, KERNEL: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr):
    """What a row's convolution has of those before it, channels `at`."""
    total = tl.zeros(at.shape, tl.float32)
    for back in tl.static_range(1, KERNEL):
        before = ring + ((position - back + RING) % RING) * WIDTH + at
        kept = tl.load(before, (at >= 0) & (position >= back), 0.0, cache_modifier=".cg").to(tl.float32)
        total += kept * tl.load(conv + at * KERNEL + KERNEL - 1 - back)
    return total


@jit
def _silu(x):
    return x * tl.sigmoid(x)


@jit
def _decode(
    projected, gates, inputs, states, positions, seq_slots, seq_lens, query_start, conv, decay, bias, norm, out, row_stride,
    gate_stride, eps, length_eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    RING: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ANY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a program that has some columns of a head only, what `_gate` has still to norm and to gate. What is older than this
    step is loaded before the wait. The output, which others wait for, comes before the state: o = exp(g) S^T q + (k . q) u.
    With ANY sequences may have any rows, and those of one are taken; none is closed here."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    PARTS: tl.constexpr = VALUE_DIM // COLUMNS
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % VALUE_HEADS
    sequence = tl.program_id(0) // (PARTS * VALUE_HEADS)
    row = sequence.to(tl.int64)
    i = tl.arange(0, KEY_DIM)
    j = part * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.load(seq_lens + sequence, cache_modifier=".cg")
    if ANY:
        row = tl.load(query_start + sequence, cache_modifier=".cg").to(tl.int64)
        if (length == 0) | (tl.load(query_start + sequence + 1, cache_modifier=".cg") - row != 1):
            if PDL:
                gdc_wait()
            return
    out_at = out + row * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + j
    if length == 0:
        if PDL:
            gdc_wait()
        tl.store(out_at, tl.zeros([COLUMNS], out.dtype.element_ty))
        return
    # past the L1 cache: what is read before the wait may have changed since this multiprocessor read it last
    position = tl.load(positions + row, cache_modifier=".cg")
    slot = tl.load(seq_slots + sequence, cache_modifier=".cg").to(tl.int64)
    state_at = states + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + i[:, None] * VALUE_DIM + j[None, :]
    state = tl.load(state_at, (i[:, None] >= 0) & (position > 0), 0.0, cache_modifier=".cg")
    weight = tl.load(norm + j)
    x = projected + row * row_stride
    ring = inputs + slot * (RING * WIDTH)
    q_at = head // GROUP * KEY_DIM + i
    v_at = 2 * KEYS + head * VALUE_DIM + j
    last = conv + KERNEL - 1
    q = _remembered(ring, conv, q_at, position, KERNEL, RING, WIDTH)
    k = _remembered(ring, conv, KEYS + q_at, position, KERNEL, RING, WIDTH)
    v = _remembered(ring, conv, v_at, position, KERNEL, RING, WIDTH)
    q_weight = tl.load(last + q_at * KERNEL)
    k_weight = tl.load(last + (KEYS + q_at) * KERNEL)
    v_weight = tl.load(last + v_at * KERNEL)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q_new = tl.load(x + q_at)
    k_new = tl.load(x + KEYS + q_at)
    v_new = tl.load(x + v_at)
    z = tl.load(x + CHANNELS + head * VALUE_DIM + j).to(tl.float32)
    g, beta = fading(gates + row * gate_stride, head, decay, bias, VALUE_HEADS, True)
    q = _silu(q + q_new.to(tl.float32) * q_weight)
    k = _silu(k + k_new.to(tl.float32) * k_weight)
    v = _silu(v + v_new.to(tl.float32) * v_weight)
    q *= tl.rsqrt(tl.sum(q * q, 0) + length_eps) * (KEY_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + length_eps)
    faded = tl.exp(g)
    correction = beta * (v - faded * tl.sum(state * k[:, None], 0))
    o = faded * tl.sum(state * q[:, None], 0) + tl.sum(k * q, 0) * correction
    if PARTS == 1 and not ANY:
        o *= tl.rsqrt(tl.sum(o * o, 0) / VALUE_DIM + eps) * weight * _silu(z)
    tl.store(out_at, o.to(out.dtype.element_ty))
    tl.store(state_at, state * faded + k[:, None] * correction[None, :])
    own = ring + position % RING * WIDTH
    tl.store(own + v_at, v_new)
    if (part == 0) & (head % GROUP == 0):
        tl.store(own + q_at, q_new)
        tl.store(own + KEYS + q_at, k_new)


@jit
def _reached(x, x_stride, ring, conv, at, t, position, KERNEL: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr):
    """Channels `at` of position t: those from `position` on are rows at `x`, those before it lie in the ring."""
    total = tl.zeros(at.shape, tl.float32)
    for back in tl.static_range(0, KERNEL):
        p = t - back
        new = tl.load(x + (p - position) * x_stride + at, (at >= 0) & (p >= position), 0.0).to(tl.float32)
        old = tl.load(ring + (p + RING) % RING * WIDTH + at, (at >= 0) & (p >= 0) & (p < position), 0.0).to(tl.float32)
        total += (new + old) * tl.load(conv + at * KERNEL + KERNEL - 1 - back)
    return total * tl.sigmoid(total)


@jit(do_not_specialize=["verified"])
def _verify(
    projected, gates, inputs, states, behind, positions, seq_slots, seq_lens, query_start, conv, decay, bias, norm, out,
    row_stride, gate_stride, eps, length_eps, verified,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    RING: tl.constexpr, WIDTH: tl.constexpr, ANY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Where there may be drafts: the state catches up to the rows of this step, which are right or not, and stays there; then
    these, of the first `verified` sequences. The first of several sequences of one slot does for all of them. With ANY those
    of one row are verified, and none is closed here."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    V_WIDTH: tl.constexpr = VALUE_HEADS * VALUE_DIM
    sequence = tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    i = tl.arange(0, KEY_DIM)
    j = tl.arange(0, VALUE_DIM)
    weight = tl.load(norm + j)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(query_start + sequence).to(tl.int64)
    slot = tl.load(seq_slots + sequence).to(tl.int64)
    if tl.load(seq_lens + sequence) == 0:
        if not ANY:
            tl.store(out + row * V_WIDTH + head * VALUE_DIM + j, tl.zeros([VALUE_DIM], out.dtype.element_ty))
        return
    if ANY:
        verified = sequence + (tl.load(query_start + sequence + 1) - row == 1).to(tl.int32)
    before = tl.load(seq_slots + tl.maximum(sequence, 1) - 1)
    if (sequence > 0) & (sequence < verified) & (before == slot):
        return
    end = sequence
    if sequence < verified:
        end += 1
        more = (end < verified) & (tl.load(seq_slots + end, end < verified, 0) == slot)
        while more:
            end += 1
            more = (end < verified) & (tl.load(seq_slots + end, end < verified, 0) == slot)
    new = (tl.load(query_start + end) - row).to(tl.int32)
    position = tl.load(positions + row)
    behind_at = behind + slot * VALUE_HEADS + head
    begin = tl.where(position > 0, tl.load(behind_at), 0)
    state_at = states + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + i[:, None] * VALUE_DIM + j[None, :]
    state = tl.load(state_at, (i[:, None] >= 0) & (begin > 0), 0.0)
    if begin == position:  # a first one must not find what somebody else left
        tl.store(state_at, state)
    x = projected + row * row_stride
    ring = inputs + slot * (RING * WIDTH)
    q_at = head // GROUP * KEY_DIM + i
    v_at = 2 * KEYS + head * VALUE_DIM + j
    for t in range(begin, position + new):
        q = _reached(x, row_stride, ring, conv, q_at, t, position, KERNEL, RING, WIDTH)
        k = _reached(x, row_stride, ring, conv, KEYS + q_at, t, position, KERNEL, RING, WIDTH)
        v = _reached(x, row_stride, ring, conv, v_at, t, position, KERNEL, RING, WIDTH)
        q *= tl.rsqrt(tl.sum(q * q, 0) + length_eps) * (KEY_DIM**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + length_eps)
        of = gates + (row + t - position) * gate_stride
        if t < position:
            of = ring + t % RING * WIDTH + CHANNELS
        g, beta = fading(of, head, decay, bias, VALUE_HEADS, True)
        state *= tl.exp(g)
        correction = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * correction[None, :]
        if t == position - 1:
            tl.store(state_at, state)
        if t >= position:
            at = row + t - position
            o = tl.sum(state * q[:, None], 0)
            if not ANY:
                z = tl.load(projected + at * row_stride + CHANNELS + head * VALUE_DIM + j).to(tl.float32)
                o *= tl.rsqrt(tl.sum(o * o, 0) / VALUE_DIM + eps) * weight * z * tl.sigmoid(z)
            tl.store(out + at * V_WIDTH + head * VALUE_DIM + j, o.to(out.dtype.element_ty))
    tl.store(behind_at, position)
    for t in range(position, position + new):
        x = projected + (row + t - position) * row_stride
        own = ring + t % RING * WIDTH
        tl.store(own + v_at, tl.load(x + v_at))
        if head % GROUP == 0:
            tl.store(own + q_at, tl.load(x + q_at))
            tl.store(own + KEYS + q_at, tl.load(x + KEYS + q_at))
        of = gates + (row + t - position) * gate_stride
        tl.store(own + CHANNELS + head, tl.load(of + head))
        tl.store(own + CHANNELS + VALUE_HEADS + head, tl.load(of + VALUE_HEADS + head))


@jit(do_not_specialize=["first", "stop", "padded"])
def _gate(
    projected, out, norm, query_start, row_stride, eps, first, stop, padded,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    RING: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ANY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows `first` to `stop`. With ANY those of sequence `padded`, which nobody has written, become zeros."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head = tl.program_id(0) % VALUE_HEADS
    row = (first + tl.program_id(0) // VALUE_HEADS * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    j = tl.arange(0, VALUE_DIM)[None, :]
    there = (row < stop) & (j >= 0)
    real = there
    if ANY:
        real = (row < tl.load(query_start + padded, cache_modifier=".cg")) & (j >= 0)
    at = out + row * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + j
    weight = tl.load(norm + j)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    o = tl.load(at, real, 0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 1) / VALUE_DIM + eps)[:, None] * weight
    z = tl.load(projected + row * row_stride + CHANNELS + head * VALUE_DIM + j, there, 0.0).to(tl.float32)
    tl.store(at, (o * z * tl.sigmoid(z)).to(out.dtype.element_ty), there)
