"""What the server's process does for one HTTP process: runs its requests, lets in, counts; and takes all back when it dies."""

from __future__ import annotations

from typing import Any

from headrace.api.errors import ApiError
from headrace.api.glass_hub import GlassHub
from headrace.api.limits import Limits, Ticket
from headrace.api_processes.glass import GlassDesk
from headrace.api_processes.wire import (
    Admit,
    Answered,
    Begun,
    Counted,
    Ended,
    Enter,
    Granted,
    Left,
    Look,
    LookAway,
    More,
    Page,
    PageWanted,
    Refused,
    Returned,
    SampleEnded,
    StateWanted,
    TokensWanted,
)
from headrace.distributed.engine_host import EngineHost
from headrace.distributed.pipe import Pipe
from headrace.distributed.remote_wire import Cancel, EngineState, Submit
from headrace.engine.interface import AsyncEngine
from headrace.metrics.prometheus import PrometheusMetrics


class Desk:
    """`limits` and `metrics` are those of the whole server; each desk holds what its process has been given of them."""

    def __init__(
        self, engine: AsyncEngine, limits: Limits, metrics: PrometheusMetrics, pipe: Pipe, prefix: str,
        glass: GlassHub | None = None,
    ):  # fmt: skip
        self.host = EngineHost(engine, pipe, prefix)
        self._glass = None if glass is None else GlassDesk(glass, pipe)
        self._limits, self._metrics, self._pipe = limits, metrics, pipe
        self._tickets: dict[int, Ticket] = {}
        self._entered: dict[int, int] = {}  # number -> index of the key

    def heard(self, message: Submit | Cancel | Counted) -> None:
        if isinstance(message, Submit | Cancel):
            self.host.heard(message)
        elif isinstance(message, Look | More | LookAway | TokensWanted):
            if self._glass is not None:  # without it no process has what asks for it
                self._glass.heard(message)
        elif isinstance(message, StateWanted):
            self._pipe.say(EngineState.of(self.host.engine))
            self._pipe.say(Granted(message.number))
        elif isinstance(message, Admit | Enter | PageWanted):
            self._pipe.say(self._answer(message))
        elif isinstance(message, Answered):
            self._metrics.answered(message.path, message.status, message.ignored)
        elif isinstance(message, SampleEnded):
            self._metrics.sample_ended(message.record)
        elif isinstance(message, Left):
            if (key := self._entered.pop(message.number, None)) is not None:
                self._limits.leave(key)
        else:
            self._on_ticket(message)

    def _answer(self, question: Admit | Enter | PageWanted) -> Any:
        number = question.number
        try:
            if isinstance(question, PageWanted):
                return Page(number, *self._metrics.render())
            if isinstance(question, Enter):
                self._limits.take_key(question.key)
                self._entered[number] = question.key
            else:
                self._tickets[number] = self._limits.take(question.samples, question.tokens)
        except ApiError as error:
            return Refused(number, error.status, error.message, error.code, error.headers)
        return Granted(number)

    def _on_ticket(self, message: Begun | Ended | Returned) -> None:
        ticket = self._tickets.get(message.number)
        if ticket is None:  # given back by one who had not waited for the refusal
            return
        if isinstance(message, Begun):
            ticket.started(message.tokens)
        elif isinstance(message, Ended):
            ticket.ended()
        else:
            del self._tickets[message.number]
            ticket.__exit__()

    def close(self) -> None:
        """Its process is no more."""
        self.host.close()
        if self._glass is not None:
            self._glass.close()
        for ticket in self._tickets.values():
            ticket.__exit__()
        for key in self._entered.values():
            self._limits.leave(key)
        self._tickets.clear()
        self._entered.clear()
