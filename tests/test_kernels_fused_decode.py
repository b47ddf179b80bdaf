"""The fused small-batch kernels against float32 references, in Triton's interpreter or on the card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.fast_decode import products
from headrace.fast_decode.attention import AttentionTile, decode_attention
from headrace.fast_decode.attention_few import takes_few
from headrace.fast_decode.attention_reference import HeadShape, decode_attention_reference
from headrace.fast_decode.embed_residual import embed_residual
from headrace.fast_decode.epilogues import glu_reference, project_reference, residual_reference, runs_triton
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.ring_tile import RingTile
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.wide_gemm import WideTile
from headrace.kernels.split import SplitSpace
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.weight import Weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")


def close(result: Tensor, reference: Tensor, tolerance: float) -> None:
    error = (result.float() - reference.float()).norm() / reference.float().norm()
    assert error < tolerance, f"relative error {error:.2e}"  # NaN fails too


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


GEMV_TILES = [GemvTile(32, 64, 4, 2), GemvTile(16, 256, 4, 1), GemvTile(64, 32, 2, 0), GemvTile(16, 64, 2, 1, shared=2)]
GEMM_TILES = [GemmTile(16, 32, 1, 4, 3), GemmTile(32, 32, 2, 4, 2, prefetch=1), GemmTile(16, 16, 5, 4, 2, prefetch=9)]
WIDE_TILES = [WideTile(64, 32, 64, 1, 4, 3), WideTile(64, 64, 32, 3, 4, 2), WideTile(128, 16, 32, 2, 8, 2)]
RING_TILES = [RingTile(32, 32, 1, 3), RingTile(16, 32, 2, 2)]  # as GemmTile, here
TILES = [*GEMV_TILES, *GEMM_TILES, *RING_TILES, *WIDE_TILES]
SHAPES = [(1, 64, 128), (1, 50, 96), (2, 50, 96), (3, 50, 96)]  # rows, columns, width: whole tiles, and neither columns nor width whole


def fits(tile, rows: int) -> None:
    if rows > products.MAX_ROWS[type(tile)]:
        pytest.skip("more rows than this tile takes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "width"), [*SHAPES, (2, 48, 80), (20, 48, 80)])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_project(tile, rows, columns, width, dtype):
    fits(tile, rows)
    x, w, bias = random(rows, width, dtype=dtype), Weight(random(columns, width, dtype=dtype, seed=1)), random(columns, seed=2)
    sumsq = random(rows, 5, seed=3).square() * width
    splits = products.num_splits(tile)
    out, cap = torch.full((splits, rows, columns), NAN, device=DEVICE), 3.0 if splits == 1 else 0.0
    products.project(x, w, out, tile, sumsq=sumsq, eps=1e-5, bias=bias, scale=0.5, softcap=cap)
    close(out.sum(0), project_reference(x, w, sumsq, 1e-5, bias, 0.5, cap), 1e-5)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize(("rows", "columns", "width"), SHAPES)
@pytest.mark.parametrize("tile", [tile for tile in TILES if products.num_splits(tile) == 1], ids=str)
def test_glu(tile, rows, columns, width, kind):
    fits(tile, rows)
    x, w = random(rows, width), Weight(random(2 * columns, width, seed=1))
    sumsq = random(rows, 7, seed=3).square() * width
    out = torch.full((rows, columns), NAN, device=DEVICE)
    products.glu(x, w, out, tile, sumsq=sumsq, eps=1e-5, activation=kind)
    close(out, glu_reference(x, w, sumsq, 1e-5, kind), 1e-5)


def split_space(tile, rows: int, columns: int) -> SplitSpace:
    """Where the splits of a residual product meet, full of what nobody may read."""
    tiles = -(-columns // tile.block_n) * tile.row_tiles(rows)
    space = SplitSpace(tile.partial_elements(rows, columns), tiles, torch.device(DEVICE))
    space.partials.fill_(NAN)
    return space


def check_residual(tile, rows: int, columns: int, width: int, bias: Tensor | None) -> None:
    x, w = random(rows, width), Weight(random(columns, width, seed=1))
    norm, total = random(columns, seed=3), random(rows, columns, seed=4)
    expected = residual_reference(x, w, total, norm, 0.5, 0.3, bias)
    tiles = -(-columns // tile.block_n)
    normed = torch.full((rows, columns), NAN, device=DEVICE)
    sumsq = torch.full((rows, tiles), NAN, device=DEVICE)
    space = None if isinstance(tile, GemvTile) else split_space(tile, rows, columns)
    products.residual(x, w, total, normed, sumsq, norm, tile, space, norm_offset=0.5, scale=0.3, bias=bias)
    assert space is None or not space.tickets.any()
    close(total, expected[0], 1e-5)
    close(normed, expected[1], 1e-5)
    close(sumsq.sum(1, keepdim=True), expected[2], 1e-5)


@pytest.mark.parametrize(("rows", "columns", "width"), SHAPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_residual(tile, rows, columns, width):
    fits(tile, rows)
    check_residual(tile, rows, columns, width, random(columns, seed=2))


@pytest.mark.parametrize("rows", [65, 130, 256])
@pytest.mark.parametrize("tile", WIDE_TILES, ids=str)
def test_many_rows(tile, rows):
    """Several tiles of rows: each has partial sums and tickets of its own, and the last one's missing rows are not stored."""
    columns, width = 100, 96
    x, w = random(rows, width), Weight(random(columns, width, seed=1))
    sumsq = random(rows, 70, seed=5).square() * width  # more than are added at a time
    out = torch.full((tile.splits + 1, rows, columns), NAN, device=DEVICE)
    products.project(x, w, out[:-1], tile, sumsq=sumsq, eps=1e-5)
    close(out[:-1].sum(0), project_reference(x, w, sumsq, 1e-5, None, 1.0, 0.0), 1e-5)
    assert out[-1].isnan().all()
    if tile.splits == 1:
        gated, wg = torch.full((rows + 1, columns), NAN, device=DEVICE), Weight(random(2 * columns, width, seed=6))
        products.glu(x, wg, gated[:-1], tile, sumsq=sumsq, eps=1e-5)
        close(gated[:-1], glu_reference(x, wg, sumsq, 1e-5, "silu"), 1e-5)
        assert gated[-1].isnan().all()
    check_residual(tile, rows, columns, width, None)


@pytest.mark.parametrize(
    ("tile", "rows"),
    [
        (GemmTile(64, 32, 1, 4, 2), 40), (GemmTile(64, 32, 2, 4, 2), 64),
        (WideTile(64, 128, 32, 1, 4, 2), 40), (WideTile(128, 64, 32, 2, 8, 2), 130),
    ],
    ids=str,
)  # fmt: skip
def test_tiles_too_large_to_load_the_residual_early(tile, rows):
    check_residual(tile, rows, 200, 96, None)


def test_padded_rows_stay_alone():
    """Rows past M, which the tensor-core kernel computes and drops, reach neither the output nor its neighbours."""
    tile = GemmTile(16, 32, 1, 4, 2)
    out = torch.full((1, 5, 32), 7.0, device=DEVICE)
    products.project(random(3, 64), Weight(random(32, 64, seed=1)), out.view(-1)[: 3 * 32].view(1, 3, 32), tile)
    assert (out[:, 3:] == 7.0).all()


def test_embed_residual():
    table, norm = random(50, 24), random(24, seed=1)
    ids = torch.tensor([3, 49, 0, 50, -1, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    residual, normed = (torch.full((6, 24), NAN, device=DEVICE) for _ in range(2))
    sumsq = torch.full((6, 6), NAN, device=DEVICE)
    embed_residual(ids, table, residual, normed, sumsq, norm, scale=2.0, norm_offset=1.0)
    close(residual[:3], 2.0 * table[ids[:3].long()], 1e-6)
    assert not residual[3:].any()  # ids of padded rows
    close(normed, residual * (norm + 1.0), 1e-6)
    close(sumsq.sum(1), residual.square().sum(1), 1e-6)


def attention_space(rows: int, splits: int, heads: int, kv_heads: int, dim: int) -> SplitSpace:
    return SplitSpace(rows * splits * heads * dim, rows * heads, torch.device(DEVICE), lse=rows * splits * heads)


def attention_case(lengths, *, heads, kv_heads, dim, block_size, dtype=torch.float32, seed=0):
    """A cache with random contents, tables in random order over it, and a new row for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    config = ModelConfig(
        family="llama", vocab_size=8, hidden_size=heads * dim, num_layers=2, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, intermediate_size=8, max_position=512, rope=RopeConfig(1e4, dim),
    )  # fmt: skip
    width = -(-max(lengths) // block_size)
    num_blocks = len(lengths) * width + 1
    kv = KVCache(config, num_blocks, block_size, dtype, torch.device(DEVICE))
    for tensor in (*kv.k, *kv.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for tensor in (t for pair in kv.scales for t in pair if t is not None):
        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    rows = len(lengths)
    slots = torch.randperm(rows + 2, generator=generator)[:rows].to(torch.int32)
    tables = torch.zeros(rows + 2, width, dtype=torch.int32)
    tables[slots.long()] = torch.randperm(num_blocks, generator=generator)[: rows * width].view(rows, width).int()
    mapping = [
        -1 if n == 0 else int(tables[s, (n - 1) // block_size]) * block_size + (n - 1) % block_size
        for n, s in zip(lengths, slots.tolist(), strict=True)
    ]
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=generator).to(DEVICE)
    batch = {
        "block_tables": tables.to(DEVICE),
        "seq_slots": slots.to(DEVICE),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        "slot_mapping": torch.tensor(mapping, device=DEVICE),
    }
    return kv, batch, qkv


def angles(rotated: int, positions: int = 512) -> dict[str, Tensor]:
    turn = torch.outer(torch.arange(positions).float(), 100.0 ** -(torch.arange(rotated // 2).float() * 2 / rotated))
    return {"cos": turn.cos().to(DEVICE), "sin": turn.sin().to(DEVICE)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated", "block_size", "window", "softcap", "qk_norm", "splits", "slabs", "min_tiles"),
    [
        (4, 2, 32, 32, 16, 0, 0.0, True, 4, 1, 1),
        (4, 4, 16, 16, 64, 0, 0.0, False, 3, 2, 1),
        (6, 2, 24, 12, 5, 0, 20.0, False, 8, 1, 2),
        (8, 1, 16, 16, 16, 37, 0.0, True, 4, 3, 1),
        (4, 2, 16, 16, 16, 1, 0.0, False, 2, 1, 1),
        (32, 1, 16, 16, 32, 0, 0.0, False, 1, 1, 1),
    ],
)
def test_decode_attention(
    heads, kv_heads, dim, rotated, block_size, window, softcap, qk_norm, splits, slabs, min_tiles
):  # fmt: skip
    check_decode_attention(heads, kv_heads, dim, rotated, block_size, window, softcap, qk_norm, splits, slabs, min_tiles)


@pytest.mark.parametrize("numbers", [
    (4, 2, 32, 32, 16, 0, 0.0, True, 4, 1, 1), (6, 2, 24, 12, 5, 0, 20.0, False, 3, 1, 2), (8, 1, 16, 16, 64, 37, 0.0, False, 4, 1, 1),
])  # fmt: skip
def test_decode_attention_in_fp8(numbers):
    check_decode_attention(*numbers, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("numbers", [
    (4, 2, 16, 16, 16, 0, 0.0, False, 4, 1, 1), (8, 1, 16, 16, 16, 37, 3.0, True, 3, 2, 1), (6, 2, 24, 12, 5, 1, 0.0, False, 2, 1, 2),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_decode_attention_with_sinks(numbers, dtype):
    check_decode_attention(*numbers, dtype=dtype, sinks=torch.linspace(-9.0, 9.0, numbers[0], device=DEVICE))


@pytest.mark.parametrize("numbers", [
    (4, 2, 32, 32, 16, 0, 0.0, True, 4, 1, 1), (4, 1, 32, 16, 5, 0, 20.0, False, 3, 2, 1), (8, 2, 32, 32, 64, 37, 0.0, True, 5, 1, 2),
    (2, 2, 64, 64, 8, 1, 3.0, False, 1, 1, 1),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_decode_attention_of_a_program_for_each_query_head(numbers, dtype):
    check_decode_attention(*numbers, dtype=dtype, few=1)
    check_decode_attention(*numbers, dtype=dtype, few=1, sinks=torch.linspace(-9.0, 9.0, numbers[0], device=DEVICE))


def test_a_program_for_each_query_head_takes_no_gates():
    heads = HeadShape(4, 2, 64, 0.125)
    assert takes_few(heads, 64, 32) and not takes_few(heads, 64, 33) and not takes_few(heads, 24, 1)
    assert not takes_few(replace(heads, gated=True), 64, 32)


def check_decode_attention(
    heads, kv_heads, dim, rotated, block_size, window, softcap, qk_norm, splits, slabs, min_tiles, dtype=torch.float32, sinks=None,
    few=0,
):  # fmt: skip
    lengths = [150, 1, 0, 33]
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size, "dtype": dtype}
    kv, batch, qkv = attention_case(lengths, **sizes)
    kv_reference = attention_case(lengths, **sizes)[0]
    shape = HeadShape(heads, kv_heads, dim, scale=dim**-0.5, softcap=softcap, norm_eps=1e-5, norm_offset=0.25)
    norms = {"q_norm": random(dim, seed=5), "k_norm": random(dim, seed=6)} if qk_norm else {"q_norm": None, "k_norm": None}
    options = {**batch, **angles(rotated), **norms, "heads": shape, "window": window, "sinks": sinks}
    expected = decode_attention_reference(qkv, kv_reference, 1, **options)
    partial = torch.randn(slabs - 1, *qkv.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    parts = torch.cat((partial, (qkv - partial.sum(0))[None]))
    out = torch.full_like(expected, NAN)
    space = attention_space(len(lengths), splits, heads, kv_heads, dim)
    space.partials.fill_(NAN)
    tile = AttentionTile(block_n=16, num_warps=1 if few else 4, num_stages=2, min_tiles=min_tiles, few=few)
    decode_attention(parts, out, kv, 1, **options, num_splits=splits, tile=tile, space=space)
    close(out, expected, 6e-3 if dtype == torch.bfloat16 else 1e-4 if slabs > 1 else 2e-6)
    close(kv.k[1], kv_reference.k[1], 1e-3 if dtype == torch.bfloat16 else 1e-6)
    close(kv.v[1], kv_reference.v[1], 1e-3 if dtype == torch.bfloat16 else 1e-6)
    for ours, theirs in zip(kv.scales[1], kv_reference.scales[1], strict=True):
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-6)
    assert (kv.k[0].float() == kv_reference.k[0].float()).all()  # the other layer is untouched
    assert not space.tickets.any()
    assert not out[2].any()  # the padded row


def test_splits_do_not_matter():
    """Any number of splits up to the space's gives the same context vector, up to rounding."""
    results = []
    for splits in (1, 2, 7):
        kv, batch, qkv = attention_case([150, 40], heads=4, kv_heads=2, dim=16, block_size=16)
        out = torch.full((2, 64), NAN, device=DEVICE)
        decode_attention(
            qkv[None], out, kv, 0, **batch, **angles(16), q_norm=None, k_norm=None, heads=HeadShape(4, 2, 16, 0.25),
            window=0, num_splits=splits, tile=AttentionTile(block_n=16), space=attention_space(2, 16, 4, 2, 16),
        )  # fmt: skip
        results.append(out)
    for out in results[1:]:
        close(out, results[0], 1e-5)
