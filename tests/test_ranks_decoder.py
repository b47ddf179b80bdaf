"""A decoder of several ranks gives the logits of one, for every family; and its sampler the ids of one, from parts of the logits."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from headrace.config import EngineConfig
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.linear import MatrixLinear, make_linear
from headrace.model.loader import load_model
from headrace.model.ranks import VocabPart
from headrace.model.vocabulary import TokenlessIds
from headrace.sampling.sampler import SampleInputs, choose
from headrace.worker.split_sampling import choose_split
from model_harness import Sequences
from quantized_checkpoints import FORMATS, write_quantized
from rank_threads import ThreadGroup, run_ranks
from test_model_families import tokens
from tiny_gemma4 import EXPERTS, SMALL
from tiny_models import TINY, TINY_HYBRID, write_tiny

CPU = torch.device("cpu")
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
VARIANTS = {  # several ranks have the same key-value head where there are fewer of these than ranks
    **{family: (family, HEADS if family in ("qwen3", "mistral") else {}) for family in TINY},
    "llama": ("llama", {"num_attention_heads": 4, "vocab_size": 515}),
    "llama-bias": ("llama", {**HEADS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "olmo2-whole-keys": ("olmo2", HEADS),
    **{family: (family, {"linear_num_key_heads": 4}) for family in TINY_HYBRID},
    "gemma4-all": ("gemma4", EXPERTS | SMALL),
    "granite-bias": ("granite", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_logits_are_those_of_one_rank(variant: str, size: int, tmp_path: Path):
    """A prompt in chunks beside another one's decodes, in float32."""
    family, overrides = VARIANTS[variant]
    checkpoint = resolve_checkpoint(EngineConfig(model=str(write_tiny(family, tmp_path / "model", **overrides))))
    config = model_config_from_hf(checkpoint.config)
    first, second = tokens(30, seed=1), tokens(17, seed=2)
    work = [[(0, first[:21])], [(0, first[21:22]), (1, second[:11])], [(1, second[11:]), (0, first[22:])]]

    def logits(group: ThreadGroup | None) -> torch.Tensor:
        if group is None:
            run = Sequences(config, load_model(checkpoint, config, torch.float32, CPU), max_len=48, num_seqs=2)
            return torch.cat([rows for step in work for rows in run.step(step)])
        part = group.shard.config(config)
        weights = load_model(checkpoint, config, torch.float32, CPU, shard=group.shard)
        run = Sequences(part, weights, max_len=48, num_seqs=2, group=group)
        assert run.decoder.vocab is not None
        return torch.cat([run.decoder.vocab.whole(rows) for step in work for rows in run.step(step)])

    whole = logits(None)
    for found in run_ranks(size, logits):
        assert found.shape == whole.shape
        assert (found - whole).abs().max() <= 1e-5 * max(1.0, float(whole.abs().max()))


def test_narrow_weights_of_ranks_are_parts_of_those_of_one(tmp_path: Path):
    """int4 that ranks cut at 128 columns (o) and in the middle of them (down)."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    checkpoint = resolve_checkpoint(EngineConfig(model=str(write_quantized(tmp_path / "model", FORMATS["awq"], **sizes).path)))
    config, ids = model_config_from_hf(checkpoint.config), tokens(25)

    def logits(group: ThreadGroup) -> torch.Tensor:
        weights = load_model(checkpoint, config, torch.float32, CPU, shard=group.shard, narrow=True)
        assert (weights.layers[0].o.kind, weights.layers[0].down.kind) == ("int4", "int8")
        run = Sequences(group.shard.config(config), weights, max_len=32, group=group)
        assert run.decoder.vocab is not None
        return run.decoder.vocab.whole(run.step([(0, ids)])[0])

    (whole,) = Sequences(config, load_model(checkpoint, config, torch.float32, CPU), max_len=32).step([(0, ids)])
    for found in run_ranks(2, logits):
        assert (found - whole).abs().max() <= 1e-5 * max(1.0, float(whole.abs().max()))


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_half_the_bits_give_the_same_up_to_their_rounding(dtype: torch.dtype, tolerance: float, tmp_path: Path):
    """Each rank's part of a sum is rounded: not the bits of one rank, but the same on every rank."""
    checkpoint = resolve_checkpoint(
        EngineConfig(model=str(write_tiny("llama", tmp_path / "model", **VARIANTS["llama-bias"][1])))
    )
    config, ids = model_config_from_hf(checkpoint.config), tokens(25)

    def logits(group: ThreadGroup) -> torch.Tensor:
        weights = load_model(checkpoint, config, dtype, CPU, shard=group.shard)
        run = Sequences(group.shard.config(config), weights, max_len=32, group=group)
        assert run.decoder.vocab is not None
        return run.decoder.vocab.whole(run.step([(0, ids)])[0])

    (whole,) = Sequences(config, load_model(checkpoint, config, torch.float32, CPU), max_len=32).step([(0, ids)])
    first, *others = run_ranks(4, logits)
    assert all(torch.equal(first, other) for other in others)
    assert (first - whole).abs().mean() <= tolerance * whole.abs().max()


def test_a_part_of_a_sum_is_not_added_before_it_is_summed(tmp_path: Path):
    """Products that add to the residual in place do not do so where the others' parts are missing."""
    checkpoint = resolve_checkpoint(EngineConfig(model=str(write_tiny("qwen2", tmp_path / "model"))))
    config, ids = model_config_from_hf(checkpoint.config), tokens(9)

    def make(weight, bias, reduce):
        return MatrixLinear(weight.data) if bias is None and reduce is None else make_linear(weight, bias, reduce)

    def logits(group: ThreadGroup) -> torch.Tensor:
        weights = load_model(checkpoint, config, torch.float32, CPU, shard=group.shard)
        run = Sequences(group.shard.config(config), weights, max_len=16, group=group, make=make)
        assert run.decoder.vocab is not None
        return run.decoder.vocab.whole(run.step([(0, ids)])[0])

    (whole,) = Sequences(config, load_model(checkpoint, config, torch.float32, CPU), max_len=16).step([(0, ids)])
    for found in run_ranks(2, logits):
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size, vocab", [(2, 16), (2, 17), (4, 64), (4, 9)])
def test_every_id_finds_its_row_of_the_embedding(size: int, vocab: int):
    """One outside of the vocabulary gets the row nearest to it; what other ranks' rows hold does not matter, not even NaN."""
    table, ids = torch.randn(vocab, 6), torch.tensor([*range(vocab), -1, -(2**31), vocab, 2**31 - 1], dtype=torch.int32)

    def embedded(group: ThreadGroup) -> torch.Tensor:
        part = VocabPart(group, vocab, CPU)
        own = torch.full((part.rows, 6), torch.nan)
        own[: len(part.ids)] = table[part.ids.start : part.ids.stop]
        return part.embed(ids, own)

    for found in run_ranks(size, embedded):
        assert torch.equal(found, table[[*range(vocab), 0, 0, -1, -1]])


@pytest.mark.parametrize("holes", [False, True])
def test_rows_that_stand_for_no_id_are_never_chosen(holes: bool):
    valid = np.ones(203, np.bool_)
    valid[[5, 60, 200, 201, 202]] = not holes
    tokenless = TokenlessIds.of(valid, CPU)

    def masked(group: ThreadGroup) -> torch.Tensor:
        part = VocabPart(group, 203, CPU)
        logits = part.mask(torch.zeros(2, part.rows), tokenless)
        assert (logits[:, len(part.ids) :] == -torch.inf).all()
        return part.whole(logits)

    for found in run_ranks(4, masked):
        assert torch.equal(found.isfinite(), torch.from_numpy(valid).expand(2, -1))


# ---------------------------------------------------------------- sampling


def inputs_of(temperature: list[float], seed: int) -> SampleInputs:
    rows = len(temperature)
    rng = np.random.default_rng(seed)
    column = lambda value, dtype: torch.full((rows,), value, dtype=dtype)  # noqa: E731
    return SampleInputs(
        temperature=torch.tensor(temperature, dtype=torch.float32), top_k=column(0, torch.int32),
        top_p=column(1.0, torch.float32), min_p=column(0.0, torch.float32),
        seed=torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, rows)), output_index=torch.arange(rows),
        sample_index=column(0, torch.int32), all_greedy=not any(temperature), any_top_k=False, any_top_p=False,
        any_min_p=False,
    )  # fmt: skip


def split_choice(logits: torch.Tensor, inputs: SampleInputs, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    def choose_here(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        part = VocabPart(group, logits.shape[1], CPU)
        own = torch.zeros(len(logits), part.rows)
        own[:, : len(part.ids)] = logits[:, part.ids.start : part.ids.stop]
        return choose_split(part.mask(own, None), inputs, part)

    first, *others = run_ranks(size, choose_here)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), "ranks differ"
    return first


@settings(max_examples=40)
@given(
    size=st.integers(2, 4), vocab=st.integers(3, 2100), seed=st.integers(0, 10_000), levels=st.sampled_from([2, 9, 1 << 20]),
    temperature=st.lists(st.sampled_from([0.0, 0.0, 1e-4, 0.3, 1.0, 5.0]), min_size=1, max_size=5),
)  # fmt: skip
def test_parts_choose_what_the_whole_does(size, vocab, seed, levels, temperature):
    """Whatever the cut: ties go to the lowest id, and a draw ends where the running sum over the whole vocabulary does."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(temperature), vocab, generator=generator) * 4 * levels).round() / levels
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
    logits[:, seed % vocab] = 1.0
    inputs = inputs_of(temperature, seed)
    ids, failed = split_choice(logits, inputs, size)
    expected, _ = choose(logits, inputs)
    assert not failed.any()
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("temperature", [[0.0] * 6, [1.0] * 6, [0.0, 0.7] * 3])
def test_every_rank_sees_that_a_row_failed(temperature: list[float]):
    """Wherever in the vocabulary its NaN or infinity is."""
    logits = torch.randn(6, 100)
    logits[0, 3] = logits[1, 99] = torch.nan
    logits[2, 50] = torch.inf
    logits[3] = -torch.inf
    inputs = inputs_of(temperature, 1)
    ids, failed = split_choice(logits, inputs, 4)
    assert failed.tolist() == [True] * 4 + [False] * 2
    assert torch.equal(ids, choose(logits, inputs)[0])
