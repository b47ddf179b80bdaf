"""Captured steps with prompts on a card: law 1 in float32 and bfloat16, at tiny shapes and at those of real heads."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch

from agreement import BF16_TOLERANCE, compare, with_rows
from engine_driver import assert_all_same, complete, make_core, make_requests, plain_requests, requests_of_all_kinds, run
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from headrace.worker.sampling import Tail
from tiny_models import write_tiny

pytestmark = pytest.mark.gpu
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "vocab_size": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "hidden_act": "silu", "max_position_embeddings": 8192, "attention_bias": False, "torch_dtype": "float32",
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


def count_replays(core: EngineCore) -> Counter[Tail]:
    """Captured steps with prompts, by what was to follow the forward."""
    prompts, seen = core.runner.prompts, Counter()
    assert prompts is not None
    key_of = prompts.key_of

    def counted(plan, tail):
        seen[tail] += 1
        return key_of(plan, tail)

    prompts.key_of = counted
    return seen


@pytest.mark.parametrize("options", [
    {}, {"max_num_batched_tokens": 9}, {"num_kv_blocks": 16, "max_num_batched_tokens": 13}, {"enable_prefix_caching": False},
], ids=["together", "chunks", "tiny pool", "no prefix cache"])  # fmt: skip
def test_all_kinds_of_requests_in_float32(model, options):
    requests = requests_of_all_kinds(512)
    want = run(make_core(model, **options), requests)
    core = make_core(model, device="cuda", **options)
    seen = count_replays(core)
    assert_all_same(run(core, requests, arrivals=[i // 3 for i in range(len(requests))]), want, str(options))
    assert seen.total() > 5


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_5"])
def test_steps_that_are_not_captured_sample_rows_that_are_filled_up(family, tmp_path):
    model = str(write_tiny(family, tmp_path))
    requests = requests_of_all_kinds(512) if family == "qwen3" else make_requests(4, 10, 512)
    want = run(make_core(model), requests)
    core = make_core(model, device="cuda")
    prompts, counts = core.runner.prompts, []
    prompts.takes, filled_up = lambda plan: False, prompts.filled_up

    def noted(sampled, most):
        counts.append((len(sampled), len(filled_up(sampled, most))))
        return filled_up(sampled, most)

    prompts.filled_up = noted
    assert_all_same(run(core, requests, arrivals=[i // 3 for i in range(len(requests))]), want, family)
    assert sum(count < found for count, found in counts) > 2


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "qwen3_5"])
def test_other_layers_in_float32(family, tmp_path):
    """Experts, of which padded rows choose some, too; windows and soft caps; gated delta nets."""
    model = str(write_tiny(family, tmp_path))
    requests = make_requests(4, 10, 512)
    want = run(make_core(model), requests)
    core = make_core(model, device="cuda")
    seen = count_replays(core)
    assert_all_same(run(core, requests, arrivals=[i // 2 for i in range(10)]), want, family)
    assert seen.total() > 3


@pytest.mark.parametrize("prepared", [False, True], ids=["exact", "padded"])
def test_plain_requests_sample_within_the_step(model, prepared):
    """Also where a larger step stands in."""
    requests = plain_requests(9, max_tokens=9)
    want = run(make_core(model), requests)
    core = make_core(model, device="cuda")
    if prepared:
        core.runner.prompts.prepare()
        assert {key.tail for key in core.runner.prompts._graphs} == {Tail.FILTERED}
    seen = count_replays(core)
    assert_all_same(run(core, requests, arrivals=[2 * i for i in range(9)]), want, "")
    assert set(seen) == {Tail.GREEDY, Tail.RANDOM, Tail.FILTERED}


def test_bfloat16_until_the_first_near_tie(model):
    alone = make_core(model, device="cuda", dtype="bfloat16", max_num_seqs=1, enforce_eager=True, enable_prefix_caching=False)
    requests = with_rows(make_requests(3, 12, alone.vocab_size))
    want = run(alone, requests)
    core = make_core(model, device="cuda", dtype="bfloat16")
    seen = count_replays(core)
    found = compare(run(core, requests, arrivals=[2 * i for i in range(12)]), want, BF16_TOLERANCE, "captured")
    assert not found.problems, "\n".join(found.problems)
    assert seen.total() > 5


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wide")
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return str(directory)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 512}, {"kv_cache_dtype": "fp8"}], ids=["", "chunks", "fp8"])
def test_long_prompts_and_contexts_beside_decodes(wide, options):
    """Blocks of 64 by the tensor memory accelerator, contexts that are split, prompts of up to the largest captured step."""
    rng = random.Random(4)
    lengths = [3000, 1, 700, 64, 65, 2000, 1500, 17, 128, 900, 300, 33, 2, 600]
    requests = [
        EngineRequest(f"{n}", [rng.randrange(1024) for _ in range(n)], complete(SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)), n)
        for n in lengths
    ]  # fmt: skip
    common = {
        "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "max_num_seqs": 40, "max_model_len": 6000,
        "block_size": 64, "num_kv_blocks": 400, **options,
    }  # fmt: skip
    arrivals = list(range(len(lengths)))
    want = run(make_core(wide, enforce_eager=True, **common), requests, arrivals=arrivals)
    core = make_core(wide, **common)
    seen = count_replays(core)
    got = run(core, requests, arrivals=arrivals)
    different = {n: (got[n].ids, want[n].ids) for n in got if got[n].ids != want[n].ids}
    assert not different and len({tuple(r.ids) for r in want.values()}) > 10
    assert seen.total() >= 10
    torch.cuda.synchronize()
