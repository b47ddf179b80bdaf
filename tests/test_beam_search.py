"""Beam search against Transformers' on tiny models in float32, and what is said of it when nothing else is at hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from headrace import LLM, BeamSearchParams, SamplingParams
from headrace.beam_search import BeamSearch
from headrace.errors import ParameterError
from tiny_models import write_tiny

PROMPTS = [[7, 19, 300, 41], [5], [100, 101, 102, 103, 104, 105, 106, 107, 108, 109], [1, 9, 9, 400, 17, 3, 250]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request, tmp_path_factory):
    """An LLM of ours and Transformers' model of the same random weights. Its end token is likely enough to come up."""
    path = write_tiny(request.param, tmp_path_factory.mktemp("tiny"), initializer_range=0.05)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with LLM(
        str(path), device="cpu", dtype="float32", max_num_seqs=16, num_kv_blocks=256, block_size=4, debug_checks=True
    ) as ours:
        yield ours, theirs


def reference(model: Any, prompt: list[int], *, eos: list[int], **options: Any) -> list[tuple[list[int], float]]:
    """Transformers' sequences without their padding, and their scores."""
    out = model.generate(
        torch.tensor([prompt]), do_sample=False, return_dict_in_generate=True, output_scores=True, pad_token_id=0,
        eos_token_id=eos or None, **options,
    )  # fmt: skip
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        ids = row[len(prompt) :]
        ends = [i for i, t in enumerate(ids) if t in eos]
        found.append((ids[: ends[0] + 1] if ends else ids, score))
    return found


def frequent(model: Any, count: int) -> list[int]:
    """Tokens that beams often choose: as end tokens they end many beams."""
    out = model.generate(
        torch.tensor([PROMPTS[0]]), num_beams=4, num_return_sequences=4, max_new_tokens=8, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    tokens = out[:, len(PROMPTS[0]) :].flatten().tolist()
    return sorted(set(tokens), key=lambda t: -tokens.count(t))[:count]


CASES: list[dict[str, Any]] = [
    {"beam_width": 1, "max_tokens": 6},
    {"beam_width": 3, "max_tokens": 9},
    {"beam_width": 5, "max_tokens": 7, "num_return_sequences": 2},
    {"beam_width": 4, "max_tokens": 12, "length_penalty": 0.0},
    {"beam_width": 4, "max_tokens": 12, "length_penalty": 2.0, "early_stopping": True},
    {"beam_width": 4, "max_tokens": 12, "length_penalty": -1.0},
    {"beam_width": 3, "max_tokens": 12, "length_penalty": 1.5, "early_stopping": "never"},
    {"beam_width": 3, "max_tokens": 12, "length_penalty": -0.5, "early_stopping": "never"},
    {"beam_width": 4, "max_tokens": 1},
    {"beam_width": 3, "max_tokens": 10, "ignore_eos": True},
    {"beam_width": 2, "max_tokens": 25, "length_penalty": 1.0, "early_stopping": True},
    {"beam_width": 2, "max_tokens": 25, "length_penalty": 1.0, "early_stopping": "never"},
    {"beam_width": 2, "max_tokens": 25, "length_penalty": 1.0},
]


@pytest.mark.parametrize("num_eos", [0, 12])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_transformers(pair, case, num_eos):
    ours, theirs = pair
    eos = frequent(theirs, num_eos) if num_eos else []
    ours.inputs.eos_token_ids = eos
    params = BeamSearchParams(**case)
    outputs = ours.beam_search(PROMPTS, params)
    options = {
        "num_beams": case["beam_width"],
        "num_return_sequences": case.get("num_return_sequences", case["beam_width"]),
        "max_new_tokens": case["max_tokens"],
        "length_penalty": case.get("length_penalty", 1.0),
        "early_stopping": case.get("early_stopping", False),
    }
    if case["beam_width"] == 1:  # Transformers' greedy search: it gives no scores
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = theirs.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=eos or None
            )
            assert output.sequences[0].token_ids == ids[0, len(prompt) :].tolist()
        return
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = reference(theirs, prompt, eos=[] if case.get("ignore_eos") else eos, **options)
        assert [s.token_ids for s in output.sequences] == [ids for ids, _ in want]
        for sequence, (ids, score) in zip(output.sequences, want, strict=True):
            assert sequence.tokens == prompt + ids
            assert sequence.score == pytest.approx(score, abs=1e-4)
            length = len(ids) ** params.length_penalty
            assert sequence.score == pytest.approx(sequence.cum_logprob / length, rel=1e-9)
            ended = ids[-1] in eos and not params.ignore_eos
            assert sequence.finish_reason == ("stop" if ended else "length")
    assert ours.engine.core.scheduler.kv_usage == 0.0


def test_ends_of_text_come_up_in_these_cases(pair):
    """The cases above are worth something: some beams end early, some do not."""
    ours, theirs = pair
    ours.inputs.eos_token_ids = frequent(theirs, 1)
    reasons = [
        s.finish_reason
        for o in ours.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=0.0))
        for s in o.sequences
    ]
    assert set(reasons) == {"stop", "length"} or set(reasons) == {"stop"}


def test_beams_share_the_blocks_of_what_they_have_in_common(pair):
    ours, _ = pair
    ours.inputs.eos_token_ids = []
    ours.reset_prefix_cache()
    prompt = [(7 * i + 3) % 500 for i in range(40)]  # ten blocks of four
    before = ours.engine.core.scheduler.stats.prefix_hit_tokens
    ours.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=5))
    hits = ours.engine.core.scheduler.stats.prefix_hit_tokens - before
    assert hits >= 4 * 4 * 36  # of each beam of the four steps after the first, all but the last block of the prompt


def test_many_prompts_with_few_slots_give_the_same(pair):
    """More beams than slots, and a cache that holds a few of them only."""
    ours, _ = pair
    ours.inputs.eos_token_ids = [2]
    params = BeamSearchParams(beam_width=6, max_tokens=6)
    prompts = [*PROMPTS, *[[i, i + 1, i + 2] for i in range(3)]]
    together = ours.beam_search(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        alone = ours.beam_search([prompt], params)[0]
        assert [s.token_ids for s in alone.sequences] == [s.token_ids for s in output.sequences]
        assert [s.score for s in alone.sequences] == pytest.approx([s.score for s in output.sequences], abs=1e-5)


def test_texts_in_and_out(pair):
    ours, _ = pair
    ours.inputs.eos_token_ids = [2]
    output = ours.beam_search("The quick", BeamSearchParams(beam_width=2, max_tokens=5))[0]
    assert output.prompt == "The quick"
    best = output.sequences[0]
    shown = best.token_ids[:-1] if best.finish_reason == "stop" else best.token_ids
    assert best.text == ours.get_tokenizer().decode(shown)
    assert best.score >= output.sequences[1].score


def test_the_context_is_the_end(pair):
    ours, _ = pair
    ours.inputs.eos_token_ids = []
    room = ours.config.max_model_len - 3
    prompt = list(range(10, 10 + room))
    output = ours.beam_search([prompt], BeamSearchParams(beam_width=2))[0]
    assert [len(s.token_ids) for s in output.sequences] == [3, 3]
    with pytest.raises(ParameterError, match="at most 3"):
        ours.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=4))


def test_a_failure_leaves_nothing_behind(pair):
    ours, _ = pair
    with pytest.raises(ParameterError):
        ours.beam_search([[5], [10**6]], BeamSearchParams(beam_width=2))
    with pytest.raises(ParameterError, match=r"^params: .*BeamSearchParams$"):
        ours.beam_search([[5]], SamplingParams(max_tokens=3))
    assert not ours.engine.core.has_work


@pytest.mark.parametrize(
    "wrong", [{"beam_width": 0}, {"beam_width": 51}, {"beam_width": True}, {"beam_width": 2, "max_tokens": 0},
              {"beam_width": 2, "length_penalty": math.nan}, {"beam_width": 2, "num_return_sequences": 3},
              {"beam_width": 2, "early_stopping": "always"}, {"beam_width": 2, "temperature": 0.5},
              {"beam_width": 2, "ignore_eos": 1}],
    ids=str,
)  # fmt: skip
def test_parameters_are_checked(wrong):
    with pytest.raises(ParameterError) as error:
        BeamSearchParams(**wrong)
    assert error.value.field in wrong


def test_many_end_tokens_bound_the_width():
    with pytest.raises(ParameterError, match="end tokens"):
        BeamSearch([1], BeamSearchParams(beam_width=40), [2, 3, 4])
