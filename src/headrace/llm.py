"""The offline API: `LLM(...).generate(...)`, `.stream`, `.chat`, `.beam_search`, `.embed`, `.score`; its names are vLLM's."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.beam_search import BeamSearchOutput, BeamSearchParams, beams_in_core
from headrace.config import EngineConfig
from headrace.embedding import EmbeddingRequestOutput, embed_in_core
from headrace.engine.build import Engine, build_engine
from headrace.engine.messages import EngineOutput, EngineRequest
from headrace.engine.sharing import Reader, SharedCore
from headrace.errors import ParameterError
from headrace.foreign_options import left_out_in_words, of_python
from headrace.lora.names import salted, with_adapters
from headrace.model.tokenizer import Tokenizer
from headrace.progress import token_progress
from headrace.sampling.params import SamplingParams, defaults_in_words
from headrace.scoring import ScoreOutput, score_in_core
from headrace.text.inputs import GivenPrompt, InputProcessor, Prompt
from headrace.text.output import CompletionOutput, RequestOutput, request_metrics
from headrace.text.stream import Delta, SampleStream

if TYPE_CHECKING:
    from headrace.conversation.literal_content import LiteralContent

logger = logging.getLogger(__name__)


class _Prepared(NamedTuple):
    """A prompt that can run: as it was given (but for what was cut off), as the core takes it, and with what parameters."""

    given: GivenPrompt
    ids: array
    params: SamplingParams


@dataclass(slots=True)
class _Running:
    """A prompt on its way: its output so far and the streams that fill it."""

    index: int  # of the prompt
    output: RequestOutput
    streams: list[SampleStream] = field(default_factory=list)

    def extend(self, k: int, news: EngineOutput, reader: Reader) -> Delta:
        """What the news add to sample `k`."""
        out, stream = self.output.outputs[k], self.streams[k]
        delta = stream.push(news)
        if delta.stopped_here:
            reader.drop(news.id)
        out.text += delta.text
        out.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            out.logprobs = (out.logprobs or []) + delta.logprobs
            chosen = (d[t].logprob for d, t in zip(delta.logprobs, delta.token_ids, strict=True))
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + sum(chosen)
        out.finish_reason, out.stop_reason, out.error = delta.finish_reason, delta.stop_reason, delta.error
        if k == 0:
            self.output.num_cached_tokens = stream.num_cached_tokens
            self.output.prompt_logprobs = stream.prompt_logprobs
            if delta.finish_reason is not None:
                self.output.metrics = request_metrics(stream.times, stream.num_tokens)
        self.output.finished = all(o.finish_reason for o in self.output.outputs)
        return delta


class LLM:
    """One engine in this process. Use it as a context manager, or call `close`, to free its memory.

    Calls may come from several threads, and while a stream is open: each gets its own answers, and all run together.
    Options are those of EngineConfig by keyword. Raises CheckpointError, CapacityError or ParameterError.
    """

    def __init__(self, model: str | None = None, *, progress: bool = False, **options: Any):
        fields, left_out = of_python(options, EngineConfig.__dataclass_fields__)
        for remark in left_out_in_words(left_out):
            logger.warning("%s", remark)
        config = EngineConfig(model=model, **fields)
        self.engine: Engine | None = build_engine(config, progress=progress, adapters=True)
        self._adapters = self.engine.begin()
        self.config = self.engine.config
        self.tokenizer = self.engine.tokenizer
        checkpoint = self.engine.checkpoint
        self.inputs = InputProcessor(
            self.tokenizer,
            dict(checkpoint.generation_defaults),
            self._end_token_ids(),
            self.engine.model.vocab_size,
            self.config.max_model_len or 0,
        )
        logger.info("sampling where a request says nothing: %s", defaults_in_words(self.inputs.defaults))
        self._shared = SharedCore(self.engine.core)

    def _end_token_ids(self) -> tuple[int, ...]:
        """All that end a text: what the files name, and what the chat template writes behind an answer."""
        assert self.engine is not None
        named = self.engine.checkpoint.end_token_ids(self.tokenizer.end_token_ids if self.tokenizer is not None else ())
        if self.tokenizer is None:
            return named
        from headrace.conversation.turn_end import end_token_ids  # renders templates: no import where there is no text

        return tuple(dict.fromkeys([*named, *sorted(end_token_ids(self.tokenizer))]))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model, the cache and everything on the device. The object is of no use afterwards, nor are its streams."""
        if self.engine is not None and not self._shared.is_forked:  # a fork has nothing to close
            self._shared.close()
            self.engine.close()
        self.engine = None

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        with self._shared.turn() as core:
            core.scheduler.reset_prefix_cache()

    def get_tokenizer(self) -> Tokenizer:
        """Raises ParameterError where the engine was made with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise ParameterError("prompt", "a text", "token ids only: the engine was made with skip_tokenizer_init")
        return self.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        use_tqdm: bool = True, priority: Sequence[int] | None = None, lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Generate for every prompt; the answers come in the order of the prompts.

        A prompt is a text, a list of token ids, or {"prompt": str} / {"prompt_token_ids": [...]}, with an optional
        "cache_salt". `sampling_params` is one for all or one each; None takes the checkpoint's defaults; `lora`, the name of
        an adapter, likewise. Raises ParameterError for a bad prompt or parameter before anything runs, EngineDeadError when
        it is closed meanwhile, and whatever a logits processor raises.
        """
        with Reader(self._shared) as reader:
            running = self._submit(reader, prompts, sampling_params, priority, lora, live=False)
            with token_progress(len(running), reader.num_tokens, use_tqdm) as progress:
                for (item, k), news in reader.news(progress):
                    item.extend(k, news, reader)
                    if progress is not None and item.output.finished:
                        progress(1)
        return [r.output for r in running]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        lora: str | Sequence[str | None] | None = None,
    ) -> Iterator[tuple[int, int, Delta, RequestOutput]]:  # fmt: skip
        """As `generate`, piece by piece: (index of the prompt, index of the sample, what it got, the answer so far).

        Other calls may run in between, in the same thread or another; each gets its own. Close it to abort what still runs.
        """
        with Reader(self._shared) as reader:
            self._submit(reader, prompts, sampling_params, None, lora, live=True)
            for (item, k), news in reader.news():
                yield item.index, k, item.extend(k, news, reader), item.output

    def chat(
        self, messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
        add_generation_prompt: bool = True, continue_final_message: bool = False, tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None, special_tokens_in_content: str = "token",
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Generate the next message of one conversation or of several, through the checkpoint's chat template.

        `special_tokens_in_content`: "text" keeps those that messages spell out as text. Raises as `generate`.
        """
        if isinstance(messages, str | dict) or not isinstance(messages, Iterable):
            raise ParameterError("messages", messages, "a conversation, which is a list of messages, or a list of them")
        given: list[Any] = list(messages)
        prompts: list[Prompt] = [
            self.chat_prompt(
                c, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message, tools=tools,
                chat_template_kwargs=chat_template_kwargs, special_tokens_in_content=special_tokens_in_content,
            )
            for c in ([given] if given and isinstance(given[0], dict) else given)
        ]  # fmt: skip
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora=lora)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest continuations of every prompt; all prompts are searched at once. Raises as `generate`."""
        prepared = [self._prepare(p, SamplingParams(max_tokens=params.max_tokens), {}) for p in _listed(prompts)]
        return beams_in_core(self._shared, prepared, params, self.tokenizer)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: str = "mean", truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """The vector of every prompt, as /v1/embeddings has it. `pooling`: "mean" or "last". Raises as `generate`."""
        params = SamplingParams(max_tokens=1, truncate_prompt_tokens=truncate_prompt_tokens)
        return embed_in_core(self._shared, [self._prepare(p, params, {}) for p in _listed(prompts)], pooling, use_tqdm)

    def score(self, prompts: Prompt | Sequence[Prompt], *, stride: int | None = None) -> list[ScoreOutput]:
        """The logprob of every token of every text, and the texts' perplexities. Raises as `generate`.

        A text longer than the context is read through a window that moves on by `stride` tokens (default: half of it).
        """
        texts = [self.inputs.read(p) for p in _listed(prompts)]
        for text in texts:
            self.inputs.check_ids(text.ids)
        scores = score_in_core(self._shared, texts, self.config.max_model_len or 0, stride)
        return [ScoreOutput(text.text, text.ids, found) for text, found in zip(texts, scores, strict=True)]

    def chat_prompt(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
        special_tokens_in_content: str = "token", **template_options: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """The conversation by the chat template, tokenized (it writes its own special tokens). Raises ParameterError."""
        from headrace.conversation.literal_content import FORMS
        from headrace.conversation.template import ChatTemplate
        from headrace.conversation.tool_prompt import shown_to

        if special_tokens_in_content not in FORMS:
            raise ParameterError("special_tokens_in_content", special_tokens_in_content, " or ".join(FORMS))
        tokenizer = self.get_tokenizer()
        literal = self._literal_content if special_tokens_in_content == "text" else None
        template = ChatTemplate.from_tokenizer(tokenizer, literal=literal)
        shown, known_tools = shown_to(template, messages, tools)
        text = template.render(shown, tools=known_tools, **template_options)
        if literal is not None:
            ids = literal.tokenizer.encode(literal.spelled(text), add_special_tokens=False)
            return {"prompt": literal.shown(text), "prompt_token_ids": ids}
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    @cached_property
    def _literal_content(self) -> LiteralContent:
        from headrace.conversation.literal_content import LiteralContent

        return LiteralContent(self.get_tokenizer())

    # ---------------------------------------------------------------- how prompts become requests, and news answers

    def _submit(
        self, reader: Reader, prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None, priority: Sequence[int] | None,
        lora: str | Sequence[str | None] | None, *, live: bool,
    ) -> list[_Running]:  # fmt: skip
        """Hand all samples of all prompts to the core.

        Unless somebody looks on (`live`), a sample without stop strings is put together once, at its end.
        """
        prompts = _listed(prompts)
        params = sampling_params
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        for name, values in (("sampling_params", params), ("priority", priority)):
            if values is not None and not (isinstance(values, Sized) and len(values) == len(prompts)):
                got = f"{len(values)} entries" if isinstance(values, Sized) else values
                raise ParameterError(name, got, f"one for each of the {len(prompts)} prompts")
        if priority is not None and any(priority) and self.config.scheduling_policy != "priority":
            raise ParameterError("priority", list(priority), "only 0, unless scheduling_policy is priority")
        params = with_adapters(params, lora, self._adapters)
        complete_of: dict[tuple[int, int], SamplingParams] = {}
        prepared = [self._prepare(p, q, complete_of) for p, q in zip(prompts, params, strict=True)]
        running = []
        for i, (given, ids, complete) in enumerate(prepared):
            request_id = self._shared.new_name()
            samples = [CompletionOutput(k) for k in range(complete.n)]
            item = _Running(i, RequestOutput(request_id, given.text, given.ids, samples, finished=False))
            hold = not (live or complete.stop or complete.logprobs is not None)
            for k in range(complete.n):
                one = msgspec.structs.replace(complete, sample_index=k) if k else complete
                item.streams.append(SampleStream(self.tokenizer, one, ids))
                name, rank = f"{request_id}.{k}", priority[i] if priority else 0
                salt = salted(given.cache_salt, one.lora)
                reader.add(EngineRequest(name, ids, one, one.seed, rank, salt), (item, k), hold=hold)
            running.append(item)
        return running

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, complete_of: dict[tuple[int, int], SamplingParams]
    ) -> _Prepared:
        """Complete parameters are made once for all prompts alike to them."""
        given = self.inputs.read(prompt)
        ids = self.inputs.prompt(given.ids, params)
        if len(ids) < len(given.ids):
            given = given._replace(ids=given.ids[-len(ids) :])
        kind = id(params), self.inputs.max_tokens(params, len(ids))
        complete = complete_of.get(kind)
        if complete is None:
            complete = complete_of[kind] = self.inputs.complete(params, len(ids))
        return _Prepared(given, ids, complete)


def _listed(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt as a list of one. Raises ParameterError for what is neither a prompt nor several."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ParameterError("prompts", prompts, "a prompt (a text, token ids, a dict with one of these), or a list of them")
    found: list[Any] = [prompts] if isinstance(prompts, str | dict) else list(prompts)
    return [found] if found and isinstance(found[0], int) else found
