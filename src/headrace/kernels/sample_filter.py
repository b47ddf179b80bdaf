"""Top-k, top-p and min-p without a sort, for `sample.py`; and what all its rows share: counted numbers, the inverse CDF."""

from __future__ import annotations

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, tl

# Rows of a table with a column for each request: where one begins depends on how many there are, and a kernel for each
# alignment would be compiled (a third of a second, several seconds with filters) in the middle of serving.
PARAMETERS = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "index_ptr", "sample_ptr"]


@jit
def uniform(seed, position, sample_index, PURPOSE: tl.constexpr):
    """sampling/philox.py's uniform: int64, int64, int32 -> float32 in (0, 1)."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    purpose = low * 0 + PURPOSE
    word, _1, _2, _3 = tl.philox(seed, low, high, purpose, sample_index.to(tl.uint32))
    return ((word >> 9) * 2 + 1).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@jit
def _key(x, largest, inverse):
    """Smaller is likelier; 0 for the largest logit itself."""
    return tl.abs((x - largest) * inverse).to(tl.int32, bitcast=True)


@jit
def _weight(key):
    """exp(y) of a key."""
    return tl.exp(-key.to(tl.float32, bitcast=True))


@jit
def is_filtered(top_k, top_p, min_p, vocab):
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)


@jit
def block_sums(work, m, block, num_blocks, largest, inverse):
    """Weights of the blocks [BLOCKS], relative to the row's largest logit."""
    sums = tl.load(work + num_blocks + block, mask=block < num_blocks, other=0.0)
    return tl.where(m == -float("inf"), 0.0, sums * tl.exp((m - largest) * inverse))


@jit
def first_over(weights, places, target):
    """The first place at which the running sum of weights [N] exceeds target, else the last that has a weight.

    A parallel running sum need not rise monotonically in its last bit: only places with a weight count.
    """
    running = tl.cumsum(weights, 0)
    first = tl.min(tl.where((running > target) & (weights > 0), places, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    return tl.minimum(first, last)


@jit(do_not_specialize_on_alignment=PARAMETERS)
def _filter(
    logits_ptr, row_stride, work_ptr, work_ids_ptr, work_stride, vocab, num_blocks, temperature_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, index_ptr, sample_ptr, out_ptr, failed_ptr,
    candidates_ptr, candidates_stride, num_chunks,
    BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, SECTIONS: tl.constexpr, EPS: tl.constexpr, PURPOSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    failed = tl.load(failed_ptr + row).to(tl.int32)
    if (temperature >= EPS) & (failed == 0) & is_filtered(top_k, top_p, min_p, vocab):
        inverse = tl.div_rn(1.0, temperature)
        work = work_ptr + row * work_stride
        block = tl.arange(0, BLOCKS)
        m = tl.load(work + block, mask=block < num_blocks, other=-float("inf"))
        largest = tl.max(m, 0)
        u = uniform(tl.load(seed_ptr + row), tl.load(index_ptr + row), tl.load(sample_ptr + row), PURPOSE)
        token = _drawn(
            logits_ptr + row * row_stride, work, candidates_ptr + row * candidates_stride, vocab, num_blocks, num_chunks, m,
            block, largest, inverse, top_k, top_p, min_p, u, CHUNKS, FEW, MANY, CHUNK, TILE, SECTIONS,
        )  # fmt: skip
        tl.store(out_ptr + row, token)


@jit
def _drawn(
    logits, work, candidates, vocab, num_blocks, num_chunks, m, block, largest, inverse, top_k, top_p, min_p, u,
    CHUNKS: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    SECTIONS: tl.constexpr,
):  # fmt: skip
    """The id that u draws of those that a row's filters keep; m [BLOCKS] are the blocks' largest logits.

    `candidates` [MANY] int32 is room for the chunks that may matter, at least twice FEW; a row for which they do not suffice
    leaves -1 there.
    """
    found, token = top_k * 0, top_k * 0
    if (top_k > 0) & (top_k <= FEW // 2):
        found, token = _of_candidates(
            logits, work, candidates, vocab, num_blocks, num_chunks, m, block, largest, inverse, top_k, top_p, min_p, u,
            CHUNKS, FEW, CHUNK, FEW // 2,
        )  # fmt: skip
    else:
        found, token = _of_candidates(
            logits, work, candidates, vocab, num_blocks, num_chunks, m, block, largest, inverse, top_k, top_p, min_p, u,
            CHUNKS, MANY, CHUNK, 0,
        )  # fmt: skip
    if found == 0:
        token = _of_whole_row(logits, vocab, largest, inverse, top_k, top_p, min_p, u, TILE, SECTIONS)
        tl.store(candidates, -1)
    return token


@jit
def _of_candidates(
    logits, work, candidates, vocab, num_blocks, num_chunks, m, block, largest, inverse, top_k, top_p, min_p, u,
    CHUNKS: tl.constexpr, WANTED: tl.constexpr, CHUNK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """(1 and the id, or 0 where more chunks than WANTED matter, 0). Where at most LIST ids are left for top-p these are listed
    behind the chunks, and how much weight there is up to each is known at once."""
    use_k = (top_k > 0) & (top_k < vocab)
    # chunks that may matter: those up to `edge`, at least as many as top_k, at most WANTED
    chunk = tl.arange(0, CHUNKS)
    x = tl.load(work + 3 * num_blocks + chunk, mask=chunk < num_chunks, other=-float("inf"))
    chunk_keys = tl.where(chunk < num_chunks, _key(x, largest, inverse), 0x7FFFFFFF)
    floor = tl.abs(tl.log(min_p)).to(tl.int32, bitcast=True)  # min-p keeps keys up to here; all if min_p is 0
    least = tl.where(use_k, top_k, WANTED // 2)
    edge = floor
    below = edge * 0 - 1
    count = tl.sum((chunk_keys <= edge).to(tl.int32), 0)
    while (count > WANTED) & (edge - below > 1):
        middle = below + (edge - below) // 2
        n = tl.sum((chunk_keys <= middle).to(tl.int32), 0)
        enough = n >= least
        edge = tl.where(enough, middle, edge)
        count = tl.where(enough, n, count)
        below = tl.where(enough, below, middle)
    complete = edge == floor  # no id that min-p keeps lies outside
    selected = chunk_keys <= edge
    place = tl.cumsum(selected.to(tl.int32), 0) - 1
    tl.store(candidates + place, chunk, mask=selected & (place < WANTED))
    tl.debug_barrier()
    slot = tl.arange(0, WANTED)
    listed = tl.load(candidates + slot, mask=slot < count, other=0)
    ids = listed[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    there = (slot < count)[:, None] & (ids < vocab)
    x = tl.load(logits + ids, mask=there, other=-float("inf")).to(tl.float32)
    keys = tl.where(there, _key(x, largest, inverse), 0x7FFFFFFF)
    keys = tl.where(keys <= edge, keys, 0x7FFFFFFF)
    if use_k:
        edge = _kth(keys, top_k, edge)
    weights = tl.where(keys <= edge, _weight(keys), 0.0)
    mass = tl.sum(weights)
    total = mass
    fits = count <= WANTED
    if (use_k | complete) == 0:
        # the kept ids are not all here; that is no matter if those of top-p are, by the weight of the whole row
        total = tl.sum(block_sums(work, m, block, num_blocks, largest, inverse), 0)
        fits = fits & (min_p <= 0.0) & (top_p < 1.0) & (mass >= top_p * total)
    token = top_k * 0
    if fits:
        if LIST > 0:
            kept = tl.sum((keys <= edge).to(tl.int32))
            if kept <= LIST:
                token = _of_list(tl.ravel(keys), tl.ravel(ids), edge, kept, candidates + WANTED, top_p, u, LIST)
            else:
                token = _of_chunks(keys, weights, edge, total, listed, slot, top_p, u, CHUNK)
        else:
            token = _of_chunks(keys, weights, edge, total, listed, slot, top_p, u, CHUNK)
    return fits.to(tl.int32), token


@jit
def _of_chunks(keys, weights, edge, total, listed, slot, top_p, u, CHUNK: tl.constexpr):
    """The id that u draws of those up to `edge`, or of these by top-p, whose chunks are `listed`."""
    if top_p < 1.0:
        edge = _nucleus(keys, weights, top_p * total, edge)
        weights = tl.where(keys <= edge, weights, 0.0)
    per_chunk = tl.sum(weights, 1)
    target = u * tl.sum(per_chunk, 0)
    chosen = first_over(per_chunk, slot, target)
    rest = target - tl.sum(tl.where(slot < chosen, per_chunk, 0.0), 0)
    inside = tl.sum(tl.where((slot == chosen)[:, None], weights, 0.0), 0)
    first_id = tl.sum(tl.where(slot == chosen, listed, 0), 0) * CHUNK
    return first_id + first_over(inside, tl.arange(0, CHUNK), rest)


@jit
def _of_list(keys, ids, edge, count, room, top_p, u, LIST: tl.constexpr):
    """The id that u draws of the `count` ones up to `edge`, or of these by top-p; `room` is for twice LIST numbers."""
    kept = keys <= edge
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(room + place, keys, mask=kept)
    tl.store(room + LIST + place, ids, mask=kept)
    tl.debug_barrier()
    place = tl.arange(0, LIST)
    keys = tl.load(room + place, mask=place < count, other=0x7FFFFFFF)
    ids = tl.load(room + LIST + place, mask=place < count, other=0)
    weights = tl.where(place < count, _weight(keys), 0.0)
    if top_p < 1.0:
        reached = tl.sum(tl.where(keys[None, :] <= keys[:, None], weights[None, :], 0.0), 1)
        edge = tl.minimum(edge, tl.min(tl.where(reached >= top_p * tl.sum(weights, 0), keys, 0x7FFFFFFF), 0))
        weights = tl.where(keys <= edge, weights, 0.0)
    drawn = first_over(weights, place, u * tl.sum(weights, 0))
    return tl.sum(tl.where(place == drawn, ids, 0), 0)


@jit
def _kth(keys, k, edge):
    """The k-th smallest of keys [M, N], or a larger number that as few keys reach; `edge` if fewer than k reach it."""
    below = edge * 0 - 1
    count = tl.sum((keys <= edge).to(tl.int32))
    while (count > k) & (edge - below > 1):
        middle = below + (edge - below) // 2
        n = tl.sum((keys <= middle).to(tl.int32))
        enough = n >= k
        edge = tl.where(enough, middle, edge)
        count = tl.where(enough, n, count)
        below = tl.where(enough, below, middle)
    return edge


@jit
def _nucleus(keys, weights, target, edge):
    """The smallest key up to which the weights reach target; `edge` must reach it (or is the answer)."""
    below = edge * 0 - 1
    while edge - below > 1:
        middle = below + (edge - below) // 2
        enough = tl.sum(tl.where(keys <= middle, weights, 0.0)) >= target
        edge = tl.where(enough, middle, edge)
        below = tl.where(enough, below, middle)
    return edge


@jit
def _of_whole_row(
    logits, vocab, largest, inverse, top_k, top_p, min_p, u, TILE: tl.constexpr, SECTIONS: tl.constexpr
):  # fmt: skip
    """The same, over all ids."""
    edge = tl.abs(tl.log(min_p)).to(tl.int32, bitcast=True)
    if (top_k > 0) & (top_k < vocab):
        edge = _edge_of_row(logits, vocab, largest, inverse, edge, top_k.to(tl.float32), False, TILE, SECTIONS)
    total = _mass_of_row(logits, vocab, largest, inverse, edge, TILE)
    if top_p < 1.0:
        edge = _edge_of_row(logits, vocab, largest, inverse, edge, top_p * total, True, TILE, SECTIONS)
        total = _mass_of_row(logits, vocab, largest, inverse, edge, TILE)
    target = u * total
    token = top_k * 0
    passed = total * 0.0
    start = top_k * 0
    while (start < vocab) & (passed <= target):
        keys = _keys_at(logits, start, vocab, largest, inverse, TILE)
        weights = tl.where(keys <= edge, _weight(keys), 0.0)
        mass = tl.sum(weights, 0)
        if mass > 0.0:  # the last id with a weight, unless a later tile has one or this tile passes the target
            token = start + first_over(weights, tl.arange(0, TILE), target - passed)
        passed += mass
        start += TILE
    return token


@jit
def _keys_at(logits, start, vocab, largest, inverse, TILE: tl.constexpr):
    ids = start + tl.arange(0, TILE)
    x = tl.load(logits + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(ids < vocab, _key(x, largest, inverse), 0x7FFFFFFF)


@jit
def _mass_of_row(logits, vocab, largest, inverse, edge, TILE: tl.constexpr):
    sums = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab, TILE):
        keys = _keys_at(logits, start, vocab, largest, inverse, TILE)
        sums += tl.where(keys <= edge, _weight(keys), 0.0)
    return tl.sum(sums, 0)


@jit
def _edge_of_row(
    logits, vocab, largest, inverse, edge, target, BY_MASS: tl.constexpr, TILE: tl.constexpr, SECTIONS: tl.constexpr
):
    """The smallest key up to which `target` ids (or weight) of the row lie, `edge` if none below it: SECTIONS ways a pass."""
    section = tl.arange(0, SECTIONS)
    below = edge * 0 - 1
    while edge - below > 1:
        span = (edge - below).to(tl.int64)
        marks = tl.maximum(below + (span * (section + 1) // SECTIONS).to(tl.int32), below + 1)
        sums = tl.zeros([TILE, SECTIONS], tl.float32)
        for start in range(0, vocab, TILE):
            keys = _keys_at(logits, start, vocab, largest, inverse, TILE)
            if BY_MASS:
                sums += tl.where(keys[:, None] <= marks[None, :], _weight(keys)[:, None], 0.0)
            else:
                sums += (keys[:, None] <= marks[None, :]).to(tl.float32)
        enough = tl.sum(sums, 0) >= target
        below = tl.maximum(below, tl.max(tl.where(enough, -1, marks), 0))
        below = tl.minimum(below, edge - 1)
        edge = tl.minimum(edge, tl.min(tl.where(enough, marks, 0x7FFFFFFF), 0))
    return edge
