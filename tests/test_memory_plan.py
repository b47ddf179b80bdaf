"""Where memory goes: the plan's arithmetic with numbers, and what the kernel and its control groups say is ours."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_driver import make_core
from headrace.cache.memory import zeros
from headrace.config import EngineConfig
from headrace.engine.build import resolve
from headrace.errors import CapacityError, ParameterError
from headrace.machine import available_memory, usable_cores
from headrace.model.config import ModelConfig
from headrace.model.row_elements import row_elements
from headrace.model.shard import Shard
from headrace.worker import memory_plan
from headrace.worker.memory_plan import (
    GIB,
    KERNEL_BYTES,
    MAX_GRAPHS,
    MAX_PROMPT_GRAPHS,
    captured_tokens,
    graph_bytes,
    logits_bytes,
    never,
    plan_memory,
)
from model_harness import load_tiny
from tiny_models import write_tiny

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    return load_tiny(write_tiny("llama", tmp_path_factory.mktemp("tiny")))[0]


def plan(model, device=CPU, dtype=torch.float32, weights=0, draft=None, loaded=True, cache_dtype=None, ranks=1, pushes=never, peers=0, **options):
    resolved = {"max_model_len": 4096, "block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 256, **options}
    config = EngineConfig(skip_tokenizer_init="speculative_max_rows" not in options, **resolved)
    limits = resolve(config, model, device)
    widest = max(row_elements(m) for m in (model, draft or model))
    return plan_memory(
        config, limits, model, dtype, device, weight_bytes=weights, workspace_bytes=0, draft=draft, loaded=loaded,
        activation_bytes=limits.max_num_batched_tokens * widest * dtype.itemsize, cache_dtype=cache_dtype,
        draft_block_bytes=0 if draft is None else 1000, ranks=ranks, pushes=pushes, peer_bytes=peers,
    )  # fmt: skip


@pytest.fixture
def free(monkeypatch):
    """Says what is free where the weights are already loaded."""
    return lambda count: monkeypatch.setattr(memory_plan, "available_memory", lambda: count)


@pytest.fixture
def card(monkeypatch):
    """A card of 80 GiB: (bytes that are free, bytes that torch's allocator holds)."""

    def is_there(free: int, reserved: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: reserved)

    return is_there


def test_loaded_weights_are_no_longer_in_what_is_free(model, free):
    """A 3B in float32 on a laptop: 12 GiB are loaded and 2 GiB are left, of which the cache gets its quarter."""
    free(2 * GIB)
    loaded = plan(model, weights=12 * GIB)
    assert loaded.budget == 14 * GIB and loaded.weights == 12 * GIB
    assert loaded.kv == plan(model, weights=0).kv
    assert GIB // 2 - 16 * 3 * 2 * 32 * 4 < loaded.kv <= GIB // 2
    free(MIB)
    with pytest.raises(CapacityError, match=r"weights 12.00.*lower max_num_batched_tokens"):
        plan(model, weights=12 * GIB)


def test_a_core_of_several_plans_its_share_of_the_machine(model, free):
    """Whether the others have taken theirs by then or not; and no more than there is."""
    for left in (16, 4):
        free(left * GIB)
        share = plan(model, weights=GIB, memory_bytes=4 * GIB)
        assert share.budget == 4 * GIB and share.kv <= 3 * GIB // 4
    free(GIB)
    assert plan(model, weights=GIB, memory_bytes=4 * GIB).budget == 2 * GIB
    free(16 * GIB)
    with pytest.raises(CapacityError, match=r"weights take 5.00 GiB, and 4.00 GiB of memory are free"):
        plan(model, weights=5 * GIB, loaded=False, memory_bytes=4 * GIB)


def test_a_model_of_several_on_a_card_plans_its_share_of_it(model, card):
    """Whatever the others have taken, and no more than the card has left."""
    for others in (0, 30):
        card((80 - others - 5) * GIB, 5 * GIB)
        share = plan(model, CARD, torch.bfloat16, weights=5 * GIB, memory_bytes=20 * GIB, max_num_seqs=1024, max_model_len=65536)
        terms = sum(getattr(share, name) for name in memory_plan.TERMS)
        assert share.budget == (20 + others) * GIB and 19 * GIB < terms + share.kv <= 20 * GIB
    card((80 - 60 - 5) * GIB, 5 * GIB)
    assert plan(model, CARD, torch.bfloat16, weights=5 * GIB, memory_bytes=20 * GIB).budget == int(80 * GIB * 0.9)


def test_what_two_cards_exchange_is_of_the_models_share(model, card):
    """The driver's, so that torch counts it as little as what others have taken; without a share nothing changes."""
    card((80 - 30 - 5) * GIB, 5 * GIB)
    share = {"weights": 5 * GIB, "memory_bytes": 20 * GIB, "max_num_seqs": 1024, "max_model_len": 65536, "ranks": 2}
    without = plan(model, CARD, torch.bfloat16, **share)
    card((80 - 30 - 5) * GIB - GIB // 4, 5 * GIB)
    shared = plan(model, CARD, torch.bfloat16, peers=GIB // 4, **share)
    assert shared.workspaces == GIB // 4 and shared.budget == without.budget
    assert 0 <= without.kv - GIB // 4 - shared.kv < without.kv // without.num_blocks
    del share["memory_bytes"]
    assert plan(model, CARD, torch.bfloat16, peers=GIB // 4, **share).num_blocks == plan(model, CARD, torch.bfloat16, **share).num_blocks


def test_a_process_that_has_loaded_more_gets_no_less_cache(tmp_path, monkeypatch):
    """The same memory left, with and without a draft model's weights in it: an engine's own cache is planned from that."""
    monkeypatch.setattr(memory_plan, "available_memory", lambda: 64 * MIB)
    path = str(write_tiny("llama", tmp_path))
    options = {"num_kv_blocks": None, "max_model_len": 256, "max_num_seqs": 128, "max_num_batched_tokens": 64}
    cores = [make_core(path, **options), make_core(path, speculative_method="draft_model", speculative_model=path, **options)]
    blocks, with_draft = (core.scheduler.pool.num_blocks for core in cores)
    assert with_draft == blocks // 2 > 0, "a block of both caches costs twice as much, and nothing else does"


def test_terms_add_up_and_each_grows_with_what_it_is_of(model, free):
    free(8 * GIB)
    base = plan(model, max_num_seqs=16)
    assert base.activations == 2048 * row_elements(model) * 4
    assert plan(model, max_num_seqs=16, max_num_batched_tokens=4096).activations == 2 * base.activations
    assert base.logits == logits_bytes(16, 2048, 512, 4) == max(16 * 512 * (28 + 32), 4 * 4 * 2048 * 512)
    assert plan(model, max_num_seqs=2048).logits == 2048 * 512 * 28 + 8 * 4 * 2048 * 512
    assert plan(model, max_num_seqs=2047, speculative_max_rows=1025).logits == 3072 * 512 * 60
    assert base.graphs == base.reserve == 0, "a CPU captures nothing"
    assert plan(model, kv_cache_bytes=100_000_000).kv <= 100_000_000
    assert plan(model, num_kv_blocks=7).num_blocks == 7


def test_a_rank_plans_its_part(model, free):
    """Of the machine's memory, where ranks share it; whole rows of logits come to each, and are put in order."""
    free(4 * GIB)
    one, rank = plan(model), plan(Shard(0, 2).config(model), ranks=2)
    assert rank.budget == one.budget // 2
    assert rank.num_blocks > 0 and rank.kv // rank.num_blocks == one.kv // one.num_blocks // 2
    assert logits_bytes(16, 2048, 512, 4, 2) == max(16 * 512 * (36 + 32), 6 * 4 * 2048 * 512)


def test_a_card_keeps_room_for_graphs_and_a_draft_model(model, card):
    card(free=70 * GIB, reserved=6 * GIB)
    eager = plan(model, CARD, torch.bfloat16, weights=5 * GIB, enforce_eager=True)
    captured = plan(model, CARD, torch.bfloat16, weights=5 * GIB)
    prompts = graph_bytes(model, 2048, 2, MAX_PROMPT_GRAPHS, 256)
    assert eager.graphs == 0 and captured.graphs == graph_bytes(model, 256, 2, MAX_GRAPHS) + prompts
    few = plan(model, CARD, torch.bfloat16, max_num_batched_tokens=300)
    assert few.graphs - captured.graphs == 2 * (300 - 2048) * row_elements(model) * 2
    more = plan(model, CARD, torch.bfloat16, max_num_batched_tokens=16384)
    assert more.graphs - captured.graphs == 2 * (captured_tokens(model) - 2048) * row_elements(model) * 2
    ranks = plan(model, CARD, torch.bfloat16, ranks=2)
    of_others = 2 * 256 * model.vocab_size + 2 * 2048 * 3 * model.hidden_size
    assert ranks.graphs == captured.graphs + 2 * of_others, "logits and parts of sums"
    four = plan(model, CARD, torch.bfloat16, ranks=4)
    sums = 2 * (4 + 4) * (model.num_layers + 1) * (MAX_GRAPHS + MAX_PROMPT_GRAPHS)
    assert four.graphs == ranks.graphs + sums * KERNEL_BYTES, "a sum of more than two is more kernels"
    few_pushed = plan(model, CARD, torch.bfloat16, ranks=4, pushes=lambda rows: rows <= 256)
    assert four.graphs - few_pushed.graphs == sums * KERNEL_BYTES * MAX_GRAPHS // (MAX_GRAPHS + MAX_PROMPT_GRAPHS), "decodes'"
    assert plan(model, CARD, torch.bfloat16, ranks=4, pushes=lambda rows: rows <= 2048).graphs == ranks.graphs
    drafting = plan(model, CARD, torch.bfloat16, weights=5 * GIB, draft=model, speculative_max_rows=64)
    assert drafting.graphs == captured.graphs + graph_bytes(model, 64, 2, MAX_GRAPHS // 2)
    wide = plan(model, CARD, torch.bfloat16, speculative_max_rows=1024)
    assert wide.graphs == graph_bytes(model, 1024, 2, MAX_GRAPHS) + prompts
    for p in (eager, captured, drafting):
        others = (80 - 70 - 6) * GIB
        taken = p.weights + p.workspaces + p.activations + p.logits + p.state + p.graphs + p.reserve + p.kv
        assert taken + others <= p.budget == int(80 * GIB * 0.9)
    card(free=GIB, reserved=6 * GIB)
    with pytest.raises(CapacityError, match=r"73.00 are taken by others.*graphs.*gpu_memory_utilization"):
        plan(model, CARD, torch.bfloat16)


@pytest.mark.parametrize(("hidden", "inner", "tokens"), [(1024, 3072, 4096), (2048, 6144, 2048), (4096, 12288, 1024), (8192, 28672, 1024)])
def test_larger_layers_are_captured_for_fewer_tokens(model, hidden, inner, tokens):
    """Qwen3's 0.6B to 8B, and a 70B: where a layer's work hides its launches nothing is gained."""
    large = replace(model, hidden_size=hidden, intermediate_size=inner, num_heads=hidden // 64, num_kv_heads=8, head_dim=128)
    assert captured_tokens(large) == tokens


def test_a_wider_draft_model_is_what_the_largest_step_is_of(model, free, tmp_path):
    free(8 * GIB)
    wide = load_tiny(write_tiny("llama", tmp_path, intermediate_size=4096, vocab_size=1024))[0]
    both = plan(model, draft=wide)
    assert both.activations == plan(wide).activations > plan(model).activations
    assert both.logits == plan(wide).logits


@pytest.mark.parametrize(("max_num_seqs", "options", "rows"), [
    (1, {"speculative_method": "ngram"}, 64), (1, {"skip_tokenizer_init": True}, 1), (256, {"speculative_method": "ngram"}, 256),
    (2, {"speculative_method": "ngram", "speculative_max_rows": 16}, 16), (1, {"speculative_method": None}, 64),
])  # fmt: skip
def test_the_largest_decode_step_has_the_drafts_of_few_requests(model, max_num_seqs, options, rows):
    """On a card graphs, workspaces and the fast path are made for so many rows, also where only grammars draft."""
    config = EngineConfig(max_num_seqs=max_num_seqs, **options)
    assert resolve(config, model, CARD).max_decode_rows == rows


def test_a_device_of_another_kind():
    with pytest.raises(ParameterError, match="device: got 'mps', allowed: one of auto, cpu, cuda"):
        EngineConfig(device="mps")


def test_the_context_is_what_the_cache_holds_unless_it_was_asked_for(tmp_path, model):
    path, block = str(write_tiny("llama", tmp_path)), 2 * model.num_layers * model.kv_size * 4 * 8
    for blocks in (10, 1000):
        core = make_core(path, num_kv_blocks=None, max_model_len=None, kv_cache_bytes=blocks * block)
        limits = core.scheduler.limits
        assert limits.max_model_len == min(model.max_position, limits.num_blocks * 8)
    with pytest.raises(CapacityError, match="max_model_len"):
        make_core(path, num_kv_blocks=None, max_model_len=100, kv_cache_bytes=10 * block)


# ---------------------------------------------------------------- the machine


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       67108864 kB\nMemFree:        1024 kB\nMemAvailable:   33554432 kB\n"}
V2 = {"proc/self/cgroup": "0::/\n"}
V1 = {"proc/self/cgroup": "9:name=systemd:/docker/abc\n4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/docker/abc\n"}
GROUP = "sys/fs/cgroup"
COMMITS = f"CommitLimit: {8 * 2**20} kB\nCommitted_AS: {2 * 2**20} kB\nHugePages_Total: 0\n"


def limits(name: str, soft: int | str) -> dict[str, str]:
    """Those of a process that has taken 2 GiB of addresses, of which 1 GiB is data."""
    return {
        "proc/self/limits": f"Limit                     Soft Limit   Hard Limit   Units\n{name}   {soft}   unlimited   bytes\n",
        "proc/self/status": f"Name:\tpython\nVmSize:\t{2 * 2**20} kB\nVmData:\t{2**20} kB\n",
    }


@pytest.mark.parametrize(("files", "gib"), [
    ({}, 32), (V2, 32), ({**V2, f"{GROUP}/memory.max": "max\n", f"{GROUP}/memory.current": f"{GIB}\n"}, 32),
    ({**V2, f"{GROUP}/memory.max": f"{4 * GIB}\n", f"{GROUP}/memory.current": f"{GIB}\n"}, 3),
    # a checkpoint that was read is in the page cache, and that is given back
    ({**V2, f"{GROUP}/memory.max": f"{4 * GIB}\n", f"{GROUP}/memory.current": f"{3 * GIB}\n",
      f"{GROUP}/memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n"}, 3),
    ({**V2, f"{GROUP}/memory.max": f"{GIB}\n", f"{GROUP}/memory.current": f"{2 * GIB}\n"}, 0),
    # not a container, a unit with a limit, in a slice with a smaller one
    ({"proc/self/cgroup": "0::/user.slice/unit.service\n",
      f"{GROUP}/user.slice/unit.service/memory.max": f"{9 * GIB}\n",
      f"{GROUP}/user.slice/unit.service/memory.current": "0\n",
      f"{GROUP}/user.slice/memory.max": f"{7 * GIB}\n", f"{GROUP}/user.slice/memory.current": f"{GIB}\n"}, 6),
    # v1: no limit is a number past any memory; a container sees its own group as the root
    ({**V1, f"{GROUP}/memory/memory.limit_in_bytes": "9223372036854771712\n", f"{GROUP}/memory/memory.usage_in_bytes": "5\n"}, 32),
    ({**V1, f"{GROUP}/memory/memory.limit_in_bytes": f"{8 * GIB}\n", f"{GROUP}/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
      f"{GROUP}/memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file 0\n"}, 6),
    ({**V1, f"{GROUP}/memory/docker/abc/memory.limit_in_bytes": f"{2 * GIB}\n",
      f"{GROUP}/memory/docker/abc/memory.usage_in_bytes": f"{GIB}\n"}, 1),
    ({**V2, f"{GROUP}/memory.max": "nonsense\n", f"{GROUP}/memory.current": ""}, 32),
    # `ulimit -v`, `ulimit -d`, and a kernel that promises no more than there is (which is told in any mode)
    (limits("Max address space", "unlimited"), 32), (limits("Max address space", 5 * GIB), 3), (limits("Max data size", 5 * GIB), 4),
    (limits("Max address space", GIB), 0), (limits("Max stack size", 5), 32),
    ({"proc/meminfo": MEMINFO["proc/meminfo"] + COMMITS, "proc/sys/vm/overcommit_memory": "2\n"}, 6),
    ({"proc/meminfo": MEMINFO["proc/meminfo"] + COMMITS, "proc/sys/vm/overcommit_memory": "0\n"}, 32),
])  # fmt: skip
def test_memory_is_what_the_host_and_every_group_leave(tmp_path, files, gib):
    assert available_memory(tree(tmp_path, MEMINFO | files)) == gib * GIB


def test_addresses_that_cannot_be_had_are_told_with_their_number():
    with pytest.raises(CapacityError, match=r"134217728 MiB: Cannot allocate memory; .*kv_cache_bytes"):
        zeros((1 << 47,), torch.uint8, CPU)


def test_memory_without_proc_is_that_of_the_machine(tmp_path):
    assert available_memory(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() <= available_memory(tmp_path)


@pytest.mark.parametrize(("files", "cores"), [
    ({}, 8), (V2, 8), ({**V2, f"{GROUP}/cpu.max": "max 100000\n"}, 8), ({**V2, f"{GROUP}/cpu.max": "200000 100000\n"}, 2),
    ({**V2, f"{GROUP}/cpu.max": "150000 100000\n"}, 2), ({**V2, f"{GROUP}/cpu.max": "10000 100000\n"}, 1),
    ({**V2, f"{GROUP}/cpu.max": "9900000 100000\n"}, 8), ({**V2, f"{GROUP}/cpu.max": "\n"}, 8),
    ({**V1, f"{GROUP}/cpu,cpuacct/cpu.cfs_quota_us": "-1\n", f"{GROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 8),
    ({**V1, f"{GROUP}/cpu,cpuacct/cpu.cfs_quota_us": "300000\n", f"{GROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 3),
    ({**V1, f"{GROUP}/cpu/docker/abc/cpu.cfs_quota_us": "400000\n", f"{GROUP}/cpu/docker/abc/cpu.cfs_period_us": "100000\n"}, 4),
    # hyperthreads: two of each core
    ({f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n" for i in range(8)}, 4),
])  # fmt: skip
def test_cores_are_those_of_the_affinity_and_the_quota(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cores(tree(tmp_path, files)) == cores
