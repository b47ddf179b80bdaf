"""The sampler at the end of a captured decode step: of whole rows, or of the parts that several ranks have."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.prepare import Rows
from headrace.kernels.sample import sample_rows
from headrace.kernels.sample_ranks import WORDS, max_rows, sample_parts
from headrace.model.ranks import VocabPart
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.philox import PURPOSE_SAMPLE
from headrace.worker.sampling import Tail


def sample_step(logits: Tensor, rows: Rows, tail: Tail, part: VocabPart | None) -> tuple[Tensor, Tensor]:
    """logits [R, V], or a rank's [R, part.rows] -> (ids [R] int32, failed [R] bool), the same on every rank."""
    draw = rows.seed, rows.output_index, rows.sample_index
    if part is not None:
        # in float32 the space of hidden states takes words, too, and more rows than can wait at once on a small card
        fits = len(logits) <= max_rows(logits.device)
        space = part.group.push_space(len(logits), WORDS, torch.float32) if fits else None
        if space is not None and tail is not Tail.FILTERED:
            return sample_parts(
                logits, part.ids.start, space, rows.temperature, *draw, purpose=PURPOSE_SAMPLE, greedy_eps=GREEDY_EPS,
                all_greedy=tail is Tail.GREEDY,
            )  # fmt: skip
        logits = part.whole(logits)
    return sample_rows(
        logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, *draw, purpose=PURPOSE_SAMPLE, greedy_eps=GREEDY_EPS,
        all_greedy=tail is Tail.GREEDY, any_filter=tail is Tail.FILTERED,
    )  # fmt: skip
