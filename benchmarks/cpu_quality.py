"""What each of Headrace's modes on a CPU costs in quality, over real text, against the same file in float32 through torch.

    python benchmarks/cpu_quality.py [--model FILE.gguf] [--modes default "int8 activations"] [--length 512] [--out FILE.json]
    python benchmarks/cpu_quality.py --modes "fp8 weights" "int8 weights" "int4 weights" "fp8 cache"

The modes of the second line round as on a GPU (enforce_eager), from a copy of the file in float32: what is quantized already is
then rounded a second time.

Prints a Markdown table. KL is that of the next token's distribution, in nats, from the reference to the mode.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from safetensors.torch import save_file

from about import write
from cpu_peers import MODES
from headrace import LLM
from headrace.config import EngineConfig
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.loader import load_tensors
from headrace.model.weight_names import WeightSpec
from quality import Divergence, logits_of, real_texts

AS_ON_A_GPU: dict[str, dict[str, Any]] = {
    **{f"{kind} weights": {"quantization": kind} for kind in ("fp8", "int8", "int4")},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 weights, fp8 cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


@contextmanager
def in_floats(model: str | None) -> Iterator[dict[str, Any]]:
    """Options for a copy of a checkpoint in float32."""
    source = resolve_checkpoint(EngineConfig(model=model, device="cpu"))
    entries = source.tensors()
    plan = [WeightSpec(name, entry.shape, ((name, entry.num_rows),)) for name, entry in entries.items()]
    with tempfile.TemporaryDirectory() as folder:
        save_file(load_tensors(plan, entries, torch.float32, torch.device("cpu")), Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(source.config))
        yield {"model": folder, "tokenizer": str(source.tokenizer_path or source.path)}


def pieces(llm: LLM, length: int, most: int, num_texts: int | None) -> list[list[int]]:
    """Up to `most` pieces of `length` tokens of each text, or of so many of them."""
    texts, found = list(real_texts().values()), []
    for text in texts[:: len(texts) // min(num_texts or len(texts), len(texts))][:num_texts]:
        ids = llm.get_tokenizer().encode(text)
        found += [ids[i * length : (i + 1) * length] for i in range(min(most, len(ids) // length))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded model")
    usual = [mode for mode in MODES if not mode.startswith("torch")]
    parser.add_argument("--modes", nargs="+", default=usual, choices=[*MODES, *AS_ON_A_GPU])
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--pieces", type=int, default=2, help="of each text, at most")
    parser.add_argument("--texts", type=int, help="so many of the texts (default: all)")
    parser.add_argument("--out")
    args = parser.parse_args()
    small = {
        "device": "cpu", "max_model_len": args.length + 1, "max_num_batched_tokens": args.length + 1, "max_num_seqs": 1,
        "num_kv_blocks": args.length // 16 + 2,
    }  # fmt: skip
    plain = {"dtype": "float32", "enforce_eager": True, **small}
    with LLM(args.model, **plain) as reference, ExitStack() as stack:
        copy = stack.enter_context(in_floats(args.model)) if set(args.modes) & set(AS_ON_A_GPU) else {}
        ways = {mode: {"model": args.model, **small, **MODES[mode]} for mode in args.modes if mode in MODES}
        ways |= {mode: {**copy, **plain, **AS_ON_A_GPU[mode]} for mode in args.modes if mode in AS_ON_A_GPU}
        engines = {mode: stack.enter_context(LLM(**options)) for mode, options in ways.items()}
        found = {mode: Divergence() for mode in ways}
        for ids in pieces(reference, args.length, args.pieces, args.texts):
            want = logits_of(reference, ids)
            for mode, llm in engines.items():
                found[mode].add(want, logits_of(llm, ids), ids)
        results = {mode: divergence.summary() for mode, divergence in found.items()}
    first = next(iter(results.values()))
    print("| mode | " + " | ".join(first) + " |\n" + "|---" * (len(first) + 1) + "|")
    for mode, summary in results.items():
        print(f"| {mode} | " + " | ".join(f"{value:.5g}" for value in summary.values()) + " |")
    if args.out:
        model = Path(args.model).name if args.model else "SmolLM2-135M-Instruct"
        write(args.out, {"model": model, "length": args.length, "modes": results})


if __name__ == "__main__":
    main()
