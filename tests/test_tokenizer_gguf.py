"""Tokenizers from GGUF metadata, against the tokenizers they were made from and against SentencePiece's own rule."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from tokenizers import pre_tokenizers

from headrace.errors import CheckpointError
from headrace.model.formats.gguf_tokenizer import _PRE
from headrace.model.tokenizer import Tokenizer
from tiny_models import write_tokenizer

PATH = Path("model.gguf")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.lists(
    st.sampled_from(["<s>", "</s>", "<|user|>", " ", "  ", "\n", "\r\n", "The ", "wheel", "I'll", "é", "日本", "🙂", "123",
                     "45", "aB", "Ab", "?!", "/", "١٢", "e\u0301"]), max_size=12,
).map("".join)  # fmt: skip


def gguf_metadata(directory: Path, pre: str, **extra: Any) -> dict[str, Any]:
    """What the converter writes of a byte-level tokenizer.json."""
    content = json.loads((directory / "tokenizer.json").read_text())
    vocab: dict[str, int] = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if t in special else NORMAL for t in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "T",
    } | {key.replace("__", "."): value for key, value in extra.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


def reference(directory: Path, pre: str) -> tokenizers.Tokenizer:
    """The tokenizer.json with the pre-tokenizer that models of this kind have at Hugging Face."""
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    if pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return backend


@pytest.fixture(scope="module", params=["gpt-2", "smollm"])
def pair(request: pytest.FixtureRequest, directory: Path):
    ours = Tokenizer.from_gguf_metadata(PATH, gguf_metadata(directory, request.param))
    return ours, reference(directory, request.param)


@settings(max_examples=150)
@given(text=TEXTS)
def test_byte_level_ids_are_those_of_the_original(pair, text: str):
    ours, theirs = pair
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special_tokens=False) == text


# The patterns as the models' own tokenizer.json files have them.
PUBLISHED = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                 r"|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
             r"|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
              r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
              r"|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
              r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
              r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}  # fmt: skip


@pytest.fixture(scope="module", params=PUBLISHED)
def splitter(request: pytest.FixtureRequest, directory: Path):
    backend = Tokenizer.from_gguf_metadata(PATH, gguf_metadata(directory, request.param)).backend
    return backend.pre_tokenizer, regex.compile(PUBLISHED[request.param])


@settings(max_examples=100)
@given(text=st.text(st.sampled_from("aAbBéÉ日ǅ'stLL 123١\n\r\t.,/!?🙂"), max_size=30))
def test_words_are_split_as_published(splitter, text: str):
    pre_tokenizer, published = splitter
    spans = [(start, end) for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == [m.group() for m in published.finditer(text)]


def test_bos_is_added_where_the_metadata_or_the_kind_say_so(directory: Path):
    def first(pre: str, **extra: Any) -> int:
        return Tokenizer.from_gguf_metadata(PATH, gguf_metadata(directory, pre, **extra)).encode("wheel")[0]

    assert first("llama-bpe") == 1
    assert first("llama-bpe", tokenizer__ggml__add_bos_token=False) != 1
    assert first("smollm") != 1
    assert first("smollm", tokenizer__ggml__add_bos_token=True) == 1
    tokenizer = Tokenizer.from_gguf_metadata(PATH, gguf_metadata(directory, "llama-bpe"))
    assert tokenizer.encode("<s>wheel").count(1) == 1
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.pad_token) == ("<s>", 2, "<pad>")
    assert tokenizer.chat_template == "T"


def test_a_whole_word_of_the_vocabulary_is_not_merged_up_for_llama3(directory: Path):
    """ignore_merges: "qx" has no merge, yet a piece that is exactly it becomes one token."""
    metadata = gguf_metadata(directory, "llama-bpe", tokenizer__ggml__add_bos_token=False)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "qx"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], NORMAL]
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert Tokenizer.from_gguf_metadata(PATH, metadata).encode("qx") == [last]
    assert len(Tokenizer.from_gguf_metadata(PATH, metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("qx")) == 2


# ---------------------------------------------------------------------------------------------------------------------
# SentencePiece

PIECES = ["▁", *"abcdeé", "ab", "bc", "▁a", "abc", "▁ab", "cd", "▁abc", "de", "cde", "▁▁", "aa", "▁de", "bcd", "ea"]


def spm_metadata(**extra: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES, "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {key.replace("__", "."): value for key, value in extra.items()}


def spm_encode(text: str, prefix: bool) -> list[str]:
    """SentencePiece's BPE by its definition: merge the neighbours whose union scores best, the leftmost of equals."""
    rank = {piece: i for i, piece in enumerate(PIECES)}
    symbols = list((" " + text if prefix and text else text).replace(" ", "▁"))
    while True:
        unions = [(rank[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in rank]
        if not unions:
            break
        _, i = min(unions)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [p for s in symbols for p in ([s] if s in rank else [f"<0x{b:02X}>" for b in s.encode()])]


@pytest.fixture(scope="module", params=[True, False])
def sentencepiece(request: pytest.FixtureRequest):
    return request.param, Tokenizer.from_gguf_metadata(PATH, spm_metadata(tokenizer__ggml__add_space_prefix=request.param))


@settings(max_examples=200)
@given(text=st.text(st.sampled_from("aabbcde é日"), max_size=24))
def test_sentencepiece_ids_follow_its_definition(sentencepiece, text: str):
    prefix, tokenizer = sentencepiece
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.id_to_piece(i) for i in ids] == spm_encode(text, prefix)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [1, *ids]


def test_sentencepiece_special_and_user_tokens():
    tokenizer = Tokenizer.from_gguf_metadata(PATH, spm_metadata(tokenizer__ggml__add_space_prefix=False))
    tool = len(tokenizer.backend.get_vocab()) - 1
    ids = tokenizer.encode("ab<tool></s>")
    assert [ids[0], *ids[-2:]] == [1, tool, 2]
    assert tokenizer.decode(ids) == "ab<tool>"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.byte_fallback == {3 + b: b for b in range(256)}


def test_rows_that_only_pad_the_vocabulary_are_no_tokens(directory: Path):
    """Converters fill a vocabulary up with tokens of the type UNUSED, some of them in its middle."""
    metadata = gguf_metadata(directory, "qwen2")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.tokens"] = [*tokens, "[PAD0]", "<tool>", "[PAD1]"]
    metadata["tokenizer.ggml.token_type"] = [*types, UNUSED, USER_DEFINED, UNUSED]
    valid = Tokenizer.from_gguf_metadata(PATH, metadata).valid_ids(len(tokens) + 10)
    assert valid.tolist() == [True] * len(tokens) + [False, True, False] + [False] * 7


def without(key: str) -> dict[str, Any]:
    metadata = spm_metadata()
    del metadata[f"tokenizer.ggml.{key}"]
    return metadata


BROKEN = {
    "no model": (without("model"), "tokenizer.ggml.model None"),
    "other model": (spm_metadata(tokenizer__ggml__model="bert"), "'bert' is not supported"),
    "no tokens": (without("tokens"), "tokenizer.ggml.tokens"),
    "tokens not a list": (spm_metadata(tokenizer__ggml__tokens="a"), "tokenizer.ggml.tokens"),
    "empty": (spm_metadata(tokenizer__ggml__tokens=[]), "tokenizer.ggml.tokens"),
    "numbers for tokens": (spm_metadata(tokenizer__ggml__tokens=[1, 2]), "tokenizer.ggml.tokens"),
    "token twice": (spm_metadata(tokenizer__ggml__tokens=["a", "a"]), "twice"),
    "few types": (spm_metadata(tokenizer__ggml__token_type=[1]), "one entry per token"),
    "few scores": (spm_metadata(tokenizer__ggml__scores=[1.0]), "one entry per token"),
    "no scores": (without("scores"), "scores is missing"),
    "unknown pre": (spm_metadata(tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="new"), "pre 'new'"),
    "no merges": (spm_metadata(tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="gpt-2"), "merges"),
    "bad merge": (
        spm_metadata(tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="gpt-2", tokenizer__ggml__merges=["ab"]), "'ab'"
    ),
    "merge of unknown tokens": (
        spm_metadata(tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="gpt-2", tokenizer__ggml__merges=["x y"]),
        "not a usable tokenizer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_metadata_are_checkpoint_errors(fault: str):
    metadata, message = BROKEN[fault]
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_gguf_metadata(PATH, metadata)
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize("pre", _PRE)
def test_every_kind_gives_the_text_back(directory: Path, pre: str):
    text = "It's 12345 o'clock, WE'LL see:\n\n  été 日本 🙂 camelCase/path\r\n\t x"
    tokenizer = Tokenizer.from_gguf_metadata(PATH, gguf_metadata(directory, pre))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_role_outside_of_the_vocabulary_counts_as_absent():
    tokenizer = Tokenizer.from_gguf_metadata(PATH, spm_metadata(tokenizer__ggml__eos_token_id=10**6))
    assert tokenizer.eos_token is None
