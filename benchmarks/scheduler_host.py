"""Host time of a decode step: EngineCore.step() over a device that costs nothing, and the message to the HTTP process.

    python benchmarks/scheduler_host.py [--running 1 8 32 256] [--block-size 16 64] [--json FILE] [--profile]

Everything runs as with captured decode steps on a GPU, but for the mailbox and the replay itself (about 20 us).
All requests decode, as in a full server; blocks fill and enter the prefix index on the way. Wanted: less than 0.2 ms at 256.
`schedule`, `launch` and `settle` are the parts of core.step() (`settle` with the outputs), `message` is what the core's
process spends on sending them, `heard` what the HTTP process spends on decoding and handing them to their streams.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import platform
import pstats
import sys
import time
from statistics import median
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from headrace.engine.client import EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.engine.streams import DrainRate, Observers, Stream
from headrace.engine.wire import FromCore, News
from headrace.sampling.params import SamplingParams
from headrace.scheduler.config import Limits
from headrace.scheduler.scheduler import Scheduler
from headrace.worker.batch_state import BatchState
from headrace.worker.model_runner import ModelRunner

VOCAB = 32000
PROMPT = 64


class FakeGraphs:
    """A captured step that says the same id for every row."""

    def __init__(self, most: int):
        self.sizes = [most]
        self._sent = torch.tensor([[11], [0], [1]], dtype=torch.int32).repeat(1, most)  # ids, failures, rows that count
        self._page = np.zeros((4, most), np.int32)

    def replay(self, numbers: np.ndarray, context: int, tail, related: bool) -> SimpleNamespace:
        count = numbers.shape[1]
        self._page[:, :count] = numbers
        self._page[:, count:] = -1
        return SimpleNamespace(logits=None, sent=self._sent)

    def capture_next(self) -> bool:
        return False


class FakeDecoder:
    """What the prefills before the measured steps need."""

    vocab_size = VOCAB

    def forward(self, batch, kv, wanted) -> torch.Tensor:
        return torch.zeros(batch.num_rows if wanted is None else len(wanted.index), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape[0], VOCAB)


def build(num_running: int, num_output: int, block_size: int) -> EngineCore:
    length = PROMPT + num_output
    scheduler = Scheduler(
        Limits(
            max_num_seqs=num_running, max_num_batched_tokens=max(8192, num_running), max_model_len=length,
            block_size=block_size, num_blocks=num_running * (-(-length // block_size)),
        )
    )  # fmt: skip
    state = BatchState(num_running, length, block_size, torch.device("cpu"))
    runner = ModelRunner(FakeDecoder(), None, state, FakeGraphs(num_running))  # type: ignore[arg-type]
    core = EngineCore(scheduler, runner, vocab_size=VOCAB)
    for i in range(num_running):
        params = SamplingParams(max_tokens=num_output, eos_token_ids=[2], temperature=0.0).resolved({})
        params = msgspec.structs.replace(params, eos_token_ids=[2])
        core.add(EngineRequest(f"cmpl-{i:032x}-0", [(i * 7919 + j) % 30000 + 3 for j in range(PROMPT)], params, seed=i))
    return core


def listener(core: EngineCore) -> EngineClient:
    """The client's side without its process: the streams of all requests."""
    client = EngineClient.__new__(EngineClient)
    requests = [EngineRequest(r.id, r.prompt_ids, r.params, output_ids=[]) for r in core.scheduler.decoding]
    client._streams = {r.id: Stream(r) for r in requests}
    client._leaving, client._drain, client._waiting_tokens, client.observers = {}, DrainRate(), 0, Observers()
    client._probation = SimpleNamespace(active=False)  # type: ignore[assignment]
    return client


def measure(num_running: int, block_size: int, num_steps: int) -> dict[str, float | int]:
    """Medians, in microseconds, of steps in which all decode."""
    core = build(num_running, num_steps + 32, block_size)
    while len(core.scheduler.decoding) < num_running:
        core.step()
    client = listener(core)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromCore)
    parts: dict[str, list[float]] = {name: [] for name in ("step", "schedule", "launch", "settle", "message", "heard")}
    clock, times = time.perf_counter, core.times
    gc.collect()
    for _ in range(num_steps):
        began = clock()
        outputs = core.step()
        stepped = clock()
        data = encoder.encode(News(outputs))
        sent = clock()
        client._take(decoder.decode(data))
        for stream in client._streams.values():  # its reader has taken it
            stream.news = None
        heard = clock()
        values = (stepped - began, times.schedule, times.launch, times.wait + times.settle, sent - stepped, heard - sent)
        for kept, seconds in zip(parts.values(), values, strict=True):
            kept.append(seconds * 1e6)
    return {"running": num_running, "block_size": block_size} | {name: round(median(v), 1) for name, v in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    args = parser.parse_args()
    torch.set_num_threads(1)
    profile = cProfile.Profile() if args.profile else None
    rows = []
    for num_running in args.running:
        for block_size in args.block_size:
            if profile is not None:
                profile.enable()
            row = measure(num_running, block_size, args.steps)
            if profile is not None:
                profile.disable()
            rows.append(row)
            figures = ", ".join(f"{name} {value:6.1f}" for name, value in row.items() if name not in ("running", "block_size"))
            print(f"{num_running:4d} running, blocks of {block_size:2d}: us per {figures}", flush=True)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if args.json:
        record = {
            "benchmark": "scheduler_host", "python": platform.python_version(), "machine": platform.machine(),
            "implementation": sys.implementation.name, "rows": rows,
        }  # fmt: skip
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
