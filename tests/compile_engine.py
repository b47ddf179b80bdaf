"""Run an engine for a card that is not there: which kernels are compiled, and how often with the same constants.

Requests come and go, so that steps have any number of prompts, decodes and rows. Where a tensor begins, or what a number is
divisible by, must not make another form of a kernel: that would be compiled in the middle of serving. Prints JSON: kernel ->
for each of its constants and types how many forms there are.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import compile_ahead
import headrace.engine.forwards as forwards
from engine_driver import complete, make_core
from headrace.attention.triton_backend import TritonAttention
from headrace.engine.messages import EngineRequest
from headrace.kernels import launch
from headrace.sampling import sampler
from headrace.sampling.params import SamplingParams
from headrace.worker.batch_state import ALIGN
from tiny_models import write_shape

STEPS = 70
forms: Counter = Counter()
compile_kernel = JITFunction._do_compile


def note(self: JITFunction, key, signature, device, constants, *rest):
    """Stands for Triton's compilation: what it is asked for, apart from alignment and divisibility."""
    declared = {p.name: constants.get((p.num,)) for p in self.params if p.is_constexpr}
    types = [kind for kind in signature.values() if kind.startswith("*")]
    forms[self.fn.__name__, str(declared), str(types)] += 1
    return compile_kernel(self, key, signature, device, constants, *rest)


def choose(logits: Tensor, inputs: sampler.SampleInputs) -> tuple[Tensor, Tensor]:
    ids, failed = sampler._choose_on_gpu(logits, inputs)
    return ids.zero_(), failed.zero_()  # nothing has run


def main(directory: str) -> None:
    path = write_shape(
        Path(directory), vocab_size=8192, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256,
    )  # fmt: skip
    forwards.select_attention = lambda name, model, device: (TritonAttention(model, device), "the one that is tested")
    core = make_core(
        path, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=64, max_model_len=2304,
        block_size=64, max_num_batched_tokens=2048, num_kv_blocks=1200, enforce_eager=True,
    )  # fmt: skip
    core.runner.state.align = ALIGN  # as on a card
    compile_ahead.install(90)
    compile_ahead.replace_everywhere(launch.on_gpu, lambda tensor: True)
    launch._KNOWN = False  # a compiled form is not launched again
    sampler.choose = choose
    JITFunction._do_compile = note  # type: ignore[method-assign]
    rng = random.Random(1)
    for step in range(STEPS):
        for i in range(rng.randint(1, 6) if core.scheduler.num_waiting < 3 else 0):
            settings = complete(SamplingParams(
                temperature=rng.choice([0.0, 0.6]), top_p=rng.choice([1.0, 0.9]), max_tokens=rng.randint(1, 40), ignore_eos=True
            ))  # fmt: skip
            prompt = [rng.randrange(8000) for _ in range(rng.randint(5, 900))]
            core.add(EngineRequest(f"{step}.{i}", prompt, settings, i))
        core.step()
    found: dict[str, list[int]] = {}
    for (name, _, _), count in forms.items():
        found.setdefault(name, []).append(count)
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
