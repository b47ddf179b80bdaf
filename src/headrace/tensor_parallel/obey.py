"""What the other ranks do with what rank 0 tells them: the same primitives of the runner, in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from headrace.scheduler.plan import StepPlan
from headrace.tensor_parallel.messages import (
    Capture,
    Compute,
    Decodes,
    End,
    LoadAdapter,
    Place,
    Prompts,
    Replay,
    Sample,
    ToRank,
    UnloadAdapter,
)
from headrace.worker.model_runner import ModelRunner, Pending
from headrace.worker.sampling import Tail

if TYPE_CHECKING:
    from headrace.worker.cuda_graphs import Key
    from headrace.worker.prompt_graphs import PromptKey


class Inbox(Protocol):
    """A ring's Reader."""

    def receive(self) -> bytes: ...

    def echo(self) -> None: ...


def obey(runner: ModelRunner, inbox: Inbox, decoder: msgspec.msgpack.Decoder[ToRank]) -> None:
    """Until the end is told. Whatever it raises ends all ranks."""
    placed: StepPlan | None = None
    pending: Pending | None = None
    pace = _Pace(runner.state.device)
    while True:
        message = decoder.decode(inbox.receive())
        if isinstance(message, Sample):
            assert pending is not None
            runner.sample(pending, edited=message.edited)
        elif isinstance(message, Place):
            pace.keep()
            placed = message.plan
            runner.place(placed)
        elif isinstance(message, Compute):
            assert placed is not None
            pending = runner.compute(placed, None if message.step is None else prompt_key(message.step))
        elif isinstance(message, Replay):
            pace.keep()
            pending = runner.replay(message.plan, decode_key(message.step))
        elif isinstance(message, Capture):
            capture(runner, message.step)
        elif isinstance(message, LoadAdapter):
            adapters = runner.state.adapters
            adapters.load(message.version, message.slot, adapters.read(message.version))
        elif isinstance(message, UnloadAdapter):
            runner.state.adapters.unload(message.digest)
        elif isinstance(message, End):
            return
        inbox.echo()


def decode_key(step: Decodes) -> Key:
    from headrace.worker.cuda_graphs import Key  # imports Triton, as do the others

    return Key(step.rows, step.context, Tail(step.tail), step.related, step.adapted)


def prompt_key(step: Prompts) -> PromptKey:
    from headrace.worker.prompt_graphs import PromptKey

    return PromptKey(step.tokens, step.seqs, step.decodes, step.context, Tail(step.tail))


def capture(runner: ModelRunner, step: Decodes | Prompts) -> None:
    if isinstance(step, Decodes):
        assert runner.graphs is not None
        runner.graphs.capture(decode_key(step))
    else:
        assert runner.prompts is not None
        runner.prompts.capture(prompt_key(step))


class _Pace:
    """Rank 0 reads the results of a step before it launches the next but one, so that buffers are free by then. Here nobody
    reads, and the device may be behind."""

    def __init__(self, device: torch.device):
        self._on_card = device.type == "cuda"
        self._began: torch.cuda.Event | None = None  # the last step: all before it is done

    def keep(self) -> None:
        """A step begins: the one before the last is done."""
        if self._began is not None:
            self._began.synchronize()
        if self._on_card:
            self._began = torch.cuda.Event()
            self._began.record()
