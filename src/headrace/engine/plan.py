"""What one step does, as plain data: the scheduler writes it, the worker and the tests read it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.request import Request


@dataclass(slots=True, eq=False)
class Chunk:
    """`num_tokens` tokens of one request, at positions [start, start + num_tokens)."""

    request: Request
    slot: int
    start: int
    num_tokens: int
    samples: bool  # the last row's logits are sampled: the chunk reaches the end of what exists
    admitted: bool = False  # first step since the request got its slot: the worker must (re)load the slot's state
    new_blocks: list[int] = field(default_factory=list)  # appended to the block table by this step
    block_offset: int = 0  # index in the block table of new_blocks[0]
    output_index: int = 0  # which output token this step samples (0 = the first): known with overlap too

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(slots=True, eq=False)
class StepPlan:
    """Chunks in the order of their rows: decodes first, then prefills."""

    step: int
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(c.num_tokens for c in self.chunks)
