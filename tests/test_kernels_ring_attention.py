"""Attention in rings, of a cache in bfloat16 and in FP8: the kernels' own text, without a card (gluon_interpreter.py) or on it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_decode_cases import PLAIN, decode_batch, moved
from headrace.cache import fp8
from headrace.fast_decode import attention, attention_reference, attention_ring, attention_ring_fp8
from headrace.fast_decode.attention_reference import HeadShape, decode_attention_reference
from headrace.fast_decode.ring_tile import RingAttention
from headrace.kernels.split import split_space
from headrace.model.config import RopeConfig
from headrace.model.rope import rope_tables
from test_kernels_fused_decode import DEVICE, NAN, random

BF16 = torch.bfloat16
DIM = 128
LENGTHS = [150, 1, 17, 400, 64, 65, 63, 129, 0]


class _Interpreted:
    """In the place of a kernel."""

    def __init__(self, file: str, kernel: str, *beside: str):
        self.kernel, self.file, self.beside = kernel, file, beside

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*values: Any, **arguments: Any) -> None:
            import gluon_interpreter as gluon

            def put(pointers: Any, y: Any, ok: Any, *_: Any) -> None:
                gluon._store(pointers, y, ok)

            def widened(x: Any) -> tuple[Any, Any]:
                both = x.value.contiguous().view(fp8.DTYPE).view(*x.value.shape, 2).half()
                return gluon.Value(both[..., 0]), gluon.Value(both[..., 1])

            def factors(top: Any) -> tuple[Any, Any]:
                most, largest = top.value.clamp_min(fp8.SMALLEST), torch.tensor(fp8.LARGEST)
                return gluon.Value(largest / most), gluon.Value(most / largest)

            def say_done(ticket: Any) -> None:
                gluon._store(ticket, gluon._load(ticket).value + 1)

            def await_parts(ticket: Any, number: Any) -> None:
                assert int(gluon._load(ticket)) == int(number)

            names = self.names()[: len(values)]
            arguments = dict(zip(names, values, strict=True)) | arguments
            for name in ("num_warps", "num_stages", "num_ctas", "launch_pdl", "maxnreg"):
                arguments.pop(name, None)
            gluon.run(
                self.file, self.kernel, grid, arguments, beside=self.beside, put=put, _widened=widened, fp8_factors=factors,
                largest=lambda x: gluon.Value(x.value.abs().amax()), nearest_fp8=lambda x: gluon.Value(x.value.to(fp8.DTYPE).float()),
                soft_cap=lambda x, cap: gluon.Value(cap * torch.tanh(x.value / cap)), say_done=say_done, await_parts=await_parts,
            )  # fmt: skip

        return launch

    def names(self) -> list[str]:
        text = Path(self.file).read_text().partition(f"def {self.kernel}(")[2].partition("):")[0]
        return [name.partition(":")[0].strip() for name in text.split(",") if name.strip()]


@pytest.fixture(autouse=True)
def without_a_card(monkeypatch) -> None:
    rotate = attention_reference.rotate_reference  # what the kernels keep in FP8 they have rounded to the model's numbers first
    monkeypatch.setattr(attention_reference, "rotate_reference", lambda x, *turn: rotate(x, *turn).to(BF16).float())
    if DEVICE == "cpu":
        plain = attention_ring.__file__
        monkeypatch.setattr(attention, "runs_triton", lambda x: True)
        monkeypatch.setattr(attention_ring, "_ring_attention_kernel", _Interpreted(plain, "_ring_attention_kernel"))
        of_fp8 = _Interpreted(attention_ring_fp8.__file__, "_ring_attention_fp8_kernel", plain)
        monkeypatch.setattr(attention_ring_fp8, "_ring_attention_fp8_kernel", of_fp8)


@pytest.mark.parametrize("dtype", [BF16, fp8.DTYPE], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tile", "splits", "window", "softcap", "norm"),
    [
        (4, 2, RingAttention(3, 3, 0), 1, 0, 0.0, True), (8, 2, RingAttention(2, 2, 0), 2, 0, 0.0, True),
        (8, 1, RingAttention(1, 1, 0), 3, 0, 20.0, False), (6, 2, RingAttention(2, 3, 0), 5, 70, 0.0, True),
        (4, 1, RingAttention(1, 3, 0), 1, 100, 0.0, True), (2, 2, RingAttention(6, 6, 0), 1, 0, 0.0, False),
    ],
)  # fmt: skip
def test_it_is_attention(dtype, heads: int, kv_heads: int, tile: RingAttention, splits: int, window: int, softcap: float, norm: bool) -> None:
    """Of parts shorter and longer than a ring, with numbers that are none behind the cached tokens, and what it keeps."""
    config = replace(PLAIN, num_heads=heads, num_kv_heads=kv_heads, head_dim=DIM, rope=RopeConfig(1e4, DIM), max_position=1024)
    batch, kv = (moved(part, torch.device(DEVICE)) for part in decode_batch(config, LENGTHS, 64, dtype))
    before = copy.deepcopy(kv)
    assert before.k[0].dtype == dtype
    for slot in batch.slot_mapping[batch.slot_mapping >= 0].tolist():
        for layer in (*before.k, *before.v):
            layer.view(torch.uint8)[slot // 64, slot % 64 :] = 255  # NaN
        for scales in before.scales:
            for of_one in filter(lambda x: x is not None, scales):
                of_one[slot // 64, :, slot % 64 :] = NAN
    qkv = random(2, len(LENGTHS), (heads + 2 * kv_heads) * DIM, dtype=torch.float32)
    values = qkv[:, :, (heads + kv_heads) * DIM :]  # bfloat16 has them
    values.copy_(torch.stack((values.sum(0).to(BF16).float(), torch.zeros_like(values[0]))))
    weights = [random(DIM, seed=seed).abs().to(BF16) + 0.5 if norm else None for seed in (1, 2)]
    cos, sin = rope_tables(config.rope, 1024, torch.device(DEVICE))
    given = {
        "block_tables": batch.block_tables, "seq_slots": batch.seq_slots, "seq_lens": batch.seq_lens,
        "slot_mapping": batch.slot_mapping, "cos": cos, "sin": sin, "q_norm": weights[0], "k_norm": weights[1],
        "heads": HeadShape(heads, kv_heads, DIM, DIM**-0.5, softcap), "window": window,
    }  # fmt: skip
    space = split_space(len(LENGTHS), heads, kv_heads, DIM, torch.device(DEVICE))
    out = torch.full((len(LENGTHS), heads * DIM), NAN, device=DEVICE, dtype=BF16)
    attention.decode_attention(qkv, out, before, 0, num_splits=splits, tile=tile, space=space, **given)
    expected = decode_attention_reference(qkv.sum(0), kv, 0, **given)
    live = [n > 0 for n in LENGTHS]
    error = (out.float() - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-3)
    assert error[torch.tensor(live)].max() < (0.02 if dtype == fp8.DTYPE else 0.006) and not out[-1].any(), error
    slots = batch.slot_mapping[torch.tensor(live)].long()
    for index, (one, other) in enumerate(((before.k, kv.k), (before.v, kv.v))):
        kept = [data[0].flatten(0, 1)[slots] for data in (one, other)]
        if dtype == fp8.DTYPE:
            scales = [cache.scales[0][index][slots // 64, :, slots % 64] for cache in (before, kv)]
            kept = [fp8.dequantize(*both) for both in zip(kept, scales, strict=True)]
        close = (kept[0].float() - kept[1].float()).norm() / kept[1].float().norm()
        assert close < (0.01 if dtype == fp8.DTYPE else 0.002)
