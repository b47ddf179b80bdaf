"""The errors that Headrace raises for its callers' mistakes; anything else that escapes is a bug."""

from __future__ import annotations

from typing import Any


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""


class ParameterError(HeadraceError, ValueError):
    """A request or an option is not acceptable.

    Carries the `field`, the offending `value` and what is `allowed`, so that an HTTP layer can name all three.
    """

    def __init__(self, field: str, value: Any, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:200] + "..."
        super().__init__(f"{field}: got {shown}, allowed: {allowed}")

    def __reduce__(self):
        return type(self), (self.field, self.value, self.allowed)


class CheckpointError(HeadraceError):
    """A checkpoint is missing, broken or of an unsupported kind; the message names the file and the tensor."""


class CapacityError(HeadraceError):
    """The engine cannot be built or a request can never fit with the memory there is; the message holds the numbers."""


class EngineDeadError(HeadraceError):
    """The engine core has ended and was not restarted."""


class EngineClosedError(EngineDeadError):
    """Whoever owns the engine has closed it, perhaps before this request had ended."""
