"""A trace of steps and requests for Perfetto (ui.perfetto.dev) or chrome://tracing.

    track "steps"     step | schedule | launch | wait | settle    slices of a core's loop, with tokens and sequences
    track "requests"  queue | prefill | decode                    asynchronous slices, one row for each request

The file is a complete JSON document after every flush: its end is written behind the events and overwritten by the next
ones. So it can be read while the server runs, and whatever ends the server.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.messages import EngineOutput
from headrace.engine.stats import StepTrace
from headrace.engine.streams import Stream
from headrace.errors import ParameterError

logger = logging.getLogger(__name__)
FLUSH_SECONDS = 1.0
FLUSH_EVENTS = 4096
HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'
TAIL = b"\n]}\n"
CORE, REQUESTS = 1, 2  # process ids of the tracks; that of core n > 0 is REQUESTS + n


class TraceFile:
    """An `engine.client.Observer` that writes. Memory is bounded by FLUSH_EVENTS, the file by `max_bytes`."""

    def __init__(self, path: str | Path, max_bytes: int = 2**30):
        try:
            self._file = open(path, "w+b")  # noqa: SIM115  (closed by close)
        except OSError as e:
            raise ParameterError("--trace", str(path), f"a file that can be written ({e.strerror or e})") from None
        self.path, self.max_bytes = path, max_bytes
        self._encoder = msgspec.json.Encoder()
        self._events: list[bytes] = []
        self._first = True
        self._flushed = self._zero = time.monotonic()
        self._gauges: dict[int, tuple[int, int, float]] = {}  # by process id
        self._file.write(HEAD)
        self._name(CORE, "engine")
        self._name(REQUESTS, "requests")
        self._add({"ph": "M", "name": "thread_name", "pid": CORE, "tid": 1, "args": {"name": "steps"}})
        self._known = {CORE}
        self.flush()

    # ---------------------------------------------------------------- told by the engine's client

    def steps(self, steps: list[StepTrace], core: int = 0) -> None:
        pid = CORE if core == 0 else REQUESTS + core
        if pid not in self._known:
            self._known.add(pid)
            self._name(pid, f"core {core}")
        for step in steps:
            parts = (("schedule", step.schedule), ("launch", step.launch), ("wait", step.wait), ("settle", step.settle))
            counts = {"tokens": step.num_tokens, "seqs": step.num_seqs}
            at = step.began
            self._slice(pid, f"{step.num_seqs} seqs, {step.num_tokens} tokens", at, sum(s for _, s in parts), counts)
            for name, seconds in parts:
                if seconds > 0:
                    self._slice(pid, name, at, seconds, counts)
                    at += seconds
            gauges = (step.running, step.waiting, step.kv_usage)
            if gauges != self._gauges.get(pid):
                self._gauges[pid] = gauges
                self._counter(pid, "requests", step.began, {"running": step.running, "waiting": step.waiting})
                self._counter(pid, "KV usage", step.began, {"used": step.kv_usage})
        self._flush_if_due()

    def tokens(self, stream: Stream, count: int, now: float) -> None:
        pass  # the phases of a request are written when it has ended

    def ended(self, stream: Stream, news: EngineOutput, now: float) -> None:
        request = stream.request
        facts = {
            "prompt_tokens": len(request.prompt_ids), "output_tokens": len(request.output_ids),
            "cached_tokens": news.num_cached_tokens, "finish_reason": news.finish_reason, "interrupted": stream.interrupted,
        }  # fmt: skip
        first = stream.first or now
        # a request that was interrupted queued more than once: only its arrival, its first token and its end are known
        admitted = stream.arrival if news.times is None or stream.interrupted else stream.arrival + news.times.queue
        admitted = min(admitted, first)
        self._phase(request.id, request.id, stream.arrival, now, facts)
        for name, start, stop in (("queue", stream.arrival, admitted), ("prefill", admitted, first), ("decode", first, now)):
            if stop > start:
                self._phase(request.id, name, start, stop, {})
        self._flush_if_due()

    # ---------------------------------------------------------------- events

    def _name(self, pid: int, name: str) -> None:
        self._add({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})

    def _slice(self, pid: int, name: str, start: float, seconds: float, args: dict[str, Any]) -> None:
        times = {"ts": self._us(start), "dur": round(seconds * 1e6, 1)}
        self._add({"ph": "X", "name": name, "pid": pid, "tid": 1, **times, "args": args})

    def _counter(self, pid: int, name: str, at: float, values: dict[str, float]) -> None:
        self._add({"ph": "C", "name": name, "pid": pid, "ts": self._us(at), "args": values})

    def _phase(self, request_id: str, name: str, start: float, stop: float, args: dict[str, Any]) -> None:
        common = {"cat": "request", "name": name, "id": request_id, "pid": REQUESTS, "tid": 0}
        self._add({"ph": "b", **common, "ts": self._us(start), "args": args})
        self._add({"ph": "e", **common, "ts": self._us(stop)})

    def _us(self, at: float) -> float:
        return round((at - self._zero) * 1e6, 1)

    def _add(self, event: dict[str, Any]) -> None:
        if len(self._events) < FLUSH_EVENTS:
            self._events.append(self._encoder.encode(event))
        if len(self._events) == FLUSH_EVENTS:
            self.flush()

    def _flush_if_due(self) -> None:
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what there is. An error or the size limit ends the trace, not the server."""
        self._flushed = time.monotonic()
        events, self._events = self._events, []
        if not events or self._file.closed:
            return
        data = (b"" if self._first else b",\n") + b",\n".join(events) + TAIL
        try:
            if not self._first:
                self._file.seek(-len(TAIL), 2)
            if self._file.tell() + len(data) > self.max_bytes:
                logger.warning("the trace %s has reached %d bytes and ends here", self.path, self.max_bytes)
                self._end()
                return
            self._file.write(data)
            self._file.flush()
            self._first = False
        except OSError as e:
            logger.warning("the trace %s ends here: %s", self.path, e)
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # it tries once more to write what it has
            self._file.close()

    def close(self) -> None:
        self.flush()
        self._end()
