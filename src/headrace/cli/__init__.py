"""The command line. Nothing heavy is imported before a command runs: `headrace --help` answers at once."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from typing import Any

from headrace.bytecode import keep_bytecode
from headrace.cli.parser import CommandParser
from headrace.cli.sources import refuse_unknown_variables
from headrace.cli.streams import ReaderLeft, check_output, standard_streams
from headrace.engine.interrupts import uninterrupted
from headrace.errors import HeadraceError, ParameterError
from headrace.extras import missing_package
from headrace.logs import configure

COMMANDS: dict[str, Any] = {  # name -> (module, help), or the help and the commands below it
    "run": ("headrace.cli.run", "fetch a model, serve it and talk to it"),
    "pull": ("headrace.cli.pull", "fetch a model from the Hugging Face Hub"),
    "list": ("headrace.cli.cached", "list the models that have been fetched"),
    "rm": ("headrace.cli.remove", "remove fetched models"),
    "generate": ("headrace.cli.generate", "generate text from prompts"),
    "chat": ("headrace.cli.chat", "talk to a model in the terminal"),
    "serve": ("headrace.cli.serve", "serve a model over an OpenAI-compatible HTTP API"),
    "compile": ("headrace.cli.compile", "compile a model's kernels ahead, with the card or without it"),
    "run-batch": ("headrace.cli.run_batch", "answer a file of requests, and go on where it was interrupted"),
    "ray": (
        "servers whose cores are in a Ray cluster",
        {"update": ("headrace.cli.ray", "replace all cores of a server, one after another, without breaking a stream")},
    ),
    "bench": (
        "measure the engine beside the limit of the machine, or a server",
        {
            "throughput": ("headrace_bench.engine", "prompts and outputs of random lengths, all at once"),
            "latency": ("headrace_bench.engine", "time per output token at several batch sizes"),
            "prefill": ("headrace_bench.engine", "prompt tokens per second"),
            "prompts": ("headrace_bench.engine", "the first token of a lone prompt, and steps of prompts and decodes"),
            "startup": ("headrace_bench.engine", "seconds from the start of a process to its first token"),
            "all": ("headrace_bench.engine", "throughput, latency, prefill and prompts"),
            "serve": ("headrace_bench.serve", "a server: latencies and throughput under load"),
        },
    ),
    "completion": ("headrace.cli.completion", "print the completion script of a shell"),
    "simulate": ("headrace_bench.simulate", "what a fleet would do under load, in virtual time: latencies, throughput, costs"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 1 a mistake in the input or the checkpoint, or output that cannot be written,
    2 an option that is not known, 130 interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    keep_bytecode()
    parser = make_parser()
    with standard_streams():
        try:
            return _run(parser, argv)
        except ReaderLeft:
            return 1
        except HeadraceError as e:
            print(f"headrace: {e}", file=sys.stderr)
            return 1
        except ImportError as e:
            if (advice := missing_package(e)) is None:
                raise
            print(f"headrace: {advice}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130


def make_parser() -> CommandParser:
    parser = CommandParser("headrace", description="An LLM inference and serving engine.")
    parser.add_argument("--version", action="version", version=_version(), help="print the version and end")
    _add_commands(parser, COMMANDS, "command")
    return parser


def _add_commands(parser: CommandParser, commands: dict[str, Any], dest: str) -> None:
    below = parser.add_subparsers(dest=dest, metavar=dest.upper(), required=True)
    for name, (first, second) in commands.items():
        if isinstance(second, dict):
            _add_commands(below.add_parser(name, help=first, description=first[0].upper() + first[1:] + "."), second, "what")
        else:
            description = second[0].upper() + second[1:] + "."
            below.add_parser(name, help=second, description=description, fill=partial(_fill, first))


def _fill(module: str, parser: CommandParser) -> None:
    with uninterrupted():  # numpy swallows a Ctrl-C amid its import, and crashes later
        loaded = importlib.import_module(module)
    loaded.add_arguments(parser)
    parser.set_defaults(run=loaded.run, parser=parser)
    positional = "".join(f" {a.metavar}" if a.required else f" [{a.metavar}]" for a in parser._actions if not a.option_strings)
    parser.usage = f"{parser.prog}{positional} [OPTION ...]"  # sixty options in a line say nothing


def _server_options() -> CommandParser:
    parser = CommandParser()
    importlib.import_module("headrace.cli.serve_options").add_arguments(parser)
    return parser


def _run(parser: CommandParser, argv: list[str]) -> int:
    for word in argv:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ParameterError("the command line", word, "UTF-8") from None
    args = parser.parse_args(argv)
    try:
        os.getcwd()
    except OSError as e:  # torch's libraries end the process there, and say that they cannot be loaded
        raise HeadraceError(f"the current directory is not there any more ({e.strerror}): change to another one") from None
    refuse_unknown_variables(args.parser, _server_options)
    if args.command != "serve":  # a server has a log of its own, and nothing to say on stdout
        configure(args.command, args.log_level)
        check_output()
        for remark in args.remarks:
            print(f"headrace: {remark}", file=sys.stderr)
    try:
        return args.run(args)
    except ParameterError as e:
        option = args.parser.option_of(e.field, args.sources)
        raise (ParameterError(option, e.value, e.allowed) if option else e) from None


def _version() -> str:
    from headrace import __version__

    return f"headrace {__version__}"
