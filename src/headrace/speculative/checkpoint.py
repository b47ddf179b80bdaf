"""The checkpoint that guesses: found and read without its weights, and without torch."""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.errors import ParameterError
from headrace.model.checkpoint import Checkpoint, another, resolve_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.families import model_config_from_hf

PADDING = 1024  # ids by which vocabularies of one tokenizer may differ: models pad them to round numbers


def draft_checkpoint(config: EngineConfig, target: ModelConfig) -> tuple[Checkpoint, ModelConfig]:
    """The draft model or head that the options name, with its configuration. Raises ParameterError for another vocabulary."""
    found = resolve_checkpoint(another(config, str(config.speculative_model)))
    if config.speculative_method == "eagle3":
        if found.quantized_to():
            raise ParameterError("speculative_model", config.speculative_model, "a head of floats: this one is quantized")
        # the head's layer is Llama's, whatever it is called
        like_llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
        return found, model_config_from_hf(found.config | like_llama)
    model = model_config_from_hf(found.config)
    if abs(model.vocab_size - target.vocab_size) > PADDING:
        allowed = f"a model with the vocabulary of the target ({target.vocab_size} tokens, not {model.vocab_size})"
        raise ParameterError("speculative_model", config.speculative_model, allowed)
    if model.delta is not None:
        raise ParameterError("speculative_model", config.speculative_model, "a model whose layers all have keys and values")
    return found, model
