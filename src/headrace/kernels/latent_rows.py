"""What multi-head latent attention keeps of its rows: the normed latent and the rotated key, written to the cache; and the part
of queries that meets that key, rotated, beside what meets the latent."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.launch import Launcher, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, tl
from headrace.kernels.norm import rms_norm_reference
from headrace.kernels.qkv import rotation_rows

HEADS = 8  # of a program


class LatentSizes(Protocol):
    """A LatentConfig has them."""

    @property
    def rank(self) -> int: ...
    @property
    def rope(self) -> int: ...
    @property
    def nope(self) -> int: ...
    @property
    def query(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def norm_eps(self) -> float: ...


def latent_rope_write_reference(
    q: Tensor, queries: Tensor, row: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, norm: Tensor, cache: Tensor,
    slot_mapping: Tensor, latent: LatentSizes,
) -> None:  # fmt: skip
    """See `latent_rope_write`."""
    if positions is not None:
        cos, sin = rotation_rows(cos, sin, positions)

    def rotated(x: Tensor) -> Tensor:
        if latent.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        return torch.addcmul(x * cos, x.roll(latent.rope // 2, -1), sin).to(x.dtype)

    q[:, :, latent.rank :] = rotated(queries.unflatten(1, (-1, latent.query))[:, :, latent.nope :])
    normed = rms_norm_reference(row[:, : latent.rank], norm, latent.norm_eps)
    kept = torch.cat((normed, rotated(row[:, None, latent.rank :])[:, 0]), 1)
    cache.flatten(0, 2).index_copy_(0, slot_mapping, kept)


@jit
def _latent_rope_write(
    q_ptr, queries_ptr, row_ptr, positions_ptr, cos_ptr, sin_ptr, slots_ptr, norm_ptr, cache_ptr, own_ptr, eps,
    queries_stride, row_stride, token_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, PACK: tl.constexpr, INTERLEAVED: tl.constexpr, KEEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program takes PACK heads of one row, or what is cached of it."""
    GROUPS: tl.constexpr = (HEADS + PACK - 1) // PACK
    row = (tl.program_id(0) // (GROUPS + 1)).to(tl.int64)
    group = tl.program_id(0) % (GROUPS + 1)
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    i = tl.arange(0, HALF_PAD)
    there = i < HALF
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart: tl.constexpr = 1 if INTERLEAVED else HALF
    cos = tl.load(cos_ptr + position * HALF + i, mask=there, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + i, mask=there, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if group < GROUPS:
        head = group * PACK + tl.arange(0, PACK)[:, None]
        mask = (head < HEADS) & there[None, :]
        source = queries_ptr + row * queries_stride + head * (NOPE + 2 * HALF) + NOPE + (i * step)[None, :]
        low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + apart, mask=mask, other=0.0).to(tl.float32)
        target = q_ptr + (row * HEADS + head) * (RANK + 2 * HALF) + RANK + i[None, :]
        tl.store(target, (low * cos[None, :] - high * sin[None, :]).to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (high * cos[None, :] + low * sin[None, :]).to(q_ptr.dtype.element_ty), mask=mask)
    elif (slot >= 0) | KEEP:
        c = tl.arange(0, RANK_PAD)
        source = row_ptr + row * row_stride
        x = tl.load(source + c, mask=c < RANK, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + c, mask=c < RANK, other=0.0).to(tl.float32)
        low = tl.load(source + RANK + i * step, mask=there, other=0.0).to(tl.float32)
        high = tl.load(source + RANK + i * step + apart, mask=there, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * weight).to(cache_ptr.dtype.element_ty)
        first = (low * cos - high * sin).to(cache_ptr.dtype.element_ty)
        second = (high * cos + low * sin).to(cache_ptr.dtype.element_ty)
        if slot >= 0:
            target = cache_ptr + slot * token_stride
            tl.store(target + c, x, mask=c < RANK)
            tl.store(target + RANK + i, first, mask=there)
            tl.store(target + RANK + HALF + i, second, mask=there)
        if KEEP:
            kept = own_ptr + row * (RANK + 2 * HALF)
            tl.store(kept + c, x, mask=c < RANK)
            tl.store(kept + RANK + i, first, mask=there)
            tl.store(kept + RANK + HALF + i, second, mask=there)


_launcher = Launcher(_latent_rope_write)


def latent_rope_write_triton(
    q: Tensor, queries: Tensor, row: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, cache: Tensor,
    slot_mapping: Tensor, latent: LatentSizes, keep: bool = False,
) -> Tensor | None:  # fmt: skip
    """See `latent_rope_write`."""
    rows, heads = q.shape[:2]
    own = row.new_empty(row.shape) if keep else None
    if not rows:
        return own
    half, pack = latent.rope // 2, min(HEADS, next_power_of_2(heads))
    _launcher(
        rows * (-(-heads // pack) + 1),
        (q, queries, row, positions, cos, sin, slot_mapping, norm, cache, cache if own is None else own),
        (latent.norm_eps, queries.stride(0), row.stride(0), cache.stride(1)),
        num_warps=4, HEADS=heads, RANK=latent.rank, RANK_PAD=next_power_of_2(latent.rank), NOPE=latent.nope, HALF=half,
        HALF_PAD=next_power_of_2(half), PACK=pack, INTERLEAVED=latent.interleaved, KEEP=keep,
    )  # fmt: skip
    return own


def latent_rope_write(
    q: Tensor, queries: Tensor, row: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, norm: Tensor, cache: Tensor,
    slot_mapping: Tensor, latent: LatentSizes, keep: bool = False,
) -> Tensor | None:  # fmt: skip
    """Rotate what is rotated, norm the latents; write q's last columns and the cache.

    q [T, heads, row] contiguous, of which the last `rope` columns are written; queries [T, heads * query] and row [T, row]
    (latent, then key) as they were projected, their rows may lie apart; positions, cos, sin as of `qkv_rope_write`; norm
    [rank]; cache [num_blocks, block_size, 1, row]; slot_mapping [T] int64, -1 writes nothing there. `keep` (GPU only): what was
    cached is returned too, [T, row].
    """
    if on_gpu(q):
        assert positions is not None
        return latent_rope_write_triton(q, queries, row, positions, cos, sin, norm, cache, slot_mapping, latent, keep)
    latent_rope_write_reference(q, queries, row, positions, cos, sin, norm, cache, slot_mapping, latent)
    return None
