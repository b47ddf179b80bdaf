"""The native step for arm64: cross-compiled, and run by an emulator. Its bits must be those of AVX2."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.native.load import INSTRUCTION_SETS
from native_harness import libraries

TREE = Path(__file__).parents[1]
SOURCES = TREE / "src/headrace/csrc/cpu"
PARTS = ("matrix", "pack", "quantize", "rows")  # that the program itself needs
PROGRAM = [Path(__file__).parent / "native/check_library.cpp", *(SOURCES / f"{name}.cpp" for name in PARTS)]
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-I", str(SOURCES)]  # as CMakeLists.txt: bits must not depend on the compiler
EMULATOR = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", "-cpu"]
TOOLS = ("g++", "aarch64-linux-gnu-g++", "qemu-aarch64-static", "cmake")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.skipif("avx2" not in libraries(), reason="no AVX2 library to compare with"),
]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the libraries, and the program that checks one of them, for arm64."""
    folder = tmp_path_factory.mktemp("arm64")
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"]
    run("cmake", "-S", TREE, "-B", folder, "-DHEADRACE_LIBRARIES_ONLY=ON", "-DSKBUILD_STATE=wheel", *target)
    assert "warning" not in run("cmake", "--build", folder, "--parallel", "2")
    run("aarch64-linux-gnu-g++", *FLAGS, "-march=armv8.2-a+dotprod+fp16", *PROGRAM, "-o", folder / "check", "-ldl", "-pthread")
    return folder


@pytest.fixture(scope="module")
def avx2_outputs(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the steps of the checking program give on AVX2."""
    folder = tmp_path_factory.mktemp("avx2")
    run("g++", *FLAGS, "-march=x86-64-v3", *PROGRAM, "-o", folder / "check", "-ldl", "-pthread")
    run(folder / "check", libraries()["avx2"], folder / "outputs")
    return (folder / "outputs").read_bytes()


@pytest.mark.parametrize("instruction_set", ["neon", "i8mm"])
def test_products_are_the_plain_tiles_and_a_step_is_avx2_bit_for_bit(instruction_set: str, built: Path, avx2_outputs: bytes) -> None:
    outputs = built / f"outputs-{instruction_set}"
    run(*EMULATOR, "max", built / "check", built / f"libstep-{instruction_set}.so", outputs)
    assert len(avx2_outputs) > 100_000
    assert outputs.read_bytes() == avx2_outputs


@pytest.mark.parametrize(("cpu", "fitting"), [("max", {"neon", "i8mm"}), ("neoverse-n1", {"neon"}), ("cortex-a72", set())])
def test_linux_says_which_libraries_the_cpu_can_run(cpu: str, fitting: set[str], built: Path) -> None:
    features = set(run(*EMULATOR, cpu, built / "check").split())
    assert {name for name in ("neon", "i8mm") if features >= INSTRUCTION_SETS[name]} == fitting
