"""From options to the parts of speculation: who guesses, how much, and what it costs."""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.speculative.ngram import NGramProposer
from headrace.speculative.proposer import Drafter
from headrace.speculative.speculator import Speculator
from headrace.structured_output.manager import StructuredOutput

VERIFY_COST = 0.1  # of one more row in a step of few rows, relative to the step


def speculation(config: EngineConfig, structured: StructuredOutput | None) -> tuple[Speculator | None, Drafter | None]:
    """The core's part and the worker's, if any is wished; `config` is resolved."""
    if config.speculative_method is None:
        return None, None
    assert config.speculative_max_rows
    proposer = NGramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    return (
        Speculator(config.num_speculative_tokens, config.speculative_max_rows, VERIFY_COST, proposer, structured),
        None,
    )
