"""The embedded model: real text, equal to Transformers' own, and the same tokens however it is scheduled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from engine_driver import assert_all_same, complete, make_core, run
from gguf_reference import load_llama
from headrace import LLM, SamplingParams
from headrace.engine.messages import EngineRequest
from headrace.model.embedded import embedded_model_path

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a mill by the river,"]


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", dtype="float32", max_num_seqs=8, max_model_len=512) as llm:
        yield llm


def test_text_equals_transformers(llm):
    model = load_llama(embedded_model_path())
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        want = model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)[0, ids.shape[1] :]
        assert output.outputs[0].token_ids == want.tolist()
    assert outputs[0].outputs[0].text.startswith(" Paris.")


def test_chat_answers(llm):
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_any_schedule_gives_the_same_tokens(llm):
    prompts = [llm.tokenizer.encode(p) * n for p, n in zip(PROMPTS, (1, 2, 3), strict=True)]
    requests = [
        EngineRequest(f"r{i}", ids, complete(SamplingParams(temperature=t, max_tokens=6, logprobs=0), eos_token_ids=[2]), 7)
        for i, (ids, t) in enumerate((p, t) for p in prompts for t in (0.0, 0.8))
    ]
    cores = [
        make_core(None, max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False, max_model_len=256),
        make_core(None, max_num_batched_tokens=16, block_size=16, num_kv_blocks=64, max_model_len=256),
        make_core(None, max_num_seqs=4, block_size=8, num_kv_blocks=12, max_model_len=256),
    ]
    alone, *others = (run(core, requests) for core in cores)
    for results in others:
        assert_all_same(results, alone)


def test_the_command_line_generates(tmp_path):
    """Text on stdout and nothing else there; figures on stderr; JSON on request."""
    command = [sys.executable, "-m", "headrace.cli", "generate", "--temperature", "0", "--max-tokens", "8"]
    plain = subprocess.run([*command, "--prompt", PROMPTS[0], "--show-stats"], capture_output=True, text=True, check=True)
    assert plain.stdout.startswith(" Paris.")
    stats = dict(pair.split("=") for pair in plain.stderr.strip().splitlines()[-1].split(" "))
    assert set(stats) == {
        "prompt_tokens", "generated_tokens", "elapsed_seconds", "tokens_per_second", "ttft_ms", "tpot_ms", "device", "dtype",
        "weights", "temperature", "top_p",
    }  # fmt: skip
    assert (stats["temperature"], stats["top_p"]) == ("0", "0.9")  # asked for; the model's own
    assert stats["generated_tokens"] == "8" and stats["prompt_tokens"] == "5" and stats["dtype"] == "float32"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    listed = subprocess.run([*command, "--prompt-file", prompts, "--json"], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert rows[0]["outputs"][0]["text"] == plain.stdout.removesuffix("\n")
    lost = subprocess.run([*command, "--prompt", "x", "--model", "./nowhere"], capture_output=True, text=True, check=False)
    assert lost.returncode == 1 and "nowhere does not exist" in lost.stderr and "Traceback" not in lost.stderr
