"""The core's own process: messages in, steps, messages out. It never shares an interpreter lock with HTTP.

Started by `engine.core_process` as `python -m headrace.engine.process IN OUT PARENT BUILDER LOGLEVEL LOGFORMAT TRACED STANDBY
DEVICE`. The first message is empty, the second a Begin; meanwhile everything is imported, so that a process can wait there till
it is needed. A DEVICE is named where the wait is short; STANDBY is 1 where it may never end. It ends with its parent, whatever
ended that: the kernel is asked to, and a thread looks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from headrace.cache.recorded_tree import RecordedTree
from headrace.config import EngineConfig, prepare_threads, show_cards
from headrace.engine.messages import Outputs
from headrace.engine.news_pipe import PipeInlet
from headrace.engine.socket_pair import connect_pair
from headrace.engine.standing_by import Unhurried, import_quietly
from headrace.engine.stats import CoreStats, StepTrace
from headrace.engine.wire import (
    Abort,
    Add,
    Begin,
    Fatal,
    FromCore,
    Heartbeat,
    LoadAdapter,
    News,
    Progress,
    Ready,
    Shutdown,
    ToCore,
    UnloadAdapter,
    Watch,
    from_wire,
)
from headrace.errors import EngineDeadError, HeadraceError
from headrace.logs import configure, rename
from headrace.parent import end_with_parent, leave_signals_to_parent
from headrace.prewarm import prewarm

if TYPE_CHECKING:  # imports torch, which takes seconds: the sockets are connected before
    from headrace.engine.build import Engine
    from headrace.engine.core import EngineCore
    from headrace.engine.glass import GlassObserver
    from headrace.tensor_parallel.ranks import Death
    from headrace.worker.reading import Reading

logger = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 0.5
STATS_SECONDS = 0.1
IDLE_POLL_MS = 100
QUIET_SECONDS = 1.0  # without a step until idle time is used: who comes meanwhile has to wait
NEW_OBJECTS = 250_000  # some tens of MB, if all of them were garbage in cycles
LAST_WORDS_SECONDS = 0.05  # for the socket's own thread to send them: it does not say when it has
READABLE = int(zmq.POLLIN)


class Inbox:
    """What a core reads. That nothing has come is known, in every step, by one system call: the queue itself makes several."""

    def __init__(self, socket: zmq.Socket):
        self._socket, self._signal = socket, select.poll()
        self._signal.register(socket.fileno(), select.POLLIN)  # raised by what comes after the queue was found empty
        self._empty = False

    def take(self) -> bytes | None:
        """The next message that is there."""
        if self._empty and not self._signal.poll(0):
            return None
        self._empty = not int(self._socket.get(zmq.EVENTS)) & READABLE
        return None if self._empty else self._socket.recv()

    def wait(self, milliseconds: int) -> None:
        """Until there is one, or so long."""
        self._empty = not self._socket.poll(milliseconds)


class CoreLoop:
    """Feeds one EngineCore from a socket and sends what it has to say."""

    def __init__(
        self, core: EngineCore, inbox: Inbox, send: Callable[[FromCore], None], traced: bool = False,
        reading: Reading | None = None,
    ):  # fmt: skip
        self.core, self.inbox, self.send = core, inbox, send
        self.stats = CoreStats()
        self.steps: list[StepTrace] | None = [] if traced else None
        self.step_began = 0.0  # time.monotonic(), 0 between steps; read by the heartbeat's thread
        self._decoder = msgspec.msgpack.Decoder(ToCore, dec_hook=from_wire)
        self._stats_sent, self._stats_due = 0.0, True
        self._stepped = -math.inf  # time.monotonic() of the last step
        tree = core.scheduler.tree
        self._recorded = tree if isinstance(tree, RecordedTree) else None
        self.glass: GlassObserver | None = None  # while somebody looks
        self._reading = reading

    def run(self) -> None:
        """Until a Shutdown comes."""
        self._say(Outputs(), None)  # who balances by the blocks knows from now on that there are none
        while self.turn():
            pass

    def turn(self) -> bool:
        """Take messages, step once, say what came of it. False: a Shutdown came."""
        is_quiet = time.monotonic() - self._stepped > QUIET_SECONDS
        busy = self.core.has_work or (is_quiet and self.core.idle())
        if not self._receive(wait=not busy):
            return False
        if self.core.adapters is not None and self.core.adapters.turn():
            self.stats.adapters, self._stats_due = dict(self.core.adapters.state), True
        outputs = self._step() if self.core.has_work else Outputs()
        now = time.monotonic()
        stats = None
        if self._stats_due and (now - self._stats_sent > STATS_SECONDS or not self.core.has_work):  # an end finds all counted
            stats, self._stats_sent, self._stats_due = self._snapshot(), now, False
        self._say(outputs, stats)
        return True

    def _say(self, outputs: Outputs, stats: CoreStats | None) -> None:
        """Send what there is to say, if there is anything."""
        blocks = None if self._recorded is None else self._recorded.events()
        glimpse = None if self.glass is None else self.glass.turned()
        if outputs or stats is not None or blocks is not None or glimpse is not None:
            self.send(News(outputs, stats, self.steps, blocks, glimpse))
            if self.steps:
                self.steps = []

    def _step(self) -> Outputs:
        times = self.core.times
        times.wait = times.settle = 0.0  # a step that has no other to settle leaves them
        times.num_tokens = times.num_seqs = 0
        began = self.step_began = self._stepped = time.monotonic()
        outputs = self.core.step()
        self.step_began = 0.0
        self._stats_due = True
        self._count()
        # a failure that came out of a step has times, a refusal has none; a stop_reason is what of the request is to blame
        failures = [o for o in outputs.news if o.finish_reason == "error" and o.times is not None and o.stop_reason is None]
        self.stats.nan_failures += len(failures)
        if self.steps is not None and (times.num_seqs or times.wait):
            now = self.core.scheduler
            self.steps.append(
                StepTrace(
                    began, times.schedule, times.launch, times.wait, times.settle, times.num_tokens, times.num_seqs,
                    now.num_running, now.num_waiting, now.kv_usage,
                )
            )  # fmt: skip
        return outputs

    def _receive(self, wait: bool) -> bool:
        """Take all messages there are; False when one of them was the end."""
        if wait:
            self.inbox.wait(IDLE_POLL_MS)
        while (data := self.inbox.take()) is not None:
            message = self._decoder.decode(data)
            if isinstance(message, Shutdown):
                return False
            self._stats_due = True
            if isinstance(message, Abort):
                for request_id in message.ids:
                    self.core.abort(request_id)
            elif isinstance(message, Watch):
                self._watch(message.on)
            elif isinstance(message, LoadAdapter | UnloadAdapter):
                self._change(message)
            elif isinstance(message, Add):
                try:
                    if (adapter := message.request.params.lora) and self.core.adapters is not None:
                        self.core.adapters.wait(adapter)
                    self.core.add(message.request)
                except HeadraceError as e:
                    from headrace.engine.outputs import refused

                    self.send(News(Outputs(news=[refused(message.request.id, e)])))
        return True

    def _change(self, message: LoadAdapter | UnloadAdapter) -> None:
        adapters = self.core.adapters
        assert adapters is not None
        if isinstance(message, LoadAdapter):
            adapters.begin(message.version)
        else:
            adapters.unload(message.digest)

    def _watch(self, on: bool) -> None:
        glass = self.glass
        if glass is not None and (not on or glass.broken):
            glass.close()
            self.glass = None
        if on and self.glass is not None:
            self.glass.want_snapshot()
        elif on:
            from headrace.engine.glass import GlassObserver

            self.glass = GlassObserver(self.core, self._reading)

    def _count(self) -> None:
        times, stats = self.core.times, self.stats
        stats.schedule_seconds += times.schedule
        stats.launch_seconds += times.launch
        stats.wait_seconds += times.wait
        stats.settle_seconds += times.settle
        stats.scheduled_tokens += times.num_tokens

    def _snapshot(self) -> CoreStats:
        stats, now = self.stats, self.core.scheduler
        stats.running, stats.waiting, stats.kv_usage = now.num_running, now.num_waiting, now.kv_usage
        stats.steps, stats.preemptions = self.core.steps, now.stats.num_preemptions
        stats.prefix_queries, stats.prefix_hits = now.stats.prefix_query_tokens, now.stats.prefix_hit_tokens
        if self.core.speculator is not None:
            seen = self.core.speculator.stats
            stats.drafts, stats.draft_tokens = seen.num_drafts, seen.num_draft_tokens
            stats.accepted_tokens = seen.num_accepted_tokens
            stats.accepted_per_position = list(seen.accepted_per_position)
        return stats


def watch(
    loop_of: Callable[[], CoreLoop | None], begun: threading.Event, send: Callable[[FromCore], None], parent: int
) -> None:
    """The heartbeat: says that the process lives and how long its loop has been busy; ends it with its parent."""
    while True:
        if os.getppid() != parent:
            os._exit(1)
        if begun.is_set():  # nobody listens to a process that waits
            loop = loop_of()
            began = loop.step_began if loop is not None else 0.0
            send(Heartbeat(time.monotonic() - began if began else 0.0))
        time.sleep(HEARTBEAT_SECONDS)


def connect(context: zmq.Context, address: str, parent: int) -> zmq.Socket:
    """The inbox, connected; the first message, which says so, has been taken."""
    inbox = context.socket(zmq.PULL)
    inbox.set_hwm(0)  # bounded by the requests in flight, which admission bounds
    connect_pair(inbox, None, address, "", parent)
    inbox.recv()
    return inbox


def main(inbox_address: str, outbox: int, parent: int, builder: str, traced: bool, standby: bool, device: str) -> int:
    leave_signals_to_parent()
    inlet = PipeInlet(outbox)
    prepare_threads()
    gc.disable()  # until all is there: nothing of it goes, and looking through it takes tenths of a second
    if device:
        prewarm(device)
    # who has started us may be at its own imports
    if not standby:
        threading.Thread(target=import_quietly, args=(builder.partition(":")[0],), daemon=True).start()
    context = zmq.Context()
    return serve(context, connect(context, inbox_address, parent), inlet, parent, builder, traced, standby)


def serve(
    context: zmq.Context, inbox: zmq.Socket, outbox: zmq.Socket | PipeInlet, parent: int, builder: str, traced: bool,
    standby: bool = False,
) -> int:  # fmt: skip
    """Wait for the options, build the engine and run it; the exit code."""
    end_with_parent()
    logging.getLogger("headrace.engine.preparation").setLevel(logging.INFO)  # how far a start is, is told at every level
    encoder, lock = msgspec.msgpack.Encoder(), threading.Lock()

    def send(message: FromCore) -> None:
        with lock, contextlib.suppress(zmq.Again):  # two threads send
            outbox.send(encoder.encode(message))

    def end_with_ranks(death: Death) -> None:
        """Other ranks of this core are dead, and a step that waits for them never ends: this process does, in any thread."""
        send(Fatal(death.why, permanent=False))
        time.sleep(LAST_WORDS_SECONDS)
        if death.killed:  # by somebody: no request's doing (see engine.probation)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)

    loop: CoreLoop | None = None
    begun = threading.Event()
    threading.Thread(target=watch, args=(lambda: loop, begun, send, parent), daemon=True).start()
    try:
        module, _, function = builder.partition(":")
        imports = Unhurried(module) if standby else None
        config = take_place(inbox.recv()) if standby or inbox.poll(0) else None  # None: it is not known yet
        if imports is not None:
            imports.hurry()
        elif config is not None:
            prewarm(config.device)
        build = getattr(importlib.import_module(module), function)
        config = config or take_place(inbox.recv())
        begun.set()
        engine = build(config)
        if engine.ranks is not None:  # what is captured and answered before the first request waits for them, too
            engine.ranks.on_death(end_with_ranks)
        engine.prepare(lambda *progress: send(Progress(*progress)))
        spare_collections()
        loop = CoreLoop(engine.core, Inbox(inbox), send, traced, engine.reading)
        send(ready(engine))
        loop.run()
        return 0
    except HeadraceError as e:
        send(Fatal(str(e), permanent=loop is None and not isinstance(e, EngineDeadError)))
        return 2
    except Exception as e:
        logger.exception("the engine core fails")
        send(Fatal(f"{type(e).__name__}: {e}", permanent=False))
        return 3
    finally:
        outbox.close()
        context.destroy(linger=1000)


def ready(engine: Engine) -> Ready:
    limits = engine.core.scheduler.limits
    return Ready(
        max_model_len=limits.max_model_len, vocab_size=engine.model.vocab_size, block_size=limits.block_size,
        num_blocks=limits.num_blocks, max_num_seqs=limits.max_num_seqs, device=str(engine.device), dtype=str(engine.dtype),
        load_seconds=engine.load_seconds, weights=engine.weights,
    )  # fmt: skip


def spare_collections() -> None:
    """Collections of garbage look through nothing that is there now, which takes 0.1 s in the middle of a step, and come when
    so many objects have been made that did not go. Requests leave no cycles, but a prefix index that is full is young all the
    time: one of 17,000 blocks was looked through every 800 requests, for 8 ms."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    gc.enable()


def take_place(message: bytes) -> EngineConfig:
    """Be where this core is to run, before anything asks what the machine has; what it is to do there."""
    begin = msgspec.msgpack.decode(message, type=Begin)
    config, place = begin.config, begin.place
    if place.name is not None:
        rename(place.name)
    if place.cards is not None:
        show_cards(place.cards)
    if place.cpus is not None and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, place.cpus)  # of this thread, and so of all that it will start
        except OSError as e:  # they were this process's when the server started
            logger.warning("this core runs on whichever of the CPU's cores it gets: %s", e)
    return replace(config, threads=place.threads or config.threads, memory_bytes=place.memory or config.memory_bytes)


def leave(code: int) -> NoReturn:
    """Taking an interpreter with torch in it to pieces takes a second or more, and nobody needs that."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    configure("core", *sys.argv[5:7])
    traced, standby = (argument == "1" for argument in sys.argv[7:9])
    leave(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], traced, standby, sys.argv[9]))
