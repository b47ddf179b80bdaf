"""What the other ranks do with what rank 0 tells them: the same primitives of the runner, in the same order."""

from __future__ import annotations

import msgspec
import torch

from headrace.tensor_parallel.messages import Capture, Compute, End, LoadAdapter, Replay, Sample, ToRank, UnloadAdapter
from headrace.tensor_parallel.ring import Reader
from headrace.worker.model_runner import ModelRunner, Pending
from headrace.worker.sampling import Tail


def obey(runner: ModelRunner, inbox: Reader, decoder: msgspec.msgpack.Decoder[ToRank]) -> None:
    """Until the end is told. Whatever it raises ends all ranks."""
    pending: Pending | None = None
    pace = _Pace(runner.state.device)
    while True:
        message = decoder.decode(inbox.receive())
        if isinstance(message, Sample):
            assert pending is not None
            runner.sample(pending, edited=message.edited)
        elif isinstance(message, Compute):
            pace.keep()
            pending = runner.compute(message.plan)
        elif isinstance(message, Replay):
            pace.keep()
            pending = runner.replay(message.plan, Tail(message.tail))
        elif isinstance(message, Capture):
            from headrace.worker.cuda_graphs import Key  # imports Triton

            assert runner.graphs is not None
            runner.graphs.capture(Key(message.rows, message.context, Tail(message.tail), message.related, message.adapted))
        elif isinstance(message, LoadAdapter):
            adapters = runner.state.adapters
            adapters.load(message.version, message.slot, adapters.read(message.version))
        elif isinstance(message, UnloadAdapter):
            runner.state.adapters.unload(message.digest)
        elif isinstance(message, End):
            return
        inbox.echo()


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
