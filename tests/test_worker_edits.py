"""The edits of a step put together from slots: equal to each request alone, nothing copied past the staging buffers."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine_driver import complete
from headrace.kernels.prepare import Rows
from headrace.sampling import sampler
from headrace.sampling.params import SamplingParams
from headrace.sampling.penalties import apply_edits
from headrace.scheduler.plan import Admitted, StepPlan
from headrace.scheduler.request import Request
from headrace.worker import sampling as worker_sampling
from headrace.worker.batch_state import BatchState, TableWrite
from headrace.worker.edits import SampledRow, StepEdits
from headrace.worker.sampling import RowSampler

VOCAB, SLOTS = 41, 6
CPU = torch.device("cpu")
IDS = st.integers(0, VOCAB - 1)


@st.composite
def params(draw) -> SamplingParams:
    """Any edits; many requests have none."""
    if draw(st.booleans()):
        return complete(SamplingParams(logprobs=0))
    words = draw(st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=3))
    some = SamplingParams(
        logprobs=0,
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.3])),
        logit_bias=draw(st.none() | st.dictionaries(IDS, st.floats(-9, 9, width=32), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(IDS, min_size=1, max_size=30)),
        min_tokens=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.lists(IDS, max_size=3)),
        ignore_eos=draw(st.booleans()),
    )
    return complete(some, bad_word_ids=words, eos_token_ids=[2])


@st.composite
def requests(draw) -> list[Request]:
    found = []
    for slot in draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]:
        prompt, output = draw(st.lists(IDS, min_size=1, max_size=9)), draw(st.lists(IDS, max_size=5))
        found.append(Request(f"r{slot}", array("i", prompt), draw(params()), 7, slot=slot, output_ids=output))
    return found


def admitted(some: list[Request]) -> tuple[BatchState, StepEdits]:
    state = BatchState(SLOTS, 32, 8, CPU)
    edits = StepEdits(state, VOCAB)
    load(state, edits, some)
    return state, edits


def admission(request: Request) -> Admitted:
    known = request.known_ids()
    return Admitted(request.slot, known, len(request.prompt_ids), 0, [], request.params, request.seed, None)


def load(state: BatchState, edits: StepEdits, some: list[Request]) -> None:
    for request in some:
        state.enter(list(state._load(admission(request))))
        edits.load(admission(request))


def edited(state: BatchState, edits: StepEdits, some: list[Request], logits: torch.Tensor) -> torch.Tensor:
    """A step that samples the next token of each request."""
    rows = Rows.empty(len(some), CPU)
    rows.seq_slots[:], rows.seq_lens[:] = torch.tensor([r.slot for r in some]), torch.tensor([r.num_known for r in some])
    found = edits.of_step([SampledRow(i, r.slot, len(r.output_ids), 0) for i, r in enumerate(some)], rows, None, ())
    work = logits.clone()
    if found is not None:
        apply_edits(work, found)
    return work


@settings(max_examples=60)
@given(requests(), requests(), st.integers(0, 2**32), st.data())
def test_a_mixed_batch_is_edited_as_each_request_alone(first, second, seed, data):
    """Steps of changing rows, with new owners of the slots between them: what is kept from a step before serves no other."""
    rng = np.random.default_rng(seed)
    state, edits = admitted(first)
    owners = {r.slot: r for r in first}
    for turn in range(4):
        if turn == 2:
            load(state, edits, second)
            owners |= {r.slot: r for r in second}
        some = [owners[s] for s in data.draw(st.lists(st.sampled_from(sorted(owners)), min_size=1, unique=True))]
        logits = torch.from_numpy(rng.standard_normal((len(some), VOCAB)).astype(np.float32))
        for _ in range(2):  # the second time nothing has to be put together
            got = edited(state, edits, some, logits)
            for row, request in enumerate(some):
                alone = edited(*admitted([request]), [request], logits[row : row + 1])
                assert torch.equal(got[row], alone[0]), request.params
        for request in some:  # each gets a token, as the sampler would write it
            token = int(rng.integers(VOCAB))
            state.enter([TableWrite(0, request.slot, request.num_known, [token])])
            if edits._counts is not None:
                rows = Rows.empty(1, CPU)
                rows.seq_slots[:] = request.slot
                edits.count(rows, torch.tensor([token]), None)
            request.output_ids.append(token)


def test_a_steady_step_uploads_nothing_for_its_edits(monkeypatch):
    request = Request("r", array("i", [3, 4]), complete(SamplingParams(
        repetition_penalty=1.3, logit_bias={3: 1.0}, allowed_token_ids=[3, 4, 5], min_tokens=9, stop_token_ids=[5])), 7, slot=2)  # fmt: skip
    request.params.bad_word_ids = [[4], [4, 5]]
    state, edits = admitted([request])
    uploads = []
    upload = state.staging.upload
    monkeypatch.setattr(state.staging, "upload", lambda a: uploads.append(a) or upload(a))
    for step in range(12):
        before = len(uploads)
        edited(state, edits, [request], torch.zeros(1, VOCAB))
        assert (len(uploads) > before) == (step in (0, 9)), "but for the end of min_tokens"
        request.output_ids.append(3)
        state.enter([TableWrite(0, 2, request.num_known - 1, [3])])
        uploads.clear()


class NoCopies(TorchDispatchMode):
    """A device whose host may neither read it nor write to it but through the staging buffers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        where = {t.device.type for t in args if isinstance(t, torch.Tensor)}
        target = (kwargs or {}).get("device")
        assert not (func is torch.ops.aten._to_copy.default and target is not None and torch.device(target).type == "meta"), func
        if func is torch.ops.aten.copy_.default:
            assert where == {"meta"}, func
        assert func is not torch.ops.aten._local_scalar_dense.default, "a wait for a number"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [
    {"repetition_penalty": 1.2}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [1, 2]},
    {"min_tokens": 3, "stop_token_ids": [4]}, {"logprobs": 3}, {"top_k": 5, "top_p": 0.5}, {"temperature": 0.0}, {"bad": True},
], ids=lambda kind: next(iter(kind)))  # fmt: skip
@pytest.mark.parametrize("drafts", [0, 2])
def test_admissions_copy_by_staging_alone(monkeypatch, kind, drafts):
    """Law 4 without a card: on the device that has only shapes every copy is seen, and every number that is asked for."""
    state = BatchState(SLOTS, 64, 8, torch.device("meta"))
    monkeypatch.setattr(state.staging, "upload", lambda a: torch.empty(a.shape, dtype=torch.from_numpy(a).dtype, device="meta"))
    shape = lambda logits: torch.empty(len(logits), dtype=torch.int32, device="meta")  # noqa: E731
    monkeypatch.setattr(sampler, "choose", lambda logits, inputs: (shape(logits), shape(logits).bool()))
    monkeypatch.setattr(worker_sampling, "publish", lambda *args: None)  # a kernel
    sampling = RowSampler(state, VOCAB)
    words = [[4], [5, 6]] if "bad" in kind else []
    one = complete(SamplingParams(**{k: v for k, v in kind.items() if k != "bad"}), bad_word_ids=words, eos_token_ids=[2])
    some = [Request("a", array("i", [3, 4, 5] * 9), one, 7, slot=1, output_ids=[3, 4]),
            Request("b", array("i", [3, 4]), complete(SamplingParams()), 7, slot=0)]  # fmt: skip
    news = [admission(r) for r in some]
    slots, starts = (np.asarray(v, np.int32) for v in zip(*((r.slot, r.num_known - 1) for r in some), strict=True))
    guesses = {i: [7, 8][:drafts] for i in range(2 * bool(drafts))}
    plan = StepPlan(1, 0, 0, ["a", "b"], slots, starts, 1 + 0 * slots + drafts, 0 * slots + drafts, 0 * slots, slots >= 0, news, [], guesses)
    with NoCopies():
        for new in news:
            state.admitted[new.slot] = new
            sampling.load(new)
        count = 2 * (1 + drafts)
        sampling(torch.empty(count, VOCAB, dtype=torch.bfloat16, device="meta"), plan, Rows.empty(count, state.device))
