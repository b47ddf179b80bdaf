"""Grammars are tried in a process of their own before the engine compiles them: there, time, memory and a crash cost nothing.

The compiler is fast and bounds most of what it does, but not all: some grammars keep it busy for ever, some (a chain of a
thousand references) overflow its stack, which ends the process. So each new spec is first compiled, and followed for a few
tokens, by a child that can be killed.

    Trial.check(spec) ---- msgpack, length first ----> main(): compile, walk ----> "" or the reason
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
from typing import IO, Any

import msgspec

from headrace.config import environment_of_child, python_of_child
from headrace.errors import ParameterError
from headrace.sampling.structured_outputs import StructuredOutputsParams
from headrace.structured_output.reasons import reason_of, refused

SECONDS = 5  # of the processor: on a busy machine the clock says nothing about a grammar
WALL_SECONDS = 30.0
START_SECONDS = 60.0  # to load a large vocabulary on a busy machine
MEMORY_BYTES = 4 << 30  # of addresses
STACK_BYTES = 4 << 20  # half of what the engine's threads have


class Trial:
    """One child, started at the first spec and again after it died. Belongs to one thread."""

    def __init__(self, spec: Any):
        self._spec = spec  # BackendSpec
        self._child: subprocess.Popen[bytes] | None = None
        self._killed = False  # the last one, by somebody else: that says nothing about a spec

    def check(self, spec: StructuredOutputsParams) -> None:
        """Raises ParameterError with the reason why this spec cannot be had."""
        reply = self._tried(spec)
        if reply is None and self._killed:
            reply = self._tried(spec)
        if reply is None:
            raise refused(spec, f"it takes longer than {SECONDS} s, too much memory, or ends the compiler")
        if reply:
            raise refused(spec, reply)

    def _tried(self, spec: StructuredOutputsParams) -> str | None:
        if self._child is None:
            self._start()
        reply = self._ask((SECONDS, spec), WALL_SECONDS)
        if reply is None:
            self.close()
        return reply

    def _start(self) -> None:
        self._child = subprocess.Popen(
            python_of_child("-m", "headrace.structured_output.trial"), env=environment_of_child(), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if self._ask(list(self._spec), START_SECONDS) is None:
            self.close()
            raise RuntimeError("the process that tries grammars did not start")

    def _ask(self, message: Any, seconds: float) -> str | None:
        """Its answer, or None: it died, perhaps because its time was over."""
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        reply: str | None = None
        try:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                write_message(child.stdin, message)
                reply = read_message(child.stdout, str)
        finally:
            timer.cancel()
        if reply is None:
            child.kill()  # it is ending by itself, or says nothing that can be read
            self._killed = child.wait() == -signal.SIGKILL and not late.is_set()
        return reply

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def write_message(pipe: IO[bytes], message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(4, "little") + data)
    pipe.flush()


def read_message(pipe: IO[bytes], kind: Any) -> Any:
    """The next message, None at the end."""
    head = pipe.read(4)
    data = pipe.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    return msgspec.msgpack.decode(data, type=kind) if data else None


def limit_processor(seconds: int) -> None:
    """End this process when it has used as much more processor time (rounded up)."""
    if sys.platform != "win32":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    """Until standard input ends. No output but the replies: llguidance's messages go to standard error."""
    from headrace.structured_output.llguidance_backend import BackendSpec, LLGuidance

    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe_in, pipe_out = sys.stdin.buffer, sys.stdout.buffer
    backend = LLGuidance(*read_message(pipe_in, BackendSpec))
    write_message(pipe_out, "")

    def serve() -> None:
        while (message := read_message(pipe_in, tuple[int, StructuredOutputsParams])) is not None:
            seconds, spec = message
            limit_processor(seconds)
            try:
                backend.trial(spec)
                reply = ""
            except ParameterError as e:
                reply = reason_of(e)
            write_message(pipe_out, reply)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
