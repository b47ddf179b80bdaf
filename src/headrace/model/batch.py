"""The tensors of one forward pass: rows are (token, position, place in the KV cache), grouped into sequences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class ForwardBatch:
    """T rows of S sequences, each sequence's rows adjacent and at consecutive positions; the first `num_decodes` sequences
    have exactly one row. A padded row has slot_mapping -1 and its sequence seq_lens 0: it writes nothing and reads nothing.

    The host copy `query_lens` is exact; `context_lens` holds upper bounds inside of CUDA graphs, and on a GPU where the host
    does not know yet how many drafts were right (`exact` says so).
    """

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [T] int64: block_id * block_size + offset, -1 for padding
    block_tables: Tensor  # [max_num_seqs + 1, max_blocks] int32, one row per *slot*
    seq_slots: Tensor  # [S] int32: the slot, i.e. the row of block_tables, of each sequence
    query_start: Tensor  # [S + 1] int32: rows of sequence s are query_start[s] .. query_start[s + 1]
    seq_lens: Tensor  # [S] int32: tokens in the cache after this step's writes
    num_decodes: int
    query_lens: list[int]  # [S] host copy
    context_lens: list[int]  # [S] host copy of seq_lens
    exact: bool = True
    adapted: bool = False  # some rows are of requests with an adapter
    context_bound: int = 0  # > 0: captured for sequences of any rows, none longer; no lists, and num_decodes is 0 or any
    num_verified: int = 0  # so many sequences, the last of them with drafts, have rows that may be wrong
    related: bool = False  # several sequences may be rows of one request (drafts), each reading what those before it write

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.seq_slots.shape[0]


@dataclass(slots=True)
class WantedRows:
    """The rows of a batch whose hidden states somebody reads; the last layer computes keys and values only for the others."""

    index: Tensor  # [R] int64
    batch: ForwardBatch  # these rows alone
