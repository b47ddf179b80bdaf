"""Speculative decoding against the same engine without it, in turn in one run: tokens/s, mean accepted length, equal output.

    python benchmarks/speculative.py [--rounds 3] [--max-tokens 160] [--out results.json]
        the embedded SmolLM2-135M-Instruct and prompt lookup, on texts that repeat themselves and on one that does not
    python benchmarks/speculative.py --config benchmarks/shapes/qwen3-8b.json --accept 0.6,0.8 --batches 1,4,16 --drafts 4
        random weights of that shape on a GPU; each draft is taken as right with the given probability, whatever it is, so
        the output means nothing and the speed is that of a model and a drafter that agree so often, where drafts cost
        nothing. Milliseconds in which each request gets one token, while all of them decode

Each figure is the median over the rounds; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from about import write
from headrace import LLM, SamplingParams
from headrace.engine.messages import EngineRequest
from headrace.kernels.prepare import Rows
from headrace.scheduler.plan import StepPlan
from headrace.worker.drafter import DraftRow
from headrace_bench.engine import shape_directory

WARM_TOKENS = 8  # of each request, before the clock starts

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
    """A drafter on the device without a model: what stands in the token table is the draft, and costs nothing."""

    cost = 0.0

    def placed(self, plan: StepPlan) -> None:
        pass

    def propose(self, rows: Sequence[DraftRow]) -> None:
        pass


def accept_by_chance(device: torch.device) -> Tensor:
    """Let the engine find each draft right with the probability in the tensor that is returned; the same work, and one draw."""
    from headrace.worker import cuda_graphs, sampling

    probability = torch.zeros((), device=device)
    real_publish = cuda_graphs.publish

    def publish(token_ids: Tensor, failed: Tensor, rows: Rows, *others: Any, **named: Any) -> None:
        noise = torch.sin(rows.seq_lens * 12.9898 + rows.seq_slots * 78.233) * 43758.5453
        rows.guesses.copy_(token_ids + (noise - noise.floor() >= probability))
        real_publish(token_ids, failed, rows, *others, **named)

    cuda_graphs.publish = sampling.publish = publish  # type: ignore[attr-defined]
    return probability


def seconds_per_step_and_token(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Seconds in which each request gets one more token, over the steps in which all of them decode."""
    core = llm.engine.core  # type: ignore[union-attr]
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(f"r{i}", prompt, params, i))
    counts = dict.fromkeys((f"r{i}" for i in range(len(prompts))), 0)
    began = start = 0.0
    tokens = 0
    while core.has_work:
        news = core.step()
        for name, ids in [*zip(news.ids, [[t] for t in news.tokens], strict=True), *((n.id, n.token_ids) for n in news.news)]:
            counts[name] += len(ids)
        now = time.perf_counter()
        if not began and min(counts.values()) >= WARM_TOKENS:
            began, start = now, sum(counts.values())
        if began and not tokens and (max(counts.values()) >= params.max_tokens - 8 or not core.has_work):
            seconds, tokens = now - began, sum(counts.values()) - start
            for name in counts:
                core.abort(name)
    return seconds / tokens * len(prompts)


def on_shape(args: argparse.Namespace) -> list[dict[str, Any]]:
    began = time.perf_counter()
    options = {
        "model": shape_directory(args.config), "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 256,
        "max_model_len": args.input_len + args.max_tokens + 64,
    }  # fmt: skip
    if args.device:
        options["device"] = args.device
    results = []
    lookup = {"speculative_method": "ngram", "num_speculative_tokens": args.drafts, "speculative_max_rows": args.max_rows}
    # one engine: weights twice would leave little for the cache. Without its speculator it is the plain engine
    with LLM(**options, **lookup) as llm:
        speculator, core = drafting(llm), llm.engine.core  # type: ignore[union-attr]
        speculator.proposer, core.runner.drafter = None, AnyIds()
        probability = accept_by_chance(llm.engine.device)  # type: ignore[union-attr]
        vocab = core.vocab_size
        rng = random.Random(0)
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True).resolved({})
        for batch in args.batches:
            prompts = [[rng.randrange(vocab) for _ in range(args.input_len)] for _ in range(batch)]

            def speed(drafts: bool, prompts=prompts) -> float:
                core.speculator = speculator if drafts else None
                return seconds_per_step_and_token(llm, prompts, params)

            for accept in args.accept:
                probability.fill_(accept)
                for drafts in (False, True):
                    speed(drafts)  # captures
                before = speculator.stats.num_drafts, speculator.stats.num_accepted_tokens
                pairs = [(speed(False), speed(True)) for _ in range(args.rounds)]
                steps = speculator.stats.num_drafts - before[0]
                a, b = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
                results.append({
                    "batch": batch, "accept": accept, "ms_per_token_plain": round(a, 3), "ms_per_token_drafted": round(b, 3),
                    "ratio": round(a / b, 3),
                    "mean_accepted_length": round(1 + (speculator.stats.num_accepted_tokens - before[1]) / max(1, steps), 2),
                })  # fmt: skip
                print(json.dumps(results[-1]), flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return results


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=160, help="of each request")
    parser.add_argument("--config", help="a config.json: random weights, drafts right by chance")
    parser.add_argument("--device", help="of --config")
    parser.add_argument("--accept", type=numbers(float), default=[0.6, 0.8])
    parser.add_argument("--batches", type=numbers(int), default=[1, 4, 16])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, help="default with --config: results/speculative-<config>.json beside this script")
    args = parser.parse_args()
    if args.config and not args.out:
        args.out = Path(__file__).parent / "results" / f"speculative-{Path(args.config).stem}.json"
    results = on_shape(args) if args.config else on_text(args)
    if args.out:
        write(args.out, {"results": results})


if __name__ == "__main__":
    main()
