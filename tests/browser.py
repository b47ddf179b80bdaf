"""A real browser for the page's tests: found, started once for a file, and watched. What a page may never do is looked at in every
test: an error in its console, an exception, a request to another origin.

HEADRACE_TEST_BROWSER names a Chromium. Where there is none the tests are skipped, unless HEADRACE_TEST_BROWSER_REQUIRED is set (as in CI).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest

try:
    from playwright.async_api import async_playwright, expect
except ImportError:
    async_playwright = expect = None  # type: ignore

__all__ = ["QuietGlass", "browser_path", "expect", "opened", "started"]
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 20_000  # ms for anything to appear: machines are busy


def browser_path() -> str:
    """Of a Chromium. Skips, or fails where there must be one."""
    path = os.environ.get("HEADRACE_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _without("no Chromium; `make browser` installs one, HEADRACE_TEST_BROWSER names one")
    if async_playwright is None:
        _without("no playwright: pip install playwright (its own browsers are not needed)")
    return path


def _without(why: str) -> NoReturn:
    if os.environ.get("HEADRACE_TEST_BROWSER_REQUIRED"):
        pytest.fail(why)
    pytest.skip(why)


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Any]:
    path = browser_path()
    expect.set_options(timeout=PATIENCE)
    async with async_playwright() as playwright:
        # root has no sandbox
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        await browser.close()


class QuietGlass:
    """A `Glass` of an engine in which nothing happens."""

    @contextlib.asynccontextmanager
    async def look(self, core: int) -> AsyncIterator[QuietGlass]:
        yield self

    async def next(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


class Watched:
    """A page, and all that it did which it should not have. `expected`: parts of console messages that are right in this test."""

    def __init__(self, page: Any, origin: str, expected: tuple[str, ...] = ()):
        self.page, self.origin, self.expected = page, origin, expected
        self.faults: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", self._request)
        page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(part in message.text for part in self.expected):
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("data", "blob") and f"{address.scheme}://{address.netloc}" != self.origin:
            self.faults.append(f"request off the origin: {request.url}")

    def check(self) -> None:
        assert not self.faults, self.faults


@contextlib.asynccontextmanager
async def opened(browser: Any, origin: str, *, expected: tuple[str, ...] = (), **options: Any) -> AsyncIterator[Any]:
    """The page of the server at `origin`, with a storage of its own; `options` are a browser context's."""
    context = await browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(PATIENCE)
    page = await context.new_page()
    watched = Watched(page, origin, expected)
    try:
        await page.goto(f"{origin}/")
        yield page
        watched.check()
    finally:
        await context.close()
