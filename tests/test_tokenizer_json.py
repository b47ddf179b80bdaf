"""Tokenizers from tokenizer.json and its companions: equal to Transformers, exact on the way back, clear when broken."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import AddedToken, decoders, models, normalizers, processors

from headrace.errors import CheckpointError, ParameterError
from headrace.model.tokenizer import LARGE, Tokenizer
from tiny_models import write_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.lists(
    st.sampled_from(["<s>", "</s>", "<|user|>", " ", "\n", "The ", "wheel", "é", "日本", "🙂", "<tool>", "12"]), max_size=12
).map("".join)


def edit_config(path: Path, **changes: Any) -> Path:
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    config |= changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path


def write_metaspace_tokenizer(path: Path) -> Path:
    """A Llama-2-like tokenizer: spaces as ▁, a prefix space, bytes as fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    letters = ["▁", *"abcdehlorstw.é"]
    words = ["he", "ll", "▁w", "▁he", "llo", "▁hello", "or", "▁wor", "▁world", "▁▁", "▁▁▁▁"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *letters, *words, "ld"])}
    merges = [("h", "e"), ("l", "l"), ("▁", "w"), ("▁", "he"), ("l", "d"), ("ll", "o"), ("▁he", "llo"), ("o", "r"),
              ("▁w", "or"), ("▁wor", "ld"), ("▁", "▁"), ("▁▁", "▁▁")]  # fmt: skip
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    path.mkdir(parents=True)
    backend.save(str(path / "tokenizer.json"))
    return edit_config(path, tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS: dict[str, Any] = {
    "plain": lambda path: write(path),
    "contradicting config": lambda path: edit_config(write(path), add_bos_token=False, add_eos_token=True),
    "no post-processor": lambda path: without_post_processor(write(path)),
    "added tokens": lambda path: edit_config(
        write(path),
        added_tokens_decoder={
            "512": {"content": "<tool>", "lstrip": False, "rstrip": True, "normalized": False, "special": False},
            "4": {"content": "<|user|>", "lstrip": True, "rstrip": False, "normalized": False, "special": False},
        },
    ),
    "named token missing in the vocabulary": lambda path: edit_config(write(path), pad_token="<tool>"),
    "truncating file": lambda path: truncating(write(path)),
    "metaspace": write_metaspace_tokenizer,
}


def write(path: Path) -> Path:
    write_tokenizer(path)
    return path


def without_post_processor(path: Path) -> Path:
    content = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    return path


def truncating(path: Path) -> Path:
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=20)
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    from transformers import AutoTokenizer

    path = KINDS[request.param](tmp_path_factory.mktemp("kinds") / "tokenizer")
    return Tokenizer.from_directory(path), AutoTokenizer.from_pretrained(path)


@settings(max_examples=80)
@given(text=TEXTS)
def test_ids_and_text_are_those_of_transformers(pair, text: str):
    ours, theirs = pair
    inner = ours.encode(text, add_special_tokens=False)
    assert inner == theirs(text, add_special_tokens=False)["input_ids"]
    outer = theirs(text)["input_ids"]
    if text.startswith("<s>") and theirs("")["input_ids"][:1] == [1]:
        outer = outer[1:]  # never a second bos
    assert ours.encode(text) == outer
    for skip in (True, False):
        assert ours.decode(outer, skip) == theirs.decode(outer, skip_special_tokens=skip)


def test_special_tokens_are_those_of_transformers(pair):
    ours, theirs = pair
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, role) == getattr(theirs, role), role
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert ours.vocab_size == len(theirs)


@settings(max_examples=80)
@given(text=TEXTS)
def test_bytes_of_tokens_join_to_the_text(pair, text: str):
    """In the middle of a text; a decoder that drops the first space does so only there."""
    ours, _ = pair
    ids = ours.encode(text, add_special_tokens=False)
    joined = b"".join(ours.token_bytes(i) for i in ids)
    whole = ours.decode(ids, skip_special_tokens=False)
    if ours.byte_level:
        assert joined.decode() == whole
    else:
        assert joined.decode() in (whole, " " + whole)


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_decode_undoes_encode(tmp_path_factory: pytest.TempPathFactory, text: str):
    path = tmp_path_factory.getbasetemp() / "round_trip"
    if not path.exists():
        write_tokenizer(path)
    ours = Tokenizer.from_directory(path)
    assert ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
    if not any(token in text for token in ("<s>", "</s>", "<pad>", "<|")):
        assert ours.decode(ours.encode(text)) == text


def test_what_the_stream_needs_of_each_decoder(tmp_path: Path):
    byte_level, metaspace = Tokenizer.from_directory(write(tmp_path / "a")), Tokenizer.from_directory(
        write_metaspace_tokenizer(tmp_path / "b")
    )  # fmt: skip
    assert byte_level.byte_level and not byte_level.byte_fallback
    assert not metaspace.byte_level
    assert metaspace.byte_fallback == {3 + b: b for b in range(256)}
    assert [metaspace.token_bytes(i) for i in metaspace.encode("hello world日", add_special_tokens=False)] == [
        b" hello", b" world", b"\xe6", b"\x97", b"\xa5",
    ]  # fmt: skip
    assert metaspace.token_to_text(3 + 0xE6) == "�"
    assert metaspace.token_to_text(metaspace.backend.token_to_id("▁hello")) == " hello"
    assert byte_level.token_bytes(1) == b"<s>"


def test_ids_that_no_token_has_give_no_text(tmp_path: Path):
    tokenizer = Tokenizer.from_directory(write(tmp_path / "a"))
    beyond = tokenizer.vocab_size + 5
    assert tokenizer.token_bytes(beyond) == b""
    assert tokenizer.token_to_text(beyond) == tokenizer.id_to_piece(beyond) == ""
    assert tokenizer.decode([beyond, *tokenizer.encode("mill", add_special_tokens=False), beyond]) == "mill"


def test_a_batch_is_its_texts(tmp_path: Path):
    tokenizer = Tokenizer.from_directory(write(tmp_path / "a"))
    texts = ["", "one", "<s>two", "three 🙂", "\n\n"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(t) for t in texts]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode("<s>two").count(1) == 1
    assert tokenizer.encode("<s><s>two").count(1) == 2


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_a_parameter_error(text: str, tmp_path: Path):
    with pytest.raises(ParameterError, match="surrogates"):
        Tokenizer.from_directory(write(tmp_path / "a")).encode(text)


def test_chat_templates(tmp_path: Path):
    path = write(tmp_path / "a")
    assert "assistant" in (Tokenizer.from_directory(path).chat_template or "")
    edit_config(path, chat_template=[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.chat_template == "D"
    assert tokenizer.chat_templates == {"default": "D", "tool_use": "T"}
    (path / "chat_template.jinja").write_text("from a file é", encoding="utf-8")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.chat_template == "from a file é"
    assert tokenizer.chat_templates["rag"] == "R"
    assert Tokenizer.from_directory(edit_config(write(tmp_path / "b"), chat_template=...)).chat_template is None
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        Tokenizer.from_directory(path)


def test_special_tokens_map_serves_where_the_config_is_silent(tmp_path: Path):
    path = edit_config(write(tmp_path / "a"), eos_token=..., pad_token=None)
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}))
    tokenizer = Tokenizer.from_directory(path)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 2)
    assert tokenizer.pad_token is None


def test_missing_and_broken_files_are_checkpoint_errors(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json$"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json; tokenizer\.model alone is not supported"):
        Tokenizer.from_directory(tmp_path)
    good = (write(tmp_path / "a") / "tokenizer.json").read_text()
    for text in ("", "{", "[]", "{}", good[: len(good) // 2], good.replace('"BPE"', '"XPE"'), good.replace("[", "{", 1)):
        (tmp_path / "a" / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.from_directory(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text(good)
    (tmp_path / "a" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(tmp_path / "a")


def test_reading_a_tokenizer_imports_neither_torch_nor_transformers(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from headrace.config import EngineConfig\n"
        "from headrace.model.checkpoint import resolve_checkpoint; from headrace.model.tokenizer import Tokenizer\n"
        f"Tokenizer.from_directory(Path({str(write(tmp_path / 'a'))!r})).encode('x')\n"
        "assert not {'torch', 'transformers', 'gguf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ids_without_a_token(tmp_path: Path):
    """A tokenizer of 400 tokens with a hole, a model of 420 rows; a model of fewer rows than there are tokens."""
    write_tokenizer(tmp_path, 400)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    *state["model"]["merges"], _ = state["model"]["merges"]
    del state["model"]["vocab"][next(t for t, i in state["model"]["vocab"].items() if i == 399)]
    state["added_tokens"].append({**state["added_tokens"][0], "id": 403, "content": "<far>"})
    state["model"]["vocab"]["<far>"] = 403
    file.write_text(json.dumps(state))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.valid_ids(420).tolist() == [True] * 399 + [False] * 4 + [True] + [False] * 16
    assert tokenizer.valid_ids(10).all()


def test_large_texts_come_one_at_a_time_and_their_memory_goes_back(tmp_path):
    """The library's copies of 15 million digits took 3 GB of the HTTP process each, and stayed there."""
    tokenizer = Tokenizer.from_directory(write(tmp_path))
    encode, inside, most = tokenizer.backend.encode_batch_fast, [], []

    class Backend:
        def encode_batch_fast(self, texts, add_special_tokens):
            inside.append(texts)
            most.append(len(inside))
            try:
                return encode(texts, add_special_tokens=add_special_tokens)
            finally:
                inside.pop()

    tokenizer.backend = Backend()
    text = "7" * (LARGE + 1)
    before = resident()
    with ThreadPoolExecutor(4) as pool:
        lengths = list(pool.map(lambda _: len(tokenizer.encode(text, add_special_tokens=False)), range(4)))
    assert len(set(lengths)) == 1 and max(most) == 1
    assert resident() - before < 100 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
