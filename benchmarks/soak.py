"""The chaos of tests/chaos.py for as long as one likes: 32 clients with random parameters, disconnects, slow readers,
malformed bodies, huge prompts; the core is killed or stopped every few seconds, the server stopped now and then, the wall clock
jumps by up to a year, and the disk of the trace is full. Exits with 1 if anything was wrong.

    python benchmarks/soak.py --minutes 120 --out benchmarks/results/soak.json

Runs its own server of a tiny random model on a free loopback port; needs the test extra (transformers writes the model) and a C
compiler (for the clock).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from about import write
from chaos import Chaos
from server_driver import ServerProcess
from soak_faults import Clock, small_disk, stall
from tiny_models import write_tiny

FAULTS = ("SIGKILL", "SIGSTOP", "leave", "malformed", "huge", "slow", "clock jump", "server stopped")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=200, help="different requests, each answered undisturbed first")
    parser.add_argument("--kill-every", type=float, default=4.0, help="seconds, on average, from ready to the next kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the report to this JSON file")
    args = parser.parse_args()
    began = time.time()
    with tempfile.TemporaryDirectory() as directory, small_disk(Path(directory) / "disk") as trace:
        tmp = Path(directory) / "tmp"
        tmp.mkdir()
        model = write_tiny("llama", Path(directory) / "model")
        options = ("--served-model-name", "tiny", "--heartbeat-timeout", "5", "--max-restarts", "100000", "--trace", trace)
        clock = Clock(Path(directory))
        with clock.loaded():
            process = ServerProcess(model, *options, tmp=tmp)
        with process as server:
            server.wait_ready()
            chaos = Chaos(
                server, seed=args.seed, clients=args.clients, pool=args.requests, seconds=60 * args.minutes,
                kill_every=args.kill_every, more=(clock.jump, stall),
            )  # fmt: skip
            report = chaos.run()
            code = server.terminate()
            if code != 0:
                report.fault(f"exit code {code} after SIGTERM")
            if left := list(tmp.glob("headrace-*")):
                report.fault(f"left behind: {left}")
            if server.log().count("No space left on device") != 1:
                report.fault("the disk of the trace was not full, or said so more than once")
            if len(set(re.findall(r"^(\d{4})-\d\d", server.log(), re.MULTILINE))) < 2:
                report.fault("the log knows one year only: its clock did not jump")
    result = report.as_dict() | {
        "minutes": round((time.time() - began) / 60, 1), "clients": args.clients, "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    requests = sum(report.counts[k] for k in ("plain", "slow", "leave", "malformed", "huge"))
    injected = sum(report.counts[k] for k in FAULTS)
    print(f"{requests} requests, {injected} faults injected, {report.restarts} restarts")
    print(f"{report.tokens_checked} tokens compared, {report.tokens_lost} lost; {report.counts['faults']} faults found")
    memory = [m for _, m in report.memory]
    tenth = max(1, len(memory) // 10)
    early, late = max(memory[:tenth]), max(memory[-tenth:])
    print(f"RSS of the HTTP process: {early:.0f} MiB in the first tenth, {late:.0f} MiB in the last")
    for fault in report.faults:
        print(f"FAULT {fault}")
    if args.out:
        write(args.out, result)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
