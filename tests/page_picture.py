"""The picture of the page in the README: `python tests/page_picture.py [PATH]` takes it, of a server of the embedded model.

A chat is answered while others of several lengths, some of which begin alike, come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import httpx

from browser import expect, opened, started
from headrace.model.embedded import embedded_model_path
from server_driver import ServerProcess

PICTURE = Path(__file__).parents[1] / "docs" / "page.png"
QUESTION = "Tell a short story of a miller and his river."
STORY = "The miller opens the gate, the water falls on the wheel, and the wheel turns the stones. "


async def others(url: str, count: int, tokens: int) -> None:
    """Requests of everybody else."""

    async def one(http: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(0.6 * number)  # they come one after the other
        beginning = STORY * 6 if number % 3 else ""
        body = {"prompt": f"{beginning}{number}. {STORY * (1 + number * 5 % 9)}", "max_tokens": tokens, "ignore_eos": True}
        await http.post("/v1/completions", json=body)

    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        await asyncio.gather(*(one(http, number) for number in range(count)))


async def take(browser: Any, url: str, path: Path, *, count: int = 12, tokens: int = 140, length: int = 60) -> None:
    """In the midst of an answer, while somebody's long prompt is computed beside it."""
    look = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark", "reduced_motion": "reduce"}
    async with opened(browser, url, **look) as page:
        await page.get_by_label("System message and sampling").click()
        await page.get_by_label("Temperature").fill("0")
        await page.keyboard.press("Escape")
        crowd = asyncio.create_task(others(url, count, tokens))
        try:
            await page.get_by_role("button", name=QUESTION).click()
            await expect(page.locator(".figures")).to_have_text(re.compile(r"([4-9]\d|\d{3,}) out"), timeout=60_000)
            async with httpx.AsyncClient(base_url=url, timeout=300) as http:
                await page.evaluate("document.activeElement.blur()")
                late = asyncio.create_task(http.post("/v1/completions", json={"prompt": "At last. " + STORY * length, "max_tokens": 4}))
                with contextlib.suppress(AssertionError):  # a fast machine is past it
                    await expect(page.get_by_role("region", name="Engine")).to_contain_text(re.compile("[1-9] prompt chunk"), timeout=2000)
                await page.screenshot(path=path)
                late.cancel()
        finally:
            crowd.cancel()


async def main(path: Path) -> None:
    options = (
        "--served-model-name", "SmolLM2-135M-Instruct", "--max-model-len", "2048", "--kv-cache-bytes", "200000000",
        "--max-num-batched-tokens", "256", "--max-num-seqs", "24",
    )  # fmt: skip
    with ServerProcess(embedded_model_path(), *options, checks=False) as server:
        server.wait_ready()
        async with started() as browser:
            await take(browser, server.url, path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE))
