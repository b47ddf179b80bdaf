"""The all-reduce of decode steps on the cards of one host, beside NCCL's and torch's own, and beside what the links allow.

    python benchmarks/all_reduce.py [--ranks 2] [--rows 1,8,32,64,256] [--hidden 1024,4096,5120] [--json FILE] [--one-card]

bfloat16, each way 64 times in a captured graph, microseconds for one, of the slowest card:

    push         kernels/all_reduce.py, the sum alone
    push+norm    the same with residual and RMSNorm, from the float32 products of a fused decode step
    row_sum      of few rows by many programs, the norm left to the next product, as fused decode steps have it
    nccl         NCCL's all-reduce alone;  nccl+norm: and Headrace's kernel for residual and norm
    torch        torch.ops.symm_mem.one_shot_all_reduce of a buffer that all see

The limit is what a card sends at the rate of a large copy to its neighbour, measured here, after the time of the smallest
message there is (one row of 8 numbers). First every way is checked against parts that are gathered and added up in order.
--one-card: both ranks are streams of one card, without NCCL and without links; what is left is what the kernel itself takes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from about import write
from headrace.kernels.all_reduce import (
    PHASES,
    PushSpace,
    RowPlace,
    all_reduce,
    all_reduce_norm,
    ordered_sum,
    row_sum,
    row_sum_tiles,
    slots_shape,
    wire,
)
from headrace.kernels.norm import add_rms_norm
from headrace.model.shard import Shard

CALLS, REPLAYS = 64, 15
BF16 = torch.bfloat16


@dataclass
class Case:
    """What one rank has for one size; the calls write into memory of their own."""

    part: Tensor  # [rows, hidden]
    slabs: Tensor  # [1, rows, hidden] float32
    residual: Tensor  # float32
    stream: Tensor  # bfloat16: a residual stream as the general decoder has it
    norm: Tensor
    normed: Tensor

    @classmethod
    def draw(cls, rows: int, hidden: int, device: torch.device, seed: int) -> Case:
        generator = torch.Generator(device=device).manual_seed(seed)
        slabs = torch.randn((1, rows, hidden), generator=generator, device=device)
        common = torch.Generator(device=device).manual_seed(0)
        residual = torch.randn((rows, hidden), generator=common, device=device)
        norm = torch.randn(hidden, generator=common, device=device).to(BF16)
        return cls(slabs[0].to(BF16), slabs, residual, residual.to(BF16), norm, torch.empty_like(slabs[0], dtype=BF16))

    def push_norm(self, space: PushSpace) -> None:
        all_reduce_norm(self.slabs, space, self.residual, self.normed, self.norm, residual=self.residual, eps=1e-6)

    def row_sums(self, space: PushSpace) -> Callable[[], None]:
        """A call is one, the two places in turn."""
        phases = itertools.cycle(range(PHASES))
        sumsq = torch.empty((len(self.part), row_sum_tiles(self.part.shape[1])), device=self.part.device)
        return lambda: row_sum(RowPlace(space, next(phases)), self.residual, self.normed, sumsq, self.norm, parts=self.slabs)


def capture(call: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(CALLS):
                call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph


def graph_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one call, the median over replays."""
    pairs = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(1e3 * a.elapsed_time(b) / CALLS for a, b in pairs)


# ------------------------------------------------------------------------------------------------ a process a card


class Rank:
    def __init__(self, rank: int, size: int, store: str, most_rows: int, widest: int):
        from headrace.tensor_parallel.cards import CardGroup

        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.group = CardGroup(Shard(rank, size), self.device, dist.FileStore(store, size))
        self.group.prepare(most_rows, widest, BF16)
        self.rank, self.size, self.named = rank, size, None

    def slowest(self, value: float) -> float:
        return float(self.group.gather(torch.tensor([value], device=self.device)).max())

    def space(self, rows: int, hidden: int) -> PushSpace:
        space = self.group.push_space(rows, hidden, BF16)
        assert space is not None, "the cards do not see each other's memory"
        return space

    def link_bytes_per_second(self) -> float:
        """Of a large copy to the next card, while every card does the same."""
        if not self.group.sees_all:
            return float("nan")
        there = torch.empty(1 << 30, dtype=torch.uint8, device=torch.device("cuda", (self.rank + 1) % self.size))
        here = torch.empty(1 << 30, dtype=torch.uint8, device=self.device).random_()
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.slowest(0.0)
            begin.record()
            there.copy_(here)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return len(here) / self.slowest(statistics.median(times))

    def check(self, rows: int, hidden: int) -> bool:
        """Fresh numbers again and again, against the ordered sum, bit for bit."""
        good = True
        for seed in range(5):
            case = Case.draw(rows, hidden, self.device, 100 * seed + self.rank)
            want = ordered_sum(self.group.gather(case.part))
            good &= torch.equal(all_reduce(case.part, self.space(rows, hidden)), want)
            good &= torch.equal(self.group._sum_by_nccl(case.part.clone()), want)
            total = case.residual + want_float(self.group.gather(case.part))
            case.push_norm(self.space(rows, hidden))
            good &= torch.equal(case.residual, total)
            normed = torch.nn.functional.rms_norm(total, (hidden,), case.norm.float(), 1e-6)
            good &= torch.allclose(case.normed.float(), normed, rtol=1e-2, atol=1e-2)
        return good

    def ways(self, case: Case) -> dict[str, Callable[[], object]]:
        space = self.space(*case.part.shape)
        total = case.part.clone()

        def nccl() -> Tensor:
            self.group.backend.allreduce([total]).wait()
            return total

        ways: dict[str, Callable[[], object]] = {
            "push": lambda: all_reduce(case.part, space),
            "push+norm": lambda: case.push_norm(space),
            **({"row_sum": case.row_sums(space)} if len(case.part) <= space.place_rows else {}),
            "nccl": nccl,
            "nccl+norm": lambda: add_rms_norm(nccl(), case.stream, case.norm, 1e-6),
        }
        if buffer := self.visible(case.part):
            ways["torch"] = lambda: torch.ops.symm_mem.one_shot_all_reduce(buffer[0], "sum", buffer[1])
        return ways

    def visible(self, part: Tensor) -> tuple[Tensor, str] | None:
        """A copy of it in a buffer of torch's, and the name of its group."""
        from torch._C import _distributed_c10d as c10d
        from torch._C._distributed_c10d import _SymmetricMemory

        name = "benchmark"
        try:
            if self.named is None:  # torch's symmetric memory finds the ranks by a group's name
                store = dist.PrefixStore(name, self.group.store)
                self.named = c10d.ProcessGroup(store, self.rank, self.size)
                c10d._register_process_group(name, self.named)
            buffer = _SymmetricMemory.empty_strided_p2p(part.shape, part.stride(), part.dtype, self.device)
            _SymmetricMemory.rendezvous(buffer, name)
            torch.ops.symm_mem.one_shot_all_reduce(buffer.copy_(part), "sum", name)
            return buffer, name
        except Exception as error:
            print(f"torch's one-shot all-reduce does not run: {error}", file=sys.stderr)
            return None

    def time(self, rows: int, hidden: int) -> dict[str, float]:
        case = Case.draw(rows, hidden, self.device, self.rank)
        found = {}
        for name, call in self.ways(case).items():
            graph = capture(call, self.device)
            graph.replay()
            self.slowest(0.0)
            found[name] = self.slowest(graph_microseconds(graph))
        return found


def on_a_card(rank: int, args: argparse.Namespace, store: str, results: multiprocessing.SimpleQueue) -> None:
    """One rank's process; rank 0 tells what was found."""
    try:
        torch.set_grad_enabled(False)
        here = Rank(rank, args.ranks, store, max(args.rows), max(args.hidden))
        link = here.link_bytes_per_second()
        smallest = here.time(1, 8)
        rows_found = []
        for hidden in args.hidden:
            for rows in args.rows:
                if here.group.sees_all and here.group.push_space(rows, hidden, BF16) is None:
                    continue  # more than is pushed: NCCL's
                good = here.slowest(float(not here.check(rows, hidden))) == 0.0
                times = here.time(rows, hidden)
                sent = (args.ranks - 1) * rows * hidden * BF16.itemsize
                limit = smallest["push"] + 1e6 * sent / link
                rows_found.append({"rows": rows, "hidden": hidden, "right": good, "limit": limit, "microseconds": times})
                if rank == 0:
                    print_row(rows_found[-1])
        if rank == 0:
            card = torch.cuda.get_device_name(rank)
            results.put({"card": card, "ranks": args.ranks, "torch": torch.__version__, "link_gigabytes_per_second": link / 1e9,
                         "smallest_microseconds": smallest, "sizes": rows_found})  # fmt: skip
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def print_row(row: dict) -> None:
    cells = "  ".join(f"{name} {value:6.2f}" for name, value in row["microseconds"].items())
    percent = 100 * row["limit"] / row["microseconds"]["push"]
    size = f"{row['rows']:4d} x {row['hidden']:5d}"
    print(f"{size} {'right' if row['right'] else 'WRONG'}  {cells}  limit {row['limit']:6.2f} ({percent:3.0f} %)", flush=True)


# ------------------------------------------------------------------------------------------------ all ranks on one card


def spaces_on_one_card(size: int, rows: int, hidden: int, device: torch.device) -> list[PushSpace]:
    slots = [torch.empty(slots_shape(size, rows, hidden), dtype=wire(BF16), device=device) for _ in range(size)]
    peers = torch.tensor([tensor.data_ptr() for tensor in slots], device=device)
    spaces = [PushSpace(r, size, slots[r], peers, torch.zeros(rows, dtype=torch.int32, device=device)) for r in range(size)]
    for space in spaces:
        space.clear()
    return spaces


def on_one_card(args: argparse.Namespace) -> dict:
    device, found = torch.device("cuda", 0), []
    streams = [torch.cuda.Stream(device) for _ in range(args.ranks)]
    for hidden in args.hidden:
        for rows in args.rows:
            if args.ranks * rows > 256:  # all programs of all ranks have to run at once
                continue
            spaces = spaces_on_one_card(args.ranks, rows, hidden, device)
            good = True
            for seed in range(5):
                cases = [Case.draw(rows, hidden, device, 100 * seed + rank) for rank in range(args.ranks)]
                parts = [case.part for case in cases]
                total = cases[0].residual + want_float(parts)
                torch.cuda.synchronize()
                sums = []
                for case, space, stream in zip(cases, spaces, streams, strict=True):
                    with torch.cuda.stream(stream):
                        sums.append(all_reduce(case.part, space))
                        case.push_norm(space)
                torch.cuda.synchronize()
                good &= all(torch.equal(got, ordered_sum(parts)) for got in sums)
                good &= all(torch.equal(case.residual, total) for case in cases)
            times = {}
            calls = {
                "push": lambda case, space: all_reduce(case.part, space),
                "push+norm": lambda case, space: case.push_norm(space),
            }
            for name, call in calls.items():
                graphs = []
                for case, space, stream in zip(cases, spaces, streams, strict=True):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.stream(stream):
                        graph.capture_begin(capture_error_mode="thread_local")
                        for _ in range(CALLS):
                            call(case, space)
                        graph.capture_end()
                    graphs.append(graph)
                pairs = []
                for _ in range(REPLAYS):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    for rank, (graph, stream) in enumerate(zip(graphs, streams, strict=True)):
                        with torch.cuda.stream(stream):
                            if rank == args.ranks - 1:
                                begin.record()
                            graph.replay()
                            if rank == args.ranks - 1:
                                end.record()
                    pairs.append((begin, end))
                torch.cuda.synchronize()
                times[name] = statistics.median(1e3 * a.elapsed_time(b) / CALLS for a, b in pairs)
            found.append({"rows": rows, "hidden": hidden, "right": good, "limit": float("nan"), "microseconds": times})
            print_row(found[-1])
    return {
        "card": torch.cuda.get_device_name(0),
        "ranks": args.ranks,
        "one_card": True,
        "torch": torch.__version__,
        "sizes": found,
    }


def want_float(parts: list[Tensor] | Tensor) -> Tensor:
    """The ordered sum, not rounded."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 64, 256])
    parser.add_argument("--hidden", type=numbers, default=[1024, 4096, 5120])
    parser.add_argument("--one-card", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.one_card:
        found = on_one_card(args)
    else:
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                context.Process(target=on_a_card, args=(rank, args, f"{folder}/store", results)) for rank in range(args.ranks)
            ]
            for process in ranks:
                process.start()
            while all(process.is_alive() for process in ranks):
                multiprocessing.connection.wait([process.sentinel for process in ranks], timeout=1.0)
                if not results.empty():
                    break
            failed = results.empty()
            found = {} if failed else results.get()
            for process in ranks:
                if failed:
                    process.kill()
                process.join(10)
        if failed:
            return 1
    if args.json:
        write(args.json, found)
    return 0 if all(row["right"] for row in found["sizes"]) else 1


if __name__ == "__main__":
    sys.exit(main())
