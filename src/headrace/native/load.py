"""Finds the extension and the library for this CPU's instruction set. Where there is none, it is said why."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

STEP_ABI = 3  # of csrc/cpu/model.h: an extension that says otherwise was built from another version's sources
BINDING = 2  # of csrc/cpu/bind.cpp: what is called here of the extension

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni"}
_NEON = frozenset({"fp16", "dotprod"})
# Instruction set, as its library is named -> what the CPU must offer. Later ones are faster.
INSTRUCTION_SETS: Mapping[str, frozenset[str]] = MappingProxyType({
    "avx2": _AVX2,
    "avx2vnni": _AVX2 | {"avxvnni"},
    "avx512": _AVX512,
    "avx512bf16": _AVX512 | {"avx512bf16"},
    "avx512amx": _AVX512 | {"avx512bf16", "amxtile", "amxint8"},
    "neon": _NEON,
    "i8mm": _NEON | {"i8mm", "bf16"},
})  # fmt: skip


_AGAIN = "install Headrace again, or run `make native` in its tree"


class NativeUnavailable(Exception):
    """There is no native step here; the message says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Library:
    """What computes: `extension` is headrace.native._step, which opens the library at `path`."""

    extension: ModuleType
    instruction_set: str
    path: Path


def find_library(
    instruction_set: str | None = None, features: Collection[str] | None = None, folder: Path | None = None,
    extension: ModuleType | None = None,
) -> Library:  # fmt: skip
    """The library of the best instruction set that the CPU has, or of a named one.

    Raises NativeUnavailable. `features`, `folder` and `extension` stand for what this CPU says and what was built, for tests.
    """
    extension = extension or _extension()
    for version, own in (("STEP_ABI", STEP_ABI), ("BINDING", BINDING)):
        if (theirs := getattr(extension, version, None)) != own:
            raise NativeUnavailable(
                f"its extension was built for another version of Headrace (interface {theirs}, wanted {own}): {_AGAIN}"
            )
    features = frozenset(extension.cpu_features() if features is None else features)
    folder = folder or Path(__file__).parent
    built = [name for name in INSTRUCTION_SETS if _path(folder, name).exists()]
    if not built:
        raise NativeUnavailable(f"{folder} holds no library of it: {_AGAIN}")
    fitting = [name for name in built if features >= INSTRUCTION_SETS[name]]
    if instruction_set is not None:
        fitting = [name for name in fitting if name == instruction_set]
    if not fitting:
        wanted = instruction_set or min(built, key=lambda name: len(INSTRUCTION_SETS[name]))
        if wanted not in built:
            raise NativeUnavailable(f"there is no library for {wanted}; built are {', '.join(built)}")
        missing = ", ".join(sorted(INSTRUCTION_SETS[wanted] - features))
        raise NativeUnavailable(f"this CPU lacks {missing}, which {wanted} needs")
    path = _path(folder, fitting[-1])
    _check_library(path)
    return Library(extension, fitting[-1], path)


def _path(folder: Path, instruction_set: str) -> Path:
    return folder / f"libstep-{instruction_set}.so"


def _extension() -> ModuleType:
    """headrace.native._step, imported. Raises NativeUnavailable."""
    name = "headrace.native._step"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        others = sorted(path.name for path in Path(__file__).parent.glob("_step.*"))
        if others:
            raise NativeUnavailable(f"its extension is another Python's ({', '.join(others)}): {_AGAIN}")
        raise NativeUnavailable("it was not built when Headrace was installed, as without a C++ compiler")
    _check_whole(Path(spec.origin))
    try:
        return importlib.import_module(name)
    except ImportError as error:  # of another machine or Python, or of a newer C++ library
        raise NativeUnavailable(f"its extension cannot be loaded ({error}): {_AGAIN}") from None


def _check_library(path: Path) -> None:
    """Raises NativeUnavailable for a file that is not this version's library of the step. Only for one that the CPU can run."""
    _check_whole(path)
    try:
        version = ctypes.CDLL(str(path)).headrace_step_abi()
    except OSError as error:
        raise NativeUnavailable(f"its library cannot be loaded ({error}): {_AGAIN}") from None
    except AttributeError:
        raise NativeUnavailable(f"{path} is no library of it: {_AGAIN}") from None
    if version != STEP_ABI:
        raise NativeUnavailable(
            f"{path} was built for another version of Headrace (interface {version}, wanted {STEP_ABI}): {_AGAIN}"
        )


def _check_whole(path: Path) -> None:
    """Raises NativeUnavailable for a file that cannot be read or lacks its end. Whoever maps an ELF file without its end is
    killed by SIGBUS, with no message; any other file is the loader's to refuse."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(64)
            if len(head) < 64 or not head.startswith(b"\x7fELF\x02\x01"):  # of 64 bits, least byte first
                return
            (table,) = struct.unpack_from("<Q", head, 32)
            (count,) = struct.unpack_from("<H", head, 56)
            end = table + 56 * count  # of the table of segments: offset and length of what is mapped
            if end <= size:
                file.seek(table)
                end = max([end, *map(sum, struct.iter_unpack("<8xQ16xQ16x", file.read(56 * count)))])
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be read ({error.strerror}): {_AGAIN}") from None
    if end > size:
        raise NativeUnavailable(f"{path} is cut off ({size} bytes of at least {end}): {_AGAIN}")
