"""The limit of a workload on a machine: bytes over the measured copy bandwidth, operations over the measured matmul rate.

A decode step reads the weights once and the keys and values of all contexts; prefill computes every matrix product and the
lower triangle of attention, and reads the weights once for all prompts together. A layer with a window sees no more than that,
a delta net neither keys nor values. Embedding rows, norms, states of delta nets and logits of single rows are left out: the
limit is a little too good.
Of experts those are read that some row chose: with k of E for each of n rows a share of 1 - (1 - k / E)^n is expected, if every
expert is as likely as any other. A row is multiplied by its own k.
With `--quantization`, or from a quantized file whose matrices are all of one kind, the layers' matrices are read in that many
bytes, and with the option a head of its own in one. Products count at the rate of the model's dtype; those of the layers with
weights in FP8, on a card that multiplies FP8 by FP8, at the rate of that, whatever multiplies them. The native step of a CPU
knows what it reads, whatever the formats are; its products count at the rate of 8-bit integers, of bfloat16 or of float32,
whichever its weights are about as wide as.

Of several cards each reads and computes its part, and what they add up, twice a layer and once for the embedding, passes
their links: 2 (N - 1) / N of the rows out of each card, at the rate of a large copy to another card. That a sum takes some
time however small it is, is left out too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace

import torch

from headrace.cache.kv_cache import KVCache
from headrace.cache.layer_shape import LayerShape
from headrace.model.checkpoint import MADE
from headrace.model.config import ModelConfig
from headrace.model.families import weight_plan
from headrace.model.formats.scheme import Quantization
from headrace.worker.reading import Layers, Reading

ROUNDS, ROUND_RUNS = 5, 6  # of each measurement
FP8 = torch.float8_e4m3fn
GPU_WIDTH = 8192  # of the product on a GPU: rows, columns and what is summed
SUSTAINED_RUNS = 8  # of the product, one behind the other
DISAGREE = 0.03  # rounds that differ by more than this share measured something else as well


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    bandwidth: float  # bytes per second: read plus written by a copy on a GPU, read by a sum on a CPU
    flops: float  # operations per second of a large matrix product in what the model's are made in
    bandwidth_spread: float = 0.0  # how far the slowest round lies below the best, as a share of it
    flops_spread: float = 0.0
    cards: int = 1  # that work on one step, each with the figures above
    link: float = 0.0  # bytes per second out of a card to another one
    sustained_flops: float = 0.0  # that it keeps up for a second; 0: not measured
    fp8_flops: float = 0.0  # both for FP8 by FP8; 0: it has none, or none was needed
    sustained_fp8_flops: float = 0.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def warnings(self) -> list[str]:
        """What makes the limits doubtful: a machine that was busy, or does not keep its clock."""
        return [
            f"measurements of the machine's {what} differ by {100 * spread:.0f} %: the best one counts as the limit"
            for what, spread in (("bandwidth", self.bandwidth_spread), ("arithmetic", self.flops_spread))
            if spread > DISAGREE
        ]


def measure_limits(device: torch.device, dtype: torch.dtype, cards: int = 1, fp8: bool = False) -> Machine:
    """Measure this machine, or one of its `cards`, in some rounds of which the best one counts; takes a few seconds. `fp8`: its
    rate of FP8 by FP8, too."""
    if device.type == "cuda":
        name, size, width = torch.cuda.get_device_name(device), 2**30, GPU_WIDTH
        source = torch.empty(size, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        moved, move = 2 * size, lambda: target.copy_(source)
    else:
        name, size, width = f"CPU, {torch.get_num_threads()} threads", 2**29, 1024
        numbers = torch.zeros(size // 8, dtype=torch.int64).random_()
        moved, move = size, lambda: numbers.max()
    multiply = product(device, dtype, width)
    rounds = [(_seconds(move, device), _seconds(multiply, device)) for _ in range(ROUNDS)]
    (moving, move_spread), (took, product_spread) = (best_and_spread(times) for times in zip(*rounds, strict=True))
    link = link_rate(device) if cards > 1 and device.type == "cuda" else 0.0
    machine = Machine(name, moved / moving, 2 * width**3 / took, move_spread, product_spread, cards, link)
    if fp8:
        multiply = product(device, FP8, width)
        machine = replace(machine, fp8_flops=2 * width**3 / min(_seconds(multiply, device) for _ in range(ROUNDS)))
    return machine


def multiplies_fp8(device: torch.device, quantization: str | None) -> bool:
    """Whether it can multiply weights that are kept so by FP8."""
    return device.type == "cuda" and quantization == "fp8" and torch.cuda.get_device_capability(device) >= (8, 9)


def product(device: torch.device, dtype: torch.dtype, width: int) -> Callable[[], object]:
    """One of two matrices of so many rows and columns."""
    a = torch.randn(width, width, device=device).to(dtype)
    if dtype == FP8:
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return lambda: (torch._int_mm if dtype == torch.int8 else torch.mm)(a, a)


def sustained_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the product that `measure_limits` times, in the second half of a second of them: by then a card
    at its power limit has lowered its clock."""
    multiply = product(device, dtype, GPU_WIDTH)
    began, rates = time.perf_counter(), []
    while (now := time.perf_counter()) - began < 1.0:
        for _ in range(SUSTAINED_RUNS):
            multiply()
        torch.cuda.synchronize(device)
        rates.append(SUSTAINED_RUNS * 2 * GPU_WIDTH**3 / (time.perf_counter() - now))
    return statistics.median(rates[len(rates) // 2 :])


def link_rate(device: torch.device) -> float:
    """Bytes per second of a large copy to another card."""
    other = torch.device("cuda", 1 if device.index in (None, 0) else 0)
    source = torch.empty(2**28, dtype=torch.uint8, device=device).random_()
    target = torch.empty(2**28, dtype=torch.uint8, device=other)
    return len(source) / min(_seconds(lambda: target.copy_(source), device) for _ in range(ROUNDS))


def best_and_spread(seconds: Sequence[float]) -> tuple[float, float]:
    """The shortest time, and the share of the best rate that the longest one misses."""
    return min(seconds), 1.0 - min(seconds) / max(seconds)


def _seconds(f: Callable[[], object], device: torch.device) -> float:
    """Median time of f() in one round, after one call that does not count."""
    times = []
    for _ in range(ROUND_RUNS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        f()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[ROUND_RUNS // 2]


# Of a weight, with its part of its group's scale and of int4 zero point. mxfp4 is of experts alone.
NARROW_BYTES = {
    "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 3 / 128, "mxfp4": 0.5 + 2 / 32, "fp4": 0.5 + 2 / 32, "nvfp4": 0.5 + 4 / 16,
}  # fmt: skip
_HELD_AS = {"fp8": "fp8", "mxfp4": "fp4", "nvfp4": "nvfp4"}  # of a scheme's format; the others are integers


def held_as(stored: Quantization | None, dummy: bool) -> str | None:
    """Of NARROW_BYTES, what a quantized file's matrices are on a card, if all are alike; random ones are MXFP4 or floats."""
    if stored is None or (dummy and stored.method != "mxfp4"):
        return None
    if stored.method == "mxfp4":
        return "mxfp4"
    kinds = {_HELD_AS.get(scheme.format, f"int{scheme.bits}") for scheme in stored.schemes}
    return kinds.pop() if len(kinds) == 1 else None


@dataclass(frozen=True, slots=True)
class Parameters:
    """Of the layers' matrices, of all layers."""

    plain: int  # that every row meets
    exact: int  # of these, held in float32
    experts: int  # of all experts
    share: float  # of the experts that a row has

    @property
    def of_row(self) -> float:
        """That a row is multiplied by."""
        return self.plain + self.share * self.experts

    def touched(self, rows: int) -> float:
        """Of the experts, those that some of so many rows chose; see above."""
        return self.experts * (1 - (1 - self.share) ** rows)

    def layer_bytes(self, rows: int, item: float, of_expert: float) -> float:
        """That so many rows read, of so many bytes for a number."""
        return (self.plain - self.exact) * item + self.touched(rows) * of_expert + 4 * self.exact


def parameters_of(model: ModelConfig) -> Parameters:
    """As the loader's plan has them."""
    plain = exact = experts = 0
    for spec in weight_plan(model):
        if len(spec.shape) == 2 and spec.target.startswith("layers."):
            count, held = math.prod(spec.shape), ".experts_" in spec.target
            plain, experts = plain + count * (not held), experts + count * held
            exact += count * spec.exact
    share = 0.0 if model.experts is None else model.experts.chosen / model.experts.count
    return Parameters(plain, exact, experts, share)


def numbers_of(model: ModelConfig) -> int:
    """That a step reads: of the layers' matrices and of the head."""
    parameters = parameters_of(model)
    return parameters.plain + parameters.experts + model.vocab_size * model.hidden_size


def dtype_of_products(model: ModelConfig, dtype: torch.dtype, reading: Reading | None) -> torch.dtype:
    """`dtype`, or what the native step of a CPU multiplies in: see above."""
    if reading is None:
        return dtype
    width = reading.weights / numbers_of(model)  # 1.06 bytes in Q8_0
    return torch.int8 if width < 1.9 else torch.bfloat16 if width < 3.8 else torch.float32


def token_bytes(model: ModelConfig, dtype: torch.dtype) -> dict[int, int]:
    """Of the keys and values that are read of a token, by the window (0: none) of the layers that read them."""
    found: dict[int, list[LayerShape]] = {}
    for layer in range(model.num_layers):
        source = layer if model.per_layer is None else model.per_layer.sizes[layer].source
        found.setdefault(model.window(layer), []).append(model.kv_shapes[source])
    return {window: KVCache.bytes_per_block(Layers(tuple(shapes)), 1, dtype) for window, shapes in found.items()}


def score_columns(model: ModelConfig) -> dict[int, int]:
    """Columns of all heads that a query meets in a key, and in its value, on average, of all layers with attention by their
    window: of latent attention those of heads, which need not be made, but are fewer than a latent's."""
    found: dict[int, int] = {}
    for layer in range(model.num_layers):
        if model.delta is None or not model.delta.layers[layer]:
            of, latent = model.at(layer), model.latent
            columns = of.q_size if latent is None else of.num_heads * (latent.query + latent.value) // 2
            found[model.window(layer)] = found.get(model.window(layer), 0) + columns
    return found


def seen(length: int, window: int) -> int:
    """Tokens back to the beginning or as far as a window goes."""
    return min(length, window) if window else length


def pairs(length: int, window: int) -> float:
    """Of queries and keys in a prompt's attention, without the diagonal's other half."""
    reach = seen(length, window)
    return reach * length - reach**2 / 2


class Limits:
    """Limits of one model on one machine; `quantization` of its layers' matrices, mxfp4 of experts; keys and values in FP8;
    `reading` of the native step of a CPU; `own_head`: it is not the embedding once more."""

    def __init__(
        self, model: ModelConfig, dtype: torch.dtype, machine: Machine, quantization: str | None = None,
        fp8_cache: bool = False, reading: Reading | None = None, own_head: bool = False,
    ):  # fmt: skip
        self.machine, self.model = machine, model
        self.item: float = dtype.itemsize
        self.parameters = parameters_of(model)
        self.head = model.vocab_size * model.hidden_size  # parameters of it
        self.expert_item = NARROW_BYTES.get(quantization or "", self.item)  # bytes of a parameter of experts
        self.layer_item = self.item if quantization == "mxfp4" else self.expert_item  # and of the layers' other matrices
        self.head_item = 1.0 if own_head and quantization in MADE else self.item
        self.token_bytes = token_bytes(model, FP8 if fp8_cache else dtype)
        self.score_columns = score_columns(model)
        if reading is not None:
            self.item = self.expert_item = self.layer_item = self.head_item = reading.weights / numbers_of(model)
            self.token_bytes = {0: reading.token}
        self.cards, self.fp8 = machine.cards, quantization == "fp8" and machine.fp8_flops > 0
        self.kv_part = 1 / min(self.cards, model.num_kv_heads)  # of it that a card has

    def sustained(self) -> Limits | None:
        """The limits by the rate that the machine keeps up, if that was measured."""
        machine, other = self.machine, copy(self)
        if not machine.sustained_flops or (self.fp8 and not machine.sustained_fp8_flops):
            return None
        other.machine = replace(machine, flops=machine.sustained_flops, fp8_flops=machine.sustained_fp8_flops)
        return other

    def product_seconds(self, rows: int, sampled: int = 0, scores: float = 0.0) -> float:
        """Of all cards: so many rows times the layers' matrices, `sampled` ones times the head, and `scores` operations of
        attention."""
        layers = self.machine.fp8_flops if self.fp8 else self.machine.flops
        return 2 * self.parameters.of_row * rows / layers + (2 * self.head * sampled + scores) / self.machine.flops

    def weight_bytes(self, rows: int) -> float:
        """That a step of so many rows reads, of all cards."""
        return self.head_item * self.head + self.parameters.layer_bytes(rows, self.layer_item, self.expert_item)

    def cache_bytes(self, contexts: Sequence[int]) -> float:
        """That one card reads for sequences of so many tokens each."""
        tokens = sum(n * sum(seen(context, window) for context in contexts) for window, n in self.token_bytes.items())
        return self.kv_part * tokens

    def decode_bytes(self, contexts: Sequence[int]) -> float:
        """Of one card."""
        return self.weight_bytes(len(contexts)) / self.cards + self.cache_bytes(contexts)

    def decode_seconds(self, contexts: Sequence[int]) -> float:
        """One step of sequences of so many tokens each."""
        rows = len(contexts)
        weights = max(self.weight_bytes(rows) / self.machine.bandwidth, self.product_seconds(rows, rows)) / self.cards
        return weights + self.cache_bytes(contexts) / self.machine.bandwidth + self.sum_seconds(rows)

    def sum_seconds(self, rows: int) -> float:
        """What the cards add up in one pass over so many rows."""
        if not self.machine.link:
            return 0.0
        sums = 2 * self.model.num_layers + 1
        moved = 2 * (self.cards - 1) / self.cards * rows * self.model.hidden_size * self.item
        return sums * moved / self.machine.link

    def score_flops(self, length: int) -> float:
        return sum(4 * columns * pairs(length, window) for window, columns in self.score_columns.items())

    def prefill_flops(self, length: int) -> float:
        return 2 * self.parameters.of_row * length + self.score_flops(length)

    def prefill_seconds(self, length: int) -> float:
        return self.prompts_seconds([length])

    def prompts_seconds(self, lengths: list[int]) -> float:
        """Of prompts that come together."""
        rows, computed = sum(lengths), self.product_seconds(sum(lengths), scores=sum(map(self.score_flops, lengths)))
        read = self.parameters.layer_bytes(rows, self.layer_item, self.expert_item) / self.machine.bandwidth
        return max(computed, read) / self.cards + self.sum_seconds(rows)

    def mixed_seconds(self, contexts: Sequence[int], length: int) -> float:
        """One step of sequences of so many tokens each and of a new prompt: what it reads or what it computes, whichever takes
        longer. All rows share what is read of the weights; the head computes those that sample."""
        decodes, rows = len(contexts), len(contexts) + length
        computed = self.product_seconds(rows, decodes + 1, self.score_flops(length)) / self.cards
        read = self.weight_bytes(rows) / self.cards + self.cache_bytes(contexts)
        return max(read / self.machine.bandwidth, computed) + self.sum_seconds(rows)

    def offline(self, inputs: list[int], outputs: list[int]) -> float:
        """All prompts at once, every step with all that still run."""
        total = self.prompts_seconds(inputs)
        for step in range(1, max(outputs)):
            total += self.decode_seconds([n + step for n, out in zip(inputs, outputs, strict=True) if out > step])
        return total
