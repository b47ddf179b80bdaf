"""Gate and up with their activation by warps with roles: the kernel's own text, without a card
(gluon_roles.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import gluon_interpreter
from gluon_roles import Roles
from headrace.kernels import gated_roles
from headrace.kernels.activation import Activation, act
from headrace.kernels.gated_product import groups_for, rows_of_forms


def tiles(base: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> SimpleNamespace:
    return SimpleNamespace(base=base, shape=shape, strides=strides, block_shape=box, layout=None, dtype=base.dtype)


@pytest.mark.parametrize("rows, inner, width, groups, block_m, programs", [
    (20, 72, 320, 2, 16, 1), (37, 200, 384, 3, 16, 2), (10, 96, 512, 3, 16, 1), (70, 64, 448, 2, 8, 3),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_products(rows: int, inner: int, width: int, groups: int, block_m: int, programs: int, kind: Activation) -> None:
    torch.manual_seed(rows)
    x, w = torch.randn(rows, width).bfloat16(), (torch.randn(2 * inner, width) * width**-0.5).bfloat16()
    out = torch.full((rows, inner), 7.0, dtype=torch.bfloat16)
    gluon_interpreter.run(gated_roles.__file__, "_gated_roles", (programs,), {
        "x_desc": tiles(x, [rows, width], [width, 1], [block_m, 64]),
        "w_desc": tiles(w, [inner // 8, 2, 8, width], [8 * width, inner * width, width, 1], [4, 2, 8, 64]),
        "out_desc": tiles(out, [rows, inner], [inner, 1], [block_m // 2, 32]),
        "tiles_m": -(-rows // block_m), "tiles_n": -(-inner // (32 * groups)), "steps": width // 64, "GROUPS": groups,
        "BLOCK_M": block_m, "STAGES": 4, "BAND": 2, "KIND": kind, "PDL": True,
    }, **Roles(rows).stand_ins(programs))  # fmt: skip
    gate, up = (x.float() @ w.float().T).chunk(2, -1)
    assert torch.allclose(out.float(), act(gate, kind) * up, rtol=2e-2, atol=2e-2)


def test_where_it_is_taken() -> None:
    """Where its tiles fill a card's last wave, or the activation that it saves is worth more than what is left empty."""
    taken = {rows: groups_for(rows, 12288, 4096, 132) for rows in (72, 256, 512, 576, 1024, 8192)}
    assert taken == {72: 0, 256: 0, 512: 3, 576: 0, 1024: 3, 8192: 3}
    assert [groups_for(1024, inner, width, 132) for inner, width in ((14336, 4096), (8192, 2048), (3072, 1024))] == [0, 2, 3]
    assert groups_for(512, 12288, 4096, 114) == 0
    assert {groups_for(rows, 8192, 2048, 132) for rows in rows_of_forms(8192, 2048, 8192, 132)} == {2, 3}
    least = rows_of_forms(9216, 5120, 16384, 132)
    assert len(least) == 1 and least[0] <= 8192, "more rows are taken apart (mlp.py), and the parts may not take it"
