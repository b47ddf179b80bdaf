"""What a model's experts are: how many, how wide, how a token chooses among them, and what lies beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# softmax: over all experts, before the choice; sigmoid: of each; chosen: softmax over the chosen ones' logits
Score = Literal["softmax", "sigmoid", "chosen"]
MOST_EXPERTS, MOST_IN_ALL = 4096, 1 << 18  # of a layer, of a model


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a layer, alike in all layers that have some. Of equals the one of the lower id is chosen."""

    count: int
    chosen: int  # of a token
    inner: int  # columns between an expert's two products
    score: Score = "softmax"
    renormalize: bool = False  # the chosen ones' shares add up to 1
    scale: float = 1.0  # of the shares, at the end
    correction: bool = False  # a bias of the scores, for the choice alone
    groups: int = 1  # of neighbours: those with the highest sums of their best two scores are chosen from
    groups_chosen: int = 1
    shared_inner: int = 0  # of a dense MLP that every token has as well; 0: none
    shared_gate: bool = False  # its result is multiplied by a sigmoid of the token
    router_bias: bool = False
    biases: bool = False  # the experts' own
    # 0: none; else gate is at most this, up within it on both sides, and (up + 1) * gate * sigmoid(1.702 gate) (gpt-oss)
    clamp: float = 0.0
    layers: tuple[bool, ...] = ()  # which have experts, the others an MLP; () = all
    first: int = 0  # of the experts that are held here: all, but for a rank of several
    held: int = 0  # how many; 0 = all

    def at(self, layer: int) -> bool:
        return not self.layers or self.layers[layer]

    @property
    def here(self) -> range:
        return range(self.first, self.first + (self.held or self.count))

    def row_elements(self, hidden: int) -> int:
        """Numbers of a row between the router and the residual stream: logits; of each that is chosen, what lies between its
        products, and its result in float32; while one is computed, a copy of the row and the products."""
        once = hidden + 3 * max(self.inner, self.shared_inner)
        return 2 * self.count + self.chosen * (self.inner + 2 * hidden) + once
