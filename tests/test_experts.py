"""Mixture of experts: choice and sum against a slow witness, laws of both, what a rank has, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrace.config import EngineConfig
from headrace.errors import CheckpointError, ParameterError
from headrace.kernels.experts import choose, route, run_experts
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.experts_config import ExpertsConfig
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.loader import load_model
from headrace.model.parts import parts_of
from headrace.model.shard import Shard
from headrace.model.weight import Weight
from tiny_models import write_tiny

CPU = torch.device("cpu")


def witness_route(logits: list[float], correction: list[float] | None, how: ExpertsConfig) -> tuple[list[int], list[float]]:
    """One row, as the papers say it."""
    if how.score == "softmax":
        scores = [math.exp(x - max(logits)) for x in logits]
        scores = [s / sum(scores) for s in scores]
    else:
        scores = [1 / (1 + math.exp(-x)) if how.score == "sigmoid" else x for x in logits]
    choice = [s + c for s, c in zip(scores, correction or [0.0] * len(scores), strict=True)]
    size = len(choice) // how.groups
    best = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(how.groups)]
    groups = sorted(range(how.groups), key=lambda g: (-best[g], g))[: how.groups_chosen]
    ids = sorted((e for e in range(len(choice)) if e // size in groups), key=lambda e: (-choice[e], e))[: how.chosen]
    shares = [scores[e] for e in ids]
    if how.score == "chosen":
        shares = [math.exp(s - max(shares)) for s in shares]
    if how.score == "chosen" or how.renormalize:
        shares = [s / sum(shares) for s in shares]
    return ids, [s * how.scale for s in shares]


@settings(max_examples=80)
@given(
    score=st.sampled_from(["softmax", "sigmoid", "chosen"]), groups=st.integers(1, 4), size=st.integers(1, 5), data=st.data(),
    renormalize=st.booleans(), corrected=st.booleans(), seed=st.integers(0, 1000), levels=st.sampled_from([0, 1, 2]),
)  # fmt: skip
def test_the_choice(score, groups, size, data, renormalize, corrected, seed, levels):
    """With few levels most scores are equal, and the lower id wins: of logits themselves, whose sums are exact."""
    count, taken = groups * size, data.draw(st.integers(1, groups))
    how = ExpertsConfig(
        count, data.draw(st.integers(1, taken * size)), 1, score="chosen" if levels else score, renormalize=renormalize,
        scale=1.5, groups=groups, groups_chosen=taken,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    logits, correction = torch.randn(4, count, generator=generator), torch.randn(count, generator=generator)
    if levels:
        logits, correction = ((t * levels).round() / levels for t in (logits, correction))
    ids, shares = route(logits, correction if corrected else None, how)
    assert ids.dtype == torch.int32 and shares.dtype == torch.float32
    for row in range(4):
        wanted, parts = witness_route(logits[row].tolist(), correction.tolist() if corrected else None, how)
        assert ids[row].tolist() == wanted
        torch.testing.assert_close(shares[row], torch.tensor(parts), rtol=1e-5, atol=1e-6)


def test_of_equals_the_first_is_chosen():
    ids, shares = route(torch.zeros(3, 6), None, ExpertsConfig(6, 3, 1))
    assert ids.tolist() == [[0, 1, 2]] * 3 and shares.tolist() == [[pytest.approx(1 / 6)] * 3] * 3
    ids, _ = route(torch.zeros(1, 6), torch.tensor([0.0, 0, 1, 0, 1, 0]), ExpertsConfig(6, 4, 1, score="sigmoid"))
    assert ids.tolist() == [[2, 4, 0, 1]]


def experts(count: int, inner: int, hidden: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_up": (count * 2 * inner, hidden), "down": (count * hidden, inner), "gate_up_bias": (count * 2 * inner,), "down_bias": (count * hidden,)}
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def witness_experts(x, w, ids, shares, inner, clamp, biased):
    """Token by token, expert by expert, in float64."""
    hidden = x.shape[1]
    w, x, out = {name: t.double() for name, t in w.items()}, x.double(), torch.zeros(len(x), hidden, dtype=torch.float64)
    for row, (own, of) in enumerate(zip(ids.tolist(), shares.double(), strict=True)):
        for expert, share in zip(own, of, strict=True):
            both = w["gate_up"][expert * 2 * inner : (expert + 1) * 2 * inner] @ x[row]
            both = both + w["gate_up_bias"][expert * 2 * inner : (expert + 1) * 2 * inner] if biased else both
            gate, up = both[:inner], both[inner:]
            if clamp:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
                between = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                between = torch.nn.functional.silu(gate) * up
            given = w["down"][expert * hidden : (expert + 1) * hidden] @ between
            given = given + w["down_bias"][expert * hidden : (expert + 1) * hidden] if biased else given
            out[row] += share * given
    return out


@pytest.mark.parametrize("clamp, biased", [(0.0, False), (0.0, True), (0.7, True)])
def test_the_sum(clamp: float, biased: bool):
    """As a whole, as the sum of what three ranks give, and each row alone."""
    count, inner, hidden, rows, chosen = 6, 5, 7, 11, 3
    w = experts(count, inner, hidden)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, hidden, generator=generator)
    ids = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(rows)]).int()
    shares = torch.rand(rows, chosen, generator=generator)

    def run(rows: slice, own: range) -> torch.Tensor:
        def part(name: str, each: int) -> torch.Tensor:
            return w[name][own.start * each : own.stop * each]

        biases = {"gate_up_bias": part("gate_up_bias", 2 * inner), "down_bias": part("down_bias", hidden)} if biased else {}
        return run_experts(
            x[rows], Weight(part("gate_up", 2 * inner)), Weight(part("down", hidden)), ids[rows], shares[rows],
            count=len(own), first=own.start, activation="silu", clamp=clamp, **biases,
        )  # fmt: skip

    wanted = witness_experts(x, w, ids, shares, inner, clamp, biased)
    whole = run(slice(None), range(count))
    torch.testing.assert_close(whole.double(), wanted, rtol=1e-5, atol=1e-5)
    parts = [run(slice(None), Shard(rank, 3).part(count)) for rank in range(3)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)
    for row in range(rows):
        torch.testing.assert_close(run(slice(row, row + 1), range(count)), whole[row : row + 1], rtol=1e-5, atol=1e-5)
    assert not run(slice(0, 0), range(count)).numel()


def test_router_logits_are_of_float32_even_where_rows_are_not():
    """Two experts whose logits differ by less than half precision tells apart."""
    router = torch.tensor([[1.0, 1.0], [1.0, 1.0001]])
    ids, _ = choose(torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16), router, None, None, ExpertsConfig(2, 1, 1))
    assert ids.tolist() == [[1]]


# ---------------------------------------------------------------- configs, plans, ranks


def tiny(tmp_path: Path, family: str, **overrides):
    path = write_tiny(family, tmp_path / family, **overrides)
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    return path, checkpoint, model_config_from_hf(checkpoint.config)


BASE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, given, said",
    [
        ("glm4_moe", {"scoring_func": "softplus"}, "scoring_func is 'softplus', supported: 'sigmoid'"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("glm4_moe", {"n_routed_experts": 6, "n_group": 4}, "n_group 4 and topk_group 1 do not go with 6 experts"),
        ("glm4_moe", {"n_routed_experts": 8, "n_group": 8, "num_experts_per_tok": 3}, "3 of a token"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax', supported: 'sigmoid'"),
        ("qwen3_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok is 129, wanted an integer in"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts is 0"),
        ("qwen3_moe", {"num_experts": 100_000}, "num_experts is 100000"),
        ("qwen3_moe", {"num_experts": 4096, "num_hidden_layers": 10_000}, r"num_experts is 4096, wanted an integer in \[1, 26\]"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "none of 4 layers has experts"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": [1, 2, 2, 2]}, "moe_topk is .*alike"),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 2, "num_shared_expert": [2] * 4}, "num_shared_expert is 2, supported: 1"),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 2, "moe_intermediate_size": [64] * 4}, "moe_intermediate_size is 64, supported: 128"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True, supported: False"),
        ("exaone_moe", {"mlp_layer_types": ["dense", "wide"]}, "mlp_layer_types is"),
    ],
)
def test_what_is_refused_names_field_and_value(kind: str, given: dict, said: str):
    with pytest.raises(CheckpointError, match=said):
        model_config_from_hf({**BASE, "model_type": kind, **given})


def test_ranks_that_do_not_divide_the_experts_are_refused():
    config = model_config_from_hf({**BASE, "model_type": "qwen3_moe", "num_experts": 6, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16})
    assert Shard(1, 3).config(config).experts == ExpertsConfig(6, 2, 768, first=2, held=2)
    with pytest.raises(ParameterError, match=r"tensor_parallel_size: got 4, allowed: 1, 3, 6 .*12 heads, 3 key-value heads and 6 experts"):
        Shard(0, 4).config(config)
    shared = model_config_from_hf({**BASE, "model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 6})
    with pytest.raises(ParameterError, match="8 experts and 6 inner columns of the shared expert"):
        Shard(0, 4).config(shared)


def test_a_rank_reads_its_own_experts_and_no_other():
    config = model_config_from_hf({**BASE, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8})
    for rank in range(2):
        parts = {part.target: part for part in parts_of(weight_plan(config), config, Shard(rank, 2))}
        read = [of.name for name in ("experts_gate_up", "experts_down") for of in parts[f"layers.0.{name}"].reads]
        assert {int(name.split(".")[5]) for name in read} == {2 * rank, 2 * rank + 1}
        assert (parts["layers.0.experts_gate_up"].shape, parts["layers.0.experts_down"].shape) == ((2 * 16, 64), (2 * 64, 8))
        assert parts["layers.0.router"].shape == (4, 64) and parts["layers.0.router"].exact


def test_the_router_stays_float32_and_experts_do_not(tmp_path: Path):
    _, checkpoint, config = tiny(tmp_path, "glm4_moe")
    weights = load_model(checkpoint, config, torch.bfloat16, CPU).layers[1].more
    exact = {name for name, value in weights.items() if getattr(value, "data", value).dtype == torch.float32}
    assert exact == {"router", "correction"}


@pytest.mark.parametrize(
    "family, extra", [("glm4_moe", "model.layers.3.eh_proj.weight"), ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj.weight")]
)  # fmt: skip
def test_what_guesses_further_tokens_is_left_unread(tmp_path: Path, family: str, extra: str):
    path, checkpoint, config = tiny(tmp_path, family)
    save_file(load_file(path / "model.safetensors") | {extra: torch.ones(3)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(checkpoint.config | {"num_nextn_predict_layers": 1}))
    load_model(resolve_checkpoint(EngineConfig(model=str(path))), config, torch.float32, CPU)
    (path / "config.json").write_text(json.dumps(checkpoint.config | {"num_nextn_predict_layers": None}))
    if family == "glm4_moe":
        with pytest.raises(CheckpointError, match=r"eh_proj\.weight' is unexpected"):
            load_model(resolve_checkpoint(EngineConfig(model=str(path))), config, torch.float32, CPU)


@pytest.mark.parametrize(
    "family, tensor, change, said",
    [
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w2.weight", None, "'{tensor}' is missing"),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w2.weight", lambda t: t[1:], "'{tensor}' has shape"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", lambda t: t[:7], "'{tensor}' has shape"),
        ("granitemoe", "model.layers.0.block_sparse_moe.input_linear.weight", lambda t: t[:7], "has 7 experts, the config 8"),
        ("granitemoe", "model.layers.0.block_sparse_moe.input_linear.weight", None, "input_linear.weight\\[0\\]' is missing"),
        ("granitemoe", "model.layers.0.block_sparse_moe.input_linear.weight", lambda t: t[:, 1:], "has shape"),
    ],
)  # fmt: skip
def test_missing_and_misshapen_experts_are_named(tmp_path: Path, family: str, tensor: str, change, said: str):
    path, checkpoint, config = tiny(tmp_path, family)
    tensors = load_file(path / "model.safetensors")
    changed = tensors.pop(tensor)
    save_file(tensors | ({} if change is None else {tensor: change(changed).contiguous()}), path / "model.safetensors")
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    with pytest.raises(CheckpointError, match=said.format(tensor=tensor)):
        load_model(checkpoint, config, torch.float32, CPU)


def test_a_published_config_is_read():
    """Qwen3-30B-A3B: names of Transformers 4."""
    config = model_config_from_hf(json.loads((Path(__file__).parents[1] / "benchmarks" / "shapes" / "qwen3-30b-a3b.json").read_text()))
    assert config.experts == ExpertsConfig(128, 8, 768, renormalize=True)
    numbers = sum(math.prod(spec.shape) for spec in weight_plan(config))
    assert round(numbers / 1e9, 2) == 30.53
