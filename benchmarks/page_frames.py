"""How fast the page draws 256 running requests, in a Chromium here: frames a second, and what a frame takes of its own time.

    python benchmarks/page_frames.py [--seconds 10] [--slots 256] [--blocks 4096]

The feed is a recorded one (tests/played_glass.py), played in real time: 40 steps a second, all slots taken. A screen of 60 Hz
leaves 16.7 ms for a frame. On a machine that is busy otherwise only `drawn_ms` says something, and that is too high.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from browser import expect, opened, started
from fake_engine import FakeEngine
from played_glass import PlayedGlass, Recording
from server_driver import serving

FRAMES = """seconds => new Promise((done) => {
  const times = [], source = document.getElementById("engine").source, before = [source.frames, source.busy];
  const began = performance.now();
  const tick = (now) => {
    times.push(now);
    if (now - began < 1000 * seconds) return requestAnimationFrame(tick);
    const gaps = times.slice(1).map((time, i) => time - times[i]).sort((a, b) => a - b);
    const frames = source.frames - before[0];
    done({
      frames_per_second: gaps.length / seconds, median_gap_ms: gaps[gaps.length >> 1],
      p99_gap_ms: gaps[Math.floor(0.99 * gaps.length)], drawings_per_second: frames / seconds,
      drawn_ms: (source.busy - before[1]) / Math.max(1, frames), drawn_longest_ms: source.longest,
    });
  };
  requestAnimationFrame(tick);
})"""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4096)
    args = parser.parse_args()
    recording = Recording(15.0 + args.seconds, slots=args.slots, blocks=args.blocks)
    async with AsyncExitStack() as stack:
        browser = await stack.enter_async_context(started())
        here = await stack.enter_async_context(serving(FakeEngine(), PlayedGlass(recording, skip=12.0)))
        look = {"viewport": {"width": 1440, "height": 1400}}
        page = await stack.enter_async_context(opened(browser, f"http://127.0.0.1:{here.port}", **look))
        await expect(page.locator("#engine .engine")).to_have_attribute("data-status", "live")
        await asyncio.sleep(1)
        found = await page.evaluate(FRAMES, args.seconds)
        running = await page.get_by_label("Now", exact=True).inner_text()
    shown = {name: round(value, 2) for name, value in found.items()}
    print(json.dumps({**shown, "now": " ".join(running.split()), "cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    asyncio.run(main())
