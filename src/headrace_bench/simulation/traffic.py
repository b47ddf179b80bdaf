"""Who asks what and when, in virtual time: arrivals, built-in distributions of lengths, conversations, or a JSONL file.

Prompts are token ids without meaning, made so that equal prefixes are equal ids and nothing else is: the real prefix index
and router find what they would find.
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ParameterError
from headrace.files import read_text
from headrace_bench.load import Load, arrival_times

DAY = 86400.0
IDS = 2**30  # prompts are runs of ids that begin below this


class Turn(NamedTuple):
    """A later message of a conversation: seconds after the answer before it, tokens of the message and of its answer."""

    after: float
    own: int
    output: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, or a conversation that begins with it."""

    own: int  # tokens of its own prompt, behind the prefix
    output: int
    prefix: str = ""  # who has the same name begins with the same tokens
    prefix_len: int = 0
    turns: tuple[Turn, ...] = ()
    ids: tuple[int, ...] | None = None  # the prompt itself, where it is known
    at: float | None = None  # seconds from the beginning, where the file says


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of lengths by points of its quantile function; in between their logarithms are linear."""

    at: tuple[float, ...]
    tokens: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn = np.exp(np.interp(rng.random(count), self.at, np.log(self.tokens)))
        return np.maximum(1, np.rint(drawn)).astype(int).tolist()


@dataclass(frozen=True, slots=True)
class LogNormal:
    """By its median and the standard deviation of its logarithm, cut off at `most`."""

    median: float
    sigma: float
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(drawn, 1, self.most).astype(int).tolist()


AT = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
# Azure's LLM inference traces of November 2023 (github.com/Azure/AzurePublicDataset, CC-BY; Patel et al., Splitwise, ISCA 2024)
AZURE_CHAT = (
    Quantiles(AT, (2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 6179, 14050)),
    Quantiles(AT, (7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 954, 1000)),
)
AZURE_CODE = (
    Quantiles(AT, (3, 17, 75, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437, 7437)),
    Quantiles(AT, (6, 6, 6, 7, 9, 13, 24, 55, 90, 251, 825, 1899)),
)


@dataclass(frozen=True, slots=True)
class Mix:
    """A named kind of traffic. The lengths of `own` and `output` are those of a request, or of each turn of a conversation."""

    words: str  # what it is, and where its figures are from
    own: Quantiles | LogNormal
    output: Quantiles | LogNormal
    prefixes: int = 0  # so many prefixes are shared, the k-th likeliest in proportion to 1 / k
    prefix_len: int = 0
    mean_turns: float = 1.0  # their number is geometric
    think: float = 0.0  # mean seconds between an answer and the next message, exponential

    def draw(self, seed: str, count: int) -> list[Ask]:
        """Conversations with about `count` requests in all."""
        rng = np.random.default_rng(zlib.crc32(seed.encode()))
        num = max(1, round(count / self.mean_turns))
        turns = rng.geometric(1 / self.mean_turns, num).tolist() if self.mean_turns > 1 else [1] * num
        total = sum(turns)
        own, output = iter(self.own.draw(rng, total)), iter(self.output.draw(rng, total))
        after = iter(rng.exponential(self.think, total).tolist()) if self.think else iter([0.0] * total)
        names = [""] * num
        if self.prefixes:
            likely = 1 / np.arange(1, self.prefixes + 1)
            names = [f"prefix {k}" for k in rng.choice(self.prefixes, num, p=likely / likely.sum()).tolist()]
        found = []
        for name, length in zip(names, turns, strict=True):
            next(after)
            first = next(own), next(output)
            later = tuple(Turn(next(after), next(own), next(output)) for _ in range(length - 1))
            found.append(Ask(*first, name, self.prefix_len if name else 0, later))
        return found


MIXES = MappingProxyType({
    "chat": Mix("Azure's conversation trace of 2023: 1,155 prompt and 211 output tokens on average", *AZURE_CHAT),
    "code": Mix("Azure's code trace of 2023: 2,048 prompt and 28 output tokens on average", *AZURE_CODE),
    "rag": Mix(
        "ours: 500 tokens of one of 5 instructions, about 6,000 of passages that nobody shares, about 200 of answer",
        LogNormal(6000, 0.4, 24000), LogNormal(200, 0.6, 1500), prefixes=5, prefix_len=500,
    ),
    "system-prompt": Mix(
        "ours: one of 20 system prompts of 2,000 tokens, questions of about 100, answers of about 200",
        LogNormal(100, 0.8, 2000), LogNormal(200, 0.8, 2000), prefixes=20, prefix_len=2000,
    ),
    "multi-turn": Mix(
        "ours: conversations of 5 turns on average that carry their history, one of 3 system prompts of 500 tokens, messages "
        "of about 80, answers of about 250, 30 s between them",
        LogNormal(80, 1.0, 4000), LogNormal(250, 0.7, 2000), prefixes=3, prefix_len=500, mean_turns=5.0, think=30.0,
    ),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked (a function of a seed and a number of requests), and when."""

    asks: Callable[[str, int], list[Ask]]
    load: Load
    count: int  # requests, about
    seed: int
    mean_turns: float = 1.0
    peak: float | None = None  # of a day's curve, over its mean; None: the rate is always the same

    def part(self, index: int, share: float) -> Traffic:
        """So much of it, with draws of its own."""
        load, concurrency = self.load, self.load.max_concurrency
        if concurrency is not None:
            concurrency = max(1, round(concurrency * share))
        load = replace(load, request_rate=load.request_rate * share, max_concurrency=concurrency)
        return replace(self, load=load, count=max(1, round(self.count * share)), seed=self.seed * 1_000_003 + index)

    def arrivals(self) -> list[tuple[float, Ask]]:
        """In the order of time; seconds."""
        asks = self.asks(f"{self.seed}", self.count)
        if all(ask.at is not None for ask in asks):
            return sorted(((ask.at or 0.0, ask) for ask in asks), key=lambda pair: pair[0])
        load = replace(self.load, request_rate=self.load.request_rate / self.mean_turns)
        times = arrival_times(len(asks), load, self.seed)
        return list(zip(times if self.peak is None else day_curve(times, self.peak), asks, strict=True))


def day_curve(times: list[float], peak: float) -> list[float]:
    """Times of an even rate, moved so that the rate follows a sine over the day: `peak` times its mean at noon, least at
    midnight.
    """
    hours = np.linspace(0.0, DAY, 2881)
    swing = peak - 1.0
    served = hours - swing * DAY / (2 * math.pi) * np.sin(2 * math.pi * hours / DAY)  # of the mean rate, until then
    days = [divmod(t, DAY) for t in times]
    within = np.interp([rest for _, rest in days], served, hours)
    return [DAY * day + float(w) for (day, _), w in zip(days, within, strict=True)]


# ---- prompts


def ids_of(name: str, length: int) -> bytes:
    """int32 ids that stand for `name`."""
    begin = zlib.crc32(name.encode()) % IDS
    return np.arange(begin, begin + length, dtype=np.int32).tobytes()


def prompt_of(ask: Ask, unique: str) -> array:
    prompt = array("i", ask.ids or ())
    if ask.ids is None:
        prompt.frombytes(ids_of(ask.prefix, ask.prefix_len) + ids_of(unique, ask.own))
    return prompt


# ---- files


def file_asks(path: str, default_output: int, max_model_len: int) -> list[Ask]:
    """A JSON object a line; see docs/capacity.md. Raises ParameterError that names the line."""
    lines = [(n, line) for n, line in enumerate(read_text("--dataset-path", path).split("\n"), 1) if line.strip()]
    if not lines:
        raise ParameterError("--dataset-path", path, "a file with at least one line")
    asks = [_ask(path, number, line, default_output, max_model_len) for number, line in lines]
    timed = [ask.at is not None for ask in asks]
    if any(timed) and not all(timed):
        number = lines[timed.index(not timed[0])][0]
        raise ParameterError(f"--dataset-path, line {number} of {path}", "arrival", "in every line, or in none")
    return asks


_NAMES = {"arrival", "input_len", "input_tokens", "prompt", "output_len", "output_tokens", "prefix", "prefix_len"}


def _ask(path: str, number: int, line: str, default_output: int, most: int) -> Ask:
    where = f"--dataset-path, line {number} of {path}"
    try:
        data: Any = json.loads(line)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ParameterError(where, line[:200], 'a JSON object such as {"arrival": 0.5, "input_len": 512, "output_len": 64}')
    if unknown := sorted(set(data) - _NAMES):
        raise ParameterError(f"{where}, {unknown[0]}", data[unknown[0]], f"one of the names {', '.join(sorted(_NAMES))}")

    def whole(names: tuple[str, ...], default: int | None, low: int) -> int:
        name = next((n for n in names if n in data), names[0])
        value = data.get(name, default)
        if type(value) is not int or not low <= value <= most:
            raise ParameterError(f"{where}, {name}", value, f"an integer in [{low}, {most}]")
        return value

    at, prefix, ids = data.get("arrival"), data.get("prefix", ""), data.get("prompt")
    if at is not None and (type(at) not in (int, float) or not 0 <= at < math.inf):
        raise ParameterError(f"{where}, arrival", at, "seconds >= 0")
    if not isinstance(prefix, str | int):
        raise ParameterError(f"{where}, prefix", prefix, "a name, or a number")
    output = whole(("output_len", "output_tokens"), default_output, 1)
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise ParameterError(
                f"{where}, prompt", str(ids)[:100], "token ids: integers in [0, 2^31); texts are not tokenized here"
            )
        return Ask(len(ids), output, ids=tuple(ids), at=at)
    prefix_len = whole(("prefix_len",), 0, 0)
    own = whole(("input_len", "input_tokens"), None, 1)
    return Ask(own, output, f"file {prefix}", prefix_len, at=at)
