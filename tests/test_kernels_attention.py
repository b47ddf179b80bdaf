"""The attention kernels, run by Triton's interpreter on the CPU, against dense attention in float64."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.kernels.attention_decode import ORDERED_FROM, SplitTile, max_tokens
from headrace.kernels.attention_prefill import VarlenTile
from headrace.kernels.split import choose_chunk, num_slots, split_space
from kernel_cases import PagedCase, attention_reference, paged_case, run_split, run_varlen

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a card is")
SCALE = 0.17


def split(case: PagedCase, *given, **options) -> torch.Tensor:
    return run_split(case, *given, scale=SCALE, **options)


def varlen(case: PagedCase, *given, tma: bool = False, **options) -> torch.Tensor:
    return run_varlen(case, *given, scale=SCALE, tile=VarlenTile(32, 32, 4, 2, tma), **options)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(2, 2, 16), (8, 2, 64), (9, 3, 80), (16, 1, 32), (7, 1, 96)])
@pytest.mark.parametrize("block", [16, 64])
def test_decode_shapes(heads: int, kv_heads: int, head_dim: int, block: int) -> None:
    case = paged_case([1] * 4, [150, 1, 64, 77], heads, kv_heads, head_dim, block)
    close(split(case), attention_reference(case, SCALE))


def test_heads_of_512() -> None:
    """As of Gemma 4: of few rows and many, behind a context."""
    case = paged_case([1, 1], [150, 64], 4, 1, 512, 64)
    close(split(case), attention_reference(case, SCALE))
    case = paged_case([20], [40], 2, 1, 512, 64)
    close(run_varlen(case, scale=SCALE), attention_reference(case, SCALE))


@pytest.mark.parametrize("window, softcap", [(1, 0.0), (20, 0.0), (64, 3.0), (500, 0.0), (0, 2.0)])
@pytest.mark.parametrize("chunk", [64, 256])
def test_decode_window_and_softcap(window: int, softcap: float, chunk: int) -> None:
    case = paged_case([1] * 4, [200, 5, 65, 64], 2, 1, 32, 16)
    close(split(case, window=window, softcap=softcap, chunk=chunk), attention_reference(case, SCALE, window, softcap))


def test_decode_window_reads_nothing_before_it() -> None:
    """Blocks before the window may have been given away: their table entries are poison."""
    case = paged_case([1], [400], 4, 2, 32, 16)
    want = attention_reference(case, SCALE, window=40)
    case.block_tables[case.seq_slots.long(), : (400 - 40) // 64 * 64 // 16] = 2**31 - 1
    close(split(case, window=40, chunk=64), want)


def test_decode_padded_sequences_are_zero_and_read_nothing() -> None:
    case = paged_case([1] * 4, [70, 0, 0, 33], 4, 2, 32, 16)
    case.block_tables[case.seq_slots[1:3].long()] = 2**31 - 1
    got = split(case, max_context=512)
    assert (got[1:3] == 0).all()
    close(got, attention_reference(case, SCALE))


def test_decode_grid_larger_than_any_context_and_workspace_reuse() -> None:
    """One workspace and one grid serve every length mix, as in a CUDA graph."""
    workspace = split_space(3, 4, 2, 32, torch.device("cpu"))
    workspace.partials.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    for lens in ([300, 2, 130], [1, 64, 65], [0, 512, 0]):
        case = paged_case([1] * 3, lens, 4, 2, 32, 64, seed=sum(lens))
        close(split(case, workspace, max_context=512, chunk=64), attention_reference(case, SCALE))


@pytest.mark.parametrize("window", [0, 9, 100])
def test_split_of_several_rows(window: int) -> None:
    """Verification of drafts: up to `tokens` rows a sequence, each seeing only what is before it."""
    case = paged_case([5, 1, 3, 4], [140, 1, 66, 4], 6, 3, 16, 16)
    close(split(case, tokens=5, window=window, chunk=64), attention_reference(case, SCALE, window))


def test_decode_half_precision() -> None:
    case = paged_case([1] * 2, [100, 40], 4, 2, 32, 16, dtype=torch.float16)
    torch.testing.assert_close(split(case, chunk=64).double(), attention_reference(case, SCALE), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("seqs", [1, 8, 32, 256, 1024])
@pytest.mark.parametrize("context", [1, 1000, 40960, 131072, 1 << 20])
@pytest.mark.parametrize("tokens", [1, 8])
def test_chunks_fit_the_workspace(seqs: int, context: int, tokens: int) -> None:
    slots = num_slots(1024)
    chunk = choose_chunk(seqs, tokens, 8, context, 132, slots)
    parts = -(-context // chunk)
    assert chunk % 64 == 0 and (parts == 1 or seqs * tokens * parts <= slots) and parts <= 128
    assert max_tokens(8) * 8 <= 64


PREFILL = [
    ([40, 1, 70, 3], [40, 30, 200, 3]),  # fresh, decode, chunk behind a context, short
    ([128], [128]),
    ([33, 33], [97, 33]),
]


@pytest.mark.parametrize("query_lens, context_lens", PREFILL)
@pytest.mark.parametrize("heads, kv_heads, head_dim, block", [(4, 2, 32, 16), (3, 1, 80, 16), (2, 2, 64, 64)])
@pytest.mark.parametrize("tma", [False, True])
def test_prefill_mixed(query_lens, context_lens, heads, kv_heads, head_dim, block, tma) -> None:
    if tma and block == 16:
        pytest.skip("a block must hold whole tiles")
    case = paged_case(query_lens, context_lens, heads, kv_heads, head_dim, block)
    close(varlen(case, tma=tma), attention_reference(case, SCALE))


@pytest.mark.parametrize("window, softcap", [(1, 0.0), (16, 0.0), (50, 4.0), (1000, 0.0), (0, 2.0), (20, 70.0), (0, 70.0)])
@pytest.mark.parametrize("tma", [False, True])
def test_prefill_window_and_softcap(window: int, softcap: float, tma: bool) -> None:
    case = paged_case([60, 1, 50], [60, 40, 210], 2, 1, 32, 64)
    close(varlen(case, window=window, softcap=softcap, tma=tma), attention_reference(case, SCALE, window, softcap))


def test_prefill_of_a_part_of_the_sequences() -> None:
    """Rows outside of the named sequences, and the skipped ones, stay untouched."""
    case = paged_case([1, 50, 44, 20], [9, 80, 44, 20], 4, 2, 32, 16)
    got, want = varlen(case, first=1, seqs=2, skip=40), attention_reference(case, SCALE)
    done = torch.zeros(got.shape[0], dtype=torch.bool)
    done[1 + 40 : 51] = done[51 + 40 : 95] = True
    close(got[done], want[done])
    assert got[~done].isnan().all()


def test_prefill_of_many_sequences_and_padding() -> None:
    """More sequences than one pass of the tile search looks at, padded ones among them."""
    lens = [(i * 7) % 3 + 1 for i in range(131)]
    contexts = [0 if i % 11 == 3 else n + i % 4 for i, n in enumerate(lens)]
    case = paged_case(lens, contexts, 1, 1, 16, 16)
    got = varlen(case)
    close(got, attention_reference(case, SCALE))


@pytest.mark.parametrize("chunk", [32, 64, 128])
def test_parts_in_order_give_the_same_bits(chunk: int) -> None:
    lens = [(1, 5, 40, 64, 65, 130, 300, 0)[(3 * i + i // 8) % 8] for i in range(ORDERED_FROM + 6)]
    case = paged_case([1] * len(lens), lens, 4, 2, 32, 16)
    options = {"chunk": chunk, "tile": SplitTile(16, 4, 2), "max_context": 400}
    space, plain = (split_space(len(lens), 4, 2, 32, torch.device("cpu")) for _ in range(2))
    plain.order = None
    got = split(case, space, **options)
    assert torch.equal(got, split(case, plain, **options))
    close(got, attention_reference(case, SCALE))
    sizes = [max(1, math.ceil(math.ceil(n / max(1, (n + chunk // 2) // chunk)) / 16)) * 16 for n in lens]
    parts = [max(1, -(-n // size)) for n, size in zip(lens, sizes, strict=True)]
    want = [s | p << 16 for s in sorted(range(len(lens)), key=lambda s: (-sizes[s], s)) for p in range(parts[s])]
    assert space.order is not None and space.order[: len(want) + 1].tolist() == [len(want), *want]
