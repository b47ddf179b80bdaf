"""Numbers to captured steps and ids back, through host memory that the device itself reads and writes.

Copies before and after a step's graph would each cost the stream microseconds, a fraction that shows where a step has
hundreds. A step takes the page after the one before it: which, it counts on the device (`turn`), so that pages can be filled
while earlier steps still run.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PAGES = 64  # a power of two (see prepare.py); so many steps may be under way, those of a draft model among them
HALF = PAGES // 2


class Mailbox:
    """`inbox` [PAGES, 4, rows] and `outbox` [PAGES, 3, rows] int32, pinned; `turn` [1] int32 on the device: pages taken."""

    def __init__(self, rows: int, device: torch.device):
        self.inbox = torch.zeros((PAGES, 4, rows), dtype=torch.int32, pin_memory=True)
        self.outbox = torch.zeros((PAGES, 3, rows), dtype=torch.int32, pin_memory=True)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._inbox = self.inbox.numpy()
        self._posted = 0
        self._left = [torch.cuda.Event(), torch.cuda.Event()]  # the steps with pages of this half are done

    def post(self, numbers: np.ndarray, size: int, dummy_slot: int) -> Tensor:
        """The numbers [4, R] of the next step, padded to `size` rows; -> where its ids, failures, and which rows count (only
        of steps with drafts) will be: [3, size]."""
        page = self._posted % PAGES
        if page % HALF == 0:
            half = page // HALF
            self._left[1 - half].record()
            self._left[half].synchronize()  # of 32 steps ago: long done
        self._posted += 1
        count = numbers.shape[1]
        self._inbox[page, :, :count] = numbers
        self._inbox[page, 0, count:size] = dummy_slot
        self._inbox[page, 1:, count:size] = -1
        return self.outbox[page, :, :size]

    def resume(self) -> None:
        """Somebody was interrupted and perhaps no step took the last page: go on with the one that the device takes next."""
        torch.cuda.synchronize(self.turn.device)
        self._posted = int(self.turn) % PAGES
