"""What callers and systems do to the native step: mistakes are Python exceptions that change nothing, threads wait for each
other, memory that is refused is said, and no setting of a thread changes a number."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.model.batch import ForwardBatch
from native_harness import NativeSequences, libraries
from test_native_step import random_model, token_ids

LIBRARIES = libraries()
pytestmark = pytest.mark.skipif(not LIBRARIES, reason="the native step is not built, or no library of it runs on this CPU")
BEST = next(reversed(LIBRARIES), "")


def make(threads: int = 2, **changes) -> NativeSequences:
    config, weights = random_model(6, 2, 16, **changes)
    return NativeSequences(config, weights, LIBRARIES[BEST], max_len=64, threads=threads)


def batch(sequences: NativeSequences, slot: int, ids: list[int]) -> ForwardBatch:
    """All of a sequence's tokens, as one chunk."""
    positions = torch.arange(len(ids), dtype=torch.int32)
    blocks = sequences.tables[slot, positions // 16].long()
    return ForwardBatch(
        token_ids=torch.tensor(ids, dtype=torch.int32), positions=positions, slot_mapping=blocks * 16 + positions % 16,
        block_tables=sequences.tables, seq_slots=torch.tensor([slot], dtype=torch.int32),
        query_start=torch.tensor([0, len(ids)], dtype=torch.int32), seq_lens=torch.tensor([len(ids)], dtype=torch.int32),
        num_decodes=0, query_lens=[len(ids)], context_lens=[len(ids)],
    )  # fmt: skip


def changed(tensor: torch.Tensor, index: int, value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[index] = value
    return tensor


@pytest.mark.parametrize("field, index, value", [
    ("positions", 3, -1), ("positions", 3, 7), ("positions", -1, 64), ("positions", -1, 2**31 - 1), ("slot_mapping", 0, -2),
    ("slot_mapping", 5, 2**40), ("seq_slots", 0, -1), ("seq_slots", 0, 5), ("query_start", 0, 1), ("query_start", 1, 19),
    ("query_start", 1, 21), ("block_tables", 0, -1), ("block_tables", 1, 2**31 - 1),
])  # fmt: skip
def test_a_number_that_is_no_place_is_refused_and_changes_nothing(field, index, value):
    sequences = make()
    right = batch(sequences, 0, token_ids(20, 80))
    wanted = sequences.decoder.decode(right)
    wrong = replace(right, **{field: changed(getattr(right, field), index, value)})
    with pytest.raises(ValueError, match=field):
        sequences.decoder.decode(wrong)
    assert torch.equal(sequences.decoder.decode(right), wanted)


@pytest.mark.parametrize("wanted, rows", [([20], 1), ([-1], 1), ([0, 1], 1), ([0], 2)])
def test_wanted_rows_that_are_none_or_have_no_place(wanted, rows):
    sequences = make()
    with pytest.raises(ValueError, match=r"wanted|hidden"):
        sequences.decoder._run(batch(sequences, 0, token_ids(20, 80)), torch.tensor(wanted), torch.empty(rows, 72), None)


def test_an_id_that_is_no_token_counts_as_the_nearest_one():
    sequences = make()
    ids = [0, 79, 5]
    wanted = sequences.decoder.decode(batch(sequences, 0, ids))
    assert torch.equal(sequences.decoder.decode(batch(sequences, 1, [-(2**31), 2**31 - 1, 5])), wanted)


def test_rows_without_a_slot_write_nothing():
    sequences = make()
    right = batch(sequences, 0, token_ids(20, 80))
    before = [layer.clone() for layer in sequences.decoder.keys + sequences.decoder.values]
    sequences.decoder.decode(replace(right, slot_mapping=torch.full((20,), -1)))
    for layer, was in zip(sequences.decoder.keys + sequences.decoder.values, before, strict=True):
        assert torch.equal(layer, was)


def test_a_cache_that_is_refused_leaves_the_one_before_and_its_limits():
    sequences = make()
    model, keys = sequences.decoder.model, sequences.decoder.keys
    right = batch(sequences, 0, token_ids(20, 80))
    wanted = sequences.decoder.decode(right)
    larger = [torch.cat([layer, layer]) for layer in keys]
    for values in ([*larger[:1], keys[1]], larger[:1]):
        with pytest.raises(ValueError):
            model.set_cache(larger, values)
    with pytest.raises(ValueError, match="slot_mapping"):  # a block of the larger one
        sequences.decoder.decode(replace(right, slot_mapping=right.slot_mapping + len(keys[0]) * 16))
    assert torch.equal(sequences.decoder.decode(right), wanted)


def test_steps_of_one_model_in_several_threads_wait_for_each_other():
    sequences = make(threads=2)
    ids = [token_ids(60, 80, seed=slot) for slot in range(4)]
    wanted = [sequences.decoder.decode(batch(sequences, slot, ids[slot])) for slot in range(4)]

    def run(slot: int) -> bool:
        work = batch(sequences, slot, ids[slot])
        return all(torch.equal(sequences.decoder.decode(work), wanted[slot]) for _ in range(25))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(4)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_that_flushes_denormals_gets_the_same_bits_and_keeps_its_setting(threads):
    ids = token_ids(9, 80)
    config, weights = random_model(2, 1, 16)
    weights.embedding.mul_(1e-38)
    for layer in weights.layers:
        for matrix in (layer.o, layer.down):
            matrix.tensors[0].mul_(1e-38)

    def run() -> torch.Tensor:
        return NativeSequences(config, weights, LIBRARIES[BEST], max_len=16, threads=threads).step([(0, ids)])[0]

    wanted = run()
    assert wanted.abs().max() > 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU flushes no denormals")
    try:
        found = run()
        assert torch.tensor([1e-30]) * 1e-10 == 0
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, wanted)


REFUSED = """
import resource, torch
from native_harness import NativeSequences, NativeStep
from test_native_mistakes import BEST, LIBRARIES
from test_native_step import random_model, token_ids

def limit(more):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more if more else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def make(threads):  # of which each has some hundred kB of its own
    return NativeSequences(*model, LIBRARIES[BEST], max_len=64, threads=threads)

model, ids = random_model(96, 1, 256), token_ids(9, 80)
wanted = make(1).step([(0, ids)])[0]
sequences = make(64)
limit(8 << 20)
try:
    sequences.step([(0, ids)])
    raise SystemExit("a step without memory")
except MemoryError:
    pass
try:
    NativeStep(*model, LIBRARIES[BEST], max_len=64, num_blocks=4)
    raise SystemExit("weights without memory")
except MemoryError as error:
    assert "the system refuses 33554432 bytes" in str(error), error
limit(0)
sequences.lengths = [0] * 4
assert torch.equal(sequences.step([(0, ids)])[0], wanted)
print("whole")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by setrlimit")
def test_a_step_that_got_no_memory_can_be_done_again_when_there_is_some():
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "whole\n", done.stderr[-2000:]
