"""Ranks of one core as threads of one process: what a Group of processes or cards does, without either."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.engine.build import Worker, build_worker, structured_output
from headrace.engine.core import EngineCore
from headrace.errors import EngineDeadError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.shard import Shard
from headrace.scheduler.scheduler import Scheduler
from headrace.speculative.setup import make_speculator
from headrace.tensor_parallel.leading_runner import LeadingRunner
from headrace.tensor_parallel.messages import End, ToRank, from_wire, to_wire
from headrace.tensor_parallel.obey import obey
from headrace.tensor_parallel.ranks import Ranks


class ThreadGroup:
    """A Group. Ranks that do not call the same, with the same shapes, fail at once."""

    def __init__(self, shard: Shard, meeting: threading.Barrier, table: list[Any]):
        self.shard, self._meeting, self._table = shard, meeting, table
        self.calls = 0

    @classmethod
    def of(cls, size: int) -> list[ThreadGroup]:
        meeting, table = threading.Barrier(size, timeout=60), [None] * size
        return [cls(Shard(rank, size), meeting, table) for rank in range(size)]

    def abort(self) -> None:
        """Nobody waits for this rank any more."""
        self._meeting.abort()

    def _exchange(self, what: str, tensor: Tensor) -> list[Tensor]:
        self.calls += 1
        self._table[self.shard.rank] = what, tensor
        self._meeting.wait()
        said = list(self._table)
        told = [(kind, t.shape, t.dtype) for kind, t in said]
        assert all(t == told[0] for t in told), told
        tensors = [t.clone() for _, t in said]
        self._meeting.wait()  # everybody has read it
        return tensors

    def sum(self, part: Tensor) -> Tensor:
        total, *others = self._exchange("sum", part)
        total = total.float()
        for other in others:
            total = total + other.float()
        return total.to(part.dtype)

    def gather(self, part: Tensor) -> Tensor:
        return torch.stack(self._exchange("gather", part))

    def prepare(self, rows: int, width: int, dtype: torch.dtype) -> None:
        pass

    def push_space(self, rows: int, width: int, dtype: torch.dtype) -> None:
        return None

    def exchange(self, rows: int, width: int, dtype: torch.dtype) -> ThreadExchange | None:
        return ThreadExchange(self, rows, width, dtype) if self.shard.size == 2 else None

    def peer_bytes(self) -> int:
        return 0

    def share(self, tensor: Tensor) -> None:
        first, *_ = self._exchange("share", tensor)
        tensor.copy_(first)


class ThreadExchange:
    """An Exchange, in which a part goes over when somebody waits for it."""

    def __init__(self, group: ThreadGroup, rows: int, width: int, dtype: torch.dtype):
        self.group, self.rank, self.rows, self.width, self.dtype = group, group.shard.rank, rows, width, dtype
        self.sent: list[Tensor] = []

    def begin(self) -> Callable[[slice], Tensor]:
        return lambda span: torch.full((2, span.stop - span.start, self.width), torch.nan, dtype=self.dtype)

    def send(self, parts: Tensor) -> int:
        self.sent.append(parts)
        return len(self.sent) - 1

    def wait(self, number: int) -> None:
        parts = self.sent[number]
        parts.copy_(torch.stack([of[rank] for rank, of in enumerate(self.group._exchange(f"parts {number}", parts))]))


def run_ranks(size: int, run: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What `run` returns on each rank; the first error of any is raised here."""
    groups, results, errors = ThreadGroup.of(size), [None] * size, []

    def on(group: ThreadGroup) -> None:
        try:
            results[group.shard.rank] = run(group)
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=on, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    assert len({group.calls for group in groups}) == 1
    return results


# ---------------------------------------------------------------- engines

encode = msgspec.msgpack.Encoder(enc_hook=to_wire).encode


class Inbox:
    """A ring's Reader."""

    def __init__(self) -> None:
        self.frames: queue.Queue[bytes] = queue.Queue()

    def receive(self) -> bytes:
        return self.frames.get()

    def echo(self) -> None:
        pass


class ThreadRanks:
    """What Ranks is to a LeadingRunner. `told`: every message."""

    def __init__(self, inboxes: list[Inbox]):
        self._inboxes, self.told = inboxes, list[ToRank]()
        self.death: BaseException | None = None  # why they have ended

    def tell(self, message: ToRank) -> None:
        self.check()
        self.told.append(message)
        frame = encode(message)
        for inbox in self._inboxes:
            inbox.frames.put(frame)

    def check(self) -> None:
        if self.death is not None:
            raise EngineDeadError(str(self.death))

    def give_up(self, error: BaseException) -> BaseException:
        self.end()
        self.death = error
        return error

    def end(self) -> None:
        if self.death is None:
            self.tell(End())


@contextmanager
def ranked_core(model: str, size: int, change: Callable[[Worker], object] | None = None, **options) -> Iterator[EngineCore]:
    """As engine_driver.make_core, of `size` ranks: the core with rank 0 here, the others in threads of their own, which do what
    they are told. `change`: what is done to each rank's worker first."""
    small = {"max_num_seqs": 8, "max_model_len": 128, "num_kv_blocks": 256, "block_size": 8}
    options = small | {"device": "cpu", "dtype": "float32", "debug_checks": True, "tensor_parallel_size": size} | options
    config = EngineConfig(model=model, **options)
    checkpoint = resolve_checkpoint(config)
    whole, groups = model_config_from_hf(checkpoint.config), ThreadGroup.of(size)
    ranks = ThreadRanks(inboxes := [Inbox() for _ in groups[1:]])
    errors: list[BaseException] = []

    def build(group: ThreadGroup) -> Worker:
        worker = build_worker(config, checkpoint, whole, torch.device("cpu"), group)
        if change is not None:
            change(worker)
        return worker

    def be_another(group: ThreadGroup) -> None:
        try:
            decoder = msgspec.msgpack.Decoder(ToRank, dec_hook=from_wire)
            obey(build(group).runner, inboxes[group.shard.rank - 1], decoder)
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=be_another, args=(group,), daemon=True) for group in groups[1:]]
    for thread in threads:
        thread.start()
    try:
        worker = build(groups[0])
        runner = LeadingRunner(worker.runner, cast(Ranks, ranks))
        structured = structured_output(config, whole, worker.tokenizer)
        speculator = make_speculator(config, worker.limits, structured, worker.runner.drafter, torch.device("cpu"))
        yield EngineCore(
            Scheduler(worker.limits), runner, vocab_size=whole.vocab_size, debug_checks=True,
            async_scheduling=config.async_scheduling, structured=structured, speculator=speculator,
        )  # fmt: skip
    except threading.BrokenBarrierError:
        raise errors[0] if errors else AssertionError("rank 0 waited for the others in vain") from None
    finally:
        ranks.end()
        for thread in threads:
            thread.join(60)
    assert not errors, errors
    assert len({group.calls for group in groups}) == 1, "all said the same"
