"""Options that several commands share: which model, where and how it runs, and how tokens are drawn."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from headrace.cli.parser import text
from headrace.config import EngineConfig

_QUANTIZATION = (
    "what weights of floats become: fp8, int8 or int4 on a GPU, int8, int4 or bf16 on a CPU; none decodes what a file holds in "
    "fewer bits (default: as the file holds them)"
)
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser.add_argument_group("model"))
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", choices=("auto", "cpu", "cuda"), help=f"auto: a GPU where there is one {_of('device')}")
    engine.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"),
        help=f"numbers it computes in; auto: on a CPU as the file holds them, on a GPU the checkpoint's 16 bits {_of('dtype')}",
    )  # fmt: skip
    for name, choices, words in (
        ("quantization", ("none", "fp8", "int8", "int4", "bf16"), _QUANTIZATION),
        ("kv-cache-dtype", ("auto", "float32", "bfloat16", "int8"), "keys and values on a CPU; auto: by the weights"),
        ("activation-dtype", ("auto", "int16", "int8"), "inputs of integer weights on a CPU; int8 is faster, auto is int16"),
    ):
        shown = words if "default:" in words else f"{words} {_of(name)}"
        engine.add_argument(f"--{name}", choices=choices, help=shown)
    for name, kind, metavar, words in (
        ("max-model-len", int, "TOKENS", "tokens of prompt and output together (default: the model's context)"),
        ("max-num-seqs", int, "N", "requests that run at the same time"),
        ("max-num-batched-tokens", int, "TOKENS", "computed in one step (default: 16384 on a GPU, 2048 on a CPU)"),
        ("block-size", int, "TOKENS", "in a block of the KV cache (default: 64 on a GPU, 16 on a CPU)"),
        ("gpu-memory-utilization", float, "SHARE", "of the GPU's memory to use"),
        ("kv-cache-bytes", int, "BYTES", "size of the KV cache, of each rank of a split model (default: by the memory plan)"),
        ("threads", int, "N", "of a CPU (default: one for each core that is its own)"),
        ("max-itl-ms", float, "MS", "prefill no more in a step than keeps running streams this smooth"),
        ("attention-backend", text, "NAME", "auto; on a GPU also triton, cudnn or fa3, on a CPU torch"),
        ("tensor-parallel-size", int, "N", "GPUs of one host that the model is split over, one process each"),
    ):
        shown = words if "default:" in words else f"{words} {_of(name)}"
        engine.add_argument(f"--{name}", type=kind, metavar=metavar, help=shown)
    for name, words in (
        ("enable-prefix-caching", "reuse the KV of equal prompt beginnings"),
        ("async-scheduling", "launch a step before the previous one is read"),
    ):
        engine.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=f"{words} {_of(name)}")
    engine.add_argument("--scheduling-policy", choices=("fcfs", "priority"), help=f"who runs first {_of('scheduling_policy')}")
    for name, words in (
        ("enforce-eager", "plain torch: no CUDA graphs, no native step on a CPU"),
        ("debug-checks", "check the block accounting every step"),
    ):
        engine.add_argument(f"--{name}", action="store_true", default=None, help=f"{words} {_of(name)}")
    _add_speculative_arguments(parser.add_argument_group("speculative decoding", "several tokens per step; the same output"))
    add_log_level(parser)


def _add_model_arguments(model) -> None:
    kinds = "directory, .gguf file or Hub id"
    model.add_argument("--model", type=text, help=f"{kinds} (default: the embedded SmolLM2-135M-Instruct)")
    model.add_argument("--revision", type=text, metavar="NAME", help="branch, tag or commit on the Hub (default: the Hub's)")
    model.add_argument(
        "--local-files-only", action="store_true", default=None, help=f"never ask the network {_of('local_files_only')}"
    )
    model.add_argument("--tokenizer", type=text, metavar="PATH", help="directory or Hub id of another (default: the model's)")
    model.add_argument(
        "--load-format", choices=("auto", "safetensors", "gguf", "dummy"),
        help=f"of the weights; dummy: random ones {_of('load_format')}",
    )  # fmt: skip


def _add_speculative_arguments(drafts) -> None:
    drafts.add_argument("--speculative-method", choices=("ngram", "draft_model", "eagle3"), help="who guesses (default: none)")
    drafts.add_argument(
        "--speculative-model", type=text, metavar="PATH", help="draft model or EAGLE-3 head: directory, .gguf file or Hub id"
    )
    for name, words in (
        ("num-speculative-tokens", "guesses per request and step at most"),
        ("prompt-lookup-min", "of ngram: tokens that must have stood before, at least"),
        ("prompt-lookup-max", "of ngram: tokens compared at most"),
    ):
        drafts.add_argument(f"--{name}", type=int, metavar="N", help=f"{words} {_of(name)}")
    drafts.add_argument(
        "--speculative-max-rows", type=int, metavar="N",
        help="no drafts in steps of more rows than this (default: 64 on a GPU, 16 on a CPU)",
    )  # fmt: skip


def _of(name: str) -> str:
    """EngineConfig's default, for help: the options' own is None, which tells what was given from what was not."""
    value = next(f.default for f in fields(EngineConfig) if f.name == name.replace("-", "_"))
    return f"(default: {'none' if value is None else ('off', 'on')[value] if isinstance(value, bool) else value})"


def add_log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", default="warning", choices=LOG_LEVELS, help="least grave messages that are logged")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by EngineConfig's names."""
    return {f.name: v for f in fields(EngineConfig) if (v := getattr(args, f.name, None)) is not None}


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: str = "256, or what fits") -> None:
    group = parser.add_argument_group("sampling")
    model = "(default: the checkpoint's generation config)"
    group.add_argument(
        "--max-tokens", "--max-new-tokens", type=int, metavar="N", help=f"output tokens at most (default: {max_tokens})"
    )
    group.add_argument("--temperature", type=float, metavar="X", help=f"0 is greedy {model}")
    group.add_argument("--top-p", type=float, metavar="X", help=f"the likeliest tokens up to this probability; 1: all {model}")
    group.add_argument("--top-k", type=int, metavar="N", help=f"so many of the likeliest tokens; 0: all {model}")
    group.add_argument("--min-p", type=float, metavar="X", help=f"tokens of this share of the likeliest's probability {model}")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help=f"of tokens that were there; 1: none {model}")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed and prompt give the same text (default: random)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text (repeatable)")
    group.add_argument("--n", type=int, metavar="N", default=1, help="samples per prompt")


def sampling_params(args: argparse.Namespace):
    from headrace.sampling.params import AtMost, SamplingParams

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "n")
    max_tokens = AtMost(256) if args.max_tokens is None else args.max_tokens
    return SamplingParams(max_tokens=max_tokens, **{k: getattr(args, k) for k in names})
