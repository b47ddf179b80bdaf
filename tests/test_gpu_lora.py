"""Adapters on a card: captured steps and others say what checkpoints say that they were merged into; loaded while steps run."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters import merged, write_adapter
from engine_driver import complete, make_core, run
from headrace.engine.messages import EngineRequest
from headrace.lora.format import examine
from headrace.lora.names import salted
from headrace.lora.targets import modules_of
from headrace.lora.version import Version
from headrace.sampling.params import SamplingParams
from test_model_families import tokens
from tiny_models import VOCAB, write_tiny

pytestmark = pytest.mark.gpu


def asked(digest: str, prefix: str, count: int = 3) -> list[EngineRequest]:
    """Prompts of one token, and of several chunks."""
    params = complete(SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True), lora=digest)
    prompts = [tokens(n, seed=n) for n in (1, 9, 45)]
    return [EngineRequest(f"{prefix}{i}", prompts[i], params, 0, cache_salt=salted("", digest)) for i in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}], ids=["captured", "eager", "chunks"])
def test_together_as_each_alone(options: dict, family: str, tmp_path: Path) -> None:
    """Of experts in the fused decode step, and beside one that all tokens have, which that does not run."""
    experts = family != "llama"
    base = str(write_tiny(family, tmp_path / "base"))
    paths = {
        "a": write_adapter(tmp_path / "a", base, r=16, experts=experts),
        "b": write_adapter(tmp_path / "b", base, r=3, seed=1, targets=("v_proj", "down_proj"), size=2.0, experts=experts),
    }  # fmt: skip
    wanted = {"": run(make_core(base, enforce_eager=True), asked("", "r"))}
    for name, path in paths.items():
        wanted[name] = run(make_core(merged(tmp_path / f"m{name}", base, path), enforce_eager=True), asked("", "r"))
    core = make_core(base, device="cuda", lora_dir=str(tmp_path), max_loras=3, lora_experts=experts, **options)
    modules = modules_of(core.runner.decoder.config, experts)
    versions: dict[str, Version] = {name: examine(path, modules, 16) for name, path in paths.items()}
    assert core.adapters is not None
    for version in versions.values():
        core.adapters.load(version)
    for turn in range(2):  # the second finds prefixes, and another adapter in the place of the first
        digests = {"": "", **{name: version.digest for name, version in versions.items()}}
        requests = [r for name, digest in digests.items() for r in asked(digest, f"{name}-")]
        found = run(core, requests)
        for name in digests:
            for i in range(3):
                assert found[f"{name}-{i}"].ids == wanted[name][f"r{i}"].ids, (turn, name, i)
        if not turn:
            core.adapters.unload(versions["a"].digest)
            core.adapters.unload(versions["b"].digest)
            for name in ("b", "a"):
                core.adapters.load(versions[name])
    assert core.vocab_size == VOCAB
