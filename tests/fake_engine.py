"""An engine without a model for the tests of the HTTP layer: bytes are tokens, and what is generated is a known function
of prompt, seed and sample index."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.config import EngineConfig
from headrace.engine.interface import CoreStatus
from headrace.engine.messages import EngineOutput, RequestTimes, TokenLogprobs
from headrace.engine.stats import CoreStats
from headrace.engine.streams import Taker
from headrace.errors import CheckpointError, ParameterError
from headrace.lora.version import Version
from headrace.model.config import ModelConfig, RopeConfig
from headrace.sampling.params import SamplingParams

SPECIALS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<pad>")
BOS, EOS, IM_START, IM_END, PAD = range(256, 261)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = ["a", "b", "c", " ", "the ", "x\n", "é", "ü", "漢", "字", "😀", "👩‍👩‍👧", "\"", "\\", "{", "}", "0", "1"]


class ByteTokenizer:
    """Ids 0..255 are bytes, then SPECIALS."""

    byte_level = True
    byte_fallback: dict[int, int] = {}  # noqa: RUF012
    special_ids = added_ids = frozenset(range(256, 256 + len(SPECIALS)))
    special_texts = dict(zip(SPECIALS, range(256, 256 + len(SPECIALS)), strict=True))  # noqa: RUF012
    bos_token_id = BOS
    vocab_size = 256 + len(SPECIALS)
    bos_token, eos_token, pad_token, unk_token = "<bos>", "<eos>", "<pad>", None
    chat_template = TEMPLATE

    def __init__(self, chat_template: str = TEMPLATE):
        self.chat_templates = {"default": chat_template}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        while text:
            at, special = min(((text.find(s), s) for s in SPECIALS if s in text), default=(len(text), ""))
            ids += text[:at].encode()
            if special:
                ids.append(256 + SPECIALS.index(special))
            text = text[at + len(special) :]
        return ids

    def spans(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        assert not any(s in text for s in SPECIALS)
        own = [(i, i + 1) for i, c in enumerate(text) for _ in c.encode()]
        return [(0, 0)] * add_special_tokens + own

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i >= 256)]
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def valid_ids(self, vocab_size: int) -> np.ndarray:
        return np.arange(vocab_size) < self.vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else SPECIALS[token_id - 256].encode()

    def token_to_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


def random_text(prompt_ids: list[int], params: SamplingParams) -> str:
    """The default script: about 40 pieces of ALPHABET."""
    key = f"{prompt_ids}/{params.seed}/{params.sample_index}"
    rng = random.Random(hashlib.sha256(key.encode()).digest())
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randint(5, 40)))


@dataclass
class FakeStatus:
    loaded: bool = True
    alive: bool = True
    draining: bool = False
    progressing: bool = True
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    drain_rate: float = 100.0
    num_cores: int = 1
    doing: str = "loading"


@dataclass
class FakeEngine:
    """`script` gives the text of a sample; `bursts` how many tokens come at once (random up to it); `delay` seconds
    before each burst; `fail` may raise or return a finish reason instead of a burst."""

    script: Callable[[list[int], SamplingParams], str] = random_text
    bursts: int = 3
    delay: float = 0.0
    fail: Callable[[int], str | None] = lambda n: None
    num_cached: int = 2  # what it says of the prefix cache
    max_model_len: int = 4096
    supports_structured: bool = False
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    loras: dict[str, Version] = field(default_factory=dict)
    model_name: str = "fake/model"
    config: EngineConfig = field(default_factory=lambda: EngineConfig(max_num_seqs=8))
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    state: FakeStatus = field(default_factory=FakeStatus)

    def __post_init__(self) -> None:
        self.active: set[str] = set()
        self.aborted: list[str] = []
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.priorities: list[int] = []  # of embeddings
        self.salts: list[str] = []  # of everything
        self.yielded = 0
        self.gate = asyncio.Event()  # cleared: nothing is generated
        self.gate.set()
        rope = RopeConfig(theta=1e4, dim=8)
        self.model_config = ModelConfig(
            family="llama", vocab_size=ByteTokenizer.vocab_size, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
            head_dim=8, intermediate_size=8, max_position=self.max_model_len, rope=rope, eos_token_ids=(EOS, IM_END),
        )  # fmt: skip

    info, restarts, num_poisonous = None, 0, 0

    def counters(self) -> CoreStats:
        return CoreStats()

    def cores(self) -> list[CoreStatus]:
        return []

    def status(self) -> FakeStatus:
        return self.state

    def adapters(self) -> dict[str, Version]:
        return self.loras

    async def load_adapter(self, name: str, path: str, replace: bool = True) -> None:
        if path == "bad":
            raise CheckpointError("bad/adapter_config.json does not exist")
        self.loras[name] = Version("digest", path)

    async def unload_adapter(self, name: str) -> None:
        if self.loras.pop(name, None) is None:
            raise ParameterError("lora_name", name, "one that is there")

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def sample(self, prompt_ids: list[int], params: SamplingParams) -> tuple[list[int], str, int | None]:
        """All ids of a sample with its finish reason and stop reason, as the engine would cut it."""
        ids = [*self.script(prompt_ids, params).encode(), EOS]
        for n, token in enumerate(ids, 1):
            if token in (params.stop_token_ids or ()) and n > params.min_tokens:
                return ids[:n], "stop", token
            if token == EOS and not params.ignore_eos:
                return (ids[:n], "stop", None) if n <= params.max_tokens else (ids[: params.max_tokens], "length", None)
            if n >= params.max_tokens:
                return ids[:n], "length", None
        return ids, "length", None

    async def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = "",
        taker: Taker | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:  # fmt: skip
        assert request_id not in self.active
        assert params.max_tokens is not None and len(prompt_ids) + params.max_tokens <= self.max_model_len
        if params.structured_outputs is not None and params.structured_outputs.regex == "(":
            raise ParameterError("structured_outputs.regex", "(", "a regular expression")
        prompt_ids = list(prompt_ids)
        self.active.add(request_id)
        self.params.append(params)
        self.salts.append(cache_salt)
        self.prompts.append(prompt_ids)
        ids, reason, stop_reason = self.sample(prompt_ids, params)
        rng, asks, at, ended = random.Random(request_id), random.Random(request_id), 0, False
        try:
            while not ended:
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self.gate.wait()
                out = EngineOutput(request_id, num_cached_tokens=self.num_cached)
                if (failure := self.fail(at)) is not None:
                    out.finish_reason, out.error = failure, "NaN logits"
                    ended = True
                    yield out
                    return
                size = rng.randint(1, self.bursts)
                out.token_ids = ids[at : at + size]
                if params.logprobs is not None:
                    out.logprobs = [fake_logprobs(t, params.logprobs) for t in out.token_ids]
                if at == 0 and params.prompt_logprobs is not None:
                    out.prompt_logprobs = [None, *(fake_logprobs(t, params.prompt_logprobs) for t in prompt_ids[1:])]
                at += size
                if at >= len(ids):
                    out.finish_reason, out.stop_reason, ended = reason, stop_reason, True
                    out.times = RequestTimes(0.0, 0.0, 0.0)
                self.yielded += 1
                if ended or taker is None or asks.random() < 0.25 or not taker(out):
                    yield out
        finally:
            self.active.discard(request_id)
            if not ended:
                self.aborted.append(request_id)

    async def embed(
        self, request_id: str, prompt_ids: list[int], pooling: str, *, priority: int = 0, cache_salt: str = ""
    ) -> list[float]:
        self.priorities.append(priority)
        self.salts.append(cache_salt)
        vector = [float(sum(prompt_ids) % (i + 7) + 1) for i in range(8)]
        norm = sum(x * x for x in vector) ** 0.5
        return [x / norm for x in vector]


def fake_logprobs(token: int, top: int) -> TokenLogprobs:
    """The actual token first, then the `top` most likely ones, of which it may be one."""
    likely = [(token * 7 + k) % 261 for k in range(max(top, 0))]
    values = [-0.25 * (k + 1) - (token % 16) / 64 for k in range(len(likely))]
    own = values[likely.index(token)] if token in likely else -9.0 - token / 100
    return TokenLogprobs([token, *likely], [own, *values], likely.index(token) + 1 if token in likely else 100)
