"""One core, many readers: whoever steps it, every reader gets the news of his own requests and of no others.

    generate -- Reader --\\                 /--> queue of that Reader
    stream ---- Reader ---> SharedCore ----+---> queue of that Reader
    score ----- Reader --/   one step      \\--> ...

A reader without news steps the core, and what the step brings goes to the queues of all. So one reader can be used inside
another one's loop, and each from a thread of its own. Who does not read while others step finds his tokens waiting: at most
all that his requests can have, which their `max_tokens` bounds.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.engine.fork import refuse_fork_of
from headrace.engine.interrupts import uninterrupted
from headrace.engine.messages import EngineOutput, EngineRequest, Outputs
from headrace.errors import EngineDeadError, HeadraceError, ParameterError

if TYPE_CHECKING:  # imports torch
    from headrace.engine.core import EngineCore

News = tuple[Any, EngineOutput]  # with the tag of the request that it is about


class SharedCore:
    """Owns the core's turns: one thread at a time is inside, those who wait take turns, and nobody waits to leave."""

    def __init__(self, core: EngineCore):
        self._core: EngineCore | None = core
        self._pid = os.getpid()
        self._names = itertools.count()
        self._inside = threading.Lock()  # held by whoever uses the core
        self._next = threading.Lock()  # held by the one who waits for it: who has just left cannot overtake him
        self._owner: int | None = None  # the thread inside
        self._sinks: dict[str, _Sink] = {}  # of the requests that have not ended
        self._token_to: dict[str, Callable[[int], None]] = {}  # their `token`: nearly all that a step brings
        self._left: deque[str] = deque()  # requests that nobody reads any more, to be aborted by the next one inside

    def new_name(self) -> str:
        """A request id that no other request of this core has or will have."""
        return str(next(self._names))

    @contextmanager
    def turn(self) -> Iterator[EngineCore]:
        """The core, for this thread alone. Raises EngineDeadError if it has been closed or belongs to another process."""
        self._enter()
        try:
            yield self._open_core()
        finally:
            self._exit()

    def _enter(self) -> None:
        refuse_fork_of(self._pid)
        this = threading.get_ident()
        if self._owner == this:
            raise HeadraceError("an LLM cannot be used from inside its own step, as by a logits processor of its own")
        with self._next:
            self._inside.acquire()
        self._owner = this

    def _exit(self) -> None:
        self._owner = None
        self._inside.release()
        if self._left:
            self.tidy()

    def _open_core(self) -> EngineCore:
        if self._core is None:
            raise EngineDeadError("this LLM has been closed")
        return self._core

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that owns the core."""
        return os.getpid() != self._pid

    def step(self, queue: deque[News]) -> None:
        """One step of the core, unless `queue` has news by the time it is this thread's turn."""
        self._enter()  # as turn(), which costs a generator: this is once per token
        try:
            core = self._open_core()
            if queue:
                return
            self._abort_left(core)
            if not core.has_work:
                raise EngineDeadError("the engine has lost a request: this is a fault of Headrace")
            self._deliver(core.step())
        finally:
            self._exit()

    def add(self, request: EngineRequest, sink: _Sink) -> None:
        """Raises ParameterError or CapacityError if it can never run."""
        with uninterrupted(), self.turn() as core:
            core.add(request)
            self._sinks[request.id], self._token_to[request.id] = sink, sink.token

    def leave(self, names: list[str]) -> None:
        """Nobody reads these any more. Never waits: a generator may be collected anywhere, even inside a step."""
        for name in names:
            self._forget(name)
        self._left.extend(names)
        self.tidy()

    def tidy(self) -> None:
        """Abort what has been left, unless somebody is inside, who will; with nothing else to run, wait for the device."""
        while self._left and not self.is_forked:
            with uninterrupted():
                if not self._inside.acquire(blocking=False):
                    return
                self._owner = threading.get_ident()
                try:
                    if self._core is None:
                        return self._left.clear()
                    self._abort_left(self._core)
                    while self._core.has_work and not self._sinks:
                        self._core.step()
                finally:
                    self._owner = None
                    self._inside.release()

    def close(self) -> None:
        """Nobody enters any more; readers that still have requests are told so when they ask for more."""
        with uninterrupted(), self.turn():
            self._core = None
            self._sinks.clear()
            self._token_to.clear()

    def _forget(self, name: str) -> _Sink | None:
        self._token_to.pop(name, None)
        return self._sinks.pop(name, None)

    def _abort_left(self, core: EngineCore) -> None:
        while self._left:
            core.abort(self._left.popleft())

    def _deliver(self, outputs: Outputs) -> None:
        token_to = self._token_to
        for name, token in zip(outputs.ids, outputs.tokens, strict=True):
            if (take := token_to.get(name)) is not None:
                take(token)
        for news in outputs.news:
            sink = self._sinks.get(news.id) if news.finish_reason is None else self._forget(news.id)
            if sink is not None:
                sink.news(news)


class Reader:
    """One caller's requests, and the news of them. A context manager: what still runs when he leaves is aborted."""

    def __init__(self, shared: SharedCore):
        self._shared = shared
        self._queue: deque[News] = deque()
        self._held: dict[str, list[int]] = {}  # of those that run: what waits for other news
        self._num_read = 0  # tokens
        self.running: set[str] = set()  # requests whose end has not been read

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        names, self.running = list(self.running), set()
        self._shared.leave(names)

    def add(self, request: EngineRequest, tag: Any, *, hold: bool = False) -> None:
        """Run this; its news come with `tag`. If they are to be held, tokens come only with other news, such as the end.

        Raises ParameterError or CapacityError if it can never run.
        """
        held: list[int] | None = [] if hold else None
        self._shared.add(request, _Sink(request.id, tag, self._queue, held))
        self.running.add(request.id)
        if held is not None:
            self._held[request.id] = held

    def num_tokens(self) -> int:
        """That its requests have: those that have been read, and those that are held."""
        return self._num_read + sum(map(len, self._held.values()))

    def news(self, after_step: Callable[[], None] | None = None) -> Iterator[News]:
        """Until all requests have ended.

        Raises what a request's own code raised, ParameterError for one that is refused late, EngineDeadError if the core is
        closed.
        """
        queue = self._queue
        while self.running:
            with uninterrupted() as interrupts:
                while not queue and not interrupts.pending:
                    self._shared.step(queue)
                    if after_step is not None:
                        after_step()
            while queue:
                tag, news = queue.popleft()
                if news.id not in self.running:  # it has been dropped
                    continue
                self._num_read += len(news.token_ids)
                if news.finish_reason is not None:
                    self._end(news.id)
                    if news.exception is not None:
                        raise news.exception
                    if news.refused is not None:
                        raise ParameterError(*news.refused)
                yield tag, news

    def drop(self, name: str) -> None:
        """Abort one that has all that is wanted of it."""
        self._end(name)
        self._shared.leave([name])

    def _end(self, name: str) -> None:
        self.running.discard(name)
        self._held.pop(name, None)


class _Sink:
    """Where the news of one request goes."""

    __slots__ = ("_held", "_name", "_queue", "_tag", "token")

    def __init__(self, name: str, tag: Any, queue: deque[News], held: list[int] | None):
        self._name, self._tag, self._queue, self._held = name, tag, queue, held
        self.token: Callable[[int], None] = self._pass if held is None else held.append

    def _pass(self, token: int) -> None:
        self._queue.append((self._tag, EngineOutput(self._name, [token])))

    def news(self, news: EngineOutput) -> None:
        if self._held is not None:
            self._held += news.token_ids
            if news.finish_reason is None and news.prompt_logprobs is None:
                return
            news.token_ids = self._held.copy()
            self._held.clear()
        self._queue.append((self._tag, news))
