"""Gemma 4 on a card against the float32 engine on the CPU, as test_gpu_engine_families has all families: heads of 256 and 512,
experts beside the dense MLP, inputs of layers and shared keys."""

from __future__ import annotations

import math

import pytest

import test_gpu_engine_families as families
from agreement import compare
from engine_driver import make_core, run
from tiny_gemma4 import EXPERTS, SMALL
from tiny_models import write_tiny

pytestmark = pytest.mark.gpu
VARIANTS = {"large heads": {"head_dim": 256, "global_head_dim": 512}, "experts": EXPERTS, "small": SMALL}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("gemma4")
    return lambda name: str(write_tiny("gemma4", root / name, **VARIANTS[name]))


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_tokens_equal_the_cpu(path, name):
    """These models enlarge roundings, heads of 512 most: bfloat16, whose roundings are 2^16 times as large, is off by up to 0.6 of
    a row there, also on the CPU."""
    families.assert_float32_equals_the_cpu(path, name, 1e-3 if name == "large heads" else 1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_is_as_near_as_the_cpus_own(path, name):
    """Rows of logprobs against the CPU's float32: in the mean and at worst no farther off than the CPU's bfloat16 is, or little."""
    model = path(name)
    cpu = make_core(model, enable_prefix_caching=False)
    requests = families.asking_for_rows(cpu.vocab_size)
    want = run(cpu, requests)
    own = compare(run(make_core(model, dtype="bfloat16"), requests), want, math.inf)
    for mode, options in families.MODES.items():
        seen = compare(run(make_core(model, device="cuda", dtype="bfloat16", **options), requests), want, math.inf)
        print(f"{name}, {mode}: {seen}; the CPU's {own}")
        assert not seen.problems and seen.worst < 2 * own.worst, f"{mode}: {seen}"
        assert seen.total / seen.compared < 1.3 * own.total / own.compared, f"{mode}: {seen}, the CPU's: {own}"
