"""What the scheduler notes about one request and about one step, beside request and plan. No torch here."""

from __future__ import annotations

from headrace.cache.radix_tree import ID_BYTES, Node
from headrace.scheduler.plan import Chunk, Decodes
from headrace.scheduler.request import Request, Status, packed

OFF_INDEX = 2**31  # as num_indexed: no block of this entry enters the index


class Entry:
    """One live request, from add() until its last launched step has settled.

    `rank` orders all requests, lower first: a request may take blocks only from those behind it. `limit` is the number
    of tokens at which it ends whatever it samples.
    """

    __slots__ = (
        "ahead", "caching", "capacity", "cursor", "delayed", "due", "ids", "last_step", "limit", "max_output", "min_output",
        "num_hit", "num_indexed", "num_prompt", "output", "parted", "path", "rank", "reads_cache", "request", "stops",
    )  # fmt: skip

    def __init__(self, request: Request, rank: tuple[float, float, int], limit: int, caching: bool):
        params = request.params
        self.request = request
        self.output = request.output_ids
        self.rank = rank
        self.num_prompt = len(request.prompt_ids)
        self.limit = limit
        self.max_output = limit - self.num_prompt
        self.min_output = params.min_tokens
        # id -> stop_reason; that of an EOS is None, also for an EOS that the caller names as a stop id
        self.stops: dict[int, int | None] = {i: i for i in params.stop_token_ids or ()}
        if not params.ignore_eos:
            self.stops.update(dict.fromkeys(params.eos_token_ids))
        # a hit would skip the very rows whose logprobs or mean were asked for
        self.reads_cache = caching and params.prompt_logprobs is None and request.pooling != "mean"
        self.delayed = False  # has waited a step for somebody else's blocks
        self.parted = False  # wants no more rows, but launched steps may hold some; it leaves with the last
        self.last_step = 0  # the number of the last step that holds its row; of a batch's member: before it became one
        self.due = 0  # when, on the clock of the batch in which it runs, it must be looked at
        self.ahead: tuple[Step, Chunk] | None = None  # scheduled behind drafts that have not settled
        self.caching = caching
        self.rest()

    def rest(self) -> None:
        """Be as if never admitted; ParameterError if an id is no int32."""
        # the keys of the prefix index, made once and not again in each step of waiting
        self.ids = self.request.known_ids().tobytes()
        self.path: list[Node] = []  # where the index agrees with ids, while waiting
        self.cursor: Node | None = None  # the node of the last block that is indexed; None: the root
        self.num_indexed = 0 if self.caching else OFF_INDEX
        self.num_hit = 0  # blocks got from the index
        self.capacity = 0  # tokens that the block table has room for

    @property
    def finished(self) -> bool:
        return self.request.status is Status.FINISHED

    def key(self, index: int, width: int) -> bytes:
        """The key of the full block `index`, `width` bytes, of ids that the host knows."""
        key = self.ids[index * width : (index + 1) * width]
        if len(key) < width:
            self.ids = b""  # beyond what was known at admission: from here on each block is asked for once
            size = width // ID_BYTES
            key = packed(self.request.token_ids(index * size, (index + 1) * size)).tobytes()
        return key


class Step:
    """A plan in the making, and what its settling needs."""

    __slots__ = (
        "budget", "chunks", "claimed", "computing", "decodes", "decoding", "entries", "filled", "last", "new_blocks",
        "num_drafts", "number",
    )  # fmt: skip

    def __init__(self, number: int, budget: int):
        self.number = number
        self.budget = budget  # tokens left
        self.decodes: Decodes | None = None
        self.decoding: list[Entry] = []  # of the decodes
        self.new_blocks: list[tuple[Entry, int, int]] = []  # of the decodes: index in the block table, block
        self.last: list[Entry] = []  # decodes that will not have another row
        self.chunks: list[Chunk] = []  # beside the decodes
        self.entries: list[Entry] = []  # of the chunks
        self.filled: list[tuple[Entry, int]] = []  # whose blocks get full, up to which token
        self.computing: set[tuple[Node | None, str, bytes]] = set()  # blocks that can be hit after this step
        self.num_drafts = 0
        self.claimed = 0  # blocks about to be given back that somebody waits for

    def entry(self, row: int) -> Entry:
        """The request of a decode or, after them, of a chunk."""
        return self.decoding[row] if row < len(self.decoding) else self.entries[row - len(self.decoding)]
