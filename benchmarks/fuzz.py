"""As many drawn requests as one likes, over every endpoint, to a server of a tiny random model: no 5xx that is not documented,
the same tokens as before, and no more memory. Exits with 1 if anything was wrong.

    python benchmarks/fuzz.py --requests 100000 --out benchmarks/results/fuzz.json [--server adapters|models]

Starts its own server on a free loopback port; needs the test extra (transformers writes the model).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from about import write
from adapters import write_adapter
from fuzz_requests import ALONE, MODEL, Drawn
from fuzzing import Fuzzed, fuzz
from server_driver import ServerProcess
from tiny_models import write_tiny


def memory(pid: int) -> float:
    """MiB resident; 0: there is no such process."""
    if not pid:
        return 0.0
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def serving(kind: str, tmp: Path) -> tuple[list[str], Drawn]:
    """The words of a server's command line, and what there is to ask it for."""
    model = str(write_tiny("llama", tmp / "model"))
    words = [model, "--served-model-name", MODEL, "--responses-store-bytes", "4194304"]
    if kind == "adapters":
        for seed, name in enumerate(("one", "two")):
            write_adapter(tmp / "adapters" / name, model, seed=seed)
        (tmp / "adapters" / "broken").mkdir()
        words += ["--lora", f"a={tmp / 'adapters' / 'one'}", "--lora-dir", str(tmp / "adapters"), "--admin-key", "op"]
        return words, Drawn(adapters=("a", "b"), operator=b"authorization: Bearer op")
    if kind == "models":
        other, config = write_tiny("qwen3", tmp / "other"), tmp / "models.yaml"
        size = 300 * 2**20
        entries = [
            {"name": name, "model": str(path), "memory_bytes": size} for name, path in ((MODEL, model), ("other", other))
        ]
        config.write_text(json.dumps({"model_memory_bytes": 2 * size, "default_model": MODEL, "models": entries}))
        return [f"--config={config}"], Drawn(names=(MODEL, "other"))
    return words, ALONE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", choices=("one", "adapters", "models"), default="one", help="what it serves")
    parser.add_argument("--out", help="write the report to this JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tmp = Path(directory)
        (first, *options), drawn = serving(args.server, tmp)
        with ServerProcess(first, *options, tmp=tmp) as server:
            server.wait_ready()
            held: list[tuple[int, float, float]] = []

            def told(sent: int, fuzzed: Fuzzed) -> None:
                if sent % max(500, args.requests // 100 // 500 * 500) == 0:
                    held.append((sent, round(memory(server.process.pid), 1), round(memory(server.core()), 1)))
                    print(*held[-1], fuzzed.statuses["faults"], flush=True)

            port = int(server.url.rpartition(":")[2])
            fuzzed = asyncio.run(fuzz(port, args.requests, seed=args.seed, lines=args.connections, told=told, server=drawn))
            counters = server.metrics()
            if restarts := sum(value for name, value in counters.items() if name.startswith("headrace:engine_restarts_total")):
                fuzzed.faults.append(f"the core was restarted {restarts:.0f} times")
            if "Traceback" in server.log():
                fuzzed.faults.append("a traceback in the log: " + server.log().partition("Traceback")[2][:3000])
            if (code := server.terminate()) != 0:
                fuzzed.faults.append(f"exit code {code} after SIGTERM")
    result = {
        "requests": args.requests, "seconds": round(fuzzed.seconds, 1), "connections": args.connections,
        "server": args.server, "seed": args.seed,
        "statuses": dict(sorted(fuzzed.statuses.items())), "rss_mib_of_server_and_core": held, "faults": fuzzed.faults,
        "cpus": os.cpu_count(), "load_average": os.getloadavg()[0],
    }  # fmt: skip
    print(f"{args.requests} requests in {fuzzed.seconds:.0f} s: {result['statuses']}")
    for fault in fuzzed.faults:
        print(f"FAULT {fault}")
    if args.out:
        write(args.out, result)
    return 1 if fuzzed.faults else 0


if __name__ == "__main__":
    sys.exit(main())
