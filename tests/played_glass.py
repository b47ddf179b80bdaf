"""A feed without a model: a scheduler of many requests on a clock of its own, watched as a core's is, recorded and played.

Run as a program it serves the page with it: `python tests/played_glass.py [PORT]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from types import SimpleNamespace
from unittest.mock import patch

from glass_picture import Picture
from headrace.api.sse import named_event
from headrace.engine.glass import GlassObserver
from headrace.engine.stats import LoopTimes
from headrace.sampling.params import SamplingParams
from headrace.scheduler.config import Limits
from headrace.scheduler.plan import StepResult
from headrace.scheduler.request import Request
from headrace.scheduler.scheduler import Scheduler
from headrace.worker.reading import Reading
from scheduler_driver import admit_greedily

Event = tuple[float, str, bytes]


class Recording:
    """What a core with `slots` slots shows in so many seconds, all busy."""

    def __init__(
        self, seconds: float, slots: int = 256, blocks: int = 4096, seed: int = 0, step: float = 0.025, greedy: bool = False
    ):
        """`greedy`: whoever finds a block is admitted, so that many are preempted."""
        self.rng = random.Random(seed)
        self.limits = Limits(
            max_num_seqs=slots, max_num_batched_tokens=1024, max_model_len=2048, block_size=16, num_blocks=blocks, max_draft_rows=64
        )
        self.now, self.step_seconds, self.number = time.monotonic(), step, 0
        self.stems = [[self.rng.randrange(1000) for _ in range(640)] for _ in range(5)]
        self.greedy = greedy
        self.events: list[Event] = []
        with patch("time.monotonic", lambda: self.now):
            self._run(seconds)

    def _run(self, seconds: float) -> None:
        scheduler = Scheduler(self.limits)
        if self.greedy:
            admit_greedily(scheduler)
        core = SimpleNamespace(scheduler=scheduler, times=LoopTimes())
        observer = GlassObserver(core, Reading(2 * 10**9, 10**5, 0, 2e11))  # type: ignore[arg-type]
        watched, began, flight, stats_due = core.scheduler, self.now, [], self.now
        while self.now < began + seconds:
            self._arrive(watched)
            for request in watched.decoding[:12]:
                request.num_drafts = self.rng.choice([0, 2, 3])
            plan = watched.schedule()
            if plan is not None:
                watched.launched(plan)
                flight.append(plan)
            if len(flight) > 1 or (flight and plan is None):
                self._settle(watched, flight.pop(0))
            self.now += self.step_seconds
            step = self.step_seconds
            core.times = LoopTimes(0.03 * step, 0.07 * step, 0.8 * step, 0.1 * step)
            if self.now >= stats_due:
                stats_due += 0.5
                self._tell("stats", json.dumps(self._stats(scheduler)).encode())
            shown = observer.turned()
            assert not observer.broken
            if shown is not None:
                for name, document in (("request", shown.requests), ("step", shown.steps), ("snapshot", shown.snapshot)):
                    if document is not None and (name == "snapshot" or any(e[1] == "snapshot" for e in self.events[:9])):
                        self._tell(name, document)

    def picture(self, until: float = math.inf) -> Picture:
        """What somebody knows who has read all of it, or all up to the step of this number, the last of a frame."""
        picture: Picture | None = None
        for _, name, document in self.events:
            if name == "snapshot":
                picture = Picture(json.loads(document))
            elif picture is not None and name != "stats":
                picture.take(name, json.loads(document))
                if name == "step" and picture.n >= until:
                    break
        assert picture is not None
        return picture

    def _tell(self, name: str, document: bytes) -> None:
        self.events.append((self.now, name, document))

    def _arrive(self, scheduler: Scheduler) -> None:
        rng = self.rng
        while scheduler.num_waiting < 12:
            stem = rng.choice(self.stems)[: rng.choice([64, 128, 320, 640])]
            prompt = stem + [rng.randrange(1000) for _ in range(rng.randint(4, 200))]
            params = SamplingParams(max_tokens=rng.randint(20, 400), ignore_eos=True)
            self.number += 1
            name = f"chatcmpl-{rng.getrandbits(64):016x}-{rng.getrandbits(64):016x}"
            scheduler.add(Request(id=name, prompt_ids=prompt, params=params, seed=1, arrival=self.now))

    def _settle(self, scheduler: Scheduler, plan) -> None:
        tokens: list[int] = []
        counts = []
        for sequence in range(len(plan)):
            drafts = int(plan.drafts[sequence])
            count = 1 + self.rng.randint(0, drafts) if plan.samples[sequence] else 0
            tokens += [self.rng.randrange(1000) for _ in range(count)]
            counts.append(count)
        scheduler.took(plan, 0.8 * self.step_seconds)
        scheduler.settle(plan, StepResult(tokens, counts))

    def _stats(self, scheduler: Scheduler) -> dict:
        stats = scheduler.stats
        shared = {
            "running": scheduler.num_running, "waiting": scheduler.num_waiting, "kv_usage": scheduler.kv_usage,
            "steps": scheduler.num_steps, "scheduled_tokens": 0, "preemptions": stats.num_preemptions,
            "prefix_queries": stats.prefix_query_tokens, "prefix_hits": stats.prefix_hit_tokens, "drafts": 0, "draft_tokens": 0,
            "accepted_tokens": 0,
        }  # fmt: skip
        return {
            "now": self.now, "loaded": True, "alive": True, "draining": False, "requests": scheduler.num_running, "restarts": 0,
            **shared, "cores": [{"core": 0, "up": True, "leaving": False, "restarts": 0, **shared}],
        }  # fmt: skip


class PlayedGlass:
    """A `Glass` that plays a recording, at once up to `skip` seconds and then as fast as it was recorded."""

    def __init__(self, recording: Recording, skip: float = 0.0, rate: float = 1.0):
        self.recording, self.skip, self.rate = recording, skip, rate

    @contextlib.asynccontextmanager
    async def look(self, core: int):
        yield self._play()

    def _play(self) -> SimpleNamespace:
        events = iter(self.recording.events)
        zero, began = self.recording.events[0][0] + self.skip, time.monotonic()

        async def next_() -> bytes:
            at, name, document = next(events, (0.0, "", b""))
            if not name:
                await asyncio.sleep(3600)
            await asyncio.sleep(max(0.0, (at - zero) / self.rate - (time.monotonic() - began)))
            return named_event(name.encode(), document)

        return SimpleNamespace(next=next_)

    async def token_ids(self, request_id: str, start: int, stop: int):
        return None


if __name__ == "__main__":
    import uvicorn

    from fake_engine import FakeEngine
    from headrace.api.app import create_app

    recorded = Recording(90.0)
    print(f"{len(recorded.events)} events", flush=True)
    uvicorn.run(
        create_app(FakeEngine(), glass=PlayedGlass(recorded, skip=25.0)), port=int((sys.argv[1:] or ["8765"])[0]), log_level="warning"
    )
