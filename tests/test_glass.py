"""What the page's engine is drawn from: it is true after every frame, costs nothing while nobody looks, and is bounded while many do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from types import SimpleNamespace

import pytest

from engine_driver import complete
from fake_core import FakeSupply
from fake_engine import FakeEngine
from glass_picture import Picture
from headrace.api.app import create_app
from headrace.api.config import ServerConfig
from headrace.api.glass_hub import MOST_BYTES, MOST_VIEWERS, GlassHub, TooManyViewersError
from headrace.api_processes.counting import Questions
from headrace.api_processes.glass import GlassDesk, RemoteGlass
from headrace.engine import glass as engine_glass
from headrace.engine.glass import GlassObserver
from headrace.engine.messages import EngineRequest
from headrace.engine.stats import LoopTimes
from headrace.engine.wire import Glimpse, News
from headrace.sampling.params import SamplingParams
from headrace.scheduler.config import Limits
from headrace.scheduler.request import Status
from headrace.scheduler.scheduler import Scheduler
from scheduler_driver import SchedulerDriver
from server_driver import serving, soon
from test_scheduler_fuzz import Fuzz
from test_speculative_scheduler import DraftFuzz


class Watched:
    """A scheduler's driver that somebody looks at, and what he knows."""

    def __init__(self, driver: SchedulerDriver):
        self.driver = driver
        core = SimpleNamespace(scheduler=driver.scheduler, times=LoopTimes())
        self.observer = GlassObserver(core)  # type: ignore[arg-type]
        driver.scheduler = core.scheduler
        self.picture: Picture | None = None

    def frame(self, due: bool = True) -> None:
        """The end of a turn of the loop, in which a frame is due or not."""
        self.observer._due = 0.0 if due or self.picture is None else math.inf
        shown = self.observer.turned()
        assert not self.observer.broken
        if shown is None:
            return
        if self.picture is None:
            assert shown.snapshot is not None
            self.missed = set(self.driver.requests)
            self.picture = Picture(json.loads(shown.snapshot))
        else:
            for name, document in (("request", shown.requests), ("step", shown.steps)):
                if document is not None:
                    self.picture.take(name, json.loads(document))

    def check(self) -> None:
        """The picture is the scheduler's state, in all that it shows."""
        scheduler, picture = self.driver.scheduler, self.picture
        assert picture is not None
        blocks = scheduler.blocks
        resident = [*blocks.decoding, *blocks.prefilling, *blocks.leaving]
        assert picture.tables == {request.slot: request.block_ids for request in resident}
        assert {slot: picture.slots[slot] for slot in picture.tables} == {request.slot: request.id for request in resident}
        in_use = {block for block, count in enumerate(scheduler.pool.refs) if count}
        assert set(picture.owners) == in_use
        assert {block: len(who) for block, who in picture.owners.items()} == {b: scheduler.pool.refs[b] for b in in_use}
        nodes = {block: node for block, node in enumerate(scheduler.tree.nodes) if node is not None}
        assert set(picture.nodes) == set(nodes) and len(picture.nodes) == scheduler.tree.num_nodes
        for block, above in picture.nodes.items():
            parent = nodes[block].parent
            assert above == (-1 if parent is None or parent.is_root else parent.block)
        live = scheduler.live.values()
        assert picture.waiting == {request.id for request in live if request.status is Status.WAITING}
        for request in live:
            if request.status is Status.RUNNING:
                assert picture.scheduled[request.id] == request.num_scheduled, request.id
            if request.id in self.seen and request not in blocks.leaving:  # told of when its last row has settled
                assert picture.preempted.get(request.id, 0) == request.num_preemptions
        assert (picture.head is None) == (scheduler.num_waiting == 0)

    @property
    def seen(self) -> set[str]:
        """Requests whose whole life was looked at."""
        return set(self.driver.requests) - self.missed


@pytest.mark.parametrize("kind", [Fuzz, DraftFuzz])
@pytest.mark.parametrize("seed", range(12))
def test_the_picture_is_the_scheduler_s_state(kind, seed):
    fuzz, watched = kind(seed), None
    every = 1 + seed % 3  # steps in a frame
    for i in range(100):
        if i == 4 * (seed % 5):  # the one who looks comes in the middle
            watched = Watched(fuzz.engine)
        if i == 60:
            fuzz.engine.scheduler.reset_prefix_cache()
        if fuzz.engine.scheduler.num_waiting < 9:
            fuzz.arrive()
        fuzz.step()
        if watched is not None:
            watched.frame(i % every == 0)
            if i % every == 0:
                watched.check()
    assert watched is not None
    watched.frame()
    watched.check()
    picture = watched.picture
    assert picture is not None and picture.steps == sorted(set(picture.steps))
    for request in fuzz.requests:
        if request.finished and request.id in picture.ended:
            assert picture.ended[request.id] == (request.finish_reason, len(request.output_ids))
        if request.finished and request.id in watched.seen:
            assert request.id in picture.ended
            assert (request.id in picture.first) == bool(request.output_ids)


def test_why_somebody_waits_is_said_in_words():
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=64, block_size=4, num_blocks=20)
    watched = Watched(SchedulerDriver(limits))
    driver = watched.driver
    driver.add("long", [1] * 40, max_tokens=24, ignore_eos=True)
    driver.add("next", [2] * 40, max_tokens=24, ignore_eos=True)
    driver.step()
    watched.frame()
    assert watched.picture.head == ["next", "the step's budget of 32 tokens is used up"]
    driver.step()
    driver.step()
    watched.frame()
    name, words = watched.picture.head
    assert name == "next" and words.startswith("the peak of KV use would be 1") and words.endswith(" % of the cache"), words
    few = Watched(SchedulerDriver(Limits(max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64, block_size=4, num_blocks=99)))
    few.driver.add("a", [1] * 4)
    few.driver.add("b", [2] * 4)
    few.driver.step()
    few.frame()
    assert few.picture.head == ["b", "all 1 slots are taken"]


def test_who_watches_must_not_disturb(monkeypatch, caplog):
    driver = SchedulerDriver(Limits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, block_size=4, num_blocks=99))
    watched = Watched(driver)
    monkeypatch.setattr(engine_glass, "rows_of", lambda plan: 1 / 0)
    driver.add("a", [1] * 4, max_tokens=5)
    driver.run()
    assert driver.requests["a"].finished
    assert watched.observer.broken and watched.observer.turned() is None
    assert "shows nothing more" in caplog.text


# ---------------------------------------------------------------- a core


@pytest.fixture(scope="module")
def supply(model) -> FakeSupply:
    return FakeSupply(model, 2)


def params(count: int = 12) -> SamplingParams:
    return complete(SamplingParams(max_tokens=count, temperature=0.8, seed=3, ignore_eos=True), eos_token_ids=[2])


@contextlib.asynccontextmanager
async def looked_at(supply: FakeSupply, cores: int = 1):
    """A client whose cores take turns when they are told to, and its hub."""
    client = supply.client(cores)
    hub = GlassHub(client)
    await client.start()
    await soon(lambda: all(slot.core is not None for slot in client._slots))
    for slot in client._slots:
        slot.core.load()
    try:
        yield client, hub
    finally:
        await client.close(0.0)


def events(data: bytes) -> list[tuple[str, dict]]:
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, value = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(value.removeprefix("data: "))))
    return found


async def test_nothing_is_made_while_nobody_looks(supply, monkeypatch):
    async with looked_at(supply) as (client, hub):
        core = client._slots._slots[0].core
        core.core.add(EngineRequest("a", [5, 6, 7], params(40), 1))
        plain = core.core.scheduler
        assert type(plain) is Scheduler and core.loop.glass is None
        sent = []
        core.loop.send = sent.append
        with monkeypatch.context() as patched:
            patched.setattr(engine_glass, "GlassObserver", None)  # whoever made or asked one would fail
            core.loop.turn()
        async with hub.look(0):
            core.loop.turn()
            assert type(core.core.scheduler) is not Scheduler and core.loop.glass is not None
        core.loop.turn()
        assert core.core.scheduler is plain and core.loop.glass is None
        core.loop.turn()
        shown = [message.glimpse is not None for message in sent if isinstance(message, News)]
        assert shown == [False, True, False, False]


async def test_a_viewer_follows_a_core_through_its_death(supply):
    async with looked_at(supply) as (client, hub):
        reader = asyncio.create_task(read(client, "a"))
        await soon(lambda: client.num_requests)
        async with hub.look(0) as viewer:
            first = client._slots._slots[0].core
            names = []
            for _ in range(6):
                first.loop.turn()
                first.loop.glass and first.loop.glass.want_snapshot()
                names += [name for name, _ in events(await viewer.next())]
            assert names[:2] == ["stats", "snapshot"] and "step" in names
            first.process.exit(-9)
            await soon(lambda: client._slots._slots[0].core not in (None, first))
            second = client._slots._slots[0].core
            second.load()
            found = events(await viewer.next())
            cores = [value["state"] for name, value in found if name == "core"]
            assert cores == ["died", "loaded"]
            while not reader.done():
                second.loop.turn()
                await asyncio.sleep(0)
            again = events(await viewer.next())
            again = [name for name, _ in again if name != "stats"]
            assert again[0] == "snapshot", "what a new core shows begins with all that it has"
            assert await reader == 12


async def test_each_core_is_looked_at_apart(supply):
    async with looked_at(supply, cores=2) as (client, hub):
        for slot in client._slots:
            slot.core.core.add(EngineRequest(f"of-{slot.number}", [5, 6, 7], params(), 1))
        async with hub.look(1) as viewer:
            for _ in range(3):
                for slot in client._slots:
                    slot.core.loop.turn()
            shown = dict(events(await viewer.next()))
            assert [request[0] for request in shown["snapshot"]["requests"]] == ["of-1"]
            assert [core["core"] for core in shown["stats"]["cores"]] == [0, 1]
            assert client._slots._slots[0].core.loop.glass is None


async def read(client, name: str) -> int:
    count = 0
    async for news in client.generate(name, [5, 6, 7, 8], params()):
        count += len(news.token_ids)
    return count


async def test_viewers_are_few_and_a_slow_one_gets_a_snapshot_instead_of_a_queue(supply):
    async with looked_at(supply) as (client, hub):
        asked = []
        client.watch = lambda core, on: asked.append((core, on))
        viewers = [hub.open(0) for _ in range(MOST_VIEWERS)]
        with pytest.raises(TooManyViewersError, match="4 look"):
            hub.open(0)
        quick, slow, *_ = viewers
        hub.seen(0, Glimpse(snapshot=b'{"n":0}'))
        for n in range(40):
            assert n or [name for name, _ in events(await quick.next())] == ["stats", "snapshot"]
            hub.seen(0, Glimpse(steps=b'{"steps":[%d],"_":"%s"}' % (n, b"x" * (MOST_BYTES // 20))))
            assert [value["steps"] for name, value in events(await quick.next()) if name == "step"] == [[n]]
            assert slow._size <= MOST_BYTES + MOST_BYTES // 10
        assert not slow.current
        assert "step" not in {name for name, _ in events(b"".join(slow._waiting))}, "of no use behind a gap"
        waiting = asyncio.create_task(slow.next())
        await asyncio.sleep(0)
        hub.seen(0, Glimpse(snapshot=b'{"n":40}', steps=b'{"steps":[40]}'))
        assert [(name, value.get("n")) for name, value in events(await waiting) if name != "stats"] == [("snapshot", 40)]
        await quick.next()
        waiting, half = asyncio.create_task(quick.next()), b'{"_":"%s"}' % (b"x" * (MOST_BYTES // 2))
        await asyncio.sleep(0)
        hub.seen(0, Glimpse(requests=half, steps=half))  # too much before it has even looked
        await asyncio.sleep(0)
        hub.seen(0, Glimpse(snapshot=b'{"n":41}'))
        assert [(name, value.get("n")) for name, value in events(await waiting) if name != "stats"] == [("snapshot", 41)]
        asked.clear()
        for viewer in viewers:
            hub.close(viewer)
        assert asked == [(0, False)], "the last one who looks away switches it off"


async def test_who_looks_does_not_keep_the_server_from_ending(supply):
    async with looked_at(supply) as (client, hub):
        viewer = hub.open(0)
        await viewer.next()
        client.draining = True
        async with asyncio.timeout(20):
            while await viewer.next():
                pass
        hub.close(viewer)


async def test_another_process_looks_through_the_server_s(supply):
    """As several HTTP processes do: each end of the pipe hears what the other says."""
    async with looked_at(supply) as (client, hub):
        ends = SimpleNamespace(desk=None, heard=0)

        def say(message) -> None:
            ends.heard += 1
            ends.desk.heard(message)

        questions = Questions(say)
        ends.desk = GlassDesk(hub, SimpleNamespace(say=questions.answered))
        glass = RemoteGlass(questions)
        async with contextlib.AsyncExitStack() as stack:
            viewers = [await stack.enter_async_context(glass.look(0)) for _ in range(MOST_VIEWERS)]
            with pytest.raises(TooManyViewersError, match="4 look"):
                await stack.enter_async_context(glass.look(0))
            client._slots._slots[0].core.loop.turn()
            names = [name for name, _ in events(await viewers[0].next())]
            assert names == ["stats", "snapshot"]
            asked = ends.heard
            hub.seen(0, Glimpse(steps=b"{}"))
            assert ends.heard == asked, "nothing is sent to who has not asked for it"
            assert [name for name, _ in events(await viewers[0].next())] == ["step"]
            waiting = asyncio.create_task(viewers[0].next())
            await asyncio.sleep(0)
            waiting.cancel()
        assert not hub.viewers
        reader = asyncio.create_task(read(client, "a"))
        await soon(lambda: client.num_requests)
        assert await glass.token_ids("a", 1, 3) == [6, 7] and await glass.token_ids("b", 0, 9) is None
        reader.cancel()
        await glass.look(0).__aenter__()
        ends.desk.close()
        assert not hub.viewers, "a process that dies looks no longer"


# ---------------------------------------------------------------- over HTTP


class StillGlass:
    """Shows one event, and then waits until it is told to end."""

    def __init__(self):
        self.most, self.open, self.over = 1, 0, asyncio.Event()

    @contextlib.asynccontextmanager
    async def look(self, core: int):
        if self.open >= self.most:
            raise TooManyViewersError("1 look")
        self.open += 1
        shown = [b"event: core\ndata: {}\n\n"]

        async def next() -> bytes:
            if not shown:
                await self.over.wait()
            return shown.pop() if shown else b""

        try:
            yield SimpleNamespace(next=next)
        finally:
            self.open -= 1

    async def token_ids(self, request_id: str, start: int, stop: int):
        return list(b"hello world")[start:stop] if request_id == "a" else None


@pytest.fixture
def glass() -> StillGlass:
    return StillGlass()


async def test_the_route_has_keys_limits_and_an_end(glass):
    async with serving(FakeEngine(), glass, api_keys=("secret-key-1",)) as here:
        key = {"authorization": "Bearer secret-key-1"}
        assert (await here.client.get("/glass/events")).status_code == 401
        for core in ("1", "-1", "x", "²"):
            refused = await here.client.get("/glass/events", params={"core": core}, headers=key)
            assert refused.status_code == 400 and "core" in refused.json()["error"]["message"]
        async with here.client.stream("GET", "/glass/events", headers=key) as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            lines = stream.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == ["retry: 1000", "", "event: core"]
            assert glass.open == 1
            refused = await here.client.get("/glass/events", headers=key)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_viewers"
        await soon(lambda: glass.open == 0)
        glass.over.set()
        assert (await here.client.get("/glass/events", headers=key)).text.endswith("event: core\ndata: {}\n\n")
        hidden = await here.client.get("/glass/text", params={"id": "a"}, headers=key)
        assert hidden.status_code == 403 and "--glass-text" in hidden.json()["error"]["message"]


async def test_texts_are_shown_where_they_are_allowed(glass):
    async with serving(FakeEngine(), glass, glass_text=True) as here:
        shown = await here.client.get("/glass/text", params={"id": "a", "start": 6, "stop": 9})
        assert shown.json() == {"text": "wor", "tokens": 3}
        assert (await here.client.get("/glass/text", params={"id": "b"})).status_code == 404


async def test_without_the_page_there_is_no_feed(glass):
    app = create_app(FakeEngine(), ServerConfig(page=False), glass=glass)
    assert not [route for route in app.routes if "glass" in getattr(route, "path", "")]
