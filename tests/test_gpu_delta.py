"""The kernels of the gated delta rule on a card against the reference in torch."""

from __future__ import annotations

import pytest
import torch

from headrace.cache.state_pool import LayerStates
from headrace.kernels.delta_rule import delta_rule_reference
from test_kernels_delta import Run, in_triton, make_layer, random_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("padded", [None, (3, 9)], ids=["", "captured"])
@pytest.mark.parametrize(
    "sizes, dtype, tolerance",
    [
        ((2, 4, 16, 32), torch.float32, 1e-3), ((4, 8, 128, 128), torch.bfloat16, 4e-2), ((2, 2, 64, 128), torch.bfloat16, 4e-2),
        ((4, 8, 128, 128), torch.float32, 1e-3), ((2, 4, 16, 32), torch.bfloat16, 4e-2),
    ],
)
def test_rows_and_states(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float, padded: tuple[int, int] | None
) -> None:
    """Also as a captured step with prompts has them, beside padded sequences and rows."""
    torch.manual_seed(0)
    layer = make_layer(*sizes)
    counts = [[300, 90, 1], [1, 1, 1], [64, 1, 70], [1, 130, 1]]
    rows = {slot: random_rows(layer, sum(step[slot] for step in counts)) for slot in range(3)}
    rows = {slot: (x.to(dtype), gates.to(dtype)) for slot, (x, gates) in rows.items()}
    card, exact = on_card(layer, dtype), Run(layer, 3, delta_rule_reference)
    card.padded = padded
    for step in counts:
        order = sorted(range(3), key=lambda slot: step[slot] != 1)
        parts = [slice(exact.lengths[slot], exact.lengths[slot] + step[slot]) for slot in order]
        want = exact.step([(slot, *(x[part].float() for x in rows[slot])) for slot, part in zip(order, parts, strict=True)])
        got = card.step([(slot, *(x[part].cuda() for x in rows[slot])) for slot, part in zip(order, parts, strict=True)])
        for a, b in zip(got, want, strict=True):
            assert (a.cpu().float() - b).abs().max() <= tolerance * b.abs().max()
        states = card.kept.states.cpu()[:3]
        assert (states - exact.kept.states).abs().max() <= tolerance * exact.kept.states.abs().max()


def on_card(layer, dtype: torch.dtype, drafts: int = 0) -> Run:
    moved = make_layer(layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim)
    for name in ("conv", "decay", "bias", "norm"):
        setattr(moved, name, getattr(layer, name).cuda())
    run = Run(moved, 4, in_triton, dtype, drafts)  # one more, of padded rows
    run.kept = LayerStates(*(None if x is None else x.cuda() for x in (run.kept.inputs, run.kept.states, run.kept.behind)))
    return run


@pytest.mark.parametrize("apart", [False, True])
def test_wrong_drafts_leave_nothing_behind(apart: bool) -> None:
    """As one sequence, and as captured steps have them, against the reference; a prompt follows, and more drafts."""
    torch.manual_seed(4)
    layer = make_layer(4, 8, 128, 128)
    rows, gates = (x.bfloat16() for x in random_rows(layer, 120))
    exact, card = Run(layer, 2, delta_rule_reference, drafts=3), on_card(layer, torch.bfloat16, drafts=3)
    for count, right in ((70, 70), (4, 2), (4, 1), (1, 1), (30, 30), (3, 3), (4, 4)):
        begin, verified = exact.lengths[1], count < 5
        part = slice(begin, begin + count)
        card.apart = apart and verified
        (want,) = exact.step([(1, rows[part].float(), gates[part].float())], verified=int(verified))
        (got,) = card.step([(1, rows[part].cuda(), gates[part].cuda())], verified=int(verified))
        assert (got.cpu().float() - want).abs().max() <= 4e-2 * want.abs().max()
        exact.lengths[1] = card.lengths[1] = begin + right
