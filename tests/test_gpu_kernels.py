"""The kernels on a card: real shapes, bfloat16, offsets past 2^31, CUDA graphs, programmatic dependent launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headrace.attention import flash
from headrace.attention.flash import CudnnAttention, FlashAttention3, find_flash_attention_3
from headrace.attention.triton_backend import TritonAttention
from headrace.kernels.activation import act_mul, act_mul_reference
from headrace.kernels.attention_prefill import VarlenTile, default_tile
from headrace.kernels.gather_kv import gather_kv
from headrace.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from headrace.kernels.qkv import qkv_rope_write
from headrace.kernels.split import split_space
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.linear import MatrixLinear
from headrace.model.vocabulary import embed
from kernel_cases import (
    PagedCase,
    attention_reference,
    batch_of,
    cache_of,
    check_qkv,
    in_fp8,
    paged_case,
    run_split,
    run_varlen,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 8e-3) -> None:
    """Relative in the norm over a row's values, which near-zero elements do not upset; no NaN, no row left out."""
    got, want = got.float().flatten(1), want.float().flatten(1)
    assert got.isfinite().all()
    error = (got - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-3)
    assert error.max() < tolerance, f"row {int(error.argmax())}: {float(error.max()):.4f}"


def reference(case: PagedCase, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    return attention_reference(case, case.q.shape[2] ** -0.5, window, softcap)


SHAPES = [  # heads, kv heads, head_dim, block
    (16, 8, 128, 64), (32, 8, 128, 16), (9, 3, 64, 64), (16, 1, 80, 16), (12, 4, 96, 64), (8, 4, 256, 64), (14, 2, 64, 16),
    (32, 4, 512, 64), (8, 1, 512, 16),
    (12, 1, 128, 64), (6, 6, 80, 64), (40, 8, 128, 64), (5, 1, 128, 16),
]  # fmt: skip


@pytest.mark.parametrize("heads, kv_heads, head_dim, block", SHAPES)
def test_attention_shapes(heads: int, kv_heads: int, head_dim: int, block: int) -> None:
    shape = (heads, kv_heads, head_dim, block)
    decode = paged_case([1] * 7, [1, 64, 65, 1000, 5000, 0, 333], *shape, dtype=BF16, device="cuda")
    close(run_split(decode), reference(decode))
    close(run_split(decode, chunk=64), reference(decode))
    mixed = paged_case([1, 500, 130, 1, 77], [900, 500, 700, 0, 78], *shape, dtype=BF16, device="cuda")
    close(run_varlen(mixed), reference(mixed))


@pytest.mark.parametrize("block", [1, 8, 32, 128, 256])
def test_attention_block_sizes(block: int) -> None:
    """Smaller and larger than the tiles of keys; a ratio of 8."""
    decode = paged_case([1] * 5, [1, 63, 1000, 0, 257], 16, 2, 64, block, dtype=BF16, device="cuda")
    close(run_split(decode), reference(decode))
    mixed = paged_case([130, 1, 77], [300, 65, 78], 16, 2, 64, block, dtype=BF16, device="cuda")
    close(run_varlen(mixed), reference(mixed))


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(8, 4, 256), (32, 8, 128)])
@pytest.mark.parametrize("window, softcap", [(100, 0.0), (512, 20.0), (0, 30.0)])
def test_attention_window_and_softcap(heads: int, kv_heads: int, head_dim: int, window: int, softcap: float) -> None:
    decode = paged_case([1] * 4, [3000, 90, 513, 2], heads, kv_heads, head_dim, 64, dtype=BF16, device="cuda")
    close(run_split(decode, window=window, softcap=softcap), reference(decode, window, softcap))
    mixed = paged_case([700, 130, 1], [700, 1500, 40], heads, kv_heads, head_dim, 64, dtype=BF16, device="cuda")
    close(run_varlen(mixed, window=window, softcap=softcap), reference(mixed, window, softcap))


def test_attention_dtypes_and_pointers() -> None:
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.float32, 2e-5)):
        decode = paged_case([1] * 3, [300, 64, 1500], 9, 3, 64, 16, dtype=dtype, device="cuda")
        close(run_split(decode), reference(decode), tolerance)
        mixed = paged_case([70, 130, 1], [70, 200, 40], 9, 3, 64, 64, dtype=dtype, device="cuda")
        close(run_varlen(mixed), reference(mixed), tolerance)
    case = paged_case([300, 200], [300, 900], 32, 8, 128, 64, dtype=BF16, device="cuda")
    close(run_varlen(case, tile=VarlenTile(128, 64, 8, 3, False)), reference(case))


def test_split_of_several_rows() -> None:
    for tokens, lens in ((4, [4, 1, 3]), (16, [16, 9, 13])):
        case = paged_case(lens, [3000, 70, 1500], 32, 8, 128, 64, dtype=BF16, device="cuda")
        close(run_split(case, tokens=tokens), reference(case))


@pytest.mark.parametrize("narrow", [False, True])
def test_parts_in_order(narrow: bool) -> None:
    """As without an order, bit for bit, in all replays; more parts than programs, and sequences without tokens."""
    lens = [(0, 1, 63, 700, 64, 1500, 333, 1600, 9000, 2500)[(3 * i + i // 10) % 10] for i in range(200)]
    case = paged_case([1] * len(lens), lens, 32, 8, 128, 64, dtype=BF16, device="cuda")
    want = reference(case)
    if narrow:
        case, wide = in_fp8(case)
        want = reference(wide)
    plain, space = (split_space(len(lens), 32, 8, 128, DEVICE) for _ in range(2))
    plain.order = None
    first = run_split(case, plain, max_context=9000)
    close(first, want)
    out, graph = torch.empty_like(first), torch.cuda.CUDAGraph()
    assert torch.equal(run_split(case, space, max_context=9000), first)
    with torch.cuda.graph(graph):
        for ordered in (False, True):
            run_split(case, space, max_context=9000, out=out, ordered=ordered)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.parametrize(("columns", "width", "rows"), [(4096, 12288, 65), (4096, 12288, 576), (4096, 4096, 256), (5120, 25600, 128), (1024, 2048, 512), (3584, 18944, 100)])
def test_halves_of_a_sum(columns: int, width: int, rows: int) -> None:
    """As exact as the whole sum, and the same bits in all replays."""
    matrix = torch.randn((columns, width), device=DEVICE).mul_(width**-0.5).to(BF16)
    x, residual = (torch.randn((rows, n), device=DEVICE).to(BF16) for n in (width, columns))
    weight, out, graph = torch.ones(columns, dtype=BF16, device=DEVICE), torch.empty_like(residual), torch.cuda.CUDAGraph()
    halves = MatrixLinear(matrix).halves(rows)
    assert halves is not None
    normed, total = add_rms_norm(halves(x), residual, weight, 1e-6)
    close(total, x.float() @ matrix.float().t() + residual.float())
    close(normed, rms_norm_reference(total, weight, 1e-6))
    with torch.cuda.graph(graph):
        out.copy_(add_rms_norm(halves(x), residual, weight, 1e-6)[1])
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, total)


@pytest.mark.parametrize("context", [32768, 131072])
def test_long_contexts(context: int) -> None:
    decode = paged_case([1, 1], [context, 5], 16, 8, 128, 64, dtype=BF16, device="cuda")
    close(run_split(decode), reference(decode))
    chunk = paged_case([200], [context], 16, 8, 128, 64, dtype=BF16, device="cuda")
    close(run_varlen(chunk), reference(chunk))
    few = paged_case([5], [context], 16, 8, 128, 64, dtype=BF16, device="cuda")
    close(run_split(few, tokens=8), reference(few))


def far_case() -> tuple[PagedCase, torch.Tensor]:
    """A cache of more than 2^31 elements whose last blocks are used (keys and values share the tensor)."""
    blocks = 2**31 // (64 * 8 * 128) + 64
    cache = torch.zeros((blocks, 64, 8, 128), dtype=BF16, device=DEVICE)
    case = paged_case([1, 90], [700, 200], 16, 8, 128, 64, dtype=BF16, device="cuda", poison=False)
    move = torch.arange(case.k_cache.shape[0], device=DEVICE) + blocks - case.k_cache.shape[0]
    cache[move] = case.k_cache
    case.block_tables = move[case.block_tables.long()].to(torch.int32)
    case.k_cache = case.v_cache = cache
    return case, cache


def test_caches_past_2_31_elements() -> None:
    case, cache = far_case()
    want = reference(case)
    close(run_varlen(case), want)
    close(run_varlen(case, tile=VarlenTile(128, 64, 8, 3, False)), want)
    decode = PagedCase(
        case.q[:2], cache, cache, case.block_tables, case.seq_slots, case.query_start, case.seq_lens, [1, 1], [700, 200]
    )
    close(run_split(decode), attention_reference(decode, 128**-0.5))
    out = torch.empty((900, 8, 128), dtype=BF16, device=DEVICE)
    starts = torch.tensor([0, 700, 900], dtype=torch.int32, device=DEVICE)
    tables = (case.block_tables, case.seq_slots, starts)
    gather_kv(cache, cache, out, out.clone(), *tables, first_seq=0, num_seqs=2, max_context=700)
    for s, (lo, hi) in enumerate(((0, 700), (700, 900))):
        blocks = case.block_tables[int(case.seq_slots[s]), : -(-(hi - lo) // 64)].long()
        assert torch.equal(out[lo:hi], cache[blocks].flatten(0, 1)[: hi - lo])
    qkv = torch.randn((2, 32 * 128), device=DEVICE).to(BF16)
    kv = SimpleNamespace(k=[cache], v=[torch.empty_like(cache)], scales=[(None, None)])
    last = cache.shape[0] * 64 - 1
    angle = torch.zeros((4, 64), device=DEVICE)
    qkv_rope_write(
        qkv, torch.zeros(2, dtype=torch.int32, device=DEVICE), angle.cos(), angle.sin(), kv, 0,
        torch.tensor([last, -1], device=DEVICE), num_heads=16, num_kv_heads=8, head_dim=128,
        q_norm=None, k_norm=None, eps=1e-6, norm_offset=0.0,
    )  # fmt: skip
    assert torch.equal(cache[-1, -1].flatten(), qkv[0, 16 * 128 : 24 * 128])
    assert torch.equal(kv.v[0][-1, -1].flatten(), qkv[0, 24 * 128 :])


def test_rows_past_2_31_elements() -> None:
    rows, width = 2**31 // 8192 + 100, 8192
    x = torch.zeros((rows, width), dtype=BF16, device=DEVICE)
    x[-3:] = torch.randn((3, width), device=DEVICE).to(BF16)
    weight = torch.randn(width, device=DEVICE).to(BF16)
    close(rms_norm(x, weight, 1e-6)[-3:], rms_norm_reference(x[-3:].float(), weight.float(), 1e-6))
    close(act_mul(x, "silu")[-3:], act_mul_reference(x[-3:].float(), "silu"))
    ids = torch.tensor([rows - 1, rows - 2, rows - 3, rows, -1], dtype=torch.int32, device=DEVICE)
    got = embed(ids, x)
    assert torch.equal(got[:3], x[-3:].flip(0))
    assert torch.equal(got[3:], x[[-1, 0]]), "ids outside of the table read none but its rows"


@pytest.mark.parametrize("hidden", [576, 1024, 4096, 5120, 8192])
@pytest.mark.parametrize("rows", [1, 37])
def test_norms(hidden: int, rows: int) -> None:
    x, residual = (torch.randn((rows, hidden), device=DEVICE).to(BF16) for _ in range(2))
    weight = torch.randn(hidden, device=DEVICE).to(BF16)
    close(rms_norm(x, weight, 1e-6, 1.0), rms_norm_reference(x.float(), weight.float(), 1e-6, 1.0))
    normed, total = add_rms_norm(x, residual, weight, 1e-6, 0.0, 0.5)
    close(total, residual.float() + 0.5 * x.float())
    close(normed, rms_norm_reference(total.float(), weight.float(), 1e-6))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
def test_act_mul(kind) -> None:
    x = torch.randn((33, 2 * 3072), device=DEVICE).to(BF16)
    close(act_mul(x, kind), act_mul_reference(x.float(), kind))


@pytest.mark.parametrize("heads, kv_heads, head_dim, rot", [
    (16, 8, 128, 128), (9, 3, 64, 64), (32, 32, 80, 32), (8, 4, 256, 256), (24, 8, 96, 96), (40, 8, 128, 128), (32, 0, 512, 512),
])  # fmt: skip
@pytest.mark.parametrize("norm", ["none", "head", "full"])
def test_qkv(heads: int, kv_heads: int, head_dim: int, rot: int, norm: str) -> None:
    check_qkv(
        qkv_rope_write, close, heads, kv_heads, head_dim, rot, norm, rows=70, block=64, keep=True, dtype=BF16, device="cuda"
    )


def test_graph_serves_every_length_mix_and_replays_are_identical() -> None:
    """One capture, many lengths, padded rows among them; the same bits whatever order the programs finish in."""
    lens = [4000, 1, 1000, 64, 129, 0, 0, 2048]
    case = paged_case([1] * 8, [4096] * 8, 16, 8, 128, 64, dtype=BF16, device="cuda")
    workspace = split_space(8, 16, 8, 128, DEVICE)
    out = torch.empty((8, 16 * 128), dtype=BF16, device=DEVICE)
    run_split(case, workspace=workspace, out=out, max_context=4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_split(case, workspace=workspace, out=out, max_context=4096)
    for shift in range(4):
        now = lens[shift:] + lens[:shift]
        case.seq_lens.copy_(torch.tensor(now, dtype=torch.int32))
        case.context_lens = now
        graph.replay()
        first = out.clone()
        close(first, reference(case))
        assert not workspace.tickets.any()
        for _ in range(100):
            graph.replay()
            assert torch.equal(out, first)


def test_chained_launches_under_pdl_are_identical() -> None:
    """norm -> qkv -> attention -> norm in one graph, each launched before the one before it has ended."""
    heads, kv_heads, dim, hidden = 16, 8, 128, 2048
    lens = [i * 97 + 1 for i in range(16)]
    case = paged_case([1] * 16, lens, heads, kv_heads, dim, 64, dtype=BF16, device="cuda", poison=False)
    kv = SimpleNamespace(k=[case.k_cache], v=[case.v_cache], scales=[(None, None)])
    position = case.seq_lens - 1
    block = case.block_tables[case.seq_slots.long()].gather(1, (position // 64).long()[:, None])[:, 0]
    slots = block.long() * 64 + position % 64
    angle = torch.rand((2048, 64), device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    x = torch.randn((16, (heads + 2 * kv_heads) * dim), device=DEVICE).to(BF16)
    weight = torch.randn(x.shape[1], device=DEVICE).to(BF16)
    workspace = split_space(16, heads, kv_heads, dim, DEVICE)
    out = torch.empty((16, hidden), dtype=BF16, device=DEVICE)
    result = torch.empty_like(out)

    def step() -> None:
        y = x
        for _ in range(4):
            y, _ = add_rms_norm(x, y, weight, 1e-6)
            q, _ = qkv_rope_write(
                y, position, cos, sin, kv, 0, slots, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
                q_norm=weight[:dim], k_norm=weight[:dim], eps=1e-6, norm_offset=0.0,
            )  # fmt: skip
            case.q = q
            run_split(case, workspace=workspace, out=out, max_context=2048)
            y = torch.cat((out, out), 1).contiguous() if y.shape[1] == 2 * hidden else y
        result.copy_(rms_norm(out, weight[:hidden], 1e-6))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    first = result.clone()
    assert first.isfinite().all() and first.any()
    for _ in range(200):
        graph.replay()
        assert torch.equal(result, first)


def small_model() -> ModelConfig:
    return ModelConfig(
        family="qwen3", vocab_size=64, hidden_size=64, num_layers=1, num_heads=16, num_kv_heads=8, head_dim=128,
        intermediate_size=64, max_position=4096, rope=RopeConfig(1e4, 128),
    )  # fmt: skip


@pytest.mark.parametrize("query_lens, context_lens", [
    ([2048, 2048], [2048, 2048]), ([1, 1, 1300, 2500, 300], [800, 5, 1300, 2500, 1500]), ([3, 100, 5], [2000, 300, 4000]),
])  # fmt: skip
@pytest.mark.parametrize("name", ["triton", "cudnn", "fa3"])
def test_backends(name: str, query_lens: list[int], context_lens: list[int]) -> None:
    case = paged_case(query_lens, context_lens, 16, 8, 128, 64, dtype=BF16, device="cuda")
    if name == "fa3":
        function, why = find_flash_attention_3()
        if function is None:
            pytest.skip(why)
        backend: TritonAttention = FlashAttention3(small_model(), DEVICE, function)
    else:
        backend = (CudnnAttention if name == "cudnn" else TritonAttention)(small_model(), DEVICE)
    batch, kv = batch_of(case), cache_of(case)
    backend.begin(batch, kv)
    got = backend.attend(case.q, 0, kv, batch, scale=128**-0.5, window=0, softcap=0.0)
    close(got, reference(case))
    if isinstance(backend, CudnnAttention):
        assert not backend.broken
        assert bool(backend.dense) == any(n >= flash.CUDNN_MULTIPLE for n in query_lens)
    assert default_tile(128, 2, 64, True).tma


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("narrow", [False, True])
def test_attention_sinks(window: int, narrow: bool) -> None:
    """Of gpt-oss's heads: some sinks that count for nothing, some for nearly all; 0 for a row that is not there."""
    options = {"window": window, "sinks": torch.linspace(-9.0, 9.0, 64, device=DEVICE)}
    for lens, contexts, attend in (
        ([1] * 7, [1, 64, 65, 1000, 5000, 0, 333], run_split), ([1, 500, 130, 1, 77], [900, 500, 700, 0, 78], run_varlen),
    ):  # fmt: skip
        case = wide = paged_case(lens, contexts, 64, 8, 64, 64, dtype=BF16, device="cuda")
        if narrow:
            case, wide = in_fp8(case)
        close(attend(case, **options), attention_reference(wide, 64**-0.5, **options))
