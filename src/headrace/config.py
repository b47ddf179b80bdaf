"""Every option of the engine. The only module that reads the environment."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from headrace.errors import ParameterError
from headrace.machine import usable_cores
from headrace.options import check, option

_model = partial(option, group="model")
_engine = partial(option, group="engine")
_fleet = partial(option, group="several cores, other fleets")
_adapters = partial(option, group="adapters (LoRA)")
_drafts = partial(option, group="speculative decoding: several tokens per step; the same output")

# where nobody says: tokens of a step at most, of a block of the KV cache, rows up to which a step is filled with drafts
GPU_STEP, CPU_STEP = 8192, 2048
GPU_BLOCK, CPU_BLOCK = 64, 16
GPU_DRAFT_ROWS, CPU_DRAFT_ROWS = 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine; names follow vLLM where the meaning is the same. None means: decided from model and device.

    Sizes are in tokens unless the name says bytes. Raises ParameterError on a value out of range.
    """

    model: str | None = _model(None, "directory, .gguf file or Hub id", shown="the embedded SmolLM2-135M-Instruct")
    revision: str | None = _model(None, "branch, tag or commit on the Hub", unit="NAME", shown="the Hub's")
    local_files_only: bool = _model(False, "never ask the network")
    tokenizer: str | None = _model(None, "directory or Hub id of another", unit="PATH", shown="the model's")
    skip_tokenizer_init: bool = False  # token ids in, token ids out: nothing is tokenized or detokenized
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = _model("auto", "of the weights; dummy: random ones")
    device: Literal["auto", "cpu", "cuda"] = _engine("auto", "auto: a GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _engine(
        "auto", "numbers it computes in; auto: on a CPU as the file holds them, on a GPU the checkpoint's 16 bits"
    )
    quantization: Literal[
        "none", "fp8", "int8", "int4", "bf16", "awq", "awq_marlin", "gptq", "gptq_marlin", "moe_wna16", "auto-round", "inc",
        "compressed-tensors", "modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "fbgemm_fp8",
        "mxfp4", "quark", "torchao", "gguf",
    ] | None = _engine(
        None,
        "what weights of floats become: fp8, int8 or int4 on a GPU, int8, int4 or bf16 on a CPU; none: decode a quantized file"
        "; a value that names what the file is already changes nothing",
        shown="as the file holds them",
    )  # fmt: skip
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = _engine(
        "auto", "keys and values; auto: by the weights; fp8: on a GPU twice the context; the others on a CPU"
    )
    activation_dtype: Literal["auto", "int16", "int8"] = _engine(
        "auto", "inputs of integer weights on a CPU; int8 is faster, auto is int16"
    )
    threads: int | None = _engine(None, "of a CPU", 1, 4096, shown="one for each core that is its own")
    memory_bytes: int | None = option(None, "", 1, 2**50)  # of the host or the card, for all it needs; None: what is free
    max_model_len: int | None = _engine(
        None, "tokens of prompt and output together", 1, 2**24, "TOKENS", shown="the model's context"
    )
    max_num_seqs: int | None = _engine(
        None, "requests that run at the same time", 1, 65536, shown="by the memory plan on a GPU, 256 on a CPU"
    )
    max_num_batched_tokens: int | None = _engine(
        None, "computed in one step", 1, 2**24, "TOKENS", shown=f"{GPU_STEP} on a GPU, {CPU_STEP} on a CPU"
    )
    block_size: int | None = _engine(
        None, "in a block of the KV cache", 1, 4096, "TOKENS", shown=f"{GPU_BLOCK} on a GPU, {CPU_BLOCK} on a CPU"
    )
    gpu_memory_utilization: float = _engine(0.9, "of the GPU's memory to use", high=1, unit="SHARE", more_than=0)
    kv_cache_bytes: int | None = _engine(
        None, "of the KV cache, of each rank of a split model", 1, 2**50, "BYTES", shown="by the memory plan"
    )
    num_kv_blocks: int | None = option(None, "", 1, 2**31 - 1)  # overrides the plan and kv_cache_bytes, for tests
    enable_prefix_caching: bool = _engine(True, "reuse the KV of equal prompt beginnings")
    kv_cache_events: Literal["off", "hashes", "tokens"] = "off"  # of blocks that come and go: for whoever balances, publishes
    max_itl_ms: float | None = _engine(
        None, "prefill no more in a step than keeps running streams this smooth", high=1e6, unit="MS", more_than=0
    )
    scheduling_policy: Literal["fcfs", "priority"] = _engine("fcfs", "who runs first")
    async_scheduling: bool = _engine(True, "on a GPU: launch a step before the previous one is read")
    attention_backend: Literal["auto", "torch", "triton", "cudnn", "fa3"] = _engine(
        "auto", "auto; on a GPU also triton, cudnn or fa3, on a CPU torch"
    )
    enforce_eager: bool = _engine(False, "plain torch: no CUDA graphs, no native step on a CPU")
    tensor_parallel_size: int = _engine(1, "GPUs of one host that the model is split over, one process each", 1, 64)
    data_parallel_size: int = _fleet(1, "cores behind this server, each with its own cache", 1, 256)
    speculative_method: Literal["ngram", "draft_model", "eagle3"] | None = _drafts(None, "who guesses")
    speculative_model: str | None = _drafts(
        None, "draft model of the same vocabulary, or EAGLE-3 head: directory, .gguf file or Hub id", unit="PATH"
    )
    num_speculative_tokens: int = _drafts(6, "guesses per request and step at most; fewer where they prove wrong", 1, 64)
    prompt_lookup_min: int = _drafts(3, "of ngram: tokens that must have stood before, at least", 1, 64)
    prompt_lookup_max: int = _drafts(8, "of ngram: tokens compared at most", 1, 64)
    # steps are filled up with drafts to so many rows, and larger ones have none: guesses, and what grammars force
    speculative_max_rows: int | None = _drafts(
        None, "no drafts in steps of more rows than this", 2, 4096,
        shown=f"{GPU_DRAFT_ROWS} on a GPU, {CPU_DRAFT_ROWS} on a CPU",
    )
    lora: tuple[str, ...] = _adapters((), "an adapter as PEFT saves it, by the name that requests call it", unit="NAME=PATH")
    lora_dir: str | None = _adapters(None, "where /v1/load_lora_adapter may load from, with --admin-key", unit="DIR")
    max_loras: int = _adapters(4, "at the same time; each takes its share of the device's memory", 1, 256)
    max_lora_rank: int = _adapters(16, "of an adapter at most", 1, 512)
    lora_experts: bool = _adapters(False, "adapters may be of the experts that tokens choose, too: much larger places")
    debug_checks: bool = _engine(False, "check the block accounting every step")
    seed: int | None = None  # of the seeds given to requests without one; None: from the operating system

    def __post_init__(self) -> None:
        if isinstance(self.lora, Mapping):  # of Python
            object.__setattr__(self, "lora", tuple(f"{name}={path}" for name, path in self.lora.items()))
        elif isinstance(self.lora, list):
            object.__setattr__(self, "lora", tuple(self.lora))
        check(self)
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ParameterError("prompt_lookup_max", self.prompt_lookup_max, f"an integer in [{self.prompt_lookup_min}, 64]")
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
        self._check_adapters()
        if self.speculative_max_rows is not None and self.speculative_method is None and self.skip_tokenizer_init:
            without = "nothing without speculative_method and, for want of a tokenizer, without grammars"
            raise ParameterError("speculative_max_rows", self.speculative_max_rows, without)

    @property
    def takes_adapters(self) -> bool:
        return bool(self.lora) or self.lora_dir is not None

    def adapter_paths(self) -> dict[str, str]:
        """By name."""
        return dict(one.partition("=")[::2] for one in self.lora)

    def _check_adapters(self) -> None:
        names = [one.partition("=")[0] for one in self.lora]
        for one, name in zip(self.lora, names, strict=True):
            if not name or not one.partition("=")[2] or names.count(name) > 1:
                raise ParameterError("lora", one, "NAME=PATH, with names that differ")
        if len(names) > self.max_loras:
            raise ParameterError("lora", f"{len(names)} adapters", f"at most {self.max_loras}, as max_loras says")
        for option_name in ("max_loras", "max_lora_rank", "lora_experts"):
            value, default = getattr(self, option_name), type(self).__dataclass_fields__[option_name].default
            if value != default and not self.takes_adapters:
                raise ParameterError(option_name, value, "nothing without lora or lora_dir")


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


def prepare_nccl() -> None:
    """What NCCL, and torch beside it, read when a process group is made. What the user has set stands."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # the switch would add up in an order of its own
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")  # that a rank has died is seen by others


def python_of_child(*words: object) -> list[str]:
    """A command of this Python that takes no modules from the current directory (-P): a model's may lie there."""
    return [sys.executable, "-P", *map(str, words)]


def spare_current_directory() -> None:
    """Likewise in the processes that multiprocessing starts from now on."""
    os.environ["PYTHONSAFEPATH"] = "1"


def environment_of_child() -> dict[str, str]:
    """For a Python process that is to find the modules of this one, whoever has changed sys.path or PYTHONPATH meanwhile."""
    path = [os.path.abspath(p) for p in sys.path if not p or os.path.exists(p)]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*path, *filter(None, added)]))}


def environment_with_ray_token() -> dict[str, str]:
    """For a process that shows a Ray cluster the user's token, unless RAY_AUTH_MODE says otherwise."""
    return {"RAY_AUTH_MODE": "token", **os.environ}


def visible_cards() -> list[str]:
    """The cards that CUDA_VISIBLE_DEVICES names, as it names them; none: it does not say."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def show_cards(names: list[str]) -> None:
    """This process, and those that it starts, shall see these and no others. Of no effect once CUDA has been used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def use_temporary_directory(path: str) -> None:
    """For this process's temporary files, and those of the programs that it starts."""
    tempfile.tempdir = os.environ["TMPDIR"] = path


def c_compiler() -> str | None:
    """As Triton looks for it."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def hub_offline() -> bool:
    """Whether the environment forbids asking the Hugging Face Hub (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.strip().upper() in ("1", "TRUE", "YES", "ON") for value in values)


STORE_BYTES = 64 * 2**20  # of responses that a server keeps
KEY_FORM = "printable characters without spaces"


def is_api_key(key: str) -> bool:
    """Whether a client can send this after `Bearer`."""
    return bool(key) and all(c.isprintable() and not c.isspace() for c in key)


def api_key_from_environment(name: str = "HEADRACE_API_KEY") -> str | None:
    """The variable as it is set, even to nothing: a key that the server asks its clients for. None: it is not set."""
    return os.environ.get(name)


def foreign_variables() -> list[str]:
    """Likewise those of vLLM's that are not read."""
    return [*option_variables("VLLM_")]


def option_variables(prefix: str = "HEADRACE_") -> dict[str, str]:
    """The HEADRACE_* variables that are to be options: not the two that are something else, nor those of tests, nor what
    Kubernetes sets in every container beside a service that is called headrace."""
    found = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    others = re.compile(prefix + r"(API_KEY|CACHE|TEST_.*|(.*_)?SERVICE_(HOST|PORT(_.*)?)|(.*_)?PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
    service = re.compile(r"(tcp|udp|sctp)://.*")  # HEADRACE_PORT is an option and such a name
    return {n: v for n, v in found.items() if not others.fullmatch(n) and not (n.endswith("_PORT") and service.fullmatch(v))}


def cache_dir() -> Path:
    """Where Headrace keeps files of its own: HEADRACE_CACHE, or `headrace` in the user's cache directory."""
    if chosen := os.environ.get("HEADRACE_CACHE"):
        return Path(chosen)
    home = os.path.expanduser("~")  # stays so where HOME is not set and the user has no name: containers say / then
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("/" if home == "~" else home, ".cache")) / "headrace"


def keep_bytecode_in(folder: Path) -> None:
    """Of what this process and those that it starts will import, whatever PYTHONDONTWRITEBYTECODE says."""
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
