"""Activations in FP8 with sizes of their chunks: who makes them, and the products that take them, in the interpreter (by torch,
where Gluon has no kernel) or on the card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fast_decode_cases import PLAIN, random_weights, with_narrow
from headrace.fast_decode import forward, products, rounded_tile, takes, tiles
from headrace.fast_decode.attention import AttentionTile, decode_attention
from headrace.fast_decode.attention_reference import HeadShape
from headrace.fast_decode.embed_residual import embed_residual
from headrace.fast_decode.epilogues import glu_reference, project_reference, residual_reference, runs_triton
from headrace.fast_decode.ring_tile import row_block
from headrace.fast_decode.rounded_tile import RoundedTile
from headrace.kernels.rounded import keep, numbers, rounded_reference
from narrow_cases import narrow
from test_kernels_fused_decode import DEVICE, NAN, angles, attention_case, attention_space, close, random, split_space

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ERROR = {True: 0.0015, False: 0.03}  # of numbers that are pairs, or not


def empty(rows: int, columns: int, chunk: int, pair: bool) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(*((2,) if pair else ()), rows, columns, dtype=E4M3, device=DEVICE)
    return codes, torch.full((columns // chunk, row_block(rows)), NAN, device=DEVICE)


def rounded(x: torch.Tensor, chunk: int, pair: bool) -> tuple[torch.Tensor, torch.Tensor]:
    codes, sizes = empty(*x.shape, chunk, pair)
    keep(codes, x, sizes.fill_(1.0))
    return codes, sizes


@pytest.mark.parametrize("pair", [True, False])
def test_numbers_of_any_size(pair: bool) -> None:
    """The largest of a chunk as it is, zeros too; what is not finite spoils its chunk."""
    x = random(6, 128)
    x[1] *= 2.0**40
    x[2] *= 2.0**-40
    x[3] *= torch.logspace(0, -12, 128, base=2.0, device=DEVICE)
    x[4, :64] = 0
    x[5, 70] = float("inf")
    back = numbers(*rounded(x, 64, pair))
    for row in range(4):
        close(back[row], x[row], ERROR[pair])
        close(back[row].abs().amax(), x[row].abs().amax(), 1e-6)
    assert not back[4, :64].any() and not back[5, 70] < 1e16


@pytest.mark.parametrize(("pair", "width"), [(True, 256), (False, 256), (False, 320)])
def test_embed_residual(pair: bool, width: int) -> None:
    table, norm, ids = random(50, width), random(width, seed=1), torch.tensor([3, 49, 50], dtype=torch.int32, device=DEVICE)
    residual, sumsq = (torch.full((3, n), NAN, device=DEVICE) for n in (width, 2))
    normed, sizes = empty(3, width, 64, pair)
    embed_residual(ids, table, residual, normed, sumsq, norm, scale=2.0, norm_offset=1.0, sizes=sizes)
    codes, own = rounded_reference(residual * (norm + 1.0), 64, pair)
    assert torch.equal(residual[:2], 2.0 * table[[3, 49]]) and not residual[2].any()
    close(numbers(normed, sizes), numbers(codes, own), 0.001)
    close(sizes[:, :3], own, 1e-6)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("cache", [torch.float32, E4M3])
def test_attention(cache: torch.dtype, pair: bool, splits: int) -> None:
    """Of one program or several for a sequence; padding gives zeros."""
    lengths, heads, kv_heads, dim = [150, 1, 0, 33], 4, 2, 64
    sizes_of = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": 16, "dtype": cache}
    shape, tile = HeadShape(heads, kv_heads, dim, dim**-0.5), AttentionTile(16, 4, 2)
    found = []
    for narrow_out in (False, True):
        kv, batch, qkv = attention_case(lengths, **sizes_of)
        out, sizes = empty(4, heads * dim, dim, pair)
        if not narrow_out:
            out, sizes = torch.full((4, heads * dim), NAN, device=DEVICE), None
        decode_attention(
            qkv[None], out, kv, 0, **batch, **angles(dim), q_norm=None, k_norm=None, heads=shape, window=0, num_splits=splits,
            tile=tile, space=attention_space(4, splits, heads, kv_heads, dim), sizes=sizes,
        )  # fmt: skip
        found.append(out if sizes is None else numbers(out, sizes))
    of_bfloat16 = 0 if cache == torch.float32 else 0.006  # what a model whose cache is FP8 has then
    close(found[1], found[0], ERROR[pair] + of_bfloat16)
    assert not found[1][2].any()


TILES = [RoundedTile(128, 1, 4, 8), RoundedTile(64, 2, 3), RoundedTile(128, 2, 9)]


@pytest.mark.parametrize("rows", [2, 9, 20, 33])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("scale_rows", [1, 32])
def test_project(tile: RoundedTile, rows: int, scale_rows: int) -> None:
    """On the card with rings that hold all of K, or less; a scale for each row or for several."""
    columns, width = 256, 512
    (x, sizes), bias = rounded(random(rows, width) * 3, 64, rows <= rounded_tile.PAIR_ROWS), random(columns, seed=2)
    w = narrow("fp8 row", columns, width, DEVICE, seed=1)
    w.scales, w.scale_rows = w.scales[::scale_rows].contiguous(), scale_rows
    sumsq = random(rows, 70, seed=3).square() * width
    out = torch.full((tile.splits, rows, columns), NAN, device=DEVICE)
    products.project(x, w, out, tile, sumsq=sumsq, eps=1e-5, bias=bias, scale=0.5, sizes=sizes)
    close(out.sum(0), project_reference(numbers(x, sizes), w, sumsq, 1e-5, bias, 0.5, 0.0), 2e-3)


@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.splits == 1], ids=str)
def test_gate_and_up(tile: RoundedTile, rows: int) -> None:
    columns, width, pair = 256, 384, rows <= rounded_tile.PAIR_ROWS
    (x, sizes), w = rounded(random(rows, width), 128, pair), narrow("fp8 row", 2 * columns, width, DEVICE, seed=1)
    sumsq = random(rows, 3, seed=3).square() * width
    out, out_sizes = empty(rows, columns, tile.block_n, pair)
    products.glu(x, w, out, tile, sumsq=sumsq, eps=1e-5, sizes=sizes, out_sizes=out_sizes)
    expected = glu_reference(numbers(x, sizes), w, sumsq, 1e-5, "silu")
    close(numbers(out, out_sizes), expected, ERROR[pair] + 2e-3)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_joining_the_residual(tile: RoundedTile, rows: int) -> None:
    columns, width, pair = 256, 512, rows <= rounded_tile.PAIR_ROWS
    (x, sizes), w = rounded(random(rows, width), 128, pair), narrow("fp8 row", columns, width, DEVICE, seed=1)
    norm, total = random(columns, seed=3), random(rows, columns, seed=4)
    expected = residual_reference(numbers(x, sizes), w, total, norm, 0.5, 0.3, None)
    (normed, out_sizes), sumsq = empty(rows, columns, tile.block_n, pair), torch.zeros(rows, columns // tile.block_n, device=DEVICE)
    space = split_space(tile, rows, columns)
    products.residual(
        x, w, total, normed, sumsq, norm, tile, space, norm_offset=0.5, scale=0.3, sizes=sizes, out_sizes=out_sizes
    )  # fmt: skip
    assert not space.tickets.any()
    close(total, expected[0], 2e-3)
    close(numbers(normed, out_sizes), expected[1], ERROR[pair] + 2e-3)
    close(sumsq.sum(1, keepdim=True), expected[2], 4e-3)


def test_activations_that_are_not_rounded() -> None:
    """Of steps with adapters: by the kernel for narrow weights, with the same tiles of columns."""
    x, w = random(20, 256), narrow("fp8 row", 128, 256, DEVICE, seed=1)
    out = torch.full((2, 20, 128), NAN, device=DEVICE)
    products.project(x, w, out, RoundedTile(64, 2, 3))
    close(out.sum(0), project_reference(x, w, None, 0.0, None, 1.0, 0.0), 1e-4)


def test_which_products_are_rounded_by_default() -> None:
    from gpu_decode import MODELS

    kinds = ("fp8",) * 4 + ("int8",)
    for name in ("8b", "4b", "32b", "llama8b"):
        for rows, step in tiles.default_table(MODELS[name], True, kinds).items():
            four = [getattr(step, product) for product in tiles.PRODUCTS[:-1]]
            assert [isinstance(tile, RoundedTile) for tile in four] == [rows > 1] * 4, (name, rows)
        assert not isinstance(tiles.default_tiles(MODELS[name], 8, True, ("int8",) * 5).qkv, RoundedTile)
    assert not tiles.rounded_tiles(tiles.product_shapes(replace(MODELS["8b"], intermediate_size=12300)), 8)


@pytest.mark.parametrize(("form", "capability"), [("fp8 row", 9), ("fp8 row", 10), ("fp8 blocks", 9)])
def test_a_table_s_rounded_tiles_are_for_what_they_suit(form: str, capability: int, monkeypatch) -> None:
    """Weights by blocks and other cards have the tiles that they had."""
    monkeypatch.setattr(rounded_tile, "capability", lambda device: (capability, 0))
    config = replace(PLAIN, hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
    weights = with_narrow(random_weights(config, dtype=BF16), [(form,) * 4] * 2)
    usual = tiles.default_table(config, copy_engine=False, kinds=takes.usual_kinds(weights), rounded=False)
    four = dict.fromkeys(tiles.PRODUCTS[:-1], RoundedTile(64, 1, 3))
    table = {rows: replace(step, **four) if rows > 1 else step for rows, step in usual.items()}
    step = forward.FastDecode(config, weights, 32, torch.device("cpu"), table)
    suits = (form, capability) == ("fp8 row", 9)
    assert step.rounds == suits and step.tiles == (table if suits else usual)
