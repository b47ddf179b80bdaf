"""`headrace pull | list | rm | run` with huggingface-hub's real client, and a Hub on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fake_hub import COMMIT, FakeHub, etag_of
from headrace.cli import main
from headrace.config import EngineConfig
from headrace.engine.weight_sizes import weight_bytes
from headrace.errors import CapacityError, CheckpointError
from headrace.model import hub as hub_files
from headrace.model.checkpoint import locate_config, pinned, resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.speculative.checkpoint import draft_checkpoint
from loader_files import write_llama_gguf
from server_driver import SRC, ServerProcess, quiet_port, until
from tiny_models import write_tiny

WEIGHTS = os.urandom(300_000)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Large files are those of 100 kB here."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    files = {
        "org/tensors": {"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"{}", "evil.py": b"x", "pytorch_model.bin": b"x" * 9},
        "org/many-GGUF": {"README.md": b"x", "many-Q4_K_M.gguf": WEIGHTS[:200_000], "many-Q8_0.gguf": WEIGHTS, "mmproj-F16.gguf": b"x" * 9},
        "org/one-GGUF": {"one.IQ4_XS.gguf": WEIGHTS}, "org/none": {"README.md": b"x"},
    }  # fmt: skip
    with FakeHub(files) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        for module in ("constants", "utils._cache_manager"):
            monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_files, "LARGE", 100_000)
        server.cache = tmp_path / "hub"
        yield server


def test_a_model_is_pulled_listed_used_and_removed(hub, capsys):
    assert main(["pull", "org/tensors"]) == 0
    out, err = capsys.readouterr()
    folder = Path(out.strip())
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert re.search(r"org/tensors: 300\.0 kB in 3 files, 300\.0 kB to download, [\d.]+ [GT]B free in ", err)
    assert main(["pull", "org/tensors"]) == 0
    assert "all of it is there" in capsys.readouterr().err
    assert [r for r in hub.ranges if r[0] == "model.safetensors"] == [("model.safetensors", None)]  # fetched once
    assert main(["pull", "org/many-GGUF:q8_0"]) == main(["pull", "org/many-GGUF:Q4_K_M"]) == main(["pull", "org/one-GGUF"]) == 0
    out, err = capsys.readouterr()
    assert [Path(line).name for line in out.split()] == ["many-Q8_0.gguf", "many-Q4_K_M.gguf", "one.IQ4_XS.gguf"] and "headrace run org/one-GGUF:IQ4_XS" in err
    assert main(["list"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows.keys() == {"NAME", "org/tensors", "org/many-GGUF:Q4_K_M", "org/many-GGUF:Q8_0", "org/one-GGUF:IQ4_XS"}
    assert re.search(r"200\.0 kB +now +gguf", rows["org/many-GGUF:Q4_K_M"]) and re.search(r"300\.0 kB +now +safetensors", rows["org/tensors"])
    assert main(["rm", "org/many-GGUF:Q4_K_M", "org/tensor"]) == 1  # nothing is removed if not all are there
    assert "did you mean org/tensors?" in capsys.readouterr().err
    assert main(["rm", "org/many-GGUF:q4_k_m", "org/tensors"]) == 0
    assert "200.0 kB freed" in capsys.readouterr().out
    assert main(["list"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"NAME", "org/many-GGUF:Q8_0", "org/one-GGUF:IQ4_XS"}
    assert main(["rm", "org/many-GGUF:Q8_0", "org/one-GGUF"]) == 0 and main(["list"]) == 0
    assert "no model is in the cache" in capsys.readouterr().err and not list(hub.cache.glob("models--*"))


def partial_of(hub: FakeHub) -> Path:
    name = etag_of("model.safetensors", WEIGHTS) + ".model.safetensors.headrace"
    return hub.cache / "models--org--tensors" / "blobs" / name


def test_a_pull_goes_on_where_it_was_interrupted(hub, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    hub.cut["model.safetensors"] = 131_072
    assert main(["pull", "org/tensors"]) == 1
    assert "org/tensors" in capsys.readouterr().err
    partial = partial_of(hub)
    assert partial.stat().st_size == 131_072
    stale = partial.with_name("0" * 64 + ".model.safetensors.headrace")
    stale.write_bytes(b"of an older commit")
    hub.ranges.clear()
    hub.cut.clear()
    assert main(["pull", "org/tensors"]) == 0
    assert ("model.safetensors", "bytes=131072-") in hub.ranges and not partial.exists() and not stale.exists()
    out, err = capsys.readouterr()
    assert (Path(out.strip()) / "model.safetensors").read_bytes() == WEIGHTS and "300.0 kB in 3 files, 168.9 kB to download" in err


def test_what_was_left_damaged_is_not_taken(hub, capsys):
    partial = partial_of(hub)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\0" * 1000)
    assert main(["pull", "org/tensors"]) == 1
    assert "damaged" in capsys.readouterr().err and not partial.exists()
    assert main(["pull", "org/tensors"]) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/many-GGUF", "name one of its .gguf files: org/many-GGUF:Q4_K_M (200.0 kB), org/many-GGUF:Q8_0 (300.0 kB)"), ("org/many-GGUF:Q5_K_M", "org/many-GGUF:Q8_0"),
        ("org/tensors:Q4_0", "there is none"), ("org/none", "there are no weights"), ("org/nothing", "'org/nothing' cannot be had: RepositoryNotFoundError"),
        ("a b c", "'a b c' is no Hub id"), (str(SRC), "a model of the Hub: this one is a local"),
    ],
)  # fmt: skip
def test_what_cannot_be_pulled(hub, capsys, name, said):
    assert main(["pull", name]) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_without_a_network_it_says_what_there_is(hub, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{quiet_port()}")
    assert main(["pull", "org/tensors"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "'org/tensors' cannot be had: ConnectError" in last and "is there a network?" in last
    for wanted in (EngineConfig(model="org/tensors"), EngineConfig(tokenizer="org/tensors")):  # in the same words, of parts of it too
        with pytest.raises(CheckpointError, match=r"'org/tensors' cannot be had: ConnectError.*is there a network\?"):
            locate_config(wanted) if wanted.model else resolve_checkpoint(wanted)


@pytest.mark.parametrize("words", [["list"], ["rm", "org/one-GGUF"], ["pull", "org/one-GGUF"], ["run", "org/one-GGUF"]])
def test_a_cache_that_cannot_be_read_is_named(hub, capsys, monkeypatch, tmp_path, words):
    """By the one refusal that holds for every user, root too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / ("n" * 300)))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / ("n" * 300)), raising=False)
    assert main(words) == 1
    assert re.search("^headrace: .*n{300}", capsys.readouterr().err, re.MULTILINE) and not list(tmp_path.iterdir())


def test_what_does_not_fit_is_not_begun(hub, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 300_000, hub_files.SPARE + 299_999))
    assert main(["pull", "org/tensors"]) == 1
    err = capsys.readouterr().err
    assert "300.0 kB to download, 268.7 MB free" in err and not hub.ranges
    assert main(["pull", "org/tensors", "--revision", "v9"]) == 1 and "RevisionNotFound" in capsys.readouterr().err


def test_a_tag_names_a_file_wherever_a_model_is_named(hub, tmp_path):
    data = write_llama_gguf(tmp_path / "x.gguf").read_bytes()
    hub.files["org/smol-GGUF"] = {"smol-Q4_1.gguf": data, "smol-Q8_0.gguf": b"x"}
    checkpoint = resolve_checkpoint(EngineConfig(model="org/smol-GGUF:q4_1"))
    assert checkpoint.path.name == "smol-Q4_1.gguf" and checkpoint.path.parent.name == COMMIT
    del hub.files["org/smol-GGUF"]
    for offline in (False, True):  # the cache has it, and nobody is asked
        assert resolve_checkpoint(EngineConfig(model="org/smol-GGUF:Q4_1", local_files_only=offline)).path == checkpoint.path
    with pytest.raises(CheckpointError, match="org/smol-GGUF:Q8_0 is not in the local cache"):
        resolve_checkpoint(EngineConfig(model="org/smol-GGUF:Q8_0", local_files_only=True))
    with pytest.raises(CheckpointError, match="cannot be had"):
        resolve_checkpoint(EngineConfig(model="org/smol-GGUF:Q8_0"))


@pytest.mark.parametrize("folder", ["", "Q4_1/"])
def test_a_tag_names_a_file_in_all_its_parts(hub, tmp_path, capsys, folder):
    """Some have a folder for those of one file."""
    write_llama_gguf(tmp_path / "smol-q4_1.gguf", parts=2)
    hub.files["org/smol-GGUF"] = {folder + path.name: path.read_bytes() for path in tmp_path.glob("*.gguf")} | {
        "smol-q8_0.gguf": b"x" * 9, "more/smol-q8_0.gguf": b"another", "Q4_1/config.json": b"another",
    }  # fmt: skip
    assert main(["pull", "org/smol-GGUF"]) == 1
    size = hub_files.in_bytes(sum(path.stat().st_size for path in tmp_path.glob("*.gguf")))
    assert f"name one of its .gguf files: org/smol-GGUF:q4_1 ({size}), org/smol-GGUF:q8_0 (9 bytes)" in capsys.readouterr().err
    checkpoint = resolve_checkpoint(EngineConfig(model="org/smol-GGUF:Q4_1"))
    assert checkpoint.path.name == "smol-q4_1-00001-of-00002.gguf" and len({entry.file for entry in checkpoint.tensors().values()}) == 2
    again = pinned(EngineConfig(model="org/smol-GGUF:Q4_1", local_files_only=True), checkpoint)
    assert again.revision == COMMIT and resolve_checkpoint(again).path == checkpoint.path
    assert main(["list"]) == 0
    row = capsys.readouterr().out.splitlines()[1:]
    assert len(row) == 1 and row[0].startswith("org/smol-GGUF:q4_1") and f" {size} " in row[0]
    checkpoint.path.with_name("smol-q4_1-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="org/smol-GGUF:Q4_1 is not in the local cache"):
        resolve_checkpoint(EngineConfig(model="org/smol-GGUF:Q4_1", local_files_only=True))
    resolve_checkpoint(EngineConfig(model="org/smol-GGUF:Q4_1"))
    assert main(["rm", "org/smol-GGUF:q4_1"]) == 0 and main(["list"]) == 0
    assert "no model is in the cache" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "Q4_1/"])
@pytest.mark.parametrize("beside", ["README.md", "config.json"])
def test_the_only_file_of_a_repository_needs_no_tag_wherever_it_is(hub, tmp_path, monkeypatch, folder, beside):
    """However often it is asked for, by a server and its core."""
    hub.files["org/smol-GGUF"] = {f"{folder}smol-q4_1.gguf": write_llama_gguf(tmp_path / "x.gguf").read_bytes(), beside: b'{"model_type": "llama"}'}
    locate_config(EngineConfig(model="org/smol-GGUF"))
    for offline in (False, False, True):
        checkpoint = resolve_checkpoint(config := EngineConfig(model="org/smol-GGUF", local_files_only=offline))
        assert checkpoint.path.name == "smol-q4_1.gguf" and checkpoint.gguf
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{quiet_port()}")
    again = pinned(replace(config, local_files_only=False), checkpoint)  # of a core that dies when there is no network
    with pytest.raises(CheckpointError, match="ConnectError"):
        resolve_checkpoint(replace(again, revision=None))
    assert resolve_checkpoint(again).path == checkpoint.path


def test_whoever_needs_a_model_that_is_not_there_says_what_it_weighs_first(hub, caplog, monkeypatch):
    said, config = "org/tensors is fetched: 300.0 kB in 3 files, 300.0 kB to download, ", EngineConfig(model="org/tensors")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, hub_files.SPARE))
        with pytest.raises(CapacityError, match=r"org/tensors: 300\.0 kB to download, 268\.4 MB free"):
            resolve_checkpoint(config)
    assert said in caplog.text and not hub.ranges
    caplog.clear()
    assert (resolve_checkpoint(config).path / "model.safetensors").read_bytes() == WEIGHTS and said in caplog.text
    caplog.clear()
    assert resolve_checkpoint(config).path and "is fetched" not in caplog.text


def test_run_serves_and_talks_and_leaves_nothing(model, tmp_path):
    """In processes of its own, with the Hub named by HF_ENDPOINT."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HEADRACE_STANDBY": "0", "HF_HUB_CACHE": str(tmp_path)}
    words = ["run", str(model), "--port", "0", "--device", "cpu", "--max-model-len", "256", "--max-num-seqs", "2", "--max-tokens", "4", "--temperature", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", *words], input="Hello\nMore\n", env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
    port = int(re.search(r"serving at http://127\.0\.0\.1:(\d+) until this ends", done.stderr)[1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert "listening" not in done.stderr and "Traceback" not in done.stderr


def test_a_core_that_is_started_again_has_the_model_that_was_there(hub, tmp_path, monkeypatch):
    """Although the Hub has another version by now: a stream would go on with other weights, behind the old ones' tokenizer."""

    def files(seed: int) -> dict[str, dict[str, bytes]]:
        folder = write_tiny("llama", tmp_path / f"{seed}", seed=seed)
        model = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", "tokenizer.json")}
        return {"org/tiny": model, "org/draft": model, "org/words": {"tokenizer.json": model["tokenizer.json"] + b" " * seed}}

    for name, value in (("HF_ENDPOINT", hub.url), ("HF_HUB_CACHE", str(hub.cache)), ("HEADRACE_STANDBY", "0")):
        monkeypatch.setenv(name, value)
    hub.files = files(0)
    others = ("--speculative-method", "draft_model", "--speculative-model", "org/draft", "--tokenizer", "org/words")
    with ServerProcess("org/tiny", *others, tmp=tmp_path) as server:
        server.wait_ready()
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        first = server.http.post("/v1/completions", json=body).json()["choices"][0]
        hub.commit_to(files(1))
        asked, core = len(hub.ranges), server.core()
        os.kill(core, signal.SIGKILL)
        until(lambda: server.core() not in (0, core) and server.is_ready(), 60)
        assert server.http.post("/v1/completions", json=body).json()["choices"][0] == first
        assert hub.ranges[asked:] == []


def test_a_tokenizer_and_a_draft_of_the_hub_stay_as_they_were_found_too(hub, tmp_path):
    """Whoever reads them once more, with a network and without; what lies here has no commit."""
    folder = write_tiny("llama", tmp_path / "tiny")
    model = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", "tokenizer.json")}
    hub.files = {"org/tiny": model, "org/words": {"tokenizer.json": model["tokenizer.json"]}, "org/draft": model}
    asked = EngineConfig(model="org/tiny", tokenizer="org/words", speculative_method="draft_model", speculative_model="org/draft")
    checkpoint = resolve_checkpoint(asked)
    config = pinned(asked, checkpoint)
    hub.commit_to({name: {file: data + b" " for file, data in files.items()} for name, files in hub.files.items()})
    target = model_config_from_hf(checkpoint.config)
    for again in (config, replace(config, local_files_only=True), pinned(config, checkpoint)):
        found = resolve_checkpoint(again)
        assert (found.path, found.tokenizer_path) == (checkpoint.path, checkpoint.tokenizer_path)
        assert draft_checkpoint(again, target)[0].path.name == checkpoint.tokenizer_path.name == COMMIT
        assert weight_bytes(again, found, on_card=False) == 2 * weight_bytes(replace(again, speculative_method=None, speculative_model=None), found, False)
    assert resolve_checkpoint(asked).tokenizer_path.name == hub.commit == draft_checkpoint(asked, target)[0].path.name
    for one in (folder, shutil.copytree(folder, tmp_path / f"tiny@{COMMIT}")):  # which looks like a name at a commit
        here = replace(asked, model=str(one), tokenizer=str(one), speculative_model=str(one))
        found = resolve_checkpoint(here)
        assert pinned(here, found) == here and found.tokenizer_path == draft_checkpoint(here, target)[0].path == one


def test_run_says_why_the_server_does_not_come_up(capfd, model):
    assert main(["run", "./no/model/here", "--port", "0"]) == 1
    assert "directory ./no/model/here does not exist, and './no/model/here' is no Hub id" in capfd.readouterr().err
    assert main(["run", str(model), "--port", "0", "--max-model-len", "99999999"]) == 1
    err = capfd.readouterr().err
    assert "max-model-len: got 99999999" in err
