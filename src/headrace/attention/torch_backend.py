"""Attention in plain torch: the exact reference, and what runs on the CPU.

Keys and values are gathered token by token from their blocks into a scratch buffer that all layers share (fresh memory per
layer would cost more in page faults than the copy itself), then go through torch's fused kernel. Query heads that share a
key head are query rows of it, so nothing is repeated. Padding repeats a token of the *same* sequence: a sequence whose
values are broken (NaN) cannot reach another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.scores import Scoring
from headrace.cache import fp8
from headrace.cache.kv_cache import KVCache
from headrace.model.attention import AttentionBackend, KeyValues
from headrace.model.batch import ForwardBatch

# A decode group ends where the longest of its sequences would make the others' padding more than a quarter ...
_MIN_FILL = 0.75
# ... unless it is so few tokens that one more call would cost more.
_FREE_PADDING = 64
# Keys of a decode group: what is still in the cores' caches when it is read again (a third faster than all at once).
_GROUP_BYTES = 1 << 20

Stored = tuple[Tensor, Tensor | None]  # a layer's keys or values, and their scales


@dataclass(slots=True)
class DecodeGroup:
    """Sequences whose keys are gathered and attended together: `rows` of q, `index` of the cache's token slots [D * L]."""

    rows: slice | Tensor
    count: int  # D
    length: int  # L
    index: Tensor
    mask: Tensor | None  # [D, 1, 1, L] of q's dtype, 0 or -inf; None: all have L keys


@dataclass(slots=True)
class Prefill:
    """One sequence with several rows: query rows at positions start.., keys at positions first_key.. ."""

    rows: slice
    start: int
    first_key: int
    index: Tensor
    masks: dict[int, Tensor] = field(default_factory=dict)  # of the tile that begins at a row, for the next layers


class TorchAttention(AttentionBackend):
    """`scratch_bytes` bounds each of: gathered keys, gathered values, masks, and score matrices that are written out.

    A single sequence whose context alone is larger than that is gathered whole all the same. `tile_rows`: query rows that
    share one range of keys where a mask is needed.
    """

    def __init__(self, scratch_bytes: int = 64 << 20, tile_rows: int = 256):
        self.scratch_bytes, self.tile_rows = scratch_bytes, tile_rows
        self._mask_bytes = 0
        self._scratch: dict[str, Tensor] = {}
        self._plans: dict[int, tuple[list[DecodeGroup], list[Prefill]]] = {}

    def begin(self, batch: ForwardBatch, kv: KVCache) -> None:
        self._plans.clear()
        self._mask_bytes = 0

    def attend(
        self, q: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int, softcap: float,
        own: KeyValues | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See AttentionBackend.attend. `begin` must have been called for this batch."""
        scoring, plan = Scoring(scale, softcap, sinks), self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._plan(batch, kv, window, q.dtype, scoring.plain)
        groups, prefills = plan
        rows, heads, dim = q.shape
        keys, values = zip((kv.k[layer], kv.v[layer]), kv.scales[layer], strict=True)
        if len(groups) == 1 and not prefills and isinstance(groups[0].rows, slice):
            return self._decode(q, groups[0], keys, values, scoring).reshape(rows, heads * dim)
        out = q.new_empty(rows, heads, dim)
        for group in groups:
            out[group.rows] = self._decode(q[group.rows], group, keys, values, scoring)
        for prefill in prefills:
            self._prefill(q[prefill.rows], prefill, keys, values, out[prefill.rows], scoring, window)
        return out.view(rows, heads * dim)

    # -- what to read: once per forward and window

    def _plan(
        self, batch: ForwardBatch, kv: KVCache, window: int, dtype: torch.dtype, plain: bool
    ) -> tuple[list[DecodeGroup], list[Prefill]]:
        tables = batch.block_tables.index_select(0, batch.seq_slots)
        contexts, decodes = batch.context_lens, batch.num_decodes
        lengths = [max(1, min(length, window or length)) for length in contexts[:decodes]]
        itemsize = dtype.itemsize if plain else 4  # scores that are written out are in float32
        heads, dim = kv.k[kv.first].shape[2:]
        most = max(1, min(self.scratch_bytes, _GROUP_BYTES) // (heads * dim * itemsize))
        groups = []
        for members in _similar(lengths, most):
            picked = torch.tensor(members, device=tables.device)
            counts = torch.tensor([lengths[m] for m in members], device=tables.device)
            ends = torch.tensor([max(1, contexts[m]) for m in members], device=tables.device)
            length = max(lengths[m] for m in members)
            steps = torch.arange(length, device=tables.device)
            positions = torch.minimum((ends - counts)[:, None] + steps, ends[:, None] - 1)
            index = _token_slots(tables[picked], positions, kv.block_size)
            mask = None
            if any(lengths[m] != length for m in members):
                mask = torch.zeros(positions.shape, dtype=dtype, device=tables.device)
                mask = mask.masked_fill_(steps >= counts[:, None], -torch.inf)[:, None, None]
            whole = members == list(range(members[0], members[0] + len(members)))
            rows = slice(members[0], members[0] + len(members)) if whole else picked
            groups.append(DecodeGroup(rows, len(members), length, index.flatten(), mask))
        prefills = []
        first_row = decodes
        for s in range(decodes, batch.num_seqs):
            count, context = batch.query_lens[s], contexts[s]
            start = context - count
            first_key = max(0, start - window + 1) if window else 0
            positions = torch.arange(first_key, context, device=tables.device)
            index = _token_slots(tables[s : s + 1], positions[None], kv.block_size)
            prefills.append(Prefill(slice(first_row, first_row + count), start, first_key, index.flatten()))
            first_row += count
        return groups, prefills

    def _gather(self, name: str, stored: Stored, index: Tensor, dtype: torch.dtype) -> Tensor:
        """What is stored at the token slots `index` [n], as [n, kv_heads, dim] in a buffer that the next layer overwrites."""
        source, scales = stored
        shape = (index.shape[0], *source.shape[2:])
        size = shape[0] * shape[1] * shape[2]
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self._scratch[name] = torch.empty(size, dtype=dtype, device=source.device)
        if scales is not None:
            return fp8.read(source, scales, index, buffer[:size].view(shape))
        return torch.index_select(source.flatten(0, 1), 0, index, out=buffer[:size].view(shape))

    # -- one layer

    def _decode(self, q: Tensor, group: DecodeGroup, keys: Stored, values: Stored, scoring: Scoring) -> Tensor:
        """q [D, heads, dim] -> [D, heads, dim]."""
        shape = (group.count, group.length)
        k = self._gather("k", keys, group.index, q.dtype).unflatten(0, shape).transpose(1, 2)
        v = self._gather("v", values, group.index, q.dtype).unflatten(0, shape).transpose(1, 2)
        grouped = q.unflatten(1, (k.shape[1], -1))  # the heads of a group are the rows of its key head
        if scoring.plain:
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=scoring.scale)
        else:
            out = scoring.attend(grouped, k, v, group.mask, 1)
        return out.reshape(q.shape)

    def _prefill(
        self, q: Tensor, prefill: Prefill, keys: Stored, values: Stored, out: Tensor,
        scoring: Scoring, window: int,
    ) -> None:  # fmt: skip
        """q, out [n, heads, dim]. Rows are cut into tiles, each with the keys that it can see."""
        k = self._gather("k", keys, prefill.index, q.dtype).transpose(0, 1).unsqueeze(1)  # [kv_heads, 1, keys, dim]
        v = self._gather("v", values, prefill.index, q.dtype).transpose(0, 1).unsqueeze(1)
        rows, heads = q.shape[:2]
        grouped = q.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)  # [kv_heads, group, n, dim]
        result = out.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)
        if prefill.start == 0 and scoring.plain and not (window and rows > window):
            every = (-1, grouped.shape[1], -1, -1)
            result.copy_(
                F.scaled_dot_product_attention(grouped, k.expand(every), v.expand(every), is_causal=True, scale=scoring.scale)
            )
            return
        tile = max(1, min(self.tile_rows, self.scratch_bytes // (4 * (1 if scoring.plain else heads) * k.shape[2])))
        for first in range(0, rows, tile):
            last = min(first + tile, rows)
            low = max(0, prefill.start + first - window + 1) if window else 0
            part = slice(low - prefill.first_key, prefill.start + last - prefill.first_key)
            mask = self._tile_mask(q, prefill, first, last, low, window)
            queries, ks, vs = grouped[:, :, first:last], k[:, :, part], v[:, :, part]
            if scoring.plain:
                every = (-1, grouped.shape[1], -1, -1)
                result[:, :, first:last] = F.scaled_dot_product_attention(
                    queries, ks.expand(every), vs.expand(every), attn_mask=mask, scale=scoring.scale
                )
            else:
                result[:, :, first:last] = scoring.attend(queries, ks, vs, mask, 0)

    def _tile_mask(self, q: Tensor, prefill: Prefill, first: int, last: int, low: int, window: int) -> Tensor:
        """[last - first, keys from position `low`] of q's dtype: 0 or -inf."""
        mask = prefill.masks.get(first)
        if mask is not None:
            return mask
        position = torch.arange(prefill.start + first, prefill.start + last, device=q.device)[:, None]
        key = torch.arange(low, prefill.start + last, device=q.device)
        hidden = key > position
        if window:
            hidden |= key <= position - window
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        self._mask_bytes += mask.numel() * mask.itemsize
        if self._mask_bytes <= self.scratch_bytes:
            prefill.masks[first] = mask
        return mask


def _similar(lengths: list[int], most: int) -> list[list[int]]:
    """Indices of `lengths` in groups of similar length, no group with more than `most` tokens with its padding."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        group = groups[-1] if groups else None
        if group is not None:
            longest = lengths[group[0]]
            close = lengths[i] >= min(_MIN_FILL * longest, longest - _FREE_PADDING)
            if close and (len(group) + 1) * longest <= most:
                group.append(i)
                continue
        groups.append([i])
    return [sorted(group) for group in groups]


def _token_slots(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """tables [S, blocks] int32, positions [S, n] -> index [S, n] int64 of each token in the cache's flattened blocks."""
    blocks = tables.gather(1, positions // block_size)
    return blocks.long() * block_size + positions % block_size
