"""The decode step's row preparation: the Triton kernels (interpreted) equal their references."""

import numpy as np
import pytest
import torch

from headrace.kernels import prepare
from headrace.kernels.prepare import Rows, rows_on_host
from headrace.kernels.tables import Int, SlotTables

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a card", allow_module_level=True)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("count", [1, 3, 8, 300])
def test_rows_equal_the_reference(count, captured):
    rng = np.random.default_rng(count)
    slots, length, block_size = 320, 70, 16
    token_table = torch.from_numpy(rng.integers(0, 1000, (slots, length + 1)).astype(np.int32))
    tables = torch.from_numpy(rng.integers(0, 500, (slots, -(-length // block_size))).astype(np.int32))
    floats = torch.from_numpy(rng.random((slots, 6)).astype(np.float32))
    ints = torch.from_numpy(rng.integers(-(2**62), 2**62, (slots, len(Int))))
    ints[:, 1:] %= 1000
    accepted = torch.from_numpy(rng.integers(-1, 5, slots).astype(np.int32))
    position = rng.integers(-1, length - 4, count)
    unsure = np.where(position > 0, rng.integers(-1, 5, count), -1)  # also of padded rows: -1
    new_block = np.where((position % block_size == 0) & (unsure <= 0), rng.integers(0, 500, count), -1)
    numbers = torch.from_numpy(np.stack([rng.permutation(slots)[:count], position, new_block, unsure]).astype(np.int32))
    inbox = torch.full((4, 4, slots), -7, dtype=torch.int32)  # room for more rows
    inbox[2, :, :count] = numbers
    turn = torch.tensor([2 + 4 * 5], dtype=torch.int32)
    got = Rows.empty(count, torch.device("cpu"))
    got_tables, want_tables = (SlotTables(token_table.clone(), tables.clone(), floats, ints, accepted.clone(), block_size) for _ in range(2))
    if captured:
        prepare.launch(inbox, turn, got_tables, got)
        assert int(turn) == 23
    else:
        prepare.launch(numbers, None, got_tables, got)
    want = rows_on_host(numbers, want_tables)
    assert torch.equal(got_tables.block_tables, want_tables.block_tables)
    real = position >= 0
    for name in Rows.__slots__:
        a, b = getattr(got, name), getattr(want, name)
        if name in ("top_k", "output_index", "sample_index", "seed", "top_p", "min_p"):
            a, b = a[real], b[real]  # of padded rows anything will do: temperature 0 makes them greedy
        assert a.dtype == b.dtype and torch.equal(a, b), name
    ids = torch.arange(count, dtype=torch.int32) + 5000
    failed = torch.from_numpy(rng.random(count) < 0.3)
    got_box, want_box = (torch.full((4, 3, slots), -1, dtype=torch.int32) for _ in range(2))
    at = (turn, 2) if captured else (None, 0)
    prepare.launch_publish(ids, failed, got, got_tables, got_box if captured else got_box[0], at[0], False)
    prepare.publish(ids, failed, want, want_tables, want_box if captured else want_box[0], at[0])
    assert torch.equal(got_box, want_box) and torch.equal(got_box[at[1], 0, :count], ids)
    assert int((got_box != -1).sum()) == 2 * count and torch.equal(got_tables.accepted, accepted)
    assert torch.equal(got_tables.token_ids, want_tables.token_ids)
    assert int((got_tables.token_ids != token_table).sum()) == int(real.sum())


@pytest.mark.parametrize("seed", range(12))
def test_verification_equals_the_reference(seed):
    rng = np.random.default_rng(seed)
    slots = 40
    lengths = rng.integers(1, 6, rng.integers(1, 20))  # rows of each request
    rows = Rows.empty(int(lengths.sum()) + seed % 3, torch.device("cpu"))  # and padded rows, of the dummy slot
    count = len(rows.token_ids)
    rows.seq_slots[:], rows.seq_lens[:] = slots - 1, 0
    rows.seq_slots[: lengths.sum()] = torch.from_numpy(np.repeat(rng.permutation(slots - 1)[: len(lengths)], lengths)).int()
    rows.seq_lens[: lengths.sum()] = torch.arange(1, int(lengths.sum()) + 1).int()
    ids = torch.from_numpy(rng.integers(0, 50, count).astype(np.int32))
    rows.guesses[:] = torch.where(torch.from_numpy(rng.random(count) < 0.7), ids, ids + 1)
    failed = torch.from_numpy(rng.random(count) < 0.1)
    turn = torch.tensor([1], dtype=torch.int32)
    none = torch.zeros(slots, 1)
    got, want = (SlotTables(torch.zeros(slots, 100, dtype=torch.int32), none, none, none, torch.full((slots,), 7, dtype=torch.int32), 1) for _ in range(2))
    got_box, want_box = (torch.full((1, 3, 128), -1, dtype=torch.int32) for _ in range(2))
    prepare.launch_publish(ids, failed, rows, got, got_box, turn, True)
    prepare.publish(ids, failed, rows, want, want_box, turn, True)
    real = rows.seq_lens > 0
    assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.accepted, want.accepted)
    assert torch.equal(got_box[0, :, :count][:, real], want_box[0, :, :count][:, real])
