"""What has been compiled once for a model's shape, options and card is noted in the user's cache directory, with its files in
Triton's cache and their sizes. While these are there, nothing is compiled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Any

from headrace.compile_ahead.cards import Card
from headrace.config import EngineConfig, cache_dir
from headrace.model.checkpoint import Checkpoint
from headrace.scheduler.config import Limits

logger = logging.getLogger(__name__)
SOURCES = ("kernels", "fast_decode", "attention", "compile_ahead", "model", "worker", "cache", "sampling", "lora")
# options that decide about kernels, beside the limits
SHAPING = (
    "dtype", "kv_cache_dtype", "quantization", "enforce_eager", "takes_adapters", "max_loras", "max_lora_rank", "lora_experts",
    "tensor_parallel_size",
)  # fmt: skip
TURN_SECONDS = 120.0
ENTRY = re.compile("[A-Z2-7]{52}")  # as Triton names what belongs to a kernel


def note_path(config: EngineConfig, checkpoint: Checkpoint, limits: Limits, card: Card) -> Path:
    """Where it is noted that all is compiled for a model of this shape, with these options, on this card, by this code."""
    import triton

    from headrace.fast_decode.pieces import least_rows

    sizes = {name: getattr(limits, name) for name in ("max_num_seqs", "max_model_len", "block_size", "max_draft_rows")}
    alike = 4096 if config.tensor_parallel_size == 1 else 2 * least_rows()  # tokens from which on no step has forms of its own
    sizes["most"] = min(limits.max_num_batched_tokens, alike)
    options = {name: getattr(config, name) for name in SHAPING}
    shape = [checkpoint.config, checkpoint.quantized_to(), sizes, options]
    card_words = [card.name, card.capability, card.multiprocessors, triton.__version__, triton.__file__, sys.version]
    key = json.dumps([shape, card_words, source_digest()], sort_keys=True, default=str)
    return cache_dir() / "compiled" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def source_digest() -> str:
    """Of what kernels and their launches are made by, tables of tiles that were searched on this machine among it."""
    digest, root = hashlib.sha256(), Path(__file__).resolve().parent.parent
    for folder in [*(root / name for name in SOURCES), cache_dir() / "tiles"]:
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
            with contextlib.suppress(OSError):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel_cache() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def read_note(note: Path) -> dict[str, Any]:
    """The number of kernels, and the files of them in Triton's cache with their sizes; without any if there is no note."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        found = json.loads(note.read_text())
        if found["cache"] == str(kernel_cache()):
            return {"kernels": int(found["kernels"]), "files": dict(found["files"])}
    return {"kernels": 0, "files": {}}


def is_complete(note: Path) -> bool:
    files = read_note(note)["files"]
    return bool(files) and all(_size(kernel_cache() / place) == size != -1 for place, size in files.items())


def write_note(note: Path, kernels: int, places: Iterable[str]) -> None:
    files = {place: _size(kernel_cache() / place) for place in places}
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        half = note.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps({"cache": str(kernel_cache()), "kernels": kernels, "files": files}))
        half.replace(note)
    except OSError as error:
        logger.warning("every start looks through all kernels, as it cannot be noted that they are there: %s", error)


def drop_damaged(note: Path) -> None:
    """Entries that a full disk or a machine that went down has cut off: Triton would take them for whole at every start."""
    cache = kernel_cache()
    damaged = {(cache / place).parent for place, size in read_note(note)["files"].items() if _size(cache / place) != size}
    entries = [path for path in cache.glob("*") if ENTRY.fullmatch(path.name)]  # the directory may hold other things, too
    damaged |= {file.parent for entry in entries for file in entry.glob("*") if file.name != "lock" and _size(file) == 0}
    for entry in damaged:
        shutil.rmtree(entry, ignore_errors=True)


def _size(file: Path) -> int:
    """In bytes; -1: it is not there, or no file."""
    with contextlib.suppress(OSError):
        if S_ISREG((found := file.stat()).st_mode):
            return found.st_size
    return -1


@contextlib.contextmanager
def turn(note: Path) -> Iterator[None]:
    """One process at a time compiles for a note, of all cores that start at once: the others wait, and find what it has made.
    It ends when its process does; whoever cannot have it, or has waited too long, compiles beside it."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            lock, end = held.enter_context(note.with_suffix(".lock").open("w")), time.monotonic() + TURN_SECONDS
            while time.monotonic() < end:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield
