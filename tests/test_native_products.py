"""The products of the native CPU step against float64, on every instruction set that this CPU has.

What the raw rows mean is decided by `headrace.model.formats.blocks` and, as a second judge, by the `gguf` package. A row's
result must be the same bits beside any other rows, and for all but bfloat16 products on every instruction set."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.formats import blocks
from native_harness import BF16_PRODUCTS, libraries

_step = pytest.importorskip("headrace.native._step", reason="no compiler: the native step was not built")

LIBRARIES = {name: str(path) for name, path in libraries().items()}
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q4_Z", "F8")
FLOATS = FORMATS[:3]
OWN = {"Q4_Z": 20, "F8": 36}  # bytes of a block of 32 that no GGUF file has
ROUNDINGS = ("FLOAT", "INT16", "INT8")
TOP = {"INT16": 32512.0, "INT8": 127.0}

each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
formats = pytest.mark.parametrize("name", FORMATS)
roundings = pytest.mark.parametrize("rounding", ROUNDINGS)


def raw_rows(name: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Bytes [rows, row bytes] of random rows, with scales that a real file may have."""
    rng = np.random.default_rng(seed)
    if name in FLOATS:
        values = torch.from_numpy(rng.standard_normal((rows, inputs)).astype(np.float32) / 8)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return values.to(dtype).view(torch.uint8).numpy()
    elements, size = (32, OWN[name]) if name in OWN else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = rng.integers(0, 256, (rows, inputs // elements, size), dtype=np.uint8)
    if name == "F8":
        raw[raw & 0x7F == 0x7F] = 0  # no NaN
        scales = (rng.standard_normal((rows, inputs // elements)) / 500).astype(np.float32)
        raw[..., :4] = scales.view(np.uint8).reshape(rows, -1, 4)
        return raw.reshape(rows, -1)
    if name == "Q4_Z":
        addends = -rng.integers(0, 17, (rows, inputs // elements)).astype(np.float16)
        raw[..., 2:4] = addends.view(np.uint8).reshape(rows, -1, 2)
    for at in {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q6_K": [208], "Q4_Z": [0]}.get(name, [0, 2]):
        halves = (rng.standard_normal((rows, inputs // elements)) / 500).astype(np.float16)
        raw[..., at : at + 2] = halves.view(np.uint8).reshape(rows, -1, 2)
    return raw.reshape(rows, -1)


def decoded(name: str, raw: np.ndarray) -> torch.Tensor:
    """[rows, inputs] float32."""
    if name in OWN:
        blocks_of = torch.from_numpy(raw.copy()).view(len(raw), -1, OWN[name])
        if name == "F8":
            values = blocks_of[..., 4:].view(torch.float8_e4m3fn).float() * blocks_of[..., :4].contiguous().view(torch.float32)
        else:
            scale, addend = (blocks_of[..., at : at + 2].contiguous().view(torch.float16).float() for at in (0, 2))
            values = torch.cat([blocks_of[..., 4:] & 15, blocks_of[..., 4:] >> 4], 2) * scale + addend * scale
        return values.flatten(1)
    with np.errstate(all="ignore"):
        return blocks._DECODERS[name](torch.from_numpy(raw.copy()).reshape(-1)).float().view(raw.shape[0], -1)


def product(library: str, parts: list[tuple[str, np.ndarray]], rounding: str, x: np.ndarray) -> np.ndarray:
    """x [rows, inputs] times the raw rows of all parts: [rows, outputs] float32."""
    out = np.full((x.shape[0], sum(raw.shape[0] for _, raw in parts)), np.nan, dtype=np.float32)
    _step.product(
        library,
        [(_step.Format.__members__[name], raw.shape[0]) for name, raw in parts],
        np.concatenate([raw.reshape(-1) for _, raw in parts]),
        _step.Rounding.__members__[rounding],
        np.ascontiguousarray(x, dtype=np.float32),
        out,
    )
    return out


def inputs_of(rows: int, inputs: int, seed: int = 1) -> np.ndarray:
    """Rows like those of a model: of very different sizes, with outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)) * np.exp(rng.standard_normal((rows, 1)) * 3)
    return (x * np.where(rng.random((rows, inputs)) < 0.01, 30, 1)).astype(np.float32)


def error_bound(name: str, rounding: str, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What rounding x in groups of 32, and float32 sums, may cost each output: [rows, outputs]."""
    size = np.abs(x.astype(np.float64)) @ np.abs(weights.T.astype(np.float64))
    if name == "BF16":  # rounded to bfloat16 where the CPU has products of them
        return size * 2**-8 + 1e-30
    width = x.shape[1]
    bound = size * 2**-24 * (width + 8)
    if name in FLOATS or name == "F8" or rounding == "FLOAT":
        return bound + 1e-30
    padded = np.zeros((x.shape[0], (width + 31) // 32 * 32))
    padded[:, :width] = np.abs(x)
    step = np.repeat(padded.reshape(x.shape[0], padded.shape[1] // 32, 32).max(-1), 32, axis=-1)[:, :width] / TOP[rounding]
    largest = np.repeat(np.abs(weights).reshape(weights.shape[0], -1, 32).max(-1), 32, axis=-1)[:, :width]
    # Where a minimum takes away most of a product, its parts are larger than the weights: 16 times is more than enough.
    parts = 16 * (np.abs(x) @ largest.T.astype(np.float64)) * 2**-24 * (width / 32 + 8)
    return bound + step / 2 * 1.001 @ np.abs(weights.T.astype(np.float64)) + parts + 1e-30


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_some_library_runs_here() -> None:
    assert LIBRARIES


@formats
def test_decodes_packed_rows_to_the_bits_of_both_judges(name: str) -> None:
    raw = raw_rows(name, 21, 512)
    want = decoded(name, raw)
    if name not in FLOATS and name not in OWN:
        second = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
        assert same_bits(want.numpy(), second.astype(np.float32))
    for library in LIBRARIES.values():
        out = np.empty((21, 512), dtype=np.float32)
        _step.packed_rows(library, [(_step.Format.__members__[name], 21)], raw.reshape(-1), out)
        assert same_bits(out, want.numpy())


@each_library
@formats
@roundings
@pytest.mark.parametrize("rows", [1, 5, 12, 29])
def test_product_is_within_the_rounding(library: str, name: str, rounding: str, rows: int) -> None:
    raw = raw_rows(name, 83, 768)
    weights = decoded(name, raw).numpy()
    x = inputs_of(rows, 768)
    out = product(library, [(name, raw)], rounding, x)
    error = np.abs(out - x.astype(np.float64) @ weights.T.astype(np.float64))
    assert (error <= error_bound(name, rounding, x, weights)).all()


@each_library
@formats
@roundings
def test_rows_are_the_same_bits_beside_any_others(library: str, name: str, rounding: str) -> None:
    parts = [(name, raw_rows(name, 133, 512))]
    x = inputs_of(40, 512)
    alone = np.concatenate([product(library, parts, rounding, x[i : i + 1]) for i in range(40)])
    for rows in range(2, 41):
        assert same_bits(product(library, parts, rounding, x[:rows]), alone[:rows]), rows


@formats
@roundings
def test_instruction_sets_give_the_same_bits(name: str, rounding: str) -> None:
    parts = [(name, raw_rows(name, 61, 768))]
    results = {
        label: product(library, parts, rounding, inputs_of(17, 768))
        for label, library in LIBRARIES.items()
        if name != "BF16" or label not in BF16_PRODUCTS
    }
    first = next(iter(results.values()))
    assert all(same_bits(first, other) for other in results.values())


@each_library
@pytest.mark.parametrize("rows", [1, 7])
def test_fp8_is_the_float32_product_to_the_bit(library: str, rows: int) -> None:
    raw, x = raw_rows("F8", 83, 768), inputs_of(rows, 768)
    floats = decoded("F8", raw).contiguous().view(torch.uint8).numpy()
    assert same_bits(product(library, [("F8", raw)], "INT16", x), product(library, [("F32", floats)], "INT16", x))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[str, np.ndarray]], str, np.ndarray]:
    """Parts of any formats and sizes, inputs of a common multiple of their blocks."""
    names = draw(st.lists(st.sampled_from(FORMATS), min_size=1, max_size=4))
    step = max(1 if n in FLOATS else 256 if n.endswith("K") else 32 for n in names)
    inputs = step * draw(st.integers(1, 150 if step == 1 else 5 if step == 32 else 2))
    rows = [draw(st.integers(1, 90)) for _ in names]
    seed = draw(st.integers(0, 1000))
    parts = [(n, raw_rows(n, r, inputs, seed + i)) for i, (n, r) in enumerate(zip(names, rows, strict=True))]
    return parts, draw(st.sampled_from(ROUNDINGS)), inputs_of(draw(st.integers(0, 30)), inputs, seed)


@given(cases())
def test_any_sizes_and_mixed_formats(case: tuple[list[tuple[str, np.ndarray]], str, np.ndarray]) -> None:
    parts, rounding, x = case
    for library in LIBRARIES.values():
        out = product(library, parts, rounding, x)
        first = 0
        for name, raw in parts:
            weights = decoded(name, raw).numpy()[:, : x.shape[1]]
            part = out[:, first : first + raw.shape[0]]
            error = np.abs(part - x.astype(np.float64) @ weights.T.astype(np.float64))
            if x.shape[1] % 32 == 0:
                assert (error <= error_bound(name, rounding, x, weights)).all()
            else:
                assert (error <= error_bound(name, "FLOAT", x, weights)).all()
            assert same_bits(part, product(library, [(name, raw)], rounding, x))
            first += raw.shape[0]


@each_library
@formats
@roundings
def test_zero_tiny_huge_and_broken_inputs_stay_in_their_row(library: str, name: str, rounding: str) -> None:
    parts = [(name, raw_rows(name, 20, 256))]
    x = inputs_of(9, 256)
    alone = product(library, parts, rounding, x)
    x[0] = 0
    x[2] = 1e-42
    x[4, 7] = np.nan
    x[6, 200] = np.inf
    x[8] *= 1e30 / np.abs(x[8]).max()
    out = product(library, parts, rounding, x)
    assert same_bits(out[1::2], alone[1::2])
    assert (out[0] == 0).all()
    assert (np.abs(out[2]) < 1e-38).all()
    assert not np.isfinite(out[[4, 6]]).any()
    assert np.isfinite(out[8]).all()


@pytest.mark.parametrize("name", FORMATS[3:])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_any_bytes_of_a_file_are_survived_and_give_the_same_bits(name: str, rounding: str) -> None:
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, raw_rows(name, 40, 512).shape, dtype=np.uint8)  # scales of inf and NaN among them
    results = [product(library, [(name, raw)], rounding, inputs_of(5, 512)) for library in LIBRARIES.values()]
    finite = np.isfinite(results[0])
    for other in results:
        assert np.array_equal(np.isfinite(other), finite)
        assert same_bits(other[finite], results[0][finite])


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", ["Q8_0", "Q4_1"])
def test_quantizes_floats_as_ggml_does(source: str, target: str) -> None:
    raw = raw_rows(source, 16, 512)
    values = decoded(source, raw).numpy()
    library = next(iter(LIBRARIES.values()))
    members = _step.Format.__members__
    out = np.zeros(16 * _step.raw_row_bytes(members[target], 512), dtype=np.uint8)
    _step.quantize_rows(library, members[source], raw.reshape(-1), 512, members[target], out)
    ours = decoded(target, out.reshape(16, -1)).numpy()
    theirs = gguf.quants.dequantize(
        gguf.quants.quantize(values, gguf.GGMLQuantizationType[target]), gguf.GGMLQuantizationType[target]
    )
    groups = values.reshape(-1, 32)
    steps = np.abs(groups).max(-1) / 127 if target == "Q8_0" else (groups.max(-1) - groups.min(-1)) / 15
    error = np.abs(ours - values).reshape(-1, 32).max(-1)
    assert (error <= steps * 0.55 + 1e-6).all()
    assert np.square(ours - values).sum() <= np.square(theirs - values).sum() * 1.001


@pytest.mark.parametrize("target", ["Q8_0", "Q4_1"])
def test_quantizes_zeros_and_an_unfinished_group(target: str) -> None:
    members = _step.Format.__members__
    values = np.zeros((3, 40), dtype=np.float32)
    values[1] = np.linspace(-1, 2, 40)
    out = np.zeros(3 * _step.raw_row_bytes(members[target], 40), dtype=np.uint8)
    _step.quantize_rows(next(iter(LIBRARIES.values())), members["F32"], values.view(np.uint8).reshape(-1), 40, members[target], out)
    got = decoded(target, out.reshape(3, -1)).numpy()[:, :40]
    assert (got[[0, 2]] == 0).all()
    assert np.abs(got[1] - values[1]).max() < (0.02 if target == "Q8_0" else 0.11)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("target", ["Q8_0", "Q4_1"])
def test_a_weight_that_is_no_number_breaks_its_group_and_is_not_made_a_number(target: str, value: float) -> None:
    members = _step.Format.__members__

    def quantized(values: np.ndarray) -> torch.Tensor:
        out = np.zeros(2 * _step.raw_row_bytes(members[target], 96), dtype=np.uint8)
        _step.quantize_rows(next(iter(LIBRARIES.values())), members["F32"], values.view(np.uint8).reshape(-1), 96, members[target], out)
        return decoded(target, out.reshape(2, -1)).view(6, 32)

    values = np.random.default_rng(3).standard_normal((2, 96)).astype(np.float32)
    whole = quantized(values)
    values[1, 40] = value
    broken = quantized(values)
    assert broken[4].isnan().all()
    assert torch.equal(broken[[0, 1, 2, 3, 5]], whole[[0, 1, 2, 3, 5]])


def test_refuses_what_cannot_be() -> None:
    library = next(iter(LIBRARIES.values()))
    members = _step.Format.__members__
    x = np.zeros((1, 32), dtype=np.float32)
    out = np.zeros((1, 4), dtype=np.float32)
    with pytest.raises(ValueError, match="256"):
        _step.product(library, [(members["Q4_K"], 4)], np.zeros(4 * 144, np.uint8), _step.Rounding.INT8, x, out)
    with pytest.raises(ValueError, match="bytes"):
        _step.product(library, [(members["Q8_0"], 4)], np.zeros(100, np.uint8), _step.Rounding.INT8, x, out)
    with pytest.raises(ValueError, match="quantized"):
        _step.quantize_rows(library, members["F32"], x.view(np.uint8).reshape(-1), 32, members["Q6_K"], np.zeros(210, np.uint8))
