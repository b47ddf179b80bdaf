"""The native step's law on models and schedules that nobody chose: a row's bits are those of its sequence computed alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import weight_plan
from native_harness import NativeSequences, libraries

LIBRARIES = libraries()
pytestmark = pytest.mark.skipif(not LIBRARIES, reason="the native step is not built, or no library of it runs on this CPU")
SUPERS = ("Q4_K", "Q5_K", "Q6_K")
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_Z", "F8", *SUPERS)
NUM_SLOTS = 4


@dataclass
class Case:
    config: ModelConfig
    library: str
    settings: dict
    lengths: list[int]  # of the sequences, one a slot
    steps: list[list[tuple[int, int]]]  # of (slot, rows)


@st.composite
def models(draw, matrices: str) -> ModelConfig:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    if matrices in SUPERS:  # rows of whole super-blocks, both to and from attention
        hidden, inner, (heads, kv_heads, head_dim) = 256, 256, draw(st.sampled_from([(4, 1, 64), (2, 2, 128), (32, 4, 8)]))
    else:
        hidden, inner = draw(st.integers(1, 90)), draw(st.integers(1, 90))
        heads, head_dim = kv_heads * group, 2 * draw(st.integers(1, 40))
    family, norms = draw(st.sampled_from([("qwen3", "pre"), ("olmo2", "post"), ("gemma2", "sandwich")]))
    window = draw(st.sampled_from([0, 1, 17, 255, 256, 300]))
    return ModelConfig(
        family=family, vocab_size=draw(st.integers(2, 70)), hidden_size=hidden, num_layers=2, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, intermediate_size=inner, max_position=1024,
        rope=RopeConfig(1000.0, head_dim), qk_norm=draw(st.sampled_from(["none", "head", "full"])), attn_scale=head_dim**-0.5,
        windows=draw(st.sampled_from([(), (window, 0), (0, window)])), attn_softcap=draw(st.sampled_from([0.0, 4.0])),
        activation=draw(st.sampled_from(["silu", "gelu_tanh", "gelu"])), norm_place=norms,
        qkv_bias=draw(st.booleans()), o_bias=draw(st.booleans()), mlp_bias=draw(st.booleans()), logit_softcap=draw(st.sampled_from([0.0, 3.0])),
    )  # fmt: skip


@st.composite
def cases(draw) -> Case:
    matrices = draw(st.sampled_from(FORMATS))
    config = draw(models(matrices))
    lengths = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(240, 530)), min_size=1, max_size=NUM_SLOTS))
    left, steps = list(lengths), []
    rows = st.one_of(st.sampled_from([0, 1, 1, 1]), st.integers(0, 60), st.integers(0, 530))
    while any(left):
        most = 30 - len(steps)  # then all that is left
        order = draw(st.permutations(range(len(left))))
        step = [(slot, left[slot] if most <= 0 else min(left[slot], draw(rows))) for slot in order]
        steps.append([(slot, count) for slot, count in step if count])
        for slot, count in step:
            left[slot] -= count
    settings = {
        "matrices": matrices, "cache": draw(st.sampled_from(["F32", "BF16", "INT8"])),
        "rounding": draw(st.sampled_from(["FLOAT", "INT16", "INT8"])),
    }  # fmt: skip
    return Case(config, draw(st.sampled_from(sorted(LIBRARIES))), settings, lengths, [step for step in steps if step])


def weights_of(config: ModelConfig) -> DecoderWeights:
    generator = torch.Generator().manual_seed(config.hidden_size)
    tensors = {
        spec.target: torch.randn(spec.shape, generator=generator) * (0.2 if len(spec.shape) > 1 else 1)
        for spec in weight_plan(config)
    }
    return DecoderWeights.from_tensors(tensors, config)


def alone(case: Case, weights: DecoderWeights, ids: list[list[int]]) -> list[Tensor]:
    sequences = NativeSequences(case.config, weights, LIBRARIES[case.library], max_len=544, **case.settings)
    return [sequences.step([(slot, tokens)])[0] for slot, tokens in enumerate(ids)]


@settings(max_examples=40)
@given(cases(), st.integers(1, 4), st.sampled_from([16, 48]), st.randoms(use_true_random=False))
def test_a_rows_bits_are_those_of_its_sequence_alone(case, threads, block_size, random):
    weights = weights_of(case.config)
    ids = [[random.randrange(case.config.vocab_size) for _ in range(count)] for count in case.lengths]
    wanted = alone(case, weights, ids)
    together = NativeSequences(
        case.config, weights, LIBRARIES[case.library], max_len=544, block_size=block_size, threads=threads, seed=1,
        **case.settings,
    )  # fmt: skip
    for step in case.steps:
        starts = [together.lengths[slot] for slot, _ in step]
        work = [(slot, ids[slot][start : start + rows]) for (slot, rows), start in zip(step, starts, strict=True)]
        if len(step) == 1 and random.random() < 0.3:
            rows = [range(step[0][1])]
            found = [together.step_drafts(*work[0])]
        elif random.random() < 0.5:
            rows = [sorted(random.sample(range(count), random.randint(0, count))) for _, count in step]
            found = together.step(work, wanted=rows)
        else:
            rows, found = [range(count) for _, count in step], together.step(work)
        for (slot, _), start, kept, logits in zip(step, starts, rows, found, strict=True):
            assert torch.equal(logits, wanted[slot][[start + row for row in kept]]), (slot, start, list(kept))
