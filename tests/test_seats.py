"""How many requests run at the same time where nobody says: what a card's memory plan has room for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.kv_cache import KVCache
from headrace.compile_ahead.cards import CARDS
from headrace.config import EngineConfig
from headrace.engine.build import resolve, with_seats
from headrace.engine.interface import seats_of_core
from headrace.engine.weight_sizes import weight_bytes
from headrace.model.checkpoint import Checkpoint, resolve_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.row_elements import row_elements
from headrace.worker.memory_plan import GIB, plan_memory
from headrace.worker.seats import SEAT_TOKENS, SEATS, STATE_SEATS, card_seats
from headrace_bench.simulation.cards import card_named, seats
from tiny_models import write_shape

SHAPES = Path(__file__).resolve().parent.parent / "benchmarks/shapes"
CARD, BF16 = torch.device("cuda", 0), torch.bfloat16
QWEN = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    """An 8B's shape, without weights."""
    path = write_shape(tmp_path_factory.mktemp("shape"), **QWEN)
    return resolve_checkpoint(EngineConfig(model=str(path), load_format="dummy", skip_tokenizer_init=True))


@pytest.fixture(scope="module")
def model(checkpoint) -> ModelConfig:
    return model_config_from_hf(checkpoint.config)


def decided(checkpoint: Checkpoint, gib: int, **options) -> int | None:
    config = EngineConfig(model="m", skip_tokenizer_init=True, **options)
    return with_seats(config, checkpoint, model_config_from_hf(checkpoint.config), gib).max_num_seqs


def test_cards_have_as_many_as_they_have_room_for(checkpoint):
    found = {name: decided(checkpoint, CARDS[name].memory) for name in ("l4", "h100", "h200")}
    assert found == {"l4": 64, "h100": 512, "h200": 1024}
    assert decided(checkpoint, 79, gpu_memory_utilization=0.5) == 256, "of less memory fewer"
    assert decided(checkpoint, 139, memory_bytes=40 * GIB) < 1024, "of a share of it too"
    assert decided(checkpoint, 139, kv_cache_bytes=5 * GIB) == 64
    assert (decided(checkpoint, 79, quantization="fp8"), decided(checkpoint, 79, kv_cache_dtype="fp8")) == (512, 1024)
    assert decided(checkpoint, 139, max_model_len=64) == 1024
    assert decided(checkpoint, 79, tensor_parallel_size=2) == 1024, "half of the weights and of the cache on each"


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_are_as_many_as_are_made(tmp_path, tied):
    """With a head of its own, unless it is the embedding once more."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    path = write_shape(tmp_path, **QWEN | small, tie_word_embeddings=tied)
    config = EngineConfig(model=str(path), load_format="dummy", skip_tokenizer_init=True, device="cpu")
    dummy = resolve_checkpoint(config)
    made = load_model(dummy, model_config_from_hf(dummy.config), torch.float32, torch.device("cpu")).num_bytes
    assert weight_bytes(config, dummy, on_card=False) == made


@pytest.mark.parametrize("asked", [1, 33, 700, 65536])
def test_what_is_asked_for_stands(checkpoint, model, asked):
    assert decided(checkpoint, 79, max_num_seqs=asked) == decided(checkpoint, 1, max_num_seqs=asked) == asked
    assert resolve(EngineConfig(model="m", max_num_seqs=asked), model, CARD).max_num_seqs == asked


def test_a_cpu_has_256(model):
    assert resolve(EngineConfig(model="m"), model, torch.device("cpu")).max_num_seqs == 256


@given(memory=st.integers(1, 300), tokens=st.sampled_from([256, 2048, 16384]), length=st.sampled_from([100, 4096, 40960]))
def test_all_seats_find_room_and_twice_as_many_would_not(model, memory, tokens, length):
    """By the memory plan itself; more memory never means fewer seats."""
    config = EngineConfig(model="m", max_num_batched_tokens=tokens, max_model_len=length, skip_tokenizer_init=True)
    limits = resolve(config, model, CARD)
    own = {"memory": memory * GIB, "weight_bytes": 16 * 10**9}
    found = card_seats(config, limits, model, BF16, BF16, **own)
    assert found in SEATS and found <= card_seats(config, limits, model, BF16, BF16, **own | {"memory": (memory + 1) * GIB})

    def blocks_left(count: int) -> int:
        needed = replace(limits, max_num_seqs=count, num_blocks=1 << 40)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "mem_get_info", lambda device: (memory * GIB - own["weight_bytes"], memory * GIB))
            patch.setattr(torch.cuda, "memory_reserved", lambda device: own["weight_bytes"])
            plan = plan_memory(
                replace(config, num_kv_blocks=None), needed, model, BF16, CARD, weight_bytes=own["weight_bytes"],
                workspace_bytes=0, activation_bytes=tokens * row_elements(model) * 2,
            )  # fmt: skip
        assert plan.kv == plan.num_blocks * KVCache.bytes_per_block(model, 64, BF16)
        return plan.num_blocks

    of_each = -(-min(SEAT_TOKENS, length) // 64)
    if found > SEATS[-1]:
        assert blocks_left(found) >= found * of_each
    if found < SEATS[0] and memory > 40:
        assert blocks_left(2 * found) < 2 * found * of_each


def test_states_of_megabytes_have_fewer():
    config = EngineConfig(model="m", skip_tokenizer_init=True)
    hybrid = model_config_from_hf(json.loads((SHAPES / "qwen3.5-4b.json").read_text()))
    limits = resolve(config, hybrid, CARD)
    sizes = [card_seats(config, limits, hybrid, BF16, BF16, memory=n * GIB, weight_bytes=9 * 10**9) for n in (79, 139, 1000)]
    assert sizes == sorted(sizes) and sizes[-1] == STATE_SEATS and sizes[0] <= STATE_SEATS


def test_a_server_admits_by_what_its_core_decided():
    def engine(asked, decided):
        info = None if decided is None else SimpleNamespace(max_num_seqs=decided)
        return SimpleNamespace(config=EngineConfig(max_num_seqs=asked), info=info)

    assert seats_of_core(engine(None, 512)) == 512 and seats_of_core(engine(7, 7)) == 7 and seats_of_core(engine(None, None)) == 1


def test_simulated_cards_have_the_engines_number(checkpoint, model):
    """Memory of data sheets, a decimal GB each, and of the driver, a little less."""
    config = EngineConfig(model="m", skip_tokenizer_init=True)
    for name in ("h100", "h200"):
        assert seats(card_named(name), config, model, BF16, 1, tied=False) == decided(checkpoint, CARDS[name].memory)
