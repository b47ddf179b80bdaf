"""The kernels of latent attention, run by Triton's interpreter on the CPU, against dense attention in float64 and the references."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.latent_attention import LatentTile, choose_parts, num_slots
from headrace.kernels.latent_rows import latent_rope_write_reference, latent_rope_write_triton
from headrace.model.latent_config import LatentConfig
from kernel_cases import latent_case, latent_reference, run_latent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a card is")
TILE = LatentTile(16, 32, 4, 1, 16, False)
TMA = LatentTile(16, 16, 4, 1, 16, True)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("heads, rank, rope, block, parts, tile", [
    (2, 32, 16, 16, 3, TILE), (20, 24, 8, 64, 2, TILE), (33, 64, 16, 8, 1, TILE), (16, 32, 16, 16, 2, TMA), (20, 64, 32, 64, 1, TMA),
])  # fmt: skip
def test_decode(heads: int, rank: int, rope: int, block: int, parts: int, tile: LatentTile) -> None:
    case = latent_case([1] * 4, [150, 1, 0, 77], heads, rank, rope, block)
    close(run_latent(case, rank, split=True, tile=tile, parts=parts), latent_reference(case, rank))


def test_several_rows_of_a_sequence_are_split() -> None:
    """Verification of drafts, and what is left of a prompt: each row sees only what is before it."""
    case = latent_case([5, 1, 3, 4], [140, 1, 66, 4], 6, 32, 16, 16)
    close(run_latent(case, 32, split=True, tile=TILE, tokens=5, parts=2), latent_reference(case, 32))


@pytest.mark.parametrize("query_lens, context_lens, heads, tma", [
    ([21, 1, 17, 3], [21, 30, 70, 3], 3, False), ([9, 12], [30, 12], 16, True), ([5, 9, 4], [40, 9, 0], 20, True),
])  # fmt: skip
def test_prefill(query_lens, context_lens, heads: int, tma: bool) -> None:
    case = latent_case(query_lens, context_lens, heads, 32, 16, 16)
    close(run_latent(case, 32, split=False, tile=LatentTile(32, 16, 4, 1, 16, tma)), latent_reference(case, 32))


def test_half_precision() -> None:
    case = latent_case([1] * 2, [100, 40], 4, 32, 16, 16, dtype=torch.float16)
    got = run_latent(case, 32, split=True, tile=TILE, parts=2)
    torch.testing.assert_close(got.double(), latent_reference(case, 32), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("seqs", [1, 8, 32, 100, 256, 1024])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("context", [1, 1000, 131072])
def test_parts_fit_their_space_and_fill_the_card(seqs: int, groups: int, context: int) -> None:
    parts = choose_parts(seqs, 1, groups, context, 132, num_slots(1024))
    assert 1 <= parts <= 128 and seqs * parts <= num_slots(1024)
    if context == 131072:
        programs = seqs * groups * parts
        assert programs / (-(-programs // 132) * 132) >= 0.75


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [3, 20])
def test_rows_are_rotated_normed_and_written(interleaved: bool, heads: int) -> None:
    sizes = LatentConfig(rank=24, rope=12, nope=20, value=8, interleaved=interleaved)
    gen = torch.Generator().manual_seed(heads)
    fused = torch.randn(5, heads * sizes.query + sizes.row, generator=gen)  # rows lie apart, as they are projected
    queries, row = fused.split((heads * sizes.query, sizes.row), 1)
    positions, slots = torch.tensor([4, 0, 9, 3, 7], dtype=torch.int32), torch.tensor([2, 7, 0, 5, 11])
    angle = torch.rand((10, sizes.rope // 2), generator=gen) * 6
    results = []
    for write in (latent_rope_write_reference, latent_rope_write_triton):
        q, cache = torch.full((5, heads, sizes.row), 7.0), torch.full((3, 4, 1, sizes.row), 7.0)
        write(q, queries, row, positions, angle.cos(), angle.sin(), torch.linspace(0.5, 2, sizes.rank), cache, slots, sizes)
        results.append((q, cache))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (results[1][0][:, :, : sizes.rank] == 7.0).all(), "what meets the latent is somebody else's"
    slots[1] = -1
    cache = torch.full((3, 4, 1, sizes.row), 7.0)
    latent_rope_write_triton(results[1][0], queries, row, positions, angle.cos(), angle.sin(), torch.ones(24), cache, slots, sizes)
    assert (cache.flatten(0, 1)[[1, 3, 4, 6, 7, 8, 9, 10]] == 7.0).all(), "a padded row writes nothing"
