"""The half of a layer that has experts, in a fused decode step: norm, choice, experts and residual.

    router  ->  gate_up + activation  ->  down + residual

So up to two rows, of which each program chooses for itself (kernels/experts_few.py). Of more, and where a choice takes more
than the highest logits, a kernel chooses; of more there is a sort before the products and a sum behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headrace.fast_decode.epilogues import rms_factor_reference, runs_triton
from headrace.kernels.experts import choose, run_experts
from headrace.kernels.experts_lora import ExpertAdds
from headrace.kernels.experts_triton import Joining, Squares, add_experts
from headrace.model.config import ModelConfig


def takes_experts(config: ModelConfig) -> bool:
    """Whether a fused step runs the model's experts, if it has any: all of them here, and no shared one beside them."""
    experts = config.experts
    return experts is None or not (experts.shared_inner or len(experts.here) < experts.count)


def join_experts(
    config: ModelConfig, weights: Mapping[str, Any], x: Tensor, sums: Tensor, total: Tensor, normed: Tensor, norm: Tensor,
    norm_offset: float, adds: ExpertAdds | None = None,
) -> Tensor:  # fmt: skip
    """total [M, H] float32 += residual scale * what the experts make of RMSNorm(total), in place; `weights` are the layer's
    (`LayerWeights.more`), `adds` what adapters of some rows add.

    x [M, H] and sums [M, tiles] are what stands for RMSNorm(total), see epilogues.py; `normed`, and the sums that are returned,
    the same of the new total. `normed` may be x itself.
    """
    experts = config.experts
    assert experts is not None
    given: dict[str, Any] = {"count": len(experts.here), "first": experts.first, "activation": config.activation}
    given |= {"clamp": experts.clamp, "adds": adds}
    given |= {name: weights.get(f"experts_{name}") for name in ("gate_up_bias", "down_bias")}
    router, gate_up, down = weights["router"].data, weights["experts_gate_up"], weights["experts_down"]
    router_bias, correction = weights.get("router_bias"), weights.get("correction")
    if runs_triton(x):
        joining = Joining(total, normed, norm, config.residual_scale, norm_offset)
        return add_experts(
            x, Squares(sums, config.hidden_size, config.norm_eps), router, gate_up, down, experts, joining,
            router_bias=router_bias, correction=correction, **given,
        )  # fmt: skip
    rows = (x.float() * rms_factor_reference(sums, config.hidden_size, config.norm_eps)).to(x.dtype)
    ids, shares = choose(rows, router, router_bias, correction, experts)
    total += config.residual_scale * run_experts(rows, gate_up, down, ids, shares, **given).float()
    normed.copy_(total * (norm.float() + norm_offset))
    return total.square().sum(1, keepdim=True)
