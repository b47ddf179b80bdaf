"""What is asked: random lengths, shared prefixes, or a file of prompts or of lengths. The same seed gives the same requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.errors import ParameterError
from headrace.files import read_text
from headrace_bench.target import BenchmarkError, Plan, Target

# common English words; nearly every tokenizer has each, with its space, as one token
WORDS = (  # noqa: SIM905
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you "
    "were all her she there would their we him been has when who will no more if out so up said what its about than into "
    "them can only other time new some could these two may first then do any like my now over such our man me even most "
    "made after also well before must years much where your way down should because long each just state people those "
    "water house work day place small hand world high right give old great life same another part look great come number"
).split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a request: of its own prompt, of a prefix shared with others (and which), of the answer."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of given lengths: token ids below `vocabulary` where the server takes them (not None), else words."""

    seed: int
    vocabulary: int | None
    tokens_per_word: float = 1.0

    def plans(self, wanted: list[Plan | Lengths], run: str) -> list[Plan]:
        """Each `run` gets other tokens, lest one run's prompts are in the prefix cache for the next; plans stay."""
        return [w if isinstance(w, Plan) else self._make(f"{self.seed}/{run}", i, w) for i, w in enumerate(wanted)]

    def _make(self, key: str, index: int, lengths: Lengths) -> Plan:
        parts = [(f"{key}/prefix {lengths.prefix}", lengths.prefix_len), (f"{key}/{index}", lengths.input_len)]
        if self.vocabulary is not None:
            ids = [t for key, n in parts for t in random.Random(key).choices(range(self.vocabulary), k=n)]
            return Plan(ids, lengths.output_len)
        counts = [round(n / self.tokens_per_word) for _, n in parts]
        words = [w for (key, _), n in zip(parts, counts, strict=True) for w in random.Random(key).choices(WORDS, k=n)]
        return Plan(" ".join(words) or WORDS[0], lengths.output_len)


async def tokens_per_word(target: Target) -> float:
    """Measured by two small requests; 1 where the server tells no usage."""
    counts = []
    for n in (10, 60):
        words = " ".join(random.Random(n).choices(WORDS, k=n))
        counts.append((await target.send(Plan(words, 1))).prompt_tokens)
    return max((counts[1] - counts[0]) / 50, 0.1) if all(counts) else 1.0


def random_lengths(seed: int, count: int, input_len: int, output_len: int, prefix_len: int, ratio: float) -> list[Lengths]:
    """Uniform in [length * (1 - ratio), length * (1 + ratio)]; all begin with the same `prefix_len` tokens."""
    if not 0 <= ratio < 1:
        raise ParameterError("--random-range-ratio", ratio, "a number in [0, 1)")
    rng = random.Random(f"{seed}/lengths")

    def draw(length: int) -> int:
        return rng.randint(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio))))

    return [Lengths(draw(input_len), draw(output_len), prefix_len) for _ in range(count)]


def prefix_repetition(seed: int, count: int, prefixes: int, prefix_len: int, suffix_len: int, output_len: int) -> list[Lengths]:
    """Each prefix is used equally often, in random order."""
    found = [Lengths(suffix_len, output_len, prefix_len, i % prefixes) for i in range(count)]
    random.Random(f"{seed}/order").shuffle(found)
    return found


def from_file(path: str, count: int | None, output_len: int) -> Iterator[Plan | Lengths]:
    """A JSON object a line: {"prompt": text or ids} or {"input_len": n}; both may have "output_len" (default `output_len`).

    "output_tokens" and "input_tokens" are other names of these. With fewer lines than `count` they are used again.
    """
    lines = [line for line in read_text("--dataset-path", path).split("\n") if line.strip()]
    if not lines:
        raise ParameterError("--dataset-path", path, "a file with at least one line")
    entries = [_entry(path, number, line, output_len) for number, line in enumerate(lines, 1)]
    for i in range(len(entries) if count is None else count):
        yield entries[i % len(entries)]


def _entry(path: str, number: int, line: str, output_len: int) -> Plan | Lengths:
    allowed = 'lines such as {"prompt": "text", "output_len": 64} or {"input_len": 512, "output_len": 64}'
    try:
        data = json.loads(line)
        prompt = data.get("prompt")
        length = data.get("input_len", data.get("input_tokens"))
        output = data.get("output_len", data.get("output_tokens", output_len))
        ids = isinstance(prompt, list) and all(type(t) is int and t >= 0 for t in prompt)
        if type(output) is int and output >= 1:
            if prompt and (isinstance(prompt, str) or ids):
                return Plan(prompt, output)
            if prompt is None and type(length) is int and length >= 1:
                return Lengths(length, output)
    except (ValueError, AttributeError):
        pass
    raise ParameterError(f"--dataset-path, line {number} of {path}", line, allowed)


async def prompt_maker(target: Target, seed: int, wanted: list[Plan | Lengths]) -> PromptMaker:
    """Finds out with a few small requests how this server takes prompts."""
    if target.endpoint == "chat" and any(isinstance(w, Plan) and isinstance(w.prompt, list) for w in wanted):
        raise BenchmarkError("prompts of token ids need --endpoint completions")
    if not any(isinstance(w, Lengths) for w in wanted):
        return PromptMaker(seed, None)
    vocabulary = await target.largest_token_id()
    return PromptMaker(seed, vocabulary, 1.0 if vocabulary is not None else await tokens_per_word(target))
