"""The whole step of a model on a CPU in one native call, a `Forward`: a row's numbers are the same bits in any batch.

    engine/build.py --> why_not (None: it can) --> NativeDecoder --> load: weights.py packs the file's rows
    worker          --> forward, logits, decode: one call each, without Python's lock; csrc/cpu computes
    runner.py       --> decode_slots: a whole step of plain decodes, from the slots' tables to the ids in them
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.config import EngineConfig
from headrace.kernels.tables import Float, Int, SlotTables
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.model.checkpoint import Checkpoint
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.forward import HiddenStateHook
from headrace.model.ranks import VocabPart
from headrace.model.rare import rare_parts
from headrace.model.rope import rope_tables
from headrace.model.vocabulary import TokenlessIds
from headrace.native.load import Library
from headrace.native.precision import Precision
from headrace.native.threads import num_threads
from headrace.native.weights import Weights
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.sampler import Choose, SampleInputs
from headrace.scheduler.config import Limits

_CACHE_FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "INT8"}
_DRAWN_BY = (Int.SEED, Int.TOP_K, Int.SAMPLE_INDEX, Int.PROMPT_LEN)
MAX_HEAD_DIM = 256


def why_not(config: EngineConfig, model: ModelConfig, limits: Limits) -> str | None:
    """Why the native step does not run a model, as the end of a sentence; None if it does, where there is a library."""
    if config.enforce_eager:
        return "enforce_eager asks for plain torch"
    if config.dtype == "float16":
        return "it does not compute in float16"
    if config.takes_adapters:
        return "it runs no adapters (LoRA)"
    if config.speculative_method == "eagle3":
        return "EAGLE-3 reads the hidden states between the layers"
    if limits.block_size % 16:
        return f"its blocks of the KV cache are multiples of 16 tokens, not {limits.block_size}"
    if rare := rare_parts(model):
        return f"it knows nothing of {', '.join(rare)}"
    if model.head_dim % 2 or model.head_dim > MAX_HEAD_DIM:
        return f"it has even heads of up to {MAX_HEAD_DIM} dimensions, not {model.head_dim}"
    return None


class NativeDecoder:
    """Runs a model (a `Forward`) by a library of the CPU's instruction set; `load` must come before the first step."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, limits: Limits, precision: Precision,
        library: Library,
    ):  # fmt: skip
        self.config, self.precision, self.library = model, precision, library
        self.vocab_size = model.vocab_size
        self.dtype = torch.float32  # of hidden states and logits
        self.cache_dtype: torch.dtype = getattr(torch, precision.cache)
        self.tokenless: TokenlessIds | None = None
        self.vocab: VocabPart | None = None
        self.hidden_state_hook: HiddenStateHook | None = None
        self.threads = num_threads(config.threads)
        self._limits = limits
        self._weights: Weights | None = Weights(checkpoint, model, precision, library)
        self.weight_formats, self.unread_bytes = self._weights.describe(), self._weights.unread_bytes
        self._model = self._make(model)
        self.choose: Choose | None = partial(draw_rows, self._model)
        self._cache: KVCache | None = None
        self._decoded = np.empty((0, self.vocab_size), np.float32)

    def _make(self, model: ModelConfig) -> Any:
        """A native Model with its tables of positions, and no weights yet."""
        extension, precision = self.library.extension, self.precision
        config = extension.Config()
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
            "norm_eps", "attn_scale", "attn_softcap", "residual_scale", "logit_scale", "logit_softcap",
        ):  # fmt: skip
            setattr(config, name, getattr(model, name))
        # rounded to the numbers that the model was trained in, where it runs in them
        scale_dtype = torch.float32 if precision.cache == "float32" else getattr(torch, model.dtype)
        config.embed_scale = torch.tensor(model.embed_scale, dtype=scale_dtype).item()
        config.activation = extension.Activation[model.activation.upper()]
        config.rounding = extension.Rounding[precision.rounding]
        config.cache_format = extension.CacheFormat[_CACHE_FORMATS[precision.cache]]
        config.block_size, config.threads = self._limits.block_size, self.threads
        ropes: list[RopeConfig] = [model.rope_of(layer) for layer in range(model.num_layers)]
        kinds = list(dict.fromkeys(ropes))
        native = extension.Model(str(self.library.path), config, list(model.windows), [kinds.index(rope) for rope in ropes])
        for kind, rope in enumerate(kinds):
            cos, sin = rope_tables(rope, self._limits.max_model_len)
            native.set_rope(kind, cos.contiguous().numpy(), sin.contiguous().numpy())
        return native

    @property
    def num_bytes(self) -> int:
        """Of the weights: what they will take before `load`, what they take after it."""
        return self._model.bytes() if self._weights is None else self._weights.num_bytes

    def describe(self) -> str:
        """What it computes with, for the log."""
        rounding = {"FLOAT": "float", "INT16": "int16", "INT8": "int8"}[self.precision.rounding]
        return (
            f"{self.library.instruction_set}, {self.threads} threads, weights {self.weight_formats}, {rounding} activations, "
            f"{self.precision.cache} cache"
        )

    def load(self, progress: bool = False) -> None:
        """Read and pack the weights. Raises CheckpointError."""
        assert self._weights is not None
        self._weights.load(self._model, self.threads, progress)
        self._weights = None

    def forward(self, batch: ForwardBatch, kv: KVCache, wanted: WantedRows | None = None) -> Tensor:
        """See Forward."""
        count = batch.num_rows if wanted is None else len(wanted.index)
        hidden = torch.empty((count, self.config.hidden_size), dtype=torch.float32)
        self._run(batch, kv, None if wanted is None else wanted.index, hidden, None)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See Forward."""
        logits = torch.empty((len(hidden), self.vocab_size), dtype=torch.float32)
        if len(hidden):
            self._model.logits(hidden.contiguous().numpy(), logits.numpy())
        return logits if self.tokenless is None else self.tokenless.mask(logits)

    def decode(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """See Forward. The next call writes to the same memory: new pages for 32 rows would take a millisecond each time."""
        logits = torch.from_numpy(self._room(batch.num_rows))
        self._run(batch, kv, None, None, logits)
        return logits if self.tokenless is None else self.tokenless.mask(logits)

    def _room(self, rows: int) -> np.ndarray:
        if len(self._decoded) < rows:
            self._decoded = np.empty((rows, self.vocab_size), np.float32)
        return self._decoded[:rows]

    def read_slots(self, tables: SlotTables, kv: KVCache) -> None:
        """For `decode_slots`, once: whose tables and cache it reads and writes."""
        floats, ints = tables.floats.numpy(), tables.ints.numpy()
        columns = *(floats[:, c] for c in (Float.TEMPERATURE, Float.TOP_P, Float.MIN_P)), *(ints[:, c] for c in _DRAWN_BY)
        tokenless = [] if self.tokenless is None else self.tokenless.ids(self.vocab_size)
        self._model.set_tables(tables.token_ids.numpy(), tables.block_tables.numpy(), *columns, tokenless)
        self._use(kv)

    def decode_slots(self, slots: np.ndarray, positions: np.ndarray) -> tuple[list[int], list[int]]:
        """The next token of each of these slots, int32 as their positions [R]: the ids, which are in the tables too, and which
        rows failed. The bits are those of `decode` and `choose`."""
        return self._model.decode(slots, positions, GREEDY_EPS, self._room(len(slots)))

    def _use(self, kv: KVCache) -> None:
        if kv is not self._cache:
            self._model.set_cache(*([layer.view(torch.uint8).numpy() for layer in part] for part in (kv.k, kv.v)))
            self._cache = kv

    def _run(
        self, batch: ForwardBatch, kv: KVCache, wanted: Tensor | None, hidden: Tensor | None, logits: Tensor | None
    ) -> None:
        self._use(kv)
        columns = (
            batch.token_ids, batch.positions, batch.slot_mapping, batch.seq_slots, batch.query_start, batch.block_tables,
            wanted, hidden, logits,
        )  # fmt: skip
        self._model.run(*(None if column is None else column.numpy() for column in columns))

    def activation_bytes(self, max_rows: int) -> int:
        """See Forward."""
        return max_rows * self.config.hidden_size * 4

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """See Forward."""
        limits = self._limits
        return self._model.workspace_bytes(limits.max_num_batched_tokens, max_num_seqs, limits.max_model_len)


def draw_rows(model: Any, logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    """sampling.sampler.Choose of logits in float32, by a native model: one call, where torch and numpy take dozens."""
    ids = torch.empty(len(logits), dtype=torch.int32)
    failed = torch.empty(len(logits), dtype=torch.bool)
    columns = (
        logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.output_index,
        inputs.sample_index,
    )  # fmt: skip
    model.sample(*(column.numpy() for column in columns), GREEDY_EPS, ids.numpy(), failed.numpy())
    return ids, failed
