"""Safetensors checkpoints: single and sharded, fused while loading, every fault named; and the dummy format."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

import loader_files as files
from headrace.config import EngineConfig
from headrace.errors import CheckpointError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.formats.safetensors_file import INDEX_NAME, find_tensors, read_header
from headrace.model.loader import load_model
from headrace.model.weight import Weight
from model_harness import experts_apart, in_usual_order
from tiny_models import TINY, write_tiny

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32, **options):
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path), **options))
    return load_model(checkpoint, model_config_from_hf(checkpoint.config), dtype, CPU)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen2", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def shard(path: Path, num_shards: int) -> dict[str, str]:
    """Split model.safetensors into shards with an index; returns the weight map."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_shards):
        shard_name = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::num_shards]}
        save_file(part, path / shard_name)
        weight_map |= dict.fromkeys(part, shard_name)
    (path / "model.safetensors").unlink()
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("family", TINY)
def test_every_family_loads_what_the_file_holds(family: str, tmp_path: Path):
    path = write_tiny(family, tmp_path / "model")
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    config = model_config_from_hf(checkpoint.config)
    weights = load_model(checkpoint, config, torch.float32, CPU)
    tensors = experts_apart(config, load_file(path / "model.safetensors"))
    for spec in weight_plan(config):
        found = {name: in_usual_order(config, name, tensors[name]) for name, _ in spec.sources if name in tensors}
        sources = [found[name][rows.start : rows.stop] for name, rows, _ in spec.reads if found]
        if not sources:
            assert spec.target == "lm_head" and weights.lm_head.data is weights.embedding
            continue
        owner, _, name = spec.target.rpartition(".")
        holder = weights.layers[int(owner.split(".")[1])] if owner else weights
        held = holder.more[name] if owner and name in holder.more else getattr(holder, name)
        held = held.data if isinstance(held, Weight) else held
        wanted = torch.cat(sources)  # a norm without a bias has zeros in its place
        assert torch.equal(held[: len(wanted)], wanted) and not held[len(wanted) :].any(), spec.target


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted(copy: Path, stored: torch.dtype, wanted: torch.dtype):
    tensors = {n: t.to(stored) for n, t in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    weights = load(copy, wanted)
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].to(wanted))
    assert weights.layers[0].qkv.data.dtype == wanted


def test_shards_give_the_same_weights(tiny: Path, copy: Path):
    shard(copy, 3)
    one, many = load(tiny), load(copy)
    assert torch.equal(one.embedding, many.embedding)
    assert all(torch.equal(a.qkv.data, b.qkv.data) and torch.equal(a.qkv_bias, b.qkv_bias) for a, b in
               zip(one.layers, many.layers, strict=True))  # fmt: skip


def test_the_index_decides_what_is_loaded(copy: Path):
    """A shard that the index does not name, left over from another save, is not looked at."""
    shard(copy, 2)
    (copy / "stale.safetensors").write_bytes(b"garbage")
    load(copy)


def test_tied_embeddings_written_out_twice_are_one_tensor(copy: Path):
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, copy / "model.safetensors")
    weights = load(copy)
    assert weights.lm_head.data is weights.embedding


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def drop(path: Path, name: str) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    save_file(tensors, path / "model.safetensors")


def test_a_missing_output_matrix_is_tied_unless_the_config_denies_it(copy: Path):
    drop(copy, "lm_head.weight")
    edit_config(copy, tie_word_embeddings=True)
    weights = load(copy)
    assert weights.lm_head.data is weights.embedding
    edit_config(copy, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing"):
        load(copy)


@pytest.mark.parametrize("tied", [True, False, None])
def test_an_output_matrix_in_the_file_is_taken_whatever_the_config_says(copy: Path, tied: bool | None):
    """As Transformers does: a matrix of its own is not tied over."""
    edit_config(copy, tie_word_embeddings=tied)
    written = load_file(copy / "model.safetensors")
    weights = load(copy)
    assert torch.equal(weights.lm_head.data, written["lm_head.weight"].to(weights.lm_head.data.dtype))
    assert not torch.equal(weights.lm_head.data, weights.embedding)


def test_harmless_buffers_are_ignored_and_other_tensors_are_not(copy: Path):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, copy / "model.safetensors")
    load(copy)
    tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(4)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*q_proj\.lora_A\.weight' is unexpected"):
        load(copy)


def test_missing_and_misshapen_tensors_are_named(copy: Path):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(copy / "model.safetensors")
    whole = tensors[name]
    tensors[name] = whole[:, :-1].contiguous()
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{name}' has shape"):
        load(copy)
    tensors[name] = whole.T.contiguous()  # as many bytes as wanted
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}' has shape"):
        load(copy)
    drop(copy, name)
    with pytest.raises(CheckpointError, match=rf"{name}' is missing"):
        load(copy)


def test_a_missing_shard_is_named(copy: Path):
    weight_map = shard(copy, 3)
    gone = weight_map["model.norm.weight"]
    (copy / gone).unlink()
    with pytest.raises(CheckpointError, match=rf"{gone} does not exist"):
        load(copy)


def test_an_index_that_lies_is_an_error(copy: Path):
    weight_map = shard(copy, 2)
    for changed, message in (
        ({"model.norm.weight": "../../etc/passwd"}, "no safetensors file's name"),
        ({"model.norm.weight": 3}, "no safetensors file's name"),
        ({"model.other.weight": weight_map["model.norm.weight"]}, r"no tensor 'model\.other\.weight'"),
    ):
        (copy / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map | changed}))
        with pytest.raises(CheckpointError, match=message):
            load(copy)
    for text in ("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'):
        (copy / INDEX_NAME).write_text(text)
        with pytest.raises(CheckpointError, match=INDEX_NAME):
            load(copy)


def test_directories_without_weights_say_so(copy: Path):
    (copy / "model.safetensors").rename(copy / "a.safetensors")
    load(copy)  # the only one
    shutil.copy(copy / "a.safetensors", copy / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"2 \*\.safetensors files but no"):
        load(copy)
    for name in "ab":
        (copy / f"{name}.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors.*pytorch_model\.bin is pickled"):
        load(copy)


GOOD = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
BROKEN = {
    "empty": (b"", b"", 0),
    "header length": (GOOD, b"\0" * 16, 2**62),
    "header past the end": (GOOD, b"", 4096),
    "not json": (b"{]", b"", None),
    "not utf-8": (b'{"\xff": 1}', b"", None),
    "deep": (b"[" * 100_000, b"", None),
    "not an object": ([1], b"", None),
    "entry not an object": ({"a": 3}, b"", None),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, b"\0" * 16, None),
    "negative shape": ({"a": GOOD["a"] | {"shape": [-2, -2]}}, b"\0" * 16, None),
    "float shape": ({"a": GOOD["a"] | {"shape": [2.0, 2]}}, b"\0" * 16, None),
    "boolean shape": ({"a": GOOD["a"] | {"shape": [True, 4]}}, b"\0" * 16, None),
    "huge shape": ({"a": GOOD["a"] | {"shape": [2**62, 2]}}, b"\0" * 16, None),
    "wrong shape": ({"a": GOOD["a"] | {"shape": [2, 3]}}, b"\0" * 16, None),
    "offsets backwards": ({"a": GOOD["a"] | {"data_offsets": [16, 0]}}, b"\0" * 16, None),
    "three offsets": ({"a": GOOD["a"] | {"data_offsets": [0, 8, 16]}}, b"\0" * 16, None),
    "offsets past the end": ({"a": GOOD["a"] | {"data_offsets": [8, 24]}}, b"\0" * 16, None),
    "overlap": (GOOD | {"b": GOOD["a"] | {"shape": [1, 2], "data_offsets": [8, 16]}}, b"\0" * 16, None),
    "truncated": (GOOD, b"\0" * 15, None),
    "dtype": ({"a": GOOD["a"] | {"dtype": "F9"}}, b"\0" * 16, None),
    "dtype not a string": ({"a": GOOD["a"] | {"dtype": ["F32"]}}, b"\0" * 16, None),
}


def test_the_right_file_that_the_broken_ones_differ_from(tmp_path: Path):
    nothing = GOOD["a"] | {"shape": [0], "data_offsets": [0, 0]}
    entry = read_header(files.raw_safetensors(tmp_path / "x.safetensors", GOOD | {"b": nothing}, b"\0" * 16))["a"]
    assert (entry.shape, entry.num_bytes) == ((2, 2), 16)


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files_are_errors_that_name_them(fault: str, tmp_path: Path):
    header, data, claimed = BROKEN[fault]
    with pytest.raises(CheckpointError, match=r"broken\.safetensors"):
        read_header(files.raw_safetensors(tmp_path / "broken.safetensors", header, data, claimed))


def test_every_truncation_of_a_file_is_an_error(copy: Path):
    whole = (copy / "model.safetensors").read_bytes()
    for size in [*range(0, 3000, 71), *range(3000, len(whole), 20_011), len(whole) - 1]:
        (copy / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            find_tensors(copy)


def test_a_file_cut_after_its_header_was_read_is_an_error(copy: Path):
    checkpoint = resolve_checkpoint(EngineConfig(model=str(copy)))
    entries = checkpoint.tensors()
    raw = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(raw[: len(raw) // 2])

    class Stale:
        path, format, config = checkpoint.path, checkpoint.format, checkpoint.config

        def tensors(self):
            return entries

    with pytest.raises(CheckpointError, match="the file ends inside the tensor"):
        load_model(Stale(), model_config_from_hf(checkpoint.config), torch.float32, CPU)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=5))
def test_corrupt_headers_raise_checkpoint_errors_only(tiny: Path, changes: list[tuple[int, int]]):
    raw = bytearray((tiny / "model.safetensors").read_bytes())
    for position, value in changes:
        raw[position] = value
    path = tiny.with_name("corrupt.safetensors")
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        read_header(path)


def test_dummy_weights_need_a_config_only_and_are_always_the_same(copy: Path):
    (copy / "model.safetensors").unlink()
    one, two = load(copy, load_format="dummy"), load(copy, load_format="dummy")
    assert torch.equal(one.layers[1].qkv.data, two.layers[1].qkv.data)
    assert not torch.equal(one.layers[0].qkv.data, one.layers[1].qkv.data)
    assert 0.015 < one.layers[0].qkv.data.std() < 0.025
    assert 0.9 < one.final_norm.mean() < 1.1
    assert one.lm_head.data is not one.embedding
    edit_config(copy, tie_word_embeddings=True)
    tied = load(copy, load_format="dummy")
    assert tied.lm_head.data is tied.embedding


def test_loading_leaves_torch_and_threads_as_they_were(tiny: Path):
    import threading

    before, threads = torch.get_num_threads(), set(threading.enumerate())  # others' may end meanwhile
    load(tiny)
    assert torch.get_num_threads() == before and not set(threading.enumerate()) - threads


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_bar_is_for_terminals_and_on_stderr(
    terminal: bool, tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    checkpoint = resolve_checkpoint(EngineConfig(model=str(tiny)))
    load_model(checkpoint, model_config_from_hf(checkpoint.config), torch.float32, CPU, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("loading weights" in err) == terminal
