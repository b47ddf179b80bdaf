"""Drives the scheduler without a model, over a device that remembers what a real one would and checks every read.

The KV of a token is a hash of all tokens up to it, as a transformer's is a function of them. A step reads the KV of its
whole context and compares each with what it must be at that moment; so a block that was reused, indexed or shared too
early, a stale slot or a wrong id shows as an AssertionError at the row that would have read it. The sampled id is a function
of (seed, position, context), so what a request generates is known without a scheduler: `reference()`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.sampling.params import SamplingParams
from headrace.scheduler.admission import PeakForecast
from headrace.scheduler.config import Limits
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.request import Request, Status
from headrace.scheduler.scheduler import Scheduler

VOCAB = 50
EOS = 7


def extend(context: int, token: int) -> int:
    return hash((context, token))


def context_of(ids: list[int]) -> int:
    context = 0
    for token in ids:
        context = extend(context, token)
    return context


def sample(seed: int, position: int, context: int, min_output: bool) -> int:
    token = random.Random(hash((seed, position, context))).randrange(VOCAB)
    return (token + 1) % VOCAB if min_output and token == EOS else token  # the device masks EOS before min_tokens


def reference(prompt: list[int], seed: int, params: SamplingParams, max_len: int) -> tuple[list[int], str]:
    """(output ids, finish_reason) of a request, by the definition of the fake."""
    context, output = context_of(prompt), []
    while True:
        token = sample(seed, len(prompt) + len(output), context, len(output) < params.min_tokens)
        output.append(token)
        context = extend(context, token)
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(params.eos_token_ids))
        if token in stops and len(output) >= params.min_tokens:
            return output, "stop"
        if len(prompt) + len(output) >= max_len or len(output) == params.max_tokens:
            return output, "length"


@dataclass(eq=False)
class Chunk:
    """One sequence of a plan, as tests look at it."""

    plan: StepPlan
    row: int
    request: Request
    slot: int
    start: int
    num_tokens: int
    num_drafts: int
    unverified: int
    samples: bool  # also of a prompt that is embedded: it is complete
    admitted: bool = False
    new_blocks: list[int] = field(default_factory=list)
    block_offset: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def output_index(self) -> int:
        return self.stop - self.num_drafts - len(self.request.prompt_ids) if self.stop > len(self.request.prompt_ids) else 0

    @property
    def drafts(self) -> list[int]:
        return self.plan.guesses.get(self.row, [])

    @drafts.setter
    def drafts(self, ids: list[int]) -> None:
        self.plan.guesses[self.row] = ids


class PlanView:
    """A plan and its sequences one by one, with their requests."""

    def __init__(self, plan: StepPlan, requests: Mapping[str, Request]):
        self.plan = plan
        columns = (plan.slots, plan.starts, plan.counts, plan.drafts, plan.unverified, plan.samples)
        self.chunks = [
            Chunk(plan, row, requests[name], *values)
            for row, (name, *values) in enumerate(zip(plan.ids, *(c.tolist() for c in columns), strict=True))
        ]
        self.by_slot = {chunk.slot: chunk for chunk in self.chunks}
        for new in plan.admitted:
            chunk = self.by_slot[new.slot]
            chunk.admitted, chunk.new_blocks = True, new.block_ids
        for slot, column, blocks in plan.new_blocks:
            self.by_slot[slot].new_blocks, self.by_slot[slot].block_offset = blocks, column

    def __getattr__(self, name: str):
        return getattr(self.plan, name)

    @property
    def others(self) -> list[Chunk]:
        return self.chunks[self.plan.num_decodes :]


class FakeDevice:
    """Slots with ids and block tables, and blocks with KV."""

    def __init__(self, limits: Limits):
        self.block_size = limits.block_size
        self.ids: list[dict[int, int]] = [{} for _ in range(limits.max_num_seqs)]
        self.tables: list[list[int]] = [[] for _ in range(limits.max_num_seqs)]
        self.owner: list[Request | None] = [None] * limits.max_num_seqs
        self.kv: list[list[int | None]] = [[None] * limits.block_size for _ in range(limits.num_blocks)]
        # of layers that keep a state: behind which tokens that of a slot is, and those that are kept
        self.states = [0] * (limits.max_num_seqs + limits.num_snapshots)
        self.slots, self.has_states = limits.max_num_seqs, limits.num_snapshots > 0
        self.accepted = [0] * limits.max_num_seqs  # drafts, of the last step with drafts
        self.breaks = lambda: False  # whether a chunk with drafts comes to nothing
        self.flight: deque[tuple[PlanView, dict[Request, list[int]], list[list[int]]]] = deque()
        self.max_num_batched_tokens = limits.max_num_batched_tokens

    def launch(self, plan: PlanView) -> None:
        tables: dict[Request, list[int]] = {}
        results = []
        assert 0 < plan.num_tokens <= self.max_num_batched_tokens
        requests = [chunk.request for chunk in plan.chunks]
        assert len(set(requests)) == len(requests), "two chunks of one request in a step"
        admitted = {new.slot: new for new in plan.admitted}
        plain = [chunk for chunk in plan.chunks if not chunk.admitted and not chunk.num_drafts]
        sizes = [chunk.num_tokens == 1 and chunk.samples for chunk in plain]
        # where prompts are cut for their states, the end of one may follow a part of another
        assert self.has_states or sizes == sorted(sizes, reverse=True), "decodes come first"
        for chunk in plan.chunks:
            request, slot = chunk.request, chunk.slot
            assert chunk.num_tokens >= 1 and request.status is not Status.WAITING
            if chunk.admitted:
                for launched, launched_tables, _ in self.flight:
                    for other in launched.chunks:
                        assert other.slot != slot, f"slot {slot} is reused while step {launched.step} is in flight"
                    del launched_tables
                new, known = admitted[slot], request.token_ids(0, request.num_known)
                assert new.token_ids.tolist() == known and new.num_cached == chunk.start
                assert (new.seed, new.num_prompt) == (request.seed, len(request.prompt_ids))
                self.ids[slot] = dict(enumerate(known))
                self.tables[slot] = []
                self.owner[slot] = request
                assert not self.has_states or (new.snapshot >= 0) == (chunk.start > 0), "a state is missing, or not needed"
                self.states[slot] = 0 if new.snapshot < 0 else self.states[self.slots + new.snapshot]
                assert chunk.block_offset == 0 and request.num_known >= chunk.stop
            assert self.owner[slot] is request, "a row of a request whose slot holds another one"
            table = self.tables[slot]
            if chunk.new_blocks:
                assert chunk.block_offset == len(table), "a gap or an overlap in the block table"
                table += chunk.new_blocks
            assert table == request.block_ids[: len(table)]
            tables[request] = table
            results.append(self._compute(chunk, table))
        for slot, snapshot in plan.kept:
            self.states[self.slots + snapshot] = self.states[slot]
        self.flight.append((plan, tables, results))

    def _compute(self, chunk, table: list[int]) -> list[int]:
        ids, size, request = self.ids[chunk.slot], self.block_size, chunk.request
        context, contexts = 0, []
        moved = self.accepted[chunk.slot] if chunk.unverified else 0
        start, stop = chunk.start + moved, chunk.stop + moved
        assert moved <= chunk.unverified and chunk.stop + chunk.unverified <= len(table) * size, "no block for what may be accepted"
        for position, draft in enumerate(chunk.drafts, chunk.start + 1):
            if position > start:
                ids[position] = draft
        for position in range(stop):
            context = extend(context, ids.get(position, 0))
            contexts.append(context)
            block = table[position // size]
            if position >= start:
                self._write(request, block, position % size, context)
            else:
                assert self.kv[block][position % size] == context, (
                    f"{request.id} reads foreign KV: position {position}, block {block}"
                )
        assert not self.has_states or self.states[chunk.slot] == (contexts[start - 1] if start else 0), f"{request.id}: another's state"
        self.states[chunk.slot] = contexts[-1]
        if not chunk.samples:
            return []
        taken: list[int] = []
        first = stop - chunk.num_drafts
        index = chunk.output_index + moved
        assert index == max(0, first - len(request.prompt_ids))
        if chunk.num_drafts and self.breaks():
            self.accepted[chunk.slot] = -1
            return []
        for i, position in enumerate(range(first, stop + 1)):
            # the host decides what is masked, from what it knows
            masked = chunk.output_index + i < request.params.min_tokens
            assert masked == (index + i < request.params.min_tokens), "a row's mask depends on what is not known"
            token = sample(request.seed, position, contexts[position - 1], masked)
            taken.append(token)
            if i == chunk.num_drafts or token != ids.get(position, 0):
                ids[position] = token
                break
        if chunk.num_drafts:
            self.accepted[chunk.slot] = len(taken) - 1
        return taken

    def _write(self, request: Request, block: int, offset: int, context: int) -> None:
        for launched, tables, _ in self.flight:
            for other, table in tables.items():
                assert other is request or block not in table, (
                    f"{request.id} overwrites block {block} of {other.id} while step {launched.step} is in flight"
                )
        self.kv[block][offset] = context


def settle(scheduler: Scheduler, plan: StepPlan, sampled: Sequence[list[int]], failed: frozenset[int] = frozenset()) -> list:
    """`sampled[i]` belongs to the sequence i; (request, ids that it really takes) of those that got ids or ended."""
    live = dict(scheduler.live)
    sampled = [ids if ids or i >= plan.num_decodes else [-1] for i, ids in enumerate(sampled)]
    flat = [token for ids in sampled for token in ids]
    settled = scheduler.settle(plan, StepResult(flat, [len(ids) for ids in sampled], failed))
    return [(live[id], [token]) for id, token in zip(settled.ids, settled.tokens, strict=True)] + settled.gains


class NoForecast(PeakForecast):
    def __init__(self) -> None:
        super().__init__(0, 1, 0)

    def fits(self, *demand) -> bool:
        return True

    def add(self, *demand) -> None:
        pass


def admit_greedily(scheduler: Scheduler) -> None:
    """Whoever finds a block now is admitted: for tests that want preemption all the time."""
    scheduler.admission.forecast = lambda running: NoForecast()  # type: ignore[assignment, return-value]


class SchedulerDriver:
    """Scheduler and fake device in the order of the real loop; `depth` launched steps may be unsettled at schedule()."""

    def __init__(self, limits: Limits, depth: int = 0, check: bool = True):
        self.scheduler, self.device = Scheduler(limits), FakeDevice(limits)
        self.depth, self.checks = depth, check
        self.requests: dict[str, Request] = {}

    def admit_greedily(self) -> SchedulerDriver:
        admit_greedily(self.scheduler)
        return self

    def add(self, id: str, prompt: list[int], seed: int = 0, **kwargs) -> Request:
        fields = {k: kwargs.pop(k) for k in ("priority", "cache_salt", "arrival", "output_ids") if k in kwargs}
        kwargs.setdefault("eos_token_ids", [EOS])
        request = Request(id=id, prompt_ids=prompt, params=SamplingParams(**kwargs), seed=seed, **fields)
        self.scheduler.add(request)
        self.requests[id] = request
        self.check()
        return request

    def check(self) -> None:
        if self.checks:
            self.scheduler.check()

    def schedule(self) -> PlanView | None:
        plan = self.scheduler.schedule()
        self.check()
        return None if plan is None else PlanView(plan, self.requests)

    def launch(self, plan: PlanView) -> None:
        self.device.launch(plan)
        self.scheduler.launched(plan.plan)
        self.check()

    def settle(self, failed: frozenset[int] = frozenset()) -> list[tuple[Request, list[int]]]:
        plan, _, sampled = self.device.flight.popleft()
        results = settle(self.scheduler, plan.plan, [[] if i in failed else ids for i, ids in enumerate(sampled)], failed)
        for request, ids in results:
            assert ids or request.finish_reason == "error"
            assert not ids or request.output_ids[-len(ids) :] == ids
        assert len({id(request) for request, _ in results}) == len(results)
        self.check()
        return results

    def step(self, failed: frozenset[int] = frozenset()) -> PlanView | None:
        plan = self.schedule()
        if plan is not None:
            self.launch(plan)
        elif not self.device.flight:
            assert not self.scheduler.has_unfinished, "nothing runs, nothing is in flight, and requests are left"
        while len(self.device.flight) > (self.depth if plan is not None else 0):
            self.settle(failed)
        return plan

    def run(self, most: int = 100_000) -> int:
        """Step until all is done; the number of steps."""
        steps = 0
        while self.scheduler.has_unfinished:
            assert steps < most, f"not done after {most} steps"
            self.step()
            steps += 1
        while self.device.flight:
            self.settle()
        self.assert_idle()
        return steps

    def assert_idle(self) -> None:
        """The pool is whole: nothing leaked."""
        scheduler = self.scheduler
        self.scheduler.check()
        assert scheduler.num_running == scheduler.num_waiting == 0 and not scheduler.has_unfinished
        assert scheduler.kv_usage == 0.0
        assert scheduler.pool.num_free + scheduler.tree.num_cached == scheduler.limits.num_blocks
