"""Finds the extension and the library for this CPU's instruction set. Where there is none, it is said why."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

STEP_ABI = 3  # of csrc/cpu/model.h: an extension that says otherwise was built from another version's sources

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni"}
_NEON = frozenset({"fp16", "dotprod"})
# Instruction set, as its library is named -> what the CPU must offer. Later ones are faster.
INSTRUCTION_SETS: Mapping[str, frozenset[str]] = MappingProxyType({
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512 | {"avx512bf16"},
    "neon": _NEON,
    "i8mm": _NEON | {"i8mm", "bf16"},
})  # fmt: skip


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
    version = getattr(extension, "STEP_ABI", None)
    if version != STEP_ABI:
        raise NativeUnavailable(
            f"the extension was built for another version of Headrace (interface {version}, wanted {STEP_ABI}): "
            f"install Headrace again, or run `make native` in its tree"
        )
    features = frozenset(extension.cpu_features() if features is None else features)
    folder = folder or Path(__file__).parent
    built = [name for name in INSTRUCTION_SETS if _path(folder, name).exists()]
    if not built:
        raise NativeUnavailable(f"{folder} holds no library of it")
    fitting = [name for name in built if features >= INSTRUCTION_SETS[name]]
    if instruction_set is not None:
        fitting = [name for name in fitting if name == instruction_set]
    if not fitting:
        wanted = instruction_set or min(built, key=lambda name: len(INSTRUCTION_SETS[name]))
        if wanted not in built:
            raise NativeUnavailable(f"there is no library for {wanted}; built are {', '.join(built)}")
        missing = ", ".join(sorted(INSTRUCTION_SETS[wanted] - features))
        raise NativeUnavailable(f"this CPU lacks {missing}, which {wanted} needs")
    return Library(extension, fitting[-1], _path(folder, fitting[-1]))


def _path(folder: Path, instruction_set: str) -> Path:
    return folder / f"libstep-{instruction_set}.so"


def _extension() -> ModuleType:
    try:
        return importlib.import_module("headrace.native._step")
    except ModuleNotFoundError:
        raise NativeUnavailable("it was not built when Headrace was installed, for want of a C++ compiler") from None
    except ImportError as error:  # of another Python, or of a newer C++ library
        raise NativeUnavailable(f"its extension cannot be loaded: {error}") from None
