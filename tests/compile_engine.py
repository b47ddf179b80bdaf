"""Run an engine for a card that is not there: which kernels it asks for, and in how many forms with the same constants.

Requests come and go, so that steps have any number of prompts, decodes and rows. Where a tensor begins, or what a number is
divisible by, must not make another form of a kernel: that would be compiled in the middle of serving. Some of the steps are those
that a card captures with prompts. Prints JSON: "forms":
kernel -> for each of its constants and types how many there are; "unforeseen": kernels in forms that compiling ahead, from the
model's shape alone, does not know of; "of_ranks": kernels that compiling ahead knows of for one of two ranks.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import headrace.engine.forwards as forwards
from engine_driver import complete, make_core
from headrace.attention.triton_backend import TritonAttention
from headrace.compile_ahead import no_device
from headrace.compile_ahead.played_ranks import with_part_of_vocabulary
from headrace.compile_ahead.steps import Places, Played, Stage
from headrace.compile_ahead.weights import weights_without_data
from headrace.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.kernels import launch
from headrace.model import linear
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import model_config_from_hf
from headrace.model.shard import Shard
from headrace.sampling import sampler
from headrace.sampling.params import SamplingParams
from headrace.scheduler.config import Limits
from headrace.worker.batch_state import ALIGN
from prompt_graphs_driver import UncapturedPrompts
from tiny_models import write_shape

SHAPES = Path(__file__).parents[1] / "benchmarks" / "shapes"
STEPS = 70
original = JITFunction._do_compile
forms: Counter = Counter()
asked: dict[tuple[str, str], str] = {}  # name and key of a form -> its constants


def note(self: JITFunction, key, signature, device, constants, *rest):
    """Stands for Triton's compilation: what it is asked for, and apart from alignment and divisibility."""
    declared = {p.name: constants.get((p.num,)) for p in self.params if p.is_constexpr}
    types = [kind for kind in signature.values() if kind.startswith("*")]
    forms[self.fn.__name__, str(declared), str(types)] += 1
    asked[self.fn.__name__, key] = f"{declared} {types}"
    self.device_caches[device][0][key] = object()
    return self.device_caches[device][0][key]


def choose(logits: Tensor, inputs: sampler.SampleInputs) -> tuple[Tensor, Tensor]:
    ids, failed = sampler._choose_on_gpu(logits, inputs)
    return ids.zero_(), failed.zero_()  # nothing has run


def main(directory: str) -> None:
    path = write_shape(
        Path(directory), vocab_size=8192, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256,
    )  # fmt: skip
    forwards.select_attention = lambda name, model, device, *_: (TritonAttention(model, device), "the one that is tested")
    linear.on_gpu = lambda tensor: True  # products as on a card
    core = make_core(
        path, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=64, max_model_len=2304,
        block_size=64, max_num_batched_tokens=2048, num_kv_blocks=1200, enforce_eager=True,
    )  # fmt: skip
    core.runner.state.align, core.runner.decoder.lm_head.into = ALIGN, None  # as on a card, but logits have no place
    no_device.install(90)
    launch._KNOWN = False  # a compiled form is not launched again
    sampler.choose = choose
    JITFunction._do_compile = note  # type: ignore[method-assign]
    limits = core.scheduler.limits
    prompts = UncapturedPrompts(core.runner.decoder, core.runner.kv, core.runner.state, 64, 2304, limits.max_num_batched_tokens)
    prompts.decoder = core.runner.decoder
    rng = random.Random(1)
    for step in range(STEPS):
        core.runner.prompts = prompts if step % 3 == 0 else None
        for i in range(rng.randint(1, 6) if core.scheduler.num_waiting < 3 else 0):
            settings = complete(SamplingParams(
                temperature=rng.choice([0.0, 0.6]), top_p=rng.choice([1.0, 0.9]), max_tokens=rng.randint(1, 40), ignore_eos=True
            ))  # fmt: skip
            prompt = [rng.randrange(8000) for _ in range(rng.randint(5, 900))]
            core.add(EngineRequest(f"{step}.{i}", prompt, settings, i))
        core.step()
    found: dict[str, list[int]] = {}
    for (name, _, _), count in forms.items():
        found.setdefault(name, []).append(count)
    missed = sorted(unforeseen(core, path)) + unforeseen_of_adapters(Path(directory) / "experts")
    missed += unforeseen_of_halves(Path(directory) / "halves") + unforeseen_of_states(Path(directory) / "states")
    print(json.dumps({"forms": found, "unforeseen": missed, "of_ranks": sorted(of_ranks(path))}))


def unforeseen(core: EngineCore, path: str) -> list[str]:
    JITFunction._do_compile = original  # type: ignore[method-assign]
    model, weights = without_data(path)
    for kernel in {kernel for kernel in gc.get_objects() if isinstance(kernel, JITFunction)}:
        kernel.device_caches.clear()
    launches, _ = no_device.note_launches()
    stage = Stage(Played(model, weights, core.scheduler.limits, torch.bfloat16, "no card", eager=True))
    stage.play()
    known = len(launches)
    stage.forward([1] * 60 + [300], [700] * 60 + [300])  # more decodes than the load above has at a time
    of_many = in_words(launches[known:])
    stage.captured_prompts()
    ahead = {(launch.name, launch.arguments[0]) for launch in launches}
    return [f"{name} {asked[name, key]} {key}" for name, key in asked.keys() - ahead] + of_many


def unforeseen_of_adapters(directory: Path) -> list[str]:
    """What prompts of any length ask for, of a model whose experts have adapters."""
    directory.mkdir()
    path = write_shape(
        directory, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], vocab_size=1024, hidden_size=512,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64,
    )  # fmt: skip
    played = Played(*without_data(path), limits_of(16), torch.bfloat16, "no card", True, Places(3, 16, True))
    launches, _ = no_device.note_launches()
    stage = Stage(played)
    stage.play()
    Stage(replace(played, eager=False)).captured(False)
    assert {"_shrink_pairs", "_shrink_few"} <= {launch.name for launch in launches}
    launches.clear()  # each form is noted once
    for tokens in range(1, 600, 7):
        stage.forward([tokens], [tokens], adapted=True)
    return in_words(launches)


def unforeseen_of_halves(directory: Path) -> list[str]:
    """What uncaptured steps ask for, of a model so wide that only the fewest rows have sums in halves, and with so many heads for
    one of keys that prompts of a few tokens, as the prefix cache leaves, are tiles of attention of their own."""
    directory.mkdir()
    path = write_shape(
        directory, vocab_size=1024, hidden_size=5120, num_hidden_layers=1, num_attention_heads=40, num_key_value_heads=8,
        intermediate_size=12288,
    )  # fmt: skip
    return asked_behind(path, limits_of(16), [([tokens], [tokens]) for tokens in (*range(1, 70), 100, 128, 550)])


def unforeseen_of_states(directory: Path) -> list[str]:
    """What uncaptured steps of any number of prompts ask for, of a model with gated delta nets."""
    directory.mkdir()
    (directory / "config.json").write_text((SHAPES / "qwen3.5-4b.json").read_text())
    steps = [([1] * (40 - prompts) + [3] * prompts, [9] * 40) for prompts in range(1, 41)]
    return asked_behind(str(directory), limits_of(40), steps)


def asked_behind(path: str, limits: Limits, steps: list[tuple[list[int], list[int]]]) -> list[str]:
    """What uncaptured steps of these tokens and contexts ask for behind all that is played of the model."""
    launches, _ = no_device.note_launches()
    stage = Stage(Played(*without_data(path), limits, torch.bfloat16, "no card", eager=True))
    stage.play()
    launches.clear()  # each form is noted once
    for tokens, contexts in steps:
        stage.forward(tokens, contexts)
    return in_words(launches)


def without_data(path: str) -> tuple[ModelConfig, DecoderWeights]:
    checkpoint = resolve_checkpoint(EngineConfig(model=path, load_format="dummy"))
    return weights_without_data(checkpoint, model_config_from_hf(checkpoint.config), torch.bfloat16, None)


def limits_of(max_num_seqs: int) -> Limits:
    return Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=1024, max_model_len=1024, block_size=64, num_blocks=100)


def in_words(launches: list[no_device.Launch]) -> list[str]:
    return [f"{launch.name} {launch.arguments[0]}" for launch in launches]


def of_ranks(path: str) -> set[str]:
    """What is played of one of two."""
    checkpoint = resolve_checkpoint(EngineConfig(model=path, load_format="dummy"))
    part = Shard(0, 2).config(model_config_from_hf(checkpoint.config))
    model, weights = weights_without_data(checkpoint, part, torch.bfloat16, None)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, block_size=64, num_blocks=100)
    launches, _ = no_device.note_launches()
    Stage(Played(model, with_part_of_vocabulary(weights, part, 2), limits, torch.bfloat16, "no card", ranks=2)).play()
    return {launch.name for launch in launches}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
