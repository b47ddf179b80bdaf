"""When two engines agree up to rounding, over whole rows of logprobs: for bfloat16, and for cards."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine_driver import Result, dense
from headrace.engine.messages import EngineRequest

# Of the norm of a row of logprobs around its mean. The CPU's own bfloat16 is off its float32 by at most 0.014 to 0.067 of it,
# by family, on the tiny models of these tests; but Gemma 4's, by 0.14 to 0.19, as Transformers' is. A wrong key, mask or
# position gives 0.3 and more.
BF16_TOLERANCE = 0.1


def with_rows(requests: list[EngineRequest]) -> list[EngineRequest]:
    """The same requests, asking for the logprobs of the whole vocabulary at every step."""
    replace = msgspec.structs.replace
    return [replace(r, params=replace(r.params, logprobs=-1)) for r in requests]


def row_error(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| relative to |want| around its mean; NaN is an error without bounds."""
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return float("inf")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want - want.mean()))


@dataclass
class Agreement:
    """What was seen in a comparison, for the message of a test that fails."""

    worst: float = 0.0  # row error
    total: float = 0.0  # of the row errors
    compared: int = 0  # rows
    same: int = 0  # requests that are equal to their end
    problems: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.compared)

    def __str__(self) -> str:
        shown = "\n  ".join(self.problems[:20])
        return (
            f"row errors: worst {self.worst:.4f}, mean {self.mean:.4f} of {self.compared}; "
            f"{self.same} requests equal to the end; problems:\n  {shown}"
        )


def compare(got: dict[str, Result], want: dict[str, Result], tolerance: float, what: str = "") -> Agreement:
    """Equal until the first near-tie: rows within `tolerance` up to and with the place of the first other token.

    There the logits before the choice are the same but for rounding, so the choice lay within rounding too: the random number
    is counted, not drawn. What comes after is another text. Requests without a different token must end alike.
    """
    seen = Agreement()
    for name, b in want.items():
        a = got[name]
        rows = a.rows, b.rows
        first = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y), None)
        stop = min(len(a.ids), len(b.ids)) if first is None else first + 1
        errors = [row_error(x, y) for x, y in zip(*(part[:stop] for part in rows), strict=True)]
        prompts = ((r.prompt_logprobs or [])[1:] for r in (a, b))
        errors += [row_error(dense(x), dense(y)) for x, y in zip(*prompts, strict=True)]
        seen.compared += len(errors)
        seen.worst, seen.total = max([seen.worst, *errors]), seen.total + sum(errors)
        if len(rows[0]) < stop:
            seen.problems.append(f"{what} {name}: {len(rows[0])} rows of logprobs for {stop} tokens")
        if errors and max(errors) > tolerance:
            at = int(np.argmax(errors))
            where = f"row {at}" if at < stop else f"row {at - stop} of the prompt"
            seen.problems.append(f"{what} {name}: {where} is off by {errors[at]:.4f}, allowed {tolerance}")
        if first is None:
            seen.same += 1
            ends = [(len(r.ids), r.finish_reason, r.stop_reason) for r in (a, b)]
            if ends[0] != ends[1]:
                seen.problems.append(f"{what} {name}: tokens and end {ends[0]}, wanted {ends[1]}")
    return seen
