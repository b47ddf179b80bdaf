"""On a GPU the loader gives the weights that it gives on the CPU, to the bit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import loader_files as files
from headrace.config import EngineConfig
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.formats.blocks import decode_rows
from headrace.model.formats.gguf import _ENCODINGS
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.loader import load_model
from headrace.model.narrow import quantized
from headrace.model.weight import Weight, dequantized
from quantized_checkpoints import FORMATS, write_quantized
from test_quantized_formats import load, weights_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gets_the_same_weights(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With staging buffers that are used many times over, so that one reused too early would show."""
    monkeypatch.setattr("headrace.model.loader._DEVICE_CHUNK", 4096)
    checkpoint = resolve_checkpoint(EngineConfig(model=str(files.write_llama_gguf(tmp_path / "m.gguf"))))
    config = model_config_from_hf(checkpoint.config)
    on_cpu, on_gpu = (load_model(checkpoint, config, dtype, torch.device(d)) for d in ("cpu", "cuda"))
    assert torch.equal(on_gpu.embedding.cpu(), on_cpu.embedding)
    for a, b in zip(on_gpu.layers, on_cpu.layers, strict=True):
        for field in (of for of in fields(a) if of.name != "more"):
            ours, theirs = (w.data if isinstance(w, Weight) else w for w in (getattr(a, field.name), getattr(b, field.name)))
            assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours.cpu(), theirs)), field.name


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_gets_the_same_narrow_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Repacked on the card, in many pieces."""
    monkeypatch.setattr("headrace.model.narrow_loader._DEVICE_PIECE", 4096)
    tiny = write_quantized(tmp_path / "model", FORMATS[name], hidden_size=128, intermediate_size=256, num_attention_heads=4)
    on_cpu, on_gpu = (weights_of(load(tiny.path, True, device=torch.device(d))) for d in ("cpu", "cuda"))
    for target, ours in on_gpu.items():
        theirs = on_cpu[target]
        assert (ours.kind, ours.group, ours.scale_rows) == (theirs.kind, theirs.group, theirs.scale_rows)
        torch.testing.assert_close(dequantized(ours, torch.float32).cpu(), dequantized(theirs, torch.float32), rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_gpu_quantizes_as_a_cpu_does(kind: str):
    """Up to a step of a few numbers, where a division is rounded otherwise."""
    rows = torch.randn(64, 384)
    here, there = quantized(rows, kind), quantized(rows.cuda(), kind)
    assert here.scales is not None and there.scales is not None
    torch.testing.assert_close(there.scales.cpu(), here.scales, rtol=1e-3, atol=0)
    apart, step = (dequantized(there, torch.float32).cpu() - dequantized(here, torch.float32)).abs(), float(here.scales.amax())
    assert apart.max() <= step * (32 if kind == "fp8" else 1.01) and (apart < step / 100).float().mean() > 0.99


@pytest.mark.parametrize("kind", _ENCODINGS, ids=lambda k: _ENCODINGS[k].name)
def test_blocks_decode_alike_on_a_gpu(kind: int):
    encoding = _ENCODINGS[kind]
    raw = np.random.default_rng(5).integers(0, 256, 64 * encoding.block_bytes, dtype=np.uint8)
    raw[raw & 0x7C == 0x7C] &= 0x3F
    expected = gguf.quants.dequantize(raw.reshape(64, -1), gguf.GGMLQuantizationType(kind)).astype(np.float32)
    entry = TensorEntry("t", (64, encoding.block_size), encoding, Path("x"), 0, raw.nbytes)
    decoded = decode_rows(entry, torch.from_numpy(raw).cuda(), 64).float().cpu()
    torch.testing.assert_close(decoded, torch.from_numpy(expected), rtol=1e-6, atol=0, equal_nan=True)
