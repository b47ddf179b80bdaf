"""Commands with standard input, output and error in every state: closed, full, read-only, left, non-blocking, not Unicode."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from server_driver import SRC, quiet_port, until

SMALL = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--temperature", "0"]


class Talker(BaseHTTPRequestHandler):
    """A server that answers everything with `text`."""

    text = "Hällo ☃"

    def do_GET(self) -> None:
        self._answer(b'{"object": "list", "data": [{"id": "talker"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "delta": {"content": self.text}, "text": self.text, "finish_reason": "stop"}
        event = {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        with contextlib.suppress(OSError):
            self._answer(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Talker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace.cli", *words]


def environment(**more: str) -> dict[str, str]:
    dropped = ("PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL", "LANG", "LC_CTYPE")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**kept, "PYTHONPATH": str(SRC), "LC_ALL": "C.UTF-8", "COLUMNS": "80", **more}


def in_shell(redirections: str, *words: str, typed: str = "", **env: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command with its streams redirected as a shell does."""
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirections}', "-", *command(*words)],
        input=typed.encode(), capture_output=True, env=environment(**env), timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def commands(url: str) -> dict[str, list[str]]:
    return {
        "help": ["--help"], "version": ["--version"], "serve's help": ["serve", "--help"], "bench's help": ["bench", "--help"],
        "chat": ["chat", "--url", url, "--show-stats"],
        "bench serve": ["bench", "serve", "--url", url, "--num-prompts", "1"],
    }  # fmt: skip


NAMES = sorted(commands(""))


@pytest.mark.parametrize("state", [">&-", "> /dev/full", "1< /dev/null"])
@pytest.mark.parametrize("name", NAMES)
def test_output_that_cannot_be_written_is_one_line(url, name, state):
    code, _, err = in_shell(state, *commands(url)[name], typed="hello\n")
    told = [line for line in err.splitlines() if "tokens/s" not in line]
    assert code == 1 and len(told) == 1 and told[0].startswith("headrace: standard output: "), err


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_that_has_left_is_no_news(url, name):
    """The pipe has no reader from the start, so that the first byte finds none."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = subprocess.Popen(
            command(*commands(url)[name]), stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE, env=environment()
        )
        _, err = process.communicate(b"hello\n", timeout=120)
    finally:
        os.close(writing)
    assert process.returncode == 1 and not [line for line in err.splitlines() if b"tokens/s" not in line]


@pytest.mark.parametrize("state", ["2>&-", "2> /dev/full", "2< /dev/null"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_aside_is_never_worth_ending_for(url, name, state):
    code, out, _ = in_shell(state, *commands(url)[name], typed="hello\n")
    assert code == 0 and out
    if name == "chat":
        assert out == Talker.text + "\n"


@pytest.mark.parametrize("state", ["2>&-", "2> /dev/full"])
def test_a_mistake_that_cannot_be_told_is_one_all_the_same(state):
    assert in_shell(state, "generate", "--top-p", "7", "--prompt", "x") == (1, "", "")
    assert in_shell(state, "serve", "--prot", "80") == (2, "", "")


@pytest.mark.parametrize("name", ["generate", "chat"])
@pytest.mark.parametrize("state", ["<&-", "0> /dev/null"])
def test_input_that_cannot_be_read_is_one_line(url, name, state):
    words = {"generate": ["generate"], "chat": ["chat", "--url", url]}[name]
    code, out, err = in_shell(state, *words)
    assert code == 1 and not out and err.startswith("headrace: standard input: ") and err.count("\n") == 1


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"chat"}))
def test_a_command_that_reads_nothing_needs_no_input(url, name):
    code, out, err = in_shell("<&-", *commands(url)[name])
    assert code == 0 and out and not err


@pytest.mark.parametrize(("typed", "said"), [(b"a\xff\n", "not valid utf-8"), (b"a\0b\n", None), (b"\xef\xbb\xbfhello\n", None)])
def test_bytes_that_are_no_text(url, typed, said):
    done = subprocess.run(command("chat", "--url", url), input=typed, capture_output=True, env=environment(), timeout=60)
    if said is None:
        assert done.returncode == 0 and done.stdout.decode() == Talker.text + "\n"
    else:
        assert done.returncode == 1 and said in done.stderr.decode() and b"Traceback" not in done.stderr


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}])
def test_text_that_the_encoding_does_not_have(url, env):
    code, out, err = in_shell("", "chat", "--url", url, typed="hello\n", **env)
    assert code == 1 and err.count("\n") == 1 and "ascii" in err and "PYTHONIOENCODING" in err and not out.strip()
    code, out, err = in_shell("", "chat", "--url", url, typed="hello\n", LC_ALL="C")  # Python makes UTF-8 of it
    assert code == 0 and out == Talker.text + "\n"


def test_non_blocking_streams_are_waited_for(url, monkeypatch):
    """A terminal or pipe that somebody else has set so: input that is not there yet, output that is full."""
    monkeypatch.setattr(Talker, "text", "long " * 100_000)
    typing, typed = os.pipe()
    shown, showing = os.pipe()
    for end in (typing, showing):
        os.set_blocking(end, False)
    process = subprocess.Popen(command("chat", "--url", url), stdin=typing, stdout=showing, stderr=subprocess.PIPE, env=environment())
    os.close(typing), os.close(showing)
    os.write(typed, b"hello\n")
    with open(shown, "rb") as pipe:
        first = pipe.read(1)  # the rest does not fit into the pipe while we wait here
        os.write(typed, b"/exit\n")
        os.close(typed)
        out = first + pipe.read()
    assert process.wait(60) == 0 and out.decode() == Talker.text + "\n" and process.stderr.read() == b""
    process.stderr.close()


def test_non_blocking_input_that_comes_later(url):
    typing, typed = os.pipe()
    os.set_blocking(typing, False)
    process = subprocess.Popen(
        command("chat", "--url", url), stdin=typing, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    os.close(typing)
    os.write(typed, b"hello\n")
    assert process.stdout.readline().decode() == Talker.text + "\n"  # it reads again now, and finds nothing
    os.write(typed, b"again\n")
    assert process.stdout.readline().decode() == Talker.text + "\n"
    os.close(typed)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, b"", b"")


# ------------------------------------------------------------------------------------------ with an engine in the process


def test_generate_with_streams_in_every_state(model):
    words = ["generate", "--model", model, *SMALL, "--max-tokens", "40", "--prompt", "hello"]
    code, out, _ = in_shell("2>&- <&-", *words, "--prompt", "you", "--show-stats")
    assert code == 0 and out.count("\n") >= 2
    code, _, err = in_shell("> /dev/full", *words)
    assert code == 1 and err == "headrace: standard output: it cannot be written (No space left on device)\n"
    code, head, err = in_shell("| head -n 1", *words, *["--prompt", "you"] * 3)
    assert not err and head == out.splitlines(keepends=True)[0]
    options = ["--json", "--log-level", "info"]
    code, asked, err = in_shell("", *words[:-1], "schöne ☃", *options, PYTHONIOENCODING="ascii")
    assert code == 0 and json.loads(asked)["prompt"] == "schöne ☃"  # JSON can be written anywhere
    assert "memory plan" in err and " INFO " in err  # of which nothing was there without the option


def test_a_server_needs_no_stream_at_all(model):
    """As a daemon starts it: what would be printed is lost, and no socket becomes a standard stream."""
    port = quiet_port()
    words = command("serve", model, *SMALL[:-2], "--port", str(port), "--no-standby", "--log-level", "info")
    process = subprocess.Popen(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", *words], env=environment())
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

            def ready() -> bool:
                assert process.poll() is None
                with contextlib.suppress(httpx.TransportError):
                    return http.get("/ready").status_code == 200
                return False

            until(ready, 120)
            body = {"model": model, "prompt": "hello", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
            kinds = [stat.S_IFMT(os.stat(f"/proc/{process.pid}/fd/{n}").st_mode) for n in range(3)]
            assert kinds == [stat.S_IFCHR] * 3
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
