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

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headrace.attention import AttentionBackend
from headrace.cache.kv_cache import KVCache, zeros
from headrace.errors import CheckpointError
from headrace.kernels.activation import act_mul
from headrace.kernels.embedding import embed
from headrace.kernels.norm import add_rms_norm, rms_norm
from headrace.kernels.qkv import qkv_rope_write, rotation_rows
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig
from headrace.model.forward import Forward
from headrace.model.linear import Weight, make_linear
from headrace.model.rope import rope_tables
from headrace.speculative.draft_model import DraftModel
from headrace.speculative.proposer import DraftRow
from headrace.worker.batch_state import BatchState


@dataclass(slots=True)
class EagleWeights:
    """Matrices are [out, in]; E is the head's width, H the target's, D the ids that it can guess."""

    fc: Tensor  # [E, 3 H]
    qkv: Tensor  # [q + 2 kv, 2 E]
    o: Tensor  # [E, q]
    gate_up: Tensor  # [2 I, E]
    down: Tensor  # [E, I]
    input_norm: Tensor  # [E], of the embedding
    hidden_norm: Tensor  # [E], of the features
    mlp_norm: Tensor  # [E]
    final_norm: Tensor  # [E]
    lm_head: Tensor  # [D, E]
    to_target: Tensor | None  # [D] int32: the target's id of each id of the head; None: the same
    embedding: Tensor | None  # [V, E]; None: the target's

    @property
    def num_bytes(self) -> int:
        tensors = (getattr(self, name) for name in self.__slots__)
        return sum(t.numel() * t.itemsize for t in tensors if t is not None)


def load_eagle(path: Path, config: ModelConfig, target: ModelConfig, dtype: torch.dtype, device: torch.device) -> EagleWeights:
    """The head in the directory `path`. Raises CheckpointError for missing tensors or other shapes."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no *.safetensors file (pickled checkpoints are never loaded)")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file, device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: {error}") from error
    tensors = {name.removeprefix("model.").replace("layers.0.", "midlayer."): t for name, t in tensors.items()}

    def take(name: str, *shape: int) -> Tensor:
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}"
            raise CheckpointError(f"{path}: {name} {found}, {list(shape)} is needed")
        return tensor.to(device, dtype)

    width, inner = config.hidden_size, config.intermediate_size
    guesses = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else 0
    to_target = None
    if "d2t" in tensors:
        if tensors["d2t"].shape != (guesses,):
            raise CheckpointError(f"{path}: d2t has the shape {list(tensors['d2t'].shape)}, [{guesses}] is needed")
        to_target = torch.arange(guesses) + tensors["d2t"].long()  # it holds differences
        if guesses and not 0 <= int(to_target.min()) <= int(to_target.max()) < target.vocab_size:
            raise CheckpointError(f"{path}: d2t names ids that the target does not have")
    elif guesses > target.vocab_size:
        raise CheckpointError(f"{path}: lm_head has {guesses} ids, the target {target.vocab_size}")
    own = "embed_tokens.weight" in tensors
    if not own and width != target.hidden_size:
        raise CheckpointError(f"{path}: no embed_tokens.weight, and the target's is not {width} wide")
    layer, attn = "midlayer.", "midlayer.self_attn."
    parts = (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size))
    return EagleWeights(
        fc=take("fc.weight", width, 3 * target.hidden_size),
        qkv=torch.cat([take(f"{attn}{name}_proj.weight", size, 2 * width) for name, size in parts]),
        o=take(f"{attn}o_proj.weight", width, config.q_size),
        gate_up=torch.cat([take(f"{layer}mlp.{name}_proj.weight", inner, width) for name in ("gate", "up")]),
        down=take(f"{layer}mlp.down_proj.weight", width, inner),
        input_norm=take(f"{layer}input_layernorm.weight", width),
        hidden_norm=take(f"{layer}hidden_norm.weight", width),
        mlp_norm=take(f"{layer}post_attention_layernorm.weight", width),
        final_norm=take("norm.weight", width),
        lm_head=take("lm_head.weight", guesses, width),
        to_target=None if to_target is None else to_target.to(device, torch.int32),
        embedding=take("embed_tokens.weight", target.vocab_size, width) if own else None,
    )


def tapped_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Before which of the target's layers the features are taken: as the head's config says, or as in the publication."""
    given = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = given or sorted((2, num_layers // 2, num_layers - 3))
    if len(layers) != 3 or not all(isinstance(i, int) and 0 <= i < num_layers for i in layers):
        raise CheckpointError(f"an EAGLE-3 head needs three of the target's {num_layers} layers, not {list(layers)}")
    return tuple(layers)


class EagleHead(DraftModel):
    """See Drafter. `taps`: the target's layers before which its residual stream is read."""

    def __init__(
        self, weights: EagleWeights, config: ModelConfig, attention: AttentionBackend, target: Forward, kv: KVCache,
        state: BatchState, cost: float, taps: tuple[int, ...], *, max_model_len: int, max_num_batched_tokens: int,
    ):  # fmt: skip
        super().__init__(target, kv, state, cost, len(weights.lm_head), max_num_batched_tokens)
        self.weights, self.config, self.attention, self.taps = weights, config, attention, taps
        self._embedding = weights.embedding if weights.embedding is not None else target.embedding
        self._parts = [make_linear(Weight(w.contiguous())) for w in weights.fc.chunk(3, dim=1)]
        self._qkv, self._o = make_linear(Weight(weights.qkv)), make_linear(Weight(weights.o))
        self._gate_up, self._down = make_linear(Weight(weights.gate_up)), make_linear(Weight(weights.down))
        self._lm_head = make_linear(Weight(weights.lm_head))
        device, dtype = weights.fc.device, weights.fc.dtype
        self._rope = rope_tables(config.rope, max_model_len, device)
        # one more for the padded rows of captured steps
        self._features = zeros((kv.num_blocks * kv.block_size + 1, config.hidden_size), dtype, device)
        self._fused: Tensor | None = None
        target.hidden_state_hook = self._read

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        return KVCache.bytes_per_block(config, block_size, dtype) + block_size * config.hidden_size * dtype.itemsize

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
        w, config, eps = self.weights, self.config, self.config.norm_eps
        self.attention.begin(batch, self.kv)
        embedded = embed(batch.token_ids, self._embedding)
        both = torch.cat([rms_norm(embedded, w.input_norm, eps), rms_norm(features, w.hidden_norm, eps)], dim=-1)
        positions: Tensor | None = batch.positions
        cos, sin = self._rope
        if not batch.positions.is_cuda:
            (cos, sin), positions = rotation_rows(cos, sin, batch.positions), None
        q, own = qkv_rope_write(
            self._qkv(both), positions, cos, sin, self.kv, 0, batch.slot_mapping,
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            q_norm=None, k_norm=None, eps=eps, norm_offset=0.0, keep=self.attention.keeps_own,
        )  # fmt: skip
        attended = self.attention.attend(q, 0, self.kv, batch, scale=config.attn_scale, window=0, softcap=0.0, own=own)
        normed, residual = add_rms_norm(self._o(attended), features, w.mlp_norm, eps)
        return residual + self._down(act_mul(self._gate_up(normed), config.activation))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._lm_head(rms_norm(hidden, self.weights.final_norm, self.config.norm_eps))
        return logits if logits.is_cuda else logits.float()

    def _target_ids(self, token_ids: Tensor) -> Tensor:
        to_target = self.weights.to_target
        return token_ids if to_target is None else to_target[token_ids.long()]
