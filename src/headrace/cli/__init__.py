"""The command line. Nothing heavy is imported before a command runs: `headrace --help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys

COMMANDS = {  # name -> (module, help)
    "generate": ("headrace.cli.generate", "generate text from prompts"),
    "chat": ("headrace.cli.chat", "talk to a model in the terminal"),
    "serve": ("headrace.cli.serve", "serve a model over an OpenAI-compatible HTTP API"),
    "bench": ("headrace.cli.bench", "measure the engine beside the limit of the machine"),
    "bench serve": ("headrace.cli.bench_serve", "measure a server: latencies and throughput under load"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 a mistake in the input or the checkpoint, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if " ".join(argv[:2]) in COMMANDS:
        argv = [" ".join(argv[:2]), *argv[2:]]  # a command of two words
    parser = argparse.ArgumentParser(prog="headrace", description="An LLM inference and serving engine.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        # only the command that is asked for builds its options
        chosen = argv and argv[0] == name
        command = commands.add_parser(name, help=text, add_help=bool(chosen))
        if chosen:
            loaded = importlib.import_module(module)
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=getattr(args, "log_level", "warning").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    from headrace.errors import HeadraceError

    try:
        return args.run(args)
    except HeadraceError as e:
        print(f"headrace: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left: nobody is there to tell
        return 0


def _version() -> str:
    from headrace import __version__

    return f"headrace {__version__}"
