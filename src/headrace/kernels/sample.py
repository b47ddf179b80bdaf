"""Token ids from logits without a sort: the Triton counterpart of sampling/sampler.py, stage for stage.

    _reduce       every id once: per block of 2048 the largest logit, its id and the sum of weights; per chunk of 32 the
                  largest logit
    _pick         one program per row: greedy rows, rows with temperature only (inverse CDF: the block, then the id in it),
                  broken rows
    _filter       one program per row with filters (sample_filter.py): only chunks whose largest logit may matter are gathered,
                  the edge of top-k and of top-p is found by bisection in registers, then the inverse CDF over what is kept;
                  where these candidates do not suffice the same over the whole row

    key = bits of |y| for y = (logit - largest) / temperature <= 0: an integer that orders the ids, the smallest first,
    so that bisection ends at an exact edge and ties share one fate

Everything stays on the device, shapes depend on the shape of the logits alone, and no sum depends on the order in which
programs run or on how many rows there are: CUDA-graph safe, bit-identical in every replay, indifferent to batch mates.
Before them, where ids are banned, `add_mask`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, pdl, tl
from headrace.kernels.sample_filter import PARAMETERS, _filter, block_sums, first_over, is_filtered, uniform

BLOCK, CHUNK = 2048, 32
FEW_CHUNKS, MANY_CHUNKS = 128, 512  # candidates of rows with a small top_k, and of all others; top_k up to half of it
ROW_TILE, SECTIONS = 1024, 8  # of rows that are read whole: ids per load, thresholds per pass
MASK_BLOCK = 4096


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_index: Tensor,
    sample_index: Tensor,
    *,
    purpose: int,
    greedy_eps: float,
    all_greedy: bool,
    any_filter: bool,
) -> tuple[Tensor, Tensor]:
    """logits [R, V] (bfloat16, float16 or float32, rows contiguous) -> (ids [R] int32, failed [R] bool).

    Parameters are [R]: temperature, top_p, min_p float32, top_k, sample_index int32, seed, output_index int64; they mean what
    SampleInputs says. Padded rows have temperature 0. CUDA tensors, or CPU tensors under Triton's interpreter.
    """
    rows, vocab = logits.shape
    num_blocks = -(-vocab // BLOCK)
    num_chunks = num_blocks * BLOCK // CHUNK
    per_row = 3 * num_blocks + (num_chunks if any_filter else 0)
    # one allocation: [rows] x (block maxima, block sums, block ids, chunk maxima)
    work = torch.empty(rows, per_row, dtype=torch.float32, device=logits.device)
    work_ids = work.view(torch.int32)
    token_ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    failed = torch.empty(rows, dtype=torch.bool, device=logits.device)
    common = (logits, logits.stride(0), work, work_ids, per_row, vocab, num_blocks, temperature)
    options = {"BLOCK": BLOCK, "EPS": greedy_eps, **pdl(logits)}
    draw = (seed, output_index, sample_index)
    filters = (top_k, top_p, min_p)
    stages = {"RANDOM": not all_greedy, "FILTERED": any_filter}
    _reduce[(rows, num_blocks)](*common, CHUNK=CHUNK, num_warps=4, **stages, **options)
    padded_blocks = next_power_of_2(num_blocks)
    _pick[(rows,)](
        *common, *filters, *draw, token_ids, failed, BLOCKS=padded_blocks, PURPOSE=purpose, num_warps=4, **stages, **options
    )
    if any_filter:
        candidates = torch.empty(rows, MANY_CHUNKS, dtype=torch.int32, device=logits.device)
        _filter[(rows,)](
            *common, *filters, *draw, token_ids, failed, candidates, MANY_CHUNKS, num_chunks,
            BLOCKS=padded_blocks, CHUNKS=next_power_of_2(num_chunks), FEW=FEW_CHUNKS, MANY=MANY_CHUNKS, CHUNK=CHUNK,
            TILE=ROW_TILE, SECTIONS=SECTIONS, PURPOSE=purpose, num_warps=8, **options,
        )  # fmt: skip
    return token_ids, failed


@jit(do_not_specialize_on_alignment=PARAMETERS)
def _reduce(
    logits_ptr, row_stride, work_ptr, work_ids_ptr, work_stride, vocab, num_blocks, temperature_ptr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, EPS: tl.constexpr, RANDOM: tl.constexpr, FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    CHUNKS: tl.constexpr = BLOCK // CHUNK
    chunk = tl.arange(0, CHUNKS)
    ids = block * BLOCK + chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    chunk_max = tl.max(x, 1)
    largest = tl.max(chunk_max, 0)
    # every NaN of the row costs nothing here, and is remembered in the block's maximum
    has_nan = tl.max((x != x).to(tl.int32))
    first = tl.min(tl.where(x == largest, ids, 0x7FFFFFFF))
    work = work_ptr + row * work_stride
    tl.store(work + block, tl.where(has_nan > 0, float("nan"), largest))
    tl.store(work_ids_ptr + row * work_stride + 2 * num_blocks + block, first)
    if FILTERED:
        tl.store(work + 3 * num_blocks + block * CHUNKS + chunk, chunk_max)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature >= EPS:
            # a block of -inf alone would give -inf - -inf
            center = tl.where(largest == -float("inf"), 0.0, largest)
            weights = tl.exp((x - center) * tl.div_rn(1.0, temperature))
            tl.store(work + num_blocks + block, tl.sum(weights))


@jit(do_not_specialize_on_alignment=PARAMETERS)
def _pick(
    logits_ptr, row_stride, work_ptr, work_ids_ptr, work_stride, vocab, num_blocks, temperature_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, index_ptr, sample_ptr, out_ptr, failed_ptr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, PURPOSE: tl.constexpr,
    RANDOM: tl.constexpr, FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    work = work_ptr + row * work_stride
    m = tl.load(work + block, mask=block < num_blocks, other=-float("inf"))
    has_nan = tl.max((m != m).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(m == m, m, -float("inf")), 0)
    failed = has_nan | (tl.abs(largest) == float("inf"))
    firsts = tl.load(work_ids_ptr + row * work_stride + 2 * num_blocks + block, mask=block < num_blocks, other=0)
    token = tl.min(tl.where(m == largest, firsts, 0x7FFFFFFF), 0)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        here = (temperature >= EPS) & (failed == 0)
        if FILTERED:
            top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
            here = here & (is_filtered(top_k, top_p, min_p, vocab) == 0)
        if here:
            inverse = tl.div_rn(1.0, temperature)
            u = uniform(tl.load(seed_ptr + row), tl.load(index_ptr + row), tl.load(sample_ptr + row), PURPOSE)
            sums = block_sums(work, m, block, num_blocks, largest, inverse)
            target = u * tl.sum(sums, 0)
            chosen = first_over(sums, block, target)
            rest = target - tl.sum(tl.where(block < chosen, sums, 0.0), 0)
            ids = chosen * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
            token = first_over(tl.exp((x - largest) * inverse), ids, rest)
    tl.store(out_ptr + row, tl.where(failed, 0, token))
    tl.store(failed_ptr + row, failed)


def uniform_rows(seed: Tensor, index: Tensor, sample_index: Tensor, purpose: int) -> Tensor:
    """sampling/philox.py's uniform of R rows: int64, int64, int32 -> float32 [R]. CUDA tensors, or under the interpreter."""
    out = torch.empty(len(seed), dtype=torch.float32, device=seed.device)
    _uniform_rows[(-(-len(seed) // 256),)](seed, index, sample_index, out, len(seed), PURPOSE=purpose, BLOCK=256)
    return out


@jit(do_not_specialize=["count"], do_not_specialize_on_alignment=PARAMETERS)
def _uniform_rows(seed_ptr, index_ptr, sample_ptr, out, count, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < count
    seed, index = tl.load(seed_ptr + row, there, 0), tl.load(index_ptr + row, there, 0)
    tl.store(out + row, uniform(seed, index, tl.load(sample_ptr + row, there, 0), PURPOSE), there)


def add_mask(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """logits [R, V] of `rows` [Q] int64 (none twice) += 0 where the bit is set, else -inf, in place.

    bits [Q, ceil(V / 32)] int32: bit v % 32 of word v / 32 is that of id v. NaN stays NaN.
    """
    (add_mask_triton if on_gpu(logits) else add_mask_reference)(logits, bits, rows)


def add_mask_reference(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """See `add_mask`. Byte b of the mask is row b of a table of 0 and -inf, eight at a time: branches over a mask of bools cost
    three times as much on a CPU."""
    byte = torch.arange(256, device=logits.device)
    table = torch.where((byte[:, None] >> byte[:8] & 1).bool(), 0.0, -torch.inf)
    added = torch.nn.functional.embedding(bits.view(torch.uint8).int(), table).flatten(1)[:, : logits.shape[1]]
    logits.index_add_(0, rows, added.to(logits.dtype))


def add_mask_triton(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """See `add_mask`: one pass that touches only what is banned."""
    vocab = logits.shape[1]
    _add_mask[(-(-vocab // MASK_BLOCK), len(bits))](
        logits, bits, rows, vocab, logits.stride(0), bits.stride(0), BLOCK=MASK_BLOCK, num_warps=8
    )


@jit
def _add_mask(logits, bits, rows, V, logits_stride, bits_stride, BLOCK: tl.constexpr):
    index = tl.program_id(1)
    row = tl.load(rows + index).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bits + index.to(tl.int64) * bits_stride + ids // 32, ids < V, -1)
    banned = ((words >> (ids % 32)) & 1) == 0
    place = logits + row * logits_stride + ids
    tl.store(place, (tl.load(place, banned, 0.0).to(tl.float32) + float("-inf")).to(logits.dtype.element_ty), banned)
