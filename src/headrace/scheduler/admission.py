"""Who may wait, and when they may start: the forecast peak of KV use must fit the cache. No torch here."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from headrace.cache.radix_tree import RadixTree
from headrace.errors import CapacityError, ParameterError
from headrace.scheduler.config import Limits
from headrace.scheduler.decode_batch import Scheduled
from headrace.scheduler.request import Request

FIRST_GUESS = 256.0  # output tokens, before any request has ended
MEMORY = 32  # requests over which the mean forgets


def token_limit(request: Request, limits: Limits) -> int:
    """The number of tokens at which a request ends whatever it samples.

    Raises ParameterError or CapacityError, with the numbers, if it can never be served.
    """
    num_prompt, num_known = len(request.prompt_ids), request.num_known
    wanted = 1 if request.pooling is None else 0  # tokens beyond those that are there
    if num_prompt < 1:
        raise ParameterError("prompt_ids", request.prompt_ids, "at least one token")
    if num_known + wanted > limits.max_model_len:
        allowed = f"at most max_model_len{' - 1' * wanted} = {limits.max_model_len - wanted} tokens"
        raise ParameterError("prompt_ids", f"{num_known} tokens", allowed)
    if num_known > limits.num_blocks * limits.block_size:
        raise CapacityError(
            f"a request of {num_known} tokens needs {-(-num_known // limits.block_size)} blocks of the KV cache, "
            f"which has {limits.num_blocks} (of {limits.block_size} tokens each)"
        )
    if request.pooling is not None:
        return num_known + 1
    max_tokens = request.params.max_tokens
    limit = limits.max_len if max_tokens is None else min(limits.max_len, num_prompt + max_tokens)
    if num_known >= limit:
        allowed = f"fewer tokens than max_tokens = {max_tokens}"
        raise ParameterError("output_ids", f"{num_known - num_prompt} tokens", allowed)
    return limit


class LengthEstimate:
    """How many more tokens a request will produce, from the lengths of those that have ended.

    Optimistic on purpose: max_tokens is an upper bound that clients set high and rarely reach, and reserving it would let
    one client with 32k starve all others. Who is wrong pays with a preemption.
    """

    def __init__(self) -> None:
        self.mean = FIRST_GUESS

    def observe(self, num_output: int) -> None:
        self.mean += (num_output - self.mean) / MEMORY

    def remaining(self, num_output: int, most: int) -> int:
        """Expected output tokens still to come of a request that has `num_output` and can get at most `most` more.

        A request that comes near the mean or outlives it is expected to go on for a quarter of that length.
        """
        mean = self.mean
        return min(most, int(max(mean - num_output, mean / 4, num_output / 4)) + 1)


class Demand(NamedTuple):
    """What a request brings to the forecast."""

    own: int  # tokens in blocks that no other request holds
    rest: int  # tokens still to come
    fixed: int = 0  # blocks that become fixed with it


class PeakForecast:
    """The peak of future KV use of the running requests, in blocks, with and without a candidate.

    All requests grow one token a step, and one that has produced its expected rest gives its own blocks back. So use is
    highest just before some request ends; with the rows sorted by expected rest, longest first, the peak is

        max over j of  fixed + sum over i <= j of blocks(own_i + rest_j)

    where `own` counts the tokens in blocks that no other request holds and `fixed` the blocks that belong to no row
    (shared prefixes, requests about to leave); those are taken to stay. A last block is half empty on average.
    (The idea is that of the Past-Future scheduler, Gong et al., ASPLOS 2025, with a mean for its distribution.)
    """

    def __init__(self, num_blocks: int, block_size: int, fixed: int):
        self._num_blocks, self._block_size = num_blocks, block_size
        self._fixed = fixed
        self._bound = 0  # blocks if nobody gave anything back before the last one ends
        self._rows: list[tuple[int, int]] = []  # (-rest, own)

    def add(self, demand: Demand) -> None:
        self._fixed += demand.fixed
        self._bound += self._blocks(demand.own + demand.rest)
        insort(self._rows, (-demand.rest, demand.own))

    def fits(self, demand: Demand) -> bool:
        """Whether the peak stays within the cache with one more request."""
        bound = self._fixed + demand.fixed + self._bound + self._blocks(demand.own + demand.rest)
        return bound <= self._num_blocks or self.peak(demand) <= self._num_blocks  # usually without a look at the rows

    def peak(self, demand: Demand) -> float:
        """In blocks, with one more request."""
        tokens = most = 0
        for alive, (negative_rest, own) in enumerate(sorted([*self._rows, (-demand.rest, demand.own)]), 1):
            tokens += own + self._block_size // 2
            most = max(most, tokens - alive * negative_rest)
        return self._fixed + demand.fixed + most / self._block_size

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


class Admission:
    """The queue, by rank, and the rule by which its head may leave it.

    Nobody overtakes the head, so nobody starves. One exception: who would compute a block that this very step computes
    waits one step, once, and then finds it in the prefix index (n > 1, shared system prompts).

    The rule: the first chunk finds budget and a block now, and the peak of future KV use of all who run, with the
    candidate, fits the cache (PeakForecast; needless where all could have all that they may ask for). Where nobody runs it
    may always start. A head that was refused is asked about again when somebody has given blocks back.
    """

    def __init__(self, limits: Limits, tree: RadixTree):
        self._limits, self._tree = limits, tree
        self._heap: list[tuple[tuple[float, float, int], Request]] = []  # those who ended in the queue are skipped
        self.refused: Request | None = None
        self.promised = 0  # blocks that those who hold some can come to hold
        self.num_waiting = 0
        self.estimate = LengthEstimate()

    @property
    def head(self) -> Request:
        return self._heap[0][1]  # or one that has ended in the queue

    def push(self, request: Request) -> None:
        heappush(self._heap, (request.rank, request))
        self.num_waiting += 1

    def push_back(self, request: Request) -> None:
        """Queue a preempted request again; as the head it waits until somebody else has left: no thrashing."""
        self.push(request)
        if self.head is request:
            self.refused = request

    def forget(self) -> None:
        """A queued request has ended: its heap item stays until it surfaces, but they must not pile up behind the head."""
        self.num_waiting -= 1
        if len(self._heap) > 2 * self.num_waiting + 64:
            self._heap = [item for item in self._heap if not item[1].finished]
            heapify(self._heap)

    def left(self, request: Request) -> None:
        """Somebody has given all blocks back."""
        self.refused = None
        self.promised -= self._most_blocks(request)

    def _most_blocks(self, request: Request) -> int:
        return -(-(request.limit - 1) // self._limits.block_size)

    def waiting(self) -> list[Request]:
        return [request for _, request in self._heap if not request.finished]

    def admissible(
        self, step: Scheduled, free_slots: list[int], running: tuple[list[Request], list[Request]]
    ) -> Iterator[Request]:
        """Those who may start in this step, one after the other, out of the queue and with their `path` matched.

        The caller starts each before it asks for the next: `free_slots`, `step` and `running` (the lists of those who
        want more tokens) are looked at again each time.
        """
        forecast: PeakForecast | None = None
        refs = self._tree.pool.refs
        aside = []
        while self._heap and free_slots and step.budget > 0:
            request = self.head
            if request.finished:
                heappop(self._heap)
                continue
            crowded = len(free_slots) < self._limits.max_num_seqs
            if request is self.refused and crowded:
                break
            if request.reads_cache:
                limit = (request.num_known - 1) // self._limits.block_size  # the last token is always computed
                self._tree.match(request.keys, request.cache_salt, limit, request.path)
            if self._is_computed_now(request, step):
                request.delayed = True
                aside.append(heappop(self._heap))
                continue
            revived = sum(not refs[node.block] for node in request.path)  # blocks of its hit that nobody holds now
            demand = self.demand(request, len(request.path), revived)
            fits = self._tree.num_available > revived
            promised = self.promised + self._most_blocks(request)
            if fits and crowded and promised > self._limits.num_blocks:
                forecast = forecast or self.forecast(running)
                fits = forecast.fits(demand)
            if not fits:
                self.refused = request
                break
            if forecast is not None:
                forecast.add(demand)
            heappop(self._heap)
            self.num_waiting -= 1
            self.promised = promised
            yield request
        for item in aside:
            heappush(self._heap, item)

    def _is_computed_now(self, request: Request, step: Scheduled) -> bool:
        """Whether this step computes the very block that a waiting request would compute next."""
        if not step.computing or request.delayed or not request.reads_cache:
            return False
        index = len(request.path)
        if (index + 1) * self._limits.block_size >= request.num_known:
            return False  # not a block that could be hit
        parent = request.path[-1] if request.path else None
        return (parent, request.cache_salt, request.key(index, self._tree.key_bytes)) in step.computing

    def forecast(self, running: tuple[list[Request], list[Request]]) -> PeakForecast:
        requests = running[0] + running[1]
        own_blocks = sum(len(request.block_ids) - request.num_hit for request in requests)
        in_use = self._limits.num_blocks - self._tree.num_available
        forecast = PeakForecast(self._limits.num_blocks, self._limits.block_size, in_use - own_blocks)
        for request in requests:
            forecast.add(self.demand(request, request.num_hit))
        return forecast

    def demand(self, request: Request, num_hit: int, revived: int = 0) -> Demand:
        num_tokens = request.num_tokens
        rest = self.estimate.remaining(request.num_output, request.limit - num_tokens)
        return Demand(num_tokens - num_hit * self._limits.block_size, rest, revived)
