"""Host time of a decode step: EngineCore.step() over a device that costs nothing, and the message to the HTTP process.

    python benchmarks/scheduler_host.py [--running 1 8 32 256] [--block-size 16 64] [--json FILE] [--profile]
    python benchmarks/scheduler_host.py --running 1 8 32 --block-size 16 --cpu greedy temperature top-p

Without --cpu everything runs as with captured decode steps on a GPU, but for the mailbox and the replay itself (about 20 us).
With it as on a CPU, with a forward that returns the same logits [R, 49152] at once: rows are prepared and sampled for real.
All requests decode, as in a full server; blocks fill and enter the prefix index on the way. Wanted: less than 0.2 ms at 256,
on a CPU less than 0.2 ms at 1.
`schedule`, `launch` (`forward` and `sample` on a CPU) and `settle` are the parts of core.step() (`settle` with the outputs),
`message` is what the core's process spends on sending them, `heard` what the HTTP process spends on decoding and handing them
to their streams.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from itertools import product
from statistics import median
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from about import write
from headrace.cache.state_pool import NoStates
from headrace.engine.client import EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.engine.observers import DrainRate, Observers
from headrace.engine.streams import Streams
from headrace.engine.wire import FromCore, News
from headrace.sampling.params import SamplingParams
from headrace.scheduler.config import Limits
from headrace.scheduler.scheduler import Scheduler
from headrace.worker.batch_state import BatchState
from headrace.worker.model_runner import ModelRunner

VOCAB = 32000
CPU_VOCAB = 49152  # SmolLM2's
PROMPT = 64
SLOT = SimpleNamespace(number=0, began=lambda stream: None)
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top-p": {"temperature": 0.6, "top_p": 0.95},
}


class FakeGraphs:
    """A captured step that says the same id for every row."""

    def __init__(self, most: int):
        self.sizes = [most]
        self._sent = torch.tensor([[11], [0], [1]], dtype=torch.int32).repeat(1, most)  # ids, failures, rows that count
        self._page = np.zeros((4, most), np.int32)

    def key_of(self, plan, tail) -> None:
        pass

    def replay(self, numbers: np.ndarray, key: None) -> SimpleNamespace:
        count = numbers.shape[1]
        self._page[:, :count] = numbers
        self._page[:, count:] = -1
        return SimpleNamespace(logits=None, sent=self._sent)

    def capture_next(self) -> bool:
        return False


class FakeDecoder:
    """Costs nothing. Its logits are as wide as a model's: the likeliest ids have some tenths of the probability."""

    vocab = choose = None

    def __init__(self, vocab_size: int, most: int):
        self.vocab_size = vocab_size
        self._hidden = torch.zeros(most * PROMPT, 1)
        self._logits = 2.0 * torch.randn(most, vocab_size, generator=torch.Generator().manual_seed(0))
        self._logits[:, 100:105] = torch.tensor([16.0, 15.5, 15.0, 14.0, 13.0])

    def forward(self, batch, kv, wanted) -> torch.Tensor:
        return self._hidden[: batch.num_rows if wanted is None else len(wanted.index)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]

    def decode(self, batch, kv) -> torch.Tensor:
        return self._logits[: batch.num_rows]


class Parts:
    """The time that a runner takes for a step's two halves."""

    def __init__(self, runner: ModelRunner):
        self.forward, self.sample = 0.0, 0.0
        forward, sample = runner.forward, runner.sample

        def timed_forward(*args, **options):
            began = time.perf_counter()
            pending = forward(*args, **options)
            self.forward = time.perf_counter() - began
            return pending

        def timed_sample(*args):
            began = time.perf_counter()
            handle = sample(*args)
            self.sample = time.perf_counter() - began
            return handle

        runner.forward, runner.sample = timed_forward, timed_sample  # type: ignore[method-assign]


def build(num_running: int, num_output: int, block_size: int, sampling: str | None) -> EngineCore:
    length = PROMPT + num_output
    scheduler = Scheduler(
        Limits(
            max_num_seqs=num_running, max_num_batched_tokens=max(8192, num_running), max_model_len=length,
            block_size=block_size, num_blocks=num_running * (-(-length // block_size)),
        )
    )  # fmt: skip
    state = BatchState(num_running, length, block_size, torch.device("cpu"))
    vocab_size = VOCAB if sampling is None else CPU_VOCAB
    graphs = FakeGraphs(num_running) if sampling is None else None
    kv = SimpleNamespace(states=NoStates())
    runner = ModelRunner(FakeDecoder(vocab_size, num_running), kv, state, graphs)  # type: ignore[arg-type]
    core = EngineCore(scheduler, runner, vocab_size=vocab_size)
    for i in range(num_running):
        params = SamplingParams(max_tokens=num_output, **SAMPLING[sampling or "greedy"]).resolved({})
        params = msgspec.structs.replace(params, eos_token_ids=[2])
        core.add(EngineRequest(f"cmpl-{i:032x}-0", [(i * 7919 + j) % 30000 + 3 for j in range(PROMPT)], params, seed=i))
    return core


def listener(core: EngineCore) -> EngineClient:
    """The client's side without its process: the streams of all requests."""
    client = EngineClient.__new__(EngineClient)
    requests = [EngineRequest(r.id, r.prompt_ids, r.params, output_ids=[]) for r in core.scheduler.decoding]
    client._drain, client.observers = DrainRate(), Observers()
    client._streams = Streams(client.observers.ended)
    for request in requests:
        client._streams.add(request).slot = SLOT
    return client


def measure(num_running: int, block_size: int, num_steps: int, sampling: str | None) -> dict[str, float | int | str]:
    """Medians, in microseconds, of steps in which all decode."""
    core = build(num_running, num_steps + 32, block_size, sampling)
    halves = Parts(core.runner)
    while len(core.scheduler.decoding) < num_running:
        core.step()
    client = listener(core)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromCore)
    names = ["step", "schedule", "launch", "settle", "message", "heard"]
    if sampling is not None:
        names += ["forward", "sample"]
    parts: dict[str, list[float]] = {name: [] for name in names}
    clock, times = time.perf_counter, core.times
    gc.collect()
    for _ in range(num_steps):
        began = clock()
        outputs = core.step()
        stepped = clock()
        data = encoder.encode(News(outputs))
        sent = clock()
        client.take(SLOT, decoder.decode(data))
        for stream in client._streams.live.values():  # its reader has taken it
            stream.news = None
        heard = clock()
        values = [stepped - began, times.schedule, times.launch, times.wait + times.settle, sent - stepped, heard - sent]
        if sampling is not None:
            values += [halves.forward, halves.sample]
        for kept, seconds in zip(parts.values(), values, strict=True):
            kept.append(seconds * 1e6)
    figures = {name: round(median(v), 1) for name, v in parts.items()}
    return {"running": num_running, "block_size": block_size, "sampling": sampling or "captured"} | figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--cpu", nargs="+", choices=SAMPLING, help="as on a CPU, so sampled; without: as captured on a GPU")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    args = parser.parse_args()
    torch.set_num_threads(1)
    profile = cProfile.Profile() if args.profile else None
    rows = []
    for num_running, block_size, sampling in product(args.running, args.block_size, args.cpu or [None]):
        if profile is not None:
            profile.enable()
        row = measure(num_running, block_size, args.steps, sampling)
        if profile is not None:
            profile.disable()
        rows.append(row)
        figures = ", ".join(f"{name} {value:6.1f}" for name, value in row.items() if isinstance(value, float))
        print(f"{num_running:4d} running, blocks of {block_size:2d}, {row['sampling']}: us per {figures}", flush=True)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if args.json:
        write(args.json, {"benchmark": "scheduler_host", "rows": rows})


if __name__ == "__main__":
    main()
