"""Kernels are compiled before anybody waits for one: by a pool that may lose its processes, into the cache that a card's machine
reads, and what is said of it is true."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import struct
import subprocess
import sys
import time
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
from headrace.compile_ahead import ahead, no_device, notes
from headrace.compile_ahead.ahead import Compilation, compiles_ahead
from headrace.compile_ahead.cards import CARDS, SHARED_MEMORY, named_card
from headrace.compile_ahead.notes import drop_damaged, is_complete, note_path, turn, write_note
from headrace.compile_ahead.played_ranks import with_part_of_vocabulary
from headrace.compile_ahead.pool import Pool, Tally
from headrace.compile_ahead.process import News
from headrace.compile_ahead.weights import weights_without_data
from headrace.config import EngineConfig
from headrace.engine.build import resolve
from headrace.engine.preparation import answer_own
from headrace.errors import CapacityError, CheckpointError, ParameterError
from headrace.kernels import launch
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.decoder_weights import MATRICES
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.shard import Shard
from headrace.model.weight import Weight
from headrace.scheduler.config import SchedulerStats
from quantized_checkpoints import FORMATS, Tiny, int8, quark, write_quantized
from server_driver import until
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


def open_files(process: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(file))
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


def test_a_pool_does_with_the_processes_that_it_gets(tmp_path, monkeypatch) -> None:
    """A container may have few, a machine without overcommitted memory no room for more."""
    fork, asked = os.fork, []

    def none_beside() -> int:
        asked.append(len(asked))
        if len(asked) > 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", none_beside)
    with Pool([partial(write, tmp_path / str(i), "") for i in range(5)], 3, tmp_path) as pool:
        assert pool.run() == Tally(5, 0) and len(asked) > 1
    with pytest.raises(BlockingIOError), Pool([fail], 1, tmp_path) as pool:
        pool.run()


def test_a_pool_takes_only_what_its_own_processes_have_left_half_done(tmp_path) -> None:
    """In a cache that several machines have, or containers, their processes have the same numbers."""
    cache = tmp_path / "cache" / "KEY"

    def beside_its_like() -> None:
        (cache / f"tmp.pid_{os.getpid()}_of_another_machine").mkdir(parents=True)

    def begin_and_fail() -> None:
        (cache / f"tmp.pid_{os.getpid()}_half").mkdir(parents=True)
        fail()

    for job, left in ((beside_its_like, 1), (begin_and_fail, 1)):
        with Pool([job], 1, tmp_path / "cache") as pool:
            pool.run()
        assert len(list(cache.iterdir())) == left


def test_a_pool_that_is_left_ends_its_processes(tmp_path) -> None:
    def told(done: int) -> None:
        raise KeyboardInterrupt

    before = children()
    with pytest.raises(KeyboardInterrupt), Pool([partial(write, tmp_path / "a", ""), hang, hang], 3, tmp_path, told) as pool:
        pool.run()
    assert children() <= before


def test_cards_are_named() -> None:
    assert named_card("H100").capability == 90 and named_card("rtx_4090").shared_memory == 99 << 10
    for words, name in (  # as nvidia-smi has them, and as people write them
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("nvidia h100", "h100"), ("GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA RTX A6000", "a6000"), ("RTX A6000", "a6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    ):  # fmt: skip
        assert named_card(words) is CARDS[name]
    for words in ("", "  ", "nvidia", "rtx", "NVIDIA A100-SXM4-40GB", "h100 nvl"):
        with pytest.raises(ParameterError, match="card"):
            named_card(words)
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
    print(*no_device.places_of(no_device.compile_noted(launches[0], original)))
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

    places, counts, _ = run("noted")
    assert counts == "1 1" and all((tmp_path / "cache" / place).exists() for place in places.split())
    assert sorted(Path(place).suffix for place in places.split()) == [".cubin", ".json", ".json"] and "/__grp__" in places
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


@pytest.mark.parametrize(("news", "words"), [(News(4, 29), "25 of 29"), (News(29, 29, 2, True, {"a": "b", "c": "d"}), "2 of 29")])
def test_the_command_says_how_many_kernels_are_not_there(news, words, tmp_path, monkeypatch) -> None:
    """Also where the process that compiles was killed."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "headrace"))
    monkeypatch.setattr(Compilation, "_begin", lambda self, work: SimpleNamespace())
    monkeypatch.setattr(Compilation, "wait", lambda self, told: news)
    monkeypatch.setattr(Compilation, "__exit__", lambda self, *_: None)
    args = make_parser().parse_args(["compile", write_shape(tmp_path), "--load-format", "dummy", "--card", "h100"])
    with pytest.raises(CapacityError, match=f"^{words} kernels are not compiled"):
        args.run(args)


@pytest.mark.parametrize("there", [False, True])
def test_the_command_says_that_launchers_are_not_made_without_a_compiler(there, tmp_path, monkeypatch, capsys) -> None:
    """All was said to be there, and the server of the image, which had none either, could launch nothing."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "headrace"))
    monkeypatch.setenv("CC", "cc" if there else "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Compilation, "_begin", lambda self, work: None)
    args = make_parser().parse_args(["compile", write_shape(tmp_path), "--load-format", "dummy", "--card", "h100"])
    with pytest.raises(CapacityError):
        args.run(args)
    assert ("no C compiler" in capsys.readouterr().err) is not there


def test_the_command_does_not_take_for_compiled_what_no_process_could_be_had_for(tmp_path, monkeypatch) -> None:
    def none_to_be_had(*_, **more) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "headrace"))
    monkeypatch.setattr(ahead.subprocess, "Popen", none_to_be_had)
    args = make_parser().parse_args(["compile", write_shape(tmp_path), "--load-format", "dummy", "--card", "h100"])
    with pytest.raises(CapacityError, match="the kernels are not compiled: see above"):
        args.run(args)


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


@pytest.mark.parametrize(("ranks", "alike"), [(1, True), (2, False)])
def test_a_note_tells_steps_apart_that_launch_other_kernels(ranks, alike, tmp_path) -> None:
    """Two ranks' prompts of 6,144 tokens and more have kernels of their own, for which requests waited once steps became larger."""
    config = EngineConfig(model=write_shape(tmp_path), load_format="dummy", tensor_parallel_size=ranks)
    checkpoint, card = resolve_checkpoint(config), named_card("h200")
    limits = resolve(config, model_config_from_hf(checkpoint.config), torch.device("cuda"))
    small, large = (note_path(config, checkpoint, replace(limits, max_num_batched_tokens=n), card) for n in (4096, 8192))
    assert (small == large) == alike


def test_a_note_is_of_the_tables_of_tiles_too(tmp_path, monkeypatch) -> None:
    """Those that come with the package, and what was searched on this machine since."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    package = tmp_path / "package"
    monkeypatch.setattr(notes, "__file__", str(package / "compile_ahead" / "notes.py"))
    digests = [notes.source_digest()]
    for folder in (tmp_path / "tiles", package / "fast_decode" / "tables"):
        folder.mkdir(parents=True)
        (folder / "NVIDIA_H200.json").write_text("{}")
        digests.append(notes.source_digest())
    (tmp_path / "tiles" / "of_a_disk_that_is_gone.json").symlink_to(tmp_path / "gone")  # passed over by whoever looks for a table
    assert len({*digests, notes.source_digest()}) == len(digests) == 3


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


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Triton's, with two kernels that are noted and one that is not."""
    monkeypatch.setattr(notes, "kernel_cache", lambda: tmp_path)
    for entry in ("ONE", "TWO", "ANOTHER"):
        (tmp_path / entry).mkdir()
        (tmp_path / entry / "kernel.cubin").write_text("machine code")
        (tmp_path / entry / "__grp__kernel.json").write_text('{"child_paths": {}}')
        (tmp_path / entry / "lock").touch()  # of an earlier Triton
    write_note(tmp_path / "notes" / "one.json", 2, [f"{entry}/{name}" for entry in ("ONE", "TWO") for name in KERNEL])
    return tmp_path


KERNEL = ("kernel.cubin", "__grp__kernel.json")


def cut_off(file: Path) -> None:
    file.write_text(file.read_text()[:5])


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text(""), cut_off], ids=["gone", "empty", "cut off"])
@pytest.mark.parametrize("name", KERNEL)
def test_what_is_noted_counts_while_it_is_whole(cache, name, damage) -> None:
    """Triton takes a file for whole if it is there: a card's driver would refuse it in every start."""
    note = cache / "notes" / "one.json"
    assert is_complete(note) and not is_complete(note.with_name("two.json"))
    damage(cache / "TWO" / name)
    assert not is_complete(note)
    drop_damaged(note)
    assert {path.name for path in cache.iterdir()} == {"ONE", "ANOTHER", "notes"} and len(list((cache / "ONE").iterdir())) == 3
    write_note(note, 2, [f"TWO/{name}"])  # which somebody has removed meanwhile
    assert not is_complete(note)
    note.write_text("{")
    assert not is_complete(note)


def test_a_note_that_cannot_be_written_is_told(cache, caplog) -> None:
    """An image's build said that all was compiled, and each start of its containers looked through all of it."""
    (cache / "file").write_text("")
    write_note(cache / "file" / "compiled" / "one.json", 1, ["ONE/kernel.cubin"])
    assert "every start looks through all kernels" in caplog.text and "Not a directory" in caplog.text


def test_entries_that_nobody_has_noted_are_made_anew_when_they_are_empty(cache) -> None:
    """As a machine leaves them that goes down while it compiles."""
    (entry := cache / "XU5DT2AO5BD5AEHEYGLPP5LRDFHHCUEJT4LGDVLB4STXUGVGHFPA").mkdir()
    (entry / KERNEL[1]).write_text("")
    drop_damaged(cache / "notes" / "two.json")
    assert {path.name for path in cache.iterdir()} == {"ONE", "TWO", "ANOTHER", "notes"}


def test_what_is_not_of_triton_stays_in_its_cache(cache) -> None:
    """Whose directory was a home, or /tmp: every folder in it that had an empty file was removed."""
    (cache / "project" / "src").mkdir(parents=True)
    (cache / "project" / "__init__.py").touch()
    drop_damaged(cache / "notes" / "two.json")
    assert (cache / "project" / "src").exists()


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A compilation for a tiny model in a process of its own, with caches in `tmp_path`, and its note."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "headrace"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = EngineConfig(model=write_shape(tmp_path), load_format="dummy", enforce_eager=True)
    checkpoint, card = resolve_checkpoint(config), named_card("h100")
    limits = resolve(config, model_config_from_hf(checkpoint.config), torch.device("cuda"))
    return partial(Compilation, config, checkpoint, limits, card, 1), note_path(config, checkpoint, limits, card)


def test_of_cores_that_start_together_one_compiles(begun, tmp_path) -> None:
    """The others wait for it, and find all there."""
    begin, note = begun
    with contextlib.ExitStack() as others, begin() as compilation:
        others.enter_context(turn(note))
        until(lambda: str(note.with_suffix(".lock")) in open_files(compilation._process.pid), 60)  # it waits
        (tmp_path / "triton" / "KEY").mkdir(parents=True)
        (tmp_path / "triton" / "KEY" / "kernel.cubin").write_text("machine code")
        write_note(note, 95, ["KEY/kernel.cubin"])
        others.close()
        heard: list[tuple[int, int]] = []
        found = compilation.wait(lambda done, total: heard.append((done, total)))
    assert found.ended and heard == [(95, 95)]
    assert [path.name for path in (tmp_path / "triton").iterdir()] == ["KEY"], "nothing was compiled"


def test_each_number_is_told_once() -> None:
    """The last news has that of the kernel before."""
    lines = [b'{"total":2}', b'{"done":1,"total":2}', b'{"done":2,"total":2}', b'{"done":2,"total":2,"ended":true}']
    compilation = Compilation.__new__(Compilation)
    compilation.card, compilation.last = named_card("h100"), News()
    compilation._process = SimpleNamespace(stdout=iter(lines), wait=lambda: 0)
    heard: list[tuple[int, int]] = []
    assert compilation.wait(lambda done, total: heard.append((done, total))).ended
    assert heard == [(0, 2), (1, 2), (2, 2)]


def test_a_turn_ends_with_its_process(tmp_path, monkeypatch) -> None:
    """Whatever ended it; and one that hangs is waited for so long, no longer."""
    note, script = tmp_path / "compiled" / "one.json", "import sys; from pathlib import Path; from headrace.compile_ahead.notes import turn\n"
    script += "with turn(Path(sys.argv[1])):\n print(flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", script, str(note)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    monkeypatch.setattr(notes, "TURN_SECONDS", 0.2)
    began = time.monotonic()
    with turn(note):
        assert time.monotonic() - began >= 0.2 and holder.poll() is None
    monkeypatch.setattr(notes, "TURN_SECONDS", 600.0)
    holder.kill()
    with turn(note):
        assert holder.wait(60) == -signal.SIGKILL
    with turn(tmp_path / "compiled" / "one.lock" / "nowhere.json"):  # no place for it: nobody waits
        pass


def test_a_terminal_that_closes_leaves_no_temporary_files(begun, tmp_path, monkeypatch) -> None:
    """The shell tells all processes of `headrace compile` at once."""
    monkeypatch.setattr(ahead, "END_SECONDS", 60.0)  # it is busy importing
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with begun[0]() as compilation:
        until(lambda: list(temporary.iterdir()), 60)
        compilation._process.send_signal(signal.SIGHUP)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("spoil", [
    lambda cache: cache.write_text("a file"), lambda cache: cache.symlink_to(cache.parent / "nowhere"),  # a volume is not mounted
], ids=["a file", "a link to nothing"])  # fmt: skip
def test_a_cache_that_takes_nothing_ends_the_start(spoil, begun, tmp_path, capfd) -> None:
    """Ready would mean that every request fails; and it is not the kernels' fault."""
    spoil(tmp_path / "triton")
    with begun[0]() as compilation, pytest.raises(CapacityError, match=r"cannot be kept in .*triton \(File exists: .*triton\).*TRITON_CACHE_DIR"):
        compilation.wait(lambda done, total: None)
    assert "Traceback" not in capfd.readouterr().err


FAILING = """
import errno, sys
from headrace.compile_ahead import process
from headrace.errors import CheckpointError

def fail(*_):
    raise {error}

process.compile_all = fail
sys.exit(process.main(int(sys.argv[1])))
"""


def let_compile_all_raise(error: str, monkeypatch) -> None:
    """In the process that is begun."""
    script = FAILING.format(error=error)
    monkeypatch.setattr(ahead, "python_of_child", lambda *words: [sys.executable, "-c", script, str(words[-1])])


def test_a_cache_that_fills_up_ends_the_start(begun, monkeypatch) -> None:
    let_compile_all_raise('OSError(errno.ENOSPC, "No space left on device", "kernel.cubin")', monkeypatch)
    with begun[0]() as compilation, pytest.raises(CapacityError, match=r"cannot be kept in .*triton \(No space left on device: kernel.cubin\)"):
        compilation.wait(lambda done, total: None)


def test_of_narrow_weights_the_file_is_needed(tmp_path, monkeypatch) -> None:
    """Not its config alone; that was said by a traceback of another process."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "headrace"))
    model = Path(write_shape(tmp_path))
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}))
    args = make_parser().parse_args(["compile", str(model), "--card", "h100", "--max-num-seqs", "2"])
    with pytest.raises(CheckpointError, match="has no model"):
        args.run(args)


def test_what_is_wrong_with_a_model_is_said_without_a_traceback(begun, monkeypatch, capfd) -> None:
    let_compile_all_raise('CheckpointError("a tensor is missing")', monkeypatch)
    with begun[0]() as compilation:
        assert not compilation.wait(lambda done, total: None).ended
    said = capfd.readouterr().err
    assert "headrace: a tensor is missing" in said and "Traceback" not in said


@pytest.mark.parametrize(("words", "why"), [
    ("--tensor-parallel-size 3", "tensor_parallel_size: got 3"), ("--device cpu", "device: got 'cpu', allowed: auto or cuda"),
    ("--max-model-len 999999", "max_model_len: got 999999, allowed: at most"), ("--quantization bf16", "quantization: got 'bf16'"),
    ("--kv-cache-dtype int8", "kv_cache_dtype: got 'int8'"), ("--kv-cache-bytes 1000", "holds 0 tokens"),
])  # fmt: skip
def test_options_that_no_server_on_the_card_takes_are_refused(words, why, tmp_path, monkeypatch) -> None:
    """An image was built for them, and its server did not start."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "headrace"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    shape = ["compile", write_shape(tmp_path), "--load-format", "dummy", "--card", "h100", "--max-num-seqs", "2"]
    args = make_parser().parse_args([*shape, *words.split()])
    with pytest.raises((ParameterError, CapacityError), match=why):
        args.run(args)


def test_a_model_that_a_card_cannot_hold_is_refused(tmp_path, monkeypatch) -> None:
    """A 70B was compiled for a card of 24 GB, on which no server of it starts."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "headrace"))
    shape = Path(__file__).parent.parent / "benchmarks" / "shapes" / "llama-3.3-70b.json"
    (tmp_path / "config.json").write_text(shape.read_text())
    for words in ("--card rtx4090 --quantization int4", "--card h100", "--card l40s --tensor-parallel-size 2"):
        args = make_parser().parse_args(["compile", str(tmp_path), *words.split()])
        with pytest.raises(CapacityError, match=r"the weights take \d+ GiB, and --gpu-memory-utilization 0.9 of NVIDIA"):
            args.run(args)


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


@pytest.mark.parametrize("name", FORMATS)
def test_narrow_matrices_of_a_file_are_known_without_reading_them_all(name: str, tmp_path: Path) -> None:
    check_forms(write_quantized(tmp_path / "model", FORMATS[name], **SIZES))


def test_layers_with_zero_points_beside_some_whose_zero_points_are_nothing(tmp_path: Path) -> None:
    """Their tensors have the same types and shapes: the config alone tells them apart."""
    without, having = ({"dtype": "int8", "qscheme": "per_channel", "symmetric": symmetric, "ch_axis": 0} for symmetric in (True, False))

    def packer_of(module: str):
        return None if not module.endswith("_proj") else int8(zeros=True) if ".1." in module else int8(nothing=True)

    tiny = write_quantized(tmp_path / "model", FORMATS["quark-int8"], packer_of=packer_of, num_hidden_layers=2, **SIZES)
    tiny.configure(quark(without, **{"layers.1.*": having}))
    check_forms(tiny)


SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}


def check_forms(tiny: Tiny) -> None:
    checkpoint = resolve_checkpoint(EngineConfig(model=str(tiny.path)))
    config = model_config_from_hf(checkpoint.config)
    _, played = weights_without_data(checkpoint, config, torch.bfloat16, None)
    loaded = load_model(checkpoint, config, torch.bfloat16, torch.device("cpu"), narrow=True)
    assert len(played.layers) == len(loaded.layers)  # of the same form one would be played for all
    for made, real in zip(played.layers, loaded.layers, strict=True):
        for matrix in MATRICES:
            assert form_of(getattr(made, matrix)) == form_of(getattr(real, matrix)), matrix


def form_of(weight: Weight) -> tuple:
    tensors = [None if t is None else (t.dtype, t.shape) for t in (weight.data, weight.scales, weight.zeros)]
    return weight.kind, weight.group, weight.scale_rows, *tensors
