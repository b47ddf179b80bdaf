"""What adapters add to experts' products, by the kernels and by their reference in torch, against experts with it merged in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.fast_decode.epilogues import runs_triton
from headrace.kernels import experts_triton
from headrace.kernels.experts import run_experts_reference
from headrace.kernels.experts_lora import ExpertAdds
from headrace.kernels.lora import new_pair
from headrace.model.weight import Weight, dequantized
from test_kernels_experts import TOLERANCE, case, reference
from test_kernels_fused_decode import DEVICE, close, random

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")
SLOTS = 2


def adds_of(rows: int, hidden: int, inner: int, count: int, rank: int, dtype: torch.dtype) -> ExpertAdds:
    """Of random matrices; the rows have in turn none, the first and the second."""
    pairs = [new_pair(SLOTS * count, sizes, k, rank, dtype, torch.device(DEVICE)) for sizes, k in (((inner, inner), hidden), ((hidden,), inner))]
    for seed, pair in enumerate(pairs):
        for number, whole in enumerate((pair.a, pair.b, pair.scales)):
            whole.copy_(random(*whole.shape, dtype=dtype, seed=40 + 3 * seed + number) * (0.4 if number < 2 else 1.0))
        pair.a *= pair.a.shape[2] ** -0.5
    return ExpertAdds(*pairs, SLOTS, torch.arange(rows, device=DEVICE) % 3)


def merged(x: Tensor, gate_up: Weight, down: Weight, ids: Tensor, shares: Tensor, adds: ExpertAdds, count: int, **given) -> Tensor:
    """float64, each row by the experts of its adapter."""
    out = torch.zeros(len(x), down.shape[0] // count, dtype=torch.float64, device=DEVICE)
    for slot in range(-1, SLOTS):
        matrices = [dequantized(m, torch.float32).double() for m in (gate_up, down)]
        for matrix, pair in zip(matrices, (adds.gate_up, adds.down), strict=True):
            first, of_experts = 0, matrix.unflatten(0, (count, -1))
            for index, end in pair.runs if slot >= 0 else ():
                for expert in range(count):
                    one, r = slot * count + expert, slice(index * pair.rank, (index + 1) * pair.rank)
                    added = pair.scales[one, index].double() * pair.b[one, first:end].double() @ pair.a[one, r].double()
                    of_experts[expert, first:end, : added.shape[1]] += added
                first = end
        own = (adds.numbers == slot + 1).nonzero()[:, 0]
        # float64 weights: the reference is of matrices, whatever they are in
        out[own] = reference(x[own], *(Weight(m) for m in matrices), ids[own], shares[own], count=count, **given)
    return out


@pytest.mark.parametrize(
    ("rows", "hidden", "form", "rank", "dtype", "more"),
    [
        (2, 520, "float", 16, torch.float32, {}),  # sums in parts
        (3, 24, "float", 40, torch.float32, {"clamp": 0.7}),
        (2, 24, "fp4 by 32", 16, torch.float32, {"activation": "gelu_tanh"}),
        (60, 24, "float", 16, torch.float16, {}),
    ],
)
def test_as_if_merged(rows: int, hidden: int, form: str, rank: int, dtype: torch.dtype, more: dict) -> None:
    arguments, given = case(rows, hidden, 16, 2, 2, form, dtype, biases=bool(more))
    adds = adds_of(rows, hidden, 16, 2, rank, dtype)
    wanted = merged(*arguments, adds, **given, **more)
    tolerance = TOLERANCE if dtype == torch.float32 else 3e-3
    found = experts_triton.run_experts(*arguments, **given, **more, adds=adds)
    close(found, wanted, tolerance)
    if form == "float":
        close(run_experts_reference(*arguments, first=0, **{"activation": "silu", **given, **more}, adds=adds), wanted, tolerance)


def test_of_a_rank_and_in_parts(monkeypatch) -> None:
    """A rank's experts add what is theirs; rows in parts are what they are together."""
    (x, gate_up, down, ids, shares), _ = case(3, 24, 16, 2, 1, "float", torch.float32)
    ids[:, 0] = torch.tensor([1, 0, 1])
    adds = adds_of(3, 24, 16, 1, 16, torch.float32)
    own, first = [Weight(m.data.chunk(2)[1]) for m in (gate_up, down)], {"count": 1, "first": 1}
    found = experts_triton.run_experts(x, *own, ids, shares, **first, adds=adds)
    close(found, run_experts_reference(x, *own, ids, shares, **first, activation="silu", adds=adds), TOLERANCE)
    assert not found[1].any() and found[2].any()
    monkeypatch.setattr(experts_triton, "MOST_BYTES", 2 * (16 * 4 + 24 * 4))
    in_parts = experts_triton.run_experts(x, *own, ids, shares, **first, adds=adds)
    torch.testing.assert_close(in_parts, found, atol=1e-5, rtol=0)
