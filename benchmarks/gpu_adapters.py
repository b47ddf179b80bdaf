"""What adapters cost on a card: decode steps and prompts of an 8B of random weights, without, with and beside adapters.

    python benchmarks/gpu_adapters.py [--shape qwen3-8b] [--rows 1,8,32,64] [--adapters 8] [--rank 16]

A line each, for each number of rows: an engine that takes none; one that takes some, by requests that have none; the same by
requests that have one each in turn; all the same; by half of them. Milliseconds of a decode step, and of a prompt step of 4096
tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from headrace.config import EngineConfig
from headrace.engine.build import Engine, build_engine
from headrace.engine.messages import EngineRequest
from headrace.lora.format import CONFIG, TENSORS, examine
from headrace.lora.names import salted
from headrace.lora.targets import modules_of
from headrace.lora.version import Version
from headrace.sampling.params import SamplingParams

PROMPT, STEPS, CHUNK = 128, 100, 4096


def write(path: Path, modules: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    """Small random numbers."""
    torch.manual_seed(seed)
    path.mkdir()
    tensors = {}
    for name, (rows, columns) in modules.items():
        for which, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            numbers = torch.randn(shape, device="cuda").mul_(0.02).bfloat16().cpu()
            tensors[f"base_model.model.model.{name}.lora_{which}.weight"] = numbers
    save_file(tensors, path / TENSORS)
    (path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}))


def request(engine: Engine, name: str, tokens: int, output: int, digest: str) -> EngineRequest:
    generator = torch.Generator().manual_seed(hash(name) % 2**31)
    ids = torch.randint(1000, 30000, (tokens,), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, lora=digest).resolved({})
    return EngineRequest(name, ids, params, 0, cache_salt=salted("", digest))


def seconds(engine: Engine, rows: int, digests: list[str], label: str) -> tuple[float, float]:
    """Of a decode step and of a step of CHUNK tokens."""
    core = engine.core
    for i in range(rows):
        core.add(request(engine, f"{label}-{i}", PROMPT, STEPS + 60, digests[i % len(digests)]))
    while core.scheduler.num_waiting or core.times.num_seqs != core.times.num_tokens:
        core.step()
    for _ in range(20):
        core.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        core.step()
    torch.cuda.synchronize()
    decode = (time.perf_counter() - began) / STEPS
    while core.has_work:
        core.step()
    prompts = []
    for turn in range(4):
        for i in range(8):
            core.add(request(engine, f"{label}-p{turn}-{i}", CHUNK // 8, 1, digests[i % len(digests)]))
        torch.cuda.synchronize()
        began = time.perf_counter()
        while core.has_work:
            core.step()
        torch.cuda.synchronize()
        prompts.append(time.perf_counter() - began)
    return decode, min(prompts[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("adapters", 8), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[32])
    parser.add_argument("--shape", default="qwen3-8b")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "config.json").write_text((Path(__file__).parent / "shapes" / f"{args.shape}.json").read_text())
        options = {
            "model": directory, "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "max_model_len": 2048,
            "max_num_seqs": 64, "max_num_batched_tokens": CHUNK,
        }  # fmt: skip
        engine = build_engine(EngineConfig(**options))
        engine.prepare()
        modules = modules_of(engine.model)
        base = {rows: seconds(engine, rows, [""], f"base{rows}") for rows in args.rows}
        engine.close()
        for rows, (decode, prompts) in base.items():
            print(f"{rows:3} rows, none taken     decode {1e3 * decode:7.3f} ms  prompts {1e3 * prompts:7.2f} ms", flush=True)
        del engine
        engine = build_engine(
            EngineConfig(**options, lora_dir=directory, max_loras=args.adapters, max_lora_rank=args.rank)
        )  # fmt: skip
        engine.prepare()
        versions: list[Version] = []
        for i in range(args.adapters):
            write(home / f"{i}", modules, args.rank, i)
            versions.append(examine(home / f"{i}", modules, args.rank))
        assert engine.core.adapters is not None
        began = time.perf_counter()
        for version in versions:
            engine.core.adapters.load(version)
        torch.cuda.synchronize()
        print(f"an adapter is loaded in {1e3 * (time.perf_counter() - began) / args.adapters:.0f} ms", flush=True)
        digests = [version.digest for version in versions]
        cases = {"beside them": [""], "one each": digests, "one adapter": digests[:1], "half": ["", *digests][:2]}
        for rows, (label, each) in itertools.product(args.rows, cases.items()):
            decode, prompts = seconds(engine, rows, each, f"{label}{rows}")
            changes = [100 * (found / before - 1) for found, before in zip((decode, prompts), base[rows], strict=True)]
            told = f"{rows:3} rows, {label:14s} decode {1e3 * decode:7.3f} ms ({changes[0]:+5.1f} %)  "
            print(f"{told}prompts {1e3 * prompts:7.2f} ms ({changes[1]:+5.1f} %)", flush=True)


if __name__ == "__main__":
    main()
