"""The native CPU step's build and files: what there may be instead of them, and what a user is told then. Torch runs the model.

Broken installs are stand-ins: the real `load.py` in a package of its own with files that are missing, cut off or somebody else's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.config import EngineConfig
from headrace.engine import forwards
from headrace.engine.build import build_engine
from headrace.errors import ParameterError
from headrace.llm import LLM
from headrace.model.decoder import Decoder
from headrace.native import load
from headrace.native.load import BINDING, INSTRUCTION_SETS, STEP_ABI, NativeUnavailable, find_library
from headrace.sampling.params import SamplingParams
from tiny_models import write_tiny

try:
    from headrace.native import _step
except ImportError:  # no compiler: what needs a real library is left out
    _step = None

TREE = Path(__file__).parents[1]
SOURCES = TREE / "src/headrace/csrc/cpu"
SMALL = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 64, "num_kv_blocks": 8}
ZEN4 = sorted(INSTRUCTION_SETS["avx512bf16"])
EVERYTHING = SimpleNamespace(STEP_ABI=STEP_ABI, BINDING=BINDING, cpu_features=lambda: set().union(*INSTRUCTION_SETS.values()))
AGAIN = "install Headrace again, or run `make native`"

needs_library = pytest.mark.skipif(_step is None, reason="no compiler: the native step was not built")
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def real_library() -> Path:
    if _step is None:
        pytest.skip("no compiler: the native step was not built")
    return find_library().path


def cut(path: Path, to: Path, part: float) -> None:
    to.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


# ------------------------------------------------------------------------------------------------------- which one is chosen


def built(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / f"libstep-{name}.so").symlink_to(real_library())
    return folder


@pytest.mark.parametrize(("features", "chosen"), [
    (ZEN4, "avx512bf16"), ([f for f in ZEN4 if f != "avx512bf16"], "avx512"), (["avx2", "fma", "f16c", "bmi2", "sse4.2"], "avx2"),
    (["avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw"], "avx2"), (["avx2", "fma", "f16c", "bmi2", "avxvnni"], "avx2vnni"),
    ([*ZEN4, "avxvnni"], "avx512bf16"), ([*ZEN4, "avxvnni", "amxtile", "amxint8"], "avx512amx"),
    (["avxvnni", *(f for f in ZEN4 if f != "avx512vnni")], "avx2vnni"),
])  # fmt: skip
def test_the_best_instruction_set_of_the_cpu_is_chosen(tmp_path, features, chosen):
    folder = built(tmp_path, "avx2", "avx2vnni", "avx512", "avx512bf16", "avx512amx")
    assert find_library(features=features, folder=folder).instruction_set == chosen
    assert find_library("avx2", features=features, folder=folder).path == folder / "libstep-avx2.so"


@pytest.mark.parametrize(("names", "options", "why"), [
    ((), {}, "holds no library"),
    (("avx2",), {"features": ["sse2", "fma"]}, "this CPU lacks avx2, bmi2, f16c, which avx2 needs"),
    (("avx2", "avx512"), {"features": [f for f in ZEN4 if f != "avx512vnni"], "instruction_set": "avx512"}, "lacks avx512vnni"),
    (("avx2",), {"features": ZEN4, "instruction_set": "avx512"}, "no library for avx512; built are avx2"),
    (("avx2",), {"extension": SimpleNamespace(STEP_ABI=STEP_ABI + 1)}, f"another version .*interface {STEP_ABI + 1}.*{AGAIN}"),
    (("avx2",), {"extension": SimpleNamespace(STEP_ABI=STEP_ABI)}, f"another version .*interface None, wanted {BINDING}.*{AGAIN}"),
    (("avx2",), {"extension": SimpleNamespace()}, f"another version .*{AGAIN}"),
])  # fmt: skip
def test_why_there_is_no_library(tmp_path, names, options, why):
    """What the CPU lacks is said before a file is opened: these are empty."""
    for name in names:
        (tmp_path / f"libstep-{name}.so").touch()
    with pytest.raises(NativeUnavailable, match=why):
        find_library(folder=tmp_path, **{"extension": EVERYTHING, **options})


def test_the_cpu_is_asked_for_whatever_a_library_needs():
    text = (SOURCES / "cpu_features.h").read_text()
    asked = set(re.findall(r'add\("(\w+)"', text)) | set(re.findall(r'push_back\("(\w+)"\)', text))
    assert asked == set().union(*INSTRUCTION_SETS.values())
    assert all(name == question for name, question in re.findall(r'add\("(\w+)", __builtin_cpu_supports\("(\w+)"\)\)', text))


@needs_library
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists() or os.uname().machine != "x86_64", reason="x86-64 Linux says it there")
def test_the_cpu_has_what_linux_says_it_has():
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    there = {flag.replace("_", "") for flag in flags} & set().union(*INSTRUCTION_SETS.values())
    assert there - {"amxtile", "amxint8"} <= set(_step.cpu_features()) <= there  # a system may keep those to itself


COMPANIONS = {"avx", "bmi", "lzcnt", "movbe", "xsave"}  # of every CPU with AVX2, FMA and BMI2


@pytest.mark.skipif(shutil.which("g++") is None or os.uname().machine != "x86_64", reason="needs g++ for x86-64")
@pytest.mark.parametrize("name", [name for name in INSTRUCTION_SETS if name.startswith("avx")])
def test_no_library_is_compiled_for_more_than_the_cpu_is_asked_for(name):
    """Or it would die of an illegal instruction."""
    [flags] = re.findall(rf"set\(FLAGS_{name} (.+)\)", (TREE / "CMakeLists.txt").read_text())

    def macros(*flags: str) -> set[str]:
        command = ["g++", *flags, "-dM", "-E", "-x", "c++", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {word.lower().replace("_", "") for word in re.findall(r"#define __([A-Z]\w+?)__ 1$", said, re.MULTILINE)}

    added = macros(*flags.split()) - macros("-march=x86-64-v2")
    assert added - COMPANIONS == INSTRUCTION_SETS[name]


def test_python_and_c_agree_on_the_version():
    assert re.findall(r"STEP_ABI = (\d+);", (SOURCES / "model.h").read_text()) == [str(STEP_ABI)]
    assert re.findall(r'"BINDING"\) = (\d+);', (SOURCES / "bind.cpp").read_text()) == [str(BINDING)]


# ------------------------------------------------------------------------------------------------------------ broken files


@needs_library
@pytest.mark.parametrize(("make", "why"), [
    (lambda path: path.write_text("no library"), f"cannot be loaded .*libstep-avx2.so.*{AGAIN}"),
    (lambda path: path.touch(), f"cannot be loaded .*too short.*{AGAIN}"),
    (lambda path: path.mkdir(), f"cannot be read .*directory.*{AGAIN}"),
    (lambda path: path.symlink_to(_step.__file__), f"libstep-avx2.so is no library of it: {AGAIN}"),
    (lambda path: cut(real_library(), path, 0.5), r"libstep-avx2.so is cut off \(\d+ bytes of at least \d+\)"),
    (lambda path: cut(real_library(), path, 64 / real_library().stat().st_size + 1e-6), "is cut off"),
], ids=["text", "empty", "folder", "other library", "half", "header"])  # fmt: skip
def test_a_file_that_is_no_library_of_the_step(tmp_path, make, why):
    make(tmp_path / "libstep-avx2.so")
    with pytest.raises(NativeUnavailable, match=why):
        find_library(folder=tmp_path, extension=EVERYTHING)


def test_a_library_of_another_version_beside_the_right_extension(tmp_path, monkeypatch):
    folder = built(tmp_path, "avx2")
    monkeypatch.setattr(load, "STEP_ABI", STEP_ABI + 1)
    extension = SimpleNamespace(STEP_ABI=STEP_ABI + 1, BINDING=BINDING, cpu_features=EVERYTHING.cpu_features)
    why = rf"libstep-avx2.so was built for another version .*interface {STEP_ABI}, wanted {STEP_ABI + 1}.*{AGAIN}"
    with pytest.raises(NativeUnavailable, match=why):
        find_library(folder=folder, extension=extension)


@needs_library
def test_the_extension_refuses_what_is_no_library_too(tmp_path):
    """Should a file change after it was looked at."""
    config = _step.Config()
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
        setattr(config, name, 16)
    (tmp_path / "text.so").write_text("no library")
    for path, message in ((tmp_path / "none.so", "cannot open"), (tmp_path / "text.so", "text.so"), (_step.__file__, "no library of")):
        with pytest.raises(RuntimeError, match=message):
            _step.Model(str(path), config, [], [])


FIND = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from headrace.native.load import NativeUnavailable, find_library
for folder in sys.argv[2:]:
    try:
        print(find_library(folder=Path(folder)).path)
    except NativeUnavailable as error:
        print(error)
"""


def install(top: Path, extension: str = "", name: str = "_step.py") -> Path:
    """A package of the real load.py and an extension in Python; the folder of its libraries."""
    folder = top / "headrace/native"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    shutil.copy(load.__file__, folder)
    if extension:
        (folder / name).write_text(extension)
    return folder


def found(top: Path, *folders: Path) -> list[str]:
    """What find_library says of each folder, in a process of its own, which must not crash."""
    command = [sys.executable, "-I", "-S", "-c", FIND, top, *(folders or [top / "headrace/native"])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done.stdout.splitlines()


def test_no_cut_of_a_library_crashes(tmp_path):
    """The system's loader is killed by SIGBUS on most of these. At the last ones nothing is missing that it reads."""
    install(tmp_path, f"STEP_ABI, BINDING = {STEP_ABI}, {BINDING}\ndef cpu_features(): return {ZEN4}")
    parts = [0, 1e-5, 1e-4, 2e-4, 0.01, 0.3, 0.6, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1]
    for number, part in enumerate(parts):
        (tmp_path / str(number)).mkdir()
        cut(real_library(), tmp_path / f"{number}/libstep-avx2.so", part)
    said = found(tmp_path, *(tmp_path / str(number) for number in range(len(parts))))
    kinds = ["opened" if line.endswith(".so") else "cut off" if "is cut off" in line else line for line in said]
    assert "too short" in kinds[0] and kinds[-1] == "opened" and kinds.count("cut off") >= 6
    assert set(kinds[3:]) == {"cut off", "opened"}


@needs_library
def test_an_extension_that_is_missing_cut_off_or_of_another_python(tmp_path):
    own = Path(_step.__file__)
    cases: dict[str, tuple[Callable[[Path], object], str]] = {
        "missing": (lambda folder: None, r"not built when Headrace was installed, as without a C\+\+ compiler"),
        "python": (lambda folder: (folder / "_step.cpython-39-s390x.so").touch(), f"another Python's \\(_step.cpython-39-s390x.so\\): {AGAIN}"),
        "cut": (lambda folder: cut(own, folder / own.name, 0.4), f"{re.escape(own.name)} is cut off .*{AGAIN}"),
        "text": (lambda folder: (folder / own.name).write_text("no library"), f"cannot be loaded .*{AGAIN}"),
        "foreign": (lambda folder: shutil.copy(real_library(), folder / own.name), f"cannot be loaded .*PyInit__step.*{AGAIN}"),
        "whole": (lambda folder: shutil.copy(own, folder), f"native holds no library of it: {AGAIN}"),
    }  # fmt: skip
    for name, (make, why) in cases.items():
        make(install(tmp_path / name))
        [said] = found(tmp_path / name)
        assert re.search(why, said), f"{name}: {said}"


# ---------------------------------------------------------------------------------------------------- torch where it cannot


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_tiny("llama", tmp_path_factory.mktemp("tiny")))


BROKEN = {
    "no AVX2": ({"features": ["sse2"]}, lambda path: path.touch(), "this CPU lacks avx2, bmi2, f16c, fma, which avx2 needs"),
    "cut off": ({}, lambda path: cut(real_library(), path, 0.5), "is cut off"),
    "text": ({}, lambda path: path.write_text("no library"), "cannot be loaded"),
    "another version": ({"extension": SimpleNamespace(STEP_ABI=STEP_ABI - 1)}, lambda path: path.touch(), "built for another version"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_torch_runs_the_model_in_floats_and_one_warning_says_why(tiny, case, tmp_path, monkeypatch, caplog):
    options, make, why = BROKEN[case]
    make(tmp_path / "libstep-avx2.so")
    monkeypatch.setattr(forwards, "find_library", partial(find_library, folder=tmp_path, **{"extension": EVERYTHING, **options}))
    with caplog.at_level("WARNING"), LLM(tiny, **SMALL) as llm:
        decoder = llm.engine.core.runner.decoder
        assert isinstance(decoder, Decoder) and decoder.cache_dtype == torch.float32
        [out] = llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 2
    [line] = [record.message for record in caplog.records if "native CPU step" in record.message]
    assert re.fullmatch(f"the native CPU step does not run .*: .*{why}.*; torch does", line)
    with pytest.raises(ParameterError, match=f"quantization: got 'int8', allowed: none here: .*need the native CPU step, and .*{why}"):
        build_engine(EngineConfig(model=tiny, **SMALL, quantization="int8"))


def test_enforce_eager_looks_for_no_library_and_does_not_warn(tiny, monkeypatch, caplog):
    monkeypatch.setattr(forwards, "find_library", lambda: pytest.fail("it was looked for"))
    with caplog.at_level("INFO", "headrace.engine.forwards"):
        engine = build_engine(EngineConfig(model=tiny, **SMALL, enforce_eager=True))
    assert isinstance(engine.core.runner.decoder, Decoder)
    engine.close()
    [record] = [record for record in caplog.records if "native CPU step" in record.message]
    assert record.levelname == "INFO" and "enforce_eager asks for plain torch; torch does" in record.message


def test_more_threads_than_cores_are_refused(tiny):
    cores = len(os.sched_getaffinity(0))
    for eager in (False, True):
        with pytest.raises(ParameterError, match=f"threads: got {cores + 1}, allowed: at most {cores}"):
            build_engine(EngineConfig(model=tiny, **SMALL, threads=cores + 1, enforce_eager=eager))
    with pytest.raises(ParameterError, match=r"threads: got 0, allowed: an integer in \[1"):
        EngineConfig(threads=0)


# --------------------------------------------------------------------------------------------------------------- the builds


def configure(folder: Path, *options: str, **environment: str) -> tuple[int, str, list[str]]:
    """CMake's exit code and words, and the files that it would install, with their place. Nothing is compiled."""
    command = ["cmake", "-S", TREE, "-B", folder, *(f"-D{option}" for option in options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment})
    script = folder / "cmake_install.cmake"
    text = script.read_text() if script.exists() and done.returncode == 0 else ""
    files = re.findall(r'file\(INSTALL DESTINATION "\$\{CMAKE_INSTALL_PREFIX\}/(\S+)" TYPE \w+ FILES "\S+/(\S+)"\)', text)
    return done.returncode, done.stdout, [f"{place}/{name}" for place, name in files]


@needs_cmake
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_wheel_holds_the_libraries_that_are_looked_for(tmp_path):
    """Of both kinds of CPU; the compiler is taken at its name."""
    names = []
    for processor in ("x86_64", "aarch64"):
        code, said, files = configure(
            tmp_path / processor, "HEADRACE_LIBRARIES_ONLY=ON", "SKBUILD_STATE=wheel", "CMAKE_SYSTEM_NAME=Linux",
            f"CMAKE_SYSTEM_PROCESSOR={processor}", "CMAKE_CXX_COMPILER=g++", "CMAKE_CXX_COMPILER_FORCED=ON", "CMAKE_HAVE_LIBC_PTHREAD=ON",
        )  # fmt: skip
        assert code == 0, said
        names += files
    folder = Path(load.__file__).parent
    assert names == [f"headrace/native/{load._path(folder, name).name}" for name in INSTRUCTION_SETS]


@needs_cmake
def test_a_build_without_a_compiler_fails_and_the_second_attempt_is_python_alone(tmp_path):
    """scikit-build-core makes the second attempt with what pyproject.toml overrides."""
    nothing = {"CXX": str(tmp_path / "no-compiler")}
    code, said, files = configure(tmp_path / "first", "SKBUILD_STATE=wheel", **nothing)
    assert code and "no-compiler" in said and not files
    code, said, files = configure(tmp_path / "cpu", "CMAKE_SYSTEM_NAME=Linux", "CMAKE_SYSTEM_PROCESSOR=riscv64", "CMAKE_CXX_COMPILER_FORCED=ON")
    assert code and re.search(r"knows x86-64\s+and\s+arm64,\s+not\s+riscv64", said)
    [override] = [o for o in settings()["overrides"] if o["if"] == {"failed": True}]
    define = [f"{name}={'ON' if value else 'OFF'}" for name, value in override["cmake"]["define"].items()]
    assert define == ["HEADRACE_PURE=ON"]
    assert configure(tmp_path / "second", *define, "SKBUILD_STATE=wheel", **nothing)[::2] == (0, [])
    assert configure(tmp_path / "third", *define, "SKBUILD_STATE=editable", **nothing)[::2] == (0, ["./headrace.pth"])
    assert (tmp_path / "third/headrace.pth").read_text() == f"{TREE}/src\n"
    assert override["wheel"] == {"py-api": "py3", "platlib": False}  # it runs anywhere
    assert "WITHOUT its native CPU step" in override["messages"]["after-success"] and "torch runs" in override["messages"]["after-success"]


def settings() -> dict:
    return tomllib.loads((TREE / "pyproject.toml").read_text())["tool"]["scikit-build"]


class Yard:
    """The Makefile beside nothing, with no tools but those that are put there; stand-ins write down how they were called."""

    def __init__(self, top: Path) -> None:
        self.top, self.tools, self.calls = top, top / "tools", top / "calls"
        self.tools.mkdir()
        for name in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
            shutil.copy(TREE / name, top)
        for name in ("sh", "mkdir", "touch", "cat"):
            (self.tools / name).symlink_to(str(shutil.which(name)))
        (top / ".venv/bin").mkdir(parents=True)
        for name in ("python", "pip"):
            self.put(f"../.venv/bin/{name}")

    def put(self, name: str, then: str = "exit 0") -> None:
        tool = self.tools / name
        tool.write_text(f'#!/bin/sh\necho "{Path(name).name} $*" >>{self.calls}\n{then}\n')
        tool.chmod(0o755)

    def make(self, *what: str) -> tuple[int, str]:
        self.calls.write_text("")
        command = [str(shutil.which("make")), *what]
        done = subprocess.run(command, cwd=self.top, env={"PATH": str(self.tools)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout


@needs_make
def test_make_without_a_compiler_says_so_and_goes_on_and_builds_once_there_is_one(tmp_path):
    yard = Yard(tmp_path)
    code, said = yard.make(".venv/.run")
    assert code == 0 and "No C++ compiler (c++, g++, clang++)" in said and "models run through torch" in said
    calls = yard.calls.read_text()
    assert "cmake -" not in calls and "nanobind" not in calls
    assert "python -m pip install -q -e . -C cmake.define.HEADRACE_PURE=ON" in calls
    assert yard.make("native") == (0, "make: Nothing to be done for 'native'.\n")
    yard.put("clang++")
    yard.put("cmake", "echo boom; exit 3")
    yard.put("ninja")
    code, said = yard.make("native")
    assert code and "boom" in said  # where a compiler is, a build that fails is an error
    assert yard.make("native")[0]
    yard.put("cmake")
    assert yard.make("native")[0] == 0
    configured, compiled = yard.calls.read_text().splitlines()
    assert configured.startswith("cmake -S . -B build/native ") and compiled == "cmake --build build/native"
    assert yard.make("native") == (0, "make: Nothing to be done for 'native'.\n")
