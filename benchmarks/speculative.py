"""Speculative decoding against the same engine without it, in turn in one run: tokens/s, mean accepted length, equal output.

    python benchmarks/speculative.py [--rounds 3] [--max-tokens 160] [--out results.json]
        the embedded SmolLM2-135M-Instruct and prompt lookup, on texts that repeat themselves and on one that does not
    python benchmarks/speculative.py --config benchmarks/shapes/qwen3-8b.json --accept 0.6,0.8 --batches 1,4,16 --drafts 4
        random weights of that shape on a GPU; each draft is taken as right with the given probability, whatever it is, so
        the output means nothing and the speed is that of a model and a proposer that agree so often

Each figure is the median over the rounds; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.cli.bench import shape_directory
from headrace.engine.request import Request

PARAGRAPH = (
    "The headrace leads the water from the weir to the mill. Along its way the channel is lined with stone, and every few "
    "yards an iron grate keeps branches and leaves away from the wheel. When the miller opens the sluice the water falls on "
    "the buckets, the wheel begins to turn, and the shaft drives the stones that grind the corn into flour. In winter the ice "
    "must be broken each morning, or else the wheel stands still until noon."
)
CODE = '''def load_settings(path, defaults):
    settings = dict(defaults)
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, _, value = line.partition("=")
            settings[name.strip()] = value.strip()
    return settings
'''
TASKS = {
    "repeat a text": f"Repeat the following text word for word, and nothing else.\n\n{PARAGRAPH}",
    "edit code": f"Rename the variable `settings` to `options` in this function. Answer with the function only.\n\n{CODE}",
    "summary": f"Summarize this text in three sentences, using its own words.\n\n{PARAGRAPH}",
    "free story": "Write a story about a boy who finds a map.",
}


def drafting(llm: LLM) -> Any:
    assert llm.engine is not None and llm.engine.core.speculator is not None
    return llm.engine.core.speculator


def timed(llm: LLM, run: Callable[[LLM], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Tokens per second, and the ids."""
    llm.reset_prefix_cache()
    began = time.perf_counter()
    ids = run(llm)
    return sum(map(len, ids)) / (time.perf_counter() - began), ids


def in_turn(plain: LLM, drafted: LLM, rounds: int, run: Callable[[LLM], list[list[int]]]) -> dict[str, Any]:
    stats = drafting(drafted).stats
    before = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
    figures: dict[str, list[float]] = {"plain": [], "drafted": []}
    equal = True
    for _ in range(rounds):
        speed, want = timed(plain, run)
        figures["plain"].append(speed)
        speed, got = timed(drafted, run)
        figures["drafted"].append(speed)
        equal &= got == want
    after = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
    drafts, tokens, accepted = (now - then for now, then in zip(after, before, strict=True))
    a, b = (statistics.median(figures[name]) for name in ("plain", "drafted"))
    return {
        "tokens_per_second_plain": round(a, 2), "tokens_per_second_drafted": round(b, 2), "ratio": round(b / a, 3),
        "acceptance": round(accepted / max(1, tokens), 3), "mean_accepted_length": round(1 + accepted / max(1, drafts), 2),
        "equal_output": equal,
    }  # fmt: skip


def on_text(args: argparse.Namespace) -> list[dict[str, Any]]:
    options = {"max_model_len": 1024, "max_num_seqs": 4, "num_kv_blocks": 256}
    lookup = {"speculative_method": "ngram", "num_speculative_tokens": args.drafts}
    results = []
    with LLM(**options) as plain, LLM(**options, **lookup) as drafted:
        for name, text in TASKS.items():
            params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
            chat = [{"role": "user", "content": text}]

            def run(llm: LLM, chat=chat, params=params) -> list[list[int]]:
                return [list(o.outputs[0].token_ids) for o in llm.chat(chat, params, use_tqdm=False)]

            results.append({"task": name} | in_turn(plain, drafted, args.rounds, run))
            print(json.dumps(results[-1]), flush=True)
    return results


class AnyIds:
    """Guesses ids that mean nothing."""

    def propose(self, request: Request, most: int) -> list[int]:
        return [1000 + i for i in range(most)]

    def end(self, request_id: str) -> None:
        pass


def accept_by_chance(probability: list[float]) -> Callable[..., Tensor]:
    """In place of speculative.verify.kept_rows: each draft is right with probability[0]."""

    def kept_rows(sampled: Tensor, guesses: Tensor, failed: Tensor, first_row: Tensor) -> Tensor:
        wrong = (torch.rand(len(sampled), device=sampled.device) >= probability[0]).to(torch.int32)
        before = wrong.cumsum(0) - wrong
        return before == before[first_row]

    return kept_rows


def on_shape(args: argparse.Namespace) -> list[dict[str, Any]]:
    from headrace.worker import model_runner, sampling

    probability = [0.0]
    model_runner.kept_rows = sampling.kept_rows = accept_by_chance(probability)  # type: ignore[attr-defined]
    options = {
        "model": shape_directory(args.config), "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 256,
        "max_model_len": args.input_len + args.max_tokens + 64,
    }  # fmt: skip
    if args.device:
        options["device"] = args.device
    results = []
    lookup = {"speculative_method": "ngram", "num_speculative_tokens": args.drafts, "speculative_max_rows": args.max_rows}
    # one engine: weights twice would leave little for the cache. Without a proposer's guesses it is the plain engine
    with LLM(**options, **lookup) as llm:
        speculator, core = drafting(llm), llm.engine.core  # type: ignore[union-attr]
        speculator.proposer = AnyIds()
        rng = random.Random(0)
        for batch in args.batches:
            prompts = [[rng.randrange(1000, 50000) for _ in range(args.input_len)] for _ in range(batch)]
            params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True)

            def speed(drafts: bool, prompts=prompts, params=params) -> float:
                core.speculator = speculator if drafts else None

                def run(llm: LLM) -> list[list[int]]:
                    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

                return timed(llm, run)[0]

            for accept in args.accept:
                probability[0] = accept
                for drafts in (False, True):
                    speed(drafts)  # captures
                pairs = [(speed(False), speed(True)) for _ in range(args.rounds)]
                a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
                results.append({
                    "batch": batch, "accept": accept, "tokens_per_second_plain": round(a, 1),
                    "tokens_per_second_drafted": round(b, 1), "ratio": round(b / a, 3),
                })  # fmt: skip
                print(json.dumps(results[-1]), flush=True)
    return results


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--config", help="a config.json: random weights, drafts right by chance")
    parser.add_argument("--device", help="of --config")
    parser.add_argument("--accept", type=numbers(float), default=[0.6, 0.8])
    parser.add_argument("--batches", type=numbers(int), default=[1, 4, 16])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = on_shape(args) if args.config else on_text(args)
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        args.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
