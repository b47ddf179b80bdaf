"""`headrace bench`: real runs of a tiny shape on the CPU, and the arithmetic of the limits that stand beside its figures."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.cli import main
from headrace.model.families import model_config_from_hf
from headrace.model.formats.quantized import quantization_of
from headrace.model.formats.scheme import Modules, Quantization, Scheme
from headrace.model.narrow import quantized
from headrace.model.weight import smallest
from headrace.worker.reading import Reading
from headrace_bench import engine, prompts, roofline
from headrace_bench.engine import Bench
from headrace_bench.roofline import (
    NARROW_BYTES,
    Limits,
    Machine,
    Parameters,
    best_and_spread,
    dtype_of_products,
    held_as,
    measure_limits,
    numbers_of,
)
from model_harness import load_tiny
from quantized_checkpoints import FORMATS
from tiny_models import write_shape, write_tiny

SMALL = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("shape")
    write_shape(directory, **SMALL)
    file = directory / "config.json"
    file.write_text("\ufeff" + file.read_text())
    return str(file)


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    """Not in /tmp: what goes at the end of a process stays where a worker of the tests ends without one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def quick(monkeypatch):
    """One round of each measurement of the machine."""
    monkeypatch.setattr(roofline, "ROUNDS", 1)
    monkeypatch.setattr(roofline, "ROUND_RUNS", 1)


def bench(*arguments: str, out=None) -> dict:
    argv = ["bench", *arguments, "--device", "cpu"] + ([] if out is None else ["--out", str(out)])
    assert main(argv) == 0
    return {} if out is None else json.loads(out.read_text())


def test_all_workloads_of_a_shape(shape, tmp_path, quick, capsys, monkeypatch):
    monkeypatch.setattr(prompts, "MIXED", (3, 30))
    monkeypatch.setattr(prompts, "FIRST_TOKENS", (20, 200))
    monkeypatch.setattr(prompts, "STEPS", 4)
    sizes = ["--batch", "1", "3", "--input-len", "9", "--output-len", "6", "--num-prompts", "2", "3", "--prefill-prompts", "2"]
    found = bench(
        "all", "--config", shape, *sizes, "--prefill-len", "40", "--temperature", "0", "0.8", "--max-num-seqs", "4",
        "--max-model-len", "2100", "--enforce-eager", out=tmp_path / "out.json",  # torch: steps that noise cannot hide
    )  # fmt: skip
    assert found["model"] == shape and found["torch"] == torch.__version__
    machine = found["machine"]
    assert machine["bandwidth"] > 1e8 and machine["flops"] > 1e8
    assert machine["bandwidth_spread"] == machine["flops_spread"] == 0.0, "of a single round"
    names = [(r["workload"], r["temperature"]) for r in found["results"]]
    each = ["offline-random", "offline-random", "batch 1", "batch 3"]
    last = ["prefill 2 x 40", "first token of 20", "first token of 200", "mixed 3 + 30"]
    assert names == [(n, t) for t in (0.0, 0.8) for n in each] + [(name, 0.0) for name in last]
    assert [r["num_prompts"] for r in found["results"] if "num_prompts" in r] == [2, 3, 2, 3]
    for r in found["results"]:
        assert r["value"] > 0 and r["limit"] > 0 and r["percent_of_limit"] > 0
        share = r["limit"] / r["value"] if r["unit"] == "ms" else r["value"] / r["limit"]
        assert math.isclose(r["percent_of_limit"], 100 * share)
    offline, latency = found["results"][0], found["results"][2]
    assert offline["unit"] == "tok/s" and offline["num_prompts"] == 2 and offline["seconds"] > 0
    assert latency["unit"] == "ms" and (latency["input_len"], latency["output_len"]) == (9, 6)
    assert latency["host_ms_per_step"] > 0 and latency["gigabytes_per_second"] > 0
    printed = capsys.readouterr().out
    assert printed.count("% of the limit") == len(names) and "batch 3" in printed


def test_no_mixed_step_is_timed_without_a_seat_for_its_prompt(shape, quick, tmp_path, monkeypatch):
    """It was: of 64 seats and 64 decodes, as 388 % of the limit."""
    monkeypatch.setattr(prompts, "MIXED", (3, 30))
    monkeypatch.setattr(prompts, "FIRST_TOKENS", (20,))
    options = ["prompts", "--config", shape, "--max-model-len", "2100", "--enforce-eager", "--max-num-seqs"]
    found = [bench(*options, seats, out=tmp_path / seats)["results"] for seats in ("3", "4")]
    assert [[r["workload"] for r in of] for of in found] == [["first token of 20"], ["first token of 20", "mixed 3 + 30"]]


def test_the_profile_names_operations(shape, quick, capsys):
    bench(
        "latency", "--config", shape, "--batch", "1", "--input-len", "4", "--output-len", "2", "--profile", "--max-num-seqs", "2",
        "--max-model-len", "700",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "-- prefill, batch 1" in printed and "-- prefill and 16 decode steps, batch 1" in printed and "aten::" in printed


def test_startup_is_that_of_a_fresh_process(shape, tmp_path, capsys):
    found = bench("startup", "--config", shape, "--max-model-len", "256", out=tmp_path / "out.json")
    (result,) = found["results"]
    assert result["workload"] == "startup" and result["unit"] == "s" and result["all"] == [result["value"]]
    assert result["value"] > 0.1 and "first token [" in capsys.readouterr().out


def test_a_start_that_fails_says_why(shape, capfd):
    assert main(["bench", "startup", "--config", shape, "--device", "cpu", "--max-model-len", "64"]) == 1
    said = capfd.readouterr().err
    assert "headrace: prompt: got '128 tokens'" in said and "exit code 1" in said and "Traceback" not in said


def test_latency_of_a_model(tmp_path, quick, capsys):
    model = str(write_tiny("llama", tmp_path / "tiny", max_position_embeddings=1024))
    sizes = ["--batch", "1", "2", "--input-len", "8", "--output-len", "64", "--temperature", "0", "--repeat", "3", "--max-num-seqs", "4",
             "--enforce-eager"]  # fmt: skip
    found = bench("latency", "--model", model, *sizes, "--dtype", "float32", "--max-model-len", "640", out=tmp_path / "out.json")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batch")]
    assert [r["workload"] for r in found["results"]] == ["batch 1", "batch 2"] == [line[:7] for line in lines]
    for r in found["results"]:
        assert r["unit"] == "ms" and r["value"] > 0 and r["percent_of_limit"] == pytest.approx(100 * r["limit"] / r["value"])
        assert (r["input_len"], r["output_len"], r["temperature"]) == (8, 64, 0)
    assert found["machine"] and found["model"] == model and found["torch"]


def test_the_directory_of_a_shape_goes_with_its_process(shape, tmp_path):
    code = "import sys; from headrace_bench.engine import shape_directory; print(shape_directory(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", code, shape], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert Path(made.stdout.strip()).parent == tmp_path and not list(tmp_path.iterdir())


def test_a_shape_that_is_no_json(tmp_path, capsys):
    (tmp_path / "x").write_text("{")
    assert main(["bench", "prefill", "--config", str(tmp_path / "x")]) == 1
    assert "--config: got" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "words"), [
    (["latency", "--output-len", "1"], "--output-len: got 1, allowed: at least 2"),
    (["all", "--batch", "4", "0"], "--batch: got [4, 0]"), (["throughput", "--repeat", "0"], "--repeat: got 0"),
    (["latency", "--config", "no/such/file"], "--config"), (["latency", "--out", "no/such/directory/x.json"], "--out: got"),
    (["all", "--temperature", "0.6", "-1"], "--temperature: got -1.0"),
])  # fmt: skip
def test_mistakes_are_named(capsys, arguments, words):
    assert main(["bench", *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "words"), [
    ("latency --input-len 300 --output-len 20 --max-model-len 256", "--max-model-len: got 256, allowed: at least 320: --input-len and --output-len"),
    ("prefill --prefill-len 300 --max-model-len 300", "--max-model-len: got 300, allowed: at least 301: --prefill-len and an output token"),
    ("throughput --max-model-len 256", "--max-model-len: got 256, allowed: at least 2048: prompts and outputs"),
    ("prompts --max-model-len 100", "--max-model-len: got 100, allowed: at least 129"),
    ("all --prefill-len 4096", "--max-model-len: got 2176, allowed: at least 4097"),  # the model's context
    ("latency --batch 2 16 --input-len 8 --output-len 4 --max-num-seqs 4", "--batch: got [2, 16], allowed: at most 4: so many requests"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_measured(tmp_path, capsys, arguments, words):
    """Warming up with 600 tokens was refused in words of a request; a batch without seats was timed in parts, beside the limit
    of the whole; and a model of 2,048 tokens was asked for 4,352 where nothing of that length was to be run."""
    config = Path(write_shape(tmp_path, **SMALL, max_position_embeddings=2176)) / "config.json"
    assert main(["bench", *arguments.split(), "--config", str(config), "--device", "cpu", "--enforce-eager"]) == 1
    said = capsys.readouterr()
    assert words in said.err and not said.out


def test_a_short_context_is_measured_in_what_fits(tmp_path, quick):
    config = Path(write_shape(tmp_path, **SMALL, max_position_embeddings=200)) / "config.json"
    found = bench("prefill", "--config", str(config), "--prefill-len", "150", "--prefill-prompts", "2", "--enforce-eager", out=tmp_path / "x")
    assert [r["workload"] for r in found["results"]] == ["prefill 2 x 150"]
    assert found["options"] == {"device": "cpu", "enforce_eager": True}, "what else tells one file from another"


def test_the_commit_is_that_of_the_source(shape, tmp_path, quick, monkeypatch):
    """It was that of the directory in which the command ran; and without git all that had been measured was lost."""
    prefill = ["prefill", "--config", shape, "--prefill-len", "20", "--prefill-prompts", "1", "--enforce-eager", "--max-model-len", "64"]
    other = {**os.environ, "GIT_AUTHOR_NAME": "x", "GIT_AUTHOR_EMAIL": "x", "GIT_COMMITTER_NAME": "x", "GIT_COMMITTER_EMAIL": "x"}
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *words], cwd=tmp_path, env=other, check=True)
    monkeypatch.chdir(tmp_path)
    wanted = subprocess.run(["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert bench(*prefill, out=tmp_path / "x")["commit"] == (wanted.stdout.strip() or None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench(*prefill, out=tmp_path / "x")["commit"] is None
    monkeypatch.undo()
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "engine.py"))  # as installed into a venv within another repository
    assert engine.commit_of_source() is None


def test_a_limit_is_the_best_round_and_rounds_that_differ_are_told():
    assert best_and_spread([2.0, 1.0, 1.6]) == (1.0, 0.5)
    assert best_and_spread([3.0]) == (3.0, 0.0)
    assert Machine("m", 1.0, 1.0, 0.03, 0.02).warnings() == []
    doubts = Machine("m", 1.0, 1.0, 0.07, 0.2).warnings()
    assert len(doubts) == 2 and "bandwidth differ by 7 %" in doubts[0] and "arithmetic differ by 20 %" in doubts[1]


def test_a_slow_measurement_does_not_become_the_limit(monkeypatch):
    """One of five rounds sees a machine that is 7 % slower: the limit is that of the others."""
    times = iter([1.07, 2.0, 1.0, 2.0, 1.02, 2.2, 1.0, 2.0, 1.0, 2.0])
    monkeypatch.setattr(roofline, "_seconds", lambda f, device: next(times))
    machine = measure_limits(torch.device("cpu"), torch.float32)
    assert machine.bandwidth == 2**29 and machine.flops == 1024**3
    assert math.isclose(machine.bandwidth_spread, 1 - 1 / 1.07) and math.isclose(machine.flops_spread, 1 - 2 / 2.2)
    assert len(machine.warnings()) == 2


def test_limits_count_bytes_and_operations(tmp_path):
    """Against the weights of a real checkpoint, and a batch that is added up step by step."""
    config, weights = load_tiny(write_tiny("llama", tmp_path))
    limits = Limits(config, torch.float32, Machine("m", 1e9, 1e12))
    matrices = [t for layer in weights.layers for t in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    dense, head = sum(t.data.numel() for t in matrices), weights.lm_head.data.numel()
    assert limits.parameters == Parameters(dense, 0, 0, 0.0)
    token = 2 * config.num_layers * config.kv_size * 4
    assert limits.decode_bytes([3, 7]) == 4 * (dense + head) + 10 * token
    assert math.isclose(limits.decode_seconds([10]), limits.decode_bytes([10]) / 1e9)
    slow = Limits(config, torch.float32, Machine("m", 1e15, 1e6))
    assert math.isclose(slow.decode_seconds([0] * 7), 2 * (dense + head) * 7 / 1e6), "then the products are what takes the time"
    assert limits.prefill_flops(8) == 2 * dense * 8 + 2 * 64 * config.q_size * config.num_layers
    assert slow.prefill_seconds(8) == slow.prefill_flops(8) / 1e6
    assert limits.prefill_seconds(8) == 4 * dense / 1e9, "few rows wait for the weights"
    step = [limits.decode_seconds([5 + 1, 9 + 1]), limits.decode_seconds([9 + 2])]
    assert math.isclose(limits.offline([5, 9], [2, 3]), limits.prompts_seconds([5, 9]) + sum(step))
    assert limits.offline([5], [1]) == limits.prefill_seconds(5)
    mixed = 2 * dense * (3 + 50) + 2 * head * 4
    assert math.isclose(slow.mixed_seconds([20, 20, 30], 50), (mixed + limits.prefill_flops(50) - 2 * dense * 50) / 1e6)
    read = 4 * (dense + head) + 70 * token
    assert math.isclose(limits.mixed_seconds([70], 1), read / 1e9), "of few rows the weights are read, and what lies before them"


def test_limits_count_what_a_window_shows(tmp_path):
    """All keys and values, and the whole triangle, were counted in layers with a window: the limit was too slow, and shares of
    it too high."""
    config = replace(load_tiny(write_tiny("llama", tmp_path))[0], windows=(4, 0, 4))
    limits = Limits(config, torch.float32, Machine("m", 1e9, 1e12))
    token = 2 * config.kv_size * 4  # of a layer
    assert limits.cache_bytes([3, 10]) == 2 * token * (3 + 4) + token * (3 + 10)
    of_rows = 2 * limits.parameters.of_row * 10
    # of ten rows the first four see what is before them, the others four tokens
    assert limits.prefill_flops(10) - of_rows == 4 * config.q_size * (2 * (10 * 4 - 4**2 / 2) + 10**2 / 2)
    assert math.isclose(limits.prefill_flops(3) - 0.3 * of_rows, 4 * config.q_size * 3 * 3**2 / 2), "within the window nothing is left out"


def test_limits_count_attention_where_a_layer_has_it(tmp_path):
    """Delta nets were counted as attention over the whole prompt."""
    config, _ = load_tiny(write_tiny("qwen3_5", tmp_path))
    limits, attention = Limits(config, torch.float32, Machine("m", 1e9, 1e12)), config.delta.layers.count(False)
    assert 0 < attention < config.num_layers
    scores = limits.prefill_flops(10) - 2 * limits.parameters.of_row * 10
    assert math.isclose(scores, attention * 2 * config.q_size * 10**2)
    assert limits.cache_bytes([10]) == attention * 10 * 2 * config.kv_size * 4


def test_limits_of_a_native_step_count_what_it_reads(tmp_path):
    """The embedded model's four bits were counted as float32, and its tokens came at 387 % of the limit."""
    config, _ = load_tiny(write_tiny("llama", tmp_path))
    reading, numbers = Reading(weights=100_000, token=48, threads=2), numbers_of(config)
    limits = Limits(config, torch.float32, Machine("m", 1e9, 1e12), reading=reading)
    assert math.isclose(limits.decode_bytes([2, 3, 5]), 100_000 + 10 * 48)
    assert limits.prefill_seconds(1) < 100_000 / 1e9, "without the head"
    for width, products in ((0.6, torch.int8), (1.07, torch.int8), (2, torch.bfloat16), (4, torch.float32)):
        assert dtype_of_products(config, torch.float32, Reading(int(width * numbers), 48, 2)) == products
    assert dtype_of_products(config, torch.float16, None) == torch.float16
    assert measure_limits(torch.device("cpu"), torch.int8).flops > 0


def test_limits_by_what_a_card_keeps_up_differ_where_it_computes(tmp_path):
    config, _ = load_tiny(write_tiny("llama", tmp_path))
    best, slow = (Limits(config, torch.bfloat16, Machine("m", 1e15, rate)) for rate in (1e12, 1e6))
    assert best.sustained() is None
    kept = Limits(config, torch.bfloat16, Machine("m", 1e15, 1e12, sustained_flops=1e6)).sustained()
    assert kept is not None and kept.decode_seconds([20] * 3) == slow.decode_seconds([20] * 3) > best.decode_seconds([20] * 3)
    assert kept.offline([5], [3]) == slow.offline([5], [3])


def test_products_with_weights_in_fp8_count_at_the_rate_of_fp8(tmp_path):
    """They counted at bfloat16's, and prompts came at 153 % of the limit."""
    config, _ = load_tiny(write_tiny("llama", tmp_path))
    machine = Machine("m", 1e15, 1e6, sustained_flops=5e5, fp8_flops=4e6)
    floats, fp8 = (Limits(config, torch.bfloat16, machine, how) for how in (None, "fp8"))
    layers, scores = 2 * floats.parameters.of_row, floats.score_flops(8)
    assert math.isclose(fp8.prefill_seconds(8), 8 * layers / 4e6 + scores / 1e6)
    assert math.isclose(floats.prefill_seconds(8), (8 * layers + scores) / 1e6)
    assert math.isclose(fp8.decode_seconds([0] * 3), 3 * layers / 4e6 + 3 * 2 * fp8.head / 1e6), "the head is no FP8"
    assert math.isclose(fp8.mixed_seconds([0] * 3, 8), 11 * layers / 4e6 + (4 * 2 * fp8.head + scores) / 1e6)
    assert floats.sustained() is not None and fp8.sustained() is None, "of the one alone a share would mean nothing"
    kept = Limits(config, torch.bfloat16, replace(machine, sustained_fp8_flops=2e6), "fp8").sustained()
    assert kept is not None and math.isclose(kept.prefill_seconds(8), 8 * layers / 2e6 + scores / 5e5)
    older = Limits(config, torch.bfloat16, replace(machine, fp8_flops=0.0), "fp8")  # a card without
    assert older.prefill_seconds(8) == floats.prefill_seconds(8)


def test_the_rate_of_fp8_is_measured_where_it_is_asked_for(quick):
    found = [measure_limits(torch.device("cpu"), torch.float32, fp8=fp8) for fp8 in (False, True)]
    assert found[0].fp8_flops == 0.0 < found[1].fp8_flops and found[1].flops > 0


def test_limits_of_experts_count_those_that_are_touched(tmp_path):
    """And the router's float32."""
    config, weights = load_tiny(write_tiny("qwen3_moe", tmp_path))
    limits = Limits(config, torch.bfloat16, Machine("m", 1e9, 1e12))
    experts = [layer.more for layer in weights.layers if layer.more]
    held = sum(layer[name].data.numel() for layer in experts for name in ("experts_gate_up", "experts_down"))
    router = sum(layer["router"].data.numel() for layer in experts)
    assert (limits.parameters.experts, limits.parameters.exact) == (held, router)
    once, all_of_them = limits.decode_bytes([0]), limits.weight_bytes(10_000)
    assert math.isclose(all_of_them - once, 2 * held * 5 / 8), "of 8 experts a row has 3"
    picks = [torch.rand(4, 8).argsort(1)[:, :3].unique().numel() / 8 for _ in range(2000)]
    assert abs(limits.parameters.touched(4) / held - statistics.mean(picks)) < 0.01
    narrow = Limits(config, torch.bfloat16, Machine("m", 1e9, 1e12), "fp8")
    layers = limits.parameters.plain - router + held
    assert math.isclose(limits.weight_bytes(10_000) - narrow.weight_bytes(10_000), layers)
    whole = Limits(config, torch.bfloat16, Machine("m", 1e9, 1e12), "fp8", own_head=True)
    assert math.isclose(narrow.weight_bytes(1) - whole.weight_bytes(1), config.vocab_size * config.hidden_size)
    assert limits.prefill_flops(1) - 2 * config.q_size * config.num_layers == 2 * (limits.parameters.plain + held * 3 / 8)


@pytest.mark.parametrize(("name", "kind"), [
    ("fp8-block", "fp8"), ("ct-fp8-dynamic", "fp8"), ("ct-int8", "int8"), ("awq", "int4"), ("gptq-8", "int8"), ("ct-pack4", "int4"), ("modelopt-nvfp4", "nvfp4"),
    ("ct-int4-bytes", "int4"), ("quark-mxfp4", "fp4"),
])  # fmt: skip
def test_the_limit_of_a_quantized_file_counts_what_it_holds(name: str, kind: str, tmp_path: Path):
    """Its head is floats. Random weights of the same config are floats, too."""
    stored = quantization_of({"quantization_config": FORMATS[name].config})
    assert (held_as(stored, dummy=False), held_as(stored, dummy=True)) == (kind, None)
    config = model_config_from_hf(json.loads((Path(write_shape(tmp_path)) / "config.json").read_text()))
    floats, narrow = (Limits(config, torch.bfloat16, Machine("m", 1e9, 1e12), how) for how in (None, kind))
    head = 2 * config.vocab_size * config.hidden_size
    assert math.isclose((narrow.weight_bytes(1) - head) * 2, (floats.weight_bytes(1) - head) * NARROW_BYTES[kind])


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_the_limit_of_weights_that_are_made_narrow_counts_what_they_take(kind: str):
    """Zero points of int4 are bytes, and counted as two."""
    weight = smallest(quantized(torch.randn(8, 8192, dtype=torch.bfloat16), kind))
    held = sum(tensor.nbytes for tensor in weight.tensors) / (8 * 8192)
    assert held - (4 / 8192 if kind != "int4" else 0) == NARROW_BYTES[kind], "of rows their scale is left out"


def test_the_limit_of_random_weights_of_gpt_oss_counts_mxfp4():
    stored = quantization_of({"model_type": "gpt_oss", "num_local_experts": 4, "quantization_config": {"quant_method": "mxfp4"}})
    assert held_as(stored, dummy=True) == held_as(stored, dummy=False) == "mxfp4"
    several = [(Modules(["a"]), Scheme("fp8")), (Modules(["b"]), Scheme("nvfp4", 4))]
    assert held_as(Quantization("modelopt", tuple(several)), dummy=False) is None


def test_limits_of_several_cards(tmp_path):
    """Each has its part of the weights and the cache, and what they add up passes their links."""
    config, _ = load_tiny(write_tiny("llama", tmp_path))
    one = Limits(config, torch.float32, Machine("m", 1e9, 1e12))
    two = Limits(config, torch.float32, Machine("m", 1e9, 1e12, cards=2, link=1e12))
    sums = 2 * config.num_layers + 1
    assert math.isclose(two.decode_seconds([2, 4, 4]), one.decode_seconds([2, 4, 4]) / 2 + sums * 3 * config.hidden_size * 4 / 1e12)
    assert math.isclose(two.prefill_seconds(8), one.prefill_seconds(8) / 2 + two.sum_seconds(8))
    many = Limits(config, torch.float32, Machine("m", 1e9, 1e12, cards=4 * config.num_kv_heads, link=1e12))
    assert many.cache_bytes([10]) == one.cache_bytes([10]) / config.num_kv_heads, "a head is nowhere split"


def test_the_core_knows_the_host_times_of_each_step(tmp_path):
    """And the figure of a run is their median."""
    with LLM(write_shape(tmp_path, **SMALL), device="cpu", load_format="dummy", skip_tokenizer_init=True) as llm:
        core, bench = llm.engine.core, SimpleNamespace(llm=llm)
        core.times.recent_host.clear()
        assert Bench.host_milliseconds(bench) == 0.0
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False), use_tqdm=False)
        found = sorted(core.times.recent_host)
        assert len(found) >= 5 and found[0] > 0
        core.times.recent_host.extend([1e-9, 100.0] * 50)
        assert math.isclose(Bench.host_milliseconds(bench), 1e3 * statistics.median([*found, *[1e-9, 100.0] * 50]))
