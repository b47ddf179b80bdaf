"""Runs the native step on hand-made batches beside the torch decoder: one instruction set's library, through the binding."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headrace.model.batch import ForwardBatch, WantedRows
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.rope import rope_tables
from headrace.native.load import INSTRUCTION_SETS
from model_harness import Sequences

try:
    from headrace.native import _step
except ImportError:  # not built
    _step = None

BF16_PRODUCTS = {"avx512bf16", "avx512amx"}  # their products of bfloat16 have other bits than the others'


def libraries() -> dict[str, Path]:
    """{instruction set: library} that were built and that this machine can run, the best last."""
    if _step is None:
        return {}
    features = set(_step.cpu_features())
    paths = {name: Path(_step.__file__).parent / f"libstep-{name}.so" for name in INSTRUCTION_SETS}
    return {name: path for name, path in paths.items() if features >= INSTRUCTION_SETS[name] and path.exists()}


@cache
def sampling_model(library: Path, vocab_size: int, threads: int = 1):
    """A native model without weights, which can do no more than sample rows."""
    settings = _step.Config()
    settings.vocab_size, settings.threads = vocab_size, threads
    settings.hidden_size = settings.intermediate_size = settings.head_dim = 32
    settings.num_layers = settings.num_heads = settings.num_kv_heads = 1
    return _step.Model(str(library), settings, [], [])


class NativeStep:
    """`forward` and `logits` of a Forward; the cache is its own."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, library: Path, *, max_len: int, num_blocks: int,
        block_size: int = 16, threads: int = 1, cache: str = "F32", matrices: str = "F32", rounding: str = "INT16",
    ):  # fmt: skip
        self.config = config
        self.library = str(library)
        settings = _step.Config()
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
            "norm_eps", "attn_scale", "attn_softcap", "embed_scale", "residual_scale", "logit_scale", "logit_softcap",
        ):  # fmt: skip
            setattr(settings, name, getattr(config, name))
        settings.activation = getattr(_step.Activation, config.activation.upper())
        settings.cache_format = getattr(_step.CacheFormat, cache)
        settings.rounding = getattr(_step.Rounding, rounding)
        settings.block_size, settings.threads = block_size, threads
        layers = range(config.num_layers)
        ropes = list(dict.fromkeys(config.rope_of(layer) for layer in layers))
        kinds = [ropes.index(config.rope_of(layer)) for layer in layers]
        self.model = _step.Model(self.library, settings, [config.window(layer) for layer in layers], kinds)
        self._load(weights, max_len, getattr(_step.Format, matrices))
        size = _step.block_bytes(settings.cache_format, block_size, config.num_kv_heads, config.head_dim)
        shape = (num_blocks, size)  # all ones: NaN in every format, as an earlier request may have left it
        self.keys = [torch.full(shape, 255, dtype=torch.uint8) for _ in layers]
        self.values = [torch.full(shape, 255, dtype=torch.uint8) for _ in layers]
        self.model.set_cache(self.keys, self.values)

    def _load(self, weights: DecoderWeights, max_len: int, matrices) -> None:
        config, names = self.config, _step.MatrixName
        for kind, rope in enumerate(dict.fromkeys(config.rope_of(layer) for layer in range(config.num_layers))):
            self.model.set_rope(kind, *rope_tables(rope, max_len))
        if weights.lm_head.tensors[0] is not weights.embedding:
            self._add(-1, names.EMBEDDING, [weights.embedding], matrices)
        self._add(-1, names.HEAD, [weights.lm_head.tensors[0]], matrices)
        self._vector(-1, "final_norm", weights.final_norm, weights.norm_offset)
        for index, layer in enumerate(weights.layers):
            q, kv, inner = config.q_size, config.kv_size, config.intermediate_size
            self._add(index, names.QKV, layer.qkv.tensors[0].split([q, kv, kv]), matrices)
            self._add(index, names.O, layer.o.tensors, matrices)
            self._add(index, names.GATE_UP, layer.gate_up.tensors[0].split(inner), matrices)
            self._add(index, names.DOWN, layer.down.tensors, matrices)
            for name in ("input_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "q_norm", "k_norm"):
                self._vector(index, name, getattr(layer, name), weights.norm_offset)
            for name in ("qkv_bias", "o_bias", "gate_up_bias", "down_bias"):
                self._vector(index, name, getattr(layer, name), 0.0)

    def _add(self, layer: int, name, parts, matrices) -> None:
        self.model.add_matrix(layer, name, [(matrices, part.shape[0]) for part in parts], parts[0].shape[1])
        first = 0
        for part in parts:
            self.model.fill(layer, name, first, self._raw(part.contiguous(), matrices))
            first += part.shape[0]

    def _raw(self, part: Tensor, matrices) -> Tensor:
        """Rows of a format. Those that nobody quantizes to are random, with scales that a file may have."""
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(matrices.name)
        if dtype is not None:
            return part.to(dtype).view(torch.uint8).flatten(1)
        rows, inputs = part.shape
        size = _step.raw_row_bytes(matrices, inputs)
        if matrices.name in ("Q8_0", "Q4_1"):
            raw = torch.empty(rows * size, dtype=torch.uint8)
            values = part.float().view(torch.uint8).flatten()
            _step.quantize_rows(self.library, _step.Format.F32, values, inputs, matrices, raw)
            return raw.view(rows, size)
        block = {"Q4_0": 18, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q4_Z": 20, "F8": 36}[matrices.name]
        generator = torch.Generator().manual_seed(rows)
        raw = torch.randint(0, 256, (rows, size // block, block), dtype=torch.uint8, generator=generator)
        if matrices.name == "F8":
            scales = torch.randn(rows, size // block, 1, generator=generator) / 2000
            return torch.cat([scales.view(torch.uint8), raw[..., 4:].masked_fill(raw[..., 4:] & 127 == 127, 0)], 2).flatten(1)
        for at in {"Q4_0": [0], "Q6_K": [208]}.get(matrices.name, [0, 2]):
            scales = torch.randn(rows, size // block, generator=generator) / 500
            raw[..., at : at + 2] = scales.half().unsqueeze(-1).view(torch.uint8)
        return raw.flatten(1)

    def _vector(self, layer: int, name: str, values: Tensor | None, offset: float) -> None:
        if values is not None:
            self.model.set_vector(layer, getattr(_step.VectorName, name.upper()), values.float() + offset)

    def forward(self, batch: ForwardBatch, kv: object, wanted: WantedRows | None = None) -> Tensor:
        index = None if wanted is None else wanted.index
        hidden = torch.empty(batch.num_rows if index is None else len(index), self.config.hidden_size)
        self._run(batch, index, hidden, None)
        return hidden

    def decode(self, batch: ForwardBatch) -> Tensor:
        logits = torch.empty(batch.num_rows, self.config.vocab_size)
        self._run(batch, None, None, logits)
        return logits

    def _run(self, batch: ForwardBatch, wanted: Tensor | None, hidden: Tensor | None, logits: Tensor | None) -> None:
        self.model.run(
            batch.token_ids, batch.positions, batch.slot_mapping, batch.seq_slots, batch.query_start, batch.block_tables,
            wanted, hidden, logits,
        )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.empty(len(hidden), self.config.vocab_size)
        self.model.logits(hidden, out)
        return out


class NativeSequences(Sequences):
    """As Sequences, through the native step; `settings` are NativeStep's."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, library: Path, *, max_len: int, block_size: int = 16,
                 num_seqs: int = 4, seed: int = 0, **settings):  # fmt: skip
        super().__init__(config, weights, max_len=max_len, block_size=block_size, num_seqs=num_seqs, seed=seed)
        self.decoder = NativeStep(
            config, weights, library, max_len=max_len, num_blocks=self.kv.num_blocks, block_size=block_size, **settings
        )

    def step_drafts(self, slot: int, ids: list[int]) -> Tensor:
        """As speculative verification may send them: each row a sequence of its own, all of one slot."""
        size = self.kv.block_size
        positions = [self.lengths[slot] + i for i in range(len(ids))]
        self.lengths[slot] += len(ids)
        places = [int(self.tables[slot, p // size]) * size + p % size for p in positions]
        count = len(ids)
        return self.decoder.decode(ForwardBatch(
            token_ids=torch.tensor(ids, dtype=torch.int32), positions=torch.tensor(positions, dtype=torch.int32),
            slot_mapping=torch.tensor(places), block_tables=self.tables, seq_slots=torch.full((count,), slot, dtype=torch.int32),
            query_start=torch.arange(count + 1, dtype=torch.int32), seq_lens=torch.tensor(positions, dtype=torch.int32) + 1,
            num_decodes=count, query_lens=[1] * count, context_lens=[p + 1 for p in positions], related=True,
        ))  # fmt: skip
