"""Where the tokens of an output stand in its text, for those who ask for logprobs with `text_offset`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.text.detokenizer import TextTokenizer, detokenizer

Place = tuple[int, bool]  # of a token in a text: its offset, and whether the text lacks the space that it is written with


class TextOffsets:
    """Where in the text each token begins: behind all characters that begin in the tokens before it.

    And how it stands there: the first word of a text lacks the space that SentencePiece-like vocabularies write it with.
    What is no UTF-8 counts as the replacement characters that stand for it. A byte-fallback token waits for the end of its
    run, as its text does; every other place is known at once.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()):
        self._detokenizer = detokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self.num_out = 0  # characters
        self._run: list[tuple[int, str]] = []  # tokens that wait: bytes of the run before each, and how it is written
        self._run_begin = 0  # its offset

    def push(self, token_id: int, written: str = "") -> list[Place]:
        """The places that are known now, in the order of the tokens."""
        detokenizer, num_before = self._detokenizer, self._detokenizer.num_run
        offset = self.num_out + detokenizer.num_open
        piece = detokenizer.push(token_id)
        self.num_out += len(piece)
        if not num_before and not detokenizer.num_run:
            return [(offset, written == " " + piece and not detokenizer.num_open)]
        if not num_before:
            self._run_begin = offset
        self._run.append((num_before, written))
        return self._ended_run()

    def finish(self) -> list[Place]:
        """Nothing follows: the places of those that waited."""
        self.num_out += len(self._detokenizer.finish())
        return self._ended_run()

    def _ended_run(self) -> list[Place]:
        if self._detokenizer.num_run:
            return []
        begins, run = self._detokenizer.run_begins, self._run
        self._run = []
        return [(self._run_begin + begins[n], w == " " and begins[n + 1 : n + 2] == [begins[n]]) for n, w in run]
