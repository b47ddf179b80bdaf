"""Linears in the form that the CPU runs them in, and the decoder below float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import weight_plan
from headrace.model.linear import Linear, MatrixLinear, make_linear
from headrace.model.vocabulary import embed
from headrace.model.weight import Weight, dequantized, pack_int4, smallest, smallest_exact
from model_harness import Sequences, load_tiny
from test_model_families import tokens
from tiny_models import write_tiny


def test_embed() -> None:
    table = torch.randn(50, 72)
    ids = torch.tensor([3, 49, 0, -1, 50, 2**31 - 1], dtype=torch.int32)
    got = embed(ids, table, 2.5)
    assert torch.equal(got[:3], table[ids[:3].long()] * 2.5)
    assert torch.equal(got[3:], table[[0, 49, 49]] * 2.5), "ids outside of the table read none but its rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 96), (33, 17), (16400, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_product(dtype, shape, with_bias):
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    exact_weight = weight.double()
    exact_bias = 0 if bias is None else bias.double()
    linear = make_linear(Weight(weight), bias)
    for rows in (1, 2, 7, 130):
        x = torch.randn(rows, shape[1]).to(dtype)
        exact = x.double() @ exact_weight.T + exact_bias
        got = linear(x)
        assert got.dtype == dtype
        summands = x.double().abs() @ exact_weight.abs().T + (0 if bias is None else bias.double().abs())
        assert ((got - exact).abs() <= 4 * torch.finfo(dtype).eps * summands).all()


@pytest.mark.parametrize("kind", [MatrixLinear, lambda weight: make_linear(Weight(weight))])
def test_parts_of_a_matrix_add_up(kind):
    """Columns split over two, each with half of the input: the sum of their partial products, and nothing is added twice."""
    weight, x, total = torch.randn(40, 24), torch.randn(5, 24), torch.randn(5, 40)
    halves: list[Linear] = []

    def reduce(partial: torch.Tensor) -> torch.Tensor:
        return partial + halves[1].product(x[:, 16:])

    halves += [make_linear(Weight(weight[:, :16].contiguous()), None, reduce), kind(weight[:, 16:].contiguous())]
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(halves[0](x[:, :16]).double(), exact, rtol=1e-5, atol=1e-5)
    whole = kind(weight)
    for linear, given in ((whole, x), (halves[0], x[:, :16])):
        added = total.clone()
        linear.add_to(added, given)
        torch.testing.assert_close(added.double(), total.double() + exact, rtol=1e-5, atol=1e-5)
    assert not halves[0].fuses_add, "a sum that is still to be reduced must not be formed in the residual"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "group", "rows", "zeros"), [("int4", 32, 1, True), ("int4", 128, 1, False), ("fp4", 16, 1, False), ("int8", 0, 1, False), ("int8", 16, 1, True), ("fp8", 128, 128, False)])
def test_narrow_weights_on_a_cpu_are_their_formula(kind, group, rows, zeros, dtype):
    torch.manual_seed(0)
    num_rows, columns = 200, 256
    groups = columns // group if group else 1
    if kind in ("int4", "fp4"):
        integers = torch.randint(0, 16, (num_rows, columns))
        data = pack_int4(integers)
        assert all(data[3, 64 + j] == integers[3, 128 + j] | integers[3, 192 + j] << 4 for j in range(64))
        table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        values = torch.tensor([*table, *(-v for v in table)])[integers] if kind == "fp4" else integers - (0.0 if zeros else 8.0)
    else:
        data = torch.randint(-128, 128, (num_rows, columns)).to(torch.int8) if kind == "int8" else torch.randn(num_rows, columns).to(torch.float8_e4m3fn)
        values = data.float()
    scales = torch.rand(-(-num_rows // rows), groups) + 0.5
    minus = torch.randint(0, 16, scales.shape).float() if zeros else torch.zeros_like(scales)
    weight = Weight(data, smallest_exact(scales), smallest_exact(minus) if zeros else None, kind, group, rows)
    expected = torch.empty(num_rows, columns)
    for i in range(num_rows):
        for j in range(0, columns, group or columns):
            at = (i // rows, j // group if group else 0)
            run = slice(j, j + (group or columns))
            expected[i, run] = (values[i, run] - minus[at]) * scales[at]
    assert weight.shape == (num_rows, columns) and weight.scales.dtype == torch.float32
    assert dequantized(weight, torch.float32).equal(expected)
    x, bias = torch.randn(3, columns).to(dtype), torch.randn(num_rows).to(dtype)
    assert make_linear(weight, bias)(x).equal(F.linear(x.float(), expected, bias.float()).to(dtype))


def test_scales_are_kept_in_the_smallest_float_that_holds_them():
    for values, dtype in (([1.5, 0.0], torch.float16), ([1e-20, 1.0], torch.float32), ([2.0**100, -(2.0**-100)], torch.bfloat16)):
        kept = smallest_exact(torch.tensor(values))
        assert kept.dtype == dtype and kept.float().tolist() == torch.tensor(values).tolist()


def test_small_whole_zeros_of_int4_are_kept_in_bytes():
    data, scales = torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1)
    for kind, zeros, dtype in (("int4", [0.0, 127.0], torch.uint8), ("int4", [-1.0, 8.0], torch.float16), ("int4", [7.5, 8.0], torch.float16),
                               ("int4", [128.0, 0.0], torch.float16), ("int8", [0.0, 8.0], torch.float16)):  # fmt: skip
        weight = Weight(data, scales, torch.tensor(zeros)[:, None], kind, 128)
        kept = smallest(weight)
        assert kept.zeros.dtype == dtype and dequantized(kept, torch.float32).equal(dequantized(weight, torch.float32))


def test_a_kind_without_a_product_is_named():
    with pytest.raises(ValueError, match="int3"):
        make_linear(Weight(torch.zeros(2, 2), torch.ones(2), kind="int3"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "phi3", "gemma2", "gemma3"])
def test_half_precision_follows_float32(family, dtype, tmp_path):
    config, weights = load_tiny(write_tiny(family, tmp_path))
    targets = {spec.target for spec in weight_plan(config)}
    tensors = {"embedding": weights.embedding, "final_norm": weights.final_norm, "lm_head": weights.lm_head.data}
    for index, layer in enumerate(weights.layers):
        named = {t: getattr(layer, t.split(".")[2]) for t in targets if t.startswith(f"layers.{index}.")}
        tensors |= {t: w.data if isinstance(w, Weight) else w for t, w in named.items()}
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    ids = tokens(25)

    def logits(of: dict[str, torch.Tensor]) -> torch.Tensor:
        run = Sequences(config, DecoderWeights.from_tensors(of, config), max_len=32)
        return torch.cat([run.step([(0, ids[:20])])[0], *(run.step([(0, [token])])[0] for token in ids[20:])])

    exact = logits({name: tensor.float() for name, tensor in rounded.items()})
    got = logits(rounded)
    assert got.dtype == torch.float32
    scale = exact.std()
    assert (got - exact).std() <= (0.06 if dtype == torch.bfloat16 else 0.01) * scale


def test_halves_of_a_sum_add_up_where_they_fit():
    weight, x = torch.randn(640, 512).bfloat16(), torch.randn(100, 512).bfloat16()
    linear = MatrixLinear(weight)
    halves = linear.halves(100)
    assert halves is not None and halves(x).shape == (2, 100, 640)
    exact = x.double() @ weight.double().T
    assert (halves(x).double().sum(0) - exact).norm() <= 0.004 * exact.norm()
    assert linear.halves(64) is None and linear.halves(513) is None and linear.halves(512) is not None
    assert MatrixLinear(torch.empty(5120, 512, dtype=torch.bfloat16)).halves(129) is None, "80 tiles, twice"
    long = MatrixLinear(torch.empty(4096, 8448, dtype=torch.bfloat16))
    assert [rows for rows in (256, 257, 512, 513, 576, 577) if long.halves(rows)] == [256, 513, 576]
    assert MatrixLinear(weight.float()).halves(100) is None and MatrixLinear(weight[:, :500]).halves(100) is None
    assert make_linear(Weight(weight)).halves(100) is None, "on a CPU"
    part = MatrixLinear(weight, lambda y: y + 1)
    assert part.halves(100) is not None and not part.fuses_add and torch.equal(part(x), linear(x) + 1)
