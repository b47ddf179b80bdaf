"""What part of a model a rank has: together the ranks have all of it, and a size that does not divide it is refused."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ParameterError
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.shard import Shard, check_size, sizes_of

ROPE = RopeConfig(10_000.0, 64)
QWEN3_8B = ModelConfig("qwen3", 151_936, 4096, 36, 32, 8, 128, 12_288, 40_960, ROPE)
SMOLLM2 = ModelConfig("llama", 49_152, 576, 30, 9, 3, 64, 1536, 8192, ROPE)


@pytest.mark.parametrize(("model", "sizes"), [(QWEN3_8B, [1, 2, 4, 8, 16, 32]), (SMOLLM2, [1, 3])])
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(model: ModelConfig, sizes: list[int]):
    assert sizes_of(model) == sizes
    for size in range(1, 66):
        if size in sizes:
            check_size(model, size)
            continue
        with pytest.raises(
            ParameterError, match=rf"tensor_parallel_size: got {size}, allowed: {', '.join(map(str, sizes))} \("
        ):
            Shard(0, size).config(model)


def test_inner_columns_that_do_not_divide_are_named():
    with pytest.raises(ParameterError, match=r"allowed: 1, 2 \(what divides .* 12290 inner columns"):
        check_size(dataclasses.replace(QWEN3_8B, intermediate_size=12_290), 4)


@given(heads=st.integers(1, 12), group=st.integers(1, 12), inner=st.integers(1, 64), vocab=st.integers(1, 999))
def test_the_ranks_have_all_of_the_model(heads: int, group: int, inner: int, vocab: int):
    model = dataclasses.replace(SMOLLM2, num_heads=heads * group, num_kv_heads=heads, intermediate_size=12 * inner)
    for size in sizes_of(model):
        shards = [Shard(rank, size) for rank in range(size)]
        whole = lambda parts: [i for part in parts for i in part]  # noqa: E731
        assert whole(s.vocab(vocab) for s in shards) == list(range(vocab))
        assert whole(s.part(model.num_heads) for s in shards) == list(range(model.num_heads))
        for shard in shards:
            local = shard.config(model)
            # each query head finds the key-value head that it has in the whole model
            kv = shard.kv_heads(heads)
            assert local.num_kv_heads == len(kv)
            for here, head in enumerate(shard.part(model.num_heads)):
                assert kv[here // (local.num_heads // local.num_kv_heads)] == head // group


def test_one_rank_has_the_model_itself():
    assert Shard().config(QWEN3_8B) == QWEN3_8B
    assert Shard().vocab_rows(151_937) == 151_937
