"""Text to token ids and back: the checkpoint's tokenizer, by the `tokenizers` library. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from headrace.errors import CheckpointError, ParameterError
from headrace.machine import give_memory_back
from headrace.model.formats.gguf import read_gguf
from headrace.model.formats.gguf_tokenizer import tokenizer_parts
from headrace.model.formats.safetensors_file import read_json, refuse_lfs_pointer
from headrace.model.formats.tokenizer_file import TokenizerExtras, build_backend, rename_tokens

if TYPE_CHECKING:
    from headrace.model.checkpoint import Checkpoint

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
LARGE = 1 << 20  # characters: the library takes 75 to 600 bytes for each, so one such text at a time, and they go back
_ENDS = ("eos_token", "eot_token", "eom_token")  # of a text, a turn, a message that is not the turn's last


class Tokenizer:
    """A checkpoint's tokenizer. Immutable after construction; safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, extras: TokenizerExtras):
        backend.no_truncation()  # a tokenizer.json may carry either: both would alter prompts silently
        backend.no_padding()
        self.backend, self._extras = backend, extras
        self.chat_templates = dict(extras.chat_templates)
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = (extras.roles.get(role) for role in _ROLES)
        ends = (backend.token_to_id(extras.roles[role]) for role in _ENDS if role in extras.roles)
        self.end_token_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        self._prefix, self._suffix = extras.prefix, extras.suffix
        around = backend.encode("", add_special_tokens=True).ids if extras.prefix is None else list(extras.prefix)
        self._adds_bos = self.bos_token_id is not None and around[:1] == [self.bos_token_id]
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = {token.content: i for i, token in added.items() if token.special and token.content}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids are below it; some may be unused
        decoders = _decoder_kinds(backend)
        self.byte_level = decoders == ["ByteLevel"]  # decode() is the UTF-8 text of all token_bytes
        self.byte_fallback: dict[int, int] = {}  # id -> byte, of the tokens <0xNN>
        if "ByteFallback" in decoders:
            names = ((f"<0x{byte:02X}>", byte) for byte in range(256))
            self.byte_fallback = {vocabulary[name]: byte for name, byte in names if name in vocabulary}
        self._has_token = np.zeros(self.vocab_size, np.bool_)
        self._has_token[[i for i in vocabulary.values() if i not in extras.unused]] = True
        self._bytes: dict[int, bytes] = {}  # of tokens that have been asked for
        self._large = Lock()
        self._metaspace = bool({"ByteFallback", "Metaspace"} & set(decoders))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of `checkpoint`, or the one that was named in its place. Raises CheckpointError."""
        path = checkpoint.tokenizer_path or checkpoint.path
        if path.is_dir():
            return cls.from_directory(path)
        gguf = checkpoint.gguf if checkpoint.gguf is not None and checkpoint.gguf.path == path else read_gguf(path)
        return cls.from_gguf_metadata(path, gguf.metadata)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """From tokenizer.json, with what tokenizer_config.json and its companions add. Raises CheckpointError.

        What goes around a text is up to tokenizer.json's post-processor; add_bos_token and add_eos_token of the config,
        which some files contradict it with, are not looked at (as in transformers 5).
        """
        path = directory / "tokenizer.json"
        if not path.exists():
            others = [n for n in ("tokenizer.model", "spiece.model", "vocab.txt", "vocab.json", "tekken.json")
                      if (directory / n).exists()]  # fmt: skip
            hint = f"; {others[0]} alone is not supported, convert it with transformers" if others else ""
            raise CheckpointError(f"{directory} has no tokenizer.json{hint}")
        raw = path.read_bytes()
        refuse_lfs_pointer(path, raw)
        backend = build_backend(path, lambda: tokenizers.Tokenizer.from_str(raw.decode("utf-8-sig")))
        config = _optional_json(directory / "tokenizer_config.json")
        roles = _roles(_optional_json(directory / "special_tokens_map.json")) | _roles(config)
        _add_configured_tokens(directory, backend, config, roles)
        return cls(backend, TokenizerExtras(roles, _chat_templates(directory, config)))

    @classmethod
    def from_gguf_metadata(cls, path: Path, metadata: dict[str, Any]) -> Tokenizer:
        """From the metadata of the GGUF file `path`. Raises CheckpointError for a kind of tokenizer that is unknown."""
        return cls(*tokenizer_parts(path, metadata))

    def renamed(self, names: Mapping[str, str]) -> Tokenizer:
        """A copy that knows these special tokens by other spellings only. Raises ValueError where it would not be exact."""
        roles = {role: names.get(text, text) for role, text in self._extras.roles.items()}
        return Tokenizer(rename_tokens(self.backend, names), dataclasses.replace(self._extras, roles=roles))

    @property
    def chat_template(self) -> str | None:
        """The default chat template, or the only one there is."""
        if "default" in self.chat_templates or len(self.chat_templates) != 1:
            return self.chat_templates.get("default")
        return next(iter(self.chat_templates.values()))

    @property
    def bos_token_id(self) -> int | None:
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id(self.eos_token)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def valid_ids(self, vocab_size: int) -> np.ndarray:
        """bool [vocab_size]: which of the ids that a model has rows for are tokens. The others mean nothing: models pad
        their vocabularies, and tokenizers have holes."""
        valid = np.zeros(vocab_size, np.bool_)
        shared = min(vocab_size, self.vocab_size)
        valid[:shared] = self._has_token[:shared]
        return valid

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text become their ids.

        `add_special_tokens` puts the tokenizer's own around it, but no second bos before a text that starts with one.
        Raises ParameterError if the text is not valid Unicode.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """encode() of each text, in parallel threads."""
        large = sum(map(len, texts)) > LARGE
        try:
            with self._large if large else nullcontext():
                batch = self._ids(list(texts), by_backend=add_special_tokens and self._prefix is None)
                if large:
                    give_memory_back()
        except (TypeError, UnicodeError) as error:  # a lone surrogate cannot cross into the library
            bad = next((t for t in texts if not _is_unicode(t)), "")
            raise ParameterError("prompt", bad, "text without lone surrogates") from error
        return [self._finish(*pair) for pair in zip(texts, batch, strict=True)] if add_special_tokens else batch

    def _ids(self, texts: list[str], by_backend: bool) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=by_backend)]

    def spans(self, text: str, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Of each token of encode(text), the characters of the text that it was made from: begin and end. They may overlap;
        a token that was put around the text has none."""
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens and self._prefix is None)
        if not add_special_tokens:
            return encoding.offsets
        spans = [*[(0, 0)] * len(self._prefix or ()), *encoding.offsets, *[(len(text),) * 2] * len(self._suffix)]
        return spans[len(spans) - len(self._finish(text, encoding.ids)) :]

    def _finish(self, text: str, ids: list[int]) -> list[int]:
        if self._prefix is not None:
            ids = [*self._prefix, *ids, *self._suffix]
        return ids[1:] if self._adds_bos and ids[1:2] == ids[:1] and text.startswith(self.bos_token or "") else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that no token has give no text."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token_id: int) -> str:
        """The token as the vocabulary spells it; "" for an id that no token has."""
        return self.backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds in the middle of a text; not always whole characters. b"" for an id that no token has."""
        if (known := self._bytes.get(token_id)) is not None:
            return known
        if spelled := self._spelled_bytes(token_id):
            self._bytes[token_id] = spelled
        return spelled

    def _spelled_bytes(self, token_id: int) -> bytes:
        if (byte := self.byte_fallback.get(token_id)) is not None:
            return bytes([byte])
        piece = self.id_to_piece(token_id)
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[c] for c in piece])
            except KeyError:  # an added token, spelled as it is
                return piece.encode()
        if self._metaspace and token_id not in self._added:
            piece = piece.replace("▁", " ")
        return piece.encode()

    def token_to_text(self, token_id: int) -> str:
        """token_bytes as text; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells bytes as printable characters: this maps them back (the alphabet of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = byte_alphabet()


def _is_unicode(text: Any) -> bool:
    try:
        text.encode()
    except (AttributeError, UnicodeError):
        return False
    return True


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """The type of the decoder, or those of its sequence."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [d["type"] for d in state["decoders"]] if state["type"] == "Sequence" else [state["type"]]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _roles(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and so on: each a string, or an object with a content."""
    found = {role: config[role]["content"] if isinstance(config.get(role), dict) and "content" in config[role]
             else config.get(role) for role in dict.fromkeys(_ROLES + _ENDS)}  # fmt: skip
    return {role: token for role, token in found.items() if isinstance(token, str)}


def _add_configured_tokens(directory: Path, backend, config: dict[str, Any], roles: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json has, and its flags for those that tokenizer.json has too."""
    listed = config.get("added_tokens_decoder")
    tokens: list[tuple[int, dict[str, Any]]] = []
    if isinstance(listed, dict):
        tokens = sorted((int(i), t) for i, t in listed.items() if i.isdecimal() and isinstance(t, dict))

    def add() -> tokenizers.Tokenizer:
        present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        for _, flags in tokens:
            options = ("single_word", "lstrip", "rstrip", "normalized", "special")
            token = tokenizers.AddedToken(str(flags["content"]), **{k: bool(flags[k]) for k in options if k in flags})
            if repr(present.get(token.content)) != repr(token):
                backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        for content in roles.values():
            if content not in present or not present[content].special:
                backend.add_special_tokens([present.get(content, tokenizers.AddedToken(content, normalized=False))])
        return backend

    build_backend(directory / "tokenizer_config.json", add)


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. A file of its own wins over tokenizer_config.json."""
    templates: dict[str, str] = {}
    given = config.get("chat_template")
    if given is None:
        given = _optional_json(directory / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        pairs = [(t.get("name"), t.get("template")) for t in given if isinstance(t, dict)]
        templates |= {n: t for n, t in pairs if isinstance(n, str) and isinstance(t, str)}
    files = [("default", directory / "chat_template.jinja")]
    files += [(p.stem, p) for p in sorted((directory / "additional_chat_templates").glob("*.jinja"))]
    for name, path in files:
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return templates
