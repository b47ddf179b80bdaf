"""What the engine and the command line see of compiling ahead: a process that is begun, told of, waited for or ended.

While all is there that has been noted of a model's shape, options and card (`notes.py`), nothing is started.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable

import msgspec

from headrace.compile_ahead.cards import Card
from headrace.compile_ahead.notes import is_complete, kernel_cache, note_path
from headrace.compile_ahead.process import News, Work
from headrace.config import EngineConfig, environment_of_child, python_of_child
from headrace.errors import CapacityError
from headrace.model.checkpoint import MADE, Checkpoint
from headrace.scheduler.config import Limits

logger = logging.getLogger(__name__)
END_SECONDS = 5.0

Told = Callable[[int, int], None]  # kernels that are compiled, of how many


class Compilation:
    """Under way in a process of its own, unless all is there. Use as a context manager: what has not ended then is ended."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, limits: Limits, card: Card, processes: int = 0):
        self.card = card
        note = note_path(config, checkpoint, limits, card)
        self.last = News(ended=is_complete(note))
        self._process: subprocess.Popen[bytes] | None = None
        if not self.last.ended:
            self._process = self._begin(Work(config, limits, card, str(note), processes))

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

    def wait(self, told: Told) -> News:
        """Until all is compiled that can be; `told` hears of each. What is then missing is compiled when it is needed. Raises
        CapacityError if there is no room for it, or for what it takes meanwhile."""
        if (process := self._process) is None:
            return self.last
        assert process.stdout is not None
        for line in process.stdout:
            news, before = msgspec.json.decode(line, type=News), self.last
            self.last = news
            if (news.done, news.total) != (before.done, before.total):
                told(news.done, news.total)
        if self.last.full:
            why = "or TMPDIR names another directory: no kernel can be compiled without its temporary files"
            raise CapacityError(f"no more temporary files fit into {self.last.full}: make room there, {why}")
        if self.last.unkept:
            why = "or TRITON_CACHE_DIR names another directory: without one no kernel can be compiled"
            raise CapacityError(f"kernels cannot be kept in {kernel_cache()} ({self.last.unkept}): make room there, {why}")
        if process.wait():
            logger.warning("compiling ahead ended with code %d: the rest is compiled when it is needed", process.returncode)
        for kernel, why in self.last.refused.items():
            logger.warning("%s does not compile for sm_%d: %s", kernel, self.card.capability, why)
        return self.last


def compiles_ahead(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Whether the kernels are known here: of one of several ranks those with narrow weights or adapters are not."""
    narrow = config.quantization in MADE or (config.quantization != "none" and checkpoint.quantized_to())
    return config.tensor_parallel_size == 1 or not (config.takes_adapters or narrow)
