"""Each family's logits and greedy text against Hugging Face Transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.model.linear import MatrixLinear, make_linear
from model_harness import Sequences, load_tiny
from tiny_gemma4 import EXPERTS, SMALL
from tiny_models import TINY, VOCAB, write_tiny

VARIANTS = {
    **{family: (family, {}) for family in TINY},
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama-mha": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "gemma3-plain": ("gemma3", {"rope_parameters": None, "layer_types": None, "num_hidden_layers": 7}),
    "gemma4-all": ("gemma4", EXPERTS | SMALL),
    "phi3-window": ("phi3", {"sliding_window": 10}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": None, "no_rope_layer_interval": 2}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "cohere-bias": ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "granite-bias": ("granite", {"attention_bias": True, "mlp_bias": True}),
}
TOLERANCE = 1e-4  # of the largest logit


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request, tmp_path_factory):
    """(our config, our weights, the Transformers model) of one checkpoint."""
    import transformers

    family, overrides = VARIANTS[request.param]
    path = write_tiny(family, tmp_path_factory.mktemp(request.param), **overrides)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return *load_tiny(path), theirs


@torch.no_grad()
def reference(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.01  # a model whose logits are all alike would agree with anything
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def test_whole_prompt(pair):
    config, weights, theirs = pair
    ids = tokens(45)
    (ours,) = Sequences(config, weights, max_len=64).step([(0, ids)])
    assert_close(ours, reference(theirs, ids))


def _split_mlp(run: Sequences, rows: int) -> None:
    for layer in run.decoder.layers:
        layer.mlp.max_rows = rows


def test_rows_in_parts(pair):
    config, weights, theirs = pair
    ids = tokens(33, seed=8)
    run = Sequences(config, weights, max_len=64)
    _split_mlp(run, 16)
    assert_close(run.step([(0, ids)])[0], reference(theirs, ids))


def test_products_that_add_in_place(pair):
    """The linears of a GPU: a residual is not added twice, nor lost, nor seen by anybody after it was changed."""
    config, weights, theirs = pair
    ids = tokens(40, seed=2)
    run = Sequences(config, weights, max_len=64, make=lambda w, bias, _: MatrixLinear(w.data) if bias is None else make_linear(w, bias))
    _split_mlp(run, 8)  # four parts of a prompt
    ours = run.step([(0, ids[:30])]) + [run.step([(0, [token])])[0] for token in ids[30:]]
    assert_close(torch.cat(ours), reference(theirs, ids))


def test_token_by_token(pair):
    config, weights, theirs = pair
    ids = tokens(30, seed=1)
    run = Sequences(config, weights, max_len=64)
    ours = [run.step([(2, [token])])[0] for token in ids]
    assert_close(torch.cat(ours), reference(theirs, ids))


def test_mixed_chunks_of_several_sequences(pair):
    """Three sequences advance by chunks of their own sizes in shared batches, single tokens and chunks mixed."""
    config, weights, theirs = pair
    prompts = [tokens(n, seed=n) for n in (41, 23, 34)]
    run = Sequences(config, weights, max_len=48, num_seqs=3, block_size=3)
    rng = random.Random(7)
    ours: list[list[torch.Tensor]] = [[], [], []]
    while any(run.lengths[s] < len(prompts[s]) for s in range(3)):
        work = []
        for s in rng.sample(range(3), 3):
            left = prompts[s][run.lengths[s] :]
            if left:
                work.append((s, left[: rng.choice((1, 1, 2, 5, 11))]))
        for (s, _), logits in zip(work, run.step(work), strict=True):
            ours[s].append(logits)
    for s in range(3):
        assert_close(torch.cat(ours[s]), reference(theirs, prompts[s]))


def test_wanted_rows_only(pair):
    """Of each step's rows some are asked for, often none: those are right, and what the others leave in the cache is, too."""
    config, weights, theirs = pair
    prompts = [tokens(n, seed=n) for n in (41, 23, 34)]
    expected = [reference(theirs, prompt) for prompt in prompts]
    run = Sequences(config, weights, max_len=48, num_seqs=3, block_size=3)
    rng = random.Random(8)
    while any(run.lengths[s] < len(prompts[s]) for s in range(3)):
        starts = list(run.lengths)
        work = [(s, prompts[s][starts[s] :][: rng.choice((1, 2, 5, 11))]) for s in rng.sample(range(3), 3)]
        work = [(s, ids) for s, ids in work if ids]
        wanted = [sorted(rng.sample(range(len(ids)), min(len(ids), rng.choice((0, 0, 1, 2))))) for _, ids in work]
        for (s, _), rows, logits in zip(work, wanted, run.step(work, wanted), strict=True):
            assert len(logits) == len(rows)
            if rows:
                assert_close(logits, expected[s][[starts[s] + r for r in rows]])


def test_greedy_text(pair):
    config, weights, theirs = pair
    ids = tokens(17, seed=3)
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(ids) :].tolist()
    run = Sequences(config, weights, max_len=64)
    generated, following = [], ids
    while len(generated) < 20:
        (logits,) = run.step([(1, following)])
        following = [int(logits[-1].argmax())]
        generated += following
    assert generated == expected
