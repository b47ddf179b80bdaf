"""Options that several commands share: which model, where and how it runs, and how tokens are drawn."""

from __future__ import annotations

import argparse
from typing import Any

ENGINE_OPTIONS = (
    "model", "revision", "local_files_only", "tokenizer", "skip_tokenizer_init", "load_format",
    "device", "dtype", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "gpu_memory_utilization", "kv_cache_bytes", "enable_prefix_caching",
    "max_itl_ms", "scheduling_policy", "async_scheduling", "attention_backend", "enforce_eager",
    "tensor_parallel_size", "debug_checks", "seed", "speculative_method", "speculative_model", "num_speculative_tokens",
    "prompt_lookup_min", "prompt_lookup_max", "speculative_max_rows",
)  # fmt: skip


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="directory, .gguf file or Hub id (default: the embedded SmolLM2-135M-Instruct)")
    model.add_argument("--revision", help="branch, tag or commit on the Hub")
    model.add_argument("--local-files-only", action="store_true", default=None, help="never ask the network")
    model.add_argument("--tokenizer", help="directory or Hub id of another tokenizer")
    model.add_argument("--load-format", choices=("auto", "safetensors", "gguf", "dummy"))
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"))
    engine.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    engine.add_argument("--max-model-len", type=int, help="tokens of prompt and output together")
    engine.add_argument("--max-num-seqs", type=int, help="requests that run at the same time")
    engine.add_argument("--max-num-batched-tokens", type=int, help="tokens computed in one step")
    engine.add_argument("--block-size", type=int, help="tokens in a block of the KV cache")
    engine.add_argument("--gpu-memory-utilization", type=float, help="share of the GPU's memory to use")
    engine.add_argument("--kv-cache-bytes", type=int, help="size of the KV cache instead of the memory plan's")
    for name, text in (
        ("enable-prefix-caching", "reuse the KV of equal prompt beginnings"),
        ("enable-chunked-prefill", "let a long prompt run in pieces between decodes"),
        ("async-scheduling", "launch a step before the previous one is read"),
    ):
        engine.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text)
    engine.add_argument("--max-itl-ms", type=float, help="prefill no more in a step than keeps running streams this smooth")
    engine.add_argument("--scheduling-policy", choices=("fcfs", "priority"))
    engine.add_argument("--attention-backend", help="auto, torch, triton, cudnn or fa3")
    engine.add_argument("--enforce-eager", action="store_true", default=None, help="no CUDA graphs")
    engine.add_argument("--tensor-parallel-size", type=int)
    engine.add_argument("--debug-checks", action="store_true", default=None, help="check the block accounting every step")
    drafts = parser.add_argument_group("speculative decoding", "several tokens per step; the output stays the same")
    drafts.add_argument("--speculative-method", choices=("ngram", "draft_model", "eagle3"), help="who guesses (default: none)")
    drafts.add_argument("--speculative-model", help="draft model or EAGLE-3 head: directory, .gguf file or Hub id")
    drafts.add_argument("--num-speculative-tokens", type=int, help="guesses per request and step at most")
    drafts.add_argument("--prompt-lookup-min", type=int, help="of ngram: tokens that must have stood before, at least")
    drafts.add_argument("--prompt-lookup-max", type=int, help="of ngram: tokens compared at most")
    drafts.add_argument("--speculative-max-rows", type=int, help="no drafts in steps of more rows than this")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by EngineConfig's names."""
    return {k: v for k in ENGINE_OPTIONS if (v := getattr(args, k, None)) is not None}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", "--max-new-tokens", type=int, default=256, help="output tokens at most")
    group.add_argument("--temperature", type=float, help="0 is greedy")
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int, help="0: off")
    group.add_argument("--min-p", type=float)
    group.add_argument("--repetition-penalty", type=float)
    group.add_argument("--seed", type=int, help="the same seed and prompt give the same text")
    group.add_argument("--stop", action="append", help="end at this text (repeatable)")
    group.add_argument("--n", type=int, default=1, help="samples per prompt")


def sampling_params(args: argparse.Namespace):
    from headrace.sampling.params import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "n")
    return SamplingParams(**{k: getattr(args, k) for k in names})
