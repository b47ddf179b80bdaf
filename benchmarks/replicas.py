"""What a core's death costs its streams: one core that is restarted, beside several of which another takes them.

    python benchmarks/replicas.py [--cores 1 2] [--seconds 30] [--streams 8] [--kills 3] [--model M] [--json FILE]

For each number of cores: a closed loop of streams undisturbed, then the same with kill -9 of a core every few seconds. Every
answer is compared with what the same request got in a quiet server; a gap is the time between two events of one stream. The
longest gap is what the reader of a killed core's stream sees. Clients, server and cores share this machine, whose threads
are divided among the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from closed_loop import NAME, OUTPUT, POOL, Client

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from server_driver import ServerProcess, until  # noqa: E402


def measure(cores: int, args: argparse.Namespace) -> dict[str, Any]:
    client = Client(args.streams)
    options = ("--kv-cache-bytes", str(2**28), "--max-num-seqs", "64", "--stats-interval", "0", "--max-restarts", "1000")
    given = ("--served-model-name", NAME, "--dtype", "auto", "--data-parallel-size", str(cores), *options)
    with tempfile.TemporaryDirectory() as tmp, ServerProcess(args.model, *given, tmp=Path(tmp), checks=False) as server:
        server.wait_ready(300)
        whole(server, cores)
        client.learn(server.url)
        result = {"cores": cores, "undisturbed": client.load(server.url, args.seconds).as_dict()}
        before = server.metrics()["headrace:engine_restarts_total"]

        def disturb() -> None:
            for _ in range(args.kills):
                whole(server, cores)
                os.kill(server.core(), 9)
                until(lambda: up(server) < cores, 10)
            whole(server, cores)

        result["killed"] = client.load(server.url, args.seconds, disturb).as_dict()
        return result | {"deaths": server.metrics()["headrace:engine_restarts_total"] - before}


def up(server: ServerProcess) -> int:
    page = server.metrics()
    return sum(int(value) for name, value in page.items() if name.startswith("headrace:core_up{"))


def whole(server: ServerProcess, cores: int) -> None:
    """All serve and one stands by, which has had time to import everything."""
    until(lambda: up(server) == cores and len(server.children()) == cores + 1, 300)
    time.sleep(5.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--model", default=None, help="default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    import torch

    if args.model is None:
        from headrace.model.embedded import embedded_model_path

        args.model = str(embedded_model_path())
    busy, results = os.getloadavg()[0], []
    for cores in args.cores:
        results.append(measure(cores, args))
        print(json.dumps(results[-1], indent=1), flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE)
    about = {
        "benchmark": "replicas", "machine": f"CPU, {os.cpu_count()} cores", "load_average_before": busy,
        "versions": {"torch": torch.__version__, "python": platform.python_version()}, "commit": commit.stdout.strip() or None,
        "workload": {"model": Path(args.model).name, "streams": args.streams, "requests": POOL, "output_tokens": OUTPUT,
                     "seconds": args.seconds, "kills": args.kills},
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
