"""The page's guided scenes, run through in a real browser: on a server where all can be shown, and on one where it explains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from browser import QuietGlass, expect, opened
from fake_engine import FakeEngine
from glass_picture import is_true
from server_driver import ServerProcess, serving, soon, until
from tiny_models import write_tiny

PREFIX, CHUNKS, PREEMPTION = "A prefix that is there already", "A long prompt beside a running answer", "When the cache is full"
SPECULATION, KILLED = "Several tokens in a step", "A core is killed"
SAME = "the same, to the last character"


async def begun(page: Any, title: str) -> None:
    await page.get_by_role("button", name=title).click()
    await expect(page.get_by_role("region", name=f"Scene: {title}")).to_be_visible()


async def step(page: Any, meanwhile: Callable[[], None] = lambda: None) -> dict[str, str]:
    """What the next step measured."""
    outcomes = page.locator(".outcome")
    before = await outcomes.count()
    await page.locator(".scene .row button.primary").click()
    await asyncio.to_thread(meanwhile)
    await expect(outcomes).to_have_count(before + 1, timeout=90_000)
    last = outcomes.nth(before)
    names, values = await last.locator("dt").all_inner_texts(), await last.locator("dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


def count(text: str) -> int:
    return int(text.split()[0].replace(",", ""))


async def test_all_five_on_a_real_engine(browser, tmp_path_factory: pytest.TempPathFactory):
    model, tmp = write_tiny("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=2048), tmp_path_factory.mktemp("tmp")
    options = (
        "--allow-kill-core", "--max-model-len", "1024", "--kv-cache-bytes", str(2_560 * 768), "--speculative-method", "ngram",
        "--max-num-batched-tokens", "128",
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        server = ServerProcess(model, *options, builder="core_builders:braked", tmp=tmp, checks=False)
        stack.enter_context(server).wait_ready()
        page = await stack.enter_async_context(opened(browser, server.url))
        await begun(page, PREFIX)
        assert (await step(page))["found in the cache"] == "0"
        second = await step(page)
        assert count(second["found in the cache"]) > 500, second
        assert count((await step(page))["found in the cache"]) == 0
        await is_true(page, server.url)
        await page.get_by_role("button", name=f"Next scene: {CHUNKS}").click()
        with server.braked():  # the answer lasts until the next button is pressed
            await step(page)
            chunks = await step(page)
        assert count(chunks["pieces, at least"]) >= 4 and count(chunks["tokens of the answer meanwhile"]) >= 2, chunks
        await is_true(page, server.url)
        await page.get_by_role("button", name=f"Next scene: {PREEMPTION}").click()
        crowd = await step(page)
        assert count(crowd["answers that are whole"]) == count(crowd["requests at once"]), crowd
        assert crowd["preempted"] != "0 times", crowd
        assert (await step(page))["the text"] == SAME
        await is_true(page, server.url)
        await page.get_by_role("button", name=f"Next scene: {SPECULATION}").click()
        forced = await step(page)
        assert count(forced["drafts that were right"]) > 5 and "name_of_the_river" in forced["the answer"], forced
        guessed = await step(page)  # whether a random model repeats itself is chance
        assert guessed["method"] == "ngram" and count(guessed["tokens"]) == 160, guessed
        await is_true(page, server.url)
        await page.get_by_role("button", name=f"Next scene: {KILLED}").click()
        whole = await step(page)
        with server.braked() as let_go:  # the answer lasts until its core is dead
            dead = lambda: until(lambda: server.metrics()["headrace:engine_restarts_total"] == 1, 60)  # noqa: E731
            cut = await step(page, lambda: dead() and let_go())
        assert cut["tokens"] == whole["tokens"] == "200" and cut["the text"] == SAME and cut["cores started anew"] == "1", cut
        await is_true(page, server.url)
        await page.get_by_role("button", name="Back to the chat").click()
        await expect(page.get_by_label("Message", exact=True)).to_be_visible()


async def test_what_cannot_be_shown_is_explained(browser):
    engine = FakeEngine(num_cached=0, bursts=1)
    async with serving(engine, QuietGlass()) as here, opened(browser, f"http://127.0.0.1:{here.port}") as page:
        for title, words in ((PREEMPTION, "--kv-cache-bytes"), (KILLED, "--allow-kill-core")):
            await begun(page, title)
            await step(page)
            await expect(page.locator(".outcome code")).to_contain_text(words)
            await expect(page.get_by_role("button", name="Go on", exact=True)).to_have_count(0)
            await page.get_by_role("button", name="Leave the scene").click()
        await begun(page, PREFIX)
        await step(page)
        await step(page)
        await expect(page.locator(".outcome").last).to_contain_text("Nothing was found.")
        await page.get_by_role("button", name="Leave the scene").click()
        await begun(page, CHUNKS)  # left in the middle: its requests end with it
        engine.gate.clear()
        await page.locator(".scene .row button.primary").click()
        await expect(page.get_by_role("button", name="Running")).to_be_visible()
        await soon(lambda: engine.active, 20)
        await page.get_by_role("button", name="Leave the scene").click()
        await soon(lambda: engine.aborted, 20)
        await here.idle()
