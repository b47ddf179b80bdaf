"""Kernels are compiled before anybody waits for one: by a pool that may lose its processes, into the cache that a card's machine
reads, and what is said of it is true."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from engine_driver import make_core, make_requests, run
from headrace.cli import make_parser
from headrace.cli.compile import without_weights
from headrace.cli.options import engine_options
from headrace.compile_ahead import ahead, no_device
from headrace.compile_ahead.ahead import compiles_ahead, is_complete, note_path, write_note
from headrace.compile_ahead.cards import CARDS, SHARED_MEMORY, named_card
from headrace.compile_ahead.played_ranks import with_part_of_vocabulary
from headrace.compile_ahead.pool import Pool, Tally
from headrace.compile_ahead.weights import weights_without_data
from headrace.config import EngineConfig
from headrace.engine.build import resolve
from headrace.engine.preparation import answer_own
from headrace.errors import ParameterError
from headrace.kernels import launch
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.decoder_weights import MATRICES
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.shard import Shard
from headrace.scheduler.config import SchedulerStats
from tiny_models import write_shape, write_tiny


def write(path: Path, text: str) -> None:
    path.write_text(text)


def die(path: Path) -> None:
    if not path.exists():
        path.write_text("once")
        os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("no such kernel")


def hang() -> None:
    signal.pause()


def children() -> set[str]:
    """This process's, the ended ones that nobody has waited for among them."""
    mine, found = str(os.getpid()), set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found |= {stat.parent.name} if stat.read_text().rpartition(")")[2].split()[1] == mine else set()
    return found


def test_a_pool_runs_each_job_once(tmp_path) -> None:
    seen: list[int] = []
    jobs = [partial(write, tmp_path / str(i), str(i)) for i in range(40)]
    with Pool(jobs, 3, tmp_path, seen.append) as pool:
        assert pool.run() == Tally(40, 0)
    assert sorted(int(path.read_text()) for path in tmp_path.iterdir()) == list(range(40))
    assert seen == list(range(1, 41))


@pytest.mark.parametrize(("bad", "seconds"), [(fail, 60.0), (hang, 1.5)], ids=["refused", "hangs"])
def test_a_job_that_cannot_be_done_costs_no_other(tmp_path, bad, seconds) -> None:
    jobs = [partial(write, tmp_path / "before", ""), bad, *(partial(write, tmp_path / str(i), "") for i in range(4))]
    with Pool(jobs, 1, tmp_path, job_seconds=seconds) as pool:
        assert pool.run() == Tally(5, 1)
    assert len(list(tmp_path.iterdir())) == 5


def test_a_process_that_dies_costs_its_job_alone(tmp_path) -> None:
    """And what it had begun to write in the cache goes with it."""

    def begin_and_die() -> None:
        (tmp_path / "cache" / "KEY" / f"tmp.pid_{os.getpid()}_x").mkdir(parents=True)
        die(tmp_path / "dead")

    before, jobs = children(), [begin_and_die, *(partial(write, tmp_path / str(i), "") for i in range(5))]
    with Pool(jobs, 1, tmp_path / "cache") as pool:
        assert pool.run() == Tally(5, 1)
    assert not list((tmp_path / "cache" / "KEY").iterdir())
    assert children() <= before


def test_a_pool_that_is_left_ends_its_processes(tmp_path) -> None:
    def told(done: int) -> None:
        raise KeyboardInterrupt

    before = children()
    with pytest.raises(KeyboardInterrupt), Pool([partial(write, tmp_path / "a", ""), hang, hang], 3, tmp_path, told) as pool:
        pool.run()
    assert children() <= before


def test_cards_are_named() -> None:
    assert named_card("H100").capability == 90 and named_card("rtx_4090").shared_memory == 99 << 10
    assert {card.capability for card in CARDS.values()} == {80, 86, 89, 90, 120} <= SHARED_MEMORY.keys()
    with pytest.raises(ParameterError, match=r"card.*voodoo2.*h100"):
        named_card("voodoo2")


ONE_KERNEL = """
import json, sys
from pathlib import Path
import torch
from headrace.compile_ahead import no_device
from headrace.kernels import tables
from triton import knobs

def enter():
    four = [torch.empty(9, 64, dtype=torch.int32, device="meta")] * 4
    tables.enter_triton(torch.empty(500, dtype=torch.int32, device="meta"), 2, 300, four)

no_device.install(89)
if sys.argv[1] == "noted":
    launches, original = no_device.note_launches()
    enter()
    no_device.build_without_loading(Path(sys.argv[2]))
    print(no_device.place_of(no_device.compile_noted(launches[0], original)))
else:  # as a process with the card does it
    enter()
print(len(list(Path(knobs.cache.dir).glob("*/*.cubin"))), len(list(Path(knobs.cache.dir).glob("*/__triton_launcher*.so"))))
"""


def test_what_is_noted_is_compiled_under_the_key_that_a_launch_looks_for(tmp_path) -> None:
    (tmp_path / "stub").mkdir()
    compiler = tmp_path / "cc"  # one that links as Ubuntu's does
    compiler.write_text('#!/bin/sh\nexec cc -Wl,--as-needed "$@"\n')
    compiler.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "CC": str(compiler)}

    def run(how: str) -> list[str]:
        command = [sys.executable, "-c", ONE_KERNEL, how, str(tmp_path / "stub")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split("\n")

    place, counts, _ = run("noted")
    assert counts == "1 1" and (tmp_path / "cache" / place).exists()
    for module in (tmp_path / "cache").glob("*/*.so"):
        needed = subprocess.run(["readelf", "-d", str(module)], capture_output=True, text=True, check=True).stdout
        assert "[libcuda.so.1]" in needed, "a process with the card could not load it"
    assert run("launched")[0] == "1 1"  # nothing more


def test_a_triton_whose_kernels_share_what_hands_arguments_over(monkeypatch) -> None:
    """Since 3.7 nothing is built for each; what stood there for 3.6 asked a driver that was not there, and refused every kernel."""

    def asks_the_driver(source: object, metadata: object) -> None:
        raise AttributeError("'NoDevice' object has no attribute 'utils'")

    monkeypatch.delattr(no_device.nvidia, "make_launcher")
    monkeypatch.setattr(no_device.nvidia, "CudaLauncher", asks_the_driver)
    compiled = no_device.compile_noted(no_device.Launch("kernel", ("key",)), lambda kernel, key: SimpleNamespace(src=kernel, metadata=key))
    assert (compiled.src, compiled.metadata) == ("kernel", "key")


def test_another_triton_is_told_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(launch, "_TRITON", "3.8.0")
    launch.takes_gluon.cache_clear()
    try:
        assert not launch.takes_gluon() and not launch.takes_gluon()
    finally:
        launch.takes_gluon.cache_clear()
    [line] = caplog.messages
    assert line.startswith("Triton is 3.8.0: Headrace's fastest kernels are written for Triton 3.6.x, which torch 2.11 brings")


def test_noting_launches_chooses_no_other_kernels(monkeypatch) -> None:
    """What is compiled ahead are those that the engine runs, the ones in Gluon among them."""
    monkeypatch.setattr(no_device.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(no_device.triton.JITFunction, "_do_compile", None)
    monkeypatch.setattr(launch, "_KNOWN", True)
    launch.takes_gluon.cache_clear()
    try:
        before = launch.takes_gluon()
        launch.takes_gluon.cache_clear()
        no_device.note_launches()
        assert launch.takes_gluon() == before == no_device.triton.__version__.startswith(launch.WRITTEN_FOR)
    finally:
        launch.takes_gluon.cache_clear()


def test_requests_of_our_own_leave_nothing_behind(model) -> None:
    """What the engine answers before it is ready changes no answer after it, and no count."""
    def answers(prepared: bool) -> list[list[int]]:
        core = make_core(model)
        if prepared:
            answer_own(core.runner, core.scheduler.limits, core.vocab_size)
        assert core.steps == 0 and not core.has_work and core.scheduler.stats == SchedulerStats()
        assert core.scheduler.num_running == core.scheduler.num_waiting == 0
        return [result.ids for result in run(core, make_requests(3, 4, core.vocab_size)).values()]

    assert answers(True) == answers(False)


def test_a_model_of_floats_needs_no_weights_to_be_compiled_for(tmp_path) -> None:
    """And what is noted for it then is what a machine with the weights looks for."""
    shape = EngineConfig(model=write_shape(tmp_path))
    alone = without_weights(shape)
    assert alone.load_format == "dummy"
    checkpoint = resolve_checkpoint(alone)
    limits = resolve(alone, model_config_from_hf(checkpoint.config), torch.device("cuda"))
    whole = replace(checkpoint, format="safetensors", name="another", path=tmp_path / "elsewhere")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 2) + b"{}")
    whole = replace(whole, path=tmp_path)
    card = named_card("h100")
    note = note_path(alone, checkpoint, limits, card)
    assert note == note_path(shape, whole, limits, card)
    others = (
        note_path(alone, checkpoint, limits, named_card("h200")),
        note_path(replace(alone, quantization="fp8"), checkpoint, limits, card),
        note_path(alone, checkpoint, replace(limits, max_num_seqs=7), card),
    )
    assert len({note, *others}) == 4
    adapted = [{}, {"max_loras": 2}, {"max_lora_rank": 32}, {"lora_experts": True}]
    notes = [note_path(replace(alone, lora=("a=x",), **options), checkpoint, limits, card) for options in adapted]
    assert len({note, *notes}) == 5 and notes[0] == note_path(replace(alone, lora_dir="y"), checkpoint, limits, card)

    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config | {"quantization_config": {"quant_method": "fp8"}}))
    assert without_weights(shape) == shape  # what is narrow in the file is seen by its numbers


def test_the_command_takes_what_a_server_with_adapters_has() -> None:
    """Without their files."""
    words = ["--lora", "a=nowhere", "--lora", "b=x", "--max-loras", "2", "--max-lora-rank", "32", "--lora-experts"]
    config = EngineConfig(**engine_options(make_parser().parse_args(["compile", "some/model", "--card", "h100", *words])))
    assert config.lora == ("a=nowhere", "b=x") and config.takes_adapters
    assert (config.max_loras, config.max_lora_rank, config.lora_experts) == (2, 32, True)


UNTIED = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}


@pytest.mark.parametrize("family, options", [("llama", {"vocab_size": 515}), ("qwen3", UNTIED)])
def test_what_is_played_of_a_rank_is_its_part(family, options, tmp_path) -> None:
    """Layers that are alike once, and of every matrix the size that a rank loads."""
    checkpoint = resolve_checkpoint(EngineConfig(model=str(write_tiny(family, tmp_path / "model", **options))))
    whole, shard = model_config_from_hf(checkpoint.config), Shard(0, 2)
    part = shard.config(whole)
    loaded = load_model(checkpoint, whole, torch.float32, torch.device("cpu"), shard=shard)
    shown, played = weights_without_data(checkpoint, part, torch.float32, None)
    played = with_part_of_vocabulary(played, part, 2)
    assert played.embedding.shape == loaded.embedding.shape and played.lm_head.shape == loaded.lm_head.shape
    assert len(played.layers) == shown.num_layers
    for layer in played.layers:
        assert all(getattr(layer, name).shape == getattr(loaded.layers[0], name).shape for name in MATRICES)


def test_of_ranks_with_narrow_weights_or_adapters_nothing_is_compiled_ahead(tmp_path) -> None:
    shape = EngineConfig(model=write_shape(tmp_path), load_format="dummy", tensor_parallel_size=2)
    checkpoint = resolve_checkpoint(shape)
    card, limits = named_card("h100"), resolve(shape, model_config_from_hf(checkpoint.config), torch.device("cuda"))
    alone = replace(shape, tensor_parallel_size=1)
    assert compiles_ahead(shape, checkpoint) and note_path(shape, checkpoint, limits, card) != note_path(alone, checkpoint, limits, card)
    for narrow in ({"quantization": "fp8"}, {"lora_dir": "adapters"}):
        assert compiles_ahead(replace(alone, **narrow), checkpoint) and not compiles_ahead(replace(shape, **narrow), checkpoint)
    in_file = replace(checkpoint, format="safetensors", config=checkpoint.config | {"quantization_config": {"quant_method": "fp8"}})
    assert not compiles_ahead(shape, in_file)
    assert all(compiles_ahead(replace(shape, quantization="none"), of) for of in (checkpoint, in_file)), "floats"


def test_what_is_noted_counts_while_it_is_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ahead, "kernel_cache", lambda: tmp_path)
    note = tmp_path / "notes" / "one.json"
    assert not is_complete(note)
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / "kernel").touch()
    write_note(note, ["KEY/kernel"])
    assert is_complete(note)
    (tmp_path / "KEY" / "kernel").unlink()
    assert not is_complete(note)
    note.write_text("{")
    assert not is_complete(note)


def test_a_file_of_narrow_matrices_with_a_tied_head(smollm2) -> None:
    """The embedded model's: there is no tensor of the head, which is the embedding."""
    checkpoint = resolve_checkpoint(EngineConfig(model=smollm2))
    config = model_config_from_hf(checkpoint.config)
    _, played = weights_without_data(checkpoint, config, torch.bfloat16, None)
    loaded = load_model(checkpoint, config, torch.bfloat16, torch.device("cpu"), narrow=True)
    for name in MATRICES:
        made, real = getattr(played.layers[0], name), getattr(loaded.layers[0], name)
        assert (made.kind, made.group, made.data.shape) == (real.kind, real.group, real.data.shape) and made.kind != "float"
    assert (played.lm_head.kind, played.lm_head.shape) == (loaded.lm_head.kind, loaded.lm_head.shape)
