"""Every kind of product with adapters against the same model with them merged in, as logits: of one rank and of parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adapters import ALL, merged, write_adapter
from fast_decode_cases import CONFIGS, decode_batch, random_weights
from headrace.attention.torch_backend import TorchAttention
from headrace.config import EngineConfig
from headrace.fast_decode.decoder import FastDecoder
from headrace.fast_decode.epilogues import runs_triton
from headrace.fast_decode.forward import FastDecode
from headrace.kernels.lora import new_pair
from headrace.kernels.lora_product import shrink_few
from headrace.lora import pool as lora_pool
from headrace.lora.format import examine
from headrace.lora.latent import HeadAdds
from headrace.lora.pool import AdapterPool
from headrace.lora.targets import modules_of, num_bytes
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.decoder import Decoder
from headrace.model.families import model_config_from_hf
from headrace.model.linear import make_linear
from headrace.model.loader import load_model
from headrace.model.shard import WHOLE
from model_harness import Sequences
from quantized_checkpoints import FORMATS, write_quantized
from rank_threads import ThreadGroup, run_ranks
from test_fast_decode import TABLES
from test_model_families import tokens
from tiny_models import write_tiny

CPU = torch.device("cpu")
FUSED = ("qkv_proj", "gate_up_proj", "c_fc", "c_proj")
LATENT = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "in_proj_qkvz", "in_proj_ba")
# fused, rotated pairs as neighbours, norms of whole projections, no gate, side by side, experts; latent attention with queries of
# the hidden state and of a latent, shared experts; gated delta nets, by key head
VARIANTS = {
    "phi3": 2, "ernie4_5": 2, "olmo2": 2, "starcoder2": 2, "cohere2": 1, "qwen3_moe": 1, "gemma4": 1, "deepseek_v2": 1,
    "glm4_moe_lite": 2, "qwen3_5_moe": 2, "qwen3_next": 1,
}  # fmt: skip


class Always(AdapterPool):
    """Whatever comes has adapters: of the slots 0, 1, 2 the first, none, the second."""

    def begin(self, batch, wanted) -> None:
        self.table = torch.zeros((4, 5), dtype=torch.int64)
        self.table[:3, 4] = torch.tensor([1, 0, 2])
        batch.adapted = True
        super().begin(batch, wanted)


def logits(path: str, work, adapters: list[str] | None = None, group: ThreadGroup | None = None) -> torch.Tensor:
    checkpoint = resolve_checkpoint(EngineConfig(model=path))
    whole = model_config_from_hf(checkpoint.config)
    shard = WHOLE if group is None else group.shard
    weights, make, pool = load_model(checkpoint, whole, torch.float32, CPU, shard=shard), make_linear, None
    if adapters is not None:
        pool = Always(whole, shard, 2, 8, 64, torch.float32, CPU, whole.experts is not None)
        make = pool.make(weights, make_linear)
        for slot, adapter in enumerate(adapters):
            version = examine(adapter, modules_of(whole, True), 8)
            pool.load(version, slot, pool.read(version))
    run = Sequences(whole if group is None else shard.config(whole), weights, max_len=48, num_seqs=3, make=make, group=group)
    run.decoder.adapters = pool
    if pool is not None:
        pool.check_made()
        if group is None:
            pairs = [product.pair for product in (*pool._products.values(), *pool._experts)]
            assert num_bytes(whole, 2, 8, 4, True) == sum(t.nbytes for pair in pairs for t in (pair.a, pair.b, pair.scales))
        for layer in run.decoder.layers:
            if hasattr(layer.mlp, "max_rows"):
                layer.mlp.max_rows = 8  # the rows of a step in several parts
    found = [rows for step, wanted in work for rows in run.step(step, wanted)]
    whole_rows = [rows if group is None else run.decoder.vocab.whole(rows) for rows in found]
    return torch.cat(whole_rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_if_merged(variant: str, tmp_path: Path) -> None:
    base = str(write_tiny(variant, tmp_path / "base"))
    targets = (*ALL, *FUSED, *LATENT, *DELTA)
    first = write_adapter(tmp_path / "first", base, targets=targets, r=5, size=0.3, experts=True)
    second = write_adapter(tmp_path / "second", base, targets=targets, seed=1, r=8, alpha=4.0, size=0.3, experts=True)
    models = [merged(tmp_path / "one", base, first), base, merged(tmp_path / "two", base, second)]
    texts = [tokens(17, seed=i) for i in range(3)]
    work = [
        ([(i, text[:9]) for i, text in enumerate(texts)], [[8], [3, 8], []]), ([(0, texts[0][9:10]), (2, texts[2][9:])], None),
        ([(i, texts[i][n:]) for i, n in ((0, 10), (1, 9))], None),
    ]  # fmt: skip
    alone = []
    for i, model in enumerate(models):
        own = [([(j, ids) for j, ids in step if j == i], w and [w[i]]) for step, w in work]
        alone.append(logits(model, [(step, w) for step, w in own if step]))
    found = logits(base, work, [first, second])
    order = [(j, k) for step, w in work for n, (j, ids) in enumerate(step) for k in (w[n] if w else range(len(ids)))]
    rows = [iter(one) for one in alone]
    wanted = torch.stack([next(rows[j]) for j, _ in order])
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    assert (found - logits(base, work)).abs().max() > 0.05
    for size in range(2, VARIANTS[variant] + 1):
        for rank in run_ranks(size, lambda group: logits(base, work, [first, second], group)):
            torch.testing.assert_close(rank, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["gptq", "fp8"])
def test_beside_weights_that_are_held_narrow(form: str, tmp_path: Path) -> None:
    format_ = next(format_ for name, format_ in FORMATS.items() if name.startswith(form))
    tiny = write_quantized(tmp_path / "narrow", format_)
    plain = write_tiny("qwen3", tmp_path / "plain", num_hidden_layers=1, tie_word_embeddings=False)
    save_file({name: matrix.contiguous() for name, matrix in tiny.matrices.items()}, plain / "model.safetensors", metadata={"format": "pt"})
    adapter = write_adapter(tmp_path / "adapter", plain, size=0.3)
    work = [([(0, tokens(9, seed=1))], None), ([(0, [5])], None)]
    found, wanted = logits(str(tmp_path / "narrow"), work, [adapter]), logits(merged(tmp_path / "merged", plain, adapter), work)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_keys_and_values_that_are_made_and_that_are_not_are_the_same() -> None:
    """Of latents directly, as of long fresh prompts, and by what meets them; of some rows, one of them without an adapter."""
    heads, nope, value, rank, rows = 3, 6, 5, 12, slice(2, 6)
    pair = new_pair(2, (heads * (nope + value),), rank, 4, torch.float64, CPU)
    for tensor in (pair.a, pair.b, pair.scales):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    numbers = torch.tensor([2, 2, 1, 0, 2, 1, 1])
    adds = HeadAdds(pair, heads, nope, lambda: numbers)
    latents, q = torch.randn(4, rank, dtype=torch.float64), torch.randn(heads, 4, nope, dtype=torch.float64)
    made, met = torch.zeros(4, heads * (nope + value), dtype=torch.float64), torch.zeros(heads, 4, rank, dtype=torch.float64)
    adds.expanded(made, latents, rows)
    adds.keys(met, q, rows)
    keys, values = made.view(4, heads, -1).transpose(0, 1).split((nope, value), 2)
    torch.testing.assert_close((met * latents).sum(2), (q * keys).sum(2))
    out = torch.zeros(heads, 4, value, dtype=torch.float64)
    adds.values(out, latents.expand(heads, -1, -1), rows)
    torch.testing.assert_close(out, values)
    assert keys[:, [0, 2, 3]].abs().min() > 0 and not keys[:, 1].any()


@pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("name", "table"),
    [("granite", "gemm"), ("gemma", "gemm"), ("qwen2, window in one layer", "gemv"), ("delta net", "gemv"), ("experts in one layer", "gemv"),
     ("plain", "ring")],
)
def test_the_fused_step_adds_what_the_decoder_does(name: str, table: str, monkeypatch) -> None:
    """Within its products, all of whose tiles have one A each; or, of another model, beside some."""
    config, rows, within = CONFIGS[name], min(3, max(TABLES[table])), set()
    narrow = {n: replace(t, qkv=replace(t.qkv, block_n=16), gate_up=replace(t.gate_up, block_n=16)) for n, t in TABLES[table].items()}
    tables = narrow if name == "granite" or name.startswith("qwen2") else TABLES[table]
    monkeypatch.setattr(lora_pool, "shrink_few", lambda x, pair, *args: (within.add(id(pair)), shrink_few(x, pair, *args))[1])
    if config.experts is not None:  # of a family whose weights have names
        config = replace(config, family="gpt_oss", num_layers=1, experts=replace(config.experts, correction=False, layers=()))
    weights = random_weights(config)
    pool = AdapterPool(config, WHOLE, 2, 8, 64, torch.float32, CPU, config.experts is not None)
    make = pool.make(weights, make_linear)
    torch.manual_seed(3)
    for product in (*pool._products.values(), *pool._experts):
        for tensor in (product.pair.a, product.pair.b, product.pair.scales):
            tensor.normal_(0, 0.3)
    found = []
    for adapted in (True, True, False):
        batch, kv = decode_batch(config, [150, 1, 33][:rows], 16)
        pool.table = torch.zeros((6, 5), dtype=torch.int64)
        pool.table[batch.seq_slots.long(), 4] = torch.tensor([2, 0, 1][:rows])
        batch.adapted = adapted
        if len(found) == 0:
            decoder = Decoder(config, weights, TorchAttention(), make=make)
        else:
            decoder = FastDecoder(config, weights, TorchAttention(), FastDecode(config, weights, rows, CPU, tables))
        decoder.adapters = pool
        found.append((decoder.decode(batch, kv), *kv.k, *kv.v))
    for one, other in zip(found[0], found[1], strict=True):
        assert (one - other).norm() <= 2e-5 * one.norm()
    assert (found[0][0] - found[2][0]).norm() / found[0][0].norm() > 0.02
    assert within and (tables is not narrow or within == {id(product.pair) for product in pool._products.values()})
