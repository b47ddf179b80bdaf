"""A gated delta net in a fused decode step: what stands between a layer's two first products in attention's place."""

from __future__ import annotations

from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.fast_decode.adapters import Adds
from headrace.fast_decode.products import project
from headrace.fast_decode.tiles import Shape, gemm_tile, gemv_tile
from headrace.kernels.delta_rule import delta_rule
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import LayerWeights
from headrace.model.delta_net import rule_of


class DeltaStep:
    """Of one layer. Gates that are held otherwise than the rest of the projection have a product of their own."""

    def __init__(self, config: ModelConfig, layer: int, weights: LayerWeights):
        delta = config.delta
        assert delta is not None
        self.rule, self.layer, self.eps = rule_of(config, weights), layer, config.norm_eps
        self.split, self.gates = delta.channels + delta.v_size, weights.more.get("delta_gates")

    def __call__(
        self, projected: Tensor, x: Tensor, sumsq: Tensor | None, batch: ForwardBatch, kv: KVCache, adapters: Adds | None = None
    ) -> Tensor:
        """projected [rows, columns] in the model's dtype, made of x [rows, H] and `sumsq` (see products.project) -> [rows,
        value heads * value_dim]."""
        gates = projected[:, self.split :]
        if self.gates is not None:
            rows, shape = len(x), Shape(self.gates.shape[0], x.shape[1], splittable=False)
            gates = projected.new_empty(rows, shape.columns)
            tile = gemv_tile(shape, rows) if rows == 1 else gemm_tile(shape, rows)
            project(x, self.gates, gates[None], tile, sumsq=sumsq, eps=self.eps)
            if adapters is not None:
                adapters.add_to(f"layers.{self.layer}.delta_gates", gates, x, squares=sumsq, eps=self.eps)
        return delta_rule(self.rule, projected, gates, kv.states.of(self.layer), batch)


def delta_steps(config: ModelConfig, layers: list[LayerWeights]) -> list[DeltaStep | None]:
    """Of each layer; None: it has attention."""
    if config.delta is None:
        return [None] * len(layers)
    there = config.delta.layers
    return [DeltaStep(config, i, layer) if there[i] else None for i, layer in enumerate(layers)]
