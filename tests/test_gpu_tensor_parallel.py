"""Ranks on two cards: their sums, an engine's tokens against one card's, and the death of a rank."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.errors import EngineDeadError
from headrace.worker.sampling import Tail
from test_gpu_prompt_graphs import SHAPE
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


def check_sums(rank: int, size: int, store: str) -> None:
    import torch.distributed as dist

    from headrace.fast_decode.pieces import add_in_pieces
    from headrace.kernels.all_reduce import RowPlace, all_reduce, ordered_sum, row_sum, row_sum_tiles
    from headrace.kernels.norm import add_rms_norm
    from headrace.model.shard import Shard
    from headrace.tensor_parallel.cards import PUSH_BYTES, CardGroup

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = CardGroup(Shard(rank, size), device, dist.FileStore(store, size))
    group.prepare(2048, 4096, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(rank)
    most = min(2048, PUSH_BYTES // ((size - 1) * 4096 * 2))

    def draw(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        part = torch.randn(rows, width, generator=generator, device=device).to(dtype)
        part[:, ::7] = -0.0
        return part

    # the last two by NCCL; of `most` and 300 rows several are one program's
    for rows, width in [(1, 4096), (64, 4096), (3, 576), (1, 8), (300, 4096), (most, 4096), (most + 1, 4096), (2, 20000)]:
        for dtype in (torch.bfloat16, torch.float32):
            for _ in range(3):
                part = draw(rows, width, dtype)
                want = ordered_sum(group.gather(part))
                assert torch.equal(group.sum(part), want), (rows, width, dtype)
    space = group.push_space(64, 4096, torch.bfloat16)
    assert space is not None

    def check_graph(rows: int, call: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        """Calls of other heights in between: an odd number, so that the next replay begins with other places."""
        part, stream = draw(rows, 4096), torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            call(part.clone(), 0)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            out = part
            for count in range(7):
                out = call(part, count)
                call(part[: 1 + count % min(3, rows)].clone(), count)
            graph.capture_end()
        for _ in range(50):
            part.copy_(draw(rows, 4096))
            torch.cuda.synchronize()
            want = ordered_sum(group.gather(part))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want), rows

    check_graph(5, lambda part, _: all_reduce(part, space))
    check_graph(most, lambda part, _: all_reduce(part, space))
    # as larger steps are captured, those of cards that do not see each other all: by NCCL, beside sums of few rows or alone
    check_graph(most + 1, lambda part, _: group.sum(part.clone()))
    check_graph(640, lambda part, count: group._sum_by_nccl(part.clone()) if count % 2 == 0 else all_reduce(part, space))
    # a few rows by many programs, as fused steps add them up, each of the two places in turn
    total, parts = torch.zeros(64, 4096, device=device), torch.empty(2, 64, 4096, device=device)
    normed, norm = torch.empty(64, 4096, device=device, dtype=torch.bfloat16), torch.ones(4096, device=device, dtype=torch.bfloat16)
    sumsq, heights = torch.empty(64, row_sum_tiles(4096), device=device), (64, 8, 3, 64, 1, 33)

    def add_up() -> None:
        for call, rows in enumerate(heights):
            row_sum(RowPlace(space, call % 2), total[:rows], normed[:rows], sumsq[:rows], norm, parts=parts[:, :rows])

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    parts.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        add_up()
        graph.capture_begin(capture_error_mode="thread_local")
        add_up()
        graph.capture_end()
    torch.cuda.synchronize()
    for _ in range(20):
        parts.normal_(generator=generator)
        want, added = total.clone(), ordered_sum(group.gather(parts.sum(0).to(torch.bfloat16)).float())
        for rows in heights:
            want[:rows] += added[:rows]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(total, want)
        assert torch.equal(normed[:33], want[:33].to(torch.bfloat16))
    exchange = group.exchange(3000, 4096, torch.bfloat16)
    assert (exchange is None) == (size > 2)
    for rows in (3000, 129, 2048) * 3 if exchange is not None else ():
        part, residual = draw(rows, 4096), norm.expand(rows, -1).contiguous()
        pieces = add_in_pieces(lambda out, of: out.copy_(of), part, residual.clone(), exchange, norm, 1e-6, 0.0, 1.0)
        want = add_rms_norm(group.gather(part), residual, norm, 1e-6)
        assert torch.equal(pieces.whole(), want[0]) and torch.equal(pieces.residual, want[1])
    shared = torch.full((3,), float(rank), device=device)
    group.share(shared)
    assert shared.tolist() == [0.0] * 3


def be_a_rank(rank: int, size: int, store: str) -> None:
    try:
        check_sums(rank, size, store)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_of_cards_are_ordered_sums(size: int, tmp_path: Path) -> None:
    """Bit for bit, by whatever way they go, in replays of one graph too."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} cards")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=be_a_rank, args=(rank, size, str(tmp_path / "store"))) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * size


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


@pytest.mark.parametrize("family, options", [("qwen3_moe", {}), ("qwen3_5", {"linear_num_key_heads": 4})])
def test_other_layers(family: str, options: dict, tmp_path: Path) -> None:
    """Experts, of which each rank has some, and gated delta nets, in captured steps with prompts."""
    model = str(write_tiny(family, tmp_path / "model", **options))
    want = tokens(model, 1, enforce_eager=True)
    assert tokens(model, 2) == want


def count_prompts(llm: LLM) -> Counter[tuple[Tail, int]]:
    """The captured steps with prompts that rank 0 replays, by what follows the forward and their tokens."""
    assert llm.engine is not None
    prompts, seen = llm.engine.core.runner.prompts, Counter[tuple[Tail, int]]()
    assert prompts is not None
    replay = prompts.replay

    def counted(plan, key):
        seen[key.tail, key.tokens] += 1
        return replay(plan, key)

    prompts.replay = counted
    return seen


LENGTHS = [3000, 1, 700, 64, 65, 2000, 1500, 17, 128, 900, 300, 33, 2, 600]


def answers(model: str, ranks: int, **more) -> tuple[list[list[int]], Counter[tuple[Tail, int]]]:
    """To prompts of LENGTHS, sampled in three ways; and the captured steps that gave them."""
    rng = random.Random(4)
    prompts = [{"prompt_token_ids": [rng.randrange(1024) for _ in range(n)]} for n in LENGTHS]
    kinds = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "top_k": 9, "seed": 4}]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, **kinds[i % 3]) for i in range(len(LENGTHS))]
    options = {
        "load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 40, "max_model_len": 6000,
        "gpu_memory_utilization": 0.2, "max_num_batched_tokens": 2048,
    }  # fmt: skip
    with LLM(model, tensor_parallel_size=ranks, **options, **more) as llm:
        seen = Counter() if more.get("enforce_eager") else count_prompts(llm)
        found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
        for one in (0, 4, 11):  # each prompt alone, with its prefix known or not
            found += [list(o.outputs[0].token_ids) for o in llm.generate(prompts[one], params[one], use_tqdm=False)]
    return found, seen


@pytest.fixture(scope="module")
def one_card(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """A model of shapes with real heads, and its answers."""
    model = tmp_path_factory.mktemp("long")
    (model / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": 4}))
    return str(model), answers(str(model), 1, enforce_eager=True)[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", ["eager", "pushed", "by NCCL"])
def test_captured_prompts_of_all_lengths(size: int, how: str, one_card: tuple[str, list[list[int]]]) -> None:
    """Whole, in chunks, beside decodes, and where cards do not see each other's memory; each as the steps that are not captured."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} cards")
    model, want = one_card
    with pytest.MonkeyPatch.context() as patch:
        if how == "by NCCL":
            patch.setattr("headrace.engine.build.build_rank", build_apart)
            patch.setattr("headrace.tensor_parallel.cards.CardGroup.prepare", lambda *args: None)
        got, seen = answers(model, size, **({"enforce_eager": True} if how == "eager" else {}))
    assert got == want and len({tuple(ids) for ids in want}) > 8
    if how != "eager":
        assert seen.total() >= 8 and len({n for _, n in seen}) > 3 and {tail for tail, _ in seen} >= {Tail.FILTERED}


def build_apart(config, rank: int, join):
    """A rank whose card sees no other's memory."""
    from headrace.engine import build
    from headrace.tensor_parallel.cards import CardGroup

    CardGroup.prepare = lambda *args: None
    return build.build_rank(config, rank, join)


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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("captured, count", [(True, 240), (False, 240), (True, 1)], ids=["decodes", "eager", "prompts"])
def test_a_killed_rank_ends_the_engine_at_once(captured: bool, count: int, size: int, tmp_path: Path) -> None:
    """In the middle of a step, whatever kernel waits for it; and the next engine in the process works."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} cards")
    model = str(write_tiny("qwen3", tmp_path / "model", **HEADS))
    options = {"dtype": "float32", "enforce_eager": not captured, "enable_prefix_caching": False, **OPTIONS}
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    llm = LLM(model, tensor_parallel_size=size, **options)
    llm.generate(prompt, params, use_tqdm=False)
    assert llm.engine is not None and llm.engine.ranks is not None
    others = llm.engine.ranks.pids
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
    os.kill(others[-1], signal.SIGKILL)
    thread.join(5)
    assert not thread.is_alive()
    assert f"rank {size - 1}" in failed[0]
    llm.close()
    with LLM(model, tensor_parallel_size=size, **options) as again:
        (output,) = again.generate(prompt, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == count
