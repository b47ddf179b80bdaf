"""AMX in the native CPU step, on any machine: its tiles with the registers in software, and what is done where they are wrong."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.native import self_check
from headrace.native.load import INSTRUCTION_SETS, Library
from headrace.native.self_check import AMX, FEW, FORMATS, OTHERWISE, checked
from native_harness import libraries

_step = pytest.importorskip("headrace.native._step", reason="no compiler: the native step was not built")

SOURCES = Path(__file__).parents[1] / "src/headrace/csrc/cpu"
SOFTWARE = Path(__file__).parent / "native"

needs_avx512 = pytest.mark.skipif("avx512" not in libraries() or shutil.which("g++") is None, reason="needs AVX-512 and g++")


@needs_avx512
def test_the_tiles_give_the_bits_of_the_plain_ones(tmp_path):
    """All formats, a panel of 16 rows and one that is not full; the registers end the program where AMX would fault."""
    program = tmp_path / "amx_tiles"
    flags = ["-std=c++20", "-O1", "-march=x86-64-v4", "-mavx512vnni", "-ffp-contract=off", "-w", f"-I{SOURCES}", f"-I{SOFTWARE}"]
    subprocess.run(["g++", *flags, SOFTWARE / "amx_tiles.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def with_product(product) -> Library:
    """A library of AMX on another one, whose products are changed: product(what is right, format)."""

    def changed(path, parts, raw, rounding, x, out):
        _step.product(path, parts, raw, rounding, x, out)
        product(out, parts[0][0].name)

    kept = {name: getattr(_step, name) for name in ("Format", "Rounding", "raw_row_bytes")}
    return Library(SimpleNamespace(**kept, product=changed), AMX, libraries()["avx512"])


@needs_avx512
def test_amx_is_used_where_its_products_are_right():
    library = with_product(lambda out, name: None)
    assert checked(library) is library


@needs_avx512
@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_bit_in_one_row_of_one_format_and_the_step_goes_without_amx(name, monkeypatch, caplog):
    def product(out: np.ndarray, of: str) -> None:
        if of == name and len(out) > FEW:
            out.view(np.uint32)[-1] ^= 1

    other = Library(_step, OTHERWISE, Path())
    monkeypatch.setattr(self_check, "find_library", {OTHERWISE: other}.get)
    with caplog.at_level("WARNING"):
        assert checked(with_product(product)) is other
    [line] = caplog.messages
    assert "goes without AMX" in line and line.endswith(f": {name}")


def test_what_the_step_falls_back_to_runs_wherever_amx_is():
    assert INSTRUCTION_SETS[OTHERWISE] < INSTRUCTION_SETS[AMX]
    library = Library(_step, OTHERWISE, Path())
    assert checked(library) is library
