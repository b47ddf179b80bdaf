"""Which captured step runs, and which are captured, one rank decides: all others do the same in the same order. Without a card."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafting import give_graphs, sample_on_host
from engine_driver import assert_all_same, make_core, plain_requests, requests_of_all_kinds, run
from headrace.config import EngineConfig
from headrace.engine import preparation
from headrace.engine.build import Worker
from headrace.engine.preparation import answer_own
from headrace.errors import EngineDeadError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.tensor_parallel.leading_runner import named_decodes, named_prompts
from headrace.tensor_parallel.messages import Capture, Compute, Place, Replay, ToRank, from_wire
from headrace.tensor_parallel.obey import capture, decode_key, prompt_key
from headrace.worker import prompt_graphs
from headrace.worker.captured import WAY_OUT
from headrace.worker.cuda_graphs import Key
from headrace.worker.prompt_graphs import PromptKey
from headrace.worker.sampling import Tail
from prompt_graphs_driver import UncapturedPrompts, give_prompts
from rank_threads import encode, ranked_core
from test_ranks_decoder import HEADS
from tiny_models import VOCAB, write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny"), **HEADS))


class Ranked:
    """Every rank's captured steps; only the first rank's may be asked for a choice."""

    def __init__(self, most: int, monkeypatch, decodes: bool = False):
        monkeypatch.setattr(prompt_graphs, "sample_step", sample_on_host)
        self.prompts: dict[int, UncapturedPrompts] = {}
        self.replayed: dict[int, list[PromptKey]] = {}
        self.decodes, self.most = decodes, most

    def __call__(self, worker: Worker) -> None:
        runner = worker.runner
        graphs, rank = give_prompts(runner, worker.limits), runner.decoder.vocab.group.shard.rank
        graphs.max_graphs, self.prompts[rank], self.replayed[rank] = self.most, graphs, []
        replay = graphs.replay

        def noted(plan, key):
            self.replayed[rank].append(key)
            return replay(plan, key)

        graphs.replay = noted
        if self.decodes:
            give_graphs(runner)
        if rank:
            graphs._chosen = graphs._capture_ahead = None

    def all_same(self) -> None:
        """The same steps were replayed, in one order, and the same are left."""
        first, *others = self.prompts.values()
        assert all(replayed == self.replayed[0] for replayed in self.replayed.values())
        assert all(other.replays == first.replays and list(other._graphs) == list(first._graphs) for other in others)


CHUNKS = {"max_num_batched_tokens": 13, "num_kv_blocks": 24}


@pytest.mark.parametrize("size, options, every", [(2, {}, 1), (4, CHUNKS, 3)], ids=["two", "four, chunks"])
def test_requests_of_all_kinds(model, size, options, every, monkeypatch) -> None:
    """Captured or not, within the step or from logits, with few places for captured steps and some of them made ahead."""
    requests = requests_of_all_kinds(VOCAB)[::every]
    want = run(make_core(model, enforce_eager=True), requests)
    ranked = Ranked(5, monkeypatch)
    with ranked_core(model, size, ranked, **options) as core:
        core.runner.prompts.prepare()
        got = run(core, requests, arrivals=[i // 3 for i in range(len(requests))])
        while core.idle():
            pass
    assert_all_same(got, want)
    ranked.all_same()
    told = core.runner._ranks.told
    steps = [message.step for message in told if isinstance(message, Compute)]
    assert ranked.prompts[0].replays[Tail.LOGITS] > 5 and None in steps, "and some cannot be captured"
    assert [named_prompts(key) for key in ranked.replayed[0]] == [step for step in steps if step is not None]
    assert sum(isinstance(message, Place) for message in told) == len(steps)
    assert len({prompt_key(message.step) for message in told if isinstance(message, Capture)}) > 1


def test_plain_requests_sample_within_the_step(model, monkeypatch) -> None:
    """Prompts and decodes both; an engine's own first requests leave nothing behind."""
    requests = plain_requests(7, max_tokens=6)
    arrivals = [2 * i for i in range(7)]
    want = run(make_core(model, enforce_eager=True), requests)
    ranked = Ranked(40, monkeypatch, decodes=True)
    with ranked_core(model, 2, ranked) as core:
        answer_own(core.runner, core.scheduler.limits, VOCAB, alone=False)
        before = core.runner.graphs.replays
        got = run(core, requests, arrivals=arrivals)
        told, decoded = core.runner._ranks.told, core.runner.graphs.replays
    assert_all_same(got, want)
    ranked.all_same()
    assert {key.tail for key in ranked.replayed[0]} == {Tail.GREEDY, Tail.RANDOM, Tail.FILTERED}
    assert 0 < before < decoded == sum(isinstance(message, Replay) for message in told)


def test_a_capture_that_fails_on_the_first_rank_ends_all(model, monkeypatch) -> None:
    """The second of those before the first request: nothing is passed over, and the reason says what to do about it."""
    ranked = Ranked(40, monkeypatch)
    monkeypatch.setattr(preparation, "begin", lambda *of: None)
    with ranked_core(model, 2, ranked) as core:
        runner, limits = core.runner, core.scheduler.limits
        first, capture = ranked.prompts[0], ranked.prompts[0]._capture
        first._capture = lambda key: capture(key) if not first._graphs else broken()
        config = EngineConfig(model=model, device="cuda", tensor_parallel_size=2)
        before = preparation.Preparation(config, resolve_checkpoint(config), limits, torch.device("cuda"))
        with pytest.raises(RuntimeError, match="no memory for a graph") as found:
            before.finish(runner, limits, VOCAB)
        assert found.value.__notes__ == [WAY_OUT]
        assert runner.prompts is first
        with pytest.raises(EngineDeadError, match="no memory for a graph"):
            first.prepare()
    assert len(first._graphs) == 1
    told = [prompt_key(message.step) for message in runner._ranks.told if isinstance(message, Capture)]
    assert list(ranked.prompts[1]._graphs) == told and len(told) == 2, "the other had done what it was told, and has ended"


def broken() -> None:
    raise RuntimeError("no memory for a graph")


STEPS = st.one_of(
    st.builds(Key, st.integers(1, 1024), st.integers(1, 1 << 20), st.sampled_from(Tail), st.booleans(), st.booleans()),
    st.builds(PromptKey, st.integers(16, 4096), st.integers(8, 520), st.booleans(), st.integers(1, 1 << 20), st.sampled_from(Tail)),
)


@given(STEPS)
def test_every_step_travels(key: Key | PromptKey) -> None:
    """By name, to the rank's own graphs of its kind."""
    step = named_decodes(key) if isinstance(key, Key) else named_prompts(key)
    arrived = msgspec.msgpack.Decoder(ToRank, dec_hook=from_wire).decode(encode(Capture(step))).step
    assert (decode_key(arrived) if isinstance(key, Key) else prompt_key(arrived)) == key
    captured: list[tuple[str, Key | PromptKey]] = []
    kinds = {name: SimpleNamespace(capture=lambda key, name=name: captured.append((name, key))) for name in ("graphs", "prompts")}
    capture(SimpleNamespace(**kinds), arrived)
    assert captured == [("graphs" if isinstance(key, Key) else "prompts", key)]
