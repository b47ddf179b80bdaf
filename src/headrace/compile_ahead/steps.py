"""Plays the steps that a model's requests will need, in all their forms, on tensors without data.

The code that is played is what runs on a card; here every launch is noted instead (`no_device.py`). What a step's
sizes do not change is played once: no kernel has two forms for numbers that differ from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from headrace.attention.latent_triton import AS_IF, TritonLatentAttention
from headrace.attention.triton_backend import ROLES_ROWS, SPLIT_CONTEXT, TritonAttention
from headrace.attention.widened import WidenedAttention
from headrace.cache import fp8
from headrace.cache.state_pool import StatePool
from headrace.compile_ahead.played_ranks import PlayedGroup
from headrace.compile_ahead.weights import META
from headrace.fast_decode.decoder import FastDecoder
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.pieces import least_rows
from headrace.fast_decode.takes import most_rows, usual_kinds
from headrace.fast_decode.tile_tables import load_tiles
from headrace.kernels import tables
from headrace.kernels.attention_decode import ORDERED_FROM, max_tokens
from headrace.kernels.experts_triton import row_steps
from headrace.kernels.folded_tile import FORMS, suits
from headrace.kernels.gated_product import rows_of_forms
from headrace.kernels.gather_kv import gather_kv
from headrace.kernels.halves import MORE_ROWS, ODD_ROWS
from headrace.kernels.launch import num_multiprocessors
from headrace.kernels.lora import GROUP_BLOCK
from headrace.kernels.narrow_linear import FEW_ROWS_WIDENED
from headrace.kernels.prepare import Rows, launch, launch_publish
from headrace.kernels.prompt_rows import END, NUMBERS, TokenRows, launch_expand
from headrace.kernels.sample import add_mask_triton, sample_rows
from headrace.kernels.sample_ranks import WORDS, sample_parts
from headrace.kernels.tables import Float, Int, SlotTables
from headrace.lora.pool import AdapterPool
from headrace.model.attention import AttentionBackend
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.decoder_weights import MATRICES, DecoderWeights
from headrace.model.linear import MakeLinear, make_linear
from headrace.model.shard import WHOLE
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.philox import PURPOSE_SAMPLE
from headrace.scheduler.config import Limits
from headrace.worker.batch_state import ALIGN
from headrace.worker.captured import PAGES
from headrace.worker.cuda_graphs import CONTEXTS, FEW_CONTEXTS, FEW_ROWS, context_buckets, graph_sizes
from headrace.worker.memory_plan import captured_tokens, summed_rows
from headrace.worker.prompt_graphs import can_capture, captured_batches, seq_sizes, token_sizes

BLOCKS = 1 << 12  # of a cache without data
PROMPTS = (1, 2, 4, 8, 16, 32, 64, 200)  # tokens: each form of tiles of attention, and of products with narrow weights


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class Places(NamedTuple):
    """For adapters."""

    slots: int
    rank: int
    experts: bool = False  # of experts that tokens choose, too


@dataclass(frozen=True, slots=True)
class Played:
    """What is to run: the model without data, and how its steps are bounded."""

    model: ModelConfig
    weights: DecoderWeights
    limits: Limits
    cache_dtype: torch.dtype
    card: str  # as tables of tiles name it
    eager: bool = False  # nothing is captured
    adapters: Places | None = None  # None: it takes none
    ranks: int = 1  # of which it is one: `model` and `weights` are its part


class Stage:
    """The parts of an engine that launch kernels."""

    def __init__(self, played: Played):
        model, limits, weights = played.model, played.limits, played.weights
        self.model, self.limits, self.eager = model, limits, played.eager
        self.dtype = weights.embedding.dtype
        narrow, make = played.cache_dtype == fp8.DTYPE, cast(MakeLinear, make_linear)
        self.attention = _backend(model, narrow)
        self.adapters: AdapterPool | None = None
        self.expert_slots: int | None = None  # of adapters of experts
        if played.adapters is not None:
            slots, rank, of_experts = played.adapters
            self.adapters = AdapterPool(
                model, WHOLE, slots, rank, limits.max_num_batched_tokens, self.dtype, META, of_experts
            )  # fmt: skip
            self.expert_slots = slots if of_experts else None
            make = self.adapters.make(weights, make_linear)
        rows = summed_rows(model, limits)
        self.group = None if played.ranks == 1 else PlayedGroup(played.ranks, rows, model.hidden_size, self.dtype)
        self.fast = None if played.eager else self._fast_path(played)
        options: dict[str, Any] = {"max_model_len": limits.max_model_len, "decode_rows": limits.max_decode_rows, "make": make}
        if self.fast is None or self.group is None:
            self.decoder = Decoder(model, weights, self.attention, **options, group=self.group)
        else:  # the fused path's kernel also adds up what the others' layers give
            most = limits.max_num_batched_tokens
            self.decoder = FastDecoder(
                model, weights, self.attention, self.fast, **options, group=self.group, most_rows=most
            )  # fmt: skip
        self.decoder.adapters = self.adapters
        kinds = {layer.more["experts_gate_up"].kind for layer in weights.layers if "experts_gate_up" in layer.more}
        self.mxfp4_experts = "fp4" in kinds
        self.folds = any(suits(getattr(layer, name)) for layer in weights.layers for name in MATRICES)
        slots = limits.max_num_seqs + 1
        self.tables = SlotTables(
            empty(slots, limits.max_model_len + 1), empty(slots, -(-limits.max_model_len // limits.block_size)),
            empty(slots, len(Float), dtype=torch.float32), empty(slots, len(Int), dtype=torch.int64), empty(slots),
            limits.block_size,
        )  # fmt: skip
        if self.adapters is not None:
            self.adapters.table = self.tables.ints
        self.kv = _cache(model, limits.block_size, played.cache_dtype)
        if model.delta is not None:
            self.kv.states = StatePool(model.delta, slots, 0, self.dtype, META, limits.max_drafts)

    def _fast_path(self, played: Played) -> FastDecode | None:
        model, limits = played.model, played.limits
        if not FastDecode.supports(model, self.dtype, alone=self.group is None):
            return None
        kinds = usual_kinds(played.weights)
        tiles = load_tiles(model, played.card, kinds) if self.dtype == torch.bfloat16 else None
        rows = min(limits.max_decode_rows, most_rows(model, tiles, played.weights if self.group is None else None))
        return FastDecode(
            model, played.weights, rows, META, tiles, max_model_len=limits.max_model_len, logits_dtype=self.dtype,
            group=self.group,
        )  # fmt: skip

    def play(self) -> None:
        """All steps, those first that nearly every request needs."""
        self.prompts()
        self.samplers()
        if not self.eager:
            if can_capture(self.decoder):
                self.captured_prompts()
            self.captured(related=False)
            if self.limits.max_draft_rows:
                self.captured(related=True)

    # ---------------------------------------------------------------- steps with prompts

    def prompts(self) -> None:
        most = min(self.limits.max_num_batched_tokens, self.limits.max_model_len)
        group = self.attention.group if isinstance(self.attention, TritonAttention) else AS_IF
        experts, counts = self.model.experts, [*PROMPTS, MORE_ROWS + 1, FEW_ROWS_WIDENED + 1, ODD_ROWS[0], 1024, ROLES_ROWS]
        for inner in {self.model.intermediate_size, 0 if experts is None else experts.shared_inner} - {0}:
            counts += rows_of_forms(inner, self.model.hidden_size, most, num_multiprocessors(META))
        if experts is not None:
            for slots in dict.fromkeys((None, self.expert_slots)):
                router = experts.count, self.model.hidden_size
                sizes = experts.chosen, len(experts.here), router, self.dtype.itemsize, most
                counts += row_steps(*sizes, slots, whole=self.mxfp4_experts)
        if self.folds:
            counts += FORMS
        if self.adapters is not None:
            counts += [1 << n for n in range(4, GROUP_BLOCK.bit_length())]
        for tokens in dict.fromkeys(counts):
            if tokens <= most:
                for adapted in self.kinds:
                    self.forward([tokens], [tokens], adapted=adapted)
        several = -(-least_rows() // most)  # prompts of a step whose sums are on their way beside products
        if self.group is not None and several <= self.limits.max_num_seqs:
            self.forward([-(-least_rows() // several)] * several, [most] * several)
        few = max_tokens(group)
        chunks = [2**n for n in range(1, few.bit_length())]  # behind a long context they are split
        self.forward([1, *chunks, few + 1], [SPLIT_CONTEXT, *(SPLIT_CONTEXT for _ in chunks), SPLIT_CONTEXT])
        decodes = min(self.limits.max_num_seqs, ORDERED_FROM)
        self.forward([1] * decodes, [1] * decodes)
        if self.model.delta is not None:  # where its prompts' chunks are is found in a form for each power of two of prompts
            for bits in range(1, self.limits.max_num_seqs.bit_length() + 1):
                count = min(1 << bits, self.limits.max_num_seqs)
                self.forward([2] * count, [2] * count)
        self.forward([300], [300], keep=self.model.per_layer is None)  # attention may want own keys
        keeps = next(layer for layer, of in enumerate(self.model.kv_shapes) if of.heads)
        out = empty(SPLIT_CONTEXT, *self.kv.k[keeps].shape[2:], dtype=self.dtype)
        if self.kv.k[0].dtype == self.dtype and self.model.latent is None:
            gather_kv(
                self.kv.k[keeps], self.kv.v[keeps], out, out, self.tables.block_tables, empty(2), empty(3), first_seq=0,
                num_seqs=2, max_context=SPLIT_CONTEXT,
            )  # fmt: skip
        floats, ints = (table.view(torch.int32) for table in (self.tables.floats, self.tables.ints))
        tables.enter_triton(empty(500), 2, 300, (self.tables.token_ids, self.tables.block_tables, floats, ints))

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Of steps: those with adapters are True."""
        return (False,) if self.adapters is None else (False, True)

    def forward(
        self, query_lens: list[int], context_lens: list[int], keep: bool = False, adapted: bool = False
    ) -> None:  # fmt: skip
        count = sum(query_lens)
        if count > self.limits.max_num_batched_tokens or max(context_lens) > self.limits.max_model_len:
            return
        rows = Rows.empty(-(-count // ALIGN) * ALIGN, META)
        launch(empty(4, len(rows.token_ids)), None, self.tables, rows)
        self.attention.keeps_own = keep
        decodes = sum(length == 1 for length in query_lens)
        batch = self._batch(rows.part(0, count), query_lens, context_lens, decodes, adapted=adapted)
        hidden = self.decoder.forward(batch, self.kv)
        self.decoder.logits(hidden[: len(query_lens)])

    def _batch(
        self, rows: Rows, query_lens: list[int], context_lens: list[int], decodes: int, related: bool = False,
        adapted: bool = False,
    ) -> ForwardBatch:  # fmt: skip
        count = len(query_lens)
        return ForwardBatch(
            rows.token_ids, rows.positions, rows.slot_mapping, self.tables.block_tables, empty(count), empty(count + 1),
            empty(count), decodes, query_lens, context_lens, related=related, adapted=adapted,
        )  # fmt: skip

    def captured_prompts(self) -> None:
        limits = self.limits
        sizes = token_sizes(captured_tokens(self.model, limits.max_num_batched_tokens))
        of_seqs = seq_sizes(limits.max_num_seqs)
        most = of_seqs[-1]
        inbox, outbox, turn = empty(PAGES, NUMBERS, 2 * most), empty(PAGES, 3, 2 * most), empty(1)
        ends, all_rows = Rows.empty(2 * most, META), TokenRows.empty(sizes[-1], most, META)
        logits, each_alone = empty(most, self.decoder.logit_columns, dtype=self.dtype), empty(most + 1)
        for size in sizes:
            for seqs in dict.fromkeys(min(size + 8, n) for n in of_seqs):
                rows, these = all_rows.part(size, seqs), ends.part(0, 2 * seqs)
                launch(inbox[:, :END], turn, self.tables, these)
                launch_expand(inbox, turn, self.tables, these, rows)
                for bucket in context_buckets(CONTEXTS, limits.max_model_len):
                    step = captured_batches(rows, these, each_alone, self.tables.block_tables, bucket, True)
                    self.decoder.logits(self.decoder.forward(step[0], self.kv, step[1]), logits[:seqs])
                launch_publish(empty(seqs), empty(seqs).bool(), these.part(seqs, 2 * seqs), self.tables, outbox, turn, False)

    # ---------------------------------------------------------------- captured decode steps

    def captured(self, related: bool) -> None:
        limits = self.limits
        sizes = graph_sizes(max(limits.max_num_seqs, limits.max_draft_rows))
        inbox, outbox, turn = empty(PAGES, 4, sizes[-1]), empty(PAGES, 3, sizes[-1]), empty(1)
        rows = Rows.empty(sizes[-1], META)
        for size in sizes:
            if related and size > limits.max_draft_rows:
                break
            part = rows.part(0, size)
            launch(inbox, turn, self.tables, part)
            for bucket in context_buckets(FEW_CONTEXTS if size <= FEW_ROWS else CONTEXTS, limits.max_model_len):
                for adapted in self.kinds:
                    self.decode(self._batch(part, [1] * size, [bucket] * size, size, related, adapted))
            launch_publish(empty(size), empty(size).bool(), part, self.tables, outbox, turn, related)

    def decode(self, batch: ForwardBatch) -> None:
        if self.fast is None or batch.num_rows > self.fast.max_rows:
            self.decoder.decode(batch, self.kv)
        elif not batch.adapted or self.adapters is None:
            self.fast.forward(batch, self.kv)
        else:
            self.adapters.begin(batch, None, fused=True)
            self.fast.forward(batch, self.kv, adapters=self.adapters)

    # ---------------------------------------------------------------- what makes tokens of logits

    def samplers(self) -> None:
        vocab = self.model.vocab_size
        for dtype in dict.fromkeys((self.dtype, torch.float32)):  # float32: edited
            # with memory of one row, so that rows begin where a real one's do; parameters as those of several rows lie
            logits = torch.empty(1, dtype=dtype).expand(4, vocab)
            floats, longs, shorts = torch.zeros(3, 4), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4).int()
            for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
                sample_rows(
                    logits, floats[0], shorts[1], floats[1], floats[2], longs[0], longs[1], shorts[0], purpose=PURPOSE_SAMPLE,
                    greedy_eps=GREEDY_EPS, all_greedy=all_greedy, any_filter=any_filter,
                )  # fmt: skip
            add_mask_triton(empty(4, vocab, dtype=dtype), empty(2, -(-vocab // 32)), empty(2, dtype=torch.int64))
        if self.group is not None and (words := self.group.push_space(4, WORDS, torch.float32)) is not None:
            part = empty(4, self.group.shard.vocab_rows(vocab), dtype=self.dtype)
            for all_greedy in (True, False):
                sample_parts(
                    part, 0, words, floats[0], longs[0], longs[1], shorts[0], purpose=PURPOSE_SAMPLE, greedy_eps=GREEDY_EPS,
                    all_greedy=all_greedy,
                )  # fmt: skip
        rows = Rows.empty(ALIGN, META)
        for verify in (False, True):
            launch_publish(empty(ALIGN), empty(ALIGN).bool(), rows, self.tables, empty(3, ALIGN), None, verify)


def _backend(model: ModelConfig, narrow: bool) -> AttentionBackend:
    """Our own kernels for it."""
    if model.latent is not None:
        return TritonLatentAttention(model, META)
    return (WidenedAttention if narrow else TritonAttention)(model, META)


def _cache(model: ModelConfig, block_size: int, dtype: torch.dtype) -> Any:
    """A KVCache without data."""
    shapes = model.kv_shapes
    k = [empty(BLOCKS, block_size, of.heads, of.k_dim, dtype=dtype) for of in shapes]
    v = [empty(BLOCKS, block_size, of.heads, of.v_dim, dtype=dtype) for of in shapes]
    scales: list[fp8.Scales] = [(None, None)] * len(shapes)
    if dtype == fp8.DTYPE:
        scales = [(empty(BLOCKS, of.heads, block_size, dtype=torch.float32),) * 2 for of in shapes]
    return SimpleNamespace(k=k, v=v, scales=scales)
