"""Who answers in `headrace chat`: an engine in this process or a server. Both yield the pieces of an answer as they come."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from headrace.errors import HeadraceError, ParameterError
from headrace.model.embedded import NAME as EMBEDDED

Messages = list[dict[str, str]]
# by the names of the HTTP API; max_tokens None: as many as fit
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")


class Piece(NamedTuple):
    text: str
    reasoning: bool = False


class ServerError(HeadraceError):
    """The server cannot be reached or has refused the request; the message is for a human."""


class Backend:
    """`answer` ends early when the consumer closes it, or raises KeyboardInterrupt; nothing keeps running then."""

    name: str
    defaults: dict[str, Any] | None = None  # how it samples where `sampling` says nothing, if that is known
    interrupt_between_steps = False  # True: not to be interrupted in the middle of a step
    num_tokens = 0  # of the last answer
    finish_reason: str | None = None

    def answer(self, messages: Messages, sampling: dict[str, Any]) -> Iterator[Piece]:
        raise NotImplementedError

    def close(self) -> None:
        pass


class EngineBackend(Backend):
    """A model in this process."""

    interrupt_between_steps = True

    def __init__(self, options: dict[str, Any], progress: bool):
        from headrace import LLM
        from headrace.conversation.answer import AnswerFormat
        from headrace.conversation.template import ChatTemplate

        self._llm = LLM(progress=progress, **options)
        try:
            assert self._llm.engine is not None
            self.name, self.defaults = options.get("model") or EMBEDDED, self._llm.inputs.defaults
            source = ChatTemplate.from_tokenizer(self._llm.get_tokenizer()).source()  # refuses a model without one
            self._format = AnswerFormat.choose(source, tools=None)
        except BaseException:
            self._llm.close()
            raise

    def answer(self, messages: Messages, sampling: dict[str, Any]) -> Iterator[Piece]:
        from headrace.conversation.events import Reasoning, Text
        from headrace.sampling.params import SamplingParams

        self.num_tokens, self.finish_reason = 0, None
        prompt = self._llm.chat_prompt(messages)
        special = self._format.needs_special_tokens(self._llm.tokenizer, tools=False)
        parser = self._format.parser(prompt["prompt"])
        params = SamplingParams(**sampling, skip_special_tokens=not special)
        pieces = self._llm.stream(prompt, params)
        try:
            for _, _, delta, _ in pieces:
                self.num_tokens += len(delta.token_ids)
                events = parser.push(delta.text)
                if delta.finish_reason is not None:
                    events = events + parser.finish()
                for event in events:
                    if isinstance(event, Text | Reasoning):
                        yield Piece(event.text, isinstance(event, Reasoning))
                if not events:
                    yield Piece("")  # the caller may want to stop here
                if delta.error is not None:
                    raise ServerError(delta.error)
                self.finish_reason = delta.finish_reason
        finally:
            pieces.close()  # type: ignore[attr-defined]  # aborts what still runs

    def close(self) -> None:
        self._llm.close()


class ServerBackend(Backend):
    """An OpenAI-compatible server. `url` may end in /v1 or not; without `model` it is the first that is served."""

    def __init__(self, url: str, api_key: str | None, model: str | None, timeout: float):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ParameterError("--url", url, "an address such as http://127.0.0.1:8000")
        self._address, self._path = parts, parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._timeout = timeout
        self._headers: dict[str, str | bytes] = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream, application/json",
        }
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}".encode()  # http.client itself takes Latin-1 only
        self.name = model or self._first_model()

    def answer(self, messages: Messages, sampling: dict[str, Any]) -> Iterator[Piece]:
        self.num_tokens, self.finish_reason = 0, None
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= {k: v for k, v in sampling.items() if v is not None}
        connection, response = self._call("POST", "/chat/completions", body)
        with contextlib.closing(connection):  # closed, it makes the server abort what still runs
            for event in self._events(response):
                if error := event.get("error"):
                    raise ServerError(str(error.get("message", error) if isinstance(error, dict) else error))
                if usage := event.get("usage"):
                    self.num_tokens = usage.get("completion_tokens", 0)
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                        yield Piece(thought, reasoning=True)
                    if text := delta.get("content"):
                        yield Piece(text)
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if self.finish_reason is None:
            raise ServerError("the server closed the stream before the end of the answer")

    def _first_model(self) -> str:
        connection, response = self._call("GET", "/models", None)
        with contextlib.closing(connection), _told(f"{self._path}/models does not list a model"):
            name = str(json.loads(response.read())["data"][0]["id"])
        return name

    def _call(self, method: str, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._address.hostname or "", self._address.port, timeout=self._timeout)
        try:
            with _told(f"{self._address.geturl()} does not answer"):
                connection.request(method, self._path + path, None if body is None else json.dumps(body), self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise ServerError(f"HTTP {response.status}: {_message(response.read(100_000))}")
        except BaseException:
            connection.close()
            raise
        return connection, response

    @staticmethod
    def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The JSON objects of the server-sent events."""
        with _told("the stream broke"):
            while line := response.readline():
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if isinstance(event, dict):
                        yield event


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever goes wrong between us and the server is one kind of error."""
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as e:
        raise ServerError(f"{what} ({e or type(e).__name__})") from None


def _message(body: bytes) -> str:
    """What an error answer says, whatever its shape."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body[:300].decode("utf-8", "replace").strip() or "no explanation"
