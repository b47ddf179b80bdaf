"""What steps with prefill write into the slots' tables and read from them: kernels (interpreted), references, plain loops."""

import numpy as np
import pytest
import torch

from headrace.kernels import prepare, tables
from headrace.worker.batch_state import ALIGN, BLOCKS, FLOATS, TOKEN_IDS, BatchState, TableWrite

CPU = torch.device("cpu")


@pytest.fixture(params=["reference", "triton"])
def run_by(request, monkeypatch):
    """The tables' functions, as they run on a CPU and as a card would run them."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a card")
        for module in (tables, prepare):
            monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    return request.param


def filled(rng, slots: int, length: int, block_size: int) -> BatchState:
    state = BatchState(slots - 1, length, block_size, CPU)
    state.token_ids.copy_(torch.from_numpy(rng.integers(0, 1000, state.token_ids.shape).astype(np.int32)))
    state.block_tables.copy_(torch.from_numpy(rng.integers(0, 500, state.block_tables.shape).astype(np.int32)))
    state.tables.accepted.copy_(torch.from_numpy(rng.integers(-1, 4, slots).astype(np.int32)))
    return state


def test_pieces_land_where_they_belong_and_nowhere_else(run_by):
    rng = np.random.default_rng(3)
    state = filled(rng, 9, 3000, 16)
    ids, blocks, floats = state.token_ids.clone(), state.block_tables.clone(), state.tables.floats.clone()
    long, short = rng.integers(0, 1000, 2500).astype(np.int32), [7, 8, 9]
    params = np.array([0.5, 1, -2.25, 3, 1e-30, 6], np.float32)
    state.enter([
        TableWrite(TOKEN_IDS, 3, 0, long), TableWrite(BLOCKS, 8, 5, short), TableWrite(BLOCKS, 2, 0, [1]),
        TableWrite(FLOATS, 4, 0, params.view(np.int32)), TableWrite(TOKEN_IDS, 0, 11, [5]),
    ])  # fmt: skip
    ids[3, :2500], ids[0, 11] = torch.from_numpy(long), 5
    blocks[8, 5:8], blocks[2, 0] = torch.tensor(short, dtype=torch.int32), 1
    floats[4] = torch.from_numpy(params)
    assert torch.equal(state.token_ids, ids) and torch.equal(state.block_tables, blocks) and torch.equal(state.tables.floats, floats)
    assert not state.tables.ints.any()
    state.enter([])


@pytest.mark.parametrize("unsure", [False, True])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [1, 1, 5, 30, 2], [4] * 4, [1100, 3]])
def test_rows_and_wanted_ones_are_those_of_a_plain_loop(run_by, counts, unsure):
    rng = np.random.default_rng(len(counts))
    block_size = 16
    state = filled(rng, 9, 2000, block_size)
    state.align = ALIGN  # as on a card
    num = len(counts)
    slots, starts = rng.permutation(8)[:num].astype(np.int32), rng.integers(1, 700, num).astype(np.int32)
    unverified = (np.arange(num) % 2).astype(np.int32) * 3 if unsure else None
    wanted = [r for r in range(sum(counts)) if r % 3 == 0][:8]
    batch, only, rows = state.prepare(slots, starts, np.asarray(counts, np.int32), unverified, np.asarray(wanted), only_sampled=True)
    positions, owners = [], []
    for slot, start, count, most in zip(slots, starts, counts, [0] * num if unverified is None else unverified, strict=True):
        first = int(start) + (int(state.tables.accepted[slot]) if most else 0)
        positions += range(first, first + count)
        owners += [int(slot)] * count
    blocks = [int(state.block_tables[s, p // block_size]) for s, p in zip(owners, positions, strict=True)]
    places = [b * block_size + p % block_size for b, p in zip(blocks, positions, strict=True)]
    ids = [int(state.token_ids[s, p]) for s, p in zip(owners, positions, strict=True)]
    ends = np.cumsum(counts).tolist()
    assert batch.positions.tolist() == positions and batch.slot_mapping.tolist() == places
    assert batch.token_ids.tolist() == ids and batch.query_start.tolist() == [0, *ends]
    assert batch.seq_slots.tolist() == slots.tolist() and batch.query_lens == counts
    assert batch.seq_lens.tolist() == [positions[e - 1] + 1 for e in ends] == batch.context_lens
    assert batch.num_decodes == next((i for i, n in enumerate(counts) if n != 1), num)
    assert (
        only is not None and only.index.tolist() == wanted and only.batch.query_start.tolist() == list(range(len(wanted) + 1))
    )
    for name, values in {"token_ids": ids, "positions": positions, "slot_mapping": places, "seq_slots": owners}.items():
        assert getattr(only.batch, name).tolist() == [values[r] for r in wanted], name
    assert only.batch.seq_lens.tolist() == [positions[r] + 1 for r in wanted] == only.batch.context_lens
    for tensor in (batch.query_start, only.index, only.batch.token_ids, only.batch.seq_slots, only.batch.query_start):
        assert tensor.data_ptr() % 16 == 0, "kernels would be compiled once more for it"
    assert rows.output_index.tolist() == [positions[r] + 1 for r in wanted] and rows.seq_slots.tolist() == [owners[r] for r in wanted]
    _, none, _ = state.prepare(slots, starts, np.asarray(counts, np.int32), unverified, np.asarray([], np.int64), only_sampled=True)
    assert none is not None and none.batch.num_rows == none.batch.num_seqs == none.index.numel() == 0
    everything = state.prepare(slots, starts, np.asarray(counts, np.int32), unverified)
    assert everything.wanted is None and everything.rows.token_ids.tolist() == ids
