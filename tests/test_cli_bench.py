"""`headrace bench`: the engine alone; figures beside the limit, and the file of them."""

from __future__ import annotations

import json

import pytest

from headrace.cli import main
from tiny_models import write_shape, write_tiny

SMALL = ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "640"]


def test_latency_of_a_model(tmp_path, capsys):
    tiny = write_tiny("llama", tmp_path / "tiny", max_position_embeddings=1024)
    words = ["--model", str(tiny), *SMALL, "--batch", "1", "2", "--input-len", "8", "--output-len", "4", "--temperature", "0", "--repeat", "3"]
    assert main(["bench", "latency", *words, "--out", str(tmp_path / "out.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads((tmp_path / "out.json").read_text())
    results = document["results"]
    assert [r["workload"] for r in results] == ["batch 1", "batch 2"] == [line[:7] for line in lines]
    for r in results:
        assert r["unit"] == "ms" and r["value"] > 0 and r["percent_of_limit"] == pytest.approx(100 * r["limit"] / r["value"])
        assert (r["input_len"], r["output_len"], r["temperature"]) == (8, 4, 0)
    assert document["machine"] and document["model"] == str(tiny) and document["torch"]


def test_prefill_of_a_shape(tmp_path, capsys):
    write_shape(tmp_path, vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    shape = tmp_path / "config.json"
    shape.write_text("\ufeff" + shape.read_text())
    assert main(["bench", "prefill", "--config", str(shape), *SMALL, "--prefill-prompts", "2", "--prefill-len", "16"]) == 0
    assert capsys.readouterr().out.startswith("prefill 2 x 16")


def test_a_shape_that_is_no_json(tmp_path, capsys):
    (tmp_path / "x").write_text("{")
    assert main(["bench", "prefill", "--config", str(tmp_path / "x")]) == 1
    assert "--config: got" in capsys.readouterr().err
