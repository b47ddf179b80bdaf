"""The feed-forward part of a layer with experts: a router, those that it chooses for each row, and one that all rows have."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.experts import choose, run_experts
from headrace.kernels.experts_lora import ExpertAdds
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import LayerWeights
from headrace.model.linear import MakeLinear, Reduce
from headrace.model.mlp import MLP_ELEMENTS, DenseMlp, Mlp
from headrace.model.weight import Weight, dequantized


def mlp_of(w: LayerWeights, config: ModelConfig, layer: int, make: MakeLinear, reduce: Reduce | None) -> Mlp:
    """A layer's feed-forward part: dense where it has no experts."""
    if config.experts is not None and config.experts.at(layer) and config.per_layer is None:
        return ExpertsMlp(w.more, config, make, reduce)
    gate_up, down = make(w.gate_up, w.gate_up_bias, None), make(w.down, w.down_bias, reduce)
    return DenseMlp(gate_up, down, config.intermediate_size, config.activation, config.gated)


class ExpertsMlp(Mlp):
    """`weights` are a layer's own (`LayerWeights.more`), by these names:

    router [E, H], router_bias [E], correction [E], shared_gate [1, H] (all float32); experts_gate_up [e * 2 I, H], of each
    expert its gate rows and then its up rows, experts_down [e * H, I], and their biases experts_gate_up_bias,
    experts_down_bias; shared_gate_up, shared_down. A rank of several has e of the E experts, whole, and a part of the
    shared one; the router is the same everywhere, and what all ranks give is added up once.
    """

    fuses_add = False

    def __init__(
        self, weights: dict[str, Any], config: ModelConfig, make: MakeLinear, reduce: Reduce | None
    ):  # fmt: skip
        assert config.experts is not None
        self.experts, self.activation, self.reduce = config.experts, config.activation, reduce
        self.router, self.router_bias = weights["router"].data, weights.get("router_bias")
        self.correction = weights.get("correction")
        self.gate_up, self.down = (
            _as_run(weights[name], columns)
            for name, columns in (("experts_gate_up", config.hidden_size), ("experts_down", self.experts.inner))
        )
        self.biases = {name: weights.get(f"experts_{name}") for name in ("gate_up_bias", "down_bias")}
        if self.gate_up.data.dtype == torch.float32:
            self.biases = {name: None if bias is None else bias.float() for name, bias in self.biases.items()}
        self.shared, self.shared_gate = None, None
        self.workspace_bytes = 0
        if inner := self.experts.shared_inner:
            gate_up, down = make(weights["shared_gate_up"], None, None), make(weights["shared_down"], None, None)
            self.shared = DenseMlp(gate_up, down, inner, config.activation)
            self.workspace_bytes = self.shared.workspace_bytes
            self.shared_gate = weights["shared_gate"].data if self.experts.shared_gate else None
        self.adds: Any = weights.pop("experts_adds", None)  # a lora.experts.LayerExperts
        self.max_rows = 1 << max(1, MLP_ELEMENTS // (2 * self.experts.chosen * self.experts.inner)).bit_length() - 1

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) if self.reduce is None else self.reduce(self.product(x))

    def add_to(self, total: Tensor, x: Tensor) -> None:
        total += self(x)

    def product(self, x: Tensor) -> Tensor:
        firsts = range(0, len(x), self.max_rows) if len(x) else (0,)
        parts = [self._rows(x[first : first + self.max_rows], self._adds(first, x)) for first in firsts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _adds(self, first: int, x: Tensor) -> ExpertAdds | None:
        return None if self.adds is None else self.adds.of_rows(first, min(self.max_rows, len(x) - first))

    def _rows(self, x: Tensor, adds: ExpertAdds | None) -> Tensor:
        experts = self.experts
        ids, shares = choose(x, self.router, self.router_bias, self.correction, experts)
        out = run_experts(
            x, self.gate_up, self.down, ids, shares, count=len(experts.here), first=experts.first,
            activation=self.activation, clamp=experts.clamp, adds=adds, **self.biases,
        )  # fmt: skip
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = (shared * F.linear(x.float(), self.shared_gate).sigmoid()).to(x.dtype)
        return out.add_(shared)


def _as_run(weight: Weight, columns: int) -> Weight:
    """On the CPU what is narrow is widened once, as by `make_linear`, without what packed rows are filled up with."""
    if weight.kind == "float" or weight.data.device.type != "cpu":
        return weight
    return Weight(dequantized(weight, torch.float32)[:, :columns].contiguous())
