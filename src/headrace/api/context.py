"""What all endpoints share: the engine, the options, the limits, the tokenizer's threads; made once per application."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import uuid
from array import array
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.api.bodies import Bodies
from headrace.api.config import ServerConfig
from headrace.api.errors import ApiError, bad_request, invalid, unsupported
from headrace.api.limits import Limits
from headrace.api.response_store import ResponseStore
from headrace.api.sse import Ticker
from headrace.conversation.answer import AnswerFormat
from headrace.conversation.literal_content import LiteralContent
from headrace.conversation.reranker import Reranker
from headrace.conversation.template import ChatTemplate
from headrace.conversation.tool_prompt import spoken_format
from headrace.conversation.turn_end import end_token_ids
from headrace.engine.interface import AsyncEngine
from headrace.errors import ParameterError
from headrace.metrics.prometheus import HttpMetrics, PrometheusMetrics
from headrace.sampling.params import SamplingParams
from headrace.text.inputs import InputProcessor

if TYPE_CHECKING:
    from headrace.api.tracing import Tracing  # needs an extra

logger = logging.getLogger(__name__)
LATEST = ":latest"  # a model's tag where none is named
Prompt = str | list[int]
T = TypeVar("T")


class ApiContext:
    """State of one application; attributes that need the model are made at first use, after it has been loaded."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, metrics: HttpMetrics | None = None, limits: Limits | None = None
    ):
        self.engine, self.config, self.metrics = engine, config, metrics or PrometheusMetrics(engine)
        self.limits = limits or Limits(engine, config)
        self.bodies = Bodies(config.max_body_bytes)
        self.ticker = Ticker(config.keep_alive_interval, config.write_timeout)
        self.responses = ResponseStore(config.responses_store_bytes)
        self.tasks: set[asyncio.Task[None]] = set()  # that make answers without a connection
        self.created = int(time.time())
        self.tracing: Tracing | None = None
        self.elsewhere: Callable[[], Collection[str]] = tuple  # names that the server's other models and their adapters have
        if config.otlp_traces_endpoint is not None:
            from headrace.api.tracing import Tracing

            self.tracing = Tracing(config.otlp_traces_endpoint)
        self._pool = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenize")

    async def close(self) -> None:
        if self.tasks:
            logger.warning("%d background responses are cut off", len(self.tasks))
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            await self.tracing.close()

    def sample_ended(self, sample: Any, endpoint: str, reason: str, arrival: float, first: float | None) -> None:
        """Whoever counts is told of a generation.Sample. `first`: when its first tokens came."""
        self.metrics.sample_ended(sample.record(endpoint, reason, arrival, first))
        if self.tracing is not None:
            self.tracing.sample_ended(sample, endpoint, reason, arrival, first, self.model_names[0])

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        return self.config.served_model_names or (self.engine.model_name,)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The model's, and those of its adapters."""
        return (*self.model_names, *(name for name in self.engine.adapters() if name not in self.model_names))

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a request means by its model's name; nothing: the model itself."""
        known = self.engine.adapters()
        found = next((one for one in spellings(name) if one in known or one in self.model_names), None)
        return found if found is not None and found not in self.model_names else ""

    def adapter_asked(self, name: str | None) -> str:
        """The same when a request begins. Raises the 404 of one that has gone since its name was checked: without it the model
        itself would answer."""
        self.check_model(name, optional=True)
        return self.adapter_of(name)

    def refuse_adapter(self, name: str | None) -> None:
        """Raises the 400 of an adapter, which only generates."""
        if self.adapter_of(name):
            raise unsupported("model", "an adapter generates text; this endpoint answers for the model alone")

    def check_model(self, name: str | None, *, optional: bool = False) -> str:
        """The name to report. Raises the 404 of a model that is not served here; the strict rule wants a name, where it is not
        `optional` anyway."""
        if name is not None and self.adapter_of(name):
            return name
        if name is None and not optional and self.config.unknown_fields == "refuse":
            raise bad_request("model: a name is needed.", "model", "missing_required_parameter")
        served = any(one in self.model_names for one in spellings(name))
        if name is None or (self.config.any_model_name and not served):
            return self.model_names[0]
        if not served:
            shown = name if len(name) <= 200 else name[:200] + "..."
            text = f"The model `{shown}` does not exist; served here: {', '.join(self.all_names[:50])}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return name

    @cached_property
    def inputs(self) -> InputProcessor:
        e = self.engine
        of_chat = end_token_ids(e.tokenizer, self.config.chat_template)  # the operator's own may end a turn in another way
        ends = tuple(dict.fromkeys([*e.model_config.eos_token_ids, *sorted(of_chat)]))
        return InputProcessor(e.tokenizer, e.generation_defaults, ends, e.model_config.vocab_size, e.max_model_len)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of more than that times the context cannot fit into it."""
        tokenizer = self.engine.tokenizer
        return max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1) or 1

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Raises ParameterError when the model has none."""
        tokenizer, config = self.engine.tokenizer, self.config
        options: dict[str, Any] = {"allowed_kwargs": config.chat_template_kwargs, "timeout": config.template_timeout}
        if config.special_tokens_in_content == "text":
            options["literal"] = LiteralContent(tokenizer)
        return ChatTemplate.from_tokenizer(tokenizer, config.chat_template, **options)

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model writes reasoning and tool calls."""
        config = self.config
        template = self._template_source
        tools = config.tool_parser
        if tools == "auto" and template is not None:
            tools = spoken_format(self.chat_template)
        return AnswerFormat.choose(template, config.reasoning_parser, tools)

    @cached_property
    def template_knows_developers(self) -> bool:
        return "developer" in (self._template_source or "")

    def template_mentions(self, text: str) -> bool:
        return text in (self._template_source or "")

    @property
    def _template_source(self) -> str | None:
        try:
            return self.chat_template.source(tools=True)
        except ParameterError:
            return None

    @cached_property
    def reranker(self) -> Reranker | None:
        """None: pairs of texts are scored by embeddings."""
        tokenizer, literal = self.engine.tokenizer, None
        try:
            template = self.chat_template
            literal = template.literal
        except ParameterError:
            template = None
            if self.config.special_tokens_in_content == "text":
                literal = LiteralContent(tokenizer)
        return Reranker.choose(self.config.score_method, self.engine.model_name, tokenizer, template, literal)

    def count_tokens(self, text: str) -> int:
        """Of a piece of an answer, for the usage's details."""
        return len(self.engine.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def tokenize(
        self, prompts: Sequence[Prompt], *, special: bool, field: str, truncated: bool = False
    ) -> list[list[int]]:
        """Ids of the prompts; in a thread if they are long. `truncated`: they will be cut to what fits."""

        def work() -> list[list[int]]:
            return [self.encode(p, special, field, truncated) if isinstance(p, str) else p for p in prompts]

        short = sum(len(p) for p in prompts if isinstance(p, str)) <= self.config.inline_tokenize_chars
        return work() if short else await self.in_thread(work)

    def encode(self, text: str, special: bool, field: str, truncated: bool) -> list[int]:
        """Ids of a text, which is not tokenized at all when it cannot fit."""
        if not truncated:
            self.check_length(text, field)
        return self.engine.tokenizer.encode(text, add_special_tokens=special)

    def check_length(self, text: str, field: str) -> None:
        limit = self.engine.max_model_len
        if len(text) > limit and len(text) > limit * self.longest_token:
            why = f"{len(text)} characters are more than {limit} tokens, the context of this model."
            raise invalid(field, why, "context_length_exceeded")

    async def check_prompt(
        self, ids: list[int], params: SamplingParams, *, field: str, side: str | None = None, limit: str = "max_tokens"
    ) -> tuple[array, SamplingParams]:
        """The prompt, packed, and the parameters as they will run. Raises ApiError or ParameterError naming the field.

        `params.max_tokens` None means: as many as fit. An explicit one that does not fit is refused; `limit` is its name: of a
        text that is only read it has none.
        """
        if params.bad_words:  # these are tokenized
            return await self.in_thread(self._check_prompt, ids, params, field, side, limit)
        return self._check_prompt(ids, params, field, side, limit)

    def _check_prompt(
        self, given: list[int], params: SamplingParams, field: str, side: str | None, limit_name: str
    ) -> tuple[array, SamplingParams]:
        ids = self.inputs.check_ids(self.inputs.cut(given, params, side), field)
        asked, limit = params.max_tokens, self.engine.max_model_len
        if len(ids) + (asked or 1) > limit:
            wanted = f" and {limit_name} asks for {asked} more" if asked is not None else ", at least one more is generated"
            wanted = wanted if limit_name else f" of at most {limit - 1}"
            raise bad_request(
                f"This model's maximum context length is {limit} tokens; the prompt has {len(ids)}{wanted}.",
                field if len(ids) >= limit or asked is None else limit_name, "context_length_exceeded",
            )  # fmt: skip
        return ids, self.inputs.complete(params, len(ids))


def spellings(name: str | None) -> tuple[str, ...]:
    """Of one model's name, the likeliest first: without a tag it means `:latest`, as Ollama has it."""
    return () if name is None else (name, name.removesuffix(LATEST), name + LATEST)


def for_sample(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of n samples: a copy, without checking everything again."""
    own = copy.copy(params)
    own.n, own.sample_index = 1, index
    return own


def new_id(prefix: str) -> str:
    """A new id; the prefix comes with its separator, as in `cmpl-` or `msg_`."""
    return prefix + uuid.uuid4().hex


def response_id(prefix: str, request_id: str | None) -> str:
    return new_id(prefix) if request_id is None else prefix + request_id
