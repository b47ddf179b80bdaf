"""How far a model's predictions lie from a reference's, position by position over real text."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace import LLM, SamplingParams

CLEAR = 0.5  # the reference is sure of a token: its logit is that much above every other
ROOT = Path(__file__).resolve().parent.parent


def real_texts() -> dict[str, str]:
    """What is on any machine that has the repository: prose, a licence, code."""
    paths = [ROOT / "README.md", ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    library = Path(json.__file__).parent.parent
    paths += [library / name for name in ("heapq.py", "argparse.py", "statistics.py", "json/decoder.py", Path(textwrap.__file__).name)]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def logits_of(llm: LLM, ids: list[int]) -> Tensor:
    """Logits [n, V] after each of `ids`, from one step of the engine."""
    assert llm.engine is not None
    decoder, seen = llm.engine.core.runner.decoder, []
    forward = decoder.forward

    def kept(*args: Any) -> Tensor:
        seen.append(forward(*args))
        return seen[-1]

    decoder.forward = kept  # type: ignore[method-assign]
    try:
        llm.reset_prefix_cache()
        llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    finally:
        del decoder.forward
    (hidden,) = seen
    assert len(hidden) == len(ids)
    with torch.inference_mode():
        return decoder.logits(hidden).float()


class Divergence:
    """Collects positions; `summary` says what they come to."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._same: list[Tensor] = []
        self._clear: list[Tensor] = []
        self._entropy: list[Tensor] = []

    def add(self, want: Tensor, got: Tensor, ids: list[int]) -> None:
        """Logits [n, V] of the reference and of the other after each of `ids`, which follow one another."""
        want_log, got_log = (logits.double().log_softmax(-1) for logits in (want, got))
        terms = want_log.exp() * (want_log - got_log)
        self._kl.append(terms.masked_fill(want_log == -torch.inf, 0.0).sum(-1))  # ids that nobody gives a token: -inf less -inf
        self._same.append(want.argmax(-1) == got.argmax(-1))
        top = want.topk(2, -1).values
        self._clear.append(top[:, 0] - top[:, 1] > CLEAR)
        following = torch.tensor(ids[1:])[:, None]
        self._entropy.append((want_log[:-1] - got_log[:-1]).gather(1, following)[:, 0])

    def summary(self) -> dict[str, float | int]:
        kl, same, clear = torch.cat(self._kl), torch.cat(self._same).double(), torch.cat(self._clear)
        return {
            "positions": len(kl), "kl_mean": float(kl.mean()), "kl_p99": float(kl.quantile(0.99)), "kl_max": float(kl.max()),
            "agreement": float(same.mean()), "agreement_where_clear": float(same[clear].mean()),
            "cross_entropy_change": float(torch.cat(self._entropy).mean()),
        }  # fmt: skip
