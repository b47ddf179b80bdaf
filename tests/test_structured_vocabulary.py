"""Added tokens and grammars: a marker is the token where the tokenizer has one, special or not, and a text where it has none."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace.conversation.answer import special_id
from headrace.conversation.tool_grammar import forced_calls, free_calls
from headrace.model.formats.tokenizer_file import TokenizerExtras
from headrace.model.tokenizer import Tokenizer as OurTokenizer
from headrace.sampling.structured_outputs import StructuredOutputsParams
from headrace.structured_output.llguidance_backend import LLGuidance, Matcher
from headrace.structured_output.vocabulary import GrammarVocabulary
from structured_driver import EOS, tokenizer
from test_structured_tools import SCHEMAS, TOOLS, read

MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|im_end|>"]
KINDS = ["text", "special", "absent"]  # what the markers are to a tokenizer
FORMATS = ["hermes", "llama3_json", "mistral", "mistral 11"]
OPENING = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "mistral 11": "[TOOL_CALLS]"}
SIZE = 600


@functools.cache
def backend_of(kind: str) -> Tokenizer:
    backend = Tokenizer.from_str(tokenizer().to_str())
    if kind == "text":
        backend.add_tokens([AddedToken(m, special=False, normalized=False) for m in MARKERS])
    elif kind == "special":
        backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    return backend


@functools.cache
def guide(kind: str) -> LLGuidance:
    return LLGuidance(backend_of(kind).to_str(), SIZE, [EOS])


def matcher(kind: str, **wish: Any) -> Matcher:
    return guide(kind).compile(StructuredOutputsParams(**wish))


def ids_of(kind: str, text: str) -> list[int]:
    return backend_of(kind).encode(text, add_special_tokens=False).ids


def allowed(matcher: Matcher) -> set[int]:
    row = np.zeros(-(-SIZE // 32), np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def marker_of(kind: str):
    ours = OurTokenizer(backend_of(kind), TokenizerExtras())

    def marker(text: str) -> str:
        token = special_id(ours, text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    return marker


def lark(make, kind: str, form: str, **options: Any) -> str:
    return make(form.split()[0], TOOLS, True, marker_of(kind), args_tags=form == "mistral 11", **options)


def written(kind: str, matcher: Matcher, seed: int, begin: list[int] = [], most: int = 400) -> str | None:  # noqa: B006
    """What a random model writes under the masks; None if it does not come to an end."""
    rng = np.random.default_rng(seed)
    out: list[int] = []
    while not matcher.ended and len(out) < most:
        choice = allowed(matcher)
        assert choice, f"{backend_of(kind).decode(out, skip_special_tokens=False)}: {matcher.error}"
        if EOS in choice and len(choice) > 1 and (len(out) >= len(begin)) and rng.random() < 0.5:
            break
        token = begin[len(out)] if len(out) < len(begin) else int(rng.choice(sorted(choice - {EOS} or choice)))
        assert token in choice, (out, token)
        assert matcher.accept([token])
        out.append(token)
    return backend_of(kind).decode(out, skip_special_tokens=False) if matcher.complete else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMATS)
def test_forced_calls_begin_with_the_token(form, kind):
    forced = matcher(kind, grammar=lark(forced_calls, kind, form))
    if form != "llama3_json":  # its calls need no marker
        first = ids_of(kind, OPENING[form])[0]
        assert allowed(forced) == {first}
        assert kind == "absent" or first == backend_of(kind).token_to_id(OPENING[form])
    ended = 0
    for seed in range(4):
        text = written(kind, forced.fork(), seed)
        if text is not None:
            ended += 1
            calls, plain = read(form, text)
            assert calls and not plain.strip()
            for name, arguments in calls:
                jsonschema.validate(arguments, SCHEMAS[name])
    assert ended


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMATS)
def test_strict_calls_may_begin_with_the_token(form, kind):
    free = matcher(kind, grammar=lark(free_calls, kind, form, reasoning=("<think>", "</think>")))
    assert EOS in allowed(free)
    thought = ids_of(kind, "<think>a</think>b")
    assert free.valid_prefix(thought) == len(thought)
    opening = ids_of(kind, OPENING[form])
    if form == "llama3_json" and kind != "special":
        return  # there the marker is a text like any other
    assert free.valid_prefix([*ids_of(kind, "Hm. "), *opening]) == len(ids_of(kind, "Hm. ")) + len(opening)
    for seed in range(3):
        text = written(kind, free.fork(), seed, begin=opening, most=300)
        if text is not None:
            calls, _ = read(form, text)
            assert calls
            for name, arguments in calls:
                jsonschema.validate(arguments, SCHEMAS[name])
    bad = [*opening, *ids_of(kind, "no call")]
    assert free.valid_prefix(bad) < len(bad)


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_a_marker_is_text(kind):
    """In a value of JSON, a choice, a regular expression: forced or not, and also where a token has that name."""
    value = "a<tool_call>b<|im_end|>[ARGS]c"
    for wish in ({"json": {"const": value}}, {"choice": [json.dumps(value)]}, {"regex": '"a<tool_call>b<\\|im_end\\|>\\[ARGS\\]c"'}):
        forced = matcher(kind, **wish)
        out: list[int] = []
        while not forced.ended and len(out) < 60:
            token = min(allowed(forced) - {EOS})
            assert forced.accept([token])
            out.append(token)
        assert backend_of(kind).decode(out, skip_special_tokens=True) == json.dumps(value)
    free = matcher(kind, json={"type": "string"})
    spelled = ids_of(kind, f'"{value}"')
    assert (free.valid_prefix(spelled) == len(spelled)) == (kind != "special")


def test_ends_are_never_text():
    """An end token that is no special token of the tokenizer (Command R's) does not end a string in its middle."""
    end = backend_of("text").token_to_id("<|im_end|>")
    string = LLGuidance(backend_of("text").to_str(), SIZE, [end]).compile(StructuredOutputsParams(json={"type": "string"}))
    assert string.accept(ids_of("text", '"ab')) and end not in allowed(string)
    assert string.accept(ids_of("text", '"')) and allowed(string) == {end}


def test_rows_without_a_token_are_not_allowed():
    string = matcher("text", regex="(.|\\n)*")
    assert max(allowed(string)) < backend_of("text").get_vocab_size()


@pytest.mark.parametrize("kind", KINDS)
def test_structural_tags_begin_with_the_token(kind):
    tag = {"begin": "<|python_tag|>f(", "schema": {"type": "integer"}, "end": ")</tool_call>"}
    found = matcher(kind, structural_tag={"structures": [tag], "triggers": ["<|python_tag|>f"]})
    for text, good in (("a<|python_tag|>f(7)</tool_call>b", True), ("a", True), ("<|python_tag|>f(x)</tool_call>", False)):
        ids = ids_of(kind, text)
        copy = found.fork()
        assert (copy.accept(ids) and copy.complete) == good, text


@pytest.mark.parametrize("kind", ["text", "special"])
def test_a_grammar_may_name_an_added_token(kind):
    named = matcher(kind, grammar='start: <think> "<think>" /x"<think>/ </think> // <think>\n%llguidance {}\n')
    think, end = (backend_of(kind).token_to_id(t) for t in ("<think>", "</think>"))
    text = [t for piece in ("<think>", 'x"<think>') for t in guide(kind)._vocabulary(piece)]
    assert named.accept([think, *text, end]) and named.complete


SPM = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": b + 3 for b in range(256)}}
PIECES = ["▁", "a", "b", "ab", "▁ab", '"', "é", "▁▁", "{", "}", ":", "▁:"]


def sentencepiece(prefix: bool, added: list[AddedToken]) -> Tokenizer:
    vocab = SPM | {p: len(SPM) + i for i, p in enumerate(PIECES)}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("▁", "ab"), ("▁", "▁"), ("▁", ":")], unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(added)
    return backend


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("flags", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}], ids=str)
def test_what_is_forced_is_its_very_text_with_any_tokenizer(prefix, flags):
    """Also where the tokenizer puts a space before a text, its added tokens eat spaces, or it normalizes."""
    text = "ab <x> ab<x>ab é  e\u0301 </s>"
    backend = sentencepiece(prefix, [AddedToken("<x>", normalized=False, **flags)])
    for normalizer in (backend.normalizer, normalizers.Sequence([backend.normalizer, normalizers.NFC()])):
        backend.normalizer = normalizer
        forced = LLGuidance(backend.to_str(), 300, [2]).compile(StructuredOutputsParams(choice=[text]))
        ours = OurTokenizer(backend, TokenizerExtras())
        out = b""
        while not forced.ended and len(out) < 100:
            row = np.zeros(10, np.int32)
            forced.fill(row)
            bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(next(t for t in bits if t != 2))
            assert forced.accept([token])
            out += ours.token_bytes(token)
        assert out.decode() == text


def test_a_prefix_for_the_beginning_of_a_text_is_not_put_into_its_middle():
    """The tokens are those that the tokenizer itself would have there, not the longest that fit."""
    plain, prefixing = sentencepiece(False, []), sentencepiece(True, [])
    text = "a  ab"
    own = plain.encode(text, add_special_tokens=False).ids
    vocabulary = GrammarVocabulary(prefixing.to_str(), 300, [2])
    assert vocabulary(text) == own != vocabulary.engine.greedy_tokenize(text)
    backend = Tokenizer.from_str(prefixing.to_str())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always", split=False)])
    assert GrammarVocabulary(backend.to_str(), 300, [2])(text) == own
