"""Every option of the HTTP server, as one frozen dataclass; validated once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from headrace.config import KEY_FORM, STORE_BYTES, is_api_key
from headrace.conversation.switches import ALLOWED_KWARGS
from headrace.errors import ParameterError
from headrace.options import check, option

_server = partial(option, group="server")
_limit = partial(option, group="limits")
_security = partial(option, group="security")
_seconds = partial(option, high=1e7, unit="SECONDS", more_than=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP layer. Times are in seconds, sizes in bytes; None means: no limit.

    Raises ParameterError on a value out of range.
    """

    served_model_names: tuple[str, ...] = _server(  # the first is reported, all are accepted
        (), "name clients use", unit="NAME", flag="served-model-name", shown="the model's"
    )
    any_model_name: bool = _server(False, "a request may name any model")
    unknown_fields: Literal["ignore", "refuse"] = _server(
        "ignore", "of bodies, that cannot change an answer; ignore: x-headrace-ignored names them"
    )
    api_keys: tuple[str, ...] = ()  # (): no authentication
    admin_keys: tuple[str, ...] = ()  # of the operator's endpoints, which no other key opens; (): they are closed
    max_concurrent_per_key: int | None = _limit(None, "requests in progress for one key, or for all", 1)
    max_queued_requests: int | None = _limit(4096, "samples that may wait for a slot; beyond: 429", 0)
    max_queued_tokens: int | None = _limit(None, "prompt tokens without a first output; beyond: 429", 0)
    request_timeout: float | None = _seconds(None, "deadline of every request", group="limits")
    max_body_bytes: int = option(16 * 2**20, "", 1)  # parsing one of this size holds the event loop up for tenths of a second
    max_header_bytes: int = option(64 * 2**10, "", 1024)
    body_timeout: float = _seconds(60.0)  # to receive a whole body
    max_n: int = option(128, "", 1)
    max_prompts: int = option(2048, "", 1)  # prompts (or embedding inputs) in one request
    max_samples: int = option(4096, "", 1)  # prompts times n in one request
    max_logprobs: int = option(20, "", 0)  # of a position; the whole vocabulary (-1) is never sent
    keep_alive_interval: float = _seconds(10.0)  # a sign of life in a stream after so long a silence
    write_timeout: float = _seconds(600.0)  # a reader that takes nothing for so long is dropped
    tokenizer_threads: int = option(2, "", 1)
    inline_tokenize_chars: int = option(4096, "", 0)  # longer texts are tokenized in a thread
    cors_origins: tuple[str, ...] = _security(
        (), "SCHEME://HOST:PORT of pages whose scripts may call; *: any", flag="cors-origin", unit="ORIGIN"
    )
    # the text itself; on the command line its file
    chat_template: str | None = _server(None, "a jinja2 file", unit="FILE", shown="the checkpoint's template")
    chat_template_kwargs: tuple[str, ...] = ALLOWED_KWARGS  # what requests may set
    special_tokens_in_content: Literal["token", "text"] = _security(
        "token", "what a special token that a message spells out becomes; text: no user can end his turn"
    )
    template_timeout: float = _seconds(5.0)
    # a parser's name; auto: from the template; None: tools are refused, reasoning is not split off
    tool_parser: str | None = _server("auto", "how calls are written: a format of docs/operating.md, auto or none", unit="NAME")
    reasoning_parser: str | None = _server("auto", "how reasoning is marked: likewise", unit="NAME")
    embedding_pooling: Literal["mean", "last"] = _server("mean", "how an embedding is made")
    score_method: Literal["auto", "yes-no", "embedding"] = _server(
        "auto", "of /v1/rerank and /v1/score; yes-no: as Qwen3-Reranker; auto: that where the model is one"
    )
    page: bool = _server(True, "the page for browsers at /: chat and engine")
    glass_text: bool = _server(False, "the page may show whoever has a key the texts of all requests")
    allow_kill_core: bool = _server(
        False, "the page's scene of a killed core may kill one; only with a loopback --host and one HTTP process"
    )
    otlp_traces_endpoint: str | None = option(
        None, "an OpenTelemetry collector for spans of requests, by OTLP over HTTP", unit="URL", group="operation"
    )
    responses_store_bytes: int = _limit(
        STORE_BYTES, "of /v1/responses kept in memory", 0, shown="64 MiB; 0 with --api-processes"
    )

    def __post_init__(self) -> None:
        check(self)
        url = self.otlp_traces_endpoint
        if url is not None and not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url):
            raise ParameterError("otlp_traces_endpoint", url, "http(s)://HOST:PORT of a collector, for OTLP over HTTP")
        for name in ("glass_text", "allow_kill_core"):
            if getattr(self, name) and not self.page:
                raise ParameterError(name, True, "off without the page")
        from headrace.conversation.answer import AnswerFormat  # here: whoever reads the command line needs no formats

        AnswerFormat.choose(None, self.reasoning_parser, self.tool_parser)
        for name, keys in (("api_keys", self.api_keys), ("admin_keys", self.admin_keys)):
            if not all(map(is_api_key, keys)):
                raise ParameterError(name, "a key of another form", KEY_FORM)
        if not all(self.served_model_names):
            raise ParameterError("served_model_names", self.served_model_names, "names that are not empty")
        for origin in self.cors_origins:  # a browser sends exactly this: anything more would never match
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+|null", origin):
                raise ParameterError("cors_origins", origin, "SCHEME://HOST or SCHEME://HOST:PORT, without a path; or *")
