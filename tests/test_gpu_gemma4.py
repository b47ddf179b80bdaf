"""Gemma 4 on a card against the float32 engine on the CPU, as test_gpu_engine_families has all families: heads of 256 and 512,
experts beside the dense MLP, inputs of layers and shared keys."""

from __future__ import annotations

import pytest

import test_gpu_engine_families as families
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
    families.test_float32_tokens_equal_the_cpu(path, name)


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_is_near_the_exact_engine(path, name):
    families.test_bfloat16_is_near_the_exact_engine(path, name)
