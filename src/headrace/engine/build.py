"""From options to a running engine: an ordered list of small decisions, each logged, then the parts put together."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace.cache import fp8
from headrace.cache.kv_cache import KVCache
from headrace.cache.state_pool import StatePool
from headrace.config import CPU_BLOCK, CPU_DRAFT_ROWS, CPU_STEP, GPU_BLOCK, GPU_DRAFT_ROWS, GPU_STEP, EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.fork import claim_process
from headrace.engine.forwards import load_forward
from headrace.engine.named_format import without_named_format
from headrace.engine.options import check_options
from headrace.engine.preparation import Preparation, Tell, tell_nobody
from headrace.engine.weight_sizes import weight_bytes
from headrace.errors import CapacityError, EngineDeadError, ParameterError
from headrace.extras import is_installed
from headrace.lora.core import CoreAdapters
from headrace.lora.names import named_adapters
from headrace.lora.version import Version
from headrace.machine import give_memory_back, usable_cores
from headrace.model.checkpoint import Checkpoint, resolve_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.families import model_config_from_hf
from headrace.model.forward import Forward
from headrace.model.shard import Group, Shard
from headrace.model.tokenizer import Tokenizer
from headrace.model.vocabulary import TokenlessIds
from headrace.native.forward import NativeDecoder
from headrace.native.runner import NativeRunner
from headrace.scheduler.config import Limits
from headrace.scheduler.scheduler import Scheduler
from headrace.speculative.setup import Draft, load_draft, make_speculator
from headrace.structured_output.manager import StructuredOutput
from headrace.tensor_parallel.leading_runner import LeadingRunner
from headrace.tensor_parallel.messages import Built
from headrace.tensor_parallel.ranks import Ranks
from headrace.worker.batch_state import BatchState
from headrace.worker.drafter import Drafter, SharedDrafter
from headrace.worker.memory_plan import MemoryPlan, plan_memory
from headrace.worker.model_runner import ModelRunner
from headrace.worker.reading import Reading, reading_of
from headrace.worker.seats import CPU_SEATS, card_seats

if TYPE_CHECKING:  # it imports Triton, which a CPU does not need
    from headrace.worker.cuda_graphs import DecodeGraphs
    from headrace.worker.prompt_graphs import PromptGraphs

logger = logging.getLogger(__name__)
SNAPSHOTS = 4  # for each sequence at most: states that the prefix cache keeps


@dataclass(slots=True)
class Engine:
    """A core with what the layers above must know of its model."""

    core: EngineCore
    config: EngineConfig  # every None resolved
    model: ModelConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None  # None with skip_tokenizer_init
    device: torch.device
    dtype: torch.dtype  # of what is computed
    weights: str  # the formats that they are held in, those of most numbers first
    load_seconds: float
    ranks: Ranks | None = None  # the other processes of a tensor-parallel core
    preparation: Preparation | None = None
    reading: Reading | None = None  # what limits its steps; None: it is not known

    def prepare(self, tell: Tell = tell_nobody) -> None:
        """Before the first request; until then, that would wait for what is done here. Once."""
        preparation, self.preparation = self.preparation, None
        if preparation is not None:
            with contextlib.closing(preparation):
                preparation.finish(self.core.runner, self.core.scheduler.limits, self.model.vocab_size, tell)

    def load_adapters(self) -> dict[str, Version]:
        """Those that the options name, by name."""
        found = named_adapters(self.config, self.model)
        for version in found.values():
            assert self.core.adapters is not None
            self.core.adapters.load(version)
        return found

    def begin(self) -> dict[str, Version]:
        """`prepare`, then `load_adapters`. If either fails the engine is closed."""
        try:
            self.prepare()
            return self.load_adapters()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop every tensor and give the memory back."""
        if self.preparation is not None:
            self.preparation.close()
        with contextlib.suppress(EngineDeadError):  # of ranks that have died: what is in flight has no result any more
            self.core.close()
        if self.ranks is not None:
            self.ranks.close()
        gc.collect()
        give_back(self.device)


def give_back(device: torch.device) -> None:
    """What has been freed, on a GPU to the driver, else to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_memory_back()


def build_engine(config: EngineConfig, *, progress: bool = False, adapters: bool = False) -> Engine:
    """Load the checkpoint and make an engine of it, which is yet to `prepare`. `adapters`: see check_options. Raises
    CheckpointError, CapacityError, ParameterError, EngineDeadError."""
    claim_process()
    if config.data_parallel_size != 1:
        raise ParameterError("data_parallel_size", config.data_parallel_size, "1 here: several cores need `headrace serve`")
    began = time.perf_counter()
    checkpoint = resolve_checkpoint(config)
    config, model = without_named_format(config, checkpoint), model_config_from_hf(checkpoint.config)
    check_options(config, checkpoint, model, adapters=adapters)
    if checkpoint.text_of is not None:
        logger.warning("%s is the text part of a %s: images are not served", checkpoint.name, checkpoint.text_of)
    device, ranks = choose_device(config.device, 0, config.tensor_parallel_size), None
    if device.type == "cuda":
        config = with_seats(config, checkpoint, model, torch.cuda.get_device_properties(device).total_memory >> 30)
    preparation = Preparation(config, checkpoint, resolve(config, model, device), device)
    try:
        if config.tensor_parallel_size == 1:
            worker = build_worker(config, checkpoint, model, device, progress=progress)
        else:
            worker, ranks = build_leader(config, checkpoint, model, device, progress)
    except BaseException:
        preparation.close()
        raise
    runner, limits = worker.runner, worker.limits
    structured = structured_output(config, model, worker.tokenizer)
    speculator = make_speculator(config, limits, structured, runner.drafter, device, runner.graphs)
    core = EngineCore(
        Scheduler(limits),
        runner,
        vocab_size=model.vocab_size,
        async_scheduling=config.async_scheduling and device.type == "cuda",  # a CPU's launched step is done: tell it at once
        debug_checks=config.debug_checks,
        seed=config.seed,
        structured=structured,
        speculator=speculator,
    )
    if config.takes_adapters:
        core.adapters = core_adapters(config, runner)
    seconds, dtype = time.perf_counter() - began, runner.decoder.dtype
    told = "model %s loaded on %s in %s, weights %s, after %.2f s"
    logger.info(told, checkpoint.name, device, dtype, worker.weights, seconds)
    return Engine(
        core, resolved(config, limits), model, checkpoint, worker.tokenizer, device, dtype, worker.weights, seconds, ranks,
        preparation, worker.reading,
    )  # fmt: skip


def core_adapters(config: EngineConfig, runner: ModelRunner) -> CoreAdapters:
    pool = runner.state.adapters
    if isinstance(runner, LeadingRunner):
        return CoreAdapters(config.max_loras, pool.read, runner.load_adapter, runner.unload_adapter)
    return CoreAdapters(config.max_loras, pool.read, pool.load, pool.unload)


def build_leader(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, device: torch.device, progress: bool
) -> tuple[Worker, Ranks]:
    """The first rank's worker, and the others, which are told what it does. If anything fails nothing of them is left."""
    # what had to be downloaded is there
    ranks = Ranks(replace(config, local_files_only=True), f"{build_rank.__module__}:{build_rank.__name__}")
    try:
        worker = build_worker(config, checkpoint, model, device, ranks.join(device), progress=progress)
        ranks.wait_for(Built)
    except BaseException as e:
        reason = ranks.explain(e)
        ranks.close()
        if reason is e:
            raise
        raise reason from e
    worker.runner = LeadingRunner(worker.runner, ranks)
    return worker, ranks


def build_rank(config: EngineConfig, rank: int, join: Callable[[torch.device], Group]) -> ModelRunner:
    """What another rank's process runs. `join` meets the others, when they are all there."""
    checkpoint = resolve_checkpoint(config)
    device = choose_device(config.device, rank, config.tensor_parallel_size)
    return build_worker(config, checkpoint, model_config_from_hf(checkpoint.config), device, join(device)).runner


@dataclass(slots=True)
class Worker:
    """What runs the steps of a model on one device."""

    runner: ModelRunner
    limits: Limits  # with what the memory plan allows
    tokenizer: Tokenizer | None
    weights: str = ""  # see Engine
    reading: Reading | None = None


def build_worker(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, device: torch.device, group: Group | None = None, *,
    progress: bool = False,
) -> Worker:  # fmt: skip
    """Load the checkpoint, or this rank's part of it, and make what runs it: the same on every rank of a `group`."""
    limits = resolve(config, model, device)
    if device.index is not None:
        torch.cuda.set_device(device)
    if device.type == "cpu" and (config.threads is not None or group is not None):
        torch.set_num_threads(threads_of_rank(config))
    with ThreadPoolExecutor(1, "headrace-tokenizer") as pool:  # takes up to half a second, and the loader mostly waits
        reading = None if config.skip_tokenizer_init else pool.submit(Tokenizer.from_checkpoint, checkpoint)
        loaded = load_forward(config, checkpoint, model, limits, device, progress=progress, group=group)
        forward, loaded_bytes, formats, unread = loaded
    tokenizer = None if reading is None else reading.result()
    if tokenizer is not None:
        forward.tokenless = TokenlessIds.of(tokenizer.valid_ids(model.vocab_size), device)
    draft = None
    if group is None or group.shard.rank == 0:
        source = None if group is None else checkpoint
        draft = load_draft(config, limits, model, forward.dtype, device, load_forward, source)
    if device.type == "cpu":
        give_back(device)
    part = model if group is None else group.shard.config(model)
    plan = planned(config, limits, part, forward, draft, loaded_bytes, device, group)
    num_blocks = plan.num_blocks if group is None else fewest(plan.num_blocks, group, device)
    limits = with_snapshots(fit_context(config, replace(limits, num_blocks=num_blocks)), plan.num_snapshots, group, device)
    kv = KVCache(part, limits.num_blocks, limits.block_size, forward.cache_dtype, device)
    if part.delta is not None:
        kv.states = StatePool(
            part.delta, limits.max_num_seqs + 1, limits.num_snapshots, forward.dtype, device, limits.max_drafts
        )
    state = BatchState(limits.max_num_seqs, limits.max_model_len, limits.block_size, device)
    if isinstance(forward, Decoder) and forward.adapters is not None:
        state.adapters, forward.adapters.table = forward.adapters, state.tables.ints
    graphs, prompts = captured_steps(config, limits, forward, kv, state)
    drafter: Drafter | None = None if draft is None else draft.drafter(config, limits, forward, loaded_bytes, state)
    if group is not None and config.speculative_model is not None:
        drafter = SharedDrafter(drafter, state, group)
    limit = reading_of(part, loaded_bytes - unread, forward.cache_dtype, device, getattr(forward, "threads", 0))
    runner = ModelRunner(forward, kv, state, graphs, drafter, prompts)
    if isinstance(forward, NativeDecoder) and drafter is None:
        forward.read_slots(state.tables, kv)
        runner = NativeRunner(forward, kv, state)
    return Worker(runner, limits, tokenizer, formats, limit)


def threads_of_rank(config: EngineConfig) -> int:
    """Ranks on a CPU share its cores."""
    return max(1, (config.threads or usable_cores()) // config.tensor_parallel_size)


def fewest(num_blocks: int, group: Group, device: torch.device, what: str = "KV blocks") -> int:
    """KV blocks, or others, that every rank has room for."""
    everywhere = group.gather(torch.tensor([num_blocks], device=device)).flatten().tolist()
    if min(everywhere) < num_blocks:
        rank = everywhere.index(min(everywhere))
        logger.info("%s: %d, as many as rank %d has room for", what, min(everywhere), rank)
    return min(everywhere)


def with_snapshots(limits: Limits, count: int, group: Group | None, device: torch.device) -> Limits:
    """Of a model with states as many as there is room for; without any there is no prefix cache."""
    if not limits.num_snapshots:
        return limits
    count = count if group is None else fewest(count, group, device, "snapshots of states")
    if not count:
        logger.warning("no prefix cache: there is no memory for snapshots of what this model's layers keep of a sequence")
    return replace(limits, num_snapshots=count, enable_prefix_caching=count > 0)


def planned(
    config: EngineConfig, limits: Limits, model: ModelConfig, forward: Forward, draft: Draft | None, loaded_bytes: int,
    device: torch.device, group: Group | None = None,
) -> MemoryPlan:  # fmt: skip
    """The memory plan, with what its parts say that they take."""
    rows, forwards = limits.max_decode_rows, [forward, *([draft.forward] if draft else [])]
    plan = plan_memory(
        config, limits, model, forward.dtype, device,
        cache_dtype=forward.cache_dtype,
        weight_bytes=loaded_bytes + (draft.num_bytes if draft else 0),
        workspace_bytes=sum(f.workspace_bytes(rows) for f in forwards),
        activation_bytes=max(f.activation_bytes(limits.max_num_batched_tokens) for f in forwards),
        draft=draft.model if draft else None,
        draft_block_bytes=draft.block_bytes(limits.block_size) if draft else 0,
        ranks=config.tensor_parallel_size,
        pushes=lambda n: group is not None and group.push_space(n, model.hidden_size, forward.dtype) is not None,
        peer_bytes=0 if group is None else group.peer_bytes(),
    )  # fmt: skip
    plan.log()
    return plan


def takes_grammars(config: EngineConfig) -> bool:
    return not config.skip_tokenizer_init and is_installed("llguidance")


def structured_output(config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> StructuredOutput | None:
    """Grammars, where there are a backend and a tokenizer; the backend is not loaded before the first spec."""
    if tokenizer is None or not takes_grammars(config):
        return None

    def backend(end_token_ids: Sequence[int]):
        from headrace.structured_output.llguidance_backend import LLGuidance

        return LLGuidance(tokenizer.backend.to_str(), model.vocab_size, end_token_ids)

    return StructuredOutput(backend, model.vocab_size)


def captured_steps(
    config: EngineConfig, limits: Limits, forward: Forward, kv: KVCache, state: BatchState
) -> tuple[DecodeGraphs | None, PromptGraphs | None]:
    """Of decodes, and of prompts and whatever is beside them."""
    if state.device.type != "cuda" or config.enforce_eager:
        return None, None
    from headrace.worker.cuda_graphs import DecodeGraphs
    from headrace.worker.prompt_graphs import prompt_graphs

    sizes = limits.max_num_seqs, limits.max_model_len
    decodes = DecodeGraphs(forward.decode, kv, state, *sizes, limits.max_draft_rows, part=forward.vocab)
    if config.takes_adapters:
        decodes.kinds = (False, True)
    return decodes, prompt_graphs(forward, kv, state, *sizes, limits.max_num_batched_tokens, decodes.pool)


def choose_device(wanted: str, rank: int = 0, ranks: int = 1) -> torch.device:
    """The named device, or the best one there is; each of several ranks has its own. Raises ParameterError if it is missing."""
    has_card = torch.cuda.is_available()
    if wanted == "cuda" and not has_card:
        raise ParameterError("device", wanted, "auto or cpu: torch finds no CUDA device here")
    if ranks == 1 or wanted == "cpu" or not has_card:
        return torch.device("cuda" if has_card and wanted != "cpu" else "cpu")
    if ranks > (cards := torch.cuda.device_count()):
        raise ParameterError("tensor_parallel_size", ranks, f"at most {cards}, the cards that this process sees")
    return torch.device("cuda", rank)


def fit_context(asked: EngineConfig, limits: Limits) -> Limits:
    """Lower max_model_len to what the KV cache holds. Raises CapacityError if it was asked for; who names the blocks knows what
    they hold."""
    capacity = limits.num_blocks * limits.block_size
    if asked.num_kv_blocks is not None or capacity >= limits.max_model_len:
        return limits
    if asked.max_model_len is not None:
        raise CapacityError(
            f"max_model_len = {asked.max_model_len} needs a KV cache of as many tokens, but there is memory for {capacity}: "
            f"lower max_model_len, or raise gpu_memory_utilization or kv_cache_bytes"
        )
    logger.warning("max_model_len lowered from %s to %d tokens: the KV cache holds no more", limits.max_model_len, capacity)
    return replace(limits, max_model_len=capacity)


def with_seats(config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, memory: int) -> EngineConfig:
    """With max_num_seqs decided for a card of `memory` GiB, unless it was asked for, before anything is loaded."""
    if config.max_num_seqs is not None:
        return config
    ranks, dtype = config.tensor_parallel_size, torch.float32 if config.dtype == "float32" else torch.bfloat16
    limits = resolve(config, model, torch.device("cuda"))
    seats = card_seats(
        config, limits, Shard(0, ranks).config(model), dtype, fp8.DTYPE if config.kv_cache_dtype == "fp8" else dtype,
        memory=memory << 30, weight_bytes=weight_bytes(config, checkpoint, on_card=True) // ranks, ranks=ranks,
    )  # fmt: skip
    logger.info("max_num_seqs: %d, for which a card of %d GiB has room", seats, memory)
    return replace(config, max_num_seqs=seats)


def resolve(config: EngineConfig, model: ModelConfig, device: torch.device) -> Limits:
    """What the options mean for this model and device. The blocks are as many as could ever be used: memory decides. Raises
    CapacityError for blocks that hold no sequence."""
    max_model_len = config.max_model_len or model.max_position
    block_size = config.block_size or (GPU_BLOCK if device.type == "cuda" else CPU_BLOCK)
    seats = config.max_num_seqs or CPU_SEATS
    num_blocks = config.num_kv_blocks or seats * -(-max_model_len // block_size)
    if config.num_kv_blocks is not None and num_blocks * block_size < 2:
        raise CapacityError(f"{config.num_kv_blocks} KV blocks of {block_size} tokens hold no sequence")
    caching, hybrid = config.enable_prefix_caching, model.delta is not None
    if hybrid and caching and config.kv_cache_events != "off":
        logger.warning("no KV cache events: whether a prefix of this model can be gone on from, its blocks do not tell")
    return Limits(
        max_num_seqs=seats,
        max_num_batched_tokens=config.max_num_batched_tokens or (GPU_STEP if device.type == "cuda" else CPU_STEP),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        max_draft_rows=0 if hybrid and config.speculative_method is None else draft_rows(config, device),
        max_drafts=config.num_speculative_tokens if hybrid and config.speculative_method is not None else 0,
        enable_prefix_caching=caching,
        kv_cache_events=config.kv_cache_events if caching and not hybrid else "off",
        num_snapshots=SNAPSHOTS * seats if caching and hybrid else 0,
        max_itl=None if config.max_itl_ms is None else config.max_itl_ms / 1e3,
        policy=config.scheduling_policy,
    )


def resolved(config: EngineConfig, limits: Limits) -> EngineConfig:
    """`config` with every None decided that has a meaning."""
    return replace(
        config, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len, block_size=limits.block_size,
        max_num_batched_tokens=limits.max_num_batched_tokens, speculative_max_rows=limits.max_draft_rows or None,
    )  # fmt: skip


def draft_rows(config: EngineConfig, device: torch.device) -> int:
    """Rows up to which a step is filled with drafts; 0 where nobody drafts, neither a method nor grammars."""
    if config.speculative_method is None and not takes_grammars(config):
        return 0
    rows = config.speculative_max_rows or (GPU_DRAFT_ROWS if device.type == "cuda" else CPU_DRAFT_ROWS)
    return rows if rows > 1 else 0
