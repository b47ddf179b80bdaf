"""Cores in a Ray cluster whose nodes are raylets of this machine: what a death, an update, another size and Ray itself cost.

    python benchmarks/ray_fleet.py [--seconds 30] [--streams 16] [--rounds 2] [--model M] [--json FILE] [PART ...]

    throughput   2 cores without Ray, by `--ray local` and (once) on two raylets of a cluster, in turn, under the same load;
                 and whose CPU time it took: of cores, front, client, and Ray's own processes
    deaths       kill -9 of a core, and of a whole node, in mid-stream
    update       headrace ray update under load
    scaling      a load curve, and how many cores there were: 1 -> 4 -> 1
    front        kill -9 of the front: until nothing of it is left, until the next serves

Load is a closed loop of streams over HTTP, prompts and seeds of a fixed set. Every answer is compared with what the same
request got in a quiet server; a gap is the time between two events of one stream. Clients, fronts, cores and Ray share this
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from closed_loop import NAME, OUTPUT, POOL, Client

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
os.environ["PYTHONPATH"] = f"{HERE.parent / 'src'}:{HERE.parent / 'tests'}"
os.environ["OMP_NUM_THREADS"] = "1"
from ray_nodes import Cluster, ray_cluster_of  # noqa: E402
from server_driver import ServerProcess, alive, processes_of, until  # noqa: E402

PARTS = ("throughput", "deaths", "update", "scaling", "front")


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.client, self.busy = args, Client(args.streams), os.getloadavg()[0]
        self.results: dict[str, Any] = {}

    @contextlib.contextmanager
    def server(self, *options: str) -> Iterator[ServerProcess]:
        small = ("--kv-cache-bytes", str(2**28), "--max-num-seqs", "64", "--no-standby", "--stats-interval", "0")
        with tempfile.TemporaryDirectory() as tmp:
            given = ("--served-model-name", NAME, "--dtype", "auto", *small, *options)
            with ServerProcess(self.args.model, *given, tmp=Path(tmp), checks=False) as process:
                yield process.wait_ready(300)

    def ray(self, cluster: Cluster, *options: str) -> contextlib.AbstractContextManager[ServerProcess]:
        return self.server("--ray", cluster.address, "--threads", "1", *options)

    def say(self, part: str, result: Any) -> None:
        """What is known of a part by now, also if the rest of it comes to nothing."""
        self.results[part] = result
        print(part, json.dumps(result), flush=True)
        if self.args.json:
            document = about(self.args, self.busy) | {"results": self.results}
            Path(self.args.json).write_text(json.dumps(document, indent=1) + "\n")

    def throughput(self) -> None:
        two = ("--data-parallel-size", "2")
        runs: dict[str, list[dict[str, Any]]] = {"data_parallel": [], "ray_local": [], "ray": []}

        def measured(kind: str, server: ServerProcess) -> None:
            runs[kind].append(self._measured(server))
            means = {name: mean_of(of) for name, of in runs.items() if of}
            without = means["data_parallel"]["tokens_per_second"]
            over = {name: round(mean["tokens_per_second"] / without, 3) for name, mean in means.items()}
            self.say("throughput", {"runs": runs, "means": means, "over_data_parallel": over})

        for _ in range(self.args.rounds):
            with self.server(*two, "--threads", "2") as server:
                measured("data_parallel", server)
            with self.server("--ray", "local", "--threads", "1", *two) as server:
                measured("ray_local", server)
        with ray_cluster_of(2) as cluster, self.ray(cluster, *two) as server:
            measured("ray", server)

    def _measured(self, server: ServerProcess) -> dict[str, Any]:
        self._ready(server, 2)
        self.client.load(server.url, self.args.seconds / 5)
        before = cpu_seconds(server)
        load = self.client.load(server.url, self.args.seconds)
        assert not load.broken and not load.differing, load.as_dict()
        spent = {part: seconds - before.get(part, 0.0) for part, seconds in cpu_seconds(server).items()}
        found = {"tokens_per_second": round(load.tokens / load.seconds, 1)}
        for part, seconds in spent.items():
            found[f"{part}_cpu_seconds_per_1000_tokens"] = round(1000 * seconds / load.tokens, 4)
            found[f"{part}_cpus"] = round(seconds / load.seconds, 4)
        return found

    def deaths(self) -> None:
        with ray_cluster_of(3) as cluster, self.ray(cluster, "--data-parallel-size", "2") as server:
            self._ready(server, 2)
            result = {"undisturbed": self.client.load(server.url, self.args.seconds).as_dict()}
            result["core"] = self.client.load(server.url, self.args.seconds, lambda: kill(cluster)).as_dict()
            wait_cores(server, 2, cluster)
            lose = lambda: cluster.lose(first_node(cluster))  # noqa: E731
            result["node"] = self.client.load(server.url, self.args.seconds, lose).as_dict()
            wait_cores(server, 2, cluster)
            self.say("deaths", result | {"restarts": server.metrics()["headrace:engine_restarts_total"]})

    def update(self) -> None:
        with ray_cluster_of(3) as cluster, self.ray(cluster, "--data-parallel-size", "2") as server:
            self._ready(server, 2)
            command = [sys.executable, "-m", "headrace.cli", "ray", "update", cluster.address]
            before = set(cluster.cores())
            load = self.client.load(server.url, self.args.seconds, lambda: subprocess.run(command, check=True))
            self.say("update", load.as_dict() | {"new_cores": len(set(cluster.cores()) - before)})

    def scaling(self) -> None:
        options = (
            "--min-replicas", "1", "--max-replicas", "4", "--target-ongoing-requests", "4", "--upscale-delay", "2",
            "--downscale-delay", "10",
        )  # fmt: skip
        with ray_cluster_of(2, cores_per_node=2) as cluster, self.ray(cluster, *options) as server:
            self._ready(server, 1)
            seconds, story, began = 4 * self.args.seconds, [], time.perf_counter()

            def watch() -> None:
                while time.perf_counter() - began < seconds or story[-1]["cores"] > 1:
                    story.append({"second": round(time.perf_counter() - began, 1), "cores": len(cluster.cores())})
                    time.sleep(1.0)

            load = self.client.load(server.url, seconds, watch, [2, 8, 16, 16, 4, 1, 1, 1])
            changes = story[:1] + [b for a, b in pairwise(story) if a["cores"] != b["cores"]]
            self.say("scaling", load.as_dict() | {"cores": changes, "most": max(s["cores"] for s in story)})

    def front(self) -> None:
        with ray_cluster_of(2) as cluster:
            with self.ray(cluster, "--data-parallel-size", "2") as server:
                self._ready(server, 2)
                cores = list(cluster.cores())
                server.kill()
                began = time.perf_counter()
                until(lambda: not any(map(alive, cores)), 60)
                gone = time.perf_counter() - began
            began = time.perf_counter()
            with self.ray(cluster, "--data-parallel-size", "2") as server:
                serves = time.perf_counter() - began
                load = self.client.load(server.url, self.args.seconds / 2)
            said = {"cores_gone_after_s": round(gone, 2), "next_front_ready_after_s": round(serves, 1)}
            self.say("front", said | {"then": load.as_dict()})

    def _ready(self, server: ServerProcess, cores: int) -> None:
        wait_cores(server, cores)
        if not self.client.want:
            self.client.learn(server.url)


def cpu_seconds(server: ServerProcess) -> dict[str, float]:
    """So far, of this process and all below it: the client, the front, its cores, and what else there is, which is Ray."""
    found = {"client": 0.0, "front": 0.0, "cores": 0.0, "ray": 0.0}
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        waiting += processes_of(pid)
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            core = re.search(rb"headrace.(engine|distributed).process", Path(f"/proc/{pid}/cmdline").read_bytes())
            part = {os.getpid(): "client", server.process.pid: "front"}.get(pid, "cores" if core else "ray")
            found[part] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def mean_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {part: round(sum(run[part] for run in runs) / len(runs), 4) for part in runs[0]}


def wait_cores(server: ServerProcess, count: int, cluster: Cluster | None = None) -> None:
    """All are up; `cluster`: after a death, when the log's line has been said before."""
    if count > 1:
        until(lambda: f"{count} of {count} cores are ready" in server.log(), 300)
    if cluster is not None:
        until(lambda: len(cluster.cores()) == count, 120)
        time.sleep(3.0)  # it loads


def kill(cluster: Cluster) -> None:
    os.kill(next(iter(cluster.cores())), 9)


def first_node(cluster: Cluster) -> Any:
    return next(iter(cluster.cores().values()))


def about(args: argparse.Namespace, busy: float) -> dict[str, Any]:
    import ray
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE)
    return {
        "benchmark": "ray_fleet", "machine": f"CPU, {os.cpu_count()} cores", "load_average_before": busy,
        "versions": {"ray": ray.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": commit.stdout.strip() or None,
        "workload": {"model": Path(args.model).name, "streams": args.streams, "requests": POOL, "output_tokens": OUTPUT,
                     "seconds": args.seconds, "rounds": args.rounds},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default=None, help="default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(unknown)}")
    if args.model is None:
        from headrace.model.embedded import embedded_model_path

        args.model = str(embedded_model_path())
    bench = Bench(args)
    for part in args.parts or PARTS:
        getattr(bench, part)()


if __name__ == "__main__":
    main()
