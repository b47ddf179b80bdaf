"""`headrace run-batch`: every line is answered once, whatever is wrong with others and wherever an earlier run was cut off."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace.cli.batch_file as batch_file
import headrace.engine.client
from fake_engine import FakeEngine
from headrace.api.app import create_app
from headrace.api.in_process import post
from headrace.cli import main, run_batch
from headrace.cli.batch_file import OutputFile, Response, raw, read_lines
from headrace.cli.run_batch import Batch
from headrace.errors import HeadraceError, ParameterError
from server_driver import MODEL, soon
from tiny_models import write_tiny

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI, "seed": 1}, "/v1/completions": {"prompt": "hi", "seed": 1}, "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"}, "/v1/rerank": {"query": "q", "documents": ["a", "b"]}, "/v1/score": {"text_1": "a", "text_2": "b"},
}  # fmt: skip


class FakeClient(FakeEngine):
    """EngineClient's life around a fake engine. It dies of the `mortal`-th request, and answers none before `together` are there."""

    mortal, together = None, 1

    def __init__(self, config, *args, **options):
        super().__init__(config=config)
        self.dead, self.most, self.enough = None, 0, asyncio.Event()
        FakeClient.last = self

    async def start(self):
        pass

    async def wait_loaded(self):
        pass

    async def close(self):
        assert not self.active

    async def generate(self, *args, **options):
        if self.mortal is not None and len(self.prompts) + 1 == self.mortal:
            self.dead = "it has died"
        async for news in super().generate(*args, **options):
            self.most = max(self.most, len(self.active))
            if self.most >= self.together:
                self.enough.set()
            async with asyncio.timeout(60):
                await self.enough.wait()
            await asyncio.sleep(0)
            yield news


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command over a fake engine: exit code, what the output holds, and what it said."""
    monkeypatch.setattr(headrace.engine.client, "EngineClient", FakeClient)
    monkeypatch.setattr(FakeClient, "mortal", None)

    def run(lines: list, *words: str, output: str | None = None, data: bytes | None = None):
        file = tmp_path / "in.jsonl"
        file.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines) if data is None else data)
        out = tmp_path / "out.jsonl"
        code = main(["run-batch", "-i", str(file), "-o", output or str(out), *words])
        said = capsys.readouterr()
        text = out.read_text() if output is None and out.exists() else said.out
        assert text == "" or text.endswith("\n")
        return code, [json.loads(line) for line in text.splitlines()], said.err

    return run


def line(custom_id: str, url: str = "/v1/chat/completions", **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**BODIES.get(url, {}), **body}}


def test_every_endpoint(run):
    code, found, said = run([line(url, url, model=MODEL) for url in BODIES])
    assert code == 0 and "6 lines answered, 0 with errors" in said
    by_id = {f["custom_id"]: f for f in found}
    assert set(by_id) == set(BODIES)
    for answer in found:
        assert set(answer) == {"id", "custom_id", "response", "error"} and answer["error"] is None and answer["id"].startswith("batch_req_")
        assert set(answer["response"]) == {"status_code", "request_id", "body"} and answer["response"]["status_code"] == 200
    bodies = {url: by_id[url]["response"]["body"] for url in BODIES}
    assert bodies["/v1/chat/completions"]["choices"][0]["message"]["content"] and bodies["/v1/completions"]["choices"][0]["text"]
    assert bodies["/v1/responses"]["status"] == "completed" and not bodies["/v1/responses"]["store"]
    assert bodies["/v1/embeddings"]["data"] and len(bodies["/v1/rerank"]["results"]) == 2 and bodies["/v1/score"]["data"]


def test_lines_for_several_models_are_each_answered_by_their_own(run, monkeypatch, model, tmp_path):
    other = write_tiny("qwen2", tmp_path / "other")
    made = []

    class Named(FakeClient):
        def __init__(self, config, *args, **options):
            super().__init__(config)
            self.script = lambda *_: f"I am {config.model}."
            self.observers, self.spectator = [], None
            made.append(config.model)

        async def close(self, grace=2.0):
            await super().close()

    monkeypatch.setattr(headrace.engine.client, "EngineClient", Named)
    names = [name for _ in range(3) for name in (model, str(other))]
    lines = [line(f"{k}", "/v1/completions", model=name, max_tokens=200) for k, name in enumerate(names)]
    code, found, said = run([*lines, line("none", "/v1/completions")], "--model", model, "--model", str(other), "--device", "cpu")
    answers = {f["custom_id"]: f["response"] for f in found}
    assert code == 1 and "1 with errors" in said and answers.pop("none")["status_code"] == 400
    assert [answers[f"{k}"]["body"]["choices"][0]["text"] for k in range(6)] == [f"I am {name}." for name in names]
    assert sorted(made) == sorted([model, str(other)])


BAD = {
    b"{\n": "not JSON", b"null\n": "Expected `object`", b'{"custom_id": 5}\n': "custom_id", b"\xff\xfe{}\n": "not JSON", b"[" * 9000 + b"\n": "",
    json.dumps(line("a") | {"custom_id": ""}).encode() + b"\n": "custom_id is empty", json.dumps(line("a", stream=True)).encode() + b"\n": "body.stream",
    json.dumps(line("a") | {"method": "GET"}).encode() + b"\n": "method: got 'GET', allowed: POST", json.dumps(line("a") | {"url": "/v1/models"}).encode() + b"\n": "/v1/models",
    json.dumps(line("a") | {"body": [1]}).encode() + b"\n": "object", b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}\n': "body",
}  # fmt: skip


def test_bad_lines_become_errors_and_end_nothing(run):
    mixed = [piece for k, bad in enumerate(BAD) for piece in (bad, line(f"good{k}"), b"\n")]
    code, found, said = run(mixed)
    assert code == 1 and f"{len(BAD)} with errors" in said
    assert sum(f["response"] is not None for f in found) == len(BAD)
    errors = [f for f in found if f["response"] is None]
    assert [e["error"]["message"].partition(":")[0] for e in errors] == [f"line {1 + 3 * k}" for k in range(len(BAD))]
    for error, (bad, words) in zip(errors, BAD.items(), strict=True):
        assert words in error["error"]["message"]
        assert error["custom_id"] == ("a" if b'"custom_id": "a"' in bad else None), "who asked is named wherever he can be"


def test_requests_that_are_refused_are_answers(run):
    code, found, _ = run([line("a", temperature=9), line("b", model="other"), line("c", encoding_format="x")])
    by_id = {f["custom_id"]: f["response"] for f in found}
    assert code == 1 and [by_id[i]["status_code"] for i in "abc"] == [400, 404, 200]
    assert by_id["a"]["body"]["error"]["param"] == "temperature" and by_id["c"]["ignored"] == "encoding_format"
    assert run([line("a", model="other")], "--any-model-name")[0] == 1, "it has been answered"


def test_a_custom_id_counts_once(run):
    code, found, _ = run([line("a"), line("b"), line("a", seed=2), line("a")])
    assert code == 1 and sorted((f["custom_id"], f["error"] and f["error"]["code"]) for f in found if f["error"]) == [("a", "duplicate_custom_id")] * 2
    assert sorted(f["custom_id"] for f in found if f["response"]) == ["a", "b"]


def test_at_most_so_many_at_a_time(run, monkeypatch):
    monkeypatch.setattr(FakeClient, "together", 3)
    code, found, _ = run([line(f"{k}") for k in range(20)], "--concurrency", "3")
    assert code == 0 and len(found) == 20 and FakeClient.last.most == 3


def test_standard_streams(run, monkeypatch):
    data = "".join(json.dumps(line(f"é{k}"), ensure_ascii=False) + "\n" for k in range(9)).encode().removesuffix(b"\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + data), "utf-8"))
    code, found, said = run([], "-i", "-", output="-")
    assert code == 0 and sorted(f["custom_id"] for f in found) == [f"é{k}" for k in range(9)] and "9 lines answered" in said


def test_an_output_of_another_encoding(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    batch_file.StandardOutput().write(batch_file.OutputLine.of("漢😀é", None, {}))
    assert written.getvalue().isascii() and json.loads(written.getvalue())["custom_id"] == "漢😀é"


def test_a_dead_engine_ends_the_run_and_the_next_goes_on(run, monkeypatch):
    monkeypatch.setattr(FakeClient, "mortal", 5)
    lines = [line(f"{k}") for k in range(12)] + [b"{\n"]
    code, first, said = run(lines, "--concurrency", "1")
    assert code == 1 and "it has died" in said and [f["custom_id"] for f in first] == ["0", "1", "2", "3"]
    monkeypatch.setattr(FakeClient, "mortal", None)
    code, found, said = run(lines, "--concurrency", "1")
    assert code == 1 and found[:4] == first and "4 had been before" in said, "answers stay as they were"
    assert [f["custom_id"] for f in found if f["response"]] == [f"{k}" for k in range(12)] and len(found) == 13
    code, again, _ = run(lines[:-1])
    assert code == 0 and again == [f for f in found if f["response"]], "a line that has been mended is no error any more"


def answers(engine: FakeEngine):
    app = create_app(engine)

    async def ask(url: str, body: bytes) -> Response:
        found = await post(app, url, body)
        return Response(found.status, found.headers["x-request-id"], raw(found.body))

    return ask


def work_off(path: Path, data: bytes, engine: FakeEngine) -> Batch:
    async def lines():
        for each in read_lines(io.BytesIO(data)):
            yield each

    output = OutputFile(str(path))
    try:
        batch = Batch(output, 4)
        asyncio.run(batch.run(lines(), answers(engine)))
        return batch
    finally:
        output.close()


def texts(path: Path) -> dict[str, str]:
    found = [json.loads(each) for each in path.read_text().removesuffix("\n").split("\n")]
    assert len({f["custom_id"] for f in found}) == len(found)
    return {f["custom_id"]: f["response"]["body"]["choices"][0]["text"] for f in found}


@settings(max_examples=10)
@given(cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_wherever_a_run_is_cut_off_the_next_goes_on(tmp_path_factory, cuts, seed):
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    ids = [f"{k}\n\u2028é{seed}" for k in range(9)]
    data = b"".join(json.dumps(line(i, "/v1/completions", seed=k)).encode() + b"\n" for k, i in enumerate(ids))
    whole = work_off(path, data, FakeEngine())
    want = texts(path)
    assert set(want) == set(ids) and whole.num_done == 9
    for cut in cuts:
        content = path.read_bytes()
        kept = content[: int(cut * len(content))]
        path.write_bytes(kept)
        engine = FakeEngine()
        work_off(path, data, engine)
        assert texts(path) == want
        complete = kept.count(b"\n") + (content[len(kept) : len(kept) + 1] == b"\n")  # a line may lack nothing but its end
        assert len(engine.prompts) == 9 - complete, "what is answered is not asked again"
        assert [p.name for p in path.parent.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_was_not_the_requests_fault_is_asked_again(tmp_path, status):
    path = tmp_path / "out.jsonl"
    data = json.dumps(line("a", "/v1/completions")).encode()
    output = OutputFile(str(path))
    for name, code in (("a", status), ("b", 400)):
        output.write(batch_file.OutputLine.of(name, Response(code, "", raw(b"oops"))))
    output.close()
    batch = work_off(path, data, FakeEngine())
    found = [json.loads(each) for each in path.read_text().splitlines()]
    assert [(f["custom_id"], f["response"]["status_code"]) for f in found] == [("b", 400), ("a", 200)]
    assert found[0]["response"]["body"] == "oops" and batch.num_failed == 1


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"a": 1}\n', '{"id":"batch_req_1"}\n', "\n", '{"id":"batch_req_1\n{"id":"batch_req_2'])
def test_a_file_that_is_something_else_stays_as_it_is(run, tmp_path, content):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    code = main(["run-batch", "-i", str(path), "-o", str(path)])
    assert code == 1
    file = tmp_path / "in"
    file.write_text("")
    assert main(["run-batch", "-i", str(file), "-o", str(path)]) == 1 and path.read_text() == content


def test_files_that_cannot_be_used(run, tmp_path, capsys):
    for words, said in (
        (["-i", str(tmp_path / "none"), "-o", "-"], "--input"), (["-i", str(tmp_path), "-o", "-"], "--input"),
        (["-i", __file__, "-o", str(tmp_path)], "--output"), (["-i", __file__, "-o", "-", "--concurrency", "0"], "--concurrency"),
    ):
        assert main(["run-batch", *words]) == 1
        assert said in capsys.readouterr().err
    with open(tmp_path / "out.jsonl", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, _, said = run([line("a")])
        assert code == 1 and "no other run" in said


def test_long_lines_are_left_out_one_by_one(monkeypatch):
    monkeypatch.setattr(batch_file, "MAX_LINE", 10)
    rng = random.Random(1)
    lines = [b"x" * rng.choice((0, 1, 9, 10, 11, 30)) for _ in range(50)]
    found = list(read_lines(io.BytesIO(b"\n".join(lines) + b"\n")))
    assert found == [each if len(each) < 10 else None for each in lines]


async def test_what_is_read_ahead_holds_so_many_bytes(monkeypatch):
    monkeypatch.setattr(run_batch, "AHEAD_BYTES", 100)
    taken, ahead = 0, []

    class File(io.BytesIO):
        def readline(self, *size):
            found = super().readline(*size)
            ahead.append(self.tell() - taken)
            return found

    async for line in run_batch.lines_of(File(b"x" * 29 + b"\n" + (b"y" * 29 + b"\n") * 49)):
        await soon(lambda: ahead[-1] > 100 or len(ahead) == 51)  # each side has one more in its hand
        taken += len(line) + 1
    assert taken == 1500 and max(ahead) <= 100 + 3 * 30


def test_a_real_model(tmp_path, capsys):
    model = write_tiny("llama", tmp_path / "model")
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"max_tokens": 4, "temperature": 0}
    lines = [line(f"{k}", "/v1/completions", prompt="a" * k, **body) for k in range(1, 6)] + [line("e", "/v1/embeddings"), line("x", temperature=9)]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    words = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4"]
    assert main(["run-batch", "-i", str(file), "-o", str(out), *words]) == 1
    found = {f["custom_id"]: f["response"] for f in map(json.loads, out.read_text().splitlines())}
    assert {i: r["status_code"] for i, r in found.items()} == {**dict.fromkeys([*"12345e"], 200), "x": 400}
    assert found["3"]["body"]["usage"]["completion_tokens"] == 4 and len(found["e"]["body"]["data"][0]["embedding"]) == 96


def test_a_device_or_a_pipe_is_not_read_for_old_answers(tmp_path):
    """/dev/full gives zeros for ever."""
    line = batch_file.OutputLine.of("a", None, {"code": "x", "message": "y"})
    full = OutputFile("/dev/full")
    with pytest.raises(HeadraceError, match="/dev/full: it cannot be written any further"):
        full.write(line)
    full.close()
    OutputFile("/dev/null").write(line)
    zeros = tmp_path / "zeros"
    with zeros.open("wb") as file:
        file.truncate(1 << 40)  # nor is what has no end of a line
    with pytest.raises(ParameterError, match="its line 1 is something else"):
        OutputFile(str(zeros))
