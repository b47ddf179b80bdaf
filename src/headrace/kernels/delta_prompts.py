"""The gated delta rule's prompts on a card (see delta_rule.py), in chunks of 64 rows.

    _mix      a program some rows of a chunk and a head: convolution and lengths
    _chunks   a program a chunk and value head, all at once: what of a chunk does not need the state before it
    _states   a program a sequence, value head and part of its columns: from chunk to chunk

With T the inverse of I + system (delta_rule.py), a chunk's corrections are u = T beta v - (T beta exp(G) k) S: two matrices
that are known before S is. T comes by doubling: of the diagonal blocks' inverses D and the blocks N between two of them follow
those of twice the size, D - D N D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.cache.state_pool import LayerStates
from headrace.kernels.delta_layer import CHUNK, LENGTH_EPS, DeltaLayer, Rows
from headrace.kernels.launch import capability, is_roomy, jit, next_power_of_2, tl

MIX_ROWS = 16  # of a program of `_mix`: what limits is latency, so many small ones
STATE_COLUMNS = 32  # of a program of `_states`: with 32 heads of 128 columns, one sequence fills a card


def first_prompt(batch: Rows) -> int:
    """The sequences before it have one row, or rows that are to be verified. Where only the device knows, any may be one."""
    return 0 if batch.context_bound else max(batch.num_decodes, batch.num_verified)


def run_prompts(
    layer: DeltaLayer, projected: Tensor, gates: Tensor, kept: LayerStates, batch: Rows, chunks: Tensor, out: Tensor,
    sizes: dict[str, int], first: int,
) -> None:  # fmt: skip
    """The rows of the sequences from `first` on into `out`, before norm and gate; `sizes`: constants that all kernels have."""
    rows, heads = projected.shape[0], layer.value_heads

    def empty(*shape: int, dtype: torch.dtype = projected.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=projected.device)

    mixed = empty(rows, layer.channels)  # what `_chunks` makes of v lies where v was
    w, within = (empty(rows, heads, width) for width in (layer.key_dim, CHUNK))
    total = empty(rows, heads, dtype=torch.float32)
    precise = projected.dtype == torch.float32
    made = mixed, w, within, total
    # Float32 needs more registers than there are. The less is spilled the better: of eight warps and heads of 16 ptxas 12.8
    # made code that took the stack pointer for a place in shared memory (tests/compile_kernels.py looks for that). In bfloat16
    # the products of four warps are wrong from row 16 on where heads are of 16 and 32 (H200, Triton 3.6), those of two right.
    warps = (8 if layer.key_dim > 64 else 4) if precise else 4 if min(layer.key_dim, layer.value_dim) >= 64 else 2
    _mix[(chunks.shape[0] * (2 * layer.key_heads + heads) * (CHUNK // MIX_ROWS),)](
        projected, kept.inputs, chunks, layer.conv, mixed, projected.stride(0), LENGTH_EPS, **sizes, CHUNK=CHUNK, ROWS=MIX_ROWS,
        num_warps=4,
    )  # fmt: skip
    _chunks[(chunks.shape[0] * heads,)](
        gates, chunks, layer.decay, layer.bias, *made, gates.stride(0), **sizes, CHUNK=CHUNK, PRECISE=precise,
        num_warps=warps,
    )  # fmt: skip
    columns = min(STATE_COLUMNS, layer.value_dim)
    sequences = batch.seq_slots.shape[0] - first
    stages = 1 if precise or not is_roomy(out.device) else 3 if capability(out.device)[0] != 8 else 2
    behind = kept.states if kept.behind is None else kept.behind
    _states[(sequences * heads * (layer.value_dim // columns),)](
        projected, kept.inputs, kept.states, behind, batch.positions, batch.query_start, batch.seq_slots, batch.seq_lens, *made,
        out, projected.stride(0), first, **sizes, CHUNK=CHUNK, COLUMNS=columns, PRECISE=precise,
        DRAFTS=kept.behind is not None, ANY=batch.context_bound > 0, num_warps=4, num_stages=stages,
    )  # fmt: skip


def plan_chunks(batch: Rows) -> Tensor | None:
    """The chunks of prompts [C, 5] int32: slot, first row, rows, position of the first row, and the
    sequence's first row. Made on the device; C is a bound, what is behind the last one has no rows. None: there are none."""
    first = first_prompt(batch)
    sequences = batch.seq_slots.shape[0] - first
    if not sequences:
        return None
    if batch.context_bound:
        most = most_chunks(batch.positions.shape[0], sequences - 1)
    else:
        most = sum(length // CHUNK + 2 for length in batch.query_lens[first:])
    table = torch.zeros((most, 5), dtype=torch.int32, device=batch.positions.device)
    _plan[(sequences,)](
        batch.positions, batch.query_start, batch.seq_slots, batch.seq_lens, table, first, sequences, CHUNK=CHUNK,
        SEQUENCES=next_power_of_2(sequences), ANY=batch.context_bound > 0, num_warps=4,
    )  # fmt: skip
    return table


def most_chunks(rows: int, sequences: int) -> int:
    """Of so many sequences that have `rows` together, wherever they begin: who has one row needs no chunk."""
    prompts = min(sequences, rows // 2)
    return prompts + (rows + (CHUNK - 2) * prompts) // CHUNK


@jit(do_not_specialize=["first", "count"])
def _plan(
    positions, query_start, seq_slots, seq_lens, table, first, count, CHUNK: tl.constexpr, SEQUENCES: tl.constexpr,
    ANY: tl.constexpr,
):  # fmt: skip
    """A program a sequence: counts the chunks of those before it, and writes its own. With ANY those of one row have none, nor
    have padded ones, whatever rows they have."""
    index = tl.program_id(0)
    each = tl.arange(0, SEQUENCES)
    there = each < count
    begins = tl.load(query_start + first + each, there, 0)
    lengths = tl.load(query_start + first + each + 1, there, 0) - begins
    if ANY:
        there = there & (lengths > 1) & (tl.load(seq_lens + first + each, there, 0) > 0)
    starts = tl.load(positions + begins, there, 0)
    chunks = tl.where(there, (starts % CHUNK + lengths + CHUNK - 1) // CHUNK, 0)
    place = tl.sum(tl.where(each < index, chunks, 0), 0)
    own = tl.sum(tl.where(each == index, chunks, 0), 0)
    begin = tl.load(query_start + first + index)
    length = tl.load(query_start + first + index + 1) - begin
    start = tl.sum(tl.where(each == index, starts, 0), 0)
    slot = tl.load(seq_slots + first + index)
    for chunk in range(0, own):
        edge = (start // CHUNK + chunk) * CHUNK
        at = tl.maximum(edge, start)
        stop = tl.minimum(edge + CHUNK, start + length)
        row = table + (place + chunk) * 5
        tl.store(row, slot)
        tl.store(row + 1, begin + at - start)
        tl.store(row + 2, stop - at)
        tl.store(row + 3, at)
        tl.store(row + 4, begin)


@jit
def fading(gates, head, decay, bias, VALUE_HEADS: tl.constexpr, mask):
    """Of rows whose gates begin at `gates`: (g, beta)."""
    b = tl.load(gates + head, mask, 0.0).to(tl.float32)
    x = tl.load(gates + VALUE_HEADS + head, mask, 0.0).to(tl.float32) + tl.load(bias + head)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(tl.load(decay + head)) * softplus, tl.sigmoid(b)


@jit
def _convolved(
    projected, ring, conv, row, first, position, count, at, row_stride, KERNEL: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Channels `at` of `count` rows from `row` on [ROWS, channels]; the sequence's own rows begin at `first`, and those before
    them lie in the ring: only the first rows look there."""
    t = tl.arange(0, ROWS)[:, None]
    x = projected + row * row_stride + t * row_stride + at[None, :]
    there = t < count
    before = tl.minimum(row - first, KERNEL).to(tl.int32)  # rows of its own
    total = tl.load(x, there, 0.0).to(tl.float32) * tl.load(conv + at * KERNEL + KERNEL - 1)[None, :]
    for back in tl.static_range(1, KERNEL):
        own = tl.load(x - back * row_stride, there & (t + before >= back), 0.0).to(tl.float32)
        total += own * tl.load(conv + at * KERNEL + KERNEL - 1 - back)[None, :]
    if before < KERNEL - 1:
        for back in tl.static_range(1, KERNEL):
            kept = there & (t + before < back) & (position + t >= back)
            old = ring + ((position + t - back + RING) % RING) * WIDTH + at[None, :]
            total += tl.load(old, kept, 0.0).to(tl.float32) * tl.load(conv + at * KERNEL + KERNEL - 1 - back)[None, :]
    return total * tl.sigmoid(total)


@jit
def _product(a, b, PRECISE: tl.constexpr):
    if PRECISE:
        c = tl.dot(a, b, input_precision="tf32x3")
    else:
        c = tl.dot(a, b)
    return c


@jit
def _doubled(inverse, system, level, PRECISE: tl.constexpr, CHUNK: tl.constexpr):
    """The inverse of blocks of 2 ** (level + 1) rows, from that of their halves."""
    r = tl.arange(0, CHUNK)[:, None]
    c = tl.arange(0, CHUNK)[None, :]
    between = tl.where((r >> (level + 1) == c >> (level + 1)) & (r >> level != c >> level), system, 0.0)
    return inverse - _product(_product(inverse, between, PRECISE), inverse, PRECISE)


@jit
def _inverse(system, CHUNK: tl.constexpr, PRECISE: tl.constexpr):
    """Of I + system, which is strictly lower triangular [CHUNK, CHUNK], float32."""
    r = tl.arange(0, CHUNK)[:, None]
    c = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(r == c, 1.0, tl.where(r // 2 == c // 2, -system, 0.0))
    if PRECISE:  # a fifth of the code, and fewer registers
        for level in range(1, 6):
            inverse = _doubled(inverse, system, level, PRECISE, CHUNK)
    else:
        for level in tl.static_range(1, 6):
            inverse = _doubled(inverse, system, level, PRECISE, CHUNK)
    return inverse


@jit
def _mix(
    projected, inputs, chunks, conv, mixed, row_stride, length_eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    RING: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS
    PARTS: tl.constexpr = CHUNK // ROWS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    head = tl.program_id(0) % HEADS
    part = tl.program_id(0) // HEADS % PARTS * ROWS
    entry = chunks + tl.program_id(0) // (HEADS * PARTS) * 5
    count = tl.load(entry + 2) - part
    if count <= 0:
        return
    ring = inputs + tl.load(entry).to(tl.int64) * (RING * WIDTH)
    row = tl.load(entry + 1).to(tl.int64) + part
    position = tl.load(entry + 3) + part
    first = tl.load(entry + 4).to(tl.int64)
    t = tl.arange(0, ROWS)
    rows = mixed + (row + t)[:, None] * CHANNELS
    there = (t < count)[:, None]
    if head < 2 * KEY_HEADS:
        i = head * KEY_DIM + tl.arange(0, KEY_DIM)
        k = _convolved(projected, ring, conv, row, first, position, count, i, row_stride, KERNEL, RING, WIDTH, ROWS)
        factor = tl.rsqrt(tl.sum(k * k, 1) + length_eps) * tl.where(head < KEY_HEADS, KEY_DIM**-0.5, 1.0)
        tl.store(rows + i[None, :], (k * factor[:, None]).to(mixed.dtype.element_ty), there)
    else:
        j = 2 * KEYS + (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
        v = _convolved(projected, ring, conv, row, first, position, count, j, row_stride, KERNEL, RING, WIDTH, ROWS)
        tl.store(rows + j[None, :], v.to(mixed.dtype.element_ty), there)


@jit
def _chunks(
    gates, chunks, decay, bias, mixed, w_out, within_out, total_out, gate_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    RING: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    entry = chunks + tl.program_id(0) // VALUE_HEADS * 5
    head = tl.program_id(0) % VALUE_HEADS
    count = tl.load(entry + 2)
    if count == 0:
        return
    row = tl.load(entry + 1).to(tl.int64)
    dtype = mixed.dtype.element_ty
    t = tl.arange(0, CHUNK)
    i = tl.arange(0, KEY_DIM)
    there = t < count
    g, beta = fading(gates + (row + t) * gate_stride, head, decay, bias, VALUE_HEADS, there)
    total = tl.cumsum(tl.where(there, g, 0.0), 0)
    beta = tl.where(there, beta, 0.0)
    at = (row + t) * VALUE_HEADS + head
    tl.store(total_out + at, total, there)
    k_at = mixed + (row + t)[:, None] * CHANNELS + KEYS + (head // GROUP * KEY_DIM + i)[None, :]
    k = tl.load(k_at, there[:, None], 0.0)
    lower = t[:, None] >= t[None, :]
    faded = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)
    system = tl.where(t[:, None] > t[None, :], _product(k, tl.trans(k), PRECISE) * faded * beta[:, None], 0.0)
    within = _product(tl.load(k_at - KEYS, there[:, None], 0.0), tl.trans(k), PRECISE) * faded
    tl.store(within_out + at[:, None] * CHUNK + t[None, :], within.to(dtype), there[:, None])
    inverse = _inverse(system, CHUNK, PRECISE).to(dtype)
    w = _product(inverse, (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(dtype), PRECISE)
    tl.store(w_out + at[:, None] * KEY_DIM + i[None, :], w.to(dtype), there[:, None])
    v_at = mixed + (row + t)[:, None] * CHANNELS + 2 * KEYS + (head * VALUE_DIM + tl.arange(0, VALUE_DIM))[None, :]
    v = tl.load(v_at, there[:, None], 0.0).to(tl.float32)
    u = _product(inverse, (v * beta[:, None]).to(dtype), PRECISE)
    tl.store(v_at, u.to(dtype), there[:, None])


@jit(do_not_specialize=["decodes"])
def _states(
    projected, inputs, states, behind, positions, query_start, seq_slots, seq_lens, mixed, w_in, within_in, total_in, out,
    row_stride, decodes,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL: tl.constexpr,
    RING: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, PRECISE: tl.constexpr,
    DRAFTS: tl.constexpr, ANY: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    PARTS: tl.constexpr = VALUE_DIM // COLUMNS
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % VALUE_HEADS
    sequence = decodes + tl.program_id(0) // (PARTS * VALUE_HEADS)
    begin = tl.load(query_start + sequence).to(tl.int64)
    count = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    if ANY:
        alive = tl.load(seq_lens + sequence) > 0
        if (count < 2) | (alive == 0):
            return
    start = tl.load(positions + begin)
    slot = tl.load(seq_slots + sequence).to(tl.int64)
    dtype = mixed.dtype.element_ty
    t = tl.arange(0, CHUNK)
    i = tl.arange(0, KEY_DIM)
    j = part * COLUMNS + tl.arange(0, COLUMNS)
    state_at = states + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + i[:, None] * VALUE_DIM + j[None, :]
    state = tl.load(state_at, (i[:, None] >= 0) & (start > 0), 0.0)
    for chunk in range(0, (start % CHUNK + count + CHUNK - 1) // CHUNK):
        edge = (start // CHUNK + chunk) * CHUNK
        from_ = tl.maximum(edge, start)
        rows = tl.minimum(edge + CHUNK, start + count) - from_
        there = (t < rows)[:, None]
        row = begin + (from_ - start) + t
        at = row * VALUE_HEADS + head
        x = mixed + row[:, None] * CHANNELS
        q = tl.load(x + head // GROUP * KEY_DIM + i[None, :], there, 0.0)
        k = tl.load(x + KEYS + head // GROUP * KEY_DIM + i[None, :], there, 0.0)
        w = tl.load(w_in + at[:, None] * KEY_DIM + i[None, :], there, 0.0)
        u = tl.load(x + 2 * KEYS + head * VALUE_DIM + j[None, :], there, 0.0)
        within = tl.load(within_in + at[:, None] * CHUNK + t[None, :], there, 0.0)
        total = tl.load(total_in + at, t < rows, 0.0)
        last = tl.load(total_in + (begin + (from_ - start) + rows - 1) * VALUE_HEADS + head)
        before = state.to(dtype)
        corrected = u.to(tl.float32) - _product(w, before, PRECISE)
        o = tl.exp(total)[:, None] * _product(q, before, PRECISE) + _product(within, corrected.to(dtype), PRECISE)
        tl.store(out + at[:, None] * VALUE_DIM + j[None, :], o.to(dtype), there)
        remaining = corrected * tl.exp(tl.where(t < rows, last - total, 0.0))[:, None]
        state = tl.exp(last) * state + _product(tl.trans(k), remaining.to(dtype), PRECISE)
    tl.store(state_at, state)
    ring = inputs + slot * (RING * WIDTH)
    v_at = 2 * KEYS + head * VALUE_DIM + j
    q_at = head // GROUP * KEY_DIM + i
    for back in tl.static_range(0, KERNEL):
        if count > back:
            x = projected + (begin + count - 1 - back) * row_stride
            own = ring + (start + count - 1 - back) % RING * WIDTH
            tl.store(own + v_at, tl.load(x + v_at))
            if (part == 0) & (head % GROUP == 0):
                tl.store(own + q_at, tl.load(x + q_at))
                tl.store(own + KEYS + q_at, tl.load(x + KEYS + q_at))
    if DRAFTS:
        tl.store(behind + slot * VALUE_HEADS + head, start + count, part == 0)
