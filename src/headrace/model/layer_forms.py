"""Layers that are no plain sequence of attention and MLP: the same two parts, put together in another way."""

from __future__ import annotations

from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import LayerWeights
from headrace.model.delta_net import hybrid_mixer
from headrace.model.gemma4 import gemma4_form
from headrace.model.latent import LatentAttention
from headrace.model.linear import MakeLinear
from headrace.model.mixer import Mixer, SelfAttention
from headrace.model.mlp import DenseMlp, Mlp
from headrace.model.shard import Group
from headrace.model.side_by_side import Nothing, SideBySide
from headrace.model.xielu import Xielu


def formed(
    attention: SelfAttention, mlp: Mlp, w: LayerWeights, config: ModelConfig, layer: int, make: MakeLinear, group: Group | None
) -> tuple[Mixer, Mlp]:  # fmt: skip
    """The parts of the layer `layer`, as the decoder's loop runs them one after the other; `config` is this layer's."""
    if config.activation == "xielu" and isinstance(mlp, DenseMlp):
        mlp.act = Xielu(w.more["alpha_p"], w.more["alpha_n"])
    if config.latent is not None:
        return LatentAttention(attention.qkv, attention.out, w.more, config, layer, make), mlp
    if config.delta is not None:
        return hybrid_mixer(attention, make, config, w), mlp
    if config.parallel:
        return SideBySide(attention, mlp), Nothing()
    if config.per_layer is not None:
        return gemma4_form(attention, mlp, w, config, layer, make, group)
    return attention, mlp
