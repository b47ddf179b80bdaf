"""`headrace chat`: conversations through pipes and a terminal, with an engine in the process and with a server."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli import main
from headrace.cli.chat import Chat
from headrace.cli.chat_backends import EngineBackend
from headrace.cli.chat_screen import PlainScreen, RichScreen, split_blocks
from headrace.cli.options import generation_defaults
from headrace.cli.streams import harmless
from headrace.errors import ParameterError
from headrace.llm import LLM
from headrace.sampling.params import SamplingParams
from server_driver import SRC, ServerProcess, until

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4}
COMMAND = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4"]
MARKDOWN = """# Title

Some *text* with `code`,
over two lines.

- one

- two
  with more

Between.

```python
a = 1

b = 2
```

1. first
2. second

The end: | not a table.
"""


def chat(monkeypatch, capsys, typed: str, *options: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a conversation through pipes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    code = main(["chat", "--max-tokens", "12", *options])
    written = capsys.readouterr()
    return code, written.out, written.err


GREEDY = ("--temperature", "0")


def expected(model: str, *conversations: tuple[str | None, list[str]]) -> str:
    """The answers to each conversation's messages (system, [user, ...]), by the offline API."""
    out = ""
    with LLM(model, **OPTIONS) as llm:
        for system, questions in conversations:
            said = [{"role": "system", "content": system}] if system else []
            for question in questions:
                said.append({"role": "user", "content": question})
                answer = llm.chat(said, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].outputs[0].text
                said.append({"role": "assistant", "content": answer.strip()})
                out += answer + "\n"
    return out


TYPED = '/help\nhello\nand then?\n/reset\nhello\n/system Be brief.\n"""two\nlines"""\n\n/nonsense\n/exit\nnot read\n'
SAID = ((None, ["hello", "and then?"]), (None, ["hello"]), ("Be brief.", ["two\nlines"]))


def test_conversation_in_process(monkeypatch, capsys, model):
    code, out, err = chat(monkeypatch, capsys, TYPED, "--model", model, "--show-stats", *GREEDY, *COMMAND)
    assert code == 0 and out == expected(model, *SAID) and "sampling: temperature 0\n" in err
    assert "/reset" in err and "/nonsense is no command" in err and "12 tokens, " in err


def test_conversation_with_a_server(monkeypatch, capsys, model):
    options = ["--max-model-len", "256", "--api-key", "k", "--no-standby", "--override-generation-config", '{"temperature": 0}']
    with ServerProcess(model, *options) as server:  # greedy unless a request says otherwise
        server.http.headers["Authorization"] = "Bearer k"
        server.wait_ready()
        assert "says nothing: temperature 0\n" in server.log()  # at the default level
        for url in (server.url, server.url + "/v1/"):
            code, out, err = chat(monkeypatch, capsys, TYPED, "--url", url, "--api-key", "k", "--show-stats")
            assert code == 0 and out == expected(model, *SAID) and "12 tokens, " in err
        # mistakes are told and the conversation goes on
        code, out, err = chat(monkeypatch, capsys, "hello\n" + "x " * 400 + "\nand then?\n", "--url", url, "--api-key", "k")
        assert code == 1 and out.replace("\n\n", "\n") == expected(model, SAID[0]) and "context" in err and "/reset" in err
        code, _, err = chat(monkeypatch, capsys, "hello\n", "--url", url, "--api-key", "wrong")
        assert code == 1 and "401" in err
    code, _, err = chat(monkeypatch, capsys, "hello\n", "--url", server.url)
    assert code == 1 and "does not answer" in err


def test_a_prompt_that_does_not_fit_does_not_end_the_conversation(monkeypatch, capsys, model):
    typed = "hello\n" + "x " * 400 + "\nand then?\n"
    code, out, err = chat(monkeypatch, capsys, typed, "--model", model, *GREEDY, *COMMAND)
    assert code == 1 and out.replace("\n\n", "\n") == expected(model, SAID[0]) and "headrace: " in err


def test_defaults_of_sampling_are_checked():
    assert generation_defaults('{"temperature": 0, "top_k": 5}') == {"temperature": 0, "top_k": 5}
    for bad in ("", "[]", '{"max_tokens": 5}', '{"temperature": 9}', '{"top_p": "x"}'):
        with pytest.raises(ParameterError):
            generation_defaults(bad)


def test_bad_options(monkeypatch, capsys):
    for options in (["--n", "2"], ["--temperature", "-1"], ["--url", "ftp://x"], ["--url", "http://127.0.0.1:9", "--max-model-len", "64"]):
        code, out, err = chat(monkeypatch, capsys, "hello\n", *options)
        assert code == 1 and not out and "allowed" in err


def test_interrupt_stops_the_answer_only(model):
    class Interrupting(PlainScreen):
        pieces = 0

        def push(self, text: str, reasoning: bool) -> None:
            super().push(text, reasoning)
            self.pieces += 1
            if self.pieces == 5:
                os.kill(os.getpid(), signal.SIGINT)

    backend = EngineBackend({"model": model, **OPTIONS}, progress=False)
    out, err = io.StringIO(), io.StringIO()
    talk = Chat(backend, Interrupting(out, err), {"temperature": 0.0, "max_tokens": 100}, None, stats=False)
    try:
        before = signal.getsignal(signal.SIGINT)
        assert talk.take("hello")
        assert "(stopped)" in err.getvalue() and backend.num_tokens < 10
        assert signal.getsignal(signal.SIGINT) is before
        partial = out.getvalue().strip()
        assert not partial or talk.history[-1]["content"] == partial
        core = backend._llm.engine.core
        assert not core.has_work and core.scheduler.num_running == 0
        talk.take("/reset")
        talk.sampling["max_tokens"] = 12
        out.seek(0), out.truncate()
        talk.take("hello")
        assert out.getvalue() == expected(model, (None, ["hello"]))
    finally:
        backend.close()


class Endless(BaseHTTPRequestHandler):
    """A server whose answers go on until the client leaves; `left` counts those who did."""

    left = 0

    def do_GET(self) -> None:
        body = b'{"object": "list", "data": [{"id": "endless"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        try:
            if body["messages"][-1]["content"] == "short":
                self._event("kurz", "stop")
            while body["messages"][-1]["content"] != "short":
                self._event("lang ", None)
                time.sleep(0.01)
        except OSError:
            Endless.left += 1

    def _event(self, text: str, finish: str | None) -> None:
        data = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def endless() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Endless.left = 0
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


class Terminal:
    """A command on a terminal of its own: type, and wait for what appears."""

    def __init__(self, *command: str):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, key: str = "") -> None:
        """Type `key`, and forget what was shown up to the end of the pattern's first match.

        The key is typed again while nothing happens: a Ctrl-C that comes after readline has shown its prompt and before
        it waits for input is seen with the next key only.
        """
        end = time.monotonic() + 120
        self.type(key)
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < end, self.shown
            if not select.select([self.master], [], [], 1.0)[0]:
                self.type(key)
            else:
                try:
                    self.shown += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        assert found, self.shown
        self.shown = self.shown[found.end() :]


@pytest.mark.parametrize("options", [[], ["--plain"]])
def test_terminal(endless, options):
    code = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
    terminal = Terminal(sys.executable, "-c", code, "chat", "--url", endless, *options)
    try:
        terminal.wait_for(r"endless.*/help")
        terminal.wait_for("> ")
        terminal.type("go\n")
        terminal.wait_for("lang lang")
        terminal.type("\x03")  # Ctrl-C: the answer ends, the program does not
        terminal.wait_for(r"\(stopped\)")
        terminal.wait_for("> ")
        terminal.wait_for("Ctrl-D ends", key="\x03")
        terminal.type("short\n")
        terminal.wait_for("kurz")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
        until(lambda: Endless.left == 1, 60)
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def test_a_terminal_has_its_cursor_back(endless):
    """Whoever ends the program in the middle of an answer."""
    code = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
    terminal = Terminal(sys.executable, "-c", code, "chat", "--url", endless)
    try:
        terminal.wait_for("> ")
        terminal.type("go\n")
        terminal.wait_for(re.escape("\x1b[?25l"))
        terminal.wait_for("lang lang")
        terminal.process.terminate()
        terminal.wait_for(re.escape("\x1b[?25h"))
        assert terminal.process.wait(60) == -signal.SIGTERM
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def rendered(pieces: list[str]) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    screen = RichScreen(console=console)
    screen.begin()
    for piece in pieces:
        screen.push(piece, reasoning=False)
    screen.end()
    return console.file.getvalue()  # type: ignore[attr-defined]


@given(st.lists(st.integers(0, len(MARKDOWN)), max_size=12))
@settings(max_examples=8)
def test_markdown_looks_the_same_however_it_arrives(cuts):
    at = [0, *sorted(cuts), len(MARKDOWN)]
    whole = rendered(list(MARKDOWN))  # the most cuts there can be
    assert rendered([MARKDOWN[a:b] for a, b in itertools.pairwise(at)]) == whole
    assert "b = 2" in whole and "The end: | not a table." in whole and "Title" in whole


def test_what_a_model_writes_moves_nothing_on_a_terminal():
    """Not the cursor, nor the window's name or the clipboard; a file gets it as it is."""
    text = "a\x1b]52;c;aGk=\x07b\x9b2Jc\x7f\r\nd\te"
    assert harmless(text) == "a^[]52;c;aGk=^Gb?2Jc^?\nd\te"
    assert "\x1b]52" not in rendered([text]) and "]52;c" in rendered([text])
    for terminal in (True, False):
        out = io.StringIO()
        out.isatty = lambda terminal=terminal: terminal
        PlainScreen(out, out).push(text, False)
        assert out.getvalue() == (harmless(text) if terminal else text)


@given(st.text(alphabet="a`-\n 1", max_size=40), st.text(alphabet="a`-\n 1", max_size=20))
def test_finished_blocks_stay_finished(text, more):
    *finished, last = split_blocks(text)
    assert "".join(finished) + last == text
    assert split_blocks(text + more)[: len(finished)] == finished


def test_what_belongs_together_is_one_block():
    title, paragraph_and_list, between, code_and_list, end = split_blocks(MARKDOWN)
    assert title.startswith("# Title") and between == "Between.\n\n" and end.startswith("The end")
    assert "- two\n  with more" in paragraph_and_list and "b = 2\n```\n\n1. first" in code_and_list
