"""What it costs to look: tokens per second of many streams while the page's feed is read and while nobody looks, in turn.

    python benchmarks/page_cost.py                     512 streams of a model whose steps take 10 ms and no CPU, one viewer
    python benchmarks/page_cost.py --step-ms 0         a model of no cost at all: the host is all that there is, the worst case
    python benchmarks/page_cost.py --viewers 4         as many as may look
    python benchmarks/page_cost.py --browser           the page itself, in a Chromium here (which takes CPU of its own)
    python benchmarks/page_cost.py --model SmolLM2     the embedded model on the CPU: `headrace serve` without more

Rounds with and without a viewer alternate; of each kind the median counts. On a machine that is busy otherwise the tokens per
second say little, and the CPU seconds of the server's processes for 1,000 tokens, which are printed too, say more. `drawn` is
what the page itself took of its own time: how long a frame of its pictures takes to draw.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from about import write
from http_overhead import Process, http_request, serve_command

VIEWER = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(b"GET /glass/events HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
size = frames = 0
try:
    while data := s.recv(1 << 18):
        size += len(data)
        frames += data.count(b"event: step")
        if size == len(data): print("open", flush=True)
        sys.stdout.flush()
except KeyboardInterrupt:
    pass
print(size, frames, flush=True)
"""
WORDS = ["water", "mill", "wheel", "river", "stone", "meadow", "evening", "light", "grain", "flour"]


def prompt(number: int) -> str:
    """Half of them begin alike."""
    begin = "The miller's daughter tells a long story of the valley. " * 8 if number % 2 else ""
    return begin + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(30)) + f" {number}"


@contextlib.contextmanager
def looking(port: int, viewers: int, browser: bool, seen: dict[str, Any]) -> Iterator[None]:
    """The feed is read until the block has ended; what was read goes to `seen`."""
    if browser:
        with in_browser(port, seen):
            yield
        return
    command = [sys.executable, "-c", VIEWER, str(port)]
    found = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(viewers)]
    for process in found:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    for process in found:
        process.send_signal(2)
        size, frames = map(int, process.communicate()[0].split())
        seen.setdefault("bytes_per_second", []).append(size / seconds)
        seen.setdefault("frames_per_second", []).append(frames / seconds)


@contextlib.contextmanager
def in_browser(port: int, seen: dict[str, Any]) -> Iterator[None]:
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from browser import browser_path

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector(".engine[data-status=live]")
        yield
        drawn = "(() => { const s = document.getElementById('engine').source; return [s.frames, s.busy, s.longest]; })()"
        frames, busy, longest = page.evaluate(drawn)
        seen.setdefault("drawn_ms", []).append(busy / max(1, frames))
        seen.setdefault("drawn_longest_ms", []).append(longest)
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--each", type=int, default=256, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind")
    parser.add_argument("--step-ms", type=float, default=10.0, help="that a step of the model takes, of no CPU")
    parser.add_argument("--viewers", type=int, default=1)
    parser.add_argument("--browser", action="store_true", help="the page instead of readers of its feed")
    parser.add_argument("--model", help="a real one (SmolLM2: the embedded one)")
    parser.add_argument("--out", help="write the results to this JSON file")
    args = parser.parse_args()
    os.environ["FAKE_STEP_MS"] = str(args.step_ms)
    options = ["--max-num-seqs", str(args.streams), "--max-model-len", "2048", "--served-model-name", "m"]
    if args.model not in (None, "SmolLM2"):
        options.append(args.model)
    common = {"model": "m", "stream": True, "ignore_eos": True, "temperature": 0.0, "max_tokens": args.each}
    requests = [http_request("/v1/completions", {**common, "prompt": prompt(i)}) for i in range(args.streams)]
    rounds: dict[str, list[dict[str, Any]]] = {"closed": [], "open": []}
    seen: dict[str, Any] = {}
    with Process(serve_command(None if args.model else "fake_model:build_fake", *options), "ready after") as server:
        server.measure(requests[: max(1, args.streams // 8)], args.each)
        for _ in range(args.rounds):
            for kind, found in rounds.items():
                watched = looking(server.port, args.viewers, args.browser, seen) if kind == "open" else contextlib.nullcontext()
                with watched, ThreadPoolExecutor(1) as thread:  # the browser's driver has the loop of this one
                    result = thread.submit(server.measure, requests, args.streams * args.each).result()
                result["cpu_per_1000_tokens"] = result["http_cpu_per_1000_tokens"] + result["core_cpu_per_1000_tokens"]
                found.append(result)
                rate, cpu = result["tokens_per_second"], result["cpu_per_1000_tokens"]
                print(f"{kind:6s} {rate:9.0f} tok/s  {cpu:.4f} CPU s/1000", flush=True)
    median = {
        name: {kind: statistics.median(run[name] for run in found) for kind, found in rounds.items()}
        for name in ("tokens_per_second", "cpu_per_1000_tokens", "core_cpu_per_1000_tokens", "http_cpu_per_1000_tokens")
    }
    means = {name: statistics.fmean(values) for name, values in seen.items()}
    cost = 1 - median["tokens_per_second"]["open"] / median["tokens_per_second"]["closed"]
    cpu = median["cpu_per_1000_tokens"]["open"] / median["cpu_per_1000_tokens"]["closed"] - 1
    print(f"{args.streams} streams, looked at: {cost:+.1%} of the tokens per second lost, {cpu:+.1%} CPU; {means}")
    if args.out:
        write(args.out, {"options": vars(args), "median": median, "lost": cost, "seen": means})
    return 0


if __name__ == "__main__":
    sys.exit(main())
