"""`headrace run [MODEL]`: fetches a model, serves it and talks to it here. Until it ends, others find the server, too."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from headrace.cli.chat import add_screen_arguments, check, talk
from headrace.cli.chat_backends import ServerBackend
from headrace.cli.keys import client_key
from headrace.cli.options import add_engine_arguments, add_options, add_sampling_arguments, named_model
from headrace.cli.parser import text
from headrace.cli.pull import NAMES, pull
from headrace.cli.serve_options import ServeOptions
from headrace.cli.sources import add_config_file
from headrace.config import EngineConfig, environment_of_child, hub_offline, python_of_child
from headrace.errors import CheckpointError, HeadraceError
from headrace.model.hub import is_cached
from headrace.options import options_of

SILENCE = 600.0  # seconds of the server's, after which an answer is given up
END = 60.0  # seconds that the server has to end when it is asked to
# It ends with this process, whatever ends that; the terminal's Ctrl-C is for the conversation alone.
SERVER = """
import ctypes, os, signal, sys
sys.platform == "linux" and ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.getppid() == int(sys.argv[1]) or sys.exit(1)
from headrace.cli import main
sys.exit(main(sys.argv[2:]))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", nargs="?", type=text, metavar="MODEL",
        help=f"{NAMES}; a directory or .gguf file (default: the embedded SmolLM2-135M-Instruct)",
    )  # fmt: skip
    add_config_file(parser)
    add_screen_arguments(parser.add_argument_group("chat"))
    add_options(parser, ServeOptions, "host", "port")
    add_sampling_arguments(parser, max_tokens="as many as fit")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check(args)
    named_model(args)
    if args.model is not None:
        args.model = fetched(args)
    with serving(args) as address:
        print(f"serving at {address} until this ends", file=sys.stderr)
        args.api_key = None
        return talk(args, lambda: ServerBackend(address, client_key(args), None, SILENCE))


def fetched(args: argparse.Namespace) -> str:
    """The name under which a model is there now; one that is in the cache needs no Hub."""
    if os.path.exists(os.path.expanduser(args.model)) or args.local_files_only or hub_offline():
        return args.model
    try:
        return pull(args.model, args.revision)[0]
    except CheckpointError as error:
        if not is_cached(args.model):
            raise CheckpointError(f"directory {args.model} does not exist, and {error}") from error
        print(f"headrace: {error}; the cache has it", file=sys.stderr)
        return args.model


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[str]:
    """A server of what the options say, with its model loaded; its address. Nothing of it is left behind."""
    command = python_of_child("-c", SERVER, os.getpid(), "serve", *words_of(args), "--log-format", "json")
    server = Server(
        subprocess.Popen(
            command, env=environment_of_child(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
    )
    try:
        yield server.wait()
    finally:
        server.end()


def words_of(args: argparse.Namespace) -> list[str]:
    """The options that were given as `serve` takes them, wherever they were given: the file is not for it."""
    words = ["--config", os.devnull]
    for described in (*options_of(EngineConfig), *options_of(ServeOptions)):
        if described.help and described.name in args.sources:
            value = getattr(args, described.name)
            switch = [f"--{'' if value else 'no-'}{described.key}"]
            words += switch if described.kind is bool else [f"--{described.key}", f"{value}"]
    return words


class Server:
    """The process, and what it says: faults are shown, the rest tells how far it is."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process
        self._ready = threading.Event()
        self._loaded = False
        self._address = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def wait(self) -> str:
        self._ready.wait()
        if not self._loaded:
            raise HeadraceError("the server has not come up; what it said is above")
        return self._address

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reading.join(END)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._heard(line.decode("utf-8", "replace"))
        self._ready.set()

    def _heard(self, line: str) -> None:
        try:
            said = json.loads(line)
            level, message = said["level"], said["message"]
        except (ValueError, LookupError, TypeError):
            sys.stderr.write(line)
            return
        if message.startswith("listening on "):
            self._address = message.removeprefix("listening on ")
        elif message.startswith("ready after "):
            self._loaded = True
            self._ready.set()
        if message.startswith("compiling kernels"):
            print(message, file=sys.stderr)
        if level not in ("DEBUG", "INFO"):
            print(f"headrace: {message}", file=sys.stderr)
