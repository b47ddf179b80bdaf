"""A mixture of experts: which of them a token has, and what they make of it. References in torch, and the way to the kernels.

No capacity, no dropping: what becomes of a token depends on nothing but itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import experts_triton
from headrace.kernels.activation import Activation, act_mul_reference
from headrace.kernels.experts_lora import ExpertAdds, add_expert_reference
from headrace.kernels.experts_route import Routing
from headrace.kernels.launch import on_gpu
from headrace.kernels.narrow import NarrowMatrix

CLAMPED_SLOPE = 1.702  # of the sigmoid in the clamped activation


def route_reference(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """See `route`."""
    scores = logits.float()
    if routing.score != "chosen":
        scores = scores.sigmoid() if routing.score == "sigmoid" else scores.softmax(1)
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        groups = choice.unflatten(1, (routing.groups, -1))
        best = groups.topk(min(2, groups.shape[2]), 2).values.sum(2)
        taken = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _first(best, routing.groups_chosen), True)
        choice = groups.masked_fill(~taken.unsqueeze(2), -torch.inf).flatten(1)
    ids = _first(choice, routing.chosen)
    shares = scores.gather(1, ids)
    if routing.score == "chosen":
        shares = shares.softmax(1)
    if routing.renormalize:
        shares = shares / shares.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return ids.int(), shares * routing.scale


def _first(values: Tensor, count: int) -> Tensor:
    """Columns of the largest values of each row, of equal ones the first."""
    return values.argsort(dim=1, descending=True, stable=True)[:, :count]


def run_experts_reference(
    x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, ids: Tensor, shares: Tensor, *, count: int, first: int,
    activation: Activation, clamp: float = 0.0, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    adds: ExpertAdds | None = None,
) -> Tensor:  # fmt: skip
    """See `run_experts`; of matrices of floats."""
    rows, chosen = ids.shape
    wide, narrow = gate_up.data.unflatten(0, (count, -1)), down.data.unflatten(0, (count, -1))
    wide_bias, narrow_bias = (None if b is None else b.unflatten(0, (count, -1)) for b in (gate_up_bias, down_bias))
    given = torch.zeros(rows * chosen, wide.shape[2], dtype=torch.float32, device=x.device)
    local = (ids.flatten().long() - first).clamp(-1, count) % (count + 1)  # those of other ranks behind all
    pairs = local.argsort(stable=True).split(torch.bincount(local, minlength=count + 1).tolist())
    inputs = x.to(wide.dtype)
    for expert, own in enumerate(pairs[:count]):
        if len(own):
            both = F.linear(inputs[own // chosen], wide[expert], None if wide_bias is None else wide_bias[expert])
            if adds is not None:
                add_expert_reference(both, inputs[own // chosen], adds.gate_up, adds.numbers[own // chosen], expert, count)
            inner = act_mul_reference(both, activation) if not clamp else _clamped(both, clamp)
            out = F.linear(inner, narrow[expert], None if narrow_bias is None else narrow_bias[expert])
            if adds is not None:
                add_expert_reference(out, inner, adds.down, adds.numbers[own // chosen], expert, count)
            given[own] = out.float()
    parts = given.view(rows, chosen, given.shape[1])
    total = parts[:, 0] * shares[:, :1]
    for column in range(1, chosen):
        total += parts[:, column] * shares[:, column : column + 1]
    return total.to(x.dtype)


def _clamped(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * (CLAMPED_SLOPE * gate).sigmoid()


def route(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts of each row, the best first, and what share each has in its result.

    logits: [T, E] float32; correction: [E] float32, added to the scores for the choice alone. Of equals the one of the lower id
    is chosen. Returns ids [T, k] int32 and shares [T, k] float32.
    """
    return (experts_triton.route if on_gpu(logits) else route_reference)(logits, correction, routing)


def choose(
    x: Tensor, router: Tensor, router_bias: Tensor | None, correction: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """The router's logits, and of them the choice: x [T, H], router [E, H] and biases [E] float32 -> as `route`.

    Logits are float32 products, whatever x is in.
    """
    if on_gpu(x):
        return experts_triton.choose(x, router, router_bias, correction, routing)
    return route_reference(F.linear(x.float(), router, router_bias), correction, routing)


def run_experts(
    x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, ids: Tensor, shares: Tensor, *, count: int, first: int,
    activation: Activation, clamp: float = 0.0, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    adds: ExpertAdds | None = None,
) -> Tensor:  # fmt: skip
    """What the experts of each row make of it: the sum of their results, each times its share, in the order of `ids`' columns.

    x: [T, H]; ids, shares: as from `route`. Experts `first` to `first + count` are here, the others give nothing. gate_up:
    [count * 2 I, H], of each expert its I gate rows and then its I up rows; down: [count * H, I]; their biases: [count * 2 I]
    and [count * H]. clamp: as in ExpertsConfig. adds: what the rows' adapters add to both products. Returns
    [T, H] in x's dtype, of a sum in float32 that is rounded once; of many rows in 16 bits each expert's part is, too. No row
    depends on another.
    """
    return (experts_triton.run_experts if on_gpu(x) else run_experts_reference)(
        x, gate_up, down, ids, shares, count=count, first=first, activation=activation, clamp=clamp,
        gate_up_bias=gate_up_bias, down_bias=down_bias, adds=adds,
    )  # fmt: skip
