"""What the interpreter accepts the compiler must too: the kernels compile for Ampere and Hopper on a machine without a card."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

from headrace.compile_ahead.cards import SHARED_MEMORY

pytestmark = pytest.mark.timeout(800)  # compilers beside other work


def run(script: str, *args: str, **env: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | env
    command = [sys.executable, str(Path(__file__).with_name(script)), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=700)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


PARTS = {  # by card; `make conformance` has them all
    80: ("decode of 1 row", "decode of 4 rows 8B", "adapters of 32"),
    86: ("products of 64 rows", "adapted experts of 1024 rows in FP4"),
    90: ("sampling", "all-reduce", "ranks'", "decode of 1 row", "in rings", "in clusters", "decode of 64 rows 8B", "decode of 256 rows", "narrow products", "FP8 step",
         "latent 20 heads", "small delta net in float32", "varlen 0.6B", "roles head 256", "gate and up", "experts of 1024 rows in FP4"),
    120: ("varlen head 256 window", "widened 8B in FP8"),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[int, list[dict]]:
    """By card; each in one process, with a cache of its own."""
    made = {}
    for capability, parts in PARTS.items():
        cache = str(tmp_path_factory.mktemp(f"cache{capability}"))
        lines = run("compile_kernels.py", str(capability), *parts, TRITON_CACHE_DIR=cache).splitlines()
        made[capability] = [json.loads(line) for line in lines]
    return made


def of(kernels: list[dict], *parts: str) -> list[dict]:
    return [kernel for kernel in kernels if any(part in kernel["case"] for part in parts)]


def test_types_of_results_are_not_named_within_a_kernel():
    """Triton 3.8 takes such a tuple for one of constants, and compiles none of these."""
    source = Path(__file__).parents[1] / "src" / "headrace"
    named = [path.name for path in source.rglob("*.py") if re.search(r"^ +\w+: tl\.constexpr = \(tl\.\w+,", path.read_text(), re.M)]
    assert named == []


def test_sampling_kernels_compile(compiled):
    kernels = [kernel for kernel in of(compiled[90], "sampling") if "ranks" not in kernel["case"]]
    variants = {"_reduce": 3, "_pick": 3, "_filter": 1, "_add_mask": 1}
    assert Counter(kernel["kernel"] for kernel in kernels) == variants


def test_kernels_of_ranks_compile(compiled):
    """At most 128 registers for each of at most 512 threads: every program of an all-reduce has a multiprocessor."""
    kernels = of(compiled[90], "all-reduce", "ranks'")
    assert {kernel["kernel"] for kernel in kernels} >= {"_push_sum_kernel", "_choose", "_gemv_kernel", "_ring_kernel"}
    meet = [kernel for kernel in kernels if kernel["kernel"] in ("_push_sum_kernel", "_choose")]
    assert not [kernel for kernel in meet if kernel["spills"] > 16 or kernel["registers"] > 128]


@pytest.mark.parametrize("capability", [80, 90])
def test_fused_decode_compiles(compiled, capability: int) -> None:
    kernels = [kernel for kernel in of(compiled[capability], "decode of") if "ranks" not in kernel["case"]]
    names = {"_embed_residual_kernel", "_gemv_kernel", "_skinny_kernel", "_decode_attention_kernel", "_few_attention_kernel"}
    large = {"_ring_kernel", "_ring_attention_kernel", "_join_normed_kernel", "_wide_kernel", "_qkv_rope_write", "_split_attention"}
    names |= large if capability == 90 else set()
    assert {kernel["kernel"] for kernel in kernels} == names
    assert max(kernel["shared"] for kernel in kernels) <= SHARED_MEMORY[capability]
    assert not [kernel for kernel in kernels if kernel["spills"] > 16], "registers are spilled"


def test_what_clusters_join_lies_where_kernels_take_it_to(compiled) -> None:
    kernels = [kernel for kernel in of(compiled[90], "in clusters") if kernel["ctas"] > 1]
    assert {kernel["kernel"] for kernel in kernels} == {"_ring_kernel", "_ring_attention_kernel"}
    assert not [kernel for kernel in kernels if kernel["wrong"]]


def test_adapters_compile(compiled) -> None:
    kernels = of(compiled[80], "adapters of 32")
    assert {kernel["kernel"] for kernel in kernels} == {"_group", "_shrink", "_expand", "_members", "_shrink_few", "_skinny_kernel"}
    assert max(kernel["shared"] for kernel in kernels) <= SHARED_MEMORY[86]
    assert not [kernel for kernel in kernels if kernel["spills"] > 16], "registers are spilled"


def test_attention_with_roles_compiles(compiled) -> None:
    """Its groups have the registers that setmaxnreg gives them, and lose none."""
    (kernel,) = of(compiled[90], "roles")
    assert (kernel["kernel"], kernel["spills"]) == ("_roles_attention", 0)
    assert kernel["shared"] <= SHARED_MEMORY[90]


def test_experts_with_roles_compile(compiled) -> None:
    kernels = [kernel for kernel in of(compiled[90], "experts of 1024 rows in FP4") if kernel["kernel"] == "_roles_tiles"]
    assert len(kernels) == 2 and max(kernel["spills"] for kernel in kernels) <= 16  # before its loops
    assert max(kernel["shared"] for kernel in kernels) <= SHARED_MEMORY[90]


def test_gate_and_up_compile(compiled) -> None:
    """Sums of 256 rows take 128 registers of a thread, and three groups have 168 each."""
    kernels = of(compiled[90], "gate and up")
    assert [(kernel["kernel"], kernel["spills"]) for kernel in kernels] == 2 * [("_gated_roles", 0)]
    assert max(kernel["shared"] for kernel in kernels) <= SHARED_MEMORY[90]


def test_the_assembler_has_lost_nothing(compiled) -> None:
    """No kernel computes with the stack pointer, which is what the assembler made of a value that it had lost (in the chunks of a
    delta net, with eight warps), nor writes to a register that a running product reads (prompts' attention multiplies values
    while it weighs scores)."""
    assert {"_chunks", "_varlen_attention"} <= {kernel["kernel"] for kernel in compiled[90]}
    assert not [kernel for kernels in compiled.values() for kernel in kernels if kernel["wrong"]]


def test_narrow_products_compile(compiled) -> None:
    kernels = of(compiled[90], "narrow products")
    names = [kernel["kernel"] for kernel in kernels]
    assert names == ["_warp_kernel", "_gemv_kernel", "_warp_kernel", "_digit_kernel", "_digit_kernel", "_narrow_kernel"]
    assert not [kernel for kernel in kernels if kernel["spills"] > 16], "registers are spilled"


def test_steps_in_fp8_compile(compiled) -> None:
    kernels = [kernel for kernel in of(compiled[90], "FP8 step") if kernel["kernel"] != "_narrow_kernel"]  # the head's
    assert [kernel["kernel"] for kernel in kernels].count("_rounded_kernel") == 5 * len({kernel["case"] for kernel in kernels})
    assert not [kernel for kernel in kernels if kernel["spills"]], "registers are spilled"
    assert max(kernel["shared"] for kernel in kernels) <= SHARED_MEMORY[90]


@pytest.mark.parametrize(("capability", "part"), [(86, PARTS[86][0]), (86, PARTS[86][1]), (120, PARTS[120][0]), (120, PARTS[120][1]), (90, "latent 20 heads")])
def test_tiles_fit_their_cards(compiled, capability: int, part: str) -> None:
    """The largest ones."""
    kernels = of(compiled[capability], part)
    assert kernels and max(kernel["shared"] for kernel in kernels) <= SHARED_MEMORY[capability], kernels


def test_launching_again_hands_over_the_same(tmp_path):
    assert run("launcher_arguments.py", TRITON_CACHE_DIR=str(tmp_path)).split() == [
        "_rms_norm", "1", "_rms_norm", "1", "_act_mul", "1", "_qkv_rope_write", "1", "_qkv_rope_write", "1",
        "_rms_norm", "3",  # not aligned: Triton's way each time
        "_enter", "1",
    ]  # fmt: skip


def test_a_changing_load_compiles_each_kernel_once(tmp_path):
    """Whatever a step is made of: no kernel has two forms for the same constants, and each form is known ahead. What only ranks
    launch is known, too."""
    found = json.loads(run("compile_engine.py", str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "cache")))
    assert not found["unforeseen"]
    forms = found["forms"]
    assert {"_pick", "_filter", "_prepare_rows", "_expand_rows", "_split_attention", "_varlen_attention"} <= set(forms)
    assert {count for counts in forms.values() for count in counts} == {1}, forms
    assert {"_push_sum_kernel", "_choose"} <= set(found["of_ranks"])
