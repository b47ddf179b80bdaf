"""What the decoder must know of a model, independent of the file format it came from.

Built from Hugging Face `config.json` or GGUF metadata by `families.py`; every architecture is a setting of these switches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from headrace.cache.layer_shape import LayerShape
from headrace.model.delta_config import DeltaConfig
from headrace.model.experts_config import ExpertsConfig
from headrace.model.latent_config import LatentConfig
from headrace.model.layer_sizes import PerLayer, shape_of


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: kind, base and the parameters of its scaling.

    `kind` is the scaling (see rope.py), or none: nothing is rotated; `dim` the number of
    rotated dimensions of a head (head_dim times the partial rotary factor); `params` the raw `rope_scaling` entries that the
    kind needs.
    """

    theta: float
    dim: int
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "none"] = "default"
    max_position: int = 2048
    params: tuple[tuple[str, object], ...] = ()  # sorted items of rope_scaling: hashable

    def param(self, name: str, default=None):
        return dict(self.params).get(name, default)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. Sizes are element counts; windows count tokens (query position included)."""

    family: str  # key into families.FAMILIES
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rope: RopeConfig
    rope_local: RopeConfig | None = None  # of layers with a window, where it differs (Gemma-3)
    rope_layers: tuple[bool, ...] = ()  # per layer, whether it has any; () = all (SmolLM3, EXAONE-4)
    per_layer: PerLayer | None = None  # what is not the same in all layers: use `at` (Gemma 4)
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to every norm weight (Gemma: 1)
    norm: Literal["rms", "layer", "centred"] = "rms"  # centred: LayerNorm without bias (Cohere)
    norm_place: Literal["pre", "post", "sandwich"] = "pre"  # sandwich: before and after each part (Gemma-2/3); post: OLMo-2
    # over one head (Qwen3, Gemma-3), also after its rotation (Hunyuan), or over the whole projection (OLMo-2)
    qk_norm: Literal["none", "head", "rotated", "full"] = "none"
    rope_interleaved: bool = False  # in the file a head's rotary pairs are neighbours; see rope_layout.py
    query_scale: tuple[float, int] | None = None  # (b, period): queries at p times 1 + b ln(1 + p // period) (Ministral 3)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh", "gelu", "relu2", "xielu"] = "silu"
    experts: ExpertsConfig | None = None  # instead of an MLP, in all layers or some
    parallel: bool = False  # attention and MLP read the same norm and are added together (Cohere)
    delta: DeltaConfig | None = None  # gated delta nets in place of attention in some layers (Qwen3.5, Qwen3-Next)
    attn_gate: bool = False  # attention's output times a sigmoid of the row (there too)
    latent: LatentConfig | None = None  # then head_dim is that of the cached rows, and all heads have one key-value head
    gated: bool = True  # down(activation(gate) * up); else down(activation(up)) (StarCoder2, Nemotron)
    windows: tuple[int, ...] = ()  # per layer, 0 = full attention; () = full everywhere
    attn_softcap: float = 0.0  # 0 = none
    sinks: bool = False  # a learned score of each head in its softmax's denominator (gpt-oss)
    logit_softcap: float = 0.0
    attn_scale: float = 0.0  # multiplies q.k; always set by families.py
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies each part's output before it is added (Granite)
    logit_scale: float = 1.0  # multiplies the logits (Granite: 1 / logits_scaling)
    dtype: str = "float32"  # of the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def at(self, layer: int) -> ModelConfig:
        """With the sizes of this layer."""
        return self if self.per_layer is None else replace(self, **self.per_layer.fields(layer))

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> RopeConfig:
        rope = self.rope_local if self.rope_local is not None and self.window(layer) else self.rope
        return rope if not self.rope_layers or self.rope_layers[layer] else replace(rope, kind="none")

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]:
        """What the KV cache keeps of a token, by layer."""
        return tuple(shape_of(self.at(layer), layer) for layer in range(self.num_layers))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
