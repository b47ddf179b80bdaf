"""What grammars cost: 32 requests of which half are constrained, against the same 32 without; the slowdown of the others.

    python benchmarks/structured.py                                   # SmolLM2 on this machine
    python benchmarks/structured.py --config benchmarks/shapes/qwen3-8b.json       # random weights, a GPU

Both kinds of run take turns in one process, on one engine. Every request writes the same number of tokens: the constrained
ones follow a schema of endless records, so that they end no sooner than the others. Reported per run and step: time, the
processor's time (on a CPU that others use too, this is the one to read), and the host's part for masks. The slowdown is the
median over pairs of runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from about import write
from headrace.config import EngineConfig
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.tokenizer import Tokenizer
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import StructuredOutputsParams

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": RECORD, "minItems": 1000}


def requests(count: int, constrained: int, tokens: int, prompt: list[int], eos: list[int]) -> list[EngineRequest]:
    plain = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, seed=1).resolved({})
    plain = msgspec.structs.replace(plain, eos_token_ids=eos)
    grammar = msgspec.structs.replace(plain, structured_outputs=StructuredOutputsParams(json=ENDLESS), min_tokens=0)
    return [EngineRequest(f"r{i}", [*prompt, i], grammar if i < constrained else plain, i) for i in range(count)]


class MaskClock:
    """Seconds that the core spends on masks and on telling matchers what was sampled."""

    def __init__(self, core: EngineCore):
        self.seconds = 0.0
        assert core.structured is not None
        for name in ("masks", "follow"):
            setattr(core.structured, name, self._timed(getattr(core.structured, name)))

    def _timed(self, work):
        def timed(*args):
            began = time.perf_counter()
            try:
                return work(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def run(core: EngineCore, batch: list[EngineRequest]) -> tuple[float, float, int]:
    """Seconds, seconds of the processor, and steps, from the moment when all requests have a token to the first end."""
    for request in batch:
        core.add(request)
    began = used = seconds = busy = 0.0
    first, steps, seen = 0, 0, set()
    while core.has_work:
        news = core.step()
        seen.update(n.id for n in news if n.token_ids)
        if len(seen) == len(batch) and not began:
            began, used, first = time.perf_counter(), time.process_time(), core.steps
        if any(n.finish_reason for n in news) and not steps:
            seconds, busy, steps = time.perf_counter() - began, time.process_time() - used, core.steps - first
    return seconds, busy, steps


def shape_directory(config: str) -> str:
    """A checkpoint directory without weights: the shape, and SmolLM2's tokenizer, whose ids are the first of its vocabulary."""
    path = Path(tempfile.mkdtemp(prefix="shape-"))
    shape = {**json.loads(Path(config).read_text()), "eos_token_id": 2}
    (path / "config.json").write_text(json.dumps(shape))
    Tokenizer.from_checkpoint(resolve_checkpoint(EngineConfig())).backend.save(str(path / "tokenizer.json"))
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--config", help="config.json of a shape; its weights are random")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", help="write the numbers to this file")
    args = parser.parse_args()
    options = {"load_format": "dummy", "model": shape_directory(args.config)} if args.config else {"model": args.model}
    engine = build_engine(EngineConfig(device=args.device, max_num_seqs=args.running, max_model_len=1024, **options))
    core, eos = engine.core, list(engine.model.eos_token_ids) or [0]
    clock = MaskClock(core)
    pairs = []
    half = args.running // 2
    prompt = [(7 * i + 11) % engine.model.vocab_size for i in range(64)]
    run(core, requests(1, 1, 8, prompt, eos))  # compiles the grammar: the others would be done before it is there
    for pair in range(args.pairs + 1):
        row = {}
        for name, constrained in (("plain", 0), ("half", half)) if pair % 2 else (("half", half), ("plain", 0)):
            clock.seconds = 0.0
            seconds, busy, steps = run(core, requests(args.running, constrained, args.tokens, prompt, eos))
            row[name] = {
                "step_ms": round(1e3 * seconds / steps, 3),
                "processor_ms": round(1e3 * busy / steps, 3),
                "mask_ms": round(1e3 * clock.seconds / steps, 3),
            }
        if pair:  # the first one warms up
            pairs.append(row)
            print(json.dumps(row), flush=True)
    slowdown = {k: statistics.median(p["half"][k] / p["plain"][k] - 1 for p in pairs) for k in ("step_ms", "processor_ms")}
    result = {
        "device": str(engine.device), "vocab": engine.model.vocab_size, "running": args.running, "constrained": half,
        "slowdown_percent": {k: round(100 * v, 2) for k, v in slowdown.items()}, "pairs": pairs,
    }  # fmt: skip
    print(f"slowdown of a step with {half} of {args.running} constrained: {result['slowdown_percent']} percent")
    if args.json:
        write(args.json, result)


if __name__ == "__main__":
    main()
