"""A coding task, played by a model that knows its lines: reads a file, changes it, runs it, and says what came out.

What it writes next depends on its prompt alone (how many results of tools stand behind the task, and what the last one says), as
with a real model; so an agent that sends the same conversation again gets the same answer again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from fake_engine import FakeEngine
from headrace.api.app import create_app
from headrace.api.config import ServerConfig
from headrace.sampling.params import SamplingParams

TASK = "Rename f to g in a.py, then run it."
FILE, WANTED = 'def f():\n    return "grüße 🚀"\n\n\nprint(f())\n', 'def g():\n    return "grüße 🚀"\n\n\nprint(g())\n'
SAYS = "grüße 🚀"  # what the program prints
PATCH = (
    '*** Begin Patch\n*** Update File: a.py\n@@\n-def f():\n+def g():\n     return "grüße 🚀"\n \n \n-print(f())\n+print(g())\n*** End Patch\n'
)
TURN = "<|im_start|>"
TEMPLATE = (  # like Qwen's
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Line = Callable[[str], str]  # the last result of a tool -> what the model writes


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def script(lines: Sequence[Line]) -> Callable[[list[int], SamplingParams], str]:
    """A model that plays `lines`, one for each result it has seen, once it is asked for the TASK."""

    def answer(ids: list[int], params: SamplingParams) -> str:
        prompt = bytes(i for i in ids if i < 256).decode("utf-8", "replace")
        asked = prompt.rfind(TASK)
        if asked < 0:
            return "Rename a function"  # an agent's question beside it: a title
        results = prompt[asked:].split("\ntool\n")[1:]
        last = results[-1].partition("\nassistant\n")[0] if results else ""
        return lines[min(len(results), len(lines) - 1)](last)

    return answer


def engine(lines: Sequence[Line], **options: object) -> FakeEngine:
    made = FakeEngine(script=script(lines), max_model_len=2**20, supports_structured=True, **options)  # type: ignore[arg-type]
    made.tokenizer.chat_templates = {"default": TEMPLATE}
    return made


def claude_lines(folder: str | Path = ".") -> list[Line]:
    """As Claude Code's tools want it: a look before the change, two calls at once, thoughts before calls."""
    path = f"{folder}/a.py"
    return [
        lambda _: "<think>\nI look at it first.\n</think>\n\nLet me see." + call("Read", file_path=path),
        lambda _: call("Edit", file_path=path, old_string="def f():", new_string="def g():"),
        lambda _: "<think>\nAnd where it is called.\n</think>\n\n" + call("Edit", file_path=path, old_string="print(f())", new_string="print(g())"),
        lambda _: "Now I run it." + call("Bash", command=f"python3 {path}", description="Run it"),
        lambda last: f"Done: it prints {SAYS}." if SAYS in last else f"It does not print what it should: {last}",
    ]


def codex_lines(shell: str = "exec_command", field: str = "cmd", patch: bool = True) -> list[Line]:
    """As Codex' tools want it. `shell`, `field`: how its version runs commands; without `patch`, changes go through that, too."""

    def run(command: str) -> str:
        return call(shell, **{field: command})

    change = call("apply_patch", input=PATCH) if patch else run("sed -i 's/f()/g()/' a.py")
    return [
        lambda _: "<think>\nI look at it first.\n</think>\n\n" + run("cat a.py"),
        lambda _: "I rename it." + change,
        lambda _: "<think>\nDoes it run?\n</think>\n\n" + run("python3 a.py"),
        lambda last: f"Done: it prints {SAYS}." if SAYS in last else f"It does not print what it should: {last}",
    ]


def codex_script_lines() -> list[Line]:
    """As the Codex wants it that offers one custom tool, which runs JavaScript, in a namespace."""

    def run(code: str) -> str:
        return call("functions__exec", input=code)

    def command(text: str) -> str:
        return run(f"const r = await tools.exec_command({{cmd: {json.dumps(text)}}});\ntext(r.output);")

    return [
        lambda _: "<think>\nI look at it first.\n</think>\n\n" + command("cat a.py"),
        lambda _: "I rename it." + run(f"await tools.apply_patch({json.dumps(PATCH)});"),
        lambda _: command("python3 a.py"), codex_lines()[-1],
    ]  # fmt: skip


@contextlib.contextmanager
def served(lines: Sequence[Line], after: Callable[[], int] = lambda: -1) -> Iterator[tuple[str, Cuts]]:
    """The address of a server of that model in a thread, and its cuts."""
    app = Cuts(create_app(engine(lines), ServerConfig(any_model_name=True)), after)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", access_log=False))
    socket = server.config.bind_socket()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([socket])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}", app
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


class Cuts:
    """An application whose streams are cut off: the first one of each body after so many pieces as `after` says; what is asked
    again is answered whole, and so is what comes after MOST cuts in a row: some ask again with another body, and give up after five.
    `times`: how often it was done."""

    MOST = 3

    def __init__(self, app: Any, after: Callable[[], int]):
        self.app, self.after, self.times, self._seen, self._row = app, after, 0, set[bytes](), 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        gone, left = asyncio.Event(), sys.maxsize

        async def given() -> Any:
            if messages:
                return messages.pop(0)
            waits = [asyncio.ensure_future(receive()), asyncio.ensure_future(gone.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                return {"type": "http.disconnect"} if gone.is_set() else waits[0].result()
            finally:
                for wait in waits:
                    wait.cancel()

        async def taken(message: Any) -> None:
            nonlocal left
            if message["type"] == "http.response.start":
                if dict(message["headers"]).get(b"content-type") == b"text/event-stream":
                    if body not in self._seen and self._row < self.MOST:
                        left = self.after()
                    else:
                        self._row = 0
                    self._seen.add(body)
            else:
                if not left:
                    self.times, self._row = self.times + 1, self._row + 1
                    gone.set()
                left -= 1
            if not gone.is_set():
                await send(message)

        await self.app(scope, given, taken)
