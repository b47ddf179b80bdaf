"""The limit of a workload on a machine: bytes over the measured copy bandwidth, operations over the measured matmul rate.

A decode step reads the weights once and the keys and values of all contexts; prefill computes every matrix product and the
lower triangle of attention. Embedding rows, norms and logits of single rows are left out: the limit is a little too good.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch

from headrace.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    bandwidth: float  # bytes per second: read plus written by a copy on a GPU, read by a sum on a CPU
    flops: float  # operations per second of a large matrix product in the model's dtype

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure_limits(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure this machine; takes about a second."""
    if device.type == "cuda":
        source = torch.empty(2**30, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        copy = _seconds(lambda: target.copy_(source), device)
        a = torch.randn(8192, 8192, device=device, dtype=dtype)
        product = _seconds(lambda: a @ a, device)
        return Machine(torch.cuda.get_device_name(device), 2 * source.numel() / copy, 2 * 8192**3 / product)
    numbers = torch.zeros(2**26, dtype=torch.int64).random_()
    read = _seconds(lambda: numbers.max(), device)
    a = torch.randn(1024, 1024, dtype=dtype)
    product = _seconds(lambda: a @ a, device)
    return Machine(f"CPU, {torch.get_num_threads()} threads", 8 * numbers.numel() / read, 2 * 1024**3 / product)


def _seconds(f, device: torch.device, repeats: int = 12) -> float:
    """Median time of f()."""
    times = []
    for i in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        f()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= 2:
            times.append(time.perf_counter() - began)
    return sorted(times)[repeats // 2]


class Limits:
    """Limits of one model on one machine."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, machine: Machine):
        self.machine, self.model, self.item = machine, model, dtype.itemsize
        layer = model.hidden_size * (2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate_size)
        self.dense = model.num_layers * layer  # parameters in matrices, without embedding and head
        self.read = self.dense + model.vocab_size * model.hidden_size  # parameters that a decode step reads
        self.kv_bytes = 2 * model.num_layers * model.kv_size * self.item  # of one token

    def decode_bytes(self, context_tokens: int) -> float:
        return self.item * self.read + context_tokens * self.kv_bytes

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """One step of `batch` sequences with `context_tokens` tokens in all."""
        weights = max(self.item * self.read / self.machine.bandwidth, 2 * self.read * batch / self.machine.flops)
        return weights + context_tokens * self.kv_bytes / self.machine.bandwidth

    def prefill_flops(self, length: int) -> float:
        return 2 * self.dense * length + 2 * length**2 * self.model.q_size * self.model.num_layers

    def prefill_seconds(self, length: int) -> float:
        return self.prefill_flops(length) / self.machine.flops

    def offline(self, inputs: list[int], outputs: list[int]) -> float:
        """All prompts at once, every step with all that still run."""
        total = sum(self.prefill_seconds(n) for n in inputs)
        for step in range(1, max(outputs)):
            running = [n + step for n, out in zip(inputs, outputs, strict=True) if out > step]
            total += self.decode_seconds(len(running), sum(running))
        return total
