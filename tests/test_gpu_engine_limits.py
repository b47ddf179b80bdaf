"""The engine at its limits on a card: 128k tokens of context, a cache past 2^31 elements, the largest requests in little memory."""

from __future__ import annotations

import gc
import random
import time

import pytest
import torch
from torch import Tensor

from engine_driver import Result, assert_all_same, complete, make_core, make_requests, run, take
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from model_harness import load_tiny
from tiny_models import write_shape, write_tiny

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
CONTEXT = 131072
FAR_BLOCKS = 2**31 // (64 * 2 * 64) + 64  # of 64 tokens, 2 kv heads and a head_dim of 64: past 2^31 elements a layer

# the largest legal requests
GIB = 1 << 30
BUDGET = 5 * GIB  # bytes of the engine on a card that is made to look small
DRIVER = GIB // 2  # of them are the driver's, outside of torch's allocator
SEQS, LENGTH, BATCHED = 128, 4096, 16384


# ---------------------------------------------------------------- long contexts


def test_128k_tokens_equal_a_dense_reference(tmp_path):
    """float32, chunked prefill and decode, every position's logprob; attention is so sharp that each key is somebody's only
    one: a block that is lost, doubled or misplaced changes whole rows."""
    path = write_tiny(
        "llama", tmp_path, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=CONTEXT, initializer_range=0.2,
        tie_word_embeddings=False,
    )  # fmt: skip
    core = make_core(
        str(path), device=DEVICE, max_model_len=CONTEXT, max_num_seqs=2, block_size=64, num_kv_blocks=CONTEXT // 64,
        max_num_batched_tokens=7000, debug_checks=False,
    )  # fmt: skip
    rng = random.Random(2)
    prompt = [rng.randrange(core.vocab_size) for _ in range(CONTEXT - 8)]
    params = complete(SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, prompt_logprobs=0))
    began = time.perf_counter()
    result = run(core, [EngineRequest("long", prompt, params, 0)])["long"]
    took = time.perf_counter() - began
    assert len(result.ids) == 8 and result.finish_reason == "length"
    got = torch.tensor([entry.logprobs[0] for entry in result.prompt_logprobs[1:]] + result.logprobs)
    ids = torch.tensor(prompt + result.ids, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    want, best = dense_llama(path, ids)
    assert torch.cuda.max_memory_reserved() < 10 * GIB, "others are on the card"
    error = (got - want).abs()
    print(f"{CONTEXT} tokens in {took:.1f} s; logprobs off by {float(error.max()):.2e}, mean {float(error.mean()):.2e}")
    worst = int(error.argmax())
    assert error.max() < 2e-3, f"position {worst + 1}: {float(got[worst])} instead of {float(want[worst])}"
    assert error.mean() < 2e-5, f"mean error {float(error.mean())}"
    gap = best[-8:] - got[-8:]  # greedy took the likeliest, or one as likely
    assert (gap < 1e-3).all(), f"tokens less likely than the best by {gap.tolist()}"


def dense_llama(path, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logprob of each of ids[1:] after those before it, and of the likeliest token there; float32, 256 rows at a time, each with all
    keys: of products that grow from one to the next torch's allocator keeps all, until the card is full and others fail."""
    config, weights = load_tiny(path)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    length, device = len(ids), ids.device
    # in float32, as models are trained, and on the CPU: the last bit of a frequency is 0.01 radians at 128k
    angle = torch.outer(torch.arange(length).float(), 1.0 / config.rope.theta ** (torch.arange(0, dim, 2) / dim))
    cos, sin = (torch.cat((f, f), 1)[:, None].to(device) for f in (angle.cos(), angle.sin()))

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * weight.to(device)

    x = weights.embedding.to(device)[ids]
    for layer in weights.layers:
        qkv = norm(x, layer.input_norm) @ layer.qkv.data.to(device).T
        q, k, v = (part.unflatten(1, (-1, dim)) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
        q, k = rotated(q), rotated(k)
        out = torch.empty_like(q)
        for row in range(0, length, 256):
            stop = min(length, row + 256)
            grouped = q[row:stop].unflatten(1, (kv_heads, heads // kv_heads))
            scores = torch.einsum("qkgd,skd->kgqs", grouped, k) * dim**-0.5
            late = torch.arange(length, device=device)[None] > torch.arange(row, stop, device=device)[:, None]
            weight = scores.masked_fill_(late, float("-inf")).softmax(-1)
            out[row:stop] = torch.einsum("kgqs,skd->qkgd", weight, v).flatten(1, 2)
        x = x + out.flatten(1) @ layer.o.data.to(device).T
        gate, up = (norm(x, layer.mlp_norm) @ layer.gate_up.data.to(device).T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.data.to(device).T
    logprobs = (norm(x[:-1], weights.final_norm) @ weights.lm_head.data.to(device).T).log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[:, 0].cpu(), logprobs.max(-1).values.cpu()


def test_a_cache_past_2_31_elements_serves_its_last_blocks(tmp_path):
    """float32, the requests hold only blocks at the end of the cache; captured and eager say what the CPU says."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    path = str(write_tiny("llama", tmp_path, **shape))
    cpu = make_core(path)
    requests = make_requests(4, 10, cpu.vocab_size)
    want = run(cpu, requests)
    for eager in (False, True):
        core = make_core(path, device=DEVICE, block_size=64, num_kv_blocks=FAR_BLOCKS, enforce_eager=eager, debug_checks=False)
        core.scheduler.pool.take(FAR_BLOCKS - 32)  # all but the last ones are in use
        results = {r.id: Result() for r in requests}
        serve(core, requests, results)
        assert_all_same(results, want, f"eager {eager}")
        keys = core.runner.kv.k[0]
        assert keys[-32:].any() and not keys[:32].any(), "the wrong blocks were written"
        del core, keys
        gc.collect()
        torch.cuda.empty_cache()


def serve(core: EngineCore, requests: list[EngineRequest], results: dict[str, Result]) -> None:
    for request in requests:
        core.add(request)
    while core.has_work:
        for news in core.step():
            take(results[news.id], news)


# ---------------------------------------------------------------- memory


@pytest.fixture
def small_card(monkeypatch):
    """A card of little memory: the plan is told so, and the allocator gives no more than the plan may use."""
    gc.collect()
    torch.cuda.empty_cache()
    held, real = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
    total = int(BUDGET / 0.9) + 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total - torch.cuda.memory_reserved(), total))
    torch.cuda.set_per_process_memory_fraction((held + BUDGET - DRIVER) / real)
    torch.cuda.reset_peak_memory_stats()
    yield lambda: (torch.cuda.max_memory_reserved() - held) / GIB
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_no_legal_request_runs_out_of_memory(small_card, tmp_path):
    """A tight limit, then the largest steps that requests can ask for, one kind after the other and all graphs captured."""
    core = make_core(
        write_shape(tmp_path, num_hidden_layers=4), device=DEVICE, dtype="bfloat16", load_format="dummy",
        skip_tokenizer_init=True, max_num_seqs=SEQS, max_model_len=LENGTH, max_num_batched_tokens=BATCHED,
        block_size=None, num_kv_blocks=None, gpu_memory_utilization=0.9, debug_checks=False,
    )  # fmt: skip
    blocks = core.scheduler.pool.num_blocks
    print(f"planned {BUDGET / GIB:.2f} GiB with {blocks} blocks; after start {small_card():.2f} GiB are reserved")
    assert blocks * core.runner.kv.block_size < SEQS * LENGTH, "the memory is meant to be tight"
    for name, requests in largest_requests(core.vocab_size).items():
        began = time.perf_counter()
        ends = dict.fromkeys((r.id for r in requests), "")
        for request in requests:
            core.add(request)
        while core.has_work:
            for news in core.step():  # the news are dropped: logprobs of all ids are large on the host
                ends[news.id] = news.finish_reason or ends[news.id]
        assert set(ends.values()) == {"length"}, f"{name}: {set(ends.values())}"
        while core.idle():
            pass
        print(f"{name}: {time.perf_counter() - began:.1f} s, peak {small_card():.2f} GiB")
    peak = small_card()
    assert peak <= (BUDGET - DRIVER) / GIB, f"{peak:.2f} GiB reserved, {(BUDGET - DRIVER) / GIB:.2f} allowed"


def largest_requests(vocab: int) -> dict[str, list[EngineRequest]]:
    """Each list fills a step in another way: rows of the prefill, slots, logits, whatever is kept for each row."""
    rng = random.Random(0)

    def some(count: int, length: int, **settings) -> list[EngineRequest]:
        params = complete(SamplingParams(ignore_eos=True, **settings))
        base = [rng.randrange(vocab) for _ in range(length - 1)]
        return [EngineRequest(f"r{i}", [i, *base], params, i) for i in range(count)]

    edits = {
        "temperature": 1.0, "top_p": 0.9, "top_k": 1000, "min_p": 1e-4, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "logit_bias": dict.fromkeys(range(0, vocab, vocab // 300), 1.0),
        "allowed_token_ids": list(range(0, vocab, 2)), "stop_token_ids": list(range(100)), "min_tokens": 3,
    }  # fmt: skip
    return {
        "every slot with a full context": some(SEQS, LENGTH - 4, temperature=0.0, max_tokens=4),
        "every slot, sampled": some(SEQS, 40, temperature=0.8, max_tokens=4),
        "every slot, filtered": some(SEQS, 40, temperature=0.8, top_k=50, top_p=0.9, max_tokens=4),
        "every slot with every edit": some(SEQS, 40, max_tokens=3, **edits),
        "every slot with 100 logprobs": some(SEQS, 40, max_tokens=3, logprobs=100, **edits),
        "every slot with the logprobs of all ids": some(SEQS, 40, max_tokens=3, logprobs=-1, **edits),
        "logprobs of the longest prompts": some(BATCHED // LENGTH, LENGTH - 2, max_tokens=2, logprobs=100, prompt_logprobs=100),
    }
