"""The law of one answer, on the native CPU step: short random requests in cores that are dropped, preempted and resumed,
each compared with its run alone, ids and logprobs bit for bit. Exits with 1 if any differs.

    python benchmarks/soak_core.py --requests 100000 [--mode int16] [--out FILE.json]

A tiny random model (written by transformers, from the test extra): what is tested is that a row's numbers do not depend on
company. The different requests are run alone once each, then many times among others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from about import write
from engine_driver import make_core
from headrace.engine.core import EngineCore
from headrace.native.forward import NativeDecoder
from schedule_soak import Soak
from tiny_models import write_tiny

MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "int16": {"dtype": "auto", "quantization": "int8"},
    "int8": {"dtype": "auto", "quantization": "int4", "activation_dtype": "int8", "kv_cache_dtype": "int8"},
    "bf16": {"dtype": "bfloat16"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--different", type=int, default=1000, help="requests that are run alone first")
    parser.add_argument("--turns-to-kill", type=int, default=400, help="turns of the core's loop, on average, to its end")
    parser.add_argument("--mode", choices=MODES, default="int16", help="weights, activations and cache")
    parser.add_argument("--torch", action="store_true", help="plain torch instead: what the native step is measured against")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the report to this JSON file")
    args = parser.parse_args()
    began = time.time()
    with tempfile.TemporaryDirectory() as directory:
        model = str(write_tiny("llama", Path(directory) / "model"))

        def core(**options: Any) -> EngineCore:
            mode = MODES[args.mode] | {"enforce_eager": args.torch, "block_size": 16, "debug_checks": False}
            made = make_core(model, skip_tokenizer_init=True, **mode, **options)
            assert args.torch or isinstance(made.runner.decoder, NativeDecoder), "the native step is not there"
            return made

        soak = Soak(core, args.seed, args.different, args.turns_to_kill)
        soak.run(args.requests)
    result = dict(soak.counts) | {
        "differing": len(soak.differing), "mode": args.mode, "torch": args.torch, "cpus": os.cpu_count(),
        "minutes": round((time.time() - began) / 60, 1),
    }  # fmt: skip
    print(json.dumps(result))
    for fault in soak.differing[:10]:
        print(fault)
    if args.out:
        write(args.out, result)
    return 1 if soak.differing else 0


if __name__ == "__main__":
    sys.exit(main())
