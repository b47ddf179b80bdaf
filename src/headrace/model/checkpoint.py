"""Finds a checkpoint from what the user wrote and reads everything of it but the tensors' data."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.config import EngineConfig, hub_offline
from headrace.errors import CheckpointError, ParameterError
from headrace.model import hub
from headrace.model.embedded import EMBEDDED_DEFAULTS, NAME, embedded_model_path
from headrace.model.formats.gguf import GgufFile, gguf_files, read_gguf
from headrace.model.formats.gguf_model import end_token_ids, hf_config, hf_tensors
from headrace.model.formats.quantized import quantization_beside, quantization_of
from headrace.model.formats.safetensors_file import find_tensors, read_json
from headrace.model.formats.tensor_file import FLOATS, TensorEntry
from headrace.model.text_part import text_config, text_tensors, wrapper_of
from headrace.sampling.params import NEUTRAL

logger = logging.getLogger(__name__)
_AT_COMMIT = re.compile("(.+)@([0-9a-f]{40})")
_GGUF_DEFAULTS = {  # metadata key -> ours; xtc_*, mirostat* and penalty_last_n have no counterpart here
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
MADE = ("fp8", "int8", "int4")  # of floats, by --quantization


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on this machine's disk. Everything but the weights' data is read; nothing of it is ever executed.

    `config` is the content of `config.json`, or what it would be for a GGUF file. `generation_defaults` holds those of
    temperature, top_p, top_k, min_p and repetition_penalty that `generation_config.json` or a GGUF's metadata set.
    """

    name: str  # as the user wrote it
    path: Path  # a directory, or a .gguf file
    format: Literal["safetensors", "gguf", "dummy"]
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]  # of config and generation config; the tokenizer may know another one
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    tokenizer_path: Path | None = None  # a directory or .gguf file; None: `path`
    gguf: GgufFile | None = field(default=None, repr=False)
    text_of: str | None = None  # the architecture of a model that sees images, too: this is its text part

    def end_token_ids(self, of_tokenizer: Sequence[int]) -> tuple[int, ...]:
        """What the files name as the end of a text: each may be silent, or name only what ended the base model's texts."""
        return tuple(dict.fromkeys([*self.eos_token_ids, *of_tokenizer]))

    def ties_head(self, family: str) -> bool:
        return ties_head(self.config, family)

    def quantized_to(self) -> list[str]:
        """In which narrow numbers its matrices are, if they are."""
        if self.format == "dummy":
            return []
        if (quantization := quantization_of(self.config)) is not None:
            return [quantization.method] if quantization.schemes else []
        matrices = [entry for entry in self.tensors().values() if len(entry.shape) > 1 and self.gguf is not None]
        return sorted({entry.encoding.name for entry in matrices} - set(FLOATS))

    def tensors(self) -> dict[str, TensorEntry]:
        """Where each tensor lies, by Hugging Face name. Raises CheckpointError for broken headers or missing shards."""
        if self.format == "dummy":
            raise CheckpointError(f"{self.path}: load_format dummy reads no tensors")
        found = hf_tensors(self.gguf) if self.gguf is not None else find_tensors(self.path)
        return found if self.text_of is None else text_tensors(found)


def ties_head(config: Mapping[str, Any], family: str) -> bool:
    """Whether the head is the embedding once more, by a model's config; where it does not say so, by what is usual."""
    return bool(config.get("tie_word_embeddings", family.startswith("gemma")))


def resolve_checkpoint(config: EngineConfig) -> Checkpoint:
    """The checkpoint that `config.model` names: a directory, a .gguf file, a Hub id, or None for the embedded model.

    Raises CheckpointError that says which file is missing where.
    """
    name = config.model
    if config.revision is not None and (name is None or os.path.exists(os.path.expanduser(name))):
        raise ParameterError("revision", config.revision, "nothing for a local model: only the Hub has revisions")
    with _readable():
        path = embedded_model_path() if name is None else _locate(name, config, hub.FILES)
        gguf_path = _gguf_file(path, config.load_format)
        if gguf_path is not None:
            checkpoint = _from_gguf(name or NAME, gguf_path, config)
        else:
            checkpoint = _from_directory(str(name), path, config)
        if config.tokenizer is None:
            return checkpoint
        beside = another(config, config.tokenizer)
        return dataclasses.replace(checkpoint, tokenizer_path=_locate(str(beside.model), beside, ["*.json", "*.jinja"]))


def another(config: EngineConfig, name: str) -> EngineConfig:
    """`config` with another model or tokenizer of the options as its model. The revision is the model's; `name` may have a
    commit of its own: see pinned()."""
    found = None if os.path.exists(os.path.expanduser(name)) else _AT_COMMIT.fullmatch(name)
    name, commit = found.groups() if found else (name, None)
    return dataclasses.replace(config, model=name, revision=commit, tokenizer=None)


def pinned(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """`config` for whoever reads that checkpoint once more: the branch may be at another commit by then, and the cache. What
    it names beside the model is at its commit, too: NAME@COMMIT."""
    others: dict[str, Any] = {}
    for option in ("tokenizer", "speculative_model"):
        if (name := getattr(config, option)) is not None:
            found = another(config, name)
            path = checkpoint.tokenizer_path if option == "tokenizer" else resolve_checkpoint(found).path
            commit = _commit(found, path)
            others[option] = name if commit is None else f"{found.model}@{commit}"
    return dataclasses.replace(config, revision=_commit(config, checkpoint.path), **others)


def _commit(config: EngineConfig, path: Path | None) -> str | None:
    """Of what `config.model` names, if that is of the Hub and was found at `path`."""
    if path is None or config.model is None or os.path.exists(os.path.expanduser(config.model)):
        return config.revision
    folders = (path, *path.parents)  # a .gguf file may be in one of its own
    return next((folder.name for folder in folders if folder.parent.name == "snapshots"), config.revision)


def locate_config(config: EngineConfig) -> Path:
    """Where `config.model`, a directory, a .gguf file or a Hub id, lies; of the Hub's its JSON files alone are fetched."""
    with _readable():
        return _locate(str(config.model), config, ["*.json"])


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """A name of too many characters, a directory that is not ours to enter: whatever the system refuses is named."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename!s:.200}: cannot be read: {error.strerror}") from error


def _from_gguf(name: str, path: Path, config: EngineConfig) -> Checkpoint:
    gguf = read_gguf(path)
    kind: Literal["gguf", "dummy"] = "dummy" if config.load_format == "dummy" else "gguf"
    given = {ours: gguf.metadata.get(f"general.sampling.{key}") for key, ours in _GGUF_DEFAULTS.items()}
    defaults = (EMBEDDED_DEFAULTS if config.model is None else {}) | _generation_defaults(path, given)
    return Checkpoint(name, gguf.path, kind, hf_config(gguf), tuple(end_token_ids(gguf)), defaults, gguf=gguf)


def _from_directory(name: str, path: Path, config: EngineConfig) -> Checkpoint:
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json")
    model = quantization_beside(path, read_json(path / "config.json"))
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    text = model.get("text_config")
    sources = [model, text if isinstance(text, dict) else {}, generation]
    eos = sorted({i for source in sources for i in _token_ids(path, source.get("eos_token_id"))})
    kind: Literal["safetensors", "dummy"] = "dummy" if config.load_format == "dummy" else "safetensors"
    defaults = _generation_defaults(path / "generation_config.json", generation)
    return Checkpoint(name, path, kind, text_config(model), tuple(eos), defaults, text_of=wrapper_of(model))


def _token_ids(path: Path, value: Any) -> list[int]:
    """An eos_token_id: null, an id or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or not 0 <= i < 1 << 31 for i in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}, not a token id or a list of them")
    return ids


def _generation_defaults(path: Path, generation: dict[str, Any]) -> dict[str, float]:
    defaults: dict[str, float] = {}
    for key in NEUTRAL:
        value = generation.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{path}: {key} is {value!r}, not a finite number")
        defaults[key] = value
    return defaults


def _gguf_file(path: Path, load_format: str) -> Path | None:
    """The GGUF file that `path` means, or None if it is a directory of safetensors."""
    if path.is_file():
        if load_format == "safetensors":
            raise CheckpointError(f"{path} is a file, but load_format safetensors needs a directory")
        return path
    files = gguf_files(path)
    if load_format == "gguf" or (load_format != "safetensors" and files and not _is_whole(path, load_format)):
        if len(files) != 1:
            raise CheckpointError(f"{path} has {len(files)} .gguf files; name one of them")
        return files[0]
    return None


def _is_whole(path: Path, load_format: str) -> bool:
    """Whether a directory has all that a model of safetensors consists of: beside a .gguf file a config.json may be, too."""
    return (path / "config.json").exists() and (load_format == "dummy" or any(path.glob("*.safetensors")))


def _locate(name: str, config: EngineConfig, patterns: list[str]) -> Path:
    """The local directory or file for a path or a Hub id."""
    if "://" in name:
        raise CheckpointError(f"{name} is an address: a model of the Hub is named ORGANIZATION/MODEL, as in Qwen/Qwen3-8B")
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return _snapshot_of_cache_root(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is neither a directory nor a .gguf file")
        return path
    if name.startswith((".", "~", os.sep)) or name.count(os.sep) > 1 or name.endswith(".gguf") or not name.strip():
        what = "file" if name.endswith(".gguf") else "directory"
        parent = "" if path.parent.is_dir() else f" (nor does {path.parent})"
        raise CheckpointError(f"{what} {path} does not exist{parent}")
    return _download(name, config, patterns)


def _snapshot_of_cache_root(path: Path, revision: str | None = None) -> Path:
    """`path`, or the snapshot inside it if it is a `models--org--name` directory of the Hub's cache."""
    snapshots = path / "snapshots"
    if (path / "config.json").exists() or not path.name.startswith("models--") or not snapshots.is_dir():
        return path
    ref = path / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8-sig").strip() if ref.is_file() else revision or ""
    if commit and (snapshots / commit).is_dir():
        return snapshots / commit
    if revision is not None:
        raise CheckpointError(f"{snapshots} holds no snapshot of the revision {revision!r}")
    found = sorted((p for p in snapshots.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
    if not found:
        raise CheckpointError(f"{snapshots} holds no snapshot")
    return found[-1]


def _tagged(repo: str, tag: str, copied: Path, revision: str | None, offline: bool) -> Path:
    """One .gguf file of a repository: the one that is in the cache, else that of the Hub."""
    found: list[Path] = []
    with contextlib.suppress(CheckpointError):  # there is another revision only
        found = hub.tagged(_snapshot_of_cache_root(copied, revision), tag)
    if not found:
        if offline:
            raise CheckpointError(f"{repo}:{tag} is not in the local cache, and offline nothing is downloaded")
        found = hub.tagged(_fetched(f"{repo}:{tag}", revision), tag)
    return found[0]


def _fetched(name: str, revision: str | None) -> Path:
    """The snapshot of what is not in the cache. That may take its time, so it is told how much it is."""
    pull = hub.find(name, revision)
    logger.warning("%s is fetched: %s", name, pull.words)
    return hub.download(pull, revision)


def _download(name: str, config: EngineConfig, patterns: list[str]) -> Path:
    """The Hub snapshot of `name`; without any network call if told so by the configuration or the environment."""
    from huggingface_hub import constants, snapshot_download

    offline = config.local_files_only or hub_offline()
    name, tag = hub.split_name(name)
    copied = Path(constants.HF_HUB_CACHE) / ("models--" + name.replace("/", "--"))
    if tag is not None:
        return _tagged(name, tag, copied, config.revision, offline)
    if offline and (copied / "snapshots").is_dir():  # read here: the Hub's client does not find caches copied by hand
        return _snapshot_of_cache_root(copied, config.revision)
    try:
        if patterns is hub.FILES and not offline and not hub.is_cached(name):
            return _fetched(name, config.revision)
        with hub.told(name, offline):
            found = snapshot_download(
                name,
                revision=config.revision,
                allow_patterns=patterns,
                ignore_patterns=hub.IGNORED,
                local_files_only=offline,
            )
    except CheckpointError as error:
        raise CheckpointError(f"directory {name} does not exist, and {error}") from error
    if patterns is hub.FILES and not offline and not _is_whole(Path(found), config.load_format):  # .gguf files, if anything
        return _fetched(name, config.revision)
    return Path(found)
