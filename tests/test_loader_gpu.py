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
from headrace.model.weight import Weight

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
        for field in fields(a):
            ours, theirs = (w.data if isinstance(w, Weight) else w for w in (getattr(a, field.name), getattr(b, field.name)))
            assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours.cpu(), theirs)), field.name


@pytest.mark.parametrize("kind", _ENCODINGS, ids=lambda k: _ENCODINGS[k].name)
def test_blocks_decode_alike_on_a_gpu(kind: int):
    encoding = _ENCODINGS[kind]
    raw = np.random.default_rng(5).integers(0, 256, 64 * encoding.block_bytes, dtype=np.uint8)
    raw[raw & 0x7C == 0x7C] &= 0x3F
    expected = gguf.quants.dequantize(raw.reshape(64, -1), gguf.GGMLQuantizationType(kind)).astype(np.float32)
    entry = TensorEntry("t", (64, encoding.block_size), encoding, Path("x"), 0, raw.nbytes)
    decoded = decode_rows(entry, torch.from_numpy(raw).cuda(), 64).float().cpu()
    torch.testing.assert_close(decoded, torch.from_numpy(expected), rtol=1e-6, atol=0, equal_nan=True)
