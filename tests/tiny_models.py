"""Writes tiny random checkpoints, as Hugging Face Transformers saves them, with a small real tokenizer beside them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

from tiny_experts import TINY_EXPERTS
from tiny_gemma4 import TINY_GEMMA4
from tiny_latent import TINY_LATENT

VOCAB = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.12,
}

_HYBRID = {
    "head_dim": 32, "num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}  # fmt: skip
TINY_HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            **_HYBRID, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **_HYBRID, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_HYBRID, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
}  # fmt: skip

# family -> (config class of transformers, settings that differ from _COMMON)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 13}),
    "qwen2": ("Qwen2Config", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "olmo2": ("Olmo2Config", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3Config",
        {
            "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 9, "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 5000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "smollm3": ("SmolLM3Config", {"num_attention_heads": 4, "no_rope_layers": [1, 0, 1]}),
    "exaone4": (
        "Exaone4Config", {"head_dim": 16, "num_attention_heads": 4, "sliding_window": 9, "sliding_window_pattern": 2}
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16, "num_attention_heads": 4, "attention_out_bias": True, "mlp_bias": True}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16, "num_attention_heads": 4,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0, "original_max_position_embeddings": 16,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "glm4": ("Glm4Config", {"head_dim": 32, "num_attention_heads": 4}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, "num_attention_heads": 4, "use_bias": True}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 16, "num_attention_heads": 4, "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "starcoder2": ("Starcoder2Config", {"num_attention_heads": 4, "sliding_window": 11}),
    "nemotron": ("NemotronConfig", {"num_attention_heads": 4, "partial_rotary_factor": 0.5}),
    "apertus": (
        "ApertusConfig",
        {
            "num_attention_heads": 4, "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "cohere": ("CohereConfig", {"num_attention_heads": 4, "logit_scale": 0.3}),
    "cohere2": ("Cohere2Config", {"num_attention_heads": 4, "logit_scale": 0.3, "sliding_window": 9, "sliding_window_pattern": 2}),
    "granite": (
        "GraniteConfig",
        {
            "num_attention_heads": 8, "num_key_value_heads": 2, "embedding_multiplier": 3.0, "logits_scaling": 2.5,
            "residual_multiplier": 0.4, "attention_multiplier": 0.2, "tie_word_embeddings": True,
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "num_attention_heads": 4, "num_key_value_heads": 2, "original_max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16, "num_attention_heads": 4, "query_pre_attn_scalar": 20, "sliding_window": 11,
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "num_hidden_layers": 4,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16, "num_attention_heads": 4, "query_pre_attn_scalar": 24, "sliding_window": 9,
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    **TINY_EXPERTS,
    **TINY_HYBRID,
    **TINY_LATENT,
    **TINY_GEMMA4,
}  # fmt: skip

LIKE_OTHERS = ("olmo3", "seed_oss", "glm4", "ernie4_5")  # once loaded, their switches are those of other families
RARE = (  # of which only the common decoder knows how
    "ministral3", "hunyuan_v1_dense", "starcoder2", "nemotron", "cohere", "cohere2", "apertus", *TINY_EXPERTS, *TINY_HYBRID, *TINY_LATENT,
    *TINY_GEMMA4,
)  # fmt: skip

_TEXT = (
    "The quick brown fox jumps over the lazy dog. A headrace leads the water onto the wheel of the mill. "
    "Where the water ends, the wheel stands still; how fast it turns, nobody asked. 0123456789 {}[]\":,. "
    "Grüße aus Köln, été à Paris, 日本語 and emoji 🙂🚀.\n"
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny(family: str, path: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of `family` (a key of TINY) to the directory `path`, in float32, and return the path.

    `overrides` are settings of the Transformers config. Every weight is random, the norms and biases too.
    """
    import torch
    import transformers

    path = Path(path)
    name, settings = TINY[family]
    config = getattr(transformers, name)(**{**_COMMON, **settings, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        scalars = [(key, buffer) for key, buffer in model.named_buffers() if key.endswith("layer_scalar")]
        for key, parameter in [*model.named_parameters(), *scalars]:
            noise = torch.randn(parameter.shape, generator=generator)
            if key.endswith("A_log"):
                parameter.copy_(noise - 2)  # what a token adds is there for some
            elif parameter.ndim > 1:
                parameter.copy_(noise * config.initializer_range)
            else:  # norm weights around their neutral value, biases around 0
                parameter.add_(noise * (0.3 if "norm" in key else 0.1))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # of routers
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def write_shape(directory: Path, **changes: Any) -> str:
    """A checkpoint directory for load_format "dummy": a config.json and nothing else, Qwen3-0.6B's but for the `changes`."""
    shape = json.loads((Path(__file__).parents[1] / "benchmarks" / "shapes" / "qwen3-0.6b.json").read_text())
    (directory / "config.json").write_text(json.dumps(shape | changes))
    return str(directory)


def write_eagle(path: Path, target: str, width: int = 96, guesses: int = 300) -> str:
    """A random EAGLE-3 head in the published layout, for a tiny target."""
    hidden = json.loads((Path(target) / "config.json").read_text())["hidden_size"]
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(5)
    shapes = {
        "fc": (width, 3 * hidden), "midlayer.self_attn.q_proj": (4 * 16, 2 * width), "midlayer.self_attn.k_proj": (2 * 16, 2 * width),
        "midlayer.self_attn.v_proj": (2 * 16, 2 * width), "midlayer.self_attn.o_proj": (width, 4 * 16),
        "midlayer.mlp.gate_proj": (128, width), "midlayer.mlp.up_proj": (128, width), "midlayer.mlp.down_proj": (width, 128),
        "midlayer.input_layernorm": (width,), "midlayer.hidden_norm": (width,), "midlayer.post_attention_layernorm": (width,),
        "norm": (width,), "lm_head": (guesses, width),
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    ids = torch.randperm(512)[:guesses].sort().values
    tensors |= {"d2t": ids - torch.arange(guesses), "t2d": torch.isin(torch.arange(512), ids)}
    save_file(tensors, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": width, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 512,
        "draft_vocab_size": guesses, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def write_tokenizer(path: str | Path, size: int = VOCAB) -> None:
    """A byte-level BPE of `size` tokens: tokenizer.json and tokenizer_config.json with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    state = json.loads(tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    rare = [pair for pair in product("JKQVWXZ", "bcdfghjklmnpqrstvwxz") if "".join(pair) not in vocab]
    for pair in rare[: size - len(vocab)]:  # the text gives no more; every row of a tiny model is to have a token
        vocab["".join(pair)] = len(vocab)
        merges.append(list(pair))
    Path(path).mkdir(parents=True, exist_ok=True)
    (Path(path) / "tokenizer.json").write_text(json.dumps(state))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": _CHAT_TEMPLATE,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (Path(path) / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
