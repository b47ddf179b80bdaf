"""Who may wait, and when they may start: the forecast peak of KV use must fit the cache. No torch here."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from headrace.cache.radix_tree import RadixTree
from headrace.errors import CapacityError, ParameterError
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.entry import Entry, Step
from headrace.scheduler.request import Request

FIRST_GUESS = 256.0  # output tokens, before any request has ended
MEMORY = 32  # requests over which the mean forgets


def token_limit(request: Request, config: SchedulerConfig) -> int:
    """The number of tokens at which a request ends whatever it samples.

    Raises ParameterError or CapacityError, with the numbers, if it can never be served.
    """
    num_prompt, num_known = len(request.prompt_ids), request.num_known
    wanted = 1 if request.pooling is None else 0  # tokens beyond those that are there
    if num_prompt < 1:
        raise ParameterError("prompt_ids", request.prompt_ids, "at least one token")
    if num_known + wanted > config.max_model_len:
        allowed = f"at most max_model_len{' - 1' * wanted} = {config.max_model_len - wanted} tokens"
        raise ParameterError("prompt_ids", f"{num_known} tokens", allowed)
    if num_known > config.num_blocks * config.block_size:
        raise CapacityError(
            f"a request of {num_known} tokens needs {-(-num_known // config.block_size)} blocks of the KV cache, "
            f"which has {config.num_blocks} (of {config.block_size} tokens each)"
        )
    if request.pooling is not None:
        return num_known + 1
    max_tokens = request.params.max_tokens
    limit = config.max_len if max_tokens is None else min(config.max_len, num_prompt + max_tokens)
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

    def add(self, own: int, rest: int, fixed: int = 0) -> None:
        self._fixed += fixed
        self._bound += self._blocks(own + rest)
        insort(self._rows, (-rest, own))

    def fits(self, own: int, rest: int, fixed: int = 0) -> bool:
        """Whether the peak stays within the cache with one more request, which makes `fixed` more blocks fixed."""
        room = self._num_blocks - self._fixed - fixed
        if self._bound + self._blocks(own + rest) <= room:
            return True  # the usual case, without a look at the rows
        rows = self._rows.copy()
        insort(rows, (-rest, own))
        size, half = self._block_size, self._block_size // 2
        tokens = 0
        for alive, (negative_rest, row_own) in enumerate(rows, 1):
            tokens += row_own + half
            if tokens - alive * negative_rest > room * size:
                return False
        return True

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

    def __init__(self, config: SchedulerConfig, tree: RadixTree):
        self._config, self._tree = config, tree
        self._heap: list[tuple[tuple[float, float, int], Entry]] = []  # those who ended in the queue are skipped
        self._refused: Entry | None = None
        self._promised = 0  # blocks that those who hold some can come to hold
        self.num_waiting = 0
        self.estimate = LengthEstimate()

    def push(self, entry: Entry) -> None:
        heappush(self._heap, (entry.rank, entry))
        self.num_waiting += 1

    def push_back(self, entry: Entry) -> None:
        """Queue a preempted request again; as the head it waits until somebody else has left: no thrashing."""
        self.push(entry)
        if self._heap[0][1] is entry:
            self._refused = entry

    def forget(self) -> None:
        """A queued request has ended: its heap item stays until it surfaces, but they must not pile up behind the head."""
        self.num_waiting -= 1
        if len(self._heap) > 2 * self.num_waiting + 64:
            self._heap = [item for item in self._heap if not item[1].finished]
            heapify(self._heap)

    def left(self, entry: Entry) -> None:
        """Somebody has given all blocks back."""
        self._refused = None
        self._promised -= self._most_blocks(entry)

    def _most_blocks(self, entry: Entry) -> int:
        return -(-(entry.limit - 1) // self._config.block_size)

    def waiting(self) -> list[Entry]:
        return [entry for _, entry in self._heap if not entry.finished]

    def admissible(self, step: Step, free_slots: list[int], running: tuple[list[Entry], list[Entry]]) -> Iterator[Entry]:
        """Those who may start in this step, one after the other, out of the queue and with their `path` matched.

        The caller starts each before it asks for the next: `free_slots`, `step` and `running` (the lists of those who
        want more tokens) are looked at again each time.
        """
        forecast: PeakForecast | None = None
        aside = []
        while self._heap and free_slots and step.budget > 0:
            entry = self._heap[0][1]
            if entry.finished:
                heappop(self._heap)
                continue
            crowded = len(free_slots) < self._config.max_num_seqs
            if entry is self._refused and crowded:
                break
            if entry.reads_cache:
                limit = (entry.request.num_known - 1) // self._config.block_size  # the last token is always computed
                self._tree.match(entry.ids, entry.request.cache_salt, limit, entry.path)
            if self._is_computed_now(entry, step):
                entry.delayed = True
                aside.append(heappop(self._heap))
                continue
            demand = self._demand(entry)
            fits = self._tree.num_available > demand[-1]
            promised = self._promised + self._most_blocks(entry)
            if fits and crowded and promised > self._config.num_blocks:
                forecast = forecast or self._forecast(running)
                fits = forecast.fits(*demand)
            if not fits:
                self._refused = entry
                break
            if forecast is not None:
                forecast.add(*demand)
            heappop(self._heap)
            self.num_waiting -= 1
            self._promised = promised
            yield entry
        for item in aside:
            heappush(self._heap, item)

    def _is_computed_now(self, entry: Entry, step: Step) -> bool:
        """Whether this step computes the very block that a waiting request would compute next."""
        if not step.computing or entry.delayed or not entry.reads_cache:
            return False
        index, request = len(entry.path), entry.request
        if (index + 1) * self._config.block_size >= request.num_known:
            return False  # not a block that could be hit
        parent = entry.path[-1] if entry.path else None
        return (parent, request.cache_salt, entry.key(index, self._tree.key_bytes)) in step.computing

    def _forecast(self, running: tuple[list[Entry], list[Entry]]) -> PeakForecast:
        entries = running[0] + running[1]
        own_blocks = sum(len(entry.request.block_ids) - entry.num_hit for entry in entries)
        num_blocks = self._config.num_blocks
        in_use = num_blocks - self._tree.num_available
        forecast = PeakForecast(num_blocks, self._config.block_size, in_use - own_blocks)
        for entry in entries:
            forecast.add(*self._expected(entry, entry.num_hit))
        return forecast

    def _demand(self, entry: Entry) -> tuple[int, int, int]:
        """What a waiting request would bring: as _expected(), and the blocks of its hit that nobody holds now."""
        refs = self._tree.pool.refs
        revived = sum(not refs[node.block] for node in entry.path)
        return *self._expected(entry, len(entry.path)), revived

    def _expected(self, entry: Entry, num_hit: int) -> tuple[int, int]:
        """Tokens in blocks of its own, and tokens still to come."""
        num_tokens = entry.request.num_tokens
        rest = self.estimate.remaining(num_tokens - entry.num_prompt, entry.limit - num_tokens)
        return num_tokens - num_hit * self._config.block_size, rest
