"""Every option of the HTTP server, as one frozen dataclass; validated once."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.config import KEY_FORM, STORE_BYTES, is_api_key
from headrace.conversation.answer import AnswerFormat
from headrace.conversation.literal_content import FORMS
from headrace.conversation.reranker import METHODS
from headrace.conversation.template import ALLOWED_KWARGS
from headrace.errors import ParameterError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP layer. Times are in seconds, sizes in bytes; None means: no limit.

    Raises ParameterError on a value out of range.
    """

    served_model_names: tuple[str, ...] = ()  # (): the engine's model_name; the first is reported, all are accepted
    any_model_name: bool = False  # a request may name any model: there is one
    unknown_fields: str = "ignore"  # those that cannot change an answer: ignore (and say so) | refuse
    api_keys: tuple[str, ...] = ()  # (): no authentication
    max_concurrent_per_key: int | None = None  # requests in progress for one key (for all, without keys)
    max_queued_requests: int | None = 4096  # samples that wait for a slot; beyond: 429
    max_queued_tokens: int | None = None  # prompt tokens accepted and still without a first output; beyond: 429
    request_timeout: float | None = None  # deadline of every request; X-Request-Timeout can only shorten it
    max_body_bytes: int = 16 * 2**20  # parsing one of this size holds the event loop up for a few tenths of a second
    max_header_bytes: int = 64 * 2**10
    body_timeout: float = 60.0  # to receive a whole body
    max_n: int = 128
    max_prompts: int = 2048  # prompts (or embedding inputs) in one request
    max_samples: int = 4096  # prompts times n in one request
    max_logprobs: int = 20  # of a position; the whole vocabulary (-1) is never sent
    keep_alive_interval: float = 10.0  # a sign of life in a stream after so long a silence
    write_timeout: float = 600.0  # a reader that takes nothing for so long is dropped
    tokenizer_threads: int = 2
    inline_tokenize_chars: int = 4096  # longer texts are tokenized in a thread
    cors_origins: tuple[str, ...] = ()  # ("*",): any
    chat_template: str | None = None  # jinja2 text that replaces the checkpoint's
    chat_template_kwargs: tuple[str, ...] = ALLOWED_KWARGS  # what requests may set
    special_tokens_in_content: str = "token"  # what one that is spelled out in a message becomes: token | text
    template_timeout: float = 5.0
    tool_parser: str | None = "auto"  # a parser's name; auto: from the template; None: tools are refused
    reasoning_parser: str | None = "auto"  # a parser's name; auto: from the template; None: no split
    embedding_pooling: str = "mean"  # mean | last
    score_method: str = "auto"  # of rerank and score: auto | yes-no (as Qwen3-Reranker) | embedding
    responses_store_bytes: int = STORE_BYTES  # of /v1/responses that are kept; 0: none
    page: bool = True  # for browsers, at /
    glass_text: bool = False  # the page may show the texts of all requests

    def __post_init__(self) -> None:
        for name, low in (
            ("max_concurrent_per_key", 1), ("max_queued_requests", 0), ("max_queued_tokens", 0), ("max_body_bytes", 1),
            ("max_header_bytes", 1024), ("max_n", 1), ("max_prompts", 1), ("max_samples", 1), ("max_logprobs", 0),
            ("tokenizer_threads", 1), ("inline_tokenize_chars", 0), ("responses_store_bytes", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**53):
                raise ParameterError(name, value, f"an integer >= {low}")
        for name in ("request_timeout", "body_timeout", "keep_alive_interval", "write_timeout", "template_timeout"):
            value = getattr(self, name)
            if not (value is None and name == "request_timeout") and not 0 < value <= 1e7:
                raise ParameterError(name, value, "seconds in (0, 1e7]")
        if self.embedding_pooling not in ("mean", "last"):
            raise ParameterError("embedding_pooling", self.embedding_pooling, "mean or last")
        if self.score_method not in METHODS:
            raise ParameterError("score_method", self.score_method, " or ".join(METHODS))
        if self.unknown_fields not in ("ignore", "refuse"):
            raise ParameterError("unknown_fields", self.unknown_fields, "ignore or refuse")
        if self.special_tokens_in_content not in FORMS:
            raise ParameterError("special_tokens_in_content", self.special_tokens_in_content, " or ".join(FORMS))
        AnswerFormat.choose(None, self.reasoning_parser, self.tool_parser)
        if not all(map(is_api_key, self.api_keys)):
            raise ParameterError("api_keys", "a key of another form", KEY_FORM)
        if not all(self.served_model_names):
            raise ParameterError("served_model_names", self.served_model_names, "names that are not empty")
        for origin in self.cors_origins:  # a browser sends exactly this: anything more would never match
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+|null", origin):
                raise ParameterError("cors_origins", origin, "SCHEME://HOST or SCHEME://HOST:PORT, without a path; or *")
