"""What the README and docs/using.md tell their reader to type works as it stands there: every curl, and the batch file."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import headrace.engine.client
from fake_engine import FakeEngine
from headrace.cli import main
from headrace.cli.serve import first_request
from server_driver import serving
from test_run_batch import FakeClient

ROOT = Path(__file__).parents[1]
BLOCKS = [block for page in ("README.md", "docs/using.md") for block in re.findall(r"```\w*\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)]
CURLS = {re.search(r"http://\S+?(/\S*)", block)[1]: block for block in BLOCKS if block.startswith("curl ")}  # type: ignore[index]
ADDRESS = "http://127.0.0.1:8000"
# a failure has an exit code, and proxies of whoever runs the tests are left out
CURL = "curl() { command curl -sS --fail-with-body --noproxy '*' --max-time 30 \"$@\"; }\n"


def test_there_is_one_for_each_api():
    assert set(CURLS) == {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/v1/rerank", "/v1/score", "/v1/embeddings"}
    assert any("run-batch" in block for block in BLOCKS)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_every_curl_is_answered():
    engine = FakeEngine(model_name="SmolLM2-135M-Instruct")
    async with serving(engine) as here:
        for path, command in CURLS.items():
            assert ADDRESS in command
            script = CURL + command.replace(ADDRESS, f"http://127.0.0.1:{here.port}")
            process = await asyncio.create_subprocess_exec("bash", "-c", script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            said = (await process.communicate())[0].decode()
            assert process.returncode == 0, f"{path}: {said}"
            last = said.strip().splitlines()[-1]
            assert last == "data: [DONE]" or not json.loads(last).get("error"), said


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(("chats", "keys"), [(True, ()), (False, ("secret-1",))])
async def test_the_line_that_a_server_prints_is_answered(chats, keys):
    async with serving(FakeEngine(model_name="miller's"), api_keys=keys) as here:
        line = first_request(f"http://127.0.0.1:{here.port}", "miller's", chats, bool(keys)).replace("KEY", "secret-1")
        process = await asyncio.create_subprocess_exec("bash", "-c", CURL + line, stdout=subprocess.PIPE)
        assert json.loads((await process.communicate())[0])["choices"]


def test_the_batch_file_is_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(headrace.engine.client, "EngineClient", FakeClient)
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in BLOCKS if block.startswith("echo ")]
    shell, _, command = block.rpartition("headrace run-batch")
    subprocess.run(["bash", "-c", shell], check=True, cwd=tmp_path)
    assert main(["run-batch", *command.partition("#")[0].split()]) == 0
    [answer] = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert json.loads(answer)["response"]["status_code"] == 200
