"""EAGLE-3 heads: one layer that reads the target's own hidden states and guesses what comes next (Li et al., 2025).

The head's row p takes the embedding of token p + 1 and the target's features at p, the residual streams before three of its
layers fused to one vector, and gives the logits of token p + 2. For a row whose features the target has not computed, what
the head itself gave for the row before it takes their place ("training-time test").

The features of all computed tokens lie in a cache of the KV cache's blocks: so the head catches up on prefix hits, chunks
and plain steps whenever it is asked, like a draft model.

The layout is that of the published checkpoints (SafeAILab, SpecForge, speculators): fc, midlayer or layers.0, norm, lm_head,
d2t, and perhaps embed_tokens; safetensors only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.cache.memory import zeros
from headrace.errors import CheckpointError
from headrace.kernels.norm import rms_norm
from headrace.model.batch import ForwardBatch
from headrace.model.checkpoint import Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.linear import make_linear
from headrace.model.loader import filled_plan, load_tensors
from headrace.model.vocabulary import embed
from headrace.model.weight import Weight
from headrace.model.weight_names import PRE_NORM_NAMES, WeightSpec, plan_weights
from headrace.speculative.draft_model import DraftModel
from headrace.worker.batch_state import BatchState
from headrace.worker.drafter import DraftRow


class EagleParts(NamedTuple):
    """What a head has beside the layer that a Decoder runs. E is the head's width, H the target's, D the ids it can guess."""

    fc: Tensor  # [E, 3 H]
    input_norm: Tensor  # [E], of the embedding
    hidden_norm: Tensor  # [E], of the features
    to_target: Tensor | None  # [D] int32: the target's id of each id of the head; None: the same
    own_embedding: bool  # else it reads the target's
    taps: tuple[int, ...]  # the target's layers before which its residual stream is read

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in self if isinstance(t, Tensor))


def load_eagle(
    checkpoint: Checkpoint, config: ModelConfig, target: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[DecoderWeights, EagleParts]:
    """The head's layer and the rest of it. Raises CheckpointError for missing tensors or other shapes."""
    path, width = checkpoint.path, config.hidden_size
    entries = {_usual_name(name): entry for name, entry in checkpoint.tensors().items()}
    guesses = entries["lm_head.weight"].num_rows if "lm_head.weight" in entries else 0
    plan = [WeightSpec("fc", (width, 3 * target.hidden_size), (("fc.weight", width),))]
    plan.append(WeightSpec("hidden_norm", (width,), (("model.layers.0.hidden_norm.weight", width),)))
    for spec in plan_weights(replace(config, vocab_size=target.vocab_size), PRE_NORM_NAMES):
        if spec.target == "embedding":
            spec = replace(spec, optional=True)
        elif spec.target == "layers.0.qkv":  # of embedding and features
            spec = replace(spec, shape=(spec.shape[0], 2 * width))
        elif spec.target == "lm_head":
            spec = replace(spec, shape=(guesses, width), sources=(("lm_head.weight", guesses),), optional=False)
        plan.append(spec)
    tensors = load_tensors(filled_plan(path, plan, entries), entries, dtype, device)
    to_target = _target_ids(path, entries, guesses, target.vocab_size)
    own = "embedding" in tensors
    if not own and width != target.hidden_size:
        raise CheckpointError(f"{path}: no embed_tokens.weight, and the target's is not {width} wide")
    fc, hidden_norm = tensors.pop("fc"), tensors.pop("hidden_norm")
    tensors.setdefault("embedding", fc.new_empty((0, width)))
    weights = DecoderWeights.from_tensors(tensors, config)
    to_target = None if to_target is None else to_target.to(device, torch.int32)
    taps = tapped_layers(checkpoint.config, target.num_layers)
    return weights, EagleParts(fc, tensors["layers.0.input_norm"], hidden_norm, to_target, own, taps)


def _usual_name(name: str) -> str:
    """The name that the tensor has in a Llama of one layer."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return f"model.{name}" if name.startswith(("layers.", "norm.", "embed_tokens.")) else name


def _target_ids(path: Path, entries: dict[str, TensorEntry], guesses: int, vocab_size: int) -> Tensor | None:
    if "d2t" not in entries:
        if guesses > vocab_size:
            raise CheckpointError(f"{path}: lm_head has {guesses} ids, the target {vocab_size}")
        return None
    plan = filled_plan(path, [WeightSpec("d2t", (guesses,), (("d2t", guesses),))], entries)
    ids = torch.arange(guesses) + load_tensors(plan, entries, torch.int64, torch.device("cpu"))["d2t"]  # it holds differences
    if guesses and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise CheckpointError(f"{path}: d2t names ids that the target does not have")
    return ids


def tapped_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Before which of the target's layers the features are taken: as the head's config says, or as in the publication."""
    given = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = given or sorted((2, num_layers // 2, num_layers - 3))
    if len(layers) != 3 or not all(isinstance(i, int) and 0 <= i < num_layers for i in layers):
        raise CheckpointError(f"an EAGLE-3 head needs three of the target's {num_layers} layers, not {list(layers)}")
    return tuple(layers)


class EagleHead(DraftModel):
    """See Drafter. `layer` runs the head's one layer."""

    def __init__(
        self, layer: Decoder, parts: EagleParts, target: Decoder, kv: KVCache, state: BatchState, cost: float, vocab_size: int,
        max_num_batched_tokens: int,
    ):  # fmt: skip
        super().__init__(target, kv, state, cost, vocab_size, max_num_batched_tokens)
        self.layer, self.parts, self.taps = layer, parts, parts.taps
        if not parts.own_embedding:
            layer.embedding = target.embedding
        self._parts = [make_linear(Weight(w.contiguous())) for w in parts.fc.chunk(3, dim=1)]
        # one more for the padded rows of captured steps
        places = kv.num_blocks * kv.block_size + 1
        self._features = zeros((places, layer.config.hidden_size), parts.fc.dtype, parts.fc.device)
        self._fused: Tensor | None = None
        target.hidden_state_hook = self._read

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Of the features."""
        return block_size * config.hidden_size * dtype.itemsize

    def _read(self, layer: int, residual: Tensor, batch: ForwardBatch) -> None:
        """The target is about to run a layer; after the last tapped one the features of the rows are kept."""
        for part, tapped in zip(self._parts, self.taps, strict=True):
            if tapped == layer:
                seen = part(residual.to(self._features.dtype))
                self._fused = seen if self._fused is None else self._fused + seen
        if layer == max(self.taps) and self._fused is not None:
            places = torch.where(batch.slot_mapping < 0, len(self._features) - 1, batch.slot_mapping)
            self._features.index_copy_(0, places, self._fused)
            self._fused = None

    def _stop(self, row: DraftRow) -> int:
        return row.start  # the features of the last known token come with this step

    def _computed(self, drafted: DraftRow, start: int, behind: bool) -> int:
        if behind:
            return start - 1  # rows after that had no features of the target
        return max(drafted.start - 1, start - 1 - drafted.num_drafts) if drafted.unverified else drafted.start

    def _forward(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, unverified: np.ndarray | None = None
    ) -> Tensor:
        batch = self._shifted(slots, starts, counts, unverified)
        return self._run(batch, self._features[batch.slot_mapping])

    def _step(self, hidden: Tensor, slots: np.ndarray, places: np.ndarray, unverified: np.ndarray) -> Tensor:
        return self._run(self._shifted(slots, places - 1, np.ones_like(slots), unverified), hidden)

    def _shifted(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, unverified: np.ndarray | None = None
    ) -> ForwardBatch:
        """Rows with the tokens after them."""
        batch, _, rows = self.state.prepare(slots, starts, counts, unverified)
        batch.token_ids = rows.guesses
        return batch

    def _run(self, batch: ForwardBatch, features: Tensor) -> Tensor:
        """The residual stream after the layer [T, E]: what stands in for features, and, normed, goes to the lm_head."""
        parts, eps = self.parts, self.layer.config.norm_eps
        embedded = rms_norm(embed(batch.token_ids, self.layer.embedding), parts.input_norm, eps)
        both = torch.cat([embedded, rms_norm(features, parts.hidden_norm, eps)], dim=-1)
        return self.layer.run_layers(both, features, batch, self.kv)[1]

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.layer.logits(rms_norm(hidden, self.layer.final_norm, self.layer.config.norm_eps))

    def _target_ids(self, token_ids: Tensor) -> Tensor:
        to_target = self.parts.to_target
        return token_ids if to_target is None else to_target[token_ids.long()]
