"""From config.json to ModelConfig and weight plan: what real checkpoints say, and what must be refused by name."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CheckpointError
from headrace.model.families import FAMILIES, model_config_from_hf, weight_plan
from headrace.model.text_part import WRAPPERS
from tiny_models import TINY

# The parts that matter of published config.json files.
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
QWEN25_YARN = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "use_sliding_window": False, "vocab_size": 151936, "tie_word_embeddings": True,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}  # fmt: skip
PHI3_128K = {
    "architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
    "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "sliding_window": 262144, "vocab_size": 32064,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "su"},
}  # fmt: skip
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "head_dim": 256, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size": 262144,
}  # fmt: skip

OF_GGUF = {"gpt_oss_apart", "deepseek_v2_by_head", "deepseek_v3_by_head"}  # tensors that only such files have


def test_llama():
    c = model_config_from_hf(LLAMA32)
    assert (c.family, c.head_dim, c.num_kv_heads, c.dtype, c.max_position) == ("llama", 64, 8, "bfloat16", 131072)
    assert c.eos_token_ids == (128001, 128008, 128009)
    assert c.rope.kind == "llama3"
    assert c.rope.param("original_max_position_embeddings") == 8192
    assert c.attn_scale == 64**-0.5


def test_mistral_window_is_everywhere():
    assert model_config_from_hf(MISTRAL).windows == (4096,) * 32
    assert model_config_from_hf({**MISTRAL, "sliding_window": None}).windows == ()


def test_qwen2_has_biases_and_no_window_unless_asked():
    c = model_config_from_hf(QWEN25_YARN)
    assert (c.qkv_bias, c.o_bias, c.windows) == (True, False, ())
    assert c.max_position == 131072
    c = model_config_from_hf({**QWEN25_YARN, "use_sliding_window": True})
    assert c.windows == (0,) * 21 + (32768,) * 3


def test_phi3_early_rope_name():
    c = model_config_from_hf(PHI3_128K)
    assert (c.rope.kind, c.rope.dim, c.max_position) == ("longrope", 96, 131072)
    assert c.rope.param("original_max_position_embeddings") == 4096


def test_gemmas():
    c = model_config_from_hf(GEMMA2)
    assert c.activation == "gelu_tanh"  # hidden_activation, not hidden_act
    assert c.windows == (4096, 0) * 13
    assert (c.attn_softcap, c.logit_softcap, c.norm_offset, c.embed_scale) == (50.0, 30.0, 1.0, 48.0)
    c = model_config_from_hf(GEMMA3_1B)
    assert c.windows == ((512,) * 5 + (0,)) * 4 + (512, 512)
    assert (c.rope_of(0).theta, c.rope_of(5).theta) == (10000, 1000000)
    assert (c.attn_softcap, c.logit_softcap, c.qk_norm, c.eos_token_ids) == (0.0, 0.0, "head", (1, 106))


def test_model_type_stands_in_for_missing_architectures():
    config = {**LLAMA32, "model_type": "llama"}
    del config["architectures"]
    assert model_config_from_hf(config) == model_config_from_hf(LLAMA32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None, "model_type": "rwkv"}, "rwkv"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": "linear", "rope_parameters": {"rope_type": "default"}}, "rope_scaling is 'linear'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"head_dim": 63}, "head_dim"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_refused_by_name(change, named):
    with pytest.raises(CheckpointError, match=named):
        model_config_from_hf({**LLAMA32, **change})


def test_gemma_bidirectional_is_refused():
    with pytest.raises(CheckpointError, match="use_qk_norm"):
        model_config_from_hf({**MISTRAL, "architectures": ["CohereForCausalLM"], "use_qk_norm": True})
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        model_config_from_hf({**GEMMA3_1B, "use_bidirectional_attention": True})


def test_wrong_layer_types_are_refused():
    with pytest.raises(CheckpointError, match="layer_types"):
        model_config_from_hf({**GEMMA2, "layer_types": ["full_attention"]})
    with pytest.raises(CheckpointError, match="chunked"):
        model_config_from_hf({**GEMMA2, "layer_types": ["chunked_attention"] * 26})


json_values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.sampled_from(["", "x", "1"]),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.sampled_from(["factor", "type"]), st.integers(), max_size=2),
)  # fmt: skip


@given(base=st.sampled_from([LLAMA32, MISTRAL, QWEN25_YARN, PHI3_128K, GEMMA2, GEMMA3_1B]), data=st.data())
def test_any_value_gives_a_config_or_our_error(base, data):
    changed = dict(base)
    for key in data.draw(st.lists(st.sampled_from(sorted(base)), min_size=1, max_size=3)):
        changed[key] = data.draw(json_values)
    try:
        config = model_config_from_hf(changed)
    except CheckpointError:
        return
    assert config.head_dim >= config.rope.dim >= 2
    hash(config)


NASTY = [
    None, True, 0, -1, 0.5, 2**70, float("nan"), float("inf"), "", "x", [], [0], ["x"], [[0]], [{}], {}, {"a": [0]}, {"type": [0]},
    {"rope_type": {}}, {"factor": "x"}, {"full_attention": [0]}, {"rope_type": "llama3", "factor": [1]},
]  # fmt: skip


@pytest.mark.parametrize("base", [LLAMA32, MISTRAL, QWEN25_YARN, PHI3_128K, GEMMA2, GEMMA3_1B])
def test_nasty_values_one_by_one(base):
    """The values that a fuzzer finds now and then, for each field of the files and those that may be added."""
    for key in [*base, "model_type", "rope_parameters", "layer_types", "dtype", "text_config", "quantization_config"]:
        for value in NASTY:
            for changed in ({**base, key: value}, {**base, "architectures": [], key: value}):
                with contextlib.suppress(CheckpointError):
                    hash(model_config_from_hf(changed))


def test_weight_plan_covers_each_tensor_once():
    for base in (LLAMA32, QWEN25_YARN, PHI3_128K, GEMMA2, GEMMA3_1B):
        config = model_config_from_hf(base)
        plan = weight_plan(config)
        sources = [name for spec in plan for name, _ in spec.sources]
        assert len(set(sources)) == len(sources)
        assert len({spec.target for spec in plan}) == len(plan)
        for spec in plan:
            assert sum(rows for _, rows in spec.sources) == spec.shape[0]
        assert [spec.target for spec in plan if spec.optional] == ["lm_head"]
    fused = {spec.target: spec for spec in weight_plan(model_config_from_hf(PHI3_128K))}["layers.31.qkv"]
    assert fused.sources == (("model.layers.31.self_attn.qkv_proj.weight", 3 * 3072),)


def test_the_page_of_models_names_every_architecture():
    table = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    named = [name for line in table.splitlines() if line.startswith("| ") for name in re.findall(r"`(\w+?)`", line.split("|")[2])]
    known = {name for family in FAMILIES.values() for name in family.architectures if " of GGUF" not in name} | set(WRAPPERS)
    assert sorted(named) == sorted({*known, "architectures"})  # of the heading


def test_every_family_has_a_tiny_model():
    assert {f.removesuffix("_text") for f in FAMILIES} - OF_GGUF == set(TINY)
    assert all(dataclasses.is_dataclass(f) for f in FAMILIES.values())


@pytest.mark.parametrize("new", [None, {"rope_type": "default", "rope_theta": 777.0}, {"rope_type": "linear", "factor": 4.0}])
@pytest.mark.parametrize("old", [None, {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "type": "dynamic", "factor": 3.0}])
@pytest.mark.parametrize("theta", [None, 999.0])
def test_both_spellings_of_rope_mean_what_transformers_takes_them_for(new, old, theta):
    import transformers

    given = {"rope_parameters": new, "rope_scaling": old, "rope_theta": theta}
    given = {name: value for name, value in given.items() if value is not None}
    base = {name: value for name, value in LLAMA32.items() if not name.startswith("rope")}
    rope = model_config_from_hf({**base, **copy.deepcopy(given)}).rope
    theirs = transformers.LlamaConfig(**{**base, **copy.deepcopy(given)}).rope_parameters
    assert (rope.kind, rope.theta, rope.param("factor")) == (theirs["rope_type"], theirs["rope_theta"], theirs.get("factor"))


PAIRS: dict[str, dict[str, list[Any]]] = {  # fields that speak of one thing; ... : the field is not there
    "windows": {
        "sliding_window": [..., None, 13], "use_sliding_window": [..., True, False], "max_window_layers": [..., 2],
        "layer_types": [..., None, ["full_attention", "sliding_attention"] * 2],
    },
    "heads": {"head_dim": [..., None, 24], "num_key_value_heads": [..., None, 16]},
    "dtype": {"dtype": [..., None, "bfloat16", "float16"], "torch_dtype": [..., None, "float16", "bfloat16"]},
    "theta": {
        "rope_theta": [..., 777.0], "rope_parameters": [..., None, {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 999.0}],
    },
}  # fmt: skip
WINDOWED = ("gpt_oss", "qwen2_moe", "exaone_moe", "qwen3_moe", "mixtral", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo3", "smollm3", "exaone4", "ministral3", "starcoder2", "cohere2", "gemma4_text", "gemma4_unified_text")  # of the others Transformers keeps what it does not use


def meaning(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """What Transformers reads in a config, in our words."""
    import transformers

    theirs = transformers.AutoConfig.for_model(kind, **copy.deepcopy({k: v for k, v in config.items() if k != "model_type"}))
    window, layers = getattr(theirs, "sliding_window", None) or 0, theirs.num_hidden_layers
    # these look at the window alone
    types = None if kind in ("mistral", "mixtral", "phi3", "ministral3", "starcoder2", "qwen3_moe") else getattr(theirs, "layer_types", None)
    windows = (window,) * layers if types is None else tuple(window * (t == "sliding_attention") for t in types)
    rope = theirs.rope_parameters
    theirs.allow_global_per_layer_attribute_access = True
    return {
        "windows": windows if any(windows) and kind in WINDOWED else (),
        "head_dim": 512 if kind.startswith("gemma4") else getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        "num_kv_heads": theirs.num_key_value_heads or theirs.num_attention_heads,
        "dtype": str(theirs.dtype or "float32").removeprefix("torch."),
        "theta": rope.get("full_attention", rope)["rope_theta"],
        "kv_shapes": tuple(bool(types is None or t != "linear_attention") for t in types or [""] * layers),
    }


@pytest.mark.parametrize("group", PAIRS)
@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - OF_GGUF))
def test_fields_that_speak_of_one_thing_mean_what_transformers_takes_them_for(kind, group):
    base = {
        "model_type": kind, "vocab_size": 512, "hidden_size": 512, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    compared = 0
    for values in itertools.product(*PAIRS[group].values()):
        given = dict(zip(PAIRS[group], values, strict=True))
        config = {k: v for k, v in (base | given).items() if v is not ...}
        if kind.startswith("qwen3_") and config.get("layer_types"):
            config["layer_types"] = ["full_attention", "linear_attention"] * 2
        try:
            theirs = meaning(kind, config)
        except Exception:  # some classes take no null, where ours take it for absent
            continue
        if kind in ("gemma3_text", "gemma4_text", "gemma4_unified_text", "olmo3") and config.get("rope_parameters"):  # have two: Transformers drops what is neither
            with pytest.raises(CheckpointError, match="full_attention and sliding_attention"):
                model_config_from_hf(config)
            continue
        ours = model_config_from_hf(config)
        seen = {name: getattr(ours, name) for name in theirs if name != "theta"} | {"theta": ours.rope.theta}
        seen["kv_shapes"] = tuple(bool(of.heads) for of in ours.kv_shapes)
        if ours.latent is not None:  # heads are what is cached
            assert (ours.head_dim, ours.num_kv_heads) == (ours.latent.row, 1)
            theirs |= {"head_dim": ours.head_dim, "num_kv_heads": 1}
        assert seen == theirs, given
        compared += 1
    assert compared > 1
