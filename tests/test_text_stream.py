"""Incremental text: joined deltas are decode() of the ids, for any tokenizer, any split, any set of stop strings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.text.detokenizer import MAX_BYTE_RUN
from headrace.text.markers import Markers, MarkerScanner
from headrace.text.offsets import TextOffsets
from headrace.text.stream import TextStream, continuation

CORPUS = ["the theme of the thesis", "naïve café 😀😀🎉", "aab aaab ab", "日本語のテキスト", "\n\n  indented\n"]


def gpt2_byte_map() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Adapter:
    """A `tokenizers` tokenizer as the engine sees one; counts the tokens that it decodes."""

    def __init__(self, backend: Tokenizer, byte_level: bool = False):
        self.backend, self.byte_level, self.num_decoded = backend, byte_level, 0
        self.byte_map = gpt2_byte_map()
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.special_texts = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        byte_tokens = {b: backend.token_to_id(f"<0x{b:02X}>") for b in range(256)}
        self.byte_fallback = {i: b for b, i in byte_tokens.items() if i is not None}

    @property
    def size(self) -> int:
        return self.backend.get_vocab_size()

    def decode(self, ids, skip_special_tokens=True) -> str:
        self.num_decoded += len(ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        self.num_decoded += 1
        token = self.backend.id_to_token(token_id)
        if all(c in self.byte_map for c in token):
            return bytes(self.byte_map[c] for c in token)
        return token.encode()

    def id_of_byte(self, byte: int) -> int:
        return next(i for i, b in self.byte_fallback.items() if b == byte)

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids


def byte_level() -> Adapter:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>", "<|im start|>"]
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Adapter(backend, byte_level=True)


def sentencepiece(decoder) -> Adapter:
    words = ["▁", "▁the", "the", "▁a", "a", "b", "c", "▁▁", "é", "▁日", "本", "aa", "ab", "▁b", "\n", "▁ab", "#", ""]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [f"<0x{b:02X}>" for b in range(256)] + words:
        vocab.setdefault(token, len(vocab))
    merges = [("a", "a"), ("a", "b"), ("▁", "a"), ("▁", "b"), ("▁", "▁"), ("▁a", "b")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    return Adapter(backend)


def llama_decoder():
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def wordpiece() -> Adapter:
    words = ["[UNK]", "[SEP]", "the", "##me", "a", "##a", ".", "b", "##", "'", "s"]
    backend = Tokenizer(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[SEP]"])
    return Adapter(backend)


def end_of_word_bpe() -> Adapter:
    vocab = {t: i for i, t in enumerate(["<unk>", "a", "b", "</w>", "a</w>", "ab</w>", "c"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return Adapter(backend)


TOKENIZERS = {
    "byte_level": byte_level(),
    "llama": sentencepiece(llama_decoder()),
    "metaspace": sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "wordpiece": wordpiece(),
    "end_of_word": end_of_word_bpe(),
}
names = st.sampled_from(sorted(TOKENIZERS))


@st.composite
def tokenizer_and_ids(draw, names=names):
    """Any ids at all, bytes more often than not, or the ids of a text, perhaps cut in the middle of a character."""
    tokenizer = TOKENIZERS[draw(names)]
    if draw(st.booleans()):
        text = draw(st.text(st.sampled_from("ab c\n é日本😀🎉the▁�"), max_size=30))
        ids = tokenizer.encode(text)
        return tokenizer, ids[: draw(st.integers(0, len(ids)))]
    some_id = st.integers(0, tokenizer.size - 1)
    if tokenizer.byte_fallback:
        some_id = st.one_of(some_id, st.sampled_from([tokenizer.id_of_byte(b) for b in b"\xf0\x9f\x98\x80 \nA\xff"]))
    return tokenizer, draw(st.lists(some_id, max_size=40))


def split(draw, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]


def naive_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return end, max(ending, key=len)
    return None


@settings(max_examples=400)
@given(tokenizer_and_ids(), st.booleans(), st.data())
def test_joined_deltas_are_decode_of_the_ids(case, skip, data):
    tokenizer, ids = case
    stream = TextStream(tokenizer, [], False, skip)
    deltas = []
    for part in split(data.draw, ids):
        delta = stream.push(part)
        assert delta.stop_hit is None and delta.num_ids == len(part)
        deltas.append(delta.text)
    deltas.append(stream.finish())
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


def run_is_torn(tokenizer: Adapter, prompt: list[int], output: list[int], skip: bool) -> bool:
    """Whether a run of bytes goes on from the prompt and is no UTF-8: then decode() changes what the prompt's bytes are, and
    those characters stay the prompt's."""
    dropped = tokenizer.special_ids if skip else frozenset()
    around = ([i for i in reversed(prompt) if i not in dropped], [i for i in output if i not in dropped])
    is_byte = tokenizer.byte_fallback.__contains__
    last, first = (bytes(tokenizer.byte_fallback[i] for i in itertools.takewhile(is_byte, ids)) for ids in around)
    return bool(last and first) and not is_utf8(last[::-1] + first)


@settings(max_examples=600)
@given(tokenizer_and_ids(), st.data(), st.booleans())
def test_behind_a_prompt_the_text_is_what_it_adds_to_the_prompts(case, data, skip):
    """Where the prompt's own text stands in that of the whole; offsets are those of the text so far."""
    tokenizer, ids = case
    cut = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    stream, offsets = TextStream(tokenizer, [], False, skip, prompt), TextOffsets(tokenizer, skip, prompt)
    pieces, places = [], []
    for part in split(data.draw, output):
        pieces.append(stream.push(part).text)
        for i in part:
            places += [place for place, _ in offsets.push(i)]
    text = "".join([*pieces, stream.finish()])
    places += [place for place, _ in offsets.finish()]
    before, whole = (tokenizer.decode(some, skip_special_tokens=skip) for some in (prompt, ids))
    if whole.startswith(before) and not run_is_torn(tokenizer, prompt, output, skip):
        assert text == whole[len(before) :]
    assert len(places) == len(output) and offsets.num_out == len(text)
    assert places == sorted(places) and all(0 <= place <= len(text) for place in places)
    for n, place in enumerate(places):
        known = tokenizer.decode(ids[: cut + n], skip_special_tokens=skip)
        in_run = any(i in tokenizer.byte_fallback for i in ids[: cut + n + 1])
        if whole.startswith(before) and whole.startswith(known) and not in_run:  # what a run of bytes is, its end decides
            assert place == len(known) - len(before)


def is_utf8(data: bytes) -> bool:
    try:
        return data.decode() is not None
    except UnicodeDecodeError:
        return False


def begins_by_definition(tokenizer, ids, skip: bool) -> list[int]:
    """Where each token begins in decode(ids), and where the last one ends; of a byte-level tokenizer or a Llama-like one.

    A token has the characters that begin in it. Where bytes are no UTF-8, a byte-level text has a replacement character for
    each longest part of a character, and a run of byte tokens, as a whole, one for each byte.
    """
    dropped = [skip and i in tokenizer.special_ids for i in ids]
    if tokenizer.byte_level:
        data = [b"" if d else tokenizer.token_bytes(i) for i, d in zip(ids, dropped, strict=True)]
        return [len(b"".join(data[:n]).decode("utf-8", "replace")) for n in range(len(ids) + 1)]
    begins, text, run = [0], "", b""
    for n, (i, drop) in enumerate(zip(ids, dropped, strict=True)):
        if not drop and i in tokenizer.byte_fallback:
            if not run:
                whole = itertools.takewhile(lambda k: dropped[k] or ids[k] in tokenizer.byte_fallback, range(n, len(ids)))
                valid, before = is_utf8(bytes(tokenizer.byte_fallback[ids[k]] for k in whole if not dropped[k])), text
            run += bytes([tokenizer.byte_fallback[i]])
            text = before + (run.decode("utf-8", "replace") if valid else "�" * len(run))
        elif not drop:
            text, run = text + tokenizer.backend.id_to_token(i).replace("▁", " "), b""
        begins.append(len(text))
    return [max(0, begin - text.startswith(" ")) for begin in begins]


@settings(max_examples=600)
@given(tokenizer_and_ids(st.sampled_from(["byte_level", "llama"])), st.data(), st.booleans())
def test_a_token_begins_where_its_characters_do_whatever_the_bytes_are(case, data, skip):
    """Also what never becomes a character: parts of one, runs that turn out invalid, the incomplete end."""
    tokenizer, ids = case
    cut = data.draw(st.integers(0, len(ids)))
    begins, whole = begins_by_definition(tokenizer, ids, skip), tokenizer.decode(ids, skip_special_tokens=skip)
    assert begins[-1] == len(whole)
    stream, offsets = TextStream(tokenizer, [], False, skip, ids[:cut]), TextOffsets(tokenizer, skip, ids[:cut])
    text, places = "", []
    for i in ids[cut:]:
        text += stream.push([i]).text
        places += [place for place, _ in offsets.push(i)]
        assert offsets.num_out == len(text)
    text += stream.finish()
    places += [place for place, _ in offsets.finish()]
    assert text == whole[begins[cut] :]
    assert places == [begin - begins[cut] for begin in begins[cut:-1]]


def test_offsets_in_a_run_that_is_longer_than_what_is_held():
    tokenizer = TOKENIZERS["llama"]
    for text in ("日本" * 40, " " + "é🙂" * 30):
        ids = [tokenizer.id_of_byte(byte) for byte in text.encode()]
        offsets = TextOffsets(tokenizer, True)
        places = [place for i in ids for place, _ in offsets.push(i)] + [place for place, _ in offsets.finish()]
        assert places == begins_by_definition(tokenizer, ids, True)[:-1]


BEHIND = {  # prompt, output -> text: the characters that begin in the output
    "a word": (["▁the"], ["▁a", "▁a"], " a a"),
    "after a blank": (["▁the", "▁"], ["a"], "a"),
    "behind special tokens": (["▁the", "</s>"], ["▁a"], " a"),
    "only special tokens": (["<s>"], ["▁a"], "a"),
    "the end of a character": (["▁a", "<0xE6>"], ["<0x97>", "<0xA5>", "▁a"], " a"),
    "the end of one and another": (["▁a", "<0xE6>", "<0x97>"], ["<0xA5>", "<0xE6>", "<0x97>", "<0xA5>"], "日"),
    "what is no character": (["▁a", "<0xE6>"], ["<0xFF>", "a"], "�a"),
    "a character that only the output spoils": (["▁a", "<0xC3>", "<0xA9>"], ["<0xFF>", "▁a"], "� a"),
}


@pytest.mark.parametrize("case", BEHIND)
def test_the_first_word_behind_a_prompt(case):
    tokenizer = TOKENIZERS["llama"]
    prompt, output, text = BEHIND[case]
    ids = [[tokenizer.backend.token_to_id(t) for t in tokens] for tokens in (prompt, output)]
    assert continuation(tokenizer, *ids) == text


def test_a_character_that_began_in_a_prompt_of_bytes():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("日本")
    for cut in range(1, len(ids)):
        begun = sum(byte & 0xC0 != 0x80 for i in ids[:cut] for byte in tokenizer.token_bytes(i))
        assert continuation(tokenizer, ids[:cut], ids[cut:]) == "日本"[begun:]


def specials_of(tokenizer) -> list[str]:
    return sorted(tokenizer.special_texts)


@settings(max_examples=300)
@given(tokenizer_and_ids(), st.booleans(), st.booleans(), st.data())
def test_a_stop_string_may_hold_special_tokens(case, include, skip, data):
    """Shown or not, a special token is found by its text; what is shown is cut there."""
    tokenizer, ids = case
    specials = specials_of(tokenizer)
    ids = [i for i in ids if i not in tokenizer.special_ids]
    some = data.draw(st.sampled_from(specials)) if specials else None
    if some is None:
        return
    at = data.draw(st.integers(0, len(ids)))
    ids.insert(at, tokenizer.special_texts[some])
    stream = TextStream(tokenizer, [some, "never seen"], include, skip)
    deltas, taken = [], 0
    for part in split(data.draw, ids):
        delta = stream.push(part)
        deltas.append(delta.text)
        taken += delta.num_ids
    deltas.append(stream.finish())
    assert stream.stop_hit == some and taken == at + 1
    if skip or tokenizer.byte_level:
        assert "".join(deltas).removesuffix(some).rstrip("�") == tokenizer.decode(ids[:at]).rstrip("�")
    assert "".join(deltas).endswith(some) is include


def test_special_tokens_among_text_in_a_stop_string():
    tokenizer = TOKENIZERS["byte_level"]
    end, other = tokenizer.special_texts["<|end|>"], tokenizer.special_texts["<|im start|>"]
    ids = [*tokenizer.encode("a b"), end, *tokenizer.encode("c"), other, *tokenizer.encode("d")]
    for stop, cut, taken in (("b<|end|>c", "a ", 5), ("<|end|>c<|im start|>", "a b", 6), ("<|end|><|im start|>", None, 7)):
        for include in (False, True):
            stream = TextStream(tokenizer, [stop], include)
            delta = stream.push(ids)
            assert (delta.stop_hit, delta.num_ids) == ((stop, taken) if cut is not None else (None, 7))
            text = delta.text + stream.finish()
            assert text == ("a bcd" if cut is None else cut + stop * include)
    written = tokenizer.encode("x<|end")
    assert TextStream(tokenizer, ["<|end|>"]).push([*written, *tokenizer.encode("|>")]).stop_hit == "<|end|>"


@settings(max_examples=400)
@given(tokenizer_and_ids(), st.lists(st.text(st.sampled_from("ab theé😀\n"), min_size=1, max_size=4), max_size=4),
       st.booleans(), st.data())  # fmt: skip
def test_stop_strings_cut_where_the_offline_definition_cuts(case, stops, include, data):
    tokenizer, ids = case
    text = tokenizer.decode(ids, skip_special_tokens=True)
    hit = naive_stop(text, stops)
    expected = text if hit is None else text[: hit[0] if include else hit[0] - len(hit[1])]

    one_by_one = TextStream(tokenizer, stops, include, True)
    count = 0
    for i in ids:
        count += one_by_one.push([i]).num_ids

    stream = TextStream(tokenizer, stops, include, True)
    deltas, taken = [], 0
    for part in split(data.draw, ids):
        delta = stream.push(part)
        deltas.append(delta.text)
        taken += delta.num_ids
        assert expected.startswith("".join(deltas))
    deltas.append(stream.finish())
    assert "".join(deltas) == expected
    one_by_one.finish()
    assert stream.stop_hit == one_by_one.stop_hit == (hit[1] if hit else None)
    assert taken == count


@settings(max_examples=150)
@given(tokenizer_and_ids(), st.lists(st.text(st.sampled_from("ab theé"), min_size=1, max_size=3), max_size=3),
       st.booleans(), st.integers(1, 8), st.data())  # fmt: skip
def test_no_stop_string_is_looked_for_in_the_first_tokens(case, stops, include, least, data):
    """min_tokens holds off stop strings as it does stop ids."""
    tokenizer, ids = case
    early = TextStream(tokenizer, skip_special_tokens=True).push(ids[:least]).text
    late = tokenizer.decode(ids, skip_special_tokens=True)[len(early) :]
    hit = naive_stop(late, stops)
    stream = TextStream(tokenizer, stops, include, True, min_tokens=least)
    text = "".join(stream.push(part).text for part in split(data.draw, ids)) + stream.finish()
    assert text == early + (late if hit is None else late[: hit[0] if include else hit[0] - len(hit[1])])
    assert stream.stop_hit == (hit[1] if hit else None)


@settings(max_examples=200)
@given(st.text(st.sampled_from("ab é😀\n"), max_size=20), st.text(st.sampled_from("ab é😀"), min_size=1, max_size=3))
def test_no_more_ids_are_taken_than_the_stop_string_needs(text, stop):
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text)
    needed = next((n for n in range(len(ids) + 1) if stop in tokenizer.decode(ids[:n])), len(ids))
    assert TextStream(tokenizer, [stop], False, True).push(ids).num_ids == needed


@pytest.mark.parametrize("name", ["byte_level", "llama", "metaspace"])
def test_a_character_over_several_tokens_comes_whole(name):
    tokenizer = TOKENIZERS[name]
    stream = TextStream(tokenizer, [], False, True)
    ids = tokenizer.encode("a🦜b🦜🦜c")
    deltas = [stream.push([i]).text for i in ids] + [stream.finish()]
    assert len(ids) >= 12 and "".join(deltas) == "a🦜b🦜🦜c"
    assert not any("�" in d for d in deltas)


@pytest.mark.parametrize("name", ["byte_level", "llama", "metaspace"])
def test_a_truncated_character_ends_as_decode_has_it(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("ab🦜")[:-1]
    stream = TextStream(tokenizer, [], False, True)
    pushed = stream.push(ids).text
    assert "�" not in pushed
    assert pushed + stream.finish() == tokenizer.decode(ids) != "ab"


def test_only_what_may_begin_a_stop_string_is_held():
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, ["aab"], True, True)
    assert [stream.push(tokenizer.encode(c)).text for c in "aaaxaaab"] == ["", "", "a", "aax", "", "", "a", "aab"]
    assert stream.push(tokenizer.encode("more")) == ("", "aab", 0)
    assert stream.finish() == ""


def test_what_is_held_at_the_end_is_flushed():
    tokenizer = TOKENIZERS["llama"]
    stream = TextStream(tokenizer, ["abc"], False, True)
    assert stream.push(tokenizer.encode("the ab")).text == "the "
    assert stream.finish() == "ab" and stream.stop_hit is None


def test_a_stop_string_completed_by_the_flush_is_seen():
    tokenizer = TOKENIZERS["llama"]
    stream = TextStream(tokenizer, ["🦜"], False, True)
    assert stream.push(tokenizer.encode("a🦜")).text == "a"
    assert stream.finish() == "" and stream.stop_hit == "🦜"


def test_a_long_run_of_fallback_bytes_does_not_wait_for_its_end():
    tokenizer = TOKENIZERS["llama"]
    text = "a" + "မြန်မာ🦜" * 30 + " the"
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, [], False, True)
    got = ""
    for n, i in enumerate(ids, start=1):
        got += stream.push([i]).text
        assert n - len(got.encode()) <= MAX_BYTE_RUN
        assert text.startswith(got)
    assert got + stream.finish() == text


@pytest.mark.parametrize("kind", ["text", "invalid", "special", "empty", "special after half a character"])
@pytest.mark.parametrize("name", ["byte_level", "llama", "metaspace"])
def test_work_is_linear_in_the_number_of_ids(name, kind):
    tokenizer = TOKENIZERS[name]
    half = tokenizer.encode("🦜")[:-1]
    special = min(tokenizer.special_ids)
    ids = {
        "text": tokenizer.encode("the ab 🦜 aab\n" * 300),
        "invalid": [tokenizer.id_of_byte(0xFF) if tokenizer.byte_fallback else half[0]] * 3000,
        "special": [special] * 3000,
        "empty": [tokenizer.backend.token_to_id("") or special] * 3000,
        "special after half a character": half + [special] * 3000,
    }[kind]
    tokenizer.num_decoded = 0
    stream = TextStream(tokenizer, ["nowhere"], False, True)
    for i in ids:
        stream.push([i])
    assert tokenizer.num_decoded <= 10 * len(ids) + 2 * MAX_BYTE_RUN


@settings(max_examples=500)
@given(st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=5), st.lists(st.text("ab<", max_size=8)))
def test_scanner_finds_what_the_definition_finds_and_holds_no_more_than_it_must(markers, pieces):
    scanner, text, released = MarkerScanner(markers), "", ""
    for piece in pieces:
        text += piece
        hit = naive_stop(text, markers)
        scan = scanner.push(piece)
        released += scan.text
        if hit is not None:
            assert scan.marker == hit[1]
            assert (released, scan.rest) == (text[: hit[0] - len(hit[1])], text[hit[0] :])
            assert scanner.held == ""
            return
        assert scan.marker is None and scan.rest == ""
        held = max((n for m in markers for n in range(len(m)) if text.endswith(m[:n])), default=0)
        assert scanner.held == text[len(text) - held :]
        assert released + scanner.held == text
    assert released + scanner.flush() == text


def test_markers_are_shared_and_empty_ones_refused():
    markers = Markers(["</s>", "\n\n"])
    first, second = MarkerScanner(markers), MarkerScanner(markers)
    assert first.push("a\n").text == "a" and second.push("b").text == "b"
    assert first.push("\n").marker == "\n\n"
    with pytest.raises(ValueError):
        Markers(["a", ""])
    assert MarkerScanner([]).push("anything").text == "anything"
