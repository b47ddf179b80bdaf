"""Headrace: an LLM inference and serving engine.

The public names are imported on first use: `import headrace` itself loads neither torch nor a tokenizer.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers know the name; importing `typing` would take longer than all of this
if TYPE_CHECKING:
    from headrace.beam_search import BeamSearchParams as BeamSearchParams
    from headrace.config import EngineConfig as EngineConfig
    from headrace.llm import LLM as LLM
    from headrace.sampling.params import SamplingParams as SamplingParams
    from headrace.sampling.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from headrace.text.output import RequestOutput as RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "BeamSearchParams", "EngineConfig", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]

_HOME = {
    "LLM": "headrace.llm",
    "BeamSearchParams": "headrace.beam_search",
    "EngineConfig": "headrace.config",
    "RequestOutput": "headrace.text.output",
    "SamplingParams": "headrace.sampling.params",
    "StructuredOutputsParams": "headrace.sampling.structured_outputs",
}


def __getattr__(name: str):
    if name == "LLM":  # loads torch, which ends the process with SIGABRT where Ctrl-C comes while it sets itself up
        from headrace.config import prepare_threads
        from headrace.engine.interrupts import uninterrupted

        prepare_threads()
        with uninterrupted():
            importlib.import_module(_HOME[name])
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
