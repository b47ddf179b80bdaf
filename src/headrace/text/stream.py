"""News of a sample in, deltas out: its text as the ids come, up to its stop strings, and logprobs with their tokens.

    ids -> detokenizer (holds incomplete characters) -> scanner (holds what may begin a stop string) -> delta
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headrace.engine.messages import EngineOutput, RequestTimes
from headrace.sampling.params import SamplingParams
from headrace.scheduler.plan import TokenLogprobs
from headrace.text.detokenizer import TextTokenizer, detokenizer
from headrace.text.markers import MarkerScanner

if TYPE_CHECKING:
    from headrace.model.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """Raw log probability of a token, its rank in the vocabulary (1 = most likely) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class Delta:
    """What one piece of news adds to a sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    hides_last: bool = False  # the last token ended the sample and is no part of its text
    stopped_here: bool = False  # a stop string ended it: the core does not know yet and must be told


class SampleStream:
    """News of one sample in, deltas out. The deltas' texts joined are the sample's text, however the news was cut."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_ids: Sequence[int] = ()):
        self.tokenizer, self.params = tokenizer, params
        self.done = False
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.times: RequestTimes | None = None
        stops = params.stop if isinstance(params.stop, list) else []
        self._text: TextStream | None = None
        if params.detokenize and tokenizer is not None:
            shown = params.include_stop_str_in_output, params.skip_special_tokens
            self._text = TextStream(tokenizer, stops, *shown, prompt_ids, params.min_tokens)

    def push(self, news: EngineOutput) -> Delta:
        """The news as a delta; after the sample is done, empty ones."""
        if self.done:
            return Delta()
        self.num_cached_tokens = news.num_cached_tokens or self.num_cached_tokens
        if news.times is not None:
            self.times = news.times
        if news.prompt_logprobs is not None:
            self.prompt_logprobs = [None if t is None else self._decoded(t) for t in news.prompt_logprobs]
        ids = news.token_ids
        delta = Delta(token_ids=ids, finish_reason=news.finish_reason, stop_reason=news.stop_reason, error=news.error)
        logprobs = news.logprobs
        if self._text is not None:
            self._push_text(delta, news)
        self.num_tokens += len(delta.token_ids)
        if logprobs is not None:
            delta.logprobs = [self._decoded(t) for t in logprobs[: len(delta.token_ids)]]
        self.done = delta.finish_reason is not None
        return delta

    def _push_text(self, delta: Delta, news: EngineOutput) -> None:
        assert self._text is not None
        ids = news.token_ids
        # the token that ended the sample is not part of its text unless asked for
        hidden = bool(ids) and news.finish_reason == "stop" and not self.params.include_stop_str_in_output
        hidden = hidden and not self._text.may_stop_at(ids[-1])
        result = self._text.push(ids[:-1] if hidden else ids)
        delta.text, delta.hides_last = result.text, hidden and result.stop_hit is None
        if result.stop_hit is not None:
            delta.token_ids = ids[: result.num_ids]
            delta.finish_reason, delta.stop_reason = "stop", result.stop_hit
            delta.stopped_here = news.finish_reason is None
        elif news.finish_reason is not None:
            delta.text += self._text.finish()
            if self._text.stop_hit is not None:  # the last, unfinished character completed it
                delta.finish_reason, delta.stop_reason = "stop", self._text.stop_hit

    def _decoded(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        result: dict[int, Logprob] = {}
        for place, (token, logprob) in enumerate(zip(entry.ids, entry.logprobs, strict=True)):
            rank = entry.rank if place == 0 else place
            text = None if self.tokenizer is None else self.tokenizer.token_to_text(token)
            result.setdefault(token, Logprob(logprob, rank, text))
        return result


class TextDelta(NamedTuple):
    text: str
    stop_hit: str | None  # the stop string that ended the text
    num_ids: int  # how many of the pushed ids the text took; fewer than pushed only when a stop string was hit


class TextStream:
    """The text of one output, from its token ids: push() as they come, finish() at the end.

    Joined, the deltas are what tokenizer.decode(prompt + output) has behind decode(prompt), cut at the first stop string:
    the one that ends first, and of those that end together the longest. With `include_stop` the text ends with the stop
    string, else just before it. No delta holds a part of a character or of a stop string that a later one would complete.
    Special tokens that are dropped from the text still complete the stop strings that hold them: to the scanner each is
    one surrogate, which no decoded text contains. In what the first `min_tokens` ids add none is looked for, as in vLLM.
    Work is linear in the number of ids.
    """

    __slots__ = ("_detokenizer", "_include_stop", "_marks", "_scanner", "_unsearched", "_written", "stop_hit")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ):
        self._unsearched = min_tokens
        self._detokenizer = detokenizer(tokenizer, skip_special_tokens, prompt_ids)
        specials = tokenizer.special_texts if stop and skip_special_tokens else {}
        held = sorted((text for text in specials if any(text in s for s in stop)), key=len, reverse=True)
        marks = {text: chr(0xD800 + i) for i, text in enumerate(held[:1024])}
        self._marks = {specials[text]: mark for text, mark in marks.items()}
        self._written = {s: s for s in stop}  # as the scanner sees it -> as it was asked for
        for s in stop if marks else ():
            self._written[re.sub("|".join(map(re.escape, marks)), lambda m: marks[m[0]], s)] = s
        self._scanner = MarkerScanner(self._written)
        self._include_stop = include_stop
        self.stop_hit: str | None = None

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Take ids; after a stop string nothing more is taken."""
        if self.stop_hit is not None:
            return TextDelta("", self.stop_hit, 0)
        if not self._written:  # nothing is looked for
            return TextDelta("".join(map(self._detokenizer.push, ids)), None, len(ids))
        parts: list[str] = []
        for i, token_id in enumerate(ids):
            piece = self._marks.get(token_id) or self._detokenizer.push(token_id)
            if self._unsearched > 0:
                self._unsearched -= 1
                parts.append(self._shown(piece))
            elif piece and self._scan(piece, parts):
                return TextDelta("".join(parts), self.stop_hit, i + 1)
        return TextDelta("".join(parts), None, len(ids))

    def may_stop_at(self, token_id: int) -> bool:
        """Whether the token, which is not shown, is in a stop string."""
        return token_id in self._marks

    def _scan(self, piece: str, parts: list[str]) -> bool:
        text, hit, _ = self._scanner.push(piece)
        parts.append(self._shown(text))
        if hit is None:
            return False
        self.stop_hit = self._written[hit]
        if piece in self._marks.values():  # nothing after it completes what waits for its end
            parts.append(self._detokenizer.finish())
        if self._include_stop:
            parts.append(self.stop_hit)
        return True

    def _shown(self, text: str) -> str:
        for mark in self._marks.values():
            text = text.replace(mark, "")
        return text

    def finish(self) -> str:
        """What was held: an unfinished character (as U+FFFD) and what could have begun a stop string.

        The last character may itself complete a stop string: look at `stop_hit` afterwards.
        """
        if self.stop_hit is not None:
            return ""
        parts: list[str] = []
        if not self._scan(self._detokenizer.finish(), parts):
            parts.append(self._shown(self._scanner.flush()))
        return "".join(parts)


def continuation(tokenizer: TextTokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to that of a prompt."""
    stream = TextStream(tokenizer, prompt_ids=prompt_ids)
    return stream.push(ids).text + stream.finish()
