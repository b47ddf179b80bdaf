"""What can be known to be wrong with the options before anything is loaded: from the checkpoint's headers, without torch.

The server asks this before it says that it listens, the builder of an engine before it loads. What only the device knows is
found there.
"""

from __future__ import annotations

from headrace.config import CPU_BLOCK, GPU_BLOCK, EngineConfig
from headrace.errors import CapacityError, ParameterError
from headrace.lora.names import named_adapters
from headrace.machine import cuda_driver
from headrace.model.checkpoint import MADE, Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.latent_config import refuse_narrow_cache
from headrace.model.shard import Shard, check_size
from headrace.native.precision import choose_precision, stored_encodings
from headrace.native.threads import check_threads
from headrace.speculative.checkpoint import draft_checkpoint
from headrace.tensor_parallel.futex import check_machine


def check_options(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, here: bool = True, adapters: bool = False
) -> None:
    """Raises ParameterError, CapacityError or CheckpointError if no device could make an engine of these.

    `here`: the engine will run on this machine; else on one that has what `device` asks for, as far as is known now.
    `adapters`: those that are named are looked at, too. A server's core is told of its own, and may find their files gone.
    """
    check_size(model, config.tensor_parallel_size)
    refuse_narrow_cache(model.latent, config.kv_cache_dtype)
    check_machine(config.tensor_parallel_size)
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ParameterError("max_model_len", config.max_model_len, f"at most {model.max_position}, the model's context")
    driver = cuda_driver() is not None if here else config.device != "cpu"
    if config.device == "cuda" and not driver:
        raise ParameterError("device", config.device, "auto or cpu here: there is no NVIDIA driver")
    _check_cpu_options(config, checkpoint, driver)
    if here:
        check_threads(config.threads)
    if config.attention_backend not in ("auto", "torch") and (config.device == "cpu" or not driver):
        raise ParameterError("attention_backend", config.attention_backend, "auto or torch on a CPU")
    _check_cache(config, checkpoint, model, driver)
    if config.lora_experts and model.experts is None:
        raise ParameterError("lora_experts", True, "nothing for this model, which has no experts")
    if adapters:
        named_adapters(config, model)
    needed = [checkpoint]
    if config.speculative_model is not None:
        needed.append(draft_checkpoint(config, model)[0])
    if config.load_format != "dummy":
        for found in needed:
            found.tensors()  # whether all files are there and whole, as far as their headers say


def refuse_native_options(config: EngineConfig, reason: str, made: tuple[str, ...] = ()) -> None:
    """Raises ParameterError for options that the native CPU step alone honours; `reason`: why it does not run. `made`: what
    weights are quantized to without it."""
    for name, others in (
        ("quantization", (None, *made, "none")), ("kv_cache_dtype", ("auto", "fp8")), ("activation_dtype", ("auto",)),
    ):  # fmt: skip
        if getattr(config, name) not in others:
            allowed = f"{', '.join(filter(None, others))} here: other values need the native CPU step, and {reason}"
            raise ParameterError(name, getattr(config, name), allowed)


def _refuse_quantizing(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises ParameterError if what is quantized would be quantized again."""
    if config.quantization in MADE and (held := checkpoint.quantized_to()):
        why = f"the file is quantized already ({', '.join(held)}), and weights are never rounded twice"
        raise ParameterError("quantization", config.quantization, f"none, or nothing for this model: {why}")


def _check_cpu_options(config: EngineConfig, checkpoint: Checkpoint, driver: bool) -> None:
    """Those that a GPU does not have, and those that the checkpoint does not allow."""
    on_cpu = config.device == "cpu" or not driver
    if config.device == "cuda":
        refuse_native_options(config, "this runs on a GPU", MADE)
        if config.threads is not None:
            raise ParameterError("threads", config.threads, "nothing on a GPU")
    _refuse_quantizing(config, checkpoint)
    if config.enforce_eager:
        refuse_native_options(config, "enforce_eager asks for plain torch", MADE)
    elif config.tensor_parallel_size > 1:
        split = "the parts of a model that is split (tensor_parallel_size) are run by torch"
        refuse_native_options(config, split, () if on_cpu else MADE)
    elif on_cpu:
        choose_precision(config, stored_encodings(checkpoint))


def _check_cache(config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, driver: bool) -> None:
    """`kv_cache_bytes`, of each rank, holds the context that was asked for, or a block at least, in the smallest numbers it
    may be kept in."""
    if config.kv_cache_bytes is None or config.num_kv_blocks is not None:
        return
    on_cpu = config.device == "cpu" or not driver
    item = 4 if config.dtype == "float32" or (config.dtype == "auto" and on_cpu) else 2
    ranks = config.tensor_parallel_size
    if on_cpu and not config.enforce_eager and ranks == 1:
        item = {"float32": 4, "bfloat16": 2, "int8": 1}[choose_precision(config, stored_encodings(checkpoint)).cache]
    elif config.kv_cache_dtype == "fp8":
        item = 1
    block_size = config.block_size or (CPU_BLOCK if on_cpu else GPU_BLOCK)
    numbers = sum(of.heads * (of.k_dim + of.v_dim) for of in Shard(0, ranks).config(model).kv_shapes)
    blocks = config.kv_cache_bytes // (numbers * item * block_size)
    if blocks * block_size < (config.max_model_len or 1):
        raise CapacityError(
            f"kv_cache_bytes = {config.kv_cache_bytes} holds {blocks * block_size} tokens, in blocks of {block_size}, which "
            + (f"max_model_len = {config.max_model_len} does not fit into" if blocks else "is not one block")
        )
