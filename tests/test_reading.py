"""The limit that the page shows: what a step of decodes reads at least, and how fast the machine reads."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from engine_driver import complete
from headrace.config import EngineConfig
from headrace.engine.build import build_engine
from headrace.engine.glass import GlassObserver
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from headrace.worker import reading as module
from headrace.worker.reading import Reading, reading_of
from tiny_models import write_tiny

CPU = torch.device("cpu")


def engine_of(path, **options):
    written = write_tiny("llama", path, **options.pop("overrides", {}))
    return build_engine(
        EngineConfig(model=str(written), device="cpu", dtype="float32", num_kv_blocks=8, max_model_len=64, max_num_seqs=2, **options)
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = engine_of(tmp_path_factory.mktemp("tied"))
    yield engine
    engine.close()


def numbers_of(engine) -> dict[str, int]:
    """Of each matrix in the file."""
    with safe_open(engine.checkpoint.path / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in set(file.keys())}
    return {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}


def test_a_step_reads_every_matrix_but_an_embedding_that_is_no_head(engine, tmp_path):
    model, sizes = engine.model, numbers_of(engine)
    assert "lm_head.weight" not in sizes
    assert 1 <= engine.reading.weights / (4 * sum(sizes.values())) < 1.02  # aligned where they are packed
    assert engine.reading.token == 4 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
    other = engine_of(tmp_path / "untied", overrides={"tie_word_embeddings": False})
    sizes = numbers_of(other)
    assert 1 <= other.reading.weights / (4 * (sum(sizes.values()) - sizes["model.embed_tokens.weight"])) < 1.02
    other.close()
    torch_s = engine_of(tmp_path / "torch", enforce_eager=True)
    assert torch_s.reading is None
    torch_s.close()


def test_layers_with_a_window_and_experts_are_left_out(engine):
    model = engine.model
    windows = (7, *[0] * (model.num_layers - 1))
    found = reading_of(replace(model, windows=windows), 1000, torch.bfloat16, CPU, 2)
    assert found == Reading(1000, (model.num_layers - 1) * 2 * model.num_kv_heads * model.head_dim * 2, 2)
    assert reading_of(replace(model, experts=object()), 1000, torch.bfloat16, CPU, 2) is None  # type: ignore[arg-type]


def test_a_card_says_how_wide_and_fast_its_memory_is(engine, monkeypatch):
    card = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    found = reading_of(engine.model, 1000, torch.bfloat16, torch.device("cuda"), 0)
    assert found is not None and found.rate == pytest.approx(3.352e12, rel=1e-3)  # an H100's data sheet: 3.35 TB/s
    card.memory_clock_rate = 0
    assert reading_of(engine.model, 1000, torch.bfloat16, torch.device("cuda"), 0) is None


def test_a_cpu_is_measured_once_and_only_when_that_disturbs_nobody(engine, monkeypatch):
    monkeypatch.setattr(module, "CPU_BYTES", 2**20)
    core, found = engine.core, engine.reading
    core.add(EngineRequest("a", [5, 6], complete(SamplingParams(max_tokens=1)), 1))
    observer = GlassObserver(core, found)
    assert observer.snapshot(0.0)["reading"] is None and found.rate == 0
    while core.has_work:
        core.step()
    monkeypatch.setattr(module, "available_memory", lambda: 2**21 - 1)
    assert observer.snapshot(0.0)["reading"] is None
    monkeypatch.setattr(module, "available_memory", lambda: 2**21)
    weights, token, rate = observer.snapshot(0.0)["reading"]
    assert (weights, token) == (found.weights, found.token) and 1e7 < rate < 1e13
    monkeypatch.setattr(module, "CPU_ROUNDS", 0)  # and would leave it at 0
    assert observer.snapshot(0.0)["reading"] == (weights, token, rate)
    observer.close()
    other = GlassObserver(core)
    assert other.snapshot(0.0)["reading"] is None
    other.close()
