"""Builds a tokenizer from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE with byte fallback (`llama`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.errors import CheckpointError
from headrace.model.formats.tokenizer_file import TokenizerExtras, build_backend

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # ggml's token types

_WORD_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL


def _cased_words(suffix: str, digits: str) -> str:
    """Words split where lower case turns to upper, as tekken and o200k do."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}{_UPPER}*{_LOWER}+{suffix}|{head}{_UPPER}+{_LOWER}*{suffix}|{digits}{_TAIL_SLASH}"


@dataclass(frozen=True, slots=True)
class _Pre:
    """How one kind (`tokenizer.ggml.pre`) splits text before BPE: by these patterns, each within the pieces so far."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is in the vocabulary is taken whole
    add_bos: bool = False  # where the metadata do not say


_GPT2 = _Pre((_WORD_GPT2,))
_DIGITS_GPT2 = _Pre((r"\p{N}", _WORD_GPT2))
_LLAMA_BPE = _Pre((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = _Pre((_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,), nfc=True)
_SEED = _Pre(
    (_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
)  # fmt: skip
_DEEPSEEK3 = _Pre((
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
))  # fmt: skip
_O200K = _Pre((_cased_words(_SUFFIX + "?", r"\p{N}{1,3}"),))
_PRE = {
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _WORD_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2, "phi-2": _GPT2, "olmo": _GPT2, "exaone4": _GPT2,
    "smollm": _DIGITS_GPT2, "starcoder": _DIGITS_GPT2, "refact": _DIGITS_GPT2, "command-r": _DIGITS_GPT2,
    "llama-bpe": _LLAMA_BPE, "llama3": _LLAMA_BPE, "llama-v3": _LLAMA_BPE,
    "dbrx": _Pre((_LLAMA3,)), "smaug-bpe": _Pre((_LLAMA3,)), "glm4": _Pre((_LLAMA3,)), "chatglm-bpe": _Pre((_LLAMA3,)),
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "tekken": _Pre((_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o": _O200K, "seed-coder": _SEED, "deepseek-v3": _DEEPSEEK3, "hunyuan-dense": _DEEPSEEK3,
}  # fmt: skip


def tokenizer_parts(path: Path, metadata: dict[str, Any]) -> tuple[tokenizers.Tokenizer, TokenizerExtras]:
    """Backend and extras from the metadata of the GGUF file `path`. Raises CheckpointError for what is not known."""
    vocabulary = _Vocabulary(path, metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = build_backend(path, lambda: _byte_level_bpe(vocabulary))
        add_bos = vocabulary.pre.add_bos
    elif kind == "llama":
        backend = build_backend(path, lambda: _sentencepiece_bpe(vocabulary, _merges_from_scores(vocabulary)))
        add_bos = True
    elif kind == "gemma4":
        backend = build_backend(path, lambda: _sentencepiece_bpe(vocabulary, vocabulary.merges))
        add_bos = True
    else:
        raise CheckpointError(f"{path}: tokenizer.ggml.model {kind!r} is not supported (gpt2, llama and gemma4 are)")
    build_backend(path, lambda: _add_tokens(backend, vocabulary))
    names = (("bos_token", "bos"), ("eos_token", "eos"), ("eot_token", "eot"), ("eom_token", "eom"), ("pad_token", "padding"),
             ("unk_token", "unknown"))  # fmt: skip
    known = {role: token for role, name in names if (token := vocabulary.role(name)) is not None}
    ends = [
        (vocabulary.index[known[role]],) if role in known and vocabulary.flag(flag, default) else ()
        for role, flag, default in (("bos_token", "add_bos_token", add_bos), ("eos_token", "add_eos_token", False))
    ]
    unused = frozenset(i for i, kind in enumerate(vocabulary.types) if kind == _UNUSED)
    return backend, TokenizerExtras(known, _chat_templates(metadata), ends[0], ends[1], unused)


class _Vocabulary:
    """The tokenizer's metadata, checked: tokens, their types and scores, merges, flags."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path, self.metadata = path, metadata
        self.tokens: list[str] = self._list("tokens", str)
        self.index = {token: i for i, token in enumerate(self.tokens)}
        if len(self.index) != len(self.tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.tokens holds a token twice")
        self.types: list[int] = self._list("token_type", int, optional=True) or [_NORMAL] * len(self.tokens)
        self.scores: list[float] = self._list("scores", float, optional=True)
        if len(self.types) != len(self.tokens) or (self.scores and len(self.scores) != len(self.tokens)):
            raise CheckpointError(f"{path}: tokenizer.ggml.token_type or .scores has not one entry per token")

    def _list(self, key: str, kind: type, optional: bool = False) -> list:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None and optional:
            return []
        if not isinstance(value, list) or not value or type(value[0]) is not kind:  # a file's list is of one type
            raise CheckpointError(f"{self.path}: tokenizer.ggml.{key} is not a list of {kind.__name__}")
        return value

    @property
    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._list("merges", str):
            left, space, right = merge.partition(" ")
            if not (left and space and right):
                raise CheckpointError(f"{self.path}: tokenizer.ggml.merges has the entry {merge!r}")
            pairs.append((left, right))
        return pairs

    @property
    def pre(self) -> _Pre:
        name = self.metadata.get("tokenizer.ggml.pre", "default")
        if not isinstance(name, str) or name not in _PRE:
            raise CheckpointError(f"{self.path}: tokenizer.ggml.pre {name!r} is not supported ({', '.join(_PRE)} are)")
        return _PRE[name]

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, bool) else default

    def role(self, name: str) -> str | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return self.tokens[value] if type(value) is int and 0 <= value < len(self.tokens) else None


def _byte_level_bpe(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    pre = vocabulary.pre
    model = models.BPE(vocab=vocabulary.index, merges=vocabulary.merges, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    unknown = vocabulary.role("unknown") or next(
        (t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN), None
    )
    model = models.BPE(
        vocab=vocabulary.index,
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece merges any two neighbours whose union is a token, best score first: as a list of ranked merges."""
    if not vocabulary.scores:
        raise CheckpointError(f"{vocabulary.path}: tokenizer.ggml.scores is missing")
    index = {t: i for i, t in enumerate(vocabulary.tokens) if vocabulary.types[i] == _NORMAL}
    found = []
    for token, i in index.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in index and right in index:
                found.append((-vocabulary.scores[i], index[left], index[right]))
    found.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Control tokens are special; user-defined ones are found in text first but are text themselves."""
    pairs = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    special = [AddedToken(t, special=True, normalized=False) for t, kind in pairs if kind in (_CONTROL, _UNKNOWN) and t]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == _USER_DEFINED and t])
    return backend


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {("default" if key == prefix else key[len(prefix) + 1 :]): value for key, value in metadata.items()
             if key == prefix or key.startswith(prefix + ".")}  # fmt: skip
    return {name: template for name, template in found.items() if isinstance(template, str)}
