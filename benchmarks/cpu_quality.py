"""What each of Headrace's modes on a CPU costs in quality, over real text, against the same file in float32 through torch.

    python benchmarks/cpu_quality.py [--model FILE.gguf] [--modes default "int8 activations"] [--length 512] [--out FILE.json]

Prints a Markdown table. KL is that of the next token's distribution, in nats, from the reference to the mode.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from cpu_peers import MODES, cpu_name
from headrace import LLM
from quality import Divergence, logits_of, real_texts


def pieces(llm: LLM, length: int, most: int) -> list[list[int]]:
    """Up to `most` pieces of `length` tokens of each text."""
    found = []
    for text in real_texts().values():
        ids = llm.get_tokenizer().encode(text)
        found += [ids[i * length : (i + 1) * length] for i in range(min(most, len(ids) // length))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--modes", nargs="+", default=[mode for mode in MODES if not mode.startswith("torch")], choices=MODES)
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--pieces", type=int, default=2, help="of each text, at most")
    parser.add_argument("--out")
    args = parser.parse_args()
    small = {
        "device": "cpu", "max_model_len": args.length + 1, "max_num_batched_tokens": args.length + 1, "max_num_seqs": 1,
        "num_kv_blocks": args.length // 16 + 2,
    }  # fmt: skip
    results = {}
    with LLM(args.model, dtype="float32", enforce_eager=True, **small) as reference, ExitStack() as stack:
        engines = {mode: stack.enter_context(LLM(args.model, **small, **MODES[mode])) for mode in args.modes}
        found = {mode: Divergence() for mode in args.modes}
        for ids in pieces(reference, args.length, args.pieces):
            want = logits_of(reference, ids)
            for mode, llm in engines.items():
                found[mode].add(want, logits_of(llm, ids), ids)
        results = {mode: divergence.summary() for mode, divergence in found.items()}
    first = next(iter(results.values()))
    print("| mode | " + " | ".join(first) + " |\n" + "|---" * (len(first) + 1) + "|")
    for mode, summary in results.items():
        print(f"| {mode} | " + " | ".join(f"{value:.5g}" for value in summary.values()) + " |")
    if args.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        model = Path(args.model).name if args.model else "SmolLM2-135M-Instruct"
        document = {"model": model, "cpu": cpu_name(), "commit": commit, "length": args.length, "modes": results}
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
