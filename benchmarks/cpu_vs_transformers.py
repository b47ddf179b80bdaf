"""Headrace and Transformers on the same CPU, in turn in one run: decode, batched throughput, prefill, time to first token.

    python benchmarks/cpu_vs_transformers.py [--dtype float32] [--rounds 3] [--out results.json]

The model is the embedded SmolLM2-135M-Instruct. Each figure is the median over the rounds; the ratio is that of the medians.
The limit of batch-1 decode is the weights' bytes over the read bandwidth that the same run measures.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from headrace import LLM, SamplingParams
from headrace.model.embedded import embedded_model_path
from headrace_bench.roofline import Limits, measure_limits

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))
from gguf_reference import load_llama  # noqa: E402

INPUT, OUTPUT = 128, 128


def ours(llm: LLM, batch: int, outputs: int, inputs: int = INPUT) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    llm.reset_prefix_cache()
    ids = prompts(batch, inputs)
    began = time.perf_counter()
    llm.generate(ids, params, use_tqdm=False)
    return time.perf_counter() - began


@torch.inference_mode()
def theirs(model, batch: int, outputs: int, inputs: int = INPUT) -> float:
    ids = torch.tensor(prompts(batch, inputs))
    began = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=outputs,
        min_new_tokens=outputs,
        pad_token_id=0,
    )
    return time.perf_counter() - began


def prompts(batch: int, length: int) -> list[list[int]]:
    return [[random.randrange(10000) for _ in range(length)] for _ in range(batch)]


def decode_rate(run: Callable[[int, int], float], batch: int) -> float:
    """Tokens per second after the first token."""
    first = run(batch, 1)
    return batch * (OUTPUT - 1) / (run(batch, OUTPUT) - first)


def start_seconds(code: str) -> float:
    """From the start of a process to its first printed character."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.communicate()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--out")
    args = parser.parse_args()
    llm = LLM(device="cpu", dtype=args.dtype, max_model_len=1024, max_num_seqs=64)
    model = load_llama(embedded_model_path(), getattr(torch, args.dtype))
    limits = Limits(llm.engine.model, llm.engine.dtype, measure_limits(torch.device("cpu"), llm.engine.dtype))
    engines: dict[str, Callable[..., float]] = {
        "headrace": lambda *a: ours(llm, *a),
        "transformers": lambda *a: theirs(model, *a),
    }
    figures: dict[str, dict[str, list[float]]] = {}
    for run in engines.values():
        run(1, 2)
    for _ in range(args.rounds):
        for name, run in engines.items():
            for batch in args.batch:
                figures.setdefault(f"decode, batch {batch}", {}).setdefault(name, []).append(decode_rate(run, batch))
                figures.setdefault(f"throughput, batch {batch}", {}).setdefault(name, []).append(
                    batch * OUTPUT / run(batch, OUTPUT)
                )
            figures.setdefault("prefill 512", {}).setdefault(name, []).append(512 / run(1, 1, 512))
    rows = []
    for what, by_engine in figures.items():
        mine, other = (statistics.median(by_engine[e]) for e in ("headrace", "transformers"))
        rows.append({"workload": what, "headrace_tok_s": mine, "transformers_tok_s": other, "ratio": mine / other})
        print(f"{what:22s} headrace {mine:8.1f} tok/s   transformers {other:8.1f}   ratio {mine / other:.2f}", flush=True)
    share = rows[0]["headrace_tok_s"] * limits.decode_seconds(1, INPUT + OUTPUT // 2)
    print(f"batch-1 decode is {100 * share:.0f} % of the measured read bandwidth ({limits.machine.bandwidth / 1e9:.1f} GB/s)")
    llm.close()
    starts = {
        "headrace": [
            start_seconds("from headrace.cli import main; main(['generate', '--prompt', 'The', '--max-tokens', '4'])")
            for _ in range(args.rounds)
        ],
        "transformers": [
            start_seconds(
                f"import sys; sys.path.insert(0, {str(TESTS)!r}); from gguf_reference import load_llama; import torch;"
                f"m = load_llama({str(embedded_model_path())!r});"
                "print(m.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1))"
            )
        ],
    }
    start = {name: statistics.median(times) for name, times in starts.items()}
    print(f"process start to first token: headrace {start['headrace']:.2f} s, transformers {start['transformers']:.2f} s")
    if args.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        document = {
            "machine": limits.machine.as_dict(), "torch": torch.__version__, "transformers": transformers.__version__,
            "commit": commit, "dtype": args.dtype, "input": INPUT, "output": OUTPUT, "rows": rows, "start_seconds": start,
            "batch1_share_of_bandwidth": share,
        }  # fmt: skip
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
