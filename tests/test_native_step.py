"""The native CPU step: the torch decoder's numbers, and the same bits however the rows are scheduled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import weight_plan
from model_harness import Sequences, load_tiny
from native_harness import BF16_PRODUCTS, NativeSequences, libraries
from tiny_models import LIKE_OTHERS, RARE, TINY, write_tiny

LIBRARIES = libraries()
pytestmark = pytest.mark.skipif(not LIBRARIES, reason="the native step is not built, or no library of it runs on this CPU")
BEST = next(reversed(LIBRARIES), "")
STEPS = sorted(LIBRARIES.keys() - {"avx2vnni"})  # that one is avx2 but for the products of integers
CACHES = ("F32", "BF16", "INT8")
# of the logits' largest: what rounding keys and values costs
CACHE_ERROR = {"F32": 1e-5, "BF16": 0.02, "INT8": 0.06}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """tiny(family) -> (config, weights)."""
    models = {}

    def load(family: str) -> tuple[ModelConfig, DecoderWeights]:
        if family not in models:
            models[family] = load_tiny(write_tiny(family, tmp_path_factory.mktemp(family)))
        return models[family]

    return load


def random_model(heads: int, kv_heads: int, head_dim: int, **changes) -> tuple[ModelConfig, DecoderWeights]:
    """Two layers of any shape of heads."""
    config = ModelConfig(
        family="qwen3", vocab_size=80, hidden_size=72, num_layers=2, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, intermediate_size=56, max_position=2048, rope=RopeConfig(1000.0, head_dim), qk_norm="head",
        attn_scale=head_dim**-0.5,
    )  # fmt: skip
    config = replace(config, **changes)
    generator = torch.Generator().manual_seed(head_dim + heads)
    tensors = {
        spec.target: 1 + 0.2 * torch.randn(spec.shape, generator=generator)
        if len(spec.shape) == 1
        else 0.2 * torch.randn(spec.shape, generator=generator)
        for spec in weight_plan(config)
    }
    return config, DecoderWeights.from_tensors(tensors, config)


def token_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def in_pieces(sequences: Sequences, slot: int, ids: list[int], sizes: list[int]) -> Tensor:
    out, start = [], 0
    for size in [*sizes, len(ids)]:
        piece = ids[start : start + size]
        if piece:
            out += sequences.step([(slot, piece)])
        start += size
    return torch.cat(out)


# -- against the torch decoder


@pytest.mark.parametrize("library", STEPS)
@pytest.mark.parametrize("family", sorted(TINY.keys() - {*RARE, *LIKE_OTHERS}))
def test_every_family_gives_the_torch_decoders_logits(tiny, family, library):
    config, weights = tiny(family)
    ids = token_ids(40, config.vocab_size)
    wanted = Sequences(config, weights, max_len=64).step([(0, ids)])[0]
    for cache in CACHES:
        native = NativeSequences(config, weights, LIBRARIES[library], max_len=64, threads=2, cache=cache)
        assert error(native.step([(0, ids)])[0], wanted) < CACHE_ERROR[cache], cache


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_every_activation(activation):
    config, weights = random_model(2, 1, 16, activation=activation)
    ids = token_ids(9, config.vocab_size)
    wanted = Sequences(config, weights, max_len=16).step([(0, ids)])[0]
    assert error(NativeSequences(config, weights, LIBRARIES[BEST], max_len=16).step([(0, ids)])[0], wanted) < 1e-5


SHAPES = [(1, 1, 8), (6, 2, 64), (4, 1, 80), (5, 1, 96), (7, 1, 128), (16, 2, 24), (2, 2, 256), (13, 1, 40), (12, 2, 10)]


@pytest.mark.parametrize("library", STEPS)
@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
def test_heads_of_any_size_and_group_over_several_parts_of_the_context(heads, kv_heads, head_dim, library):
    config, weights = random_model(heads, kv_heads, head_dim)
    ids = token_ids(531, config.vocab_size)
    wanted = Sequences(config, weights, max_len=560, block_size=16).step([(0, ids)])[0]
    native = NativeSequences(config, weights, LIBRARIES[library], max_len=560, block_size=32, threads=2)
    assert error(in_pieces(native, 0, ids, [520, 1, 1]), wanted) < 1e-5


@pytest.mark.parametrize("window", [3, 250, 300])
def test_a_window_that_ends_within_a_part_before_it_or_after_it(window):
    config, weights = random_model(6, 2, 16, windows=(window, 0), attn_softcap=4.0)
    ids = token_ids(600, config.vocab_size)
    wanted = Sequences(config, weights, max_len=608).step([(0, ids)])[0]
    native = NativeSequences(config, weights, LIBRARIES[BEST], max_len=608, threads=2)
    found = in_pieces(native, 0, ids, [590])
    assert error(found, wanted) < 1e-5
    assert torch.equal(found, in_pieces(native, 1, ids, [257, 1, 1, 100]))


# -- the same bits


def schedules(config: ModelConfig, weights: DecoderWeights, library: str, ids: list[int], **settings):
    """Logits of `ids`, each time scheduled otherwise: (how, logits)."""

    def fresh(**more) -> NativeSequences:
        return NativeSequences(config, weights, LIBRARIES[library], max_len=len(ids) + 16, **settings, **more)

    for threads in (2, 3):
        yield f"{threads} threads", fresh(threads=threads).step([(0, ids)])[0]
    yield "token by token", in_pieces(fresh(threads=2, seed=1), 2, ids, [1] * len(ids))
    yield "uneven chunks, large blocks", in_pieces(fresh(threads=2, seed=2, block_size=48), 1, ids, [17, 1, 2, 5, 3, 16, 1])

    beside, out = fresh(seed=3, threads=2), []
    others = token_ids(len(ids), config.vocab_size, seed=9)
    for start in range(0, len(ids), 7):
        part, alone = ids[start : start + 7], others[start // 7]
        out.append(beside.step([(3, [alone]), (1, part), (0, others[start : start + 5])])[1])
    yield "beside others", torch.cat(out)

    sequences = fresh(seed=4, threads=2)
    rows = [0, 3, len(ids) - 1]
    (some,) = sequences.step([(0, ids)], wanted=[rows])
    every = torch.full((len(ids), config.vocab_size), torch.nan)
    every[rows] = some
    yield "wanted rows", every
    first = len(ids) // 2 // 16 * 16
    sequences.tables[1, : first // 16] = sequences.tables[0, : first // 16]
    sequences.lengths[1] = first
    resumed = torch.full((len(ids), config.vocab_size), torch.nan)
    resumed[first:] = sequences.step([(1, ids[first:])])[0]
    yield "after a cached prefix", resumed

    drafted = fresh(seed=5, threads=2)
    start = drafted.step([(2, ids[:-6])])[0]
    yield "as drafts of one slot", torch.cat([start, drafted.step_drafts(2, ids[-6:])])


def assert_one_result(config, weights, library, ids, **settings):
    sequences = NativeSequences(config, weights, LIBRARIES[library], max_len=len(ids) + 16, **settings)
    wanted = sequences.step([(0, ids)])[0]
    assert not wanted.isnan().any()
    for how, found in schedules(config, weights, library, ids, **settings):
        seen = ~found.isnan().all(1)
        assert torch.equal(found[seen], wanted[seen]), how


@pytest.mark.parametrize("family", sorted(TINY.keys() - {*RARE, *LIKE_OTHERS}))
def test_a_rows_bits_do_not_depend_on_the_schedule(tiny, family):
    config, weights = tiny(family)
    for cache in CACHES:
        assert_one_result(config, weights, BEST, token_ids(60, config.vocab_size), cache=cache)


@pytest.mark.parametrize("library", STEPS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, window", [(3, 1, 64, 0), (8, 2, 24, 270), (5, 1, 16, 30)])
def test_nor_over_several_parts_of_the_context(heads, kv_heads, head_dim, window, cache, library):
    config, weights = random_model(heads, kv_heads, head_dim, windows=(window, 0) if window else ())
    for matrices in ("F32", "BF16"):
        ids = token_ids(300, config.vocab_size)
        assert_one_result(config, weights, library, ids, cache=cache, matrices=matrices)


@pytest.mark.parametrize("cache", CACHES)
def test_all_instruction_sets_give_the_same_bits(cache):
    """But for those that multiply pairs of bfloat16 where the cache holds them."""
    config, weights = random_model(6, 2, 40, windows=(100, 0), activation="gelu", attn_softcap=5.0, logit_softcap=3.0)
    ids = token_ids(280, config.vocab_size)
    paths = [path for name, path in LIBRARIES.items() if cache != "BF16" or name not in BF16_PRODUCTS]
    for matrices in ("F32", "Q8_0"):
        settings = {"max_len": 288, "cache": cache, "matrices": matrices}
        found = [NativeSequences(config, weights, path, **settings).step([(0, ids)])[0] for path in paths]
        assert all(torch.equal(logits, found[0]) for logits in found[1:])


def test_logits_of_a_step_are_those_of_its_hidden_states(tiny):
    config, weights = tiny("gemma2")
    ids = token_ids(20, config.vocab_size)
    two = [NativeSequences(config, weights, LIBRARIES[BEST], max_len=32) for _ in range(2)]
    assert torch.equal(two[0].step([(0, ids)])[0], two[1].step_drafts(0, ids))


# -- broken rows


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("cache", CACHES)
def test_a_broken_row_breaks_what_sees_it_and_nothing_else(cache, value):
    config, weights = random_model(3, 1, 64)
    ids, other = token_ids(40, config.vocab_size), token_ids(30, config.vocab_size, seed=5)
    ids[20] = 1  # no id of `other`
    work = [(0, ids), (1, other), (2, other[:1])]

    def run() -> list[Tensor]:
        return NativeSequences(config, weights, LIBRARIES[BEST], max_len=48, threads=2, cache=cache).step(work)

    whole = run()
    weights.embedding[1] = value
    broken = run()
    assert torch.equal(broken[0][:20], whole[0][:20])
    assert broken[0][20:].isnan().all()
    assert torch.equal(broken[1], whole[1]) and torch.equal(broken[2], whole[2])


# -- threads and memory


def test_models_come_and_go_beside_each_other(tiny):
    config, weights = tiny("llama")
    ids = token_ids(24, config.vocab_size)

    def make(threads: int) -> NativeSequences:
        return NativeSequences(config, weights, LIBRARIES[BEST], max_len=32, threads=threads)

    kept = make(2)
    wanted = kept.step([(0, ids)])[0]
    for threads in (1, 2, 16):
        make(threads)  # never runs
        passing = make(threads)
        assert torch.equal(passing.step([(0, ids)])[0], wanted)
        del passing
        assert torch.equal(kept.step([(1, ids)])[0], wanted)
        kept.lengths[1] = 0


def test_buffers_do_not_depend_on_what_came_before(tiny):
    config, weights = tiny("gemma3")
    sequences = NativeSequences(config, weights, LIBRARIES[BEST], max_len=64)
    ids = token_ids(50, config.vocab_size)
    first = sequences.step([(0, ids[:1])])[0]
    sequences.step([(1, ids)])
    sequences.lengths = [0] * 4
    assert torch.equal(sequences.step([(2, ids[:1])])[0], first)


def test_a_larger_step_needs_no_less_memory(tiny):
    config, weights = tiny("qwen3")
    model = NativeSequences(config, weights, LIBRARIES[BEST], max_len=64).decoder.model
    sizes = [model.workspace_bytes(rows, rows, positions) for rows, positions in [(1, 64), (8, 64), (8, 1024), (64, 1024)]]
    assert sizes[0] > 0 and sizes == sorted(sizes)
