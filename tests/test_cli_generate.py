"""`headrace generate`: prompts from options, files and standard input; what it prints and the exit code."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import headrace
from headrace.cli import main
from headrace.llm import LLM
from headrace.sampling.params import SamplingParams
from tiny_models import write_tiny

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
WORDS = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4", "--temperature", "0", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which every prompt with a ~ fails: the weights of that token are not finite."""
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"), tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    token = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]["~"]
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture
def generate(tiny, capsys, monkeypatch):
    def run(*words: str, typed: str | bytes = "") -> tuple[int, str, str]:
        stdin = io.TextIOWrapper(io.BytesIO(typed if isinstance(typed, bytes) else typed.encode()), "utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        code = main(["generate", "--model", str(tiny), *WORDS, *words])
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


def answers(tiny: Path, *prompts: str) -> str:
    with LLM(str(tiny), **OPTIONS) as llm:
        return "".join(o.outputs[0].text + "\n" for o in llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=6), use_tqdm=False))


def test_prompts_from_everywhere_are_the_same_prompts(tiny, tmp_path, generate):
    two = answers(tiny, "hello", "and\u2028you")
    assert generate("--prompt", "hello", "--prompt", "and\u2028you") == (0, two, "")
    assert generate("--prompt", "hello", "--prompt", "and\u2028you", "--no-stream") == (0, two, "")
    for data in ("hello\nand\u2028you\n", "\ufeffhello\r\n\r\nand\u2028you", "hello\n\n\nand\u2028you\n"):
        file = tmp_path / "prompts"
        file.write_bytes(data.encode())
        assert generate("--prompt-file", str(file)) == (0, two, "")
    assert generate("--prompt", "hello", "--prompt-file", str(file))[1].startswith(two.splitlines(keepends=True)[0])
    one = answers(tiny, "hello\nyou\n")
    for typed in ("hello\nyou\n", "\ufeffhello\r\nyou\r\n"):
        assert generate(typed=typed) == (0, one, "")


@pytest.mark.parametrize(
    ("words", "typed", "said"),
    [
        ([], "", "there is no prompt"), (["--prompt", ""], "", "--prompt: got ''"), (["--prompt", "a", "--prompt", ""], "x", "--prompt: got ''"),
        ([], b"\xff\xfea\0", "UTF-16"), ([], b"gr\xfcn", "standard input"), (["--system", "x", "--prompt", "a"], "", "--system"),
    ],
)  # fmt: skip
def test_prompts_that_are_none(generate, words, typed, said):
    code, out, err = generate(*words, typed=typed)
    assert code == 1 and not out and said in err and err.count("\n") == 1 and "['']" not in err


def test_a_file_without_a_prompt_is_named(generate, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    code, _, err = generate("--prompt-file", str(tmp_path / "empty"), typed="not read")
    assert code == 1 and "--prompt-file" in err and "empty" in err


@pytest.mark.parametrize("form", [[], ["--no-stream"], ["--json"]])
def test_a_prompt_that_fails_is_told_and_makes_the_exit_code_1(tiny, generate, form):
    code, out, err = generate("--prompt", "a ~", "--prompt", "hello", *form)
    assert code == 1 and err.count("headrace: ") == 1 and "NaN" in err
    if form == ["--json"]:
        bad, good = map(json.loads, out.splitlines())
        assert bad["outputs"][0]["finish_reason"] == "error" and good["outputs"][0]["finish_reason"] == "length"
    else:
        assert out == "\n" + answers(tiny, "hello")  # the others are answered all the same
    assert generate("--prompt", "hello", *form)[0] == 0


def test_figures_and_json(generate):
    code, out, err = generate("--prompt", "hello", "--json", "--n", "2", "--show-stats")
    answer = json.loads(out)
    assert code == 0 and answer["prompt"] == "hello" and [len(o["token_ids"]) for o in answer["outputs"]] == [6, 6]
    figures = dict(word.split("=") for word in err.split())
    assert figures["generated_tokens"] == "12" and figures["device"] == "cpu" and figures["dtype"] == figures["weights"].lower().replace("f32", "float32") == "float32"
    assert figures["temperature"] == "0" and "top_p" not in figures


def test_the_models_own_sampling_is_told(tmp_path, capsys, monkeypatch, caplog):
    """With the figures, and in the log; what is asked for comes before it, and a temperature of 1 is told too."""
    model = write_tiny("llama", tmp_path / "model")
    words = ["--device", "cpu", "--max-model-len", "128", "--model", str(model), "--max-tokens", "2", "--show-stats"]
    with caplog.at_level("INFO"):
        assert main(["generate", *words, "--prompt", "a"]) == 0
    assert "temperature=1" in capsys.readouterr().err.split() and "temperature 1 (the model names none)" in caplog.text
    (model / "generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9, "top_k": 0}')
    with caplog.at_level("INFO"):
        assert main(["generate", *words, "--prompt", "a", "--top-p", "0.5"]) == 0
    figures = capsys.readouterr().err.split()
    assert {"temperature=0.2", "top_p=0.5"} < set(figures) and not any("top_k" in f for f in figures)
    assert "says nothing: temperature 0.2, top_p 0.9\n" in caplog.text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert main(["chat", *words]) == 0
    assert "sampling: temperature 0.2, top_p 0.9\n" in capsys.readouterr().err


def test_ctrl_c_waits_until_torch_is_imported(monkeypatch):
    """In the middle of it torch's own initialisation would end the process with SIGABRT."""
    imported = []

    def load(name: str):
        signal.raise_signal(signal.SIGINT)
        imported.append(name)

    monkeypatch.setattr(headrace, "importlib", SimpleNamespace(import_module=load))
    with pytest.raises(KeyboardInterrupt):
        headrace.LLM  # noqa: B018
    assert imported == ["headrace.llm"]
