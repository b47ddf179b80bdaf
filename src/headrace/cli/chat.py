"""`headrace chat`: talk to a model in the terminal, in this process or on a server. Works through pipes too."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from headrace.cli.chat_backends import SAMPLING, Backend, EngineBackend, Messages, ServerBackend, ServerError
from headrace.cli.chat_screen import PlainScreen, RichScreen
from headrace.cli.keys import client_key
from headrace.cli.options import add_engine_arguments, add_sampling_arguments, engine_options, sampling_params
from headrace.cli.parser import text
from headrace.cli.sources import add_config_file
from headrace.cli.streams import StreamError, holds_unicode, read_line
from headrace.errors import CapacityError, ParameterError

if TYPE_CHECKING:
    from headrace.sampling.params import SamplingParams

HELP = """\
/system TEXT  begin anew with this system message (without TEXT: none)
/reset        forget the conversation, keep the system message
/help         this text
/exit         the end (also: /quit, Ctrl-D)
A line that begins with \"\"\" opens a message of several lines, up to the next \"\"\".
Ctrl-C stops the answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_file(parser)
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--url", type=text, help="talk to this server (default: load a model); --model is then a name that it serves"
    )
    chat.add_argument("--api-key", metavar="KEY", help="the server's key (default: HEADRACE_API_KEY)")
    chat.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=600.0, help="of silence after which a server is given up"
    )
    add_screen_arguments(chat)
    add_sampling_arguments(parser, max_tokens="as many as fit")
    add_engine_arguments(parser)


def add_screen_arguments(chat: argparse._ArgumentGroup) -> None:
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--plain", action="store_true", help="bare text even on a terminal")
    chat.add_argument("--hide-reasoning", action="store_true", help="do not show what a model thinks before it answers")
    chat.add_argument("--show-stats", action="store_true", help="after each answer: tokens and tokens per second")


def run(args: argparse.Namespace) -> int:
    check(args)
    options = engine_options(args)
    if not 0 < args.timeout <= 1e7:
        raise ParameterError("--timeout", args.timeout, "seconds in (0, 1e7]")
    if not args.url:
        return talk(args, lambda: EngineBackend(options, progress=sys.stderr.isatty()))
    own = {name: value for name, value in options.items() if not args.sources[name].startswith("HEADRACE_")}
    model = own.pop("model", None)  # variables are there for an engine, and may be for another command
    if others := own.keys() - {"seed"}:
        raise ParameterError("--url", args.url, "no options of an engine beside it: " + ", ".join(sorted(others)))
    return talk(args, lambda: ServerBackend(args.url, client_key(args), model, args.timeout))


def check(args: argparse.Namespace) -> SamplingParams:
    """A bad value is reported before anything is loaded."""
    if args.n != 1:
        raise ParameterError("--n", args.n, "1: a conversation has one answer")
    if sys.stdin is None:
        raise StreamError("standard input: it is closed")
    return sampling_params(args)


def talk(args: argparse.Namespace, connect: Callable[[], Backend]) -> int:
    """The conversation, until its end; then the backend is closed."""
    params, sampling = check(args), {k: getattr(args, k) for k in SAMPLING}
    interactive = sys.stdin.isatty()
    show_reasoning = not args.hide_reasoning
    rich = sys.stdout.isatty() and holds_unicode(sys.stdout) and not args.plain  # Markdown is drawn with more than ASCII
    screen = RichScreen(show_reasoning) if rich else PlainScreen(show_reasoning=show_reasoning)
    backend = connect()
    try:
        if interactive:
            screen.note(f"{backend.name}. /help lists the commands, Ctrl-D ends.")
        if backend.defaults is not None and (interactive or args.show_stats):
            told = params.resolved(backend.defaults).told()
            screen.note("sampling: " + ", ".join(f"{name} {value:g}" for name, value in told.items()))
        chat = Chat(backend, screen, sampling, args.system, args.show_stats)
        for text in read_messages(interactive):
            if not chat.take(text):
                break
        return 0 if interactive or not chat.failures else 1
    finally:
        backend.close()


class Chat:
    """A conversation: what has been said and who answers."""

    def __init__(
        self, backend: Backend, screen: PlainScreen | RichScreen, sampling: dict[str, Any], system: str | None, stats: bool
    ):
        self.backend, self.screen, self.sampling, self.stats = backend, screen, sampling, stats
        self.system = system
        self.history: Messages = []
        self.failures = 0

    def take(self, text: str) -> bool:
        """Obey a command or answer a message; False at the end."""
        command, _, rest = text.partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/help":
            self.screen.note(HELP)
        elif command == "/reset":
            self.history.clear()
            self.screen.note("A new conversation.")
        elif command == "/system":
            self.system = rest.strip() or None
            self.history.clear()
            self.screen.note("A new conversation" + (" with this system message." if self.system else "."))
        elif text.startswith("/") and " " not in command and "/" not in command[1:]:
            self.screen.note(f"{command} is no command; /help lists them. (A message may begin with a space.)")
        elif text.strip():
            self.answer(text)
        return True

    def answer(self, text: str) -> None:
        """Show the answer as it comes. One that is stopped stays in the conversation as far as it went."""
        said = [*self.history, {"role": "user", "content": text.strip("\n")}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        answer, began, stopped = [], time.perf_counter(), False
        self.screen.begin()
        try:
            with interrupts(raising=not self.backend.interrupt_between_steps) as interrupt:
                pieces = self.backend.answer(system + said, self.sampling)
                with contextlib.closing(pieces):  # type: ignore[type-var]
                    for piece in pieces:
                        self.screen.push(piece.text, piece.reasoning)
                        if not piece.reasoning:
                            answer.append(piece.text)
                        if interrupt:
                            stopped = True
                            break
        except KeyboardInterrupt:
            stopped = True
        except (ParameterError, CapacityError, ServerError) as error:
            self.screen.end()
            self.failures += 1
            self.screen.note(f"headrace: {error}")
            if "context" in str(error):
                self.screen.note("/reset begins a new conversation.")
            return
        self.screen.end()
        if whole := "".join(answer).strip():
            self.history = [*said, {"role": "assistant", "content": whole}]
        if stopped:
            self.screen.note("(stopped)")
        elif self.backend.finish_reason == "length":
            self.screen.note("(cut off: no more tokens are allowed or fit)")
        if self.stats and not stopped:
            seconds = time.perf_counter() - began
            self.screen.note(f"{self.backend.num_tokens} tokens, {self.backend.num_tokens / max(seconds, 1e-9):.1f} tokens/s")


@contextlib.contextmanager
def interrupts(raising: bool) -> Iterator[list[int]]:
    """While this lasts, Ctrl-C raises KeyboardInterrupt (`raising`) or only fills the list, which is looked at in between."""
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        seen.append(number)
        if raising and len(seen) == 1:  # once: the second must not break the cleaning up
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def read_messages(interactive: bool) -> Iterator[str]:
    """Messages from standard input up to its end: a line each, or several lines between triple quotes."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
    first = True
    while True:
        try:
            line = _read_line("> ", interactive)
            if first and line is not None:
                first, line = False, line.removeprefix("\ufeff")  # a byte-order mark
            if line is not None and line.startswith('"""'):
                line = _read_block(line[3:], interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D ends)", file=sys.stderr)
            continue
        if line is None:
            return
        yield line


def _read_line(prompt: str, interactive: bool) -> str | None:
    if interactive:
        try:
            return input(prompt)
        except EOFError:
            print()
            return None
        except UnicodeDecodeError as e:
            raise StreamError(f"standard input: it is not valid {e.encoding}") from None
    line = read_line()
    return line.rstrip("\n") if line else None


def _read_block(first: str, interactive: bool) -> str:
    lines = [first]
    while '"""' not in lines[-1]:
        line = _read_line(". ", interactive)
        if line is None:
            break
        lines.append(line)
    return "\n".join(lines).partition('"""')[0].strip("\n")
