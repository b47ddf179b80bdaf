"""Grammars of the running requests: compiled off the loop, one matcher for each output, masks for a step's rows.

Compilation runs in a few threads, each after a trial in a process of its own (see trial.py); a request enters the scheduler
when its grammar is there. A failure is the error of that request alone. Compiled grammars, and refusals, are kept in an LRU
cache that is bounded in number and in bytes of the specs' texts.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import HeadraceError, ParameterError
from headrace.sampling.structured_outputs import StructuredOutputsParams
from headrace.structured_output.trial import Trial

if TYPE_CHECKING:
    from headrace.structured_output.llguidance_backend import LLGuidance, Matcher

COMPILE_SECONDS = 60.0  # with the trial, which has a limit of its own
CACHE_BYTES = 8 << 20
CACHE_GRAMMARS = 256
THREADS = 2
STACK_BYTES = 16 << 20  # of the threads that compile: more than the trial has


@dataclass(slots=True)
class GrammarMasks:
    """What the grammars allow in some of a step's rows."""

    rows: np.ndarray  # [Q] int64: of the logits
    bits: np.ndarray  # [Q, ceil(V / 32)] int32
    must_end: set[int]  # the rows in which only the end may follow


@dataclass(slots=True)
class _Job:
    key: str
    future: Future[Matcher | ParameterError]
    item: Any  # what waits for it
    began: float = 0.0  # 0: it waits for a thread


class StructuredOutput:
    """Compiles grammar specs and keeps the matchers of live requests. All methods belong to the core's thread."""

    def __init__(self, make_backend: Callable[[Sequence[int]], LLGuidance], vocab_size: int):
        """`make_backend` is given the end tokens, which the first spec brings with it."""
        self._make_backend = make_backend
        self._backend: LLGuidance | None = None
        self._words = -(-vocab_size // 32)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._jobs: list[_Job] = []
        self._local = threading.local()  # each thread's Trial
        self._trials: list[Trial] = []
        self._cache: OrderedDict[str, Matcher | ParameterError] = OrderedDict()
        self._cache_bytes = 0
        self._matchers: dict[str, Matcher] = {}
        self._followed: dict[str, int] = {}  # tokens of the output that a matcher has been led past

    @property
    def compiling(self) -> bool:
        return bool(self._jobs)

    def compile(self, spec: StructuredOutputsParams, item: Any, end_token_ids: Sequence[int]) -> None:
        """Start to compile; `item` comes back from `compiled`. The end tokens are the same for all requests of an engine."""
        key = spec.key()
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            future: Future[Matcher | ParameterError] = Future()
            future.set_result(known)
        else:
            same = [job.future for job in self._jobs if job.key == key]
            future = same[0] if same else self._submit(spec, end_token_ids)
        self._jobs.append(_Job(key, future, item))

    def compiled(self) -> list[tuple[Any, Matcher | HeadraceError]]:
        """The items whose grammar is there, or failed, since the last call."""
        done: list[tuple[Any, Matcher | HeadraceError]] = []
        rest = []
        now = time.monotonic()
        for job in self._jobs:
            if job.future.done():
                done.append((job.item, self._result(job)))
                continue
            if not job.began and job.future.running():
                job.began = now
            if job.began and now - job.began > COMPILE_SECONDS:
                done.append((job.item, _failed(f"it takes longer than {COMPILE_SECONDS:g} s")))
            else:
                rest.append(job)
        self._jobs = rest
        return done

    @property
    def waiting(self) -> list[Any]:
        """The items whose grammar is not there yet."""
        return [job.item for job in self._jobs]

    def forget_jobs(self, unwanted: Callable[[Any], bool]) -> list[Any]:
        """Drop what nobody waits for any more; returns the items."""
        dropped = [job.item for job in self._jobs if unwanted(job.item)]
        self._jobs = [job for job in self._jobs if not unwanted(job.item)]
        return dropped

    def start(self, request_id: str, matcher: Matcher, num_output: int) -> None:
        """A request has entered the engine, its matcher at the end of the output that there is."""
        self._matchers[request_id], self._followed[request_id] = matcher, num_output

    @property
    def has_any(self) -> bool:
        return bool(self._matchers)

    def matcher(self, request_id: str) -> Matcher | None:
        """Where an output stands after its settled ids; None if it has no grammar. Not to be moved by others."""
        return self._matchers.get(request_id)

    def follow(self, request_id: str, output_ids: Sequence[int]) -> None:
        """Lead a matcher, if the request has one, to the end of its output (sampled under the masks, so it fits)."""
        matcher, begin = self._matchers.get(request_id), self._followed.get(request_id, 0)
        if matcher is not None and begin < len(output_ids):
            self._followed[request_id] = len(output_ids)
            if not matcher.ended:
                matcher.accept(output_ids[begin:])

    def end(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)
        self._followed.pop(request_id, None)

    def error(self, request_id: str) -> str | None:
        """Why this output cannot go on: its grammar has met a limit of the parser."""
        matcher = self._matchers.get(request_id)
        return None if matcher is None else matcher.error

    def allowed(self, request_id: str) -> set[int] | None:
        """What may follow after its settled ids; None if it has no grammar."""
        if (matcher := self._matchers.get(request_id)) is None:
            return None
        mask = np.zeros(self._words, np.int32)
        matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    def masks(self, rows: Sequence[tuple[int, str, Sequence[int]]]) -> GrammarMasks:
        """For (row, request id, drafts).

        A matcher in error allows nothing, which fails its row. Drafts have a row each, after that of their request.
        """
        assert self._backend is not None
        bits = np.zeros((len(rows), self._words), np.int32)
        matchers = [self._matchers[request_id] for _, request_id, _ in rows]
        self._backend.fill(matchers, bits)
        ended = {row for (row, _, _), matcher in zip(rows, matchers, strict=True) if matcher.ended}
        places = [row for row, _, _ in rows]
        further = []
        for (row, _, drafts), matcher in zip(rows, matchers, strict=True):
            ahead = matcher.fork() if drafts else matcher  # guesses must not bring the output's own matcher to a limit
            for i, draft in enumerate(drafts, 1):
                ahead.accept([draft])
                mask = np.zeros(self._words, np.int32)
                ahead.fill(mask)
                further.append(mask)
                places.append(row + i)
                if ahead.ended:
                    ended.add(row + i)
        return GrammarMasks(np.asarray(places, np.int64), np.concatenate([bits, further]) if further else bits, ended)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _submit(self, spec: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Future[Matcher | ParameterError]:
        before = threading.stack_size(STACK_BYTES)  # the pool starts its threads in submit
        try:
            return self._pool.submit(self._compile, spec, end_token_ids)
        finally:
            threading.stack_size(before)

    def _compile(self, spec: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher | ParameterError:
        if self._backend is None:  # two threads may make one each: the same, and only at the beginning
            self._backend = self._make_backend(end_token_ids)
        trial = getattr(self._local, "trial", None)
        if trial is None:
            trial = self._local.trial = Trial(self._backend.spec)
            self._trials.append(trial)
        try:
            trial.check(spec)
            return self._backend.compile(spec)
        except ParameterError as e:
            return e

    def _result(self, job: _Job) -> Matcher | HeadraceError:
        error = job.future.exception()
        if error is not None:  # not the spec's fault: it may work the next time
            return _failed(f"{type(error).__name__}: {error}")
        found = job.future.result()
        self._keep(job.key, found)
        return found if isinstance(found, ParameterError) else found.fork()

    def _keep(self, key: str, found: Matcher | ParameterError) -> None:
        if key in self._cache:
            return
        self._cache[key] = found
        self._cache_bytes += len(key)
        while len(self._cache) > 1 and (self._cache_bytes > CACHE_BYTES or len(self._cache) > CACHE_GRAMMARS):
            old, _ = self._cache.popitem(last=False)
            self._cache_bytes -= len(old)


def follow(matcher: Matcher, output_ids: Sequence[int]) -> None:
    """Lead a matcher past the part of an output that there is already. Raises ParameterError if that does not fit."""
    if output_ids and not matcher.accept(output_ids):
        raise _failed("the output so far does not follow it")


def _failed(why: str) -> ParameterError:
    return ParameterError("structured_outputs", "a grammar", f"what can be compiled and followed ({why})")
