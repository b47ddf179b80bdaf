"""One engine in a process of its own, for cpu_peers.py: `python cpu_engines.py ENGINE JSON` prints a JSON line when the first
token is there, and one with what was measured.

    {"model", "threads", "options", "batches", "output", "prefills", "contexts", "busy"}: what is asked, see cpu_peers.py

Needs nothing of Headrace for the other engines, so that each can run in an environment of its own.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

INPUT = 128  # tokens of a prompt before the decodes that are measured
BUSY = "while True: pass"
Run = Callable[..., float]  # batch, tokens in, tokens out -> seconds


def prompts(batch: int, length: int) -> list[list[int]]:
    return [[random.randrange(10, 10000) for _ in range(length)] for _ in range(batch)]


def headrace(spec: dict[str, Any]) -> Run:
    from headrace import LLM, SamplingParams

    longest = max([INPUT + spec["output"], *spec["prefills"], *(c + spec["output"] for c in spec["contexts"])]) + 8
    llm = LLM(
        spec["model"], device="cpu", threads=spec["threads"], max_model_len=longest, max_num_seqs=max([1, *spec["batches"]]),
        skip_tokenizer_init=True, **spec["options"],
    )  # fmt: skip

    ids: list[list[int]] = []

    def run(batch: int, inputs: int, outputs: int, again: bool = False) -> float:
        """`again`: of the prompts of the last run, which the prefix cache has."""
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        if not again:
            llm.reset_prefix_cache()
            ids[:] = prompts(batch, inputs)
        began = time.perf_counter()
        llm.generate(ids, params, use_tqdm=False)
        return time.perf_counter() - began

    return run


def transformers(spec: dict[str, Any]) -> Run:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from gguf_reference import load_llama

    torch.set_num_threads(spec["threads"])
    model = load_llama(Path(spec["model"]), getattr(torch, spec["options"].get("dtype", "float32")))

    @torch.inference_mode()
    def run(batch: int, inputs: int, outputs: int) -> float:
        ids = torch.tensor(prompts(batch, inputs))
        settings = {"do_sample": False, "max_new_tokens": outputs, "min_new_tokens": outputs, "pad_token_id": 0}
        began = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return time.perf_counter() - began

    return run


def openvino(spec: dict[str, Any]) -> Run:
    import numpy as np
    import openvino as ov
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(spec["model"], "CPU", INFERENCE_NUM_THREADS=spec["threads"], **spec["options"])

    def run(batch: int, inputs: int, outputs: int) -> float:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = outputs, True, False
        ids = np.array(prompts(batch, inputs), np.int64)
        tokens = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        began = time.perf_counter()
        pipeline.generate(tokens, config)
        return time.perf_counter() - began

    return run


def vllm(spec: dict[str, Any]) -> Run:
    os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB, more than is asked of it
    from vllm import LLM, SamplingParams

    longest = max([INPUT + spec["output"], *spec["prefills"]]) + 8
    engine = LLM(
        spec["model"], max_model_len=longest, max_num_seqs=max([1, *spec["batches"]]), skip_tokenizer_init=True,
        enable_prefix_caching=False, **spec["options"],
    )  # fmt: skip

    def run(batch: int, inputs: int, outputs: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in prompts(batch, inputs)]
        began = time.perf_counter()
        engine.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - began

    return run


ENGINES: dict[str, Callable[[dict[str, Any]], Run]] = {
    "headrace": headrace, "transformers": transformers, "openvino": openvino, "vllm": vllm,
}  # fmt: skip


def decode_rate(run: Run, batch: int, inputs: int, outputs: int) -> float:
    """Tokens per second after the first token, of all sequences together."""
    first = run(batch, inputs, 1)
    return batch * (outputs - 1) / (run(batch, inputs, outputs) - first)


def context_rate(run: Run, length: int, outputs: int) -> float:
    """The same of one sequence that has `length` tokens, without their prefill, which is far longer than what is measured."""
    run(1, length, 1)
    first = run(1, length, 1, again=True)
    return (outputs - 1) / (run(1, length, outputs, again=True) - first)


def busy_ratio(run: Run, outputs: int) -> float:
    """Decode at batch 1 beside a process that wants a core all the time, as a share of the quiet rate around it."""
    quiet = [decode_rate(run, 1, INPUT, outputs)]
    stranger = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        contended = statistics.median(decode_rate(run, 1, INPUT, outputs) for _ in range(3))
    finally:
        stranger.kill()
        stranger.wait()
    quiet.append(decode_rate(run, 1, INPUT, outputs))
    return contended / statistics.mean(quiet)


def main() -> None:
    engine, spec = sys.argv[1], json.loads(sys.argv[2])
    os.environ["OMP_NUM_THREADS"] = str(spec["threads"])
    run = ENGINES[engine](spec)
    run(1, 4, 1)
    print(json.dumps({"first": True}), flush=True)
    figures: dict[str, float] = {}
    for batch in spec["batches"]:
        run(batch, 8, 4)
        figures[f"decode {batch}"] = decode_rate(run, batch, INPUT, spec["output"])
    for length in spec["prefills"]:
        figures[f"prefill {length}"] = length / run(1, length, 1)
    for length in spec["contexts"]:
        figures[f"context {length}"] = context_rate(run, length, spec["output"])
    if spec["busy"]:
        figures["busy"] = busy_ratio(run, spec["output"])
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
