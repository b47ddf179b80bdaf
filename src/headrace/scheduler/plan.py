"""What one step does, as plain data: the scheduler writes it, the worker and the tests read it. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.scheduler.request import Request


@dataclass(slots=True, eq=False)
class Chunk:
    """`num_tokens` tokens of one request, at positions [start, start + num_tokens).

    With `slack` the step before this one verifies so many drafts and has not settled: `start` and `output_index` are those of
    no draft accepted, and the device adds what it did accept (at most `slack`; -1: the step came to nothing, and this one
    computes its token again). When that step settles, the scheduler does the same here and sets `slack` to 0.
    """

    request: Request
    slot: int
    start: int
    num_tokens: int
    samples: bool  # the last row's logits are sampled: the chunk reaches the end of what exists
    admitted: bool = False  # first step since the request got its slot: the worker must (re)load the slot's state
    new_blocks: list[int] = field(default_factory=list)  # appended to the block table by this step
    block_offset: int = 0  # index in the block table of new_blocks[0]
    output_index: int = 0  # which output token this step samples (0 = the first): known with overlap too
    num_drafts: int = 0  # the last rows are guesses of what the rows before them sample; every one of them is verified
    drafts: Sequence[int] = ()  # where the host guesses: ids from start + 1 on, as it was scheduled; else the worker's drafter
    slack: int = 0
    draft_index: int = 0  # of a row on its own (sampled_rows): how many drafts stand before its token and with it

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_sampled(self) -> int:
        """Rows whose logits are sampled."""
        return 1 + self.num_drafts if self.samples else 0

    def sampled_rows(self) -> list[Chunk]:
        """The rows that are sampled, each as if it were a decode of its own, with the drafts before it."""
        if not self.num_drafts:
            return [self]
        first = self.start + self.num_tokens - 1 - self.num_drafts
        return [
            Chunk(
                self.request, self.slot, first + i, 1, True,
                output_index=self.output_index + i, drafts=self.drafts[:i], slack=self.slack, draft_index=i,
            )
            for i in range(1 + self.num_drafts)
        ]  # fmt: skip


@dataclass(slots=True, eq=False)
class Decodes:
    """One token each of requests whose slots the worker knows, sampled; as arrays, for there may be hundreds of them.

    All but `now` and `new_blocks` are the same objects in every step as long as the same requests decode.
    """

    requests: list[Request]
    ids: list[str]  # of the requests
    slots: array  # [n] int32
    offsets: array  # [n] int64
    now: int = 0  # the token's position is offset + now
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # row, index in its block table, block

    def __len__(self) -> int:
        return len(self.requests)

    @classmethod
    def none(cls) -> Decodes:
        return cls([], [], array("i"), array("q"))

    def chunk(self, row: int) -> Chunk:
        """A row as a chunk, for those who look at it alone; it does not show its new block."""
        request, start = self.requests[row], self.offsets[row] + self.now
        return Chunk(request, self.slots[row], start, 1, True, output_index=start + 1 - len(request.prompt_ids))


@dataclass(slots=True, eq=False)
class StepPlan:
    """Rows in their order: decodes first, then the other chunks: decodes with drafts, then prefills."""

    step: int
    decodes: Decodes
    others: list[Chunk]
    num_drafts: int = 0  # of all chunks
    _chunks: list[Chunk] | None = None

    @property
    def chunks(self) -> list[Chunk]:
        """All rows as chunks. Made when first asked for: a plain decode step never is."""
        if self._chunks is None:
            decodes = [self.decodes.chunk(row) for row in range(len(self.decodes))]
            for row, index, block in self.decodes.new_blocks:
                decodes[row].new_blocks, decodes[row].block_offset = [block], index
            self._chunks = decodes + self.others
        return self._chunks

    @property
    def unsure(self) -> bool:
        """Whether some rows may be further on than the host knows."""
        return any(c.slack for c in self.others)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(c.num_tokens for c in self.others)

    @property
    def num_seqs(self) -> int:
        return len(self.decodes) + len(self.others)
