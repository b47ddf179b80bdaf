"""What Gemma 4 has beyond Gemma 3: normed values, keys and values of other layers, embeddings for each layer, experts beside
the dense MLP, and a scalar on the residual stream behind every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.activation import act_mul
from headrace.kernels.experts import choose, run_experts
from headrace.kernels.experts_lora import ExpertAdds
from headrace.kernels.norm import add_normed, rms_norm
from headrace.model.batch import WantedRows
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import LayerWeights
from headrace.model.experts import ExpertsMlp
from headrace.model.linear import MakeLinear
from headrace.model.mixer import Mixer, Pass, SelfAttention
from headrace.model.mlp import Mlp
from headrace.model.ranks import VocabPart
from headrace.model.shard import Group
from headrace.model.vocabulary import embed


def gemma4_form(
    attention: SelfAttention, mlp: Mlp, w: LayerWeights, config: ModelConfig, layer: int, make: MakeLinear, group: Group | None
) -> tuple[Mixer, Mlp]:  # fmt: skip
    """See layer_forms.py; `w.more` has the names of families_gemma4.py."""
    assert config.per_layer is not None
    sizes = config.per_layer.sizes[layer]
    attention.layer = sizes.source
    attention.normed_values = True
    if not sizes.kv_heads:
        attention.k_norm = attention.q_norm  # of no keys
    closing = ClosingMlp(mlp, w.more, config, make, group)
    if not config.per_layer.inputs:
        return attention, closing
    inputs = None if layer else LayerInputs(w.more, config, make, group)
    return WithInputs(attention, closing, inputs, layer), closing


class LayerInputs:
    """A second embedding, of each layer its own part, and what the first one says of it."""

    def __init__(self, more: Mapping[str, Any], config: ModelConfig, make: MakeLinear, group: Group | None):
        assert config.per_layer is not None
        self.table, self.norm = more["layer_embedding"].data, more["layer_projection_norm"]
        self.projection, self.input_norm = make(more["layer_projection"], None, None), more["first_norm"]
        self.shape, self.eps = (config.num_layers, config.per_layer.inputs), config.norm_eps
        self.scale = torch.tensor(config.per_layer.inputs**0.5, dtype=self.table.dtype).item()
        self.part = None if group is None else VocabPart(group, config.per_layer.input_rows, self.table.device)

    def __call__(self, embedded: Tensor, token_ids: Tensor) -> Tensor:
        """[T, H], [T] int32 -> [layers, T, inputs]."""
        own = (embed if self.part is None else self.part.embed)(token_ids, self.table, self.scale)
        said = (self.projection(embedded) * embedded.shape[1] ** -0.5).unflatten(1, self.shape)
        both = rms_norm(said, self.norm, self.eps) + own.unflatten(1, self.shape)
        return (both * 0.5**0.5).transpose(0, 1)

    def normed(self, embedded: Tensor) -> Tensor:
        """What attention of the first layer reads."""
        return rms_norm(embedded, self.input_norm, self.eps)


class WithInputs:
    """Attention of a layer that hands its MLP the rows' inputs. That of the first layer, which has no norm before it, makes
    them for all."""

    def __init__(self, attention: SelfAttention, closing: ClosingMlp, inputs: LayerInputs | None, layer: int):
        self.attention, self.closing, self.inputs, self.layer = attention, closing, inputs, layer
        self.out = attention.out

    def __call__(self, normed: Tensor, shared: Pass, last: WantedRows | None) -> Tensor:
        if self.inputs is not None:
            shared.more = self.inputs(normed, shared.batch.token_ids)
            normed = self.inputs.normed(normed)
        rows = shared.more[self.layer]
        self.closing.rows = rows if last is None else rows[last.index]
        attended = self.attention(normed, shared, last)
        if last is not None:
            _leave_out(shared, last)
        return attended


def _leave_out(shared: Pass, last: WantedRows) -> None:
    """Layers that follow have these rows alone."""
    shared.batch, shared.more = last.batch, shared.more[:, last.index]
    if shared.positions is not None:
        shared.positions = last.batch.positions
    else:
        shared.tables = {kind: (cos[last.index], sin[last.index]) for kind, (cos, sin) in shared.tables.items()}


class ClosingMlp(Mlp):
    """A layer's feed-forward part, and what follows it: all that is done to the residual stream, which is scaled at the end."""

    fuses_add = True

    def __init__(self, dense: Mlp, more: dict[str, Any], config: ModelConfig, make: MakeLinear, group: Group | None):
        self.dense, self.eps, self.activation = dense, config.norm_eps, config.activation
        self.norm, self.scalar = more["closing_norm"], more["layer_scalar"]
        self.experts: Experts | None = None
        if config.experts is not None:
            self.experts = Experts(more, config, make, group)
            self.dense_norm, self.experts_norm = more["dense_norm"], more["mixed_norm"]
        self.rows: Tensor | None = None  # [T, inputs]: of this forward
        if "input_gate" in more:
            self.gate, self.back = (make(more[name], None, None) for name in ("input_gate", "input_back"))
            self.input_norm = more["input_norm_after"]
        self.workspace_bytes = max(dense.workspace_bytes, 0 if self.experts is None else self.experts.workspace_bytes)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        out = self.dense(x)
        if self.experts is not None:
            out = rms_norm(out, self.dense_norm, self.eps) + rms_norm(self.experts(total), self.experts_norm, self.eps)
        if self.rows is None:
            add_normed(total, out, self.norm, self.eps, self.scalar)
            return
        add_normed(total, out, self.norm, self.eps)
        inner = act_mul(torch.cat((self.gate(total), self.rows), 1), self.activation)
        add_normed(total, self.back(inner), self.input_norm, self.eps, self.scalar)

    def __call__(self, x: Tensor) -> Tensor:
        raise TypeError("what this part does is no addition to the residual stream")

    product = __call__


class Experts(ExpertsMlp):
    """A mixture that reads the residual stream: its router by a norm of its own, its experts by another."""

    def __init__(self, more: dict[str, Any], config: ModelConfig, make: MakeLinear, group: Group | None):
        super().__init__(more, config, make, None if group is None else group.sum)
        # the router's norm has no weight: its factors, of columns, are the matrix's
        self.router = self.router * (more["router_scale"] * config.hidden_size**-0.5)
        self.norm, self.expert_scale, self.eps = more["norm_of_experts"], more["expert_scale"], config.norm_eps
        self.even = torch.ones_like(more["router_scale"])

    def _rows(self, x: Tensor, adds: ExpertAdds | None) -> Tensor:
        ids, shares = choose(rms_norm(x, self.even, self.eps), self.router, None, None, self.experts)
        return run_experts(
            rms_norm(x, self.norm, self.eps), self.gate_up, self.down, ids, shares * self.expert_scale[ids],
            count=len(self.experts.here), first=self.experts.first, activation=self.activation, adds=adds,
        )  # fmt: skip
