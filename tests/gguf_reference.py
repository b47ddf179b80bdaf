"""SmolLM2's GGUF as a Transformers model, read by the gguf package alone: a witness that shares no code with our loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import LlamaConfig, LlamaForCausalLM

PARTS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}  # fmt: skip


def rewritten(source: str | Path, target: Path, integers: dict[str, int]) -> Path:
    """A copy of a GGUF file with other values for some uint32 entries of its metadata."""
    data = bytearray(Path(source).read_bytes())
    for key, value in integers.items():
        at = data.index(len(key).to_bytes(8, "little") + key.encode()) + 8 + len(key)
        assert int.from_bytes(data[at : at + 4], "little") == 4  # the type uint32
        data[at + 4 : at + 8] = value.to_bytes(4, "little")
    target.write_bytes(data)
    return target


def load_llama(path: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A llama GGUF with tied embeddings as LlamaForCausalLM on the CPU."""
    reader = GGUFReader(path)

    def value(name: str):
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=value("vocab_size"), hidden_size=value("embedding_length"), intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"), num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=value("context_length"), rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")}, tie_word_embeddings=True,
    )  # fmt: skip
    state = {}
    for tensor in reader.tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        *layer, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):  # pairs of a rotation lie side by side in the file, half a head apart in Transformers
            count = heads if part == "attn_q" else kv_heads
            weight = weight.reshape(count, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        name = PARTS[part] if not layer else f"model.layers.{layer[1]}.{PARTS[part]}"
        state[f"{name}.weight"] = torch.from_numpy(weight)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    return model.to(dtype).eval()
