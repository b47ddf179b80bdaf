"""Decodes with drafts: rows of several tokens, of which it is known one step later how many were right. No torch here."""

from __future__ import annotations

from headrace.scheduler.block_manager import BlockManager
from headrace.scheduler.decode_batch import Row, Scheduled
from headrace.scheduler.request import Request


class Drafting:
    """Gives decodes rows with drafts, and takes back what was wrong of them."""

    def __init__(self, blocks: BlockManager, max_drafts: int = 0):
        self._blocks, self._max_drafts = blocks, max_drafts
        self.num_rows = 0  # sequences with drafts in flight

    def row(self, request: Request, step: Scheduled, most: int) -> bool:
        """Give a decode a row with drafts, or one behind drafts that have not settled, of at most `most` tokens.

        False if it goes on as one without. Such a row counts as one token until its step settles, as if there were no drafts.
        Behind unsettled ones it waits where there is no room, or what is to be done to its token depends on which one it is.
        """
        blocks, unverified, start = self._blocks, request.num_unverified, request.num_scheduled
        count = self._verifiable(request, most)
        if count <= 1 and not unverified:
            return False
        index = start + 1 - len(request.prompt_ids)
        early = index + unverified + count <= request.min_output  # stop ids are banned in all rows, whatever is accepted
        if unverified and (not count or request.ahead is not None or not (early or index > request.min_output)):
            return True
        if request in blocks.batch:
            blocks.batch.leave(request)
        missing = -(-(start + unverified + count - request.capacity) // blocks.block_size)
        if missing > 0:
            step.new_blocks.append(blocks.grow(request, missing))
        step.others.append(Row(request, True, request.slot, start, count, count - 1, unverified, True))
        request.num_scheduled, request.last_step = start + 1, step.number
        if unverified:
            request.ahead = step
        elif not (start + 1) % blocks.block_size:
            step.filled.append((request, start + 1))
        if count > 1:
            request.num_unverified += count - 1
            self.num_rows += 1
            step.num_drafts += count - 1
        return True

    def _verifiable(self, request: Request, most: int) -> int:
        """How many tokens, its own and drafts, a decoding request can compute in this step, at most `most`.

        Behind drafts that have not settled there must be room as if all of them were right. Drafts never take a block that
        others need.
        """
        blocks, start, capacity = self._blocks, request.num_scheduled + request.num_unverified, request.capacity
        most = min(most, 1 + self._max_drafts) if self._max_drafts else most
        count = min(1 + request.num_drafts, most, request.limit - start - 1)
        if start + count > capacity:
            spare = max(0, blocks.tree.num_available - len(blocks.decoding)) if blocks.starved is None else 0
            count = min(count, capacity + spare * blocks.block_size - start)
        return max(0, count)

    def settle(self, request: Request, drafts: int, count: int) -> None:
        """Of so many drafts `count` - 1 were right; none came to nothing, which is as if the row had not been."""
        request.num_unverified -= drafts
        self.num_rows -= 1
        if request.finished:
            return
        request.num_scheduled += count - 1
        if not count and request.cursor is not None:
            self._blocks.tree.drop_path(request.cursor)  # as if the request had failed
        step, request.ahead = request.ahead, None
        if step is not None and not request.num_scheduled % self._blocks.block_size:
            step.filled.append((request, request.num_scheduled))
