"""The native CPU step as the engine has it: which numbers, which options, every family, every bad file of a model."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader_files as files
from headrace import LLM, SamplingParams
from headrace.cache.kv_cache import KVCache
from headrace.cache.layer_shape import LayerShape
from headrace.config import EngineConfig
from headrace.engine import forwards
from headrace.engine.build import build_engine, resolve
from headrace.engine.options import check_options, refuse_native_options
from headrace.errors import CapacityError, HeadraceError, ParameterError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.embedded import embedded_model_path
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.formats.blocks import decode_rows
from headrace.model.formats.tensor_file import Encoding, TensorEntry
from headrace.native.forward import NativeDecoder
from headrace.native.load import find_library
from headrace.native.precision import Precision, choose_precision
from headrace.native.weights import Weights, rows_in_format
from headrace.worker import memory_plan
from headrace.worker.memory_plan import GIB, plan_memory
from tiny_experts import TINY_EXPERTS
from tiny_latent import TINY_LATENT
from tiny_models import RARE, TINY, VOCAB, write_tiny

_step = pytest.importorskip("headrace.native._step", reason="no compiler: the native step was not built")
CPU = torch.device("cpu")
SMALL = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 128, "num_kv_blocks": 40}


# ---------------------------------------------------------------------------------------------------- torch where it cannot


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_tiny("llama", tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(("options", "why"), [
    ({"block_size": 8}, "multiples of 16 tokens, not 8"), ({"dtype": "float16"}, "float16"),
])  # fmt: skip
def test_what_it_cannot_run_torch_does_and_one_line_says_why(tiny, caplog, options, why):
    with caplog.at_level(logging.INFO, "headrace.engine.forwards"):
        engine = build_engine(EngineConfig(model=tiny, **SMALL, **options))
    assert isinstance(engine.core.runner.decoder, Decoder)
    lines = [r.message for r in caplog.records if "native CPU step" in r.message]
    assert len(lines) == 1 and why in lines[0]
    engine.close()


def test_weights_are_quantized_without_the_native_step_in_plain_torch_only(tiny):
    for options, why in (
        ({"quantization": "int8", "block_size": 24}, "none here: .*multiples of 16"), ({"quantization": "fp8"}, "fp8 on a GPU"),
        ({"quantization": "bf16", "enforce_eager": True}, "fp8, int8, int4, none here: .*plain torch"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=f"quantization: got '{options['quantization']}', allowed: .*{why}"):
            build_engine(EngineConfig(model=tiny, **SMALL, **options))


@pytest.mark.parametrize(("field", "value"), [
    ("quantization", "bf16"), ("kv_cache_dtype", "int8"), ("kv_cache_dtype", "float32"), ("activation_dtype", "int8"),
])  # fmt: skip
def test_a_gpu_and_plain_torch_refuse_what_only_the_native_step_has(tiny, field, value):
    with pytest.raises(ParameterError, match=f"{field}: got '{value}', allowed: .*this runs on a GPU"):
        refuse_native_options(EngineConfig(**{field: value}), "this runs on a GPU")
    for options, why in (({"enforce_eager": True}, "plain torch"), ({"block_size": 24}, "multiples of 16|kept as floats")):
        with pytest.raises(ParameterError, match=f"{field}: got .*({why})"):
            build_engine(EngineConfig(model=tiny, **SMALL, **{field: value}, **options))


# ------------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize(("encodings", "options", "wanted"), [
    ({"F32"}, {}, ("stored", "FLOAT", "float32")),
    ({"BF16"}, {}, ("stored", "FLOAT", "bfloat16")),
    ({"F16"}, {}, ("stored", "FLOAT", "bfloat16")),
    ({"Q4_K", "Q6_K"}, {}, ("stored", "INT16", "bfloat16")),
    ({"Q4_K", "F16"}, {"activation_dtype": "int8"}, ("stored", "INT8", "bfloat16")),
    ({"Q4_1"}, {"dtype": "float32"}, ("F32", "FLOAT", "float32")),
    ({"Q4_1"}, {"quantization": "none"}, ("F32", "FLOAT", "float32")),
    ({"Q4_1"}, {"dtype": "bfloat16"}, ("BF16", "FLOAT", "bfloat16")),
    ({"BF16"}, {"quantization": "none"}, ("stored", "FLOAT", "bfloat16")),
    ({"BF16"}, {"quantization": "int8"}, ("Q8_0", "INT16", "bfloat16")),
    ({"F32"}, {"quantization": "int4", "activation_dtype": "int8"}, ("Q4_1", "INT8", "bfloat16")),
    ({"F32"}, {"quantization": "bf16"}, ("BF16", "FLOAT", "bfloat16")),
    ({"F32"}, {"kv_cache_dtype": "int8"}, ("stored", "FLOAT", "int8")),
])  # fmt: skip
def test_the_numbers_that_options_and_file_ask_for(encodings, options, wanted):
    precision = choose_precision(EngineConfig(**options), encodings)
    assert (precision.weights, precision.rounding, precision.cache) == wanted


def test_weights_are_not_rounded_twice_and_floats_have_no_rounded_inputs(tiny):
    for path, options, message in (
        (str(embedded_model_path()), {"quantization": "int4"}, r"quantization: got 'int4', .*already \(Q4_1, Q8_0\)"),
        (tiny, {"activation_dtype": "int8"}, "activation_dtype: got 'int8', .*floats"),
    ):
        config = EngineConfig(model=path, device="cpu", **options)
        checkpoint = resolve_checkpoint(config)
        with pytest.raises(ParameterError, match=message):
            check_options(config, checkpoint, model_config_from_hf(checkpoint.config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_cache_is_as_large_as_the_step_takes_it_to_be(dtype):
    shape = SimpleNamespace(kv_shapes=(LayerShape(3, 24, 24),) * 2)
    cache = KVCache(shape, 5, 32, dtype, CPU)
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "INT8"}[dtype]
    block = _step.block_bytes(_step.CacheFormat[name], 32, 3, 24)
    assert all(t.nbytes == 5 * block for t in cache.k + cache.v)
    assert KVCache.bytes_per_block(shape, 32, dtype) == 2 * 2 * block


@pytest.mark.parametrize(("options", "fits"), [({}, False), ({"kv_cache_dtype": "bfloat16"}, True), ({"kv_cache_dtype": "int8"}, True)])
def test_the_bytes_of_a_cache_are_counted_in_its_own_numbers(tiny, options, fits):
    """128 tokens of 3 layers, 2 heads of 16, keys and values: 48 KiB in bfloat16."""
    config = EngineConfig(model=tiny, device="cpu", max_model_len=128, kv_cache_bytes=48 << 10, **options)
    checkpoint = resolve_checkpoint(config)
    model = model_config_from_hf(checkpoint.config)
    if fits:
        check_options(config, checkpoint, model)
        return
    with pytest.raises(CapacityError, match="kv_cache_bytes = 49152 holds 64 tokens"):
        check_options(config, checkpoint, model)


# ----------------------------------------------------------------------------------------------------------- whole models


MANY = (TINY_EXPERTS.keys() | TINY_LATENT.keys()) - {"qwen2_moe", "glm4_moe", "deepseek_v3"}  # torch runs them; of these, some tell of the others


@pytest.mark.parametrize("family", [family for family in TINY if family not in MANY])
def test_every_family_says_what_transformers_says(family, tmp_path):
    import transformers

    path = write_tiny(family, tmp_path)
    rng = random.Random(6)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (3, 21, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
    with LLM(str(path), **SMALL, max_num_batched_tokens=32) as llm:
        assert isinstance(llm.engine.core.runner.decoder, Decoder if family in RARE else NativeDecoder)
        ours = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    for prompt, out in zip(prompts, ours, strict=True):
        with torch.no_grad():
            whole = theirs(torch.tensor([prompt + list(out.token_ids)]), use_cache=False).logits[0].log_softmax(-1)
        rows = whole[len(prompt) - 1 : -1]
        assert rows.argmax(-1).tolist() == list(out.token_ids)
        logprobs = [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
        assert logprobs == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)


def test_positions_before_queries_are_scaled_need_no_scaling(tmp_path):
    """Ministral 3 in the first of its periods."""
    path, ids = write_tiny("ministral3", tmp_path), [5, 9, 40, 7, 12, 300, 21, 8]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    texts = []
    for length, kind in ((16, NativeDecoder), (17, Decoder)):
        with LLM(str(path), **{**SMALL, "max_model_len": length}) as llm:
            assert isinstance(llm.engine.core.runner.decoder, kind)
            texts.append(llm.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def logits_of(path: str, **options) -> torch.Tensor:
    """Of a prompt's last row, by the native step."""
    config = EngineConfig(model=path, **SMALL, **options)
    checkpoint = resolve_checkpoint(config)
    model = model_config_from_hf(checkpoint.config)
    limits = resolve(config, model, CPU)
    forward, num_bytes, *_ = forwards.load_forward(config, checkpoint, model, limits, CPU)
    assert isinstance(forward, NativeDecoder) and num_bytes > 0
    from model_harness import Sequences

    run = Sequences.__new__(Sequences)
    run.decoder, run.max_blocks, run.lengths = forward, 4, [0]
    run.kv = KVCache(model, 5, 16, forward.cache_dtype, CPU)
    run.tables = torch.tensor([[3, 1, 0, 2]], dtype=torch.int32)
    return run.step([(0, [5, 6, 7, 11, 13, 17])])[0][-1]


@pytest.mark.parametrize(("options", "error"), [
    ({"quantization": "bf16"}, 0.02), ({"dtype": "bfloat16"}, 0.02), ({"quantization": "int8"}, 0.03),
    ({"quantization": "int8", "activation_dtype": "int8"}, 0.05), ({"quantization": "int4"}, 0.4), ({"kv_cache_dtype": "int8"}, 0.03),
    ({"quantization": "none"}, 0.0), ({"threads": 1}, 0.0),
])  # fmt: skip
def test_narrow_numbers_are_near_the_exact_ones(tiny, options, error):
    exact, narrow = logits_of(tiny), logits_of(tiny, **options)
    assert (exact - narrow).abs().max() <= error * exact.abs().max()
    if error:
        assert not torch.equal(exact, narrow)


def test_a_head_that_is_the_embedding_written_twice_is_kept_once(tmp_path):
    """And one that is not is its own."""
    tensors = files.llama_tensors()
    sizes, logits = [], []
    for output in (None, tensors["token_embd.weight"], tensors["token_embd.weight"] * 2):
        own = tensors if output is None else {**tensors, "output.weight": output}
        path = files.write_gguf(tmp_path / "m.gguf", own)
        config = EngineConfig(model=str(path), **SMALL)
        checkpoint = resolve_checkpoint(config)
        model = model_config_from_hf(checkpoint.config)
        sizes.append(Weights(checkpoint, model, choose_precision(config, {"F32"}), find_library()).num_bytes)
        logits.append(logits_of(str(path)))
    assert sizes[0] == sizes[1] < sizes[2]
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(2 * logits[0], logits[2])


@pytest.mark.parametrize("head_dim", [0, 8])
@pytest.mark.parametrize(("name", "block", "size"), [
    ("F32", 1, 4), ("BF16", 1, 2), ("Q8_0", 32, 34), ("Q4_K", 256, 144), ("Q6_K", 256, 210), ("Q5_0", 32, 22), ("IQ4_NL", 32, 18),
])  # fmt: skip
def test_rows_keep_their_values_on_the_way_into_the_matrix(name, block, size, head_dim):
    """As stored, or in another format that holds the same; rotary halves separated."""
    raw = torch.randint(0, 256, (32 * (512 // block) * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    raw[raw & 0x7C == 0x7C] &= 0x3F  # no infinities and NaNs among the half floats
    entry = TensorEntry("t", (32, 512), Encoding(name, block, size), Path("x"), 0, raw.nbytes, head_dim)
    library = find_library()
    format_ = Precision("stored", "INT16", "bfloat16").format_of(name)
    rows = rows_in_format(entry, raw, 32, format_, library)
    out = np.zeros((32, 512), np.float32)
    _step.packed_rows(str(library.path), [(_step.Format[format_], 32)], np.ascontiguousarray(rows).reshape(-1), out)
    np.testing.assert_array_equal(out.view(np.uint32), decode_rows(entry, raw, 32).float().numpy().view(np.uint32))


# --------------------------------------------------------------------------------------------------------------- bad files


def try_load(path: Path) -> None:
    """Either an error of ours, or weights."""
    config = EngineConfig(model=str(path), device="cpu", max_model_len=64, max_num_seqs=2, num_kv_blocks=8)
    checkpoint = resolve_checkpoint(config)
    model = model_config_from_hf(checkpoint.config)
    check_options(config, checkpoint, model)
    forwards.load_forward(config, checkpoint, model, resolve(config, model, CPU), CPU)


@pytest.mark.parametrize("kept", [0.3, 0.99])
def test_a_file_that_is_cut_off_while_it_is_read(tmp_path, kept):
    path = files.write_llama_gguf(tmp_path / "m.gguf")
    config = EngineConfig(model=str(path), **SMALL)
    checkpoint = resolve_checkpoint(config)
    model = model_config_from_hf(checkpoint.config)
    decoder = NativeDecoder(
        config, checkpoint, model, resolve(config, model, CPU), choose_precision(config, {"F32"}), find_library()
    )
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(HeadraceError, match=r"m.gguf: the file ends inside the tensor"):
        decoder.load()


@pytest.fixture(scope="module")
def real_header(tmp_path_factory) -> tuple[Path, bytes, int]:
    """A place for copies of the embedded model's file, its header, and where the tensors' entries begin in that."""
    source = embedded_model_path()
    with source.open("rb") as file:
        data = file.read(4 << 20)
    start = data.index(b"token_embd.weight") - 8
    stop = data.index(b"blk.29.ffn_up.weight") + 64
    return tmp_path_factory.mktemp("fuzz") / "m.gguf", data[:stop], start


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_real_header_with_lying_bytes_never_crashes(real_header, data):
    """Names, shapes, types and offsets of tensors, and the sizes among the metadata: an error of ours, or zeros are loaded."""
    path, header, start = real_header
    lie = bytearray(header)
    places = st.integers(start, len(header) - 1) | st.integers(24, 2000)
    for at, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=3)):
        lie[at] = value
    path.write_bytes(lie)
    os.truncate(path, data.draw(st.sampled_from([embedded_model_path().stat().st_size, 50 << 20])))  # the rest is a hole
    try:
        try_load(path)
    except HeadraceError as error:
        assert str(error)


# ------------------------------------------------------------------------------------------------------------------ memory


def llama_file(config: ModelConfig, path: Path) -> SimpleNamespace:
    """What the header of a Q4_K_M file of `config` says: half of the values and down projections in Q6_K."""
    blocks = {"Q4_K": Encoding("Q4_K", 256, 144), "Q6_K": Encoding("Q6_K", 256, 210), "F32": Encoding("F32", 1, 4)}
    entries = {}
    for spec in weight_plan(config):
        for name, rows in spec.sources:
            shape = (rows, *spec.shape[1:])
            wide = "lm_head" in name or (("v_proj" in name or "down_proj" in name) and int(name.split(".")[2]) % 2)
            encoding = blocks["F32" if len(shape) == 1 else "Q6_K" if wide else "Q4_K"]
            size = int(np.prod(shape)) // encoding.block_size * encoding.block_bytes
            entries[name] = TensorEntry(name, shape, encoding, path, 0, size)
    return SimpleNamespace(format="gguf", path=path, config={"model_type": config.family}, tensors=lambda: entries)


def test_a_7b_file_of_4_bits_fits_a_laptop_of_16_gib_and_a_70b_is_refused_with_numbers(tmp_path, monkeypatch):
    empty = tmp_path / "hole"
    empty.touch()
    os.truncate(empty, 1 << 40)
    base = resolve_checkpoint(EngineConfig(model=str(write_tiny("llama", tmp_path / "tiny", tie_word_embeddings=False))))
    tiny = model_config_from_hf(base.config)
    config = EngineConfig(max_model_len=4096, device="cpu")
    library = find_library()
    monkeypatch.setattr(memory_plan, "available_memory", lambda: 12 * GIB)  # of 16, beside a desktop
    for sizes, most in (((32, 4096, 32, 8, 14336), 5.5), ((80, 8192, 64, 8, 28672), 48.0)):
        layers, hidden, heads, kv_heads, inner = sizes
        model = replace(
            tiny, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=128,
            intermediate_size=inner, vocab_size=128256, max_position=8192,
        )  # fmt: skip
        monkeypatch.setattr("headrace.native.weights._same_bytes", lambda one, other: False)
        file = llama_file(model, empty)
        stored = sum(e.num_bytes for e in file.tensors().values())
        precision = choose_precision(config, {"Q4_K", "Q6_K"})
        packed = Weights(file, model, precision, library).num_bytes
        assert stored < packed <= 1.06 * stored and packed < most * GIB

        def plan(model=model, packed=packed):
            return plan_memory(
                config, resolve(config, model, CPU), model, torch.float32, CPU, cache_dtype=torch.bfloat16, weight_bytes=packed,
                workspace_bytes=GIB, activation_bytes=0, loaded=False,
            )  # fmt: skip

        if layers == 32:
            assert plan().num_blocks * 16 >= 4096
        else:
            with pytest.raises(CapacityError, match=r"the weights take 4\d\.\d\d GiB, and 12\.00 GiB of memory are free"):
                plan()


def test_a_model_that_does_not_fit_is_refused_before_a_byte_is_read(tiny, monkeypatch):
    monkeypatch.setattr(memory_plan, "available_memory", lambda: 100_000)
    monkeypatch.setattr(Weights, "load", lambda *args: pytest.fail("it was read"))
    with pytest.raises(CapacityError, match="the weights take"):
        build_engine(EngineConfig(model=tiny, device="cpu"))


def test_random_weights_of_a_dummy_are_those_of_torch(tmp_path):
    """In float32, where the native step computes exactly."""
    from tiny_models import write_shape

    shape = {
        "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "torch_dtype": "float32",
    }  # fmt: skip
    options = {"load_format": "dummy", "skip_tokenizer_init": True, **SMALL}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    texts = []
    for eager in (False, True):
        with LLM(write_shape(tmp_path, **shape), dtype="float32", enforce_eager=eager, **options) as llm:
            texts.append(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
