"""The checker of law 5 sees what it is there for: one field of a running scheduler is wrong, and it says so."""

from __future__ import annotations

import pytest

from headrace.scheduler.config import Limits
from headrace.scheduler.request import Status
from scheduler_driver import SchedulerDriver


def busy() -> SchedulerDriver:
    """Two that decode and share a prefix, one with drafts in flight, one in its prefill, one on its way out, two that wait."""
    limits = Limits(
        max_num_seqs=5, max_num_batched_tokens=24, max_model_len=64, block_size=4, num_blocks=64, max_draft_rows=8
    )
    engine = SchedulerDriver(limits, depth=1)
    shared = list(range(10, 18))
    for name in ("a", "b"):
        engine.add(name, [*shared, ord(name)], max_tokens=40, ignore_eos=True)
        engine.step()
    engine.add("drafts", [1, 2, 3], max_tokens=40, ignore_eos=True)
    engine.add("gone", [4, 5, 6], max_tokens=40, ignore_eos=True)
    for _ in range(3):
        engine.step()
    while engine.device.flight:
        engine.settle()
    engine.add("long", list(range(45)), max_tokens=10, ignore_eos=True)
    for name in ("w1", "w2"):
        engine.add(name, [7, 8], max_tokens=10, ignore_eos=True)
    request(engine, "drafts").num_drafts = 2
    plan = engine.schedule()
    for chunk in plan.chunks:
        chunk.drafts = [0] * chunk.num_drafts
    engine.launch(plan)
    engine.scheduler.abort("gone")
    engine.check()
    return engine


def request(engine: SchedulerDriver, name: str):
    blocks = engine.scheduler.blocks
    return blocks.live.get(name) or next(r for r in blocks.leaving if r.id == name)


def spoiler(name: str, field: str, value):
    """Sets a field of a request; `value` may be a function of what it was."""

    def spoil(engine: SchedulerDriver) -> None:
        found = request(engine, name)
        setattr(found, field, value(getattr(found, field)) if callable(value) else value)

    return spoil


def replace_block(name: str, index: int, other: str, other_index: int):
    """A block of one table stands in another too, properly counted."""

    def spoil(engine: SchedulerDriver) -> None:
        blocks, pool = request(engine, name).block_ids, engine.scheduler.pool
        old, blocks[index] = blocks[index], request(engine, other).block_ids[other_index]
        pool.refs[blocks[index]] += 1
        engine.scheduler.tree.release([old])

    return spoil


def due_never(engine: SchedulerDriver) -> None:
    for due in engine.scheduler.blocks.batch.events.values():
        due.clear()


def due_late(engine: SchedulerDriver) -> None:
    late = request(engine, "a")
    late.next_event += 1
    engine.scheduler.blocks.batch.events[late.next_event] = [late]


def off_batch(engine: SchedulerDriver) -> None:
    """Leaves the decodes that move on, as it should, but with tokens that nobody computes."""
    found = request(engine, "a")
    engine.scheduler.blocks.batch.leave(found)
    found.num_scheduled -= 3


def of_blocks(spoil):
    return lambda engine: spoil(engine.scheduler.blocks, lambda name: request(engine, name))


def spoil_refs(engine: SchedulerDriver) -> None:
    engine.scheduler.pool.refs[request(engine, "long").block_ids[0]] += 1


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (of_blocks(lambda r, e: r.prefilling.append(e("a"))), "in two lists"),
        (of_blocks(lambda r, e: r.live.pop("a")), "table of live requests"),
        (of_blocks(lambda r, e: r.prefilling.clear()), "table of live requests"),
        (of_blocks(lambda r, e: setattr(r.admission, "num_waiting", 3)), "2 wait, 3 are counted"),
        (of_blocks(lambda r, e: r.decoding.reverse()), "order of rank"),
        (spoiler("long", "retired", True), "retires could get more rows"),
        (off_batch, "more or less than one token"),
        (spoiler("a", "limit", 5), "beyond its last token"),
        (spoiler("a", "capacity", 100), "blocks beyond its last token"),
        (of_blocks(lambda r, e: setattr(r, "starved", e("gone"))), "kept for nobody"),
        (spoiler("long", "num_unverified", 1), "drafts in flight miscounted"),
        (lambda engine: setattr(engine.scheduler._drafting, "num_rows", 0), "sequences with drafts miscounted"),
        (of_blocks(lambda r, e: [r.leaving.clear(), r.free_slots.append(3)]), "row of a request that has left"),
        (spoiler("gone", "retired", False), "retires, or does not"),
        (spoiler("long", "last_step", lambda n: n + 1), "its last row is not in step"),
        (spoiler("long", "last_step", lambda n: n - 1), "its last row is not in step"),
        (of_blocks(lambda r, e: setattr(r, "num_settled", r.num_settled + 1)), "its last row is not in step"),
        (spoiler("drafts", "last_step", 0), "its last row is not in step"),
        (of_blocks(lambda r, e: r.batch.members.pop()), "not what its members think"),
        (due_never, "nobody knows"),
        (due_late, "too early or late"),
        (spoiler("a", "slot", 4), "slots used or free"),
        (of_blocks(lambda r, e: r.free_slots.append(0)), "slots used or free"),
        (of_blocks(lambda r, e: setattr(r.admission, "promised", 0)), "can ask for is miscounted"),
        (spoiler("w1", "status", Status.RUNNING), "waits as"),
        (spoiler("w1", "slot", 0), "waits and holds"),
        (spoiler("w1", "block_ids", [0]), "waits and holds"),
        (spoiler("w1", "offset", 1), "waits and holds"),
        (spoil_refs, "references, the tables hold"),
        (lambda engine: engine.scheduler.pool._free.pop(), "in use != 64"),
        (lambda engine: engine.scheduler.pool._free.append(engine.scheduler.pool._free[0]), "twice"),
        (replace_block("long", 1, "long", 0), "twice"),
        (replace_block("b", 0, "a", 1), "stands at"),
        (replace_block("b", -1, "a", -1), "shared before it is full"),
        (replace_block("long", 0, "a", 0), "requests with other tokens"),
        (spoiler("long", "capacity", lambda n: n + 4), "capacity"),
        (spoiler("gone", "num_scheduled", lambda n: n + 40), "blocks, "),
        (spoiler("long", "num_scheduled", lambda n: n + 40), "more pending than in flight"),
        (spoiler("long", "limit", 20), "out of order"),
        (spoiler("long", "status", Status.WAITING), "runs as"),
        (spoiler("a", "num_indexed", lambda n: n - 1), "other tokens"),
        (spoiler("long", "cursor", lambda node: node.parent), "other tokens"),
        (spoiler("a", "cursor", lambda node: node.parent), "other tokens"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(spoil, says):
    engine = busy()
    spoil(engine)
    with pytest.raises(AssertionError, match=says):
        engine.scheduler.check()
