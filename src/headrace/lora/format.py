"""A LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors, read, checked and named by its content.

    y += (x A^T) B^T * alpha / r          with use_rslora: alpha / sqrt(r)

Experts that tokens choose are modules of their own where PEFT saw such, `...experts.3.up_proj`. Where it saw one parameter of
all of them (target_parameters), there is one A [experts * r, in] and one B [out, r * experts], of which an expert's columns lie
apart.

Whatever else a configuration may ask for is refused with the reason. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.lora.targets import EXPERTS, Size, plain
from headrace.lora.version import Version
from headrace.model.formats.safetensors_file import read_header, read_json

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
DTYPES = ("F32", "F16", "BF16")
MAX_RANK = 512
MAX_SCALE = 3e38
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_EXPERTS = re.compile(r"(.*\blayers\.\d+\.(?:\w+\.)?experts)(\.base_layer)?")
_ALL_EXPERTS, _ONE_EXPERT = re.compile(r"layers\.(\d+)\.experts\."), re.compile(r"layers\.(\d+)\.\w+\.experts\.")
_PATTERN = re.compile(r"\^?(?:\.\*\\\.)?[\w.-]+")  # with what PEFT itself puts before a name: `.*\.`
_CHANGES_BASE = "it changes the base weights; save it converted (PEFT: path_initial_model_for_weight_conversion)"
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # of A and B, with the base left alone
# fields that must be empty -> why
_UNKNOWN = {
    "modules_to_save": "whole modules in place of the model's",
    "trainable_token_indices": "rows of the embedding in place of the model's",
    "layer_replication": "layers of the model used several times",
    "lora_bias": "biases beside A and B",
    "alora_invocation_tokens": "an adapter that begins to work at certain tokens",
    "arrow_config": "a choice among several adapters",
}


@dataclass(frozen=True, slots=True)
class Matrices:
    """Of one module, or of all experts: names of its tensors, its rank and what its product is multiplied by."""

    a: str  # [rank, in]
    b: str  # [out, rank]
    rank: int
    scale: float
    experts: int = 0  # of which A [experts * rank, in] and B [out, rank * experts] hold the matrices; 0: a module by itself


class Files(NamedTuple):
    """The content of both files."""

    config: bytes
    tensors: bytes

    @property
    def digest(self) -> str:
        found = hashlib.blake2b(self.config, digest_size=16)
        found.update(self.tensors)
        return found.hexdigest()


def read_files(directory: Path) -> Files:
    """Raises CheckpointError naming the file."""
    try:
        return Files((directory / CONFIG).read_bytes(), (directory / TENSORS).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error


def examine(directory: str | Path, modules: Mapping[str, Size], max_rank: int) -> Version:
    """Whether an adapter can run with a model of these `modules` (see `modules_of`), by its configuration and its tensors'
    shapes; then its content is named. Raises CheckpointError that says what is wrong with which file."""
    directory = Path(os.path.expanduser(directory)).absolute()
    for name in (CONFIG, TENSORS):
        try:
            there, pickled = (directory / name).is_file(), (directory / "adapter_model.bin").exists()
        except OSError as error:  # a name of too many characters, a directory that is not ours to enter
            raise CheckpointError(f"{directory!s:.200}: cannot be read: {error.strerror}") from error
        if not there:
            hint = " (adapter_model.bin is pickled, which Headrace never loads)" if pickled else ""
            raise CheckpointError(f"{directory / name} does not exist{hint}")
    if (size := (directory / CONFIG).stat().st_size) > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{directory / CONFIG}: {size} bytes, at most {MAX_CONFIG_BYTES} are read")
    header = read_header(directory / TENSORS)
    for entry in header.values():
        if entry.encoding.name not in DTYPES:
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r} is of {entry.encoding.name}, not {', '.join(DTYPES)}")
    check(read_json(directory / CONFIG), {name: entry.shape for name, entry in header.items()}, modules, max_rank, directory)
    try:
        with safe_open(directory / TENSORS, "numpy"):  # whether tensors overlap, or leave bytes that are nobody's
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{directory / TENSORS}: {error}") from error
    return Version(read_files(directory).digest, str(directory))


def parsed(config: bytes, where: Path) -> dict[str, Any]:
    """Of a configuration that has been examined before."""
    try:
        return dict(json.loads(config))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where / CONFIG}: cannot be read as JSON: {error}") from error


def check(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, Size], max_rank: int, where: Path
) -> dict[str, Matrices]:
    """The matrices of each module that has some; raises CheckpointError for whatever Headrace would not honour."""
    for problem in _problems(config):
        raise CheckpointError(f"{where / CONFIG}: {problem}")
    found: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    for tensor in shapes:
        match = _TENSOR.fullmatch(tensor)
        name = "" if match is None else _parameter(match[1], tensor, shapes, config)
        key = _key(name)
        if match is None or key not in modules:
            raise CheckpointError(f"{where / TENSORS}: the tensor {tensor!r}: {_why_unknown(tensor, modules)}")
        if found.setdefault(key, {}).setdefault(match[2], tensor) != tensor:
            raise CheckpointError(f"{where / TENSORS}: the tensor {tensor!r} is there twice, under two names")
        names[key] = name
    if not found:
        raise CheckpointError(f"{where / TENSORS}: there is no tensor in it")
    ways = [{m[1] for key in found if (m := way.match(key))} for way in (_ALL_EXPERTS, _ONE_EXPERT)]
    if both := ways[0] & ways[1]:
        raise CheckpointError(f"{where / TENSORS}: layer {min(both)} has experts one by one and all together")
    return {m: _matrices(config, names[m], ab, shapes, modules[m], max_rank, where) for m, ab in found.items()}


def _matrices(
    config: Mapping[str, Any], name: str, tensors: dict[str, str], shapes: Mapping[str, tuple[int, ...]], size: Size,
    max_rank: int, where: Path,
) -> Matrices:  # fmt: skip
    if missing := {"A", "B"} - set(tensors):
        raise CheckpointError(f"{where / TENSORS}: the tensor lora_{missing.pop()} of {name} is missing")
    rank = _of_module(config.get("rank_pattern"), name, config["r"])
    alpha = _of_module(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    if rank > max_rank:
        raise CheckpointError(f"{where / CONFIG}: rank {rank} of {name}: at most {max_rank} here (max_lora_rank)")
    ranks = rank * (size.experts or 1)
    for tensor, wanted in ((tensors["A"], (ranks, size.inputs)), (tensors["B"], (size.outputs, ranks))):
        if tuple(shapes[tensor]) != wanted:
            fits = "is the adapter of a model of other sizes?" if ranks in shapes[tensor] else f"its rank is to be {rank}"
            problem = f"the tensor {tensor!r} has shape {tuple(shapes[tensor])}, this model asks for {wanted}: {fits}"
            raise CheckpointError(f"{where / TENSORS}: {problem}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Matrices(tensors["A"], tensors["B"], rank, scale, size.experts)


def _parameter(name: str, tensor: str, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The name of what PEFT wrapped: a module's own, or that of a parameter of all experts. Where both of a layer's are, the
    second (down) is around the first (gate and up), which then is its `base_layer`; one alone is what the config says."""
    if (match := _EXPERTS.fullmatch(name)) is None:
        return name
    first, second = EXPERTS.values()
    targets = {str(target).rpartition(".")[2] for target in config.get("target_parameters") or ()}
    if match[2]:
        return f"{match[1]}.{first}"
    if targets == {second} or tensor.replace(".lora_", ".base_layer.lora_") in tensors:
        return f"{match[1]}.{second}"
    return f"{match[1]}.{first}" if targets == {first} else name


def _key(name: str) -> str:
    """What modules_of calls it."""
    return re.sub(r"(layers\.\d+\.)\w+\.(experts\.(?:gate_up|down)_proj)", r"\1\2", plain(name))


def _of_module(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """The first entry whose key is the module's name or ends it, from a dot on; `^` is for the whole name alone."""
    for key, value in (pattern or {}).items():
        key = key.removeprefix(".*\\.")
        if name == key.removeprefix("^") or (not key.startswith("^") and name.endswith("." + key)):
            return value
    return default


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What of a configuration cannot be honoured, in words."""
    if config.get("peft_type") != "LORA":
        yield f"peft_type = {config.get('peft_type')!r}: only 'LORA' is known"
    if not _whole(config.get("r")):
        yield f"r = {config.get('r')!r}: the rank is a whole number from 1 to {MAX_RANK}"
    if not _number(config.get("lora_alpha", 8)):
        yield f"lora_alpha = {config.get('lora_alpha')!r:.40}: it is a number within {MAX_SCALE}"
    for name, fits in (("rank_pattern", _whole), ("alpha_pattern", _number)):
        pattern = config.get(name) or {}
        for key, value in pattern.items() if isinstance(pattern, dict) else [("", pattern)]:
            if not _PATTERN.fullmatch(key) or not fits(value):
                yield f"{name}: {key!r}: {value!r}: a module's name, or the end of one, and a number are known"
    if config.get("use_dora"):
        yield "use_dora: DoRA's magnitudes are not supported"
    for name in sorted(config):
        if name.startswith("use_") and name not in ("use_rslora", "use_dora") and config[name]:
            yield f"{name}: it is not supported"
    for name, what in _UNKNOWN.items():
        if config.get(name):
            yield f"{name}: {what}: not supported"
    targets = config.get("target_parameters") or []
    for target in targets if isinstance(targets, list) else [targets]:
        if str(target).rpartition(".")[2] not in EXPERTS.values():
            yield f"target_parameters: {target!r}: of parameters only {' and '.join(EXPERTS.values())}, of experts, are known"
    if config.get("bias", "none") != "none":
        yield f"bias = {config['bias']!r}: trained biases are not supported, only 'none'"
    init = config.get("init_lora_weights", True)
    if not any(init is known or (isinstance(init, str) and init == known) for known in _INITS):
        changes = isinstance(init, str) and init.startswith(("pissa", "olora", "corda", "loftq"))
        yield f"init_lora_weights = {init!r}: " + (_CHANGES_BASE if changes else "it is not known")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def _number(value: Any) -> bool:
    """Within float32, in which products are scaled."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_SCALE < value < MAX_SCALE


def _why_unknown(tensor: str, modules: Mapping[str, Size]) -> str:
    if "lora_embedding_" in tensor or "lm_head" in tensor:
        return "adapters of the embedding and of the head are not supported"
    if "lora_magnitude_vector" in tensor:
        return "DoRA's magnitudes are not supported"
    match = _TENSOR.fullmatch(tensor)
    if match is None:
        return "it is neither lora_A nor lora_B of a module"
    if re.search(r"\.(gate|router|gate\.wg)$", match[1]):
        return "adapters of routers are not supported"
    if re.search(r"\.experts(\.|$)", match[1]):
        if not any(".experts." in name for name in modules):
            return "adapters of experts need lora_experts, which makes places for them, and a model that has experts"
        if _EXPERTS.fullmatch(match[1]):
            return f"target_parameters does not say whether it is of {' or of '.join(EXPERTS.values())}"
    known = sorted({re.sub(r"\bexperts\.\d+", "experts.N", name.split(".", 2)[2]) for name in modules})
    return f"this model has no such module; adapters can have {', '.join(known)} of its layers"
