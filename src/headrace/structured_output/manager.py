"""Grammars of the running requests: compiled off the loop, one matcher for each output, masks for a step's rows.

Compilation runs in a few threads with a time limit; a request enters the scheduler when its grammar is there. A failure is
the error of that request alone. Compiled grammars are kept in an LRU cache bounded by the bytes of their texts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import HeadraceError, ParameterError
from headrace.structured_output.params import StructuredOutputsParams

if TYPE_CHECKING:
    from headrace.structured_output.llguidance_backend import LLGuidance, Matcher

# for (row) [Q] int64: bits [Q, ceil(V / 32)] int32, and the rows after which only the end may follow
GrammarMasks = tuple[np.ndarray, np.ndarray, set[int]]
COMPILE_SECONDS = 10.0
CACHE_BYTES = 8 << 20
THREADS = 2


@dataclass(slots=True)
class _Job:
    key: str
    future: Future[Matcher]
    deadline: float
    item: Any  # what waits for it


class StructuredOutput:
    """Compiles wishes and keeps the matchers of live requests. All methods belong to the core's thread."""

    def __init__(self, make_backend: Callable[[], LLGuidance], vocab_size: int):
        self._make_backend = make_backend
        self._backend: LLGuidance | None = None
        self._words = -(-vocab_size // 32)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._jobs: list[_Job] = []
        self._cache: OrderedDict[str, Matcher] = OrderedDict()
        self._cache_bytes = 0
        self._matchers: dict[str, Matcher] = {}

    @property
    def compiling(self) -> bool:
        return bool(self._jobs)

    def compile(self, wish: StructuredOutputsParams, item: Any) -> None:
        """Start to compile; `item` comes back from `compiled`."""
        key = wish.key()
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            future: Future[Matcher] = Future()
            future.set_result(known)
        else:
            future = self._pool.submit(self._compile, wish)
        self._jobs.append(_Job(key, future, time.monotonic() + COMPILE_SECONDS, item))

    def compiled(self) -> list[tuple[Any, Matcher | HeadraceError]]:
        """The items whose grammar is there, or failed, since the last call."""
        done: list[tuple[Any, Matcher | HeadraceError]] = []
        rest = []
        for job in self._jobs:
            if job.future.done():
                error = job.future.exception()
                if error is None:
                    self._keep(job.key, job.future.result())
                    done.append((job.item, job.future.result().fork()))
                else:
                    known = isinstance(error, HeadraceError)
                    done.append((job.item, error if known else _failed(f"{type(error).__name__}: {error}")))
            elif time.monotonic() > job.deadline:
                job.future.cancel()
                done.append((job.item, _failed(f"it takes longer than {COMPILE_SECONDS:g} s")))
            else:
                rest.append(job)
        self._jobs = rest
        return done

    def forget_jobs(self, unwanted: Callable[[Any], bool]) -> None:
        """Drop what nobody waits for any more."""
        self._jobs = [job for job in self._jobs if not unwanted(job.item)]

    def start(self, request_id: str, matcher: Matcher, output_ids: Sequence[int]) -> None:
        """A request enters the engine, perhaps with a part of its output. Raises ParameterError if that does not fit."""
        if output_ids and not matcher.accept(output_ids):
            raise _failed("the output so far does not follow it")
        self._matchers[request_id] = matcher

    def has(self, request_id: str) -> bool:
        return request_id in self._matchers

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """These were sampled (under the masks, so they fit)."""
        matcher = self._matchers.get(request_id)
        if matcher is not None and not matcher.ended:
            matcher.accept(token_ids)

    def end(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)

    def masks(self, rows: Sequence[tuple[int, str]]) -> GrammarMasks:
        """For (row, request id) pairs: rows [Q] int64, bits [Q, words] int32, and the rows where only the end may follow."""
        bits = np.zeros((len(rows), self._words), np.int32)
        ended = set()
        for i, (row, request_id) in enumerate(rows):
            matcher = self._matchers[request_id]
            matcher.fill(bits[i])
            if matcher.ended:
                ended.add(row)
        return np.asarray([row for row, _ in rows], np.int64), bits, ended

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, wish: StructuredOutputsParams) -> Matcher:
        if self._backend is None:
            self._backend = self._make_backend()  # two threads may make one each: the same, and only at the beginning
        return self._backend.compile(wish)

    def _keep(self, key: str, matcher: Matcher) -> None:
        if key in self._cache:
            return
        self._cache[key] = matcher
        self._cache_bytes += len(key)
        while self._cache_bytes > CACHE_BYTES and len(self._cache) > 1:
            old, _ = self._cache.popitem(last=False)
            self._cache_bytes -= len(old)


def _failed(why: str) -> ParameterError:
    return ParameterError("structured_outputs", "a grammar", f"what can be compiled and followed ({why})")
