"""What travels between the server's process and one that serves HTTP, beside the engine's messages (remote_wire.py)."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.api.config import ServerConfig
from headrace.config import EngineConfig
from headrace.distributed.remote_wire import EngineState, FromEngine, ToEngine
from headrace.metrics.prometheus import SampleRecord


class Start(msgspec.Struct, tag=True):
    """The first message: all that an HTTP process must know."""

    engine: EngineConfig
    server: ServerConfig
    state: EngineState
    model_name: str
    generation_defaults: dict[str, Any]
    created: int  # the time that /v1/models shows
    log_level: str
    timeout: float  # seconds without a sign of the server's process, after which it counts as lost
    certfile: str | None
    keyfile: str | None


class Stop(msgspec.Struct, tag=True):
    """Close the port, finish what is being answered, and end."""


class Cut(msgspec.Struct, tag=True):
    """End at once."""


class Granted(msgspec.Struct, tag=True):
    number: int


class Refused(msgspec.Struct, tag=True):
    """An ApiError."""

    number: int
    status: int
    message: str
    code: str | None
    headers: dict[str, str]


class Page(msgspec.Struct, tag=True):
    number: int
    data: bytes
    media_type: str


class Up(msgspec.Struct, tag=True):
    """It takes connections."""


class Alive(msgspec.Struct, tag=True):
    """Its event loop turns."""


class Fatal(msgspec.Struct, tag=True):
    """Why it ends although nobody has told it to."""

    error: str


class Admit(msgspec.Struct, tag=True):
    """A request of so many samples and prompt tokens; answered by Granted or Refused. Its number is then its ticket's."""

    number: int
    samples: int
    tokens: int


class Begun(msgspec.Struct, tag=True):
    """A sample of this ticket had its first output."""

    number: int
    tokens: int


class Ended(msgspec.Struct, tag=True):
    """A sample of this ticket has ended."""

    number: int


class Returned(msgspec.Struct, tag=True):
    """The whole ticket."""

    number: int


class Enter(msgspec.Struct, tag=True):
    """A request of this key; answered by Granted or Refused. Its number is how it leaves."""

    number: int
    key: int


class Left(msgspec.Struct, tag=True):
    number: int


class Answered(msgspec.Struct, tag=True):
    path: str
    status: int
    ignored: list[str] = []


class SampleEnded(msgspec.Struct, tag=True):
    record: SampleRecord


class PageWanted(msgspec.Struct, tag=True):
    number: int


class StateWanted(msgspec.Struct, tag=True):
    """Answered by the EngineState of now, then by Granted."""

    number: int


class Look(msgspec.Struct, tag=True):
    """Somebody looks at a core; answered by Granted or Refused. Its number is then the viewer's."""

    number: int
    core: int


class More(msgspec.Struct, tag=True):
    """What there is for a viewer, when there is something; answered by Shown."""

    number: int
    viewer: int


class LookAway(msgspec.Struct, tag=True):
    number: int


class TokensWanted(msgspec.Struct, tag=True):
    """Of a request in flight; answered by TokensShown."""

    number: int
    request_id: str
    start: int
    stop: int


class Shown(msgspec.Struct, tag=True):
    number: int
    data: bytes


class TokensShown(msgspec.Struct, tag=True):
    number: int
    ids: list[int] | None


Question = Admit | Enter | PageWanted | StateWanted | Look | More | TokensWanted
Answer = Granted | Refused | Page | Shown | TokensShown
Counted = Question | Begun | Ended | Returned | Left | LookAway | Answered | SampleEnded
ToChild = FromEngine | Answer | Start | Stop | Cut
FromChild = ToEngine | Counted | Up | Alive | Fatal
