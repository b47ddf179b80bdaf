"""A core whose ranks are processes says what one alone says; a rank's death ends all of them at once; nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headrace.engine.build as build
from drafting import draft_always
from engine_driver import BLOCK, assert_same, make_core, requests_of_all_kinds, run
from headrace import LLM, SamplingParams
from headrace.beam_search import BeamSearchParams
from headrace.config import EngineConfig
from headrace.engine.build import build_engine, choose_device
from headrace.errors import CapacityError, EngineDeadError, ParameterError
from headrace.tensor_parallel import ranks
from rank_threads import run_ranks
from server_driver import SRC, alive, command_of, processes_of, until

TWO = {"tensor_parallel_size": 2, "device": "cpu", "dtype": "float32"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def gone(pids: list[int]) -> None:
    until(lambda: not any(map(alive, pids)), 30)


def test_two_processes_say_what_one_says(model):
    """Requests of all kinds, in chunks, with drafts by n-grams, and so few blocks that some are preempted."""
    alone = make_core(model, enable_prefix_caching=False, enforce_eager=True)
    requests = requests_of_all_kinds(alone.vocab_size)
    wanted = run(alone, requests)
    options = {"speculative_method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4, "speculative_max_rows": 32}
    few = {"max_num_seqs": 8, "max_model_len": 128, "block_size": BLOCK, "num_kv_blocks": 14, "max_num_batched_tokens": 11}
    engine = build_engine(EngineConfig(model=model, debug_checks=True, **TWO, **options, **few))
    engine.core.async_scheduling = engine.config.async_scheduling  # as on cards
    core, pids = engine.core, engine.ranks.pids
    draft_always(core, 4, overlap=True)
    core.scheduler.admission.estimate.observe = lambda length: None  # all are taken to end soon: some are preempted
    core.scheduler.admission.estimate.mean = 1.0
    for name, got in run(core, requests).items():
        assert_same(got, wanted[name], name)
        assert (got.prompt_logprobs is None) is (wanted[name].prompt_logprobs is None)
        assert got.embedding is None or got.embedding == pytest.approx(wanted[name].embedding, abs=1e-5)
    assert core.scheduler.stats.num_preemptions and core.speculator.stats.num_accepted_tokens
    assert len(pids) == 1 and alive(pids[0])
    engine.close()
    gone(pids)


def test_three_ranks_of_smollm2_give_the_text_of_one(smollm2):
    asked = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
    texts = []
    for size in (1, 3):
        with LLM(
            smollm2, device="cpu", dtype="float32", enforce_eager=True, max_model_len=128, tensor_parallel_size=size
        ) as llm:
            outputs = llm.generate(
                asked, [SamplingParams(temperature=t, seed=1, max_tokens=16) for t in (0.0, 0.0, 0.8)], use_tqdm=False
            )
            texts.append([o.outputs[0].text for o in outputs])
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- ends


def raising(ids: list[int], logits):
    raise ValueError("a user's mistake")


def broken(*args):
    raise RuntimeError("rank 0 is broken")


def test_an_engine_whose_rank_is_killed_says_so_and_another_goes_on(model, monkeypatch):
    settled: list[int] = []  # how often, when somebody is told of a death
    monkeypatch.setattr("headrace.tensor_parallel.groups.ProcessGroup.settle", lambda group: settled.append(id(group)))

    def answer(engine: LLM) -> list[int]:
        return engine.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    beams, small = BeamSearchParams(beam_width=3, max_tokens=8), {"max_num_seqs": 4, "max_model_len": 64}
    with LLM(model, device="cpu", dtype="float32", enforce_eager=True, **small) as alone:
        wanted, first = [b.token_ids for b in alone.beam_search([[5, 6, 7]], beams)[0].sequences], answer(alone)
    with LLM(model, **TWO, **small) as llm, LLM(model, **TWO, **small) as other:  # two in one process
        pids, others = llm.engine.ranks.pids, other.engine.ranks.pids
        assert [b.token_ids for b in llm.beam_search([[5, 6, 7]], beams)[0].sequences] == wanted
        with pytest.raises(ValueError, match="a user's mistake"):  # rank 0's alone: the others stay in step
            llm.generate(
                [[5, 6, 7], [8, 9]], [GREEDY, SamplingParams(max_tokens=4, logits_processors=[raising])], use_tqdm=False
            )
        assert answer(llm) == answer(other) == first
        stream = llm.stream([[5, 6, 7]], GREEDY)
        assert next(stream)[2].token_ids == first[:1]
        os.kill(pids[0], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(
                EngineDeadError, match=rf"rank 1 of tensor_parallel_size 2 \(process {pids[0]}\) was killed by SIGKILL"
            ):
                list(stream)
                answer(llm)
        assert settled
        settled.clear()
        gone(pids)
        assert answer(other) == first and all(map(alive, others))
        monkeypatch.setattr(other.engine.core.runner.decoder, "forward", broken)  # rank 0's: the others are out of step
        with pytest.raises(RuntimeError, match="rank 0 is broken"):
            answer(other)
        assert settled
        gone(others)
        with pytest.raises(EngineDeadError, match="rank 0 failed in a step: RuntimeError: rank 0 is broken"):
            answer(other)


def test_of_ranks_that_end_the_one_that_was_killed_is_named(monkeypatch) -> None:
    """Its neighbour, whose connection ends with it, may be heard of first."""
    scripts = {1: "import time; time.sleep(60)", 2: "import sys; sys.stdin.read(); sys.exit(3)"}
    started = []

    def spawn(rank: int, *_: object) -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, "-c", scripts[rank]], stdin=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(ranks, "_spawn", spawn)
    watch = ranks._Processes(2, -1, "")
    monkeypatch.setattr(ranks._Watched, "run", lambda *_: None)  # told below, in that order
    watch.start()
    started[0].kill()
    until(lambda: started[0].poll() is not None, 10)
    started[1].communicate()
    watch._ended(2)
    assert watch.death is not None and "rank 1 of tensor_parallel_size 3" in watch.death.why and watch.death.killed
    assert f"(process {started[0].pid}) was killed by SIGKILL" in watch.death.why


SCRIPT = """
import json, sys
from headrace import LLM, SamplingParams
from headrace.beam_search import BeamSearchParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", dtype="float32", max_num_seqs=4, max_model_len=256)
print(json.dumps(llm.engine.ranks.pids), flush=True)
while True:
    llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_ends_anyhow_leaves_no_rank(model, number, tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
    )
    pids = json.loads(script.stdout.readline())
    assert all(map(alive, pids))
    script.send_signal(number)
    _, errors = script.communicate(timeout=60)
    assert script.returncode == -number and ("KeyboardInterrupt" in errors) is (number == signal.SIGINT), errors
    gone(pids)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- starts that fail


def without_memory(config, rank, join):
    raise CapacityError("no memory is left for the KV cache")


def crashing(config, rank, join):
    raise RuntimeError("broken")


def late(config, rank, join):
    """All have met, and rank 0 waits for the others' word."""
    join(torch.device("cpu"))
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES = [
    (without_memory, CapacityError, "ended: no memory is left for the KV cache"),
    (crashing, EngineDeadError, "ended: RuntimeError: broken"),
    (late, EngineDeadError, "was killed by SIGKILL"),
]


@pytest.mark.parametrize(("builder", "error", "words"), FAILURES, ids=[f[0].__name__ for f in FAILURES])
def test_a_rank_that_cannot_start_ends_the_start(model, monkeypatch, builder, error, words):
    monkeypatch.setattr(build, "build_rank", builder)
    with pytest.raises(error, match=rf"rank 1 of tensor_parallel_size 2 \(process \d+\) {words}"):
        build_engine(EngineConfig(model=model, max_num_seqs=4, max_model_len=64, **TWO))
    assert not [p for p in processes_of(os.getpid()) if b"tensor_parallel" in command_of(p)]


def test_a_first_rank_that_cannot_start_ends_the_others(model, monkeypatch):
    def fails(*args):
        raise CapacityError("rank 0 has no room")

    monkeypatch.setattr(build, "planned", fails)
    with pytest.raises(CapacityError, match="rank 0 has no room"):
        build_engine(EngineConfig(model=model, max_num_seqs=4, max_model_len=64, **TWO))
    assert not [p for p in processes_of(os.getpid()) if b"tensor_parallel" in command_of(p)]


def test_all_ranks_have_the_blocks_of_the_one_with_least_room():
    assert run_ranks(3, lambda group: build.fewest(10 - 3 * (group.shard.rank == 1), group, torch.device("cpu"))) == [7, 7, 7]


@pytest.mark.parametrize(("threads", "ranks", "each"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (None, 2, 3)])
def test_ranks_on_a_cpu_share_its_cores(monkeypatch, threads, ranks, each):
    monkeypatch.setattr(build, "usable_cores", lambda: 6)
    assert build.threads_of_rank(EngineConfig(threads=threads, tensor_parallel_size=ranks)) == each


def test_a_machine_without_what_ranks_need_is_told_so(model, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(ParameterError, match="tensor_parallel_size: got 2, allowed: 1 on Darwin"):
        build_engine(EngineConfig(model=model, **TWO))


def test_more_ranks_than_cards_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(
        ParameterError, match="tensor_parallel_size: got 4, allowed: at most 1, the cards that this process sees"
    ):
        choose_device("auto", 0, 4)
    assert choose_device("cpu", 3, 4).type == "cpu" and choose_device("auto").type == "cuda"
