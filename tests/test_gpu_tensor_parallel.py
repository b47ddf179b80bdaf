"""Ranks on two cards: their sums, an engine's tokens against one card's, and the death of a rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.errors import EngineDeadError
from tiny_models import write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards"),
]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
OPTIONS = {
    "max_model_len": 256, "max_num_seqs": 8, "gpu_memory_utilization": 0.2, "skip_tokenizer_init": True,
}  # fmt: skip


# ---------------------------------------------------------------- sums


def check_sums(rank: int, store: str) -> None:
    import torch.distributed as dist

    from headrace.kernels.all_reduce import all_reduce, ordered_sum
    from headrace.model.shard import Shard
    from headrace.tensor_parallel.cards import CardGroup

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = CardGroup(Shard(rank, 2), device, dist.FileStore(store, 2))
    group.prepare(64, 4096, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(rank)

    def draw(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        part = torch.randn(rows, width, generator=generator, device=device).to(dtype)
        part[:, ::7] = -0.0
        return part

    for rows, width in [(1, 4096), (64, 4096), (3, 576), (1, 8), (300, 4096), (2, 20000)]:  # the last two: by NCCL
        for dtype in (torch.bfloat16, torch.float32):
            for _ in range(3):
                part = draw(rows, width, dtype)
                want = ordered_sum(group.gather(part))
                assert torch.equal(group.sum(part), want), (rows, width, dtype)
    space = group.push_space(64, 4096, torch.bfloat16)
    assert space is not None
    part, stream = draw(5, 4096), torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        all_reduce(part, space)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        out = part
        for count in range(7):  # of other heights in between: an odd number, so that the next replay begins with other places
            out = all_reduce(part, space)
            all_reduce(part[: 1 + count % 3], space)
        graph.capture_end()
    for _ in range(50):
        part.copy_(draw(5, 4096))
        torch.cuda.synchronize()
        want = ordered_sum(group.gather(part))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
    shared = torch.full((3,), float(rank), device=device)
    group.share(shared)
    assert shared.tolist() == [0.0] * 3


def be_a_rank(rank: int, store: str) -> None:
    try:
        check_sums(rank, store)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_sums_of_two_cards_are_ordered_sums(tmp_path: Path) -> None:
    """Bit for bit, by whatever way they go, in replays of one graph too."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=be_a_rank, args=(rank, str(tmp_path / "store"))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0, 0]


# ---------------------------------------------------------------- engines

KINDS = [
    {"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "top_k": 9, "seed": 4},
    {"temperature": 1.0, "top_p": 0.8, "seed": 5}, {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.2},
]  # fmt: skip
PROMPTS = [[(7 * i + j) % 200 for j in range(3 + 9 * i)] for i in range(6)]


def tokens(model: str, size: int, **options) -> list[list[int]]:
    found = []
    with LLM(model, tensor_parallel_size=size, dtype="float32", **OPTIONS, **options) as llm:
        for kind in KINDS:
            params = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, **kind)
            for some in (PROMPTS[:1], PROMPTS):
                outputs = llm.generate([{"prompt_token_ids": p} for p in some], params, use_tqdm=False)
                found += [list(output.outputs[0].token_ids) for output in outputs]
    return found


@pytest.mark.parametrize("family, options", [("qwen3", HEADS), ("olmo2", {})])
def test_two_cards_give_one_cards_tokens(family: str, options: dict, tmp_path: Path) -> None:
    """Captured steps of the fused path and of the general one, steps that are not captured, every kind of sampling."""
    model = str(write_tiny(family, tmp_path / "model", **options))
    want = tokens(model, 1)
    assert tokens(model, 2) == want
    assert tokens(model, 2, enforce_eager=True) == want


def test_bfloat16_scores_are_as_near_as_one_cards(tmp_path: Path) -> None:
    """To those of float32: parts are summed in float32 and rounded once, so that ranks cost no precision."""
    model = str(write_tiny("qwen3", tmp_path / "model", **HEADS))

    def scores(size: int, dtype: str) -> torch.Tensor:
        with LLM(model, tensor_parallel_size=size, dtype=dtype, **OPTIONS) as llm:
            params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS[2:]], params, use_tqdm=False)
        values = []
        for output in outputs:
            for position, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True):
                values.append(position[token].logprob)
        return torch.tensor(values)

    want = scores(1, "float32")
    one, two = ((scores(size, "bfloat16") - want).abs().max() for size in (1, 2))
    assert two < 1.5 * one


@pytest.mark.parametrize("captured", [True, False])
def test_a_killed_rank_ends_the_engine_at_once(captured: bool, tmp_path: Path) -> None:
    """In the middle of a step, whatever kernel waits for it; and the next engine in the process works."""
    model = str(write_tiny("qwen3", tmp_path / "model", **HEADS))
    options = {"dtype": "float32", "enforce_eager": not captured, **OPTIONS}
    params = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    llm = LLM(model, tensor_parallel_size=2, **options)
    llm.generate(prompt, params, use_tqdm=False)
    assert llm.engine is not None and llm.engine.ranks is not None
    (other,) = llm.engine.ranks.pids
    began, failed = threading.Event(), []

    def generate() -> None:
        began.set()
        try:
            while True:
                llm.generate(prompt, params, use_tqdm=False)
        except EngineDeadError as error:
            failed.append(str(error))

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    began.wait()
    os.kill(other, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    assert "rank 1" in failed[0]
    llm.close()
    with LLM(model, tensor_parallel_size=2, **options) as again:
        (output,) = again.generate(prompt, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 240
