"""Prompt lookup: what followed the last tokens when they stood somewhere before will follow them again.

Good for output that repeats its input: summaries, code edits, quotations, answers from documents (Saxena 2023, "Prompt
lookup decoding"). Costs no model and O(1) a token.
"""

from __future__ import annotations

from array import array

from headrace.errors import ParameterError
from headrace.scheduler.request import Request

CANDIDATES = 8  # earlier places that are compared; the longest match wins, the latest among equals
TOKENS_PER_CALL = 8192  # entered into an index at once: a long prompt must not stop the loop


class NGramProposer:
    """Matches of `least` to `most` tokens. One index per request, made when it is first asked about."""

    def __init__(self, least: int = 3, most: int = 8):
        if not 1 <= least <= most:
            raise ParameterError("prompt_lookup_min", least, f"an integer in [1, prompt_lookup_max = {most}]")
        self.least, self.most = least, most
        self._indices: dict[str, NGramIndex] = {}

    def propose(self, request: Request, most: int) -> list[int]:
        index = self._indices.get(request.id)
        if index is None:
            index = self._indices[request.id] = NGramIndex(self.least, self.most)
        stop = min(request.num_known, len(index.ids) + TOKENS_PER_CALL)
        index.extend(request.token_ids(len(index.ids), stop))
        return index.following(most) if stop == request.num_known else []

    def end(self, request_id: str) -> None:
        self._indices.pop(request_id, None)


class NGramIndex:
    """The tokens of one sequence, and for each place the place before it at which the same `least` tokens ended."""

    __slots__ = ("_key", "_last", "_least", "_mask", "_most", "_previous", "ids")

    def __init__(self, least: int, most: int):
        self.ids = array("i")
        self._least, self._most = least, most
        self._previous = array("i")
        self._last: dict[int, int] = {}  # n-gram, 32 bits a token -> the last place at which it ended
        self._key, self._mask = 0, (1 << 32 * least) - 1

    def extend(self, ids: list[int]) -> None:
        key, mask, last, previous = self._key, self._mask, self._last, self._previous
        place = len(self.ids)
        self.ids.extend(ids)
        for token in ids:
            key = (key << 32 | token) & mask
            if place + 1 >= self._least:
                previous.append(last.get(key, -1))
                last[key] = place
            else:
                previous.append(-1)
            place += 1
        self._key = key

    def following(self, count: int) -> list[int]:
        """What followed the longest earlier match of the last tokens; a match that runs into them goes on as a period."""
        ids, end = self.ids, len(self.ids) - 1
        best, longest = -1, self._least - 1
        place = self._previous[end] if ids else -1
        for _ in range(CANDIDATES):
            if place < 0 or longest >= self._most:
                break
            length = self._least
            while length < self._most and length <= place and ids[place - length] == ids[end - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._previous[place]
        if best < 0:
            return []
        period = end - best
        return [ids[best + 1 + i % period] for i in range(count)]
