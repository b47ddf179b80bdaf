"""`headrace run-batch`: answers a file of requests, many at a time, and goes on where an earlier run was interrupted."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from headrace.api.config import ServerConfig
from headrace.cli.batch_file import (
    MAX_LINE,
    BadLine,
    BatchLine,
    Ids,
    Output,
    OutputFile,
    OutputLine,
    Response,
    StandardOutput,
    error_of,
    parse,
    raw,
    read_lines,
)
from headrace.cli.options import add_engine_arguments, add_options, engine_options, server_options
from headrace.cli.parser import text
from headrace.cli.serve_options import ModelsOptions, ServeOptions
from headrace.cli.sources import add_config_file
from headrace.cli.streams import StreamError
from headrace.config import EngineConfig
from headrace.engine.supervision import BUILDER
from headrace.errors import EngineDeadError, HeadraceError, ParameterError

if TYPE_CHECKING:
    from starlette.applications import Starlette

SEATS = 256  # of a model among several that is yet to decide how many it has
AHEAD, AHEAD_BYTES = 64, 2 * MAX_LINE  # lines that are read before they are run, and what they may hold
ANSWERS = (  # options of a server that decide what an answer is
    "served_model_names", "any_model_name", "unknown_fields", "chat_template", "tool_parser", "reasoning_parser",
    "embedding_pooling", "score_method",
)  # fmt: skip
Post = Callable[[str, bytes], Awaitable[Response]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i", "--input", type=text, metavar="FILE", default="-", help="a request a line, as OpenAI's batches; -: stdin"
    )
    parser.add_argument(
        "-o", "--output", type=text, metavar="FILE", default="-",
        help="an answer a line, as they come; a file that is there is gone on with; -: stdout",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at a time (default: twice --max-num-seqs of each core)"
    )
    add_config_file(parser)
    add_options(parser, ServerConfig, *ANSWERS)
    add_options(parser, ModelsOptions)
    add_options(parser, EngineConfig, "data_parallel_size")
    add_engine_arguments(parser, again={"model": "models"})


def run(args: argparse.Namespace) -> int:
    if args.concurrency is not None and not 1 <= args.concurrency <= 65536:
        raise ParameterError("--concurrency", args.concurrency, "an integer in [1, 65536]")
    with _input(args.input) as source, _output(args) as output:
        config = server_config(args)
        batch = Batch(output, args.concurrency or 0, _count(args.input))
        try:
            asyncio.run(_answer(args, config, batch, source))
        finally:
            batch.tell()
    return 1 if batch.num_failed else 0


def server_config(args: argparse.Namespace) -> ServerConfig:
    return ServerConfig(**server_options(args), max_queued_requests=None, responses_store_bytes=0)


async def _answer(args: argparse.Namespace, config: ServerConfig, batch: Batch, source: BinaryIO) -> None:
    """The application and its engine, without a network between them and the file."""
    from headrace.api.in_process import post
    from headrace.engine.interface import seats_of_core

    client, app = _parts(args, config, batch)

    async def ask(url: str, body: bytes) -> Response:
        answer = await post(app, url, body)
        if client.dead is not None:
            raise EngineDeadError(f"the engine has ended: {client.dead}")
        return Response(
            answer.status, answer.headers.get("x-request-id", ""), raw(answer.body), answer.headers.get("x-headrace-ignored")
        )

    await client.start()
    try:
        await client.wait_loaded()
        batch.concurrency = batch.concurrency or 2 * seats_of_core(client) * client.config.data_parallel_size
        with batch.progress():
            await batch.run(lines_of(source), ask)
    finally:
        await client.close()
        await app.state.api.close()


def _parts(args: argparse.Namespace, config: ServerConfig, batch: Batch) -> tuple[Any, Starlette]:
    """The engine's client, or all models', not started, and the application."""
    from headrace.api.app import create_app
    from headrace.cli.several import check_alone, several_models
    from headrace.engine.client import EngineClient
    from headrace.engine.supervision import SupervisionConfig
    from headrace.several_models.app import create_models_app

    check_alone(args)
    if args.models:
        models, metrics, config = several_models(args, ServeOptions(log_level=args.log_level), config, BUILDER, {})
        batch.concurrency = batch.concurrency or 2 * max(model.spec.engine.max_num_seqs or SEATS for model in models.served)
        models.switch.max_waiting = max(models.switch.max_waiting, batch.concurrency)  # no line is refused for another's sake
        return models, create_models_app(models, config, metrics)
    client = EngineClient(EngineConfig(**engine_options(args)), SupervisionConfig(standby=False), log_level=args.log_level)
    return client, create_app(client, config)


class Batch:
    """Answers lines, at most `concurrency` at a time. `total`: lines of the input, if that is known."""

    def __init__(self, output: Output, concurrency: int, total: int | None = None):
        self.output, self.concurrency, self.total = output, concurrency, total
        self.num_kept = self.num_done = 0
        self.num_failed = output.num_failed
        self._seen = Ids()
        self._advance: Callable[[], None] = lambda: None
        self._began = time.monotonic()

    async def run(self, lines: AsyncIterator[bytes | None], post: Post) -> None:
        """Raises HeadraceError when there is no use in going on; a line alone never ends it."""
        free = asyncio.Semaphore(self.concurrency)
        number = 0
        try:
            async with asyncio.TaskGroup() as group:
                async for line in lines:
                    number += 1
                    if line is not None and not line.strip():
                        self._advance()
                    elif (request := self._take(number, line)) is not None:
                        await free.acquire()
                        group.create_task(self._run(request, post, free))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _take(self, number: int, line: bytes | None) -> BatchLine | None:
        """The request of a line, unless it is bad or has been answered."""
        try:
            request = parse(number, line)
            if not self._seen.take(request.custom_id):
                raise BadLine(
                    request.custom_id, "duplicate_custom_id", f"line {number}: this custom_id stands in a line before"
                )
        except BadLine as bad:
            self._write(OutputLine.of(bad.custom_id, None, error_of(bad)))
            return None
        if self.output.answered.has(request.custom_id):
            self.num_kept += 1
            self._advance()
            return None
        return request

    async def _run(self, request: BatchLine, post: Post, free: asyncio.Semaphore) -> None:
        try:
            self._write(OutputLine.of(request.custom_id, await post(request.url, bytes(request.body))))
        finally:
            free.release()

    def _write(self, line: OutputLine) -> None:
        self.output.write(line)
        self.num_done += 1
        self.num_failed += line.failed
        self._advance()

    def tell(self) -> None:
        kept = f", {self.num_kept} had been before" if self.num_kept else ""
        seconds = time.monotonic() - self._began
        print(f"{self.num_done} lines answered{kept}, {self.num_failed} with errors, {seconds:.1f} s", file=sys.stderr)

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """A bar on stderr, where that is a terminal."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if not console.is_terminal:
            yield
            return
        columns = (
            TextColumn("lines"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[errors]}"),
        )  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=self.total, errors="")

            def advance() -> None:
                bar.update(task, advance=1, errors=f"{self.num_failed} errors" if self.num_failed else "")

            self._advance = advance
            yield


async def lines_of(file: BinaryIO) -> AsyncIterator[bytes | None]:
    """Read by a thread of its own, a few ahead: standard input may be silent for as long as it likes."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any](AHEAD)
    held, room = 0, threading.Condition()  # bytes that nobody has taken yet

    def put(found: Any) -> None:
        putting = queue.put(found)
        try:
            asyncio.run_coroutine_threadsafe(putting, loop).result()
        except RuntimeError:
            putting.close()  # or Python complains that nobody has awaited it
            raise

    def read() -> None:
        nonlocal held
        with contextlib.suppress(RuntimeError):  # the loop has gone
            last: Any = StopAsyncIteration
            try:
                for line in read_lines(file):
                    with room:
                        while held >= AHEAD_BYTES:
                            room.wait()
                        held += len(line or b"")
                    put((line,))
            except (OSError, ValueError) as e:
                last = HeadraceError(f"the input cannot be read any further ({e})")
            put(last)

    threading.Thread(target=read, name="batch input", daemon=True).start()
    while isinstance(found := await queue.get(), tuple):
        with room:
            held -= len(found[0] or b"")
            room.notify()
        yield found[0]
    if isinstance(found, HeadraceError):
        raise found


@contextlib.contextmanager
def _input(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise StreamError("standard input: it is closed")
        if sys.stdin.isatty():
            raise HeadraceError("there are no requests: name a file with --input, or send one to standard input")
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115  (closed below)
    except OSError as e:
        raise ParameterError("--input", name, f"a file that can be read ({e.strerror or e})") from None
    with file:
        yield file


@contextlib.contextmanager
def _output(args: argparse.Namespace) -> Iterator[Output]:
    name = args.output
    if name != "-" and args.input != "-" and os.path.exists(name) and os.path.samefile(name, args.input):
        raise ParameterError("--output", name, "another file than the input")
    with contextlib.closing(StandardOutput() if name == "-" else OutputFile(name)) as output:
        yield output


def _count(name: str) -> int | None:
    """Lines of the input; None where it can be read only once."""
    if name == "-" or not Path(name).is_file():
        return None
    with open(name, "rb") as file:
        count, last = 0, b"\n"
        while piece := file.read(2**20):
            count, last = count + piece.count(b"\n"), piece[-1:]
    return count + (last != b"\n")
