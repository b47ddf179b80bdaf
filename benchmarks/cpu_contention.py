"""Decode on a CPU of which another process takes one core, beside the same on a free machine: how much slower is a token?

    python benchmarks/cpu_contention.py --rounds 3 --out benchmarks/results/cpu-contention.json

Each environment has a fresh process with the embedded model. Free and contended runs take turns, so that whatever else the
machine does falls on both; the median of the rounds' ratios counts. `default`: as Headrace sets OpenMP up; `spinning`: as
OpenMP does by itself; `one thread`: for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from about import write

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "default": {},
    "spinning": {"OMP_WAIT_POLICY": "active"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
BUSY = "while True: pass"


def measure(rounds: int, tokens: int) -> None:
    """In a process of its own: milliseconds per token, free and contended, a JSON line for each round."""
    import time

    from headrace import LLM, SamplingParams

    with LLM(device="cpu", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=2) as llm:

        def timed(count: int) -> float:
            llm.reset_prefix_cache()
            began = time.perf_counter()
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            llm.generate([list(range(5, 21))], params, use_tqdm=False)
            return time.perf_counter() - began

        def token() -> float:
            return 1e3 * (timed(tokens + 1) - timed(1)) / tokens

        timed(4)
        for _ in range(rounds):
            free = token()
            other = subprocess.Popen([sys.executable, "-c", BUSY])
            try:
                contended = token()
            finally:
                other.kill()
                other.wait()
            print(json.dumps({"free_ms": free, "contended_ms": contended}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.rounds, args.tokens)
        return
    results = []
    for name, variables in ENVIRONMENTS.items():
        environment = {k: v for k, v in os.environ.items() if k not in OPENMP} | variables
        load = os.getloadavg()[0]
        command = [sys.executable, __file__, "--measure", "--rounds", str(args.rounds), "--tokens", str(args.tokens)]
        lines = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        rounds = [json.loads(line) for line in lines]
        ratio = statistics.median(r["contended_ms"] / r["free_ms"] for r in rounds)
        results.append({"environment": name, "ratio": ratio, "load_before": load, "rounds": rounds})
        medians = [statistics.median(r[k] for r in rounds) for k in ("free_ms", "contended_ms")]
        print(f"{name:12s} free {medians[0]:7.1f} ms a token, contended {medians[1]:7.1f}, ratio {ratio:.2f}", flush=True)
    if args.out:
        document = {"cores": os.cpu_count(), "model": "SmolLM2-135M-Instruct", "tokens": args.tokens, "results": results}
        write(args.out, document)


if __name__ == "__main__":
    main()
