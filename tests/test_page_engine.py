"""The page's engine in a real browser: true to the core that it shows, in words and in drawings; it comes back; keyboard, phone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from typing import Any

import pytest

from browser import expect, opened
from fake_core import FakeSupply
from fake_engine import FakeEngine
from headrace.engine.messages import EngineRequest, Outputs
from played_glass import PlayedGlass, Recording
from server_driver import ServerProcess, command_of, quiet_port, serving, soon
from test_glass import looked_at, params

HIGH = {"width": 1440, "height": 1400}  # drawings that cannot be seen are not drawn
COLOURED = """() => {
  const squares = document.getElementById("engine").source.drawings.map((one) => one.draws).find((draws) => draws.blockAt);
  return squares.drawn.filter((look) => (look & 3) >= 2).length;
}"""
BARS = """() => {
  const icicle = document.getElementById("engine").source.drawings.map((one) => one.draws).find((draws) => draws.bars);
  return [...icicle.bars.values()].reduce((sum, bar) => sum + bar.run.blocks.length, 0);
}"""


DECODING = """() => {
  const requests = [...document.getElementById("engine").source.feed.view.requests.values()];
  return requests.filter((one) => one.state === "running" && one.first).map((one) => one.scheduled);
}"""
KNOWN = """() => {
  const state = document.getElementById("engine").source.feed.view;
  const requests = [...state.requests.values()];
  return {
    tables: Object.fromEntries([...state.tables].map(([slot, blocks]) => [slot, blocks])),
    waiting: requests.filter((one) => one.state === "waiting").map((one) => one.id).sort(),
    scheduled: Object.fromEntries(requests.filter((one) => one.state === "running").map((one) => [one.id, one.scheduled])),
    nodes: Object.fromEntries([...state.above].map((above, block) => [block, above]).filter(([, above]) => above > -2)),
  };
}"""


def known(picture: Any) -> dict[str, Any]:
    """The same of a Picture."""
    running = [picture.slots[slot] for slot in picture.tables if picture.slots[slot] not in picture.ended]
    running = [name for name in running if name not in picture.waiting]
    return {
        "tables": {str(slot): blocks for slot, blocks in picture.tables.items()},
        "waiting": sorted(picture.waiting),
        "scheduled": {name: picture.scheduled[name] for name in running},
        "nodes": {str(block): above for block, above in picture.nodes.items()},
    }


@pytest.fixture(scope="module")
def supply(model) -> FakeSupply:
    return FakeSupply(model, 2)


@pytest.fixture(scope="module")
def recording() -> Recording:
    found = Recording(8.0, slots=32, blocks=512, greedy=True)
    assert found.picture().preempted, "preemptions are a part of what is shown"
    return found


def state(page: Any) -> Any:
    return page.locator("#engine .engine")


def number(page: Any, name: str) -> Any:
    return page.locator(f"#engine [data-count={name}]")


class Shown:
    """A core that moves when it is told to, and the page that shows it."""

    def __init__(self, page: Any, client: Any, here: Any):
        self.page, self.client, self.here = page, client, here

    @property
    def core(self) -> Any:
        return self.client._slots._slots[0].core

    async def turn(self, count: int) -> None:
        for _ in range(count):
            self.core.loop.turn()
            await asyncio.sleep(0)

    async def is_true(self) -> int:
        """Whether the page shows what there is, by its drawings, its words and /metrics; the blocks in use."""
        loop, scheduler = self.core.loop, self.core.core.scheduler
        loop.glass._due = 0.0
        loop._say(Outputs(), loop._snapshot())
        in_use = sum(map(bool, scheduler.pool.refs))
        await expect(state(self.page)).to_have_attribute("data-step", str(scheduler.num_steps))
        await expect(number(self.page, "in-use")).to_have_text(str(in_use))
        await expect(number(self.page, "nodes")).to_have_text(str(scheduler.tree.num_nodes))
        await expect(number(self.page, "cached")).to_have_text(str(scheduler.tree.num_cached))
        await expect(number(self.page, "free")).to_have_text(str(scheduler.pool.num_free))
        label = f"{in_use} of {scheduler.pool.num_blocks} blocks in use, {sum(n > 1 for n in scheduler.pool.refs)} shared"
        await expect(self.page.get_by_role("img", name=label)).to_be_visible()
        async with asyncio.timeout(20):
            while await self.page.evaluate(COLOURED) != in_use or await self.page.evaluate(BARS) != scheduler.tree.num_nodes:
                await asyncio.sleep(0.05)
        metrics = (await self.here.client.get("/metrics")).text
        usage = next(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("headrace:kv_cache_usage_perc"))
        assert round(usage * scheduler.pool.num_blocks) == in_use
        return in_use


async def test_the_picture_is_true_through_hits_waiting_and_the_core_s_death(browser, supply):
    async with AsyncExitStack() as stack:
        client, hub = await stack.enter_async_context(looked_at(supply))
        here = await stack.enter_async_context(serving(client, hub))
        page = await stack.enter_async_context(opened(browser, f"http://127.0.0.1:{here.port}", viewport=HIGH))
        shown = Shown(page, client, here)
        await soon(lambda: hub.viewers, 20)
        await shown.turn(1)
        await expect(state(page)).to_have_attribute("data-status", "live")
        assert await shown.is_true() == 0
        prompt = [5 + i % 90 for i in range(20)]
        readers = [asyncio.create_task(read(client, f"chatcmpl-{name}", prompt + [i])) for i, name in enumerate("abcdef")]
        await soon(lambda: client.num_requests == 6)
        await shown.turn(4)
        assert await shown.is_true() > 0
        queue = page.get_by_role("list", name="Waiting requests").get_by_role("button")
        await expect(queue).to_have_count(2)
        await expect(queue.first).to_contain_text("all 4 slots are taken")
        await expect(queue.nth(1)).to_contain_text("behind one other")
        await expect(page.get_by_label("Now", exact=True)).to_contain_text("4 of 4 slots")
        await shown.turn(9)
        assert await shown.is_true() > 0
        assert sum(n > 1 for n in shown.core.core.scheduler.pool.refs), "a shared prefix is part of the picture"
        dead = shown.core
        dead.process.exit(-9)
        await expect(page.locator("#engine .how")).to_contain_text("core 0 died")
        await expect(state(page)).to_have_attribute("data-core", "died")
        await soon(lambda: shown.core not in (None, dead))
        shown.core.load()
        await shown.turn(3)
        await expect(state(page)).to_have_attribute("data-status", "live")
        assert await shown.is_true() > 0
        while not all(reader.done() for reader in readers):
            await shown.turn(1)
        await shown.turn(2)
        assert await shown.is_true() == 0
        assert [await reader for reader in readers] == [24] * 6
        await expect(page.get_by_text("Nobody waits")).to_be_visible()


async def test_one_of_several_cores_is_looked_at(browser, supply):
    async with AsyncExitStack() as stack:
        client, hub = await stack.enter_async_context(looked_at(supply, cores=2))
        here = await stack.enter_async_context(serving(client, hub))
        page = await stack.enter_async_context(opened(browser, f"http://127.0.0.1:{here.port}", viewport=HIGH))
        cores = [slot.core for slot in client._slots]
        cores[1].core.add(EngineRequest("in-1", [5 + i % 90 for i in range(20)], params(24), 3))
        await soon(lambda: hub.viewers, 20)
        cores[0].loop.turn()
        await expect(number(page, "in-use")).to_have_text("0")
        await page.get_by_role("combobox", name="Core").select_option("core 1")
        await soon(lambda: [viewer.core for viewer in hub.viewers] == [1], 20)
        for _ in range(3):
            cores[1].loop.turn()
        cores[0].loop.turn()
        await expect(number(page, "in-use")).to_have_text("3")
        assert cores[0].loop.glass is None, "nobody looks at it any more"


async def read(client: Any, name: str, prompt: list[int]) -> int:
    count = 0
    async for news in client.generate(name, prompt, params(24)):
        count += len(news.token_ids)
    return count


async def test_standing_still_going_back_and_picking_by_keyboard(browser, recording):
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(serving(FakeEngine(), PlayedGlass(recording, skip=60.0)))
        page = await stack.enter_async_context(opened(browser, f"http://127.0.0.1:{here.port}", viewport=HIGH))
        engine = state(page)
        last = recording.picture().n
        await expect(engine).to_have_attribute("data-step", str(last))
        assert await page.evaluate(KNOWN) == known(recording.picture())
        for back in (7, 120, 250):
            then = recording.picture(last - back)  # the end of the frame with this step
            await page.evaluate(f"document.getElementById('engine').source.feed.seek({then.n})")
            assert await page.evaluate(KNOWN) == known(then), "what was, as it was"
        await page.get_by_role("button", name="Go on live").press("Enter")
        await expect(engine).to_have_attribute("data-mode", "live")
        await page.get_by_role("button", name="One step back", exact=True).press("Enter")
        await expect(engine).to_have_attribute("data-step", str(last - 1))
        await expect(engine).to_have_attribute("data-mode", "paused")
        await page.get_by_role("button", name="One step forward", exact=True).press("Enter")
        await expect(engine).to_have_attribute("data-step", str(last))
        slider = page.get_by_role("slider", name="Step")
        await slider.press("Home")
        await expect(engine).not_to_have_attribute("data-step", str(last))
        first = int(await engine.get_attribute("data-step"))
        assert first <= 4
        await page.get_by_role("button", name="Slow motion").press("Enter")
        await expect(engine).to_have_attribute("data-mode", "slow")
        await expect(engine).not_to_have_attribute("data-step", str(first))
        await page.get_by_role("button", name="Go on live").press("Enter")
        await expect(engine).to_have_attribute("data-step", str(last))
        decoding = await page.evaluate(DECODING)
        least = (2e9 + 1e5 * sum(decoding)) / 2e11
        label = f"the limit of reading {1000 * least:.0f} ms" if least >= 0.00995 else f"the limit of reading {1000 * least:.1f} ms"
        await expect(page.get_by_role("img", name=label)).to_be_attached()
        await expect(page.get_by_role("img", name="out at the limit of reading")).to_be_attached()
        await expect(page.locator(".stack b")).to_have_count(1)
        await page.get_by_role("img", name="KV blocks").focus()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowDown")
        details = page.get_by_role("status").filter(has_text="Block ")
        await expect(details).to_contain_text("in the prefix index")
        await page.keyboard.press("Escape")
        await expect(details).to_have_count(0)
        card = page.get_by_role("list", name="Waiting requests").get_by_role("button").first
        await card.press("Enter")
        await expect(card).to_have_attribute("aria-pressed", "true")
        await expect(page.get_by_role("img", name="Two counters of a request: 0 of")).to_be_attached()
        running = page.get_by_role("combobox", name="Request")
        await running.select_option(index=3)
        await expect(page.get_by_role("img", name="Two counters of a request")).not_to_have_attribute("aria-label", "0 of")
        some = next(iter(recording.picture().slots.values()))
        await page.evaluate(f"import('/page/engine.js').then((engine) => engine.showRequest('{some[:26]}'))")
        await expect(running).to_have_value(some)
        async with page.expect_download() as saving:
            await page.get_by_role("button", name="Save as Perfetto").press("Enter")
        with open(await (await saving.value).path()) as file:
            events = json.load(file)["traceEvents"]
        assert {event["ph"] for event in events} >= {"M", "X", "b", "e"}
        assert sum(event["ph"] == "X" and "seqs" in event["name"] for event in events) > 100


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_each_panel_says_what_is_to_be_seen_on_a_phone_too(browser, recording, scheme):
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(serving(FakeEngine(), PlayedGlass(recording, skip=60.0)))
        page = await stack.enter_async_context(
            opened(browser, f"http://127.0.0.1:{here.port}", viewport={"width": 390, "height": 844}, color_scheme=scheme)
        )
        await page.get_by_role("tab", name="Engine").click()
        await expect(number(page, "nodes")).to_have_text(f"{len(recording.picture().nodes):,}")
        titles = await page.locator("#engine h3").all_inner_texts()
        assert titles == ["Queue", "Steps", "KV blocks", "Prefix index", "Two counters", "Figures", "Timeline"]
        anchors = []
        for title in titles:
            region = page.get_by_role("region", name=title, exact=True)
            await region.get_by_role("button", name=f"What am I seeing? {title}").click()
            words = region.locator(".explain")
            await expect(words).to_be_visible()
            assert len((await words.inner_text()).split()) <= 60 + 4  # and "The tour tells more"
            anchors.append(await words.get_by_role("link").get_attribute("href"))
        wide = "document.getElementById('engine').scrollWidth <= document.getElementById('engine').clientWidth"
        assert await page.evaluate(wide), "nothing sticks out sideways"
        if scheme == "dark":
            await page.goto(f"http://127.0.0.1:{here.port}/{anchors[0]}")
            await expect(page.get_by_role("heading", name="A tour")).to_be_visible()
            for anchor in anchors:
                await expect(page.locator(f"[id='{anchor.partition('#')[2]}']")).to_have_count(1)


async def test_it_comes_back_after_the_core_and_the_server_are_killed(browser, model):
    options = ("--port", str(quiet_port()), "--api-processes", "2", "--max-model-len", "64", "--no-standby")
    async with AsyncExitStack() as stack:
        server = stack.enter_context(ServerProcess(model, *options))
        server.wait_ready()
        page = await stack.enter_async_context(opened(browser, server.url, expected=("ERR_", "503")))
        engine = state(page)
        await expect(engine).to_have_attribute("data-status", "live")

        def complete() -> None:
            body = {"model": model, "prompt": list(range(5, 25)), "max_tokens": 20, "ignore_eos": True}
            assert server.http.post("/v1/completions", json=body).status_code == 200

        await asyncio.to_thread(complete)
        await expect(number(page, "cached")).to_have_text("2")
        await expect(number(page, "in-use")).to_have_text("0")
        core = next(pid for pid in server.children() if b"headrace.engine.process" in command_of(pid))
        os.kill(core, signal.SIGKILL)
        await expect(number(page, "cached")).to_have_text("0", timeout=60_000)
        await expect(engine).to_have_attribute("data-status", "live")
        await asyncio.to_thread(server.kill)
        await expect(engine).to_have_attribute("data-status", "lost")
        server = stack.enter_context(ServerProcess(model, *options))
        server.wait_ready()
        await expect(engine).to_have_attribute("data-status", "live")
        await asyncio.to_thread(complete)
        await expect(number(page, "cached")).to_have_text("2")
