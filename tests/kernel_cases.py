"""What the tests of the kernels share, in Triton's interpreter and on a card: random paged batches, how a kernel is called on them,
and what it must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from headrace.cache import fp8
from headrace.kernels.attention_decode import split_attention
from headrace.kernels.attention_prefill import varlen_attention
from headrace.kernels.latent_attention import PartSpace, latent_attention
from headrace.kernels.qkv import qkv_rope_write_reference
from headrace.kernels.split import SplitSpace, split_space
from headrace.kernels.widen_kv import BLOCK, Widened, widen
from headrace.model.batch import ForwardBatch

LATENT_SCALE = 0.13


@dataclass
class PagedCase:
    """Sequences with `query_lens` new rows at the end of `context_lens` tokens; tables are indexed by shuffled slots."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    query_lens: list[int]
    context_lens: list[int]
    scales: fp8.Scales = (None, None)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.block_tables, self.seq_slots, self.query_start, self.seq_lens


def paged_case(
    query_lens: list[int], context_lens: list[int], heads: int, kv_heads: int, head_dim: int, block: int, *,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, spare_blocks: int = 3, poison: bool = True,
) -> PagedCase:  # fmt: skip
    """A batch whose blocks lie scattered in the cache. With `poison`, everything outside of the sequences is NaN."""
    gen = torch.Generator(device=device).manual_seed(seed)
    total, width = sum(-(-c // block) for c in context_lens), max(1, -(-max(context_lens) // block)) + 1
    num_blocks = total + spare_blocks
    shape = (num_blocks, block, kv_heads, head_dim)
    k, v = (torch.randn(shape, generator=gen, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    order = torch.randperm(num_blocks, generator=gen, device=device).to(torch.int32)
    slots = torch.randperm(len(context_lens) + 2, generator=gen, device=device)[: len(context_lens)].to(torch.int32)
    tables = torch.full((len(context_lens) + 2, width), num_blocks - 1, dtype=torch.int32, device=device)
    used = torch.zeros(num_blocks, block, dtype=torch.bool, device=device)
    first = 0
    for s, c in enumerate(context_lens):
        n = -(-c // block)
        tables[slots[s], :n] = order[first : first + n]
        used[order[first : first + n].long()] = True
        if c % block:
            used[int(order[first + n - 1]), c % block :] = False
        first += n
    if poison:
        k[~used], v[~used] = float("nan"), float("nan")
    rows = sum(query_lens)
    # the rows of q are strided, as they are inside a fused projection
    q = torch.randn((rows, heads + 2 * kv_heads, head_dim), generator=gen, device=device, dtype=torch.float32).to(dtype)
    start = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    return PagedCase(q[:, :heads], k, v, tables, slots, start, lens, query_lens, context_lens)


def in_fp8(case: PagedCase) -> tuple[PagedCase, PagedCase]:
    """The case with its cache in FP8, and with one of the same numbers in float32, for the reference."""
    narrow, wide = {}, {}
    for name in ("k_cache", "v_cache"):
        data, scales = fp8.quantize(getattr(case, name))
        narrow[name] = data, scales.transpose(1, 2).contiguous()
        wide[name] = fp8.dequantize(data, scales)
    (k, k_scales), (v, v_scales) = narrow["k_cache"], narrow["v_cache"]
    return replace(case, k_cache=k, v_cache=v, scales=(k_scales, v_scales)), replace(case, **wide)


def attention_reference(
    case: PagedCase, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Dense attention in float32 (float64 on the CPU), sequence by sequence -> [T, heads * head_dim]; padded rows are 0."""
    wide = torch.float64 if case.q.device.type == "cpu" else torch.float32
    heads, head_dim = case.q.shape[1:]
    block, kv_heads = case.k_cache.shape[1:3]
    out = torch.zeros(case.q.shape[0], heads, head_dim, dtype=wide, device=case.q.device)
    row = 0
    for s, (n, c) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        if c:
            blocks = case.block_tables[int(case.seq_slots[s]), : -(-c // block)].long()
            k = case.k_cache[blocks].flatten(0, 1)[:c].to(wide).repeat_interleave(heads // kv_heads, 1)
            v = case.v_cache[blocks].flatten(0, 1)[:c].to(wide).repeat_interleave(heads // kv_heads, 1)
            for r0 in range(0, n, 256):  # bounded memory
                r1 = min(n, r0 + 256)
                scores = torch.einsum("qhd,khd->hqk", case.q[row + r0 : row + r1].to(wide), k) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                position = torch.arange(c - n + r0, c - n + r1, device=out.device)[:, None]
                key = torch.arange(c, device=out.device)[None]
                seen = (key <= position) & ((key > position - window) if window else True)
                scores = scores.masked_fill(~seen, float("-inf"))
                weights = scores.softmax(-1)
                if sinks is not None:  # the share of what has a value: Z / (Z + exp(sink))
                    weights = weights * torch.sigmoid(scores.logsumexp(-1) - sinks.to(wide)[:, None])[..., None]
                out[row + r0 : row + r1] = torch.einsum("hqk,khd->qhd", weights, v)
        row += n
    return out.flatten(1)


def batch_of(case: PagedCase) -> ForwardBatch:
    rows, decodes = sum(case.query_lens), 0
    while decodes < len(case.query_lens) and case.query_lens[decodes] == 1:
        decodes += 1
    nothing = torch.zeros(rows, dtype=torch.int32, device=case.q.device)
    return ForwardBatch(
        nothing, nothing, nothing.long(), *case.tensors(), num_decodes=decodes,
        query_lens=case.query_lens, context_lens=case.context_lens,
    )  # fmt: skip


def cache_of(case: PagedCase) -> SimpleNamespace:
    """Like KVCache after the rows were written: `rows` are their keys and values, as the projection's kernel leaves them."""
    rows, block = [], case.k_cache.shape[1]
    for s, (n, c) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        token = torch.arange(c - n, c, device=case.q.device)
        slots = case.block_tables[int(case.seq_slots[s])][token // block].long() * block + token % block
        rows.append(slots)
    index = torch.cat(rows)
    kept = (case.k_cache.flatten(0, 1)[index], case.v_cache.flatten(0, 1)[index])
    return SimpleNamespace(k=[case.k_cache], v=[case.v_cache], scales=[case.scales], first=0, rows=kept)


def run_split(
    case: PagedCase, workspace: SplitSpace | None = None, *, scale: float | None = None, tokens: int = 1,
    max_context: int | None = None, out: Tensor | None = None, **options,
) -> Tensor:  # fmt: skip
    """The attention of few rows a sequence, through the workspace."""
    seqs, (rows, heads, head_dim), device = len(case.query_lens), case.q.shape, case.q.device
    workspace = workspace or split_space(seqs, heads, case.k_cache.shape[2], head_dim, device)
    out = torch.full((rows, heads * head_dim), float("nan"), dtype=case.q.dtype, device=device) if out is None else out
    split_attention(
        case.q, case.k_cache, case.v_cache, out, *case.tensors(), workspace, first_seq=0, num_seqs=seqs, tokens=tokens,
        max_context=max_context or max(case.context_lens), scale=scale or head_dim**-0.5, scales=case.scales, **options,
    )  # fmt: skip
    if device.type == "cpu":  # on a card it may be captured here
        assert not workspace.tickets.any(), "the counters are left as they were found"
    return out


def run_varlen(case: PagedCase, first: int = 0, seqs: int | None = None, *, scale: float | None = None, **options) -> Tensor:
    """The attention of any number of rows a sequence."""
    rows, heads, head_dim = case.q.shape
    lens = case.query_lens[first:] if seqs is None else case.query_lens[first : first + seqs]
    out = torch.full((rows, heads * head_dim), float("nan"), dtype=case.q.dtype, device=case.q.device)
    varlen_attention(
        case.q, case.k_cache, case.v_cache, out, *case.tensors(), first_seq=first, num_seqs=len(lens), num_rows=sum(lens),
        max_tokens=max(lens), scale=scale or head_dim**-0.5, scales=case.scales, **options,
    )  # fmt: skip
    return out


def run_widened(case: PagedCase, first: int = 0, *, window: int = 0, **options) -> Tensor:
    """The same from an FP8 cache that is made wide first, in a room that is larger and full of NaN."""
    (rows, heads, head_dim), kv_heads, device = case.q.shape, case.k_cache.shape[2], case.q.device
    lens, blocks = case.query_lens[first:], -(-max(case.context_lens[first:]) // BLOCK)
    room = Widened.empty((len(lens) + 1) * blocks, kv_heads, head_dim, case.q.dtype, device)
    for tensor in (room.k, room.v, room.k_scales):
        tensor.fill_(float("nan"))
    out = torch.full((rows, heads * head_dim), float("nan"), dtype=case.q.dtype, device=device)
    which = {"first_seq": first, "num_seqs": len(lens), "blocks": blocks, "window": window}
    widen(case.k_cache, case.v_cache, case.scales, room, *case.tensors(), **which)
    varlen_attention(
        case.q, room.k, room.v, out, None, *case.tensors()[1:], num_rows=sum(lens), max_tokens=max(lens),
        scale=options.pop("scale", head_dim**-0.5), scales=(room.k_scales, None), **which, **options,
    )  # fmt: skip
    return out


def flat_cache(blocks: int, block: int, kv_heads: int, head_dim: int, dtype=torch.float32, device="cpu") -> SimpleNamespace:
    """Like KVCache, filled with a number that no kernel writes."""
    k, v = (torch.full((blocks, block, kv_heads, head_dim), 7.0, dtype=dtype, device=device) for _ in range(2))
    kv = SimpleNamespace(k=[k], v=[v], scales=[(None, None)])

    def write(layer, k, v, slots):
        kv.k[layer].flatten(0, 1)[slots], kv.v[layer].flatten(0, 1)[slots] = k, v

    kv.write = write
    return kv


def check_qkv(
    write: Callable, close: Callable, heads: int, kv_heads: int, head_dim: int, rot: int, norm: str, *,
    rows: int, block: int, keep: bool, dtype: torch.dtype = torch.float32, device: str = "cpu", halves: bool = False,
    **values: bool,
) -> None:  # fmt: skip
    """What `write` makes of random rows, writes to a cache of three blocks and keeps, against the reference in float32."""
    parts = heads + (2 - values.pop("keys_alone", False)) * kv_heads
    qkv = torch.randn((*[2] * halves, rows, parts * head_dim), device=device).to(dtype)
    angle = torch.rand((100, rot // 2), device=device) * 6
    where = torch.randint(0, 100, (rows,), dtype=torch.int32, device=device), angle.cos(), angle.sin()
    slots = torch.randperm(3 * block, device=device)[:rows]
    sizes = {"none": (0, 0), "head": (head_dim, head_dim), "full": (heads * head_dim, kv_heads * head_dim)}[norm]
    weights = [torch.randn(n, device=device).to(dtype) if n else None for n in sizes]
    got_kv, want_kv = (flat_cache(3, block, kv_heads, head_dim, kind, device) for kind in (dtype, torch.float32))
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "eps": 1e-6, "norm_offset": 0.5, **values}

    def norms(given: list[Tensor | None]) -> dict[str, Tensor | None]:
        return dict(zip(("q_norm", "k_norm"), given, strict=True))

    got, own = write(qkv.clone(), *where, got_kv, 0, slots, keep=keep, **norms(weights), **options)
    wide = norms([None if w is None else w.float() for w in weights])
    want, _ = qkv_rope_write_reference(qkv.float(), *where, want_kv, 0, slots, **wide, **options)
    close(got, want)
    close(got_kv.k[0].flatten(0, 1), want_kv.k[0].flatten(0, 1))
    if values:
        close(got_kv.v[0].flatten(0, 1), want_kv.v[0].flatten(0, 1))
    else:
        assert torch.equal(got_kv.v[0].float(), want_kv.v[0])
    assert (own is not None) == keep
    for kept, cached in zip(own or (), (got_kv.k[0], got_kv.v[0]), strict=False):
        assert torch.equal(kept, cached.flatten(0, 1)[slots])


def check_qkv_fp8(
    write: Callable, heads: int, kv_heads: int, head_dim: int, rot: int, *, rows: int, block: int, norm: bool = True,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> None:  # fmt: skip
    """What `write` leaves in an FP8 cache of three blocks is what `fp8.quantize` makes of the keys and values that it would
    leave in a float one, bit for bit, whether those are kept or not; zeros, huge, tiny and broken vectors among them."""
    shape = (rows, heads + 2 * kv_heads, head_dim)
    qkv = torch.randn(shape, device=device).to(dtype)
    values = qkv[:, heads + kv_heads :]
    for row, number in enumerate((0.0, 3e38, -1e-37, float("inf"), float("nan"))):
        values[row] = 0.0
        values[row, :, row] = number
    values[5] *= 1e30
    qkv[0, heads : heads + kv_heads] = 0.0
    angle = torch.rand((100, rot // 2), device=device) * 6
    where = torch.randint(0, 100, (rows,), dtype=torch.int32, device=device), angle.cos(), angle.sin()
    slots = torch.randperm(3 * block, device=device)[:rows]
    slots[-1] = -1  # a padded row
    weight = torch.randn(head_dim, device=device).to(dtype) if norm else None
    for keep in (True, False):
        k, v = (torch.zeros((3, block, kv_heads, head_dim), dtype=fp8.DTYPE, device=device) for _ in range(2))
        scales = tuple(torch.full((3, kv_heads, block), 7.0, device=device) for _ in range(2))
        kv = SimpleNamespace(k=[k], v=[v], scales=[scales])
        _, own = write(
            qkv.flatten(1).clone(), *where, kv, 0, slots, keep=keep, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            q_norm=weight, k_norm=weight, eps=1e-6, norm_offset=0.0,
        )  # fmt: skip
        kept = own or kept  # noqa: F821  (the first time they are kept)
        at = slots[:-1]
        for x, data, factors in zip(kept, (k, v), scales, strict=True):
            want, want_scales = fp8.quantize(x[:-1])
            got = data.flatten(0, 1)[at]
            assert torch.equal(got.float().nan_to_num(1000.0), want.float().nan_to_num(1000.0))
            found = factors.transpose(1, 2).flatten(0, 1)
            assert torch.equal(found[at].nan_to_num(1000.0), want_scales.nan_to_num(1000.0))
            untouched = torch.ones(3 * block, dtype=torch.bool, device=device)
            untouched[at] = False
            assert (found[untouched] == 7.0).all() and not data.flatten(0, 1)[untouched].float().any()


def latent_case(query_lens: list[int], context_lens: list[int], heads: int, rank: int, rope: int, block: int, **options) -> PagedCase:
    """As `paged_case`, with a row [rank + rope] a token, of which all heads read the first `rank` columns as a value."""
    case = paged_case(query_lens, context_lens, heads, 1, rank + rope, block, **options)
    return replace(case, q=case.q.contiguous(), v_cache=case.k_cache)


def latent_reference(case: PagedCase, rank: int) -> Tensor:
    """[T, heads * rank], as `attention_reference`."""
    return attention_reference(case, LATENT_SCALE).unflatten(1, (case.q.shape[1], -1))[:, :, :rank].flatten(1)


def run_latent(
    case: PagedCase, rank: int, *, split: bool, tokens: int = 1, max_context: int | None = None, space: PartSpace | None = None,
    **options,
) -> Tensor:  # fmt: skip
    """Latent attention of all sequences; with `split`, of up to `tokens` rows each."""
    rows, heads, _ = case.q.shape
    out = torch.full((rows, heads * rank), float("nan"), dtype=case.q.dtype, device=case.q.device)
    seqs = len(case.query_lens)
    if split and space is None:
        space = PartSpace.of(seqs, heads, rank, case.q.device)
        space.partials.fill_(float("nan"))
        space.lse.fill_(float("nan"))
    latent_attention(
        case.q, case.k_cache, out, *case.tensors(), space if split else None, rank=rank, first_seq=0, num_seqs=seqs,
        num_rows=rows, max_tokens=tokens if split else max(case.query_lens), max_context=max_context or max(case.context_lens),
        scale=LATENT_SCALE, **options,
    )  # fmt: skip
    return out
