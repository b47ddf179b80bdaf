"""Mixture of experts on the card: every form of weights, number of rows and way to choose, replays, and rows beside any others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels import experts_triton
from headrace.kernels.experts_tiles import tile_rows
from headrace.model.weight import Weight, dequantized
from narrow_cases import FORMS
from test_kernels_experts import ROUTINGS, case, gated_reference, random, route_reference, routing

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def reference(x, gate_up, down, ids, shares, *, count, first=0, activation="silu", clamp=0.0, gate_up_bias=None, down_bias=None):
    """In float32 by whole experts."""
    w, v = (dequantized(m, torch.float32).unflatten(0, (count, -1)) for m in (gate_up, down))
    rows = torch.nn.functional.pad(x.float(), (0, w.shape[2] - x.shape[1]))
    out = torch.zeros(len(x), v.shape[1], device=x.device)
    for e in range(count):
        share = torch.where(ids == e + first, shares, 0.0).sum(1, keepdim=True)
        y = rows @ w[e].T
        if gate_up_bias is not None:
            y += gate_up_bias.float().unflatten(0, (count, -1))[e]
        y = gated_reference(*y.chunk(2, -1), activation, clamp).to(x.dtype).float()
        y = torch.nn.functional.pad(y, (0, v.shape[2] - y.shape[1])) @ v[e].T
        if down_bias is not None:
            y += down_bias.float().unflatten(0, (count, -1))[e]
        out += share * y
    return out


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("rows", [2, 5, 40, 1500])
@pytest.mark.parametrize("form", ["float", *FORMS])
def test_every_form(form: str, rows: int) -> None:
    """And its replays in a graph, also with another choice than that it was captured with."""
    arguments, given = case(rows, 384, 256, 12, 4, form, BF16, biases=True)
    ids = arguments[3]
    got = experts_triton.run_experts(*arguments, **given)
    assert error(got, reference(*arguments, **given)) < 0.006
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_triton.run_experts(*arguments, **given)
    graph.replay()
    assert torch.equal(out, got)
    ids.copy_((ids + 5) % 12)
    graph.replay()
    assert torch.equal(out, experts_triton.run_experts(*arguments, **given))


@pytest.mark.parametrize(("activation", "clamp"), [("gelu_tanh", 0.0), ("silu", 0.7)])
@pytest.mark.parametrize(("rows", "hidden", "inner", "form"), [(1, 360, 200, "float"), (64, 360, 200, "float"), (900, 360, 200, "fp4 by 32"), (1, 2880, 360, "fp4 by 32")])
def test_shapes_of_no_whole_tile(rows: int, hidden: int, inner: int, form: str, activation: str, clamp: float) -> None:
    arguments, given = case(rows, hidden, inner, 9, 3, form, BF16, biases=True)
    given |= {"activation": activation, "clamp": clamp}
    assert error(experts_triton.run_experts(*arguments, **given), reference(*arguments, **given)) < 0.006


@pytest.mark.parametrize(("hidden", "inner"), [(2880, 360), (2880, 352), (416, 2880)])
@pytest.mark.parametrize("rows", [5, 8, 13, 32, 33, 96])
def test_mxfp4_of_some_rows(rows: int, hidden: int, inner: int) -> None:
    """Tiles of eight rows and of 16, most of which are not full, and experts of several; replays; and rows beside any others."""
    (x, gate_up, down, ids, shares), given = case(rows, hidden, inner, 32, 4, "fp4 by 32", BF16, biases=True)
    for weight in (gate_up, down):
        weight.scales = torch.exp2(weight.scales.float().log2().round()).to(BF16)
    ids[:, 3] = torch.where((ids == 7).any(1), ids[:, 3], 7)  # one that all rows have
    given |= {"clamp": 7.0}
    got = experts_triton.run_experts(x, gate_up, down, ids, shares, **given)
    assert error(got, reference(x, gate_up, down, ids, shares, **given)) < 0.006
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_triton.run_experts(x, gate_up, down, ids, shares, **given)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, got)
    order = torch.randperm(rows, device=x.device)
    moved = experts_triton.run_experts(x[order], gate_up, down, ids[order], shares[order], **given)
    assert torch.equal(moved, got[order])
    others, theirs = torch.randn_like(x), ids.roll(1, 0)
    others[0], theirs[0] = x[0], ids[0]
    assert torch.equal(experts_triton.run_experts(others, gate_up, down, theirs, shares, **given)[0], got[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 30, 700])
@pytest.mark.parametrize("form", ["float", "int8 by 32", "int4 by 128, zeros"])
def test_other_types(form: str, rows: int, dtype: torch.dtype) -> None:
    arguments, given = case(rows, 256, 128, 6, 2, form, dtype)
    assert error(experts_triton.run_experts(*arguments, **given), reference(*arguments, **given)) < (3e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("form", ["float", "fp8 blocks", "int4 by 128", "fp4 by 32"])
@pytest.mark.parametrize("rows", [2, 70, 600])
def test_a_row_is_the_same_beside_any_others(rows: int, form: str) -> None:
    """As long as the form and the size of tiles are the same: moved, and beside rows that all choose otherwise."""
    (x, gate_up, down, ids, shares), given = case(rows, 512, 384, 16, 4, form, BF16)
    together = experts_triton.run_experts(x, gate_up, down, ids, shares, **given)
    order = torch.randperm(rows, device=x.device)
    moved = experts_triton.run_experts(x[order], gate_up, down, ids[order], shares[order], **given)
    assert torch.equal(moved, together[order])
    others, theirs = torch.randn_like(x), ids.clone()
    keep = slice(1, None, 3)
    others[keep], theirs[:] = x[keep], torch.arange(4, device=x.device)
    theirs[keep] = ids[keep]
    beside = experts_triton.run_experts(others, gate_up, down, theirs, shares, **given)
    assert torch.equal(beside[keep], together[keep])


def test_forms_and_tiles_differ_only_in_rounding() -> None:
    (x, gate_up, down, ids, shares), given = case(2000, 512, 384, 16, 4, "float", BF16)
    want = reference(x, gate_up, down, ids, shares, **given)
    alike = {}
    for rows in (1, 2, 3, 30, 60, 200, 500, 2000):
        got = experts_triton.run_experts(x[:rows], gate_up, down, ids[:rows], shares[:rows], **given)
        assert error(got, want[:rows]) < 0.006
        form = 0 if rows <= experts_triton.ROW_FORM else tile_rows(4 * rows, 16, 2)
        alike.setdefault(form, []).append(got[0])
    assert all(torch.equal(first, other) for first, *others in alike.values() for other in others)


def test_mxfp4_by_warps_with_roles() -> None:
    """Experts of 1 to 300 rows and one of none, in tiles of one to four parts: of all sizes of tiles the same sums. Then a part of
    the experts, rows that are not divided by their norm yet, and adding to a residual."""
    (x, gate_up, down, ids, shares), given = case(300, 2880, 360, 12, 3, "fp4 by 32", BF16, biases=True)
    if experts_triton.find_roles(x, gate_up, down, "silu", 0.0) is None:
        pytest.skip("the card or this Triton has no such kernel")
    given |= {"clamp": 7.0}
    ids[:, 0] = 11
    for expert, rows in ((0, 1), (1, 31), (2, 32), (3, 33), (4, 64), (5, 65), (6, 74)):
        ids[:, 1][sum((1, 31, 32, 33, 64, 65, 74)[:expert]) :][:rows] = expert
    ids[:, 2] = torch.arange(300, device=x.device) % 3 + 7
    got = experts_triton.run_experts(x, gate_up, down, ids, shares, **given)
    want = reference(x, gate_up, down, ids, shares, **given)
    assert error(got, want) < 0.006
    assert max(error(got[i], want[i]) for i in range(300)) < 0.02
    for _ in range(3):
        assert torch.equal(experts_triton.run_experts(x, gate_up, down, ids, shares, **given), got)
    fewer = experts_triton.run_experts(x[:170], gate_up, down, ids[:170], shares[:170], **given)
    assert torch.equal(fewer, got[:170])
    w, v = (Weight(m.data[4 * n :], m.scales[4 * n :], None, "fp4", 32) for m, n in ((gate_up, 720), (down, 2880)))
    some = {"gate_up_bias": given["gate_up_bias"][4 * 720 :], "down_bias": given["down_bias"][4 * 2880 :], "clamp": 7.0}
    part = experts_triton.run_experts(x, w, v, ids, shares, count=8, first=4, **some)
    assert error(part, reference(x, w, v, ids, shares, count=8, first=4, **some)) < 0.006
    router, norm, total = random(12, 2880, seed=3), random(2880, seed=5, dtype=BF16), random(300, 2880, seed=6)
    sums = x.float().square().sum(1, keepdim=True)
    rows = x.float() * (sums / 2880 + 1e-5).rsqrt()
    ids, shares = experts_triton.choose(rows, router, None, None, routing(chosen=3))
    expected = total + reference(rows, gate_up, down, ids, shares, **given)
    joining = experts_triton.Joining(total, torch.empty_like(x), norm, 1.0, 0.0)
    squares = experts_triton.add_experts(
        x, experts_triton.Squares(sums, 2880, 1e-5), router, gate_up, down, routing(chosen=3), joining, **given
    )
    assert error(total, expected) < 0.006
    assert error(squares.sum(1), expected.square().sum(1)) < 0.01


@pytest.mark.parametrize("rows", [2, 600])
def test_ranks_of_experts(rows: int) -> None:
    (x, gate_up, down, ids, shares), _ = case(rows, 256, 128, 16, 4, "float", BF16)
    whole = reference(x, gate_up, down, ids, shares, count=16)
    parts = [
        experts_triton.run_experts(x, Weight(gate_up.data.chunk(4)[r]), Weight(down.data.chunk(4)[r]), ids, shares, count=4, first=4 * r)
        for r in range(4)
    ]  # fmt: skip
    assert error(sum(part.float() for part in parts), whole) < 0.006


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("rows", [1, 50, 3000])
def test_routing(name: str, rows: int) -> None:
    experts, how = ROUTINGS[name]
    logits, correction = random(rows, experts), random(experts, seed=1)
    ids, shares = experts_triton.route(logits, correction, how)
    want, of_them = route_reference(logits, correction, how)
    same = (ids.long() == want).all(1)
    assert float(same.float().mean()) > 0.998  # near-ties
    assert error(shares[same], of_them[same]) < 1e-6


def test_router_logits() -> None:
    x, router = random(5000, 2048, dtype=BF16), random(128, 2048, seed=1)
    logits = experts_triton.router_parts(x, router).sum(0)
    assert error(logits, x.double() @ router.double().T) < 1e-6
    for rows in (1, 16, 64, 65, 600, 1100, 2500):
        assert torch.equal(experts_triton.router_parts(x[:rows], router).sum(0), logits[:rows])
    ids, shares = experts_triton.choose(x, router, None, None, routing())
    again, of_them = experts_triton.choose(x[7:9], router, None, None, routing())
    assert torch.equal(again, ids[7:9]) and torch.equal(of_them, shares[7:9])
