"""Every option of the engine. The only module that reads the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import ParameterError
from headrace.machine import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine; names follow vLLM where the meaning is the same. None means: decided from model and device.

    Sizes are in tokens unless the name says bytes. Raises ParameterError on a value out of range.
    """

    model: str | None = None  # directory, .gguf file, Hub id; None: the embedded SmolLM2-135M-Instruct
    revision: str | None = None
    local_files_only: bool = False
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False  # token ids in, token ids out: nothing is tokenized or detokenized
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "fp8", "int8", "int4", "bf16"] | None = None  # of weights; None: as the file holds them
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    activation_dtype: Literal["auto", "int16", "int8"] = "auto"  # of the inputs of products with integer weights, on a CPU
    threads: int | None = None  # of a CPU; None: one for each core that is this process's own
    host_memory_bytes: int | None = None  # on a CPU, of weights and cache together at most; None: what is free
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None  # overrides the memory plan
    num_kv_blocks: int | None = None  # overrides both, for tests
    enable_prefix_caching: bool = True
    kv_cache_events: Literal["off", "hashes", "tokens"] = "off"  # of blocks that come and go: for whoever balances, publishes
    max_itl_ms: float | None = None  # bound of a step's expected time while somebody decodes: prefills get what fits
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True  # launch step N+1 before reading step N
    attention_backend: Literal["auto", "torch", "triton", "cudnn", "fa3"] = "auto"
    enforce_eager: bool = False  # plain torch: no CUDA graphs, no native step on a CPU
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1  # cores behind one front, each of tensor_parallel_size; `serve` only
    speculative_method: Literal["ngram", "draft_model", "eagle3"] | None = None  # None: one token per step and request
    speculative_model: str | None = None  # as `model`: a draft model of the same vocabulary, or an EAGLE-3 head
    num_speculative_tokens: int = 6  # drafts per request and step at most; fewer where they prove wrong
    prompt_lookup_min: int = 3  # of ngram: the last tokens must have stood before, at least so many
    prompt_lookup_max: int = 8  # more need not be compared
    # steps are filled up with drafts to so many rows, and larger ones have none: guesses, and what grammars force
    speculative_max_rows: int | None = None
    debug_checks: bool = False  # the block accounting is checked after every step
    seed: int | None = None  # of the seeds given to requests without one; None: from the operating system

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_model_len", 1, 2**24), ("max_num_seqs", 1, 65536), ("max_num_batched_tokens", 1, 2**24),
            ("block_size", 1, 4096), ("kv_cache_bytes", 1, 2**50), ("num_kv_blocks", 1, 2**31 - 1),
            ("tensor_parallel_size", 1, 64), ("data_parallel_size", 1, 256), ("num_speculative_tokens", 1, 64),
            ("prompt_lookup_min", 1, 64), ("prompt_lookup_max", self.prompt_lookup_min, 64), ("speculative_max_rows", 2, 4096),
            ("threads", 1, 4096), ("host_memory_bytes", 1, 2**50),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
                raise ParameterError(name, value, f"an integer in [{low}, {high}]")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ParameterError("gpu_memory_utilization", self.gpu_memory_utilization, "a number in (0, 1]")
        itl = self.max_itl_ms
        if itl is not None and (isinstance(itl, bool) or not isinstance(itl, int | float) or not 0.0 < itl <= 1e6):
            raise ParameterError("max_itl_ms", itl, "milliseconds in (0, 1000000]")
        for name, allowed in (
            ("load_format", ("auto", "safetensors", "gguf", "dummy")), ("device", ("auto", "cpu", "cuda")),
            ("dtype", ("auto", "float32", "bfloat16", "float16")), ("scheduling_policy", ("fcfs", "priority")),
            ("speculative_method", (None, "ngram", "draft_model", "eagle3")),
            ("attention_backend", ("auto", "torch", "triton", "cudnn", "fa3")),
            ("quantization", (None, "none", "fp8", "int8", "int4", "bf16")), ("activation_dtype", ("auto", "int16", "int8")),
            ("kv_cache_dtype", ("auto", "float32", "bfloat16", "int8")), ("kv_cache_events", ("off", "hashes", "tokens")),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ParameterError(name, getattr(self, name), "one of " + ", ".join(map(str, allowed)))
        if (self.speculative_method in ("draft_model", "eagle3")) != (self.speculative_model is not None):
            needed = "a model with speculative_method draft_model or eagle3, none otherwise"
            raise ParameterError("speculative_model", self.speculative_model, needed)
        for name, methods in (
            ("num_speculative_tokens", ("ngram", "draft_model", "eagle3")), ("prompt_lookup_min", ("ngram",)),
            ("prompt_lookup_max", ("ngram",)),
        ):  # fmt: skip
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value != default and self.speculative_method not in methods:
                raise ParameterError(name, value, "nothing without speculative_method " + " or ".join(methods))
        if self.speculative_max_rows is not None and self.speculative_method is None and self.skip_tokenizer_init:
            without = "nothing without speculative_method and, for want of a tokenizer, without grammars"
            raise ParameterError("speculative_max_rows", self.speculative_max_rows, without)


# How OpenMP's threads wait for work. By default they spin for milliseconds: beside any other process that wants a core, those
# spinning keep it from those that compute, and a step takes several times as long. With these they sleep after microseconds.
WAITING = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "1000",  # of GNU's library, which torch brings on Linux
    "KMP_BLOCKTIME": "0",  # of Intel's and LLVM's: milliseconds
}


def prepare_threads() -> None:
    """Decide how torch's threads wait and how many there are, by the environment that OpenMP reads when torch is imported.

    What the user has set stands. Of no effect once torch is there.
    """
    if "torch" in sys.modules:
        return
    if not any(name in os.environ for name in WAITING):
        os.environ.update(WAITING)
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(usable_cores())


def environment_of_child() -> dict[str, str]:
    """For a Python process that is to find the modules of this one, whoever has changed sys.path since it started."""
    path = [os.path.abspath(p) for p in sys.path if not p or os.path.exists(p)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def visible_cards() -> list[str]:
    """The cards that CUDA_VISIBLE_DEVICES names, as it names them; none: it does not say."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def show_cards(names: list[str]) -> None:
    """This process, and those that it starts, shall see these and no others. Of no effect once CUDA has been used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def hub_offline() -> bool:
    """Whether the environment forbids asking the Hugging Face Hub (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.strip().upper() in ("1", "TRUE", "YES", "ON") for value in values)


STORE_BYTES = 64 * 2**20  # of responses that a server keeps
KEY_FORM = "printable characters without spaces"


def is_api_key(key: str) -> bool:
    """Whether a client can send this after `Bearer`."""
    return bool(key) and all(c.isprintable() and not c.isspace() for c in key)


def api_key_from_environment() -> str | None:
    """HEADRACE_API_KEY as it is set, even to nothing: a key that the server asks its clients for. None: it is not set."""
    return os.environ.get("HEADRACE_API_KEY")


def cache_dir() -> Path:
    """Where Headrace keeps files of its own: HEADRACE_CACHE, or `headrace` in the user's cache directory."""
    if chosen := os.environ.get("HEADRACE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
