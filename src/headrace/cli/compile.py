"""`headrace compile MODEL --card h100`: fills the cache of compiled kernels where there is no card, as in an image's build."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from headrace.cli.options import add_engine_arguments, add_options, engine_options, named_model
from headrace.cli.parser import CommandParser, text
from headrace.cli.pull import NAMES
from headrace.cli.sources import add_config_file, key_of
from headrace.compile_ahead.cards import CARDS, Card, named_card, present_card
from headrace.config import EngineConfig, c_compiler
from headrace.errors import CapacityError, ParameterError
from headrace.extras import is_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", nargs="?", type=text, metavar="MODEL",
        help=f"{NAMES}; a directory or .gguf file (default: the embedded SmolLM2-135M-Instruct)",
    )  # fmt: skip
    names = f"{', '.join(CARDS)}, or as nvidia-smi says it"
    parser.add_argument("--card", metavar="NAME", help=f"{names} (default: the one of this machine)")
    parser.add_argument("--processes", type=int, metavar="N", help="that compile (default: as cores and memory allow)")
    add_config_file(parser, of_server)
    add_engine_arguments(parser)
    add_options(parser, EngineConfig, "adapters (LoRA)")


def of_server() -> set[str]:
    """Names of a server's options: its file is read as it is, but for one of several models."""
    from headrace.cli import serve_options

    parser = CommandParser()
    serve_options.add_arguments(parser)
    return {key_of(action) for action in parser._actions if action.option_strings} - {"models", "config"}


def run(args: argparse.Namespace) -> int:
    named_model(args)
    if args.processes is not None and args.processes < 1:
        raise ParameterError("--processes", args.processes, "an integer >= 1")
    card = chosen_card(args.card)
    if not is_installed("triton"):
        raise ParameterError("card", args.card, "nothing without Triton: `pip install triton`")
    import torch

    from headrace.compile_ahead.ahead import Compilation, compiles_ahead
    from headrace.compile_ahead.notes import kernel_cache
    from headrace.engine.build import resolve, with_seats
    from headrace.engine.named_format import without_named_format
    from headrace.engine.options import check_options
    from headrace.engine.weight_sizes import weight_bytes
    from headrace.model.checkpoint import resolve_checkpoint
    from headrace.model.families import model_config_from_hf

    config = EngineConfig(**engine_options(args))
    if config.device == "cpu":
        raise ParameterError("device", config.device, "auto or cuda: kernels are those of a card")
    if config.kv_cache_dtype == "fp8" and card.capability < 89:
        raise ParameterError("kv_cache_dtype", "fp8", f"auto on {card.name}: FP8 needs compute capability 8.9")
    config = without_weights(config)
    checkpoint = resolve_checkpoint(config)
    config = without_named_format(config, checkpoint)
    if not compiles_ahead(config, checkpoint):
        words = "1 for narrow weights or adapters: such a rank's kernels are compiled where it runs"
        raise ParameterError("tensor_parallel_size", config.tensor_parallel_size, words)
    model = model_config_from_hf(checkpoint.config)
    # a draft model need not be here, and no thread computes
    alone = replace(config, device="cuda", threads=None, speculative_method=None, speculative_model=None)
    check_options(alone, checkpoint, model, here=False)
    weights = weight_bytes(alone, checkpoint, on_card=True) // config.tensor_parallel_size
    room = int((card.memory << 30) * config.gpu_memory_utilization)
    if weights > room:
        share = f"--gpu-memory-utilization {config.gpu_memory_utilization:g} of {card.name} are {room >> 30}"
        raise CapacityError(f"the weights take {weights >> 30} GiB, and {share}: another card, fewer bits, or more cards")
    limits = resolve(with_seats(config, checkpoint, model, card.memory), model, torch.device("cuda"))
    if c_compiler() is None:
        print("headrace: warning: there is no C compiler here (gcc, clang, CC): the card's machine needs one", file=sys.stderr)
    began, shown = time.perf_counter(), sys.stderr.isatty()

    def told(done: int, total: int) -> None:
        if shown or done in (0, total):
            print(f"compiling for {card.name}: {done} of {total}", end="\r" if shown else "\n", file=sys.stderr, flush=True)

    with Compilation(config, checkpoint, limits, card, args.processes or 0) as compilation:
        if compilation.last.ended:
            print(f"all of it is in {kernel_cache()}")
            return 0
        found = compilation.wait(told)
    if shown:
        print(file=sys.stderr)
    if not found.total:
        raise CapacityError("the kernels are not compiled: see above")
    print(f"{found.done} kernels in {kernel_cache()} after {time.perf_counter() - began:.1f} s")
    if found.failed or found.refused or not found.ended:
        wrong = max(found.failed, len(found.refused), found.total - found.done)
        raise CapacityError(f"{wrong} of {found.total} kernels are not compiled, or do not fit: see above")
    return 0


def without_weights(config: EngineConfig) -> EngineConfig:
    """The same for a model whose weights need not be there: that has a config.json, and in its file only floats."""
    from headrace.model.checkpoint import locate_config
    from headrace.model.formats.quantized import quantization_beside, quantization_of
    from headrace.model.formats.safetensors_file import read_json

    if config.model is None or config.load_format not in ("auto", "safetensors"):
        return config
    path = locate_config(config)
    if not (path / "config.json").exists():
        return config
    if quantization_of(quantization_beside(path, read_json(path / "config.json"))) is not None:
        return config
    return replace(config, model=str(path), revision=None, load_format="dummy")


def chosen_card(name: str | None) -> Card:
    if name is not None:
        return named_card(name)
    if (card := present_card()) is None:
        raise ParameterError("card", name, f"one of {', '.join(CARDS)}: this machine has none")
    return card
