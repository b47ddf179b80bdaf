"""Grammars by llguidance (github.com/guidance-ai/llguidance): Earley parsing over a lexer of derivatives, masks in Rust."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits

from headrace.sampling.structured_outputs import StructuredOutputsParams
from headrace.structured_output.grammars import grammars_of
from headrace.structured_output.reasons import in_words, refused
from headrace.structured_output.vocabulary import GrammarVocabulary

MAX_DIGITS = 64  # in a row, in a number of JSON
WALK = 24  # tokens of a trial, beside those that are forced
MASK_SECONDS = 0.25  # processor time of one mask in a trial: every request of the batch waits for it
# Of an output, in all and for each of its tokens: an ambiguous grammar is quick at first, and the slower the longer its text.
FREE_SECONDS, TOKEN_SECONDS = 0.5, 0.002
PARALLEL_ROWS = 4  # fewer masks are filled by the caller's thread: waking others costs more


class BackendSpec(NamedTuple):
    """What a backend is made of, also in another process."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]


class Digits(NamedTuple):
    """The tokens that begin with a digit, and letters to tell a string from a number by."""

    words: np.ndarray  # [ceil(V / 32)] int32, a bit for each of them
    trailing: dict[int, tuple[int, bool]]  # token -> digits at its end (no entry: none), and whether it is nothing else
    letters: np.ndarray  # as `words`: tokens of one ASCII letter that no number contains


class Matcher:
    """Where one output stands in its grammar. Not shared between outputs.

    A matcher that ran into a limit of the parser, has taken too long, or was given tokens that do not fit, is in error and
    stays so: its masks allow nothing, and `error` says why. Its time is that of the thread which asks it.
    """

    __slots__ = ("_count", "_digits", "_ids", "_matcher", "_run", "_seconds")

    def __init__(self, matcher: LLMatcher, digits: Digits | None):
        self._matcher, self._digits = matcher, digits
        self._ids: list[int] = []
        self._run = 0  # digits in a row at the end of the output
        self._seconds, self._count = 0.0, 0  # of the processor; tokens

    def fork(self) -> Matcher:
        """A copy for another output."""
        copy = Matcher(self._matcher.deep_copy(), self._digits)
        copy._ids, copy._run = list(self._ids), self._run
        copy._seconds, copy._count = self._seconds, self._count
        return copy

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Move on; False if the grammar does not allow these, or a limit was met (the matcher is then in error)."""
        began = time.thread_time()
        fits = self._matcher.consume_tokens(list(token_ids))
        self._seconds += time.thread_time() - began
        self._count += len(token_ids)
        if not fits:
            return False
        if self._digits is not None:
            self._ids += token_ids
            self._run = self._extended(self._run, token_ids)
        return True

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
        if count and self._digits is not None:
            del self._ids[-count:]
            self._run = self._extended(0, self._ids[-MAX_DIGITS:])

    def valid_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these could come next."""
        return self._matcher.validate_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever is sampled."""
        return self._matcher.compute_ff_tokens()

    @property
    def ended(self) -> bool:
        """Only the end token may follow (not so in error, where nothing may)."""
        return self._matcher.is_stopped() and not self.failed

    @property
    def complete(self) -> bool:
        """The output so far is one of the grammar's: it may end here."""
        return self._matcher.is_accepting() and not self.failed

    @property
    def failed(self) -> bool:
        return self._seconds > FREE_SECONDS + TOKEN_SECONDS * self._count or self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """What went wrong."""
        if not self.failed:
            return None
        if not self._matcher.is_error():
            return f"it took {self._seconds:.1f} s to find what may come next in {self._count} tokens: it is too ambiguous"
        return in_words((self._matcher.get_error().strip().splitlines() or [""])[0], "") or "the parser failed"

    def fill(self, row: np.ndarray) -> None:
        """Write the mask of the next token to row [ceil(V / 32)] int32: bit set means allowed."""
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.size * row.itemsize)
        self._seconds += time.thread_time() - began
        self.finish(row)

    def finish(self, row: np.ndarray) -> None:
        """What is to be done to a mask beyond the grammar: no number goes on for ever, and an error allows nothing."""
        if self._run >= MAX_DIGITS and self._digits is not None and not (row & self._digits.letters).any():
            rest = row & ~self._digits.words
            if rest.any():
                row[:] = rest
        if self.failed:
            row[:] = 0

    def _extended(self, run: int, token_ids: Sequence[int]) -> int:
        assert self._digits is not None
        for token in token_ids:
            count, whole = self._digits.trailing.get(token, (0, False))
            run = run + count if whole else count
        return run


class LLGuidance:
    """Compiles specs for one tokenizer."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]):
        self.spec = BackendSpec(tokenizer_json, vocab_size, list(eos_token_ids))
        self._vocabulary = GrammarVocabulary(tokenizer_json, vocab_size, eos_token_ids)
        self._limits = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)
        self._digits = _digits(self._vocabulary)
        self._executor: LLExecutor | None = None
        self._parallel = (os.cpu_count() or 1) > 2

    def compile(self, spec: StructuredOutputsParams) -> Matcher:
        """A matcher at the beginning of the output. Raises ParameterError with the backend's reason.

        The interpreter lock is free during the construction. Time and memory are not bounded: see trial.py.
        """
        why = ""
        try:
            for grammar in grammars_of(spec, self._vocabulary):
                matcher = LLMatcher(self._vocabulary.engine, grammar, log_level=0, limits=self._limits)
                why = matcher.get_error().strip() if matcher.is_error() else ""
                if not why:
                    break
        except Exception as e:  # of the parsers of grammars, which raise many kinds
            why = f"{type(e).__name__}: {e}" if not isinstance(e, ValueError) else str(e)
        if why:
            raise refused(spec, in_words(why, spec.kind))
        has_json = spec.kind in ("json", "json_object", "structural_tag") or "%json" in (spec.grammar or "")
        return Matcher(matcher, self._digits if has_json else None)

    def fill(self, matchers: Sequence[Matcher], bits: np.ndarray) -> None:
        """Masks of the next tokens to the rows of bits [Q, ceil(V / 32)] int32, by several threads if it is worth it."""
        if not self._parallel or len(matchers) < PARALLEL_ROWS:
            for matcher, row in zip(matchers, bits, strict=True):
                matcher.fill(row)
            return
        if self._executor is None:
            self._executor = LLExecutor()
        jobs = [(m._matcher, i) for i, m in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, bits.strides[0], len(bits))
        for matcher, row in zip(matchers, bits, strict=True):
            matcher.finish(row)

    def trial(self, spec: StructuredOutputsParams) -> None:
        """Compile and walk some way: ParameterError if that fails or a mask takes too long."""
        matcher = self.compile(spec)
        row = np.zeros(-(-self.spec.vocab_size // 32), np.int32)
        for step in range(WALK):
            matcher.accept(matcher.forced())
            began = time.thread_time()
            matcher.fill(row)
            seconds = time.thread_time() - began
            why = matcher.error
            if why is None and seconds > MASK_SECONDS:
                why = f"it takes {seconds:.2f} s to find the tokens that may come next"
            allowed = [int(w) * 32 + b for w in np.flatnonzero(row) for b in range(32) if int(row[w]) >> b & 1]
            allowed = [t for t in allowed if t not in self.spec.eos_token_ids]
            if why is None and allowed and not matcher.ended and not matcher.accept([allowed[step * 7919 % len(allowed)]]):
                why = matcher.error
            if why is not None:
                raise refused(spec, why)
            if not allowed or matcher.ended:
                return


def _digits(vocabulary: GrammarVocabulary) -> Digits:
    words, letters = (np.zeros(-(-len(vocabulary.tokens) // 32), np.uint32) for _ in range(2))
    trailing = {}
    special = set(vocabulary.special_token_ids)
    for token, text in enumerate(vocabulary.tokens):
        if token in special:
            continue
        if text[:1].isdigit():
            words[token // 32] |= np.uint32(1 << token % 32)
        if text[-1:].isdigit():
            count = len(text) - len(text.rstrip(b"0123456789"))
            trailing[token] = (count, count == len(text))
        if len(text) == 1 and text.isalpha() and text not in b"eE":
            letters[token // 32] |= np.uint32(1 << token % 32)
    return Digits(words.view(np.int32), trailing, letters.view(np.int32))
