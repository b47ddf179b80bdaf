"""An EAGLE-3 head guesses what its definition says, whatever way its inputs came; broken checkpoints are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafting import drafting_core
from engine_driver import complete, make_core, run
from headrace.engine.messages import EngineRequest
from headrace.errors import CheckpointError
from headrace.sampling.params import SamplingParams
from headrace.speculative.eagle import tapped_layers
from tiny_models import write_eagle, write_tiny

DRAFTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def head(model, tmp_path_factory):
    return write_eagle(tmp_path_factory.mktemp("eagle"), model)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor) -> Tensor:
    """x [heads, T, 16] at positions 0 .. T - 1."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def guesses(w: dict[str, Tensor], embedding: Tensor, tokens: list[int], features: Tensor, count: int) -> list[int]:
    """`count` greedy drafts after `tokens` [n], from the target's residual streams [n - 1, 3 H]: all rows anew each time."""
    hidden = features @ w["fc.weight"].T
    tokens, drafts = list(tokens), []
    for _ in range(count):
        embedded = norm(embedding[torch.tensor(tokens[1:])], w["midlayer.input_layernorm.weight"])
        both = torch.cat([embedded, norm(hidden, w["midlayer.hidden_norm.weight"])], -1)
        q, k, v = (
            (both @ w[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(1, (-1, 16)).transpose(0, 1) for name in "qkv"
        )
        k, v = rotate(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        attended = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        residual = hidden + attended.transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
        x = norm(residual, w["midlayer.post_attention_layernorm.weight"])
        inner = F.silu(x @ w["midlayer.mlp.gate_proj.weight"].T) * (x @ w["midlayer.mlp.up_proj.weight"].T)
        residual = residual + inner @ w["midlayer.mlp.down_proj.weight"].T
        id = int((norm(residual[-1], w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
        drafts.append(id + int(w["d2t"][id]))
        tokens.append(drafts[-1])
        hidden = torch.cat([hidden, residual[-1:]])
    return drafts


def streams(model: str, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The target's residual streams before its three layers [n, 3 H], and its embedding."""
    core = make_core(model)
    seen = []
    core.runner.decoder.hidden_state_hook = lambda layer, residual, batch: seen.append(residual.clone())
    run(core, [EngineRequest("a", tokens, complete(SamplingParams(max_tokens=1)), 1)])
    return torch.cat(seen[:3], -1), core.runner.decoder.embedding


@pytest.mark.parametrize("options", [
    {}, {"overlap": True}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 20, "block_size": 4, "overlap": True},
])  # fmt: skip
def test_drafts_follow_the_definition(model, head, options):
    """In every step: after chunks, after a prefix hit, after drafts that were right and wrong, settled or not."""
    params = complete(SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    prompt = [(7 * i) % 500 for i in range(21)]
    request = EngineRequest("a", prompt, params, 1)
    tokens = prompt + run(make_core(model), [request])["a"].ids
    features, embedding = streams(model, tokens)
    core = drafting_core(model, speculative_method="eagle3", speculative_model=head, **options)
    drafter, state, rng = core.runner.drafter, core.runner.state, random.Random(3)
    proposed: list[tuple[int, list[int]]] = []
    propose = drafter.propose

    def recording(rows) -> None:
        propose(rows)
        for c in rows:
            start = c.start + (int(state.tables.accepted[c.slot]) if c.unverified else 0)
            proposed.append((start, state.token_ids[c.slot, start + 1 : start + 1 + c.num_drafts].tolist()))
            for position in range(start + 1, min(start + 1 + rng.randint(0, c.num_drafts), len(tokens))):
                state.token_ids[c.slot, position] = tokens[position]  # the random head's own guess is never right

    drafter.propose = recording
    weights = load_file(Path(head) / "model.safetensors")
    for _ in range(2):  # the second time the prompt is cached
        proposed.clear()
        result = run(core, [request])["a"]
        assert prompt + result.ids == tokens and len(proposed) > 5
        for start, drafts in proposed:
            assert drafts == guesses(weights, embedding, tokens[: start + 1], features[:start], len(drafts)), start
    assert result.cached > 0 and core.speculator.stats.num_accepted_tokens > 10


def changed(head: str, path: Path, change) -> str:
    tensors, config = load_file(Path(head) / "model.safetensors"), json.loads((Path(head) / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def without_norm(tensors, config):
    del tensors["midlayer.hidden_norm.weight"]


def other_width(tensors, config):
    tensors["fc.weight"] = torch.zeros(96, 96)


def far_ids(tensors, config):
    tensors["d2t"] = tensors["d2t"] + 500


def layer_99(tensors, config):
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 99]


@pytest.mark.parametrize("change, says", [
    (without_norm, "hidden_norm"), (other_width, "fc.weight"), (far_ids, "d2t"), (layer_99, "99"),
])  # fmt: skip
def test_broken_heads_are_refused(model, head, tmp_path, change, says):
    with pytest.raises(CheckpointError, match=says):
        make_core(model, speculative_method="eagle3", speculative_model=changed(head, tmp_path, change))


def test_layers_of_the_publication_are_the_default():
    assert tapped_layers({}, 32) == (2, 16, 29)
    assert tapped_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 6]}}, 32) == (1, 5, 6)
