"""What the engine and the command line see of compiling ahead: a process that is begun, told of, waited for or ended.

What has been compiled once for a model's shape, options and card is noted in the user's cache directory, with the places in
Triton's cache; while these are there, nothing is started.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.compile_ahead.cards import Card
from headrace.compile_ahead.process import News, Work
from headrace.config import EngineConfig, cache_dir, environment_of_child, python_of_child
from headrace.model.checkpoint import MADE, Checkpoint
from headrace.scheduler.config import Limits

logger = logging.getLogger(__name__)
SOURCES = ("kernels", "fast_decode", "attention", "compile_ahead", "model", "worker", "cache", "sampling", "lora")
# options that decide about kernels, beside the limits
SHAPING = (
    "dtype", "kv_cache_dtype", "quantization", "enforce_eager", "takes_adapters", "max_loras", "max_lora_rank", "lora_experts",
    "tensor_parallel_size",
)  # fmt: skip
END_SECONDS = 5.0

Told = Callable[[int, int], None]  # kernels that are compiled, of how many


class Compilation:
    """Under way in a process of its own, unless all is there. Use as a context manager: what has not ended then is ended."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, limits: Limits, card: Card, processes: int = 0):
        self.card = card
        self._note = note_path(config, checkpoint, limits, card)
        self.last = News()
        self._process: subprocess.Popen[bytes] | None = None
        if not is_complete(self._note):
            self._process = self._begin(Work(config, limits, card, processes))

    @staticmethod
    def _begin(work: Work) -> subprocess.Popen[bytes] | None:
        environment = {k: v for k, v in environment_of_child().items() if k != "TRITON_INTERPRET"}
        command = python_of_child("-m", "headrace.compile_ahead.process", os.getpid())
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            assert process.stdin is not None
            with process.stdin as told:
                told.write(msgspec.msgpack.encode(work))
        except OSError as error:
            logger.warning("kernels are compiled when they are needed: no process can be had for it: %s", error)
            return None
        return process

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, *_: object) -> None:
        if (process := self._process) is None:
            return
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._process = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def wait(self, told: Told) -> News:
        """Until all is compiled that can be; `told` hears of each. What is then missing is compiled when it is needed."""
        if (process := self._process) is None:
            return self.last
        assert process.stdout is not None
        for line in process.stdout:
            self.last = msgspec.json.decode(line, type=News)
            told(self.last.done, self.last.total)
        if process.wait():
            logger.warning("compiling ahead ended with code %d: the rest is compiled when it is needed", process.returncode)
        for kernel, why in self.last.refused.items():
            logger.warning("%s does not compile for sm_%d: %s", kernel, self.card.capability, why)
        if self.last.places is not None and not self.last.failed:
            write_note(self._note, self.last.places)
        return self.last


def compiles_ahead(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Whether the kernels are known here: of one of several ranks those with narrow weights or adapters are not."""
    narrow = config.quantization in MADE or (config.quantization != "none" and checkpoint.quantized_to())
    return config.tensor_parallel_size == 1 or not (config.takes_adapters or narrow)


def note_path(config: EngineConfig, checkpoint: Checkpoint, limits: Limits, card: Card) -> Path:
    """Where it is noted that all is compiled for a model of this shape, with these options, on this card, by this code."""
    import triton

    sizes = {name: getattr(limits, name) for name in ("max_num_seqs", "max_model_len", "block_size", "max_draft_rows")}
    sizes["most"] = min(limits.max_num_batched_tokens, 4096)
    options = {name: getattr(config, name) for name in SHAPING}
    shape = [checkpoint.config, checkpoint.quantized_to(), sizes, options]
    card_words = [card.name, card.capability, card.multiprocessors, triton.__version__, triton.__file__, sys.version]
    key = json.dumps([shape, card_words, source_digest()], sort_keys=True, default=str)
    return cache_dir() / "compiled" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def source_digest() -> str:
    """Of what kernels and their launches are made by."""
    digest, root = hashlib.sha256(), Path(__file__).resolve().parent.parent
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel_cache() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def is_complete(note: Path) -> bool:
    try:
        noted = json.loads(note.read_text())
        return noted["cache"] == str(kernel_cache()) and all((kernel_cache() / place).exists() for place in noted["places"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def write_note(note: Path, places: list[str]) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be written is looked through each time
        note.parent.mkdir(parents=True, exist_ok=True)
        half = note.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps({"cache": str(kernel_cache()), "places": places}))
        half.replace(note)
