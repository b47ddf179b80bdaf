"""Which code runs a model's steps, of target and draft alike: chosen by options, model and device, then loaded."""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

import torch

from headrace.attention.select import choose_cache_dtype, select_attention
from headrace.config import EngineConfig
from headrace.engine.options import refuse_native_options
from headrace.errors import ParameterError
from headrace.lora.pool import AdapterPool
from headrace.lora.room import check_room
from headrace.model.checkpoint import MADE, Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder, MakeLinear
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.forward import Forward
from headrace.model.linear import make_linear
from headrace.model.loader import load_model
from headrace.model.narrow_loader import formats_of
from headrace.model.parts import weight_bytes
from headrace.model.rare import as_needed
from headrace.model.row_elements import row_elements
from headrace.model.shard import WHOLE, Group, Shard
from headrace.native.forward import NativeDecoder, why_not
from headrace.native.load import NativeUnavailable, find_library
from headrace.native.precision import choose_precision, for_draft, stored_encodings
from headrace.native.self_check import checked
from headrace.scheduler.config import Limits
from headrace.worker.memory_plan import plan_memory, summed_rows

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    forward: Forward
    num_bytes: int  # of the weights and of adapters' slots
    formats: str  # in which the matrices are held, those of most numbers first
    unread: int  # of the bytes, what a step does not read all of: an embedding that is no head, adapters


def load_forward(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, limits: Limits, device: torch.device, *,
    draft: bool = False, progress: bool = False, group: Group | None = None,
) -> Loaded:  # fmt: skip
    """What runs the model, with its weights; of `model`, the whole one, only the part of this rank of a `group`. Raises
    CheckpointError, CapacityError, and ParameterError for options that it cannot honour."""
    model = as_needed(model, limits.max_model_len)
    shard = WHOLE if group is None else group.shard
    part = shard.config(model)
    if device.type == "cpu":
        native = _native(config, checkpoint, model, limits, draft, shard)
        if native is not None:
            plan_memory(
                config, limits, model, native.dtype, device, cache_dtype=native.cache_dtype, weight_bytes=native.num_bytes,
                workspace_bytes=native.workspace_bytes(limits.max_decode_rows),
                activation_bytes=native.activation_bytes(limits.max_num_batched_tokens), loaded=False,
            )  # fmt: skip
            native.load(progress and not draft)
            return Loaded(native, native.num_bytes, native.weight_formats, native.unread_bytes)
    else:
        refuse_native_options(config, "this runs on a GPU", MADE)
    dtype = choose_dtype(config.dtype, model, device, narrow=bool(checkpoint.quantized_to()))
    cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype, device)
    if device.type == "cpu":
        rows = limits.max_num_batched_tokens
        plan_memory(
            config, limits, part, dtype, device, cache_dtype=cache_dtype, weight_bytes=weight_bytes(model, dtype, shard),
            workspace_bytes=0, activation_bytes=rows * row_elements(part) * dtype.itemsize, loaded=False, ranks=shard.size,
        )  # fmt: skip
    if group is not None:
        group.prepare(summed_rows(part, limits), model.hidden_size, dtype)
    quantization = None if draft and checkpoint.quantized_to() else config.quantization  # asked for of the target
    weights = load_model(checkpoint, model, dtype, device, progress and not draft and shard.rank == 0, shard, quantization)
    decode_rows = 0 if draft else limits.max_decode_rows
    pool: AdapterPool | None = None
    make: MakeLinear = make_linear
    if config.takes_adapters and not draft:
        check_room(config, model, shard.size, dtype, device)
        rows = limits.max_num_batched_tokens
        pool = AdapterPool(
            model, shard, config.max_loras, config.max_lora_rank, rows, dtype, device, config.lora_experts
        )  # fmt: skip
        make = pool.make(weights, make_linear)
    decoder = make_decoder(config, part, weights, limits, decode_rows, group, make)
    decoder.cache_dtype = cache_dtype
    if pool is None:
        return Loaded(decoder, weights.num_bytes, formats_of(weights), weights.unread_bytes)
    pool.check_made()
    decoder.adapters = pool
    logger.info("adapters: %d of rank %d, %.1f MiB", config.max_loras, config.max_lora_rank, pool.num_bytes / 2**20)
    unread = weights.unread_bytes + pool.num_bytes
    return Loaded(decoder, weights.num_bytes + pool.num_bytes, formats_of(weights), unread)


def _native(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, limits: Limits, draft: bool, shard: Shard
) -> NativeDecoder | None:
    """The native step, or None where it cannot run the model: one line of the log says why."""
    reason = why_not(config, model, limits) if shard.size == 1 else f"it is one of {shard.size} ranks"
    if reason is None:
        try:
            library = checked(find_library())
        except NativeUnavailable as error:
            reason = str(error)
    if reason is not None:
        if not draft:  # what is asked of the target need not be possible for it
            refuse_native_options(config, reason, MADE if config.enforce_eager else ())
        log = logger.info if config.enforce_eager or shard.rank else logger.warning
        log("the native CPU step does not run %s: %s; torch does", checkpoint.name, reason)
        return None
    encodings = stored_encodings(checkpoint)
    config = for_draft(config, encodings) if draft else config
    decoder = NativeDecoder(config, checkpoint, model, limits, choose_precision(config, encodings), library)
    logger.info("%s runs in the native CPU step: %s", checkpoint.name, decoder.describe())
    return decoder


def make_decoder(
    config: EngineConfig, model: ModelConfig, weights: DecoderWeights, limits: Limits, decode_rows: int = 0,
    group: Group | None = None, make: MakeLinear = make_linear,
) -> Decoder:  # fmt: skip
    """The decoder in torch, and on a card the fused path for decode steps of few rows where it can run the model.
    `decode_rows`, `group` and `make` as of Decoder."""
    dtype, device = weights.embedding.dtype, weights.embedding.device
    cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype, device)
    attention, why = select_attention(config.attention_backend, model, device, cache_dtype)
    logger.info("attention: %s", why)
    plain = partial(Decoder, model, weights, attention, max_model_len=limits.max_model_len, group=group, make=make)
    if device.type != "cuda" or config.enforce_eager:
        return plain()
    from headrace.fast_decode.decoder import FastDecoder
    from headrace.fast_decode.forward import FastDecode
    from headrace.fast_decode.takes import most_rows, usual_kinds
    from headrace.fast_decode.tile_tables import load_tiles

    if not FastDecode.supports(model, dtype, alone=group is None):
        logger.info("small batches: the general path; the fused one does not take family %s in %s", model.family, dtype)
        return plain(decode_rows=decode_rows)
    space = None if group is None else group.push_space(1, model.hidden_size, dtype)
    if group is not None and space is None:
        logger.info("small batches: the general path; the fused one needs cards that see each other's memory")
        return plain(decode_rows=decode_rows)
    # bfloat16 is what they were searched in
    name = torch.cuda.get_device_name(device)
    tiles = load_tiles(model, name, usual_kinds(weights)) if dtype == torch.bfloat16 else None
    rows = min(limits.max_decode_rows, most_rows(model, tiles, weights if group is None else None))
    rows = rows if space is None else min(rows, space.max_rows)
    fast = FastDecode(
        model, weights, rows, device, tiles, max_model_len=limits.max_model_len, logits_dtype=dtype, group=group
    )  # fmt: skip
    decode_rows = decode_rows if decode_rows > rows else 0
    return FastDecoder(
        model, weights, attention, fast, max_model_len=limits.max_model_len, decode_rows=decode_rows, group=group, make=make,
        most_rows=limits.max_num_batched_tokens,
    )  # fmt: skip


def choose_dtype(wanted: str, model: ModelConfig, device: torch.device, narrow: bool = False) -> torch.dtype:
    """Torch's: on a CPU auto is float32, exact and the same tokens on every machine; on a GPU the checkpoint's 16 bits. A file
    of `narrow` weights says float16 by custom, whatever its model was trained in, and runs in bfloat16, as fast paths do.
    Raises ParameterError for what the card does not have."""
    if wanted == "auto" and device.type == "cpu":
        return torch.float32
    name = wanted if wanted != "auto" else ("float16" if model.dtype == "float16" and not narrow else "bfloat16")
    if name == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        if wanted != "auto":
            raise ParameterError("dtype", wanted, "float16 or float32: this GPU has no bfloat16")
        logger.warning("this GPU has no bfloat16: using float16")
        name = "float16"
    return getattr(torch, name)
