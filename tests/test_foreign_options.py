"""Headrace in vLLM's place: its command lines, files, variables and calls of LLM(...) start, and nothing is left out in silence.

The command lines have the options, and their forms, of some found in public READMEs, model cards, manifests and scripts.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.cli import _server_options, make_parser
from headrace.cli.options import engine_options, server_options
from headrace.cli.sources import size
from headrace.config import EngineConfig
from headrace.errors import HeadraceError, ParameterError
from headrace.foreign_options import AS_HERE, LEFT_OUT, NEUTRAL, PARTS, REFUSED, SAME, SAME_AS, SWITCHES, instead_of, of_python
from headrace.llm import LLM
from headrace.sampling.params import NEUTRAL as NEUTRAL_PARAMS
from headrace.sampling.params import SamplingParams
from server_driver import ServerProcess

NGRAM = """'{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}'"""
EAGLE = """'{"method":"eagle3","model":"org/head","num_speculative_tokens":3,"draft_tensor_parallel_size":1}'"""
EVENTS = """'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5600","topic":"kv"}'"""
KEPT = {"kv_cache_dtype": "fp8", "served_model_names": ["q3"], "tensor_parallel_size": 4}
# line, what it sets, what is named
SERVED: list[tuple[str, dict[str, Any], str]] = [
    ("/m --pipeline-parallel-size 1 --distributed-executor-backend ray --disable-custom-all-reduce --disable-log-stats --block-size 16 --max-seq-len-to-capture 4096 --enforce-eager --trust-remote-code",
     {"block_size": 16, "enforce_eager": True, "stats_interval": 0.0}, "--distributed-executor-backend --disable-custom-all-reduce --max-seq-len-to-capture --trust-remote-code"),
    ("--model /model --served-model-name llm -tp 4 --disable-log-requests --disable-frontend-multiprocessing --enable-chunked-prefill --enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser qwen3 --enable-prefix-caching",
     {"model": "/model", "tensor_parallel_size": 4, "tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}, "--disable-log-requests --disable-frontend-multiprocessing --enable-chunked-prefill --enable-auto-tool-choice"),
    ("./q --api-key token --limit-mm-per-prompt image=12 --quantization gptq --gpu_memory_utilization 0.85 --max_model_len=32768 --max-seq-len-to-capture=32768",
     {"quantization": "gptq", "max_model_len": 32768, "gpu_memory_utilization": 0.85, "api_key": ["token"]}, "--limit-mm-per-prompt --max-seq-len-to-capture"),
    ("m --tokenizer-mode mistral --config-format mistral --load-format mistral --swap-space 16 --cpu-offload-gb 96 --limit-mm-per-prompt.image 4",
     {"load_format": "auto"}, "--tokenizer-mode --config-format --swap-space --cpu-offload-gb --limit-mm-per-prompt"),
    ("--model m --dtype half --max-num-seq 256 --image-token-id -1 --image-input-type pixel_values --disable-log-request --swap-space 4", {"dtype": "float16", "max_num_seqs": 256}, "--image-token-id --image-input-type --disable-log-requests --swap-space"),
    ("m --load-format auto --uvicorn-log-level warning --prefix-caching-hash-algo sha256 --reasoning-parser deepseek_r1", {"reasoning_parser": "deepseek_r1"}, "--uvicorn-log-level --prefix-caching-hash-algo"),
    ("m --served-model-name a b --host 0.0.0.0", {"served_model_names": ["a", "b"], "host": "0.0.0.0"}, ""),
    ("--host 0.0.0.0 --model m --served-model-name a b --api-key k l --port 1", {"served_model_names": ["a", "b"], "api_key": ["k", "l"], "model": "m", "port": 1}, ""),
    ("--served-model-name a m", {"served_model_names": ["a"], "model_tag": "m"}, ""),
    ("m --enable-chunked-prefill true --kv-cache-dtype fp8 --max-num-batched-tokens 8k", {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 8000}, "--enable-chunked-prefill"),
    ("m --data-parallel-size 8 --enable-expert-parallel --all2all-backend deepep_low_latency --enable-eplb --eplb-config '{\"window_size\":1000}'", {"data_parallel_size": 8}, "--enable-expert-parallel --all2all-backend --enable-eplb --eplb-config"),
    ("m --enable-lora --lora-modules a=x/v1 b=x/v2 --max-loras 2 --max-lora-rank 64 --max-cpu-loras 4", {"lora": ["a=x/v1", "b=x/v2"], "max_loras": 2, "max_lora_rank": 64}, "--enable-lora --max-cpu-loras"),
    ("m --lora-modules '{\"name\":\"sql\",\"path\":\"/x\",\"base_model_name\":\"m\"}'", {"lora": ["sql=/x"]}, ""),
    ("m --kv-cache-memory-bytes 17179869184 --no-enable-prefix-caching --reasoning-parser openai_gptoss --tool-call-parser openai", {"kv_cache_bytes": 17179869184, "enable_prefix_caching": False, "tool_parser": "openai"}, ""),
    (f"m --enforce-eager --speculative-config {NGRAM}", {"speculative_method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}, ""),
    ("m --speculative-config.method ngram --speculative-config.num_speculative_tokens 4 --speculative-config.prompt_lookup_max=2", {"speculative_method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 2}, ""),
    (f"m --speculative-config {EAGLE}", {"speculative_method": "eagle3", "speculative_model": "org/head", "num_speculative_tokens": 3}, "--speculative-config.draft_tensor_parallel_size"),
    ("m --speculative-config '{\"model\":\"org/small\",\"num_speculative_tokens\":3}'", {"speculative_method": "draft_model", "speculative_model": "org/small"}, ""),
    ("m --language-model-only --speculative-config '{\"method\":\"qwen3_next_mtp\",\"num_speculative_tokens\":1}'", {"model_tag": "m"}, "--language-model-only --speculative-config"),
    ("m --enable-prompt-tokens-details --max_num_seqs 32 --tool-call-parser qwen3_xml", {"max_num_seqs": 32}, "--enable-prompt-tokens-details"),
    ("m --disable-custom-all-reduce --compilation-config '{\"cudagraph_capture_sizes\":[1,2]}' --block-size 256", {"block_size": 256}, "--disable-custom-all-reduce --compilation-config"),
    ("m --enforce_eager --enable-reasoning --reasoning-parser deepseek_r1 --enable_prefix_caching --seed 41", {"enforce_eager": True}, "--enable-reasoning --seed"),
    ("/w --served-model-name=q3 --kv-cache-dtype fp8_e4m3 --allow-credentials --tensor-parallel-size=4", KEPT, "--allow-credentials"),
    ("m --load-format fastsafetensors --generation-config vllm --limit-mm-per-prompt '{\"image\":0}'", {"load_format": "safetensors", "override_generation_config": NEUTRAL}, "--limit-mm-per-prompt"),
    ("m --generation-config auto --override-generation-config '{\"temperature\":0.5}'", {"override_generation_config": '{"temperature":0.5}'}, ""),
    ("--model m --no-enable-log-requests --disable-log-stats --disable-uvicorn-access-log --disable-fastapi-docs", {"stats_interval": 0.0}, "--no-enable-log-requests --disable-uvicorn-access-log --disable-fastapi-docs"),
    ("m --async-scheduling --enable-log-requests --no-enforce-eager", {"async_scheduling": True, "enforce_eager": False}, "--enable-log-requests"),
    ("--uvicorn-log-level=info m --revision r", {"model_tag": "m", "revision": "r"}, "--uvicorn-log-level"),
    ("m --allowed-origins '[\"https://a\", \"https://b\"]' --allowed-methods '[\"GET\"]' --allowed-headers '[\"*\"]' --disable-access-log-for-endpoints /health", {"cors_origins": ["https://a", "https://b"]}, "--allowed-methods --allowed-headers --disable-access-log-for-endpoints"),
    ("m --enable-sleep-mode --max-logprobs 20 --root-path /llm", {"model_tag": "m"}, "--enable-sleep-mode --root-path"),
    ("m --allowed-local-media-path / --mm-encoder-tp-mode data --mm-processor-cache-gb 0 --mamba-cache-mode align", {"model_tag": "m"}, "--allowed-local-media-path --mm-encoder-tp-mode --mm-processor-cache-gb --mamba-cache-mode"),
    ("m --structured-outputs-config.backend xgrammar", {"model_tag": "m"}, "--structured-outputs-config"),
    ("m --guided-decoding-backend lm-format-enforcer --quantization AWQ_Marlin", {"quantization": "awq_marlin"}, "--guided-decoding-backend"),
    ("m -O3", {"model_tag": "m"}, "-O3"), ("m -O.mode=3 -cc.cudagraph_mode=NONE", {"model_tag": "m"}, "-O -cc"), ("m -O 3", {"model_tag": "m"}, "-O"),
    ("m --task embed --runner pooling --convert embed", {"model_tag": "m"}, "--task --runner --convert"),
    ("m --api-server-count 4 --data-parallel-backend mp --no-enable-chunked-prefill", {"api_processes": 4}, "--no-enable-chunked-prefill"),
    (f"m --kv-events-config {EVENTS}", {"kv_events": "tcp://*:5600", "kv_events_topic": "kv"}, ""), ("m --kv-events-config '{\"enable_kv_cache_events\":false}'", {"kv_events": None}, ""),
    ("m --max-model-len auto -q awq -dp 2", {"max_model_len": None, "quantization": "awq", "data_parallel_size": 2}, ""), ("m --max-model-len -1", {"max_model_len": None}, ""),
    ("m --max-model-len 32K --shutdown-timeout 5 --kv-cache-bytes 2G", {"max_model_len": 32768, "drain_timeout": 5.0, "kv_cache_bytes": 2 << 30}, ""),
    ("m --trust_remote_code --no-trust-remote-code --chat-template-content-format string", {"model_tag": "m"}, "--trust-remote-code --no-trust-remote-code --chat-template-content-format"),
]  # fmt: skip
REFUSALS = [
    ("m --kv-cache-dtype fp8_e5m2", "(here: fp8)"), ("m --kv-transfer-config '{\"kv_role\":\"kv_both\"}'", "each server has its own cache"),
    ("m --data-parallel-size-local 1 --data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13389", "--ray multiply it"),
    ("m --pipeline-parallel-size 2", "--tensor-parallel-size splits a model"), ("m --nnodes 2 --node-rank 0 --headless", "--tensor-parallel-size splits a model"),
    ("m --logits_processors a:B", "logit_bias"), ("m --hf-overrides '{}'", "change a copy"), ("m --rope-scaling '{\"rope_type\":\"yarn\"}'", "change a copy"),
    ("m --return-tokens-as-token-ids", "return_tokens_as_token_ids of a request"), ("m --download-dir /d", "HF_HUB_CACHE=DIR"),
    ("m --max-logprobs 100", "up to 20"), ("m --generation-config /dir", "--override-generation-config"), ("m --ssl-cert-reqs 2", "a proxy's in front"),
    ("m --generation-config vllm --override-generation-config '{\"top_k\":5}'", "--override-generation-config"),
    ("m --speculative-config no-json", "--speculative-method"), ("m --default-chat-template-kwargs '{\"enable_thinking\":false}'", "chat_template_kwargs"),
    ("m --middleware a.b --middleware c.d", "no code but its own"), ("m --attention-backend FLASHINFER", "(here: auto)"), ("m --logprobs-mode processed_logits", "before temperature"),
    ("m --omni", "unknown: --omni"), ("m --tool-call-parser", "expected one argument"), ("m --swap-space 4 x", "unknown: x"),
]  # fmt: skip


def parsed(line: str) -> argparse.Namespace:
    return make_parser().parse_args(["serve", *shlex.split(line)])


def named(args: argparse.Namespace) -> set[str]:
    """The options that a remark names."""
    told = "".join(r for r in args.remarks if r.startswith("options of vLLM"))
    return set(re.findall(r"(?<![\w(])--?[A-Za-z][\w.-]*", re.sub(r"\([^()]*\)", "", told)))


@pytest.mark.parametrize(("line", "expected", "left_out"), SERVED, ids=[line[:40] for line, _, _ in SERVED])
def test_a_command_line_of_vllms_starts_and_what_is_left_out_is_named(line: str, expected: dict[str, Any], left_out: str):
    args = parsed(line)
    assert {name: getattr(args, name) for name in expected} == expected
    assert named(args) == set(left_out.split()) and len(args.remarks) == bool(left_out)
    EngineConfig(**engine_options(args))
    from headrace.api.config import ServerConfig

    ServerConfig(**server_options(args))


@pytest.mark.parametrize(("line", "said"), REFUSALS)
def test_what_would_change_answers_is_refused_with_what_there_is(line: str, said: str, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(line)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_commands_without_an_engine_have_none_of_them(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["list", "--trust-remote-code"])
    assert "unknown: --trust-remote-code" in capsys.readouterr().err


def test_what_advice_and_meanings_name_is_there():
    options = _server_options()._option_string_actions
    known = {flag[2:] for flag in options if flag.startswith("--")}
    targets = {*SAME.values(), *(ours for ours, _ in SAME_AS.values()), *(ours for parts in PARTS.values() for ours in parts.values())}
    assert targets <= known
    theirs = {*SAME, *PARTS, *LEFT_OUT, *REFUSED, *(name for name, _ in SAME_AS)} - {"served-model-name", "override-generation-config"}  # of Python alone
    assert not theirs & known and not {f"-{name}" for name in theirs} & options.keys()
    assert [name for name in REFUSED if name not in SWITCHES and not instead_of(f"--{name}", known)] == []
    for words in (*LEFT_OUT.values(), *REFUSED.values()):
        assert set(re.findall(r"--([a-z][\w-]*)", words)) <= known, words
    assert set(AS_HERE) <= {*REFUSED, *LEFT_OUT} and not {*LEFT_OUT} & {*REFUSED} and json.loads(NEUTRAL) == NEUTRAL_PARAMS


@pytest.mark.parametrize(("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5K", 1536), ("2M", 2 << 20), ("3g", 3 * 10**9), ("auto", None), ("-1", None)])
def test_sizes_may_be_written_as_for_vllm(text: str, value: int | None):
    assert size(text) == value


@pytest.mark.parametrize("text", ["k", "4 k", "4kk", "1e3", "-4k", "0x10", ""])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ValueError, match="invalid literal"):
        size(text)


def test_a_file_of_vllms_options_starts(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: m\ntrust-remote-code: true\ndisable-log-requests: true\nenable_expert_parallel: false\ntool-call-parser: hermes\n"
        "max-model-len: 32K\nlora-modules: [a=x, b=y]\nuvicorn-log-level: info\ndtype: half\n"
        "speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n"
    )
    args = parsed(f"--config {file}")
    found = args.model, args.tool_parser, args.max_model_len, args.lora, args.dtype, args.speculative_method, args.num_speculative_tokens
    assert found == ("m", "hermes", 32768, ["a=x", "b=y"], "float16", "ngram", 3)
    assert {"trust-remote-code", "disable-log-requests", "uvicorn-log-level"} == set(re.findall(r"[a-z]+(?:-[a-z]+)+(?=[, ])", re.sub(r"\([^()]*\)", "", args.remarks[0])))
    file.write_text("pipeline-parallel-size: 2\n")
    with pytest.raises(HeadraceError, match=r"pipeline-parallel-size: no such option.*--tensor-parallel-size splits"):
        parsed(f"--config {file}")


@pytest.mark.parametrize(("text", "told"), [
    ("generation-config: vllm\noverride-generation-config: '{}'\n", "override-generation-config: generation-config says so already"),
    ("override-generation-config: '{}'\ngeneration-config: vllm\n", "generation-config: override-generation-config says so already"),
    ("tp: 2\ntensor-parallel-size: 4\n", "tensor-parallel-size: tp says so already"),
    ("tp: []\n", r"tp: got \[\], allowed: an integer"),
])  # fmt: skip
def test_what_a_file_says_twice_or_not_at_all_is_refused(tmp_path: Path, text: str, told: str):
    """Nothing of it is passed over in silence, whichever comes first."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(HeadraceError, match=told):
        parsed(f"--config {file}")


def test_variables_of_vllms_are_named(monkeypatch):
    for name, value in (("VLLM_USE_V1", "1"), ("VLLM_LOGGING_LEVEL", "DEBUG"), ("VLLM_API_KEY", "secret"), ("VLLM_SERVICE_HOST", "10.0.0.1"), ("VLLM_PORT", "tcp://10.0.0.1:80")):
        monkeypatch.setenv(name, value)
    assert parsed("m").remarks == ["variables of vLLM are not read here: VLLM_LOGGING_LEVEL (here: --log-level), VLLM_USE_V1"]
    assert make_parser().parse_args(["list"]).remarks == []


def test_keywords_of_vllms_llm_are_taken_named_or_refused():
    fields, left_out = of_python({
        "dtype": "half", "swap_space": 4, "trust_remote_code": True, "tensor_parallel_size": 2, "rope_scaling": None, "hf_overrides": {},
        "pipeline_parallel_size": 1, "enable_prefix_caching": None, "seed": 0, "disable_log_stats": True, "task": "embed", "kv_cache_memory_bytes": 2**30,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, "enable_lora": False, "compilation_config": 3,
        "served_model_name": "x", "limit_mm_per_prompt": {"image": 1},
    }, EngineConfig.__dataclass_fields__)  # fmt: skip
    assert fields == {
        "dtype": "half", "tensor_parallel_size": 2, "seed": 0, "kv_cache_bytes": 2**30, "speculative_method": "ngram",
        "num_speculative_tokens": 5, "prompt_lookup_min": 4, "prompt_lookup_max": 4,
    }  # fmt: skip
    assert set(left_out) == {"swap_space", "trust_remote_code", "disable_log_stats", "task", "compilation_config", "served_model_name", "limit_mm_per_prompt"}
    for name, value, said in (
        ("pipeline_parallel_size", 2, "tensor_parallel_size splits a model"), ("hf_overrides", {"a": 1}, "change a copy"), ("download_dir", "/d", "HF_HUB_CACHE"),
        ("generation_config", "vllm", "repetition_penalty of a request"), ("override_generation_config", {"top_k": 1}, "SamplingParams of a call"), ("max_model_length", 5, r"did you mean max_model_len\?"), ("tool_call_parser", "hermes", "no such option"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=said) as error:
            of_python({name: value}, EngineConfig.__dataclass_fields__)
        assert error.value.field == name


def test_an_llm_as_vllms_examples_make_it(model, caplog):
    caplog.set_level(logging.WARNING, "headrace.llm")
    with LLM(model, trust_remote_code=True, dtype="float", max_seq_len_to_capture=64, swap_space=1, seed=0, device="cpu") as llm:
        assert llm.config.dtype == "float32"
        [output] = llm.generate(["a"], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2
    told = [m for m in caplog.messages if m.startswith("options of vLLM that change nothing here: ")]
    assert len(told) == 1 and all(name in told[0] for name in ("trust_remote_code", "max_seq_len_to_capture", "swap_space"))


def test_a_server_starts_with_vllms_command_line_and_says_once_what_it_leaves_out(model):
    flags = shlex.split(
        "--served-model-name first second --api-key one two --disable-log-requests --enable-chunked-prefill --swap-space 4 "
        "--enable-auto-tool-choice --tool-call-parser hermes --max-model-len 0.25K --uvicorn-log-level warning --trust-remote-code"
    )
    with ServerProcess(model, *flags) as server:
        server.http.headers["Authorization"] = "Bearer one"
        server.wait_ready()
        for name, key in (("first", "one"), ("second", "two")):
            body = {"model": name, "prompt": "a", "max_tokens": 2}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120)
            assert answer.status_code == 200, answer.text
        assert server.terminate() == 0
        log = server.log()
    assert log.count("options of vLLM that change nothing here:") == 1 and log.count("--swap-space (weights are where the model runs)") == 1
