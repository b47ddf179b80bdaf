"""The kernels of mixture of experts against float64 references, in Triton's interpreter or on the card."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from headrace.fast_decode.epilogues import runs_triton
from headrace.kernels import experts_route, experts_triton
from headrace.kernels.experts_sort import sort_pairs
from headrace.kernels.experts_tiles import tile_rows
from headrace.kernels.experts_wide import takes_wide
from headrace.model.weight import Weight, dequantized
from narrow_cases import FORMS, narrow
from test_kernels_fused_decode import DEVICE, close, random

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")
TOLERANCE = 1e-4


def routing(**given) -> SimpleNamespace:
    usual = {"chosen": 4, "score": "softmax", "renormalize": False, "scale": 1.0, "groups": 1, "groups_chosen": 1}
    return SimpleNamespace(**usual | given)


def route_reference(logits: Tensor, correction: Tensor | None, how: SimpleNamespace) -> tuple[Tensor, Tensor]:
    logits = logits.double()
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "chosen": logits}[how.score]
    choice = scores if correction is None else scores + correction.double()
    if how.groups_chosen < how.groups:
        of_groups = choice.unflatten(-1, (how.groups, -1)).topk(2).values.sum(-1)
        kept = torch.zeros_like(of_groups).scatter_(1, of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : how.groups_chosen], 1)
        choice = choice.masked_fill(kept.repeat_interleave(logits.shape[-1] // how.groups, 1) == 0, -torch.inf)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : how.chosen]
    shares = scores.gather(1, ids)
    if how.score == "chosen":
        shares = shares.softmax(-1)
    elif how.renormalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return ids, shares * how.scale


ROUTINGS = {
    "softmax": (16, routing()),
    "softmax of 20": (20, routing(chosen=3, renormalize=True)),
    "sigmoid, groups": (24, routing(score="sigmoid", groups=4, groups_chosen=2, renormalize=True, scale=2.5)),
    "sigmoid, groups of 5": (30, routing(score="sigmoid", groups=6, groups_chosen=3, chosen=6)),
    "chosen": (32, routing(score="chosen")),
    "one": (8, routing(score="sigmoid", chosen=1)),
    "512": (512, routing(chosen=10, renormalize=True)),
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(name: str, corrected: bool) -> None:
    experts, how = ROUTINGS[name]
    logits, correction = random(5, experts), random(experts, seed=1) if corrected else None
    ids, shares = experts_triton.route(logits, correction, how)
    want, of_them = route_reference(logits, correction, how)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), want)
    close(shares, of_them, 1e-6)


def test_of_equals_the_lower_ids_are_chosen_and_no_number_is_an_expert() -> None:
    logits = torch.zeros(3, 12, device=DEVICE)
    logits[1, 7] = 1.0
    logits[2] = torch.nan
    ids, shares = experts_triton.route(logits, None, routing())
    assert ids.tolist() == [[0, 1, 2, 3], [7, 0, 1, 2], [0, 1, 2, 3]]
    assert shares[:2].isfinite().all() and shares[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_logits_of_any_number_of_rows(dtype: torch.dtype) -> None:
    """As exact as float32, and each row's the same bits alone."""
    x, router = random(18, 260, dtype=dtype), random(18, 260, seed=1)
    logits = experts_triton.router_parts(x, router)
    close(logits.sum(0), x.double() @ router.double().T, 1e-6)
    assert torch.equal(experts_triton.router_parts(x[3:4], router)[:, 0], logits[:, 3])
    bias = random(18, seed=2)
    ids, shares = experts_triton.choose(x, router, bias, None, routing())
    expected, of_them = experts_triton.route(logits.sum(0) + bias, None, routing())
    assert torch.equal(ids, expected)
    close(shares, of_them, 1e-5)


def test_router_of_many_rows(monkeypatch) -> None:
    """By more rows of a program, and all experts one after the other where it holds x; on a card the same bits (the interpreter's
    products round as their shapes make them)."""
    for width in (260, 2060):
        x, router = random(70, width, dtype=torch.bfloat16), random(18, width, seed=1)
        logits = experts_triton.router_parts(x, router)
        with monkeypatch.context() as many:
            many.setattr(experts_route, "PROGRAMS", 1)
            assert experts_route.router_tile(70, 18, width, 2) == (256 if width == 260 else 128, 2)
            got = experts_triton.router_parts(x, router)
            close(got, logits.double(), 1e-6)
            assert DEVICE == "cpu" or torch.equal(got, logits)


@pytest.mark.parametrize(("rows", "chosen", "count", "first"), [(5, 2, 7, 0), (40, 4, 5, 0), (70, 3, 4, 6), (3, 1, 40, 0)])
def test_sorting(rows: int, chosen: int, count: int, first: int) -> None:
    ids = torch.rand(rows, count + first, generator=torch.Generator().manual_seed(1)).topk(chosen).indices.int().to(DEVICE)
    done = sort_pairs(ids, count, first, 16)
    here = ids.flatten() - first
    here = torch.where((here < 0) | (here >= count), count, here)
    held = int((here < count).sum())
    assert torch.equal(done.order[:held].long(), here.sort(stable=True).indices[:held])
    tiles = [tile for tile in done.tiles.tolist() if tile[0] >= 0]
    ends = here.bincount(minlength=count)[:count].cumsum(0).tolist()
    starts = [0, *ends]
    assert tiles == [[e, at, ends[e]] for e in range(count) for at in range(starts[e], ends[e], 16)]


def gated_reference(gate: Tensor, up: Tensor, activation: str, clamp: float) -> Tensor:
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        return (up + 1) * gate * (1.702 * gate).sigmoid()
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    return act * up


def mxfp4(rows: int, hidden: int, inner: int, count: int, chosen: int, kinds: tuple[torch.dtype, torch.dtype]):
    """As `case`, with scales of such kinds that are powers of two from 2^-12 to 2^3."""
    (x, gate_up, down, ids, shares), given = case(rows, hidden, inner, count, chosen, "fp4 by 32", torch.bfloat16, biases=True)
    for i, (weight, kind) in enumerate(zip((gate_up, down), kinds, strict=True)):
        exponents = torch.randint(-12, 4, weight.scales.shape, generator=torch.Generator().manual_seed(i)).to(DEVICE)
        weight.scales = torch.exp2(exponents.float() - 4 * i).to(kind)
    return (x, gate_up, down, ids, shares), given


def reference(x, gate_up, down, ids, shares, *, count, first=0, activation="silu", clamp=0.0, gate_up_bias=None, down_bias=None):
    w, v = (dequantized(m, torch.float32).double().unflatten(0, (count, -1)) for m in (gate_up, down))
    out = torch.zeros(len(x), v.shape[1], dtype=torch.float64, device=x.device)
    for t in range(len(x)):
        row = torch.nn.functional.pad(x[t].double(), (0, w.shape[2] - x.shape[1]))
        for e, share in zip(ids[t].tolist(), shares[t].tolist(), strict=True):
            if not first <= e < first + count:
                continue
            y = w[e - first] @ row
            if gate_up_bias is not None:
                y += gate_up_bias.double().unflatten(0, (count, -1))[e - first]
            y = gated_reference(*y.chunk(2), activation, clamp).to(x.dtype).double()
            y = v[e - first] @ torch.nn.functional.pad(y, (0, v.shape[2] - len(y)))
            if down_bias is not None:
                y += down_bias.double().unflatten(0, (count, -1))[e - first]
            out[t] += share * y
    return out


def case(rows: int, hidden: int, inner: int, count: int, chosen: int, form: str, dtype: torch.dtype, biases: bool = False):
    """A batch and experts; of packed forms the widths are whole runs."""
    def matrix(number: int, width: int, seed: int) -> Weight:
        if form == "float":
            return Weight(random(number, width, dtype=dtype, seed=seed) * width**-0.5)
        width = -(-width // 128) * 128 if form.startswith(("int4", "fp4")) else width
        weight = narrow(form, number, width, DEVICE, seed=seed)
        weight.scales = (weight.scales.float() * width**-0.5).to(weight.scales.dtype)
        return weight

    x = random(rows, hidden, dtype=dtype)
    ids = torch.rand(rows, count, generator=torch.Generator().manual_seed(7)).topk(chosen).indices.int().to(DEVICE)
    shares = random(rows, chosen, seed=5).softmax(-1)
    given = {"count": count}
    if biases:
        given |= {"gate_up_bias": random(count * 2 * inner, seed=8, dtype=dtype), "down_bias": random(count * hidden, seed=9, dtype=dtype)}
    return (x, matrix(count * 2 * inner, hidden, 1), matrix(count * hidden, inner, 2), ids, shares), given


def check(arguments, given, tolerance: float = TOLERANCE, **more) -> Tensor:
    got = experts_triton.run_experts(*arguments, **given, **more)
    close(got, reference(*arguments, **given, **more), tolerance)
    return got


def check_joining(arguments, given, tolerance: float, of_sums: float) -> None:
    """Rows of 48 columns, of six experts four each, that are not divided by their norm yet; and what the next product needs."""
    x, gate_up, down, *_ = arguments
    rows = len(x)
    router, router_bias, norm, total = random(6, 48, seed=3), random(6, seed=4), random(48, seed=5), random(rows, 48, seed=6)
    sums, how = random(rows, 3, seed=7).square() * 48, routing(score="chosen")
    factor = (sums.sum(1, keepdim=True) / 48 + 1e-5).rsqrt()
    ids, shares = experts_triton.route((x.float() * factor) @ router.T + router_bias, None, how)
    added = reference((x.double() * factor.double()), gate_up, down, ids, shares, **given)
    expected, normed = total + 0.5 * added, torch.full_like(x, torch.nan)
    joining = experts_triton.Joining(total, normed, norm, 0.5, 0.25)
    squares = experts_triton.add_experts(
        x, experts_triton.Squares(sums, 48, 1e-5), router, gate_up, down, how, joining, router_bias=router_bias, **given
    )
    close(total, expected, of_sums)
    close(normed.float(), expected * (norm + 0.25), tolerance)
    close(squares.sum(1), expected.square().sum(1), of_sums)


@pytest.mark.parametrize("form", ["float", "fp8 row", "fp8 blocks", "int8 by 32, minima", "int4 by 128, zeros", "fp4 by 32"])
def test_one_row(form: str) -> None:
    """The ways to load and to scale; the card's tests have every form of weights."""
    check(*case(1, 12, 8, 2, 1, form, torch.float32))


@pytest.mark.parametrize("form", FORMS if DEVICE == "cuda" else [form for form in FORMS if "minima" not in form])
def test_tiles(form: str) -> None:
    check(*case(6, 32, 24, 3, 2, form, torch.float32))


def test_many_rows_in_16_bits() -> None:
    """The second product is the copy engine's: columns and K that end within a tile, experts with rows of several tiles."""
    arguments, given = case(100, 40, 24, 4, 2, "float", torch.float16, biases=True)
    assert takes_wide(arguments[0], arguments[2], tile_rows(200, 4, 2))
    arguments[3][:80, 0] = 2
    arguments[3][:80, 1] = 0
    check(arguments, given, 2e-3)


class PlayedRoles:
    """experts_roles.py in torch: rows in the order of the sort, whose columns are in that of a thread's bytes."""

    ROWS = 16

    def __init__(self, count: int):
        self.count = count
        k = torch.arange(256)
        self.placed = (k & -32) | (k >> 3 & 1) | (k & 1) << 1 | (k >> 4 & 1) << 2 | (k >> 1 & 3) << 3

    def products(self, x: Tensor, weight: Weight, pairs) -> Tensor:
        w, back = dequantized(weight, torch.float32).unflatten(0, (self.count, -1)), torch.argsort(self.placed[: x.shape[1]])
        out = torch.full((len(x), w.shape[1]), torch.nan)
        for expert, first, end in pairs.tiles.tolist():
            if expert >= 0:
                out[first : min(end, first + 16)] = x[first : min(end, first + 16), back].float() @ w[expert].T
        return out

    def glu(self, x, weight, bias, pairs, out, columns, inner, *, chosen, clamp, factors) -> None:
        assert bias is None and factors is None and (columns, inner) == (120, 200) and not x[: len(x) // 2, self.placed[: x.shape[1]] >= 200].any()
        gate, up = self.products(x, weight, pairs).chunk(2, -1)
        y = torch.nn.functional.pad(gated_reference(gate, up, "silu", clamp), (0, out.shape[1] - columns))
        out.copy_(y[:, self.placed[: out.shape[1]]])

    def down(self, x, weight, bias, pairs, shares, out, inner) -> None:
        assert inner == 120
        order = torch.where((pairs.order >= 0) & (pairs.order < len(out)), pairs.order, 0).long()
        out[order] = (self.products(x, weight, pairs) * shares.flatten()[order, None]).to(out.dtype)


@pytest.mark.skipif(DEVICE != "cpu", reason="the card's tests have the kernel itself")
def test_prompts_of_mxfp4_go_to_warps_with_roles(monkeypatch) -> None:
    """Rows in the order of the sort, zeros behind them, columns as the kernel wants them; few rows, adapters' and other cards'
    go the usual way."""
    arguments, given = case(40, 200, 120, 3, 2, "fp4 by 32", torch.float32)
    assert experts_triton.find_roles(*arguments[:3], "silu", 0.0) is None
    asked = []
    monkeypatch.setattr(experts_triton, "find_roles", lambda *given: asked.append(given) or PlayedRoles(3))
    check(arguments, given)
    assert [given[3:] for given in asked] == [("silu", 0.0)]
    x, gate_up, down, ids, shares = arguments
    check((x[:12], gate_up, down, ids[:12], shares[:12]), given)
    assert len(asked) == 1  # of an expert 8 pairs


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(("activation", "clamp"), [("gelu_tanh", 0.0), ("silu", 0.7)])
def test_activations_and_biases(rows: int, activation: str, clamp: float) -> None:
    check(*case(rows, 24, 20, 3, 2, "float", torch.float32, biases=True), activation=activation, clamp=clamp)


@pytest.mark.parametrize("rows", [1, 6])
def test_experts_elsewhere_give_nothing(rows: int) -> None:
    """The parts of two ranks are the whole, and rows whose experts are all elsewhere are 0."""
    (x, gate_up, down, ids, shares), _ = case(rows, 24, 16, 6, 2, "float", torch.float32)
    whole = experts_triton.run_experts(x, gate_up, down, ids, shares, count=6)
    parts = [
        check((x, Weight(gate_up.data.chunk(3)[r]), Weight(down.data.chunk(3)[r]), ids, shares), {"count": 2, "first": 2 * r})
        for r in range(3)
        if ((ids // 2) == r).any()
    ]
    close(sum(parts), whole, TOLERANCE)
    nothing = experts_triton.run_experts(x, gate_up, down, ids, shares, count=6, first=100)
    assert not nothing.any()


@pytest.mark.parametrize("rows", [2, 20])
def test_a_row_is_the_same_beside_any_others(rows: int, monkeypatch) -> None:
    (x, gate_up, down, ids, shares), given = case(rows, 24, 16, 4, 2, "float", torch.float32)
    together = experts_triton.run_experts(x, gate_up, down, ids, shares, **given)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    moved = experts_triton.run_experts(x[order], gate_up, down, ids[order].contiguous(), shares[order].contiguous(), **given)
    exact = DEVICE == "cuda" or rows <= experts_triton.ROW_FORM  # NumPy's products of matrices depend on their places
    same = torch.equal if exact else partial(torch.allclose, atol=1e-5)
    assert same(moved, together[order])
    if rows > experts_triton.ROW_FORM:
        monkeypatch.setattr(experts_triton, "MOST_BYTES", 8 * 2 * (16 * 4 + 24 * 4))  # in parts of eight rows
        assert same(experts_triton.run_experts(x, gate_up, down, ids, shares, **given), together)
    else:
        alone = experts_triton.run_experts(x[1:], gate_up, down, ids[1:].contiguous(), shares[1:].contiguous(), **given)
        assert torch.equal(alone[0], together[1])


@pytest.mark.parametrize("rows", [2, 6])
def test_joining_a_residual(rows: int) -> None:
    """Rows that are not divided by their norm yet, and what the next product needs of the sum."""
    (x, gate_up, down, _, _), given = case(rows, 32, 24, 5, 2, "float", torch.float32, biases=True)
    router, router_bias, norm, total = random(5, 32, seed=3), random(5, seed=4), random(32, seed=5), random(rows, 32, seed=6)
    sums = random(rows, 3, seed=7).square() * 32
    factors = (sums.sum(1, keepdim=True) / 32 + 1e-5).rsqrt()
    ids, shares = experts_triton.choose(x * factors, router, router_bias, None, routing(chosen=2))
    expected = total + 0.5 * experts_triton.run_experts(x * factors, gate_up, down, ids, shares, **given)
    normed = torch.full_like(x, torch.nan)
    joining = experts_triton.Joining(total, normed, norm, 0.5, 0.25)
    squares = experts_triton.add_experts(
        x, experts_triton.Squares(sums, 32, 1e-5), router, gate_up, down, routing(chosen=2), joining, router_bias=router_bias, **given
    )
    close(total, expected, TOLERANCE)
    close(normed, expected * (norm + 0.25), TOLERANCE)
    close(squares.sum(1), expected.square().sum(1), TOLERANCE)


@pytest.mark.parametrize("name", [name for name, (_, how) in ROUTINGS.items() if how.groups == 1 and how.chosen < 8])
def test_each_program_chooses_for_itself_as_the_one_kernel_does(name: str) -> None:
    """Of one row; with equal logits, and with one that is no number. Experts are told apart by their down biases."""
    count, how = ROUTINGS[name]
    (x, gate_up, down, _, _), given = case(1, 16, 8, count, how.chosen, "float", torch.float32, biases=True)
    router, sums, norm = random(count, 16, seed=3), x.square().sum(1, keepdim=True), torch.ones(16, device=DEVICE)
    router[count // 2] = router[1]
    rows = x * (sums / 16 + 1e-5).rsqrt()
    for router_bias in (None, random(count, seed=4).round()):
        logits = rows.double() @ router.double().T + (0.0 if router_bias is None else router_bias)
        ids, shares = route_reference(logits, None, how)
        expected = reference(rows, gate_up, down, ids, shares, **given)
        total, squares = torch.zeros_like(x), experts_triton.Squares(sums, 16, 1e-5)
        joining = experts_triton.Joining(total, torch.empty_like(x), norm, 1.0, 0.0)
        experts_triton.add_experts(x, squares, router, gate_up, down, how, joining, router_bias=router_bias, **given)
        close(total, expected, TOLERANCE)
    router[0] = torch.nan
    experts_triton.add_experts(x, squares, router, gate_up, down, how, joining, **given)
    assert total.isnan().all()
