"""Adapters beside each other and beside the base model: each says what a checkpoint says that it was merged into."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from adapters import merged, write_adapter
from answers import error_of
from drafting import draft_always
from fake_core import FakeCore, FakeSupply
from headrace import LLM, SamplingParams
from headrace.api.app import create_app
from headrace.api.config import ServerConfig
from headrace.config import EngineConfig
from headrace.engine.build import build_engine
from headrace.engine.client import EngineClient
from headrace.engine.core import EngineCore
from headrace.errors import CheckpointError, ParameterError
from headrace.lora.core import CoreAdapters
from scheduler_driver import admit_greedily
from server_driver import Api, soon
from tiny_models import write_tiny

OPTIONS = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "max_model_len": 96, "max_num_seqs": 8, "block_size": 4}
SERVED = {"enforce_eager": True, "max_model_len": 250, "num_kv_blocks": 160}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = ["The quick brown fox", "Where the water ends", "the mill", "A headrace leads the water onto the wheel of the mill."]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return str(write_tiny("qwen2", tmp_path_factory.mktemp("base"), num_hidden_layers=2))


@pytest.fixture(scope="module")
def adapters(base: str, tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    patterns = {"rank_pattern": {"q_proj": 6, "layers.1.mlp.down_proj": 2}, "alpha_pattern": {"mlp.up_proj": 3}}
    return {
        "all": write_adapter(root / "all", base),
        "some": write_adapter(
            root / "some", base, targets=("v_proj", "down_proj"), seed=1, use_rslora=True, layers=(1,), size=2.0
        ),
        "ranks": write_adapter(root / "ranks", base, seed=2, **patterns),
    }


def say(llm: LLM, prompts: list[str], **more) -> list[list[int]]:
    return [list(r.outputs[0].token_ids) for r in llm.generate(prompts, GREEDY, use_tqdm=False, **more)]


@pytest.fixture(scope="module")
def wanted(base: str, adapters: dict[str, str], tmp_path_factory) -> dict[str, list[list[int]]]:
    """What each says to all prompts, the base under the name None."""
    found = {}
    for name, path in {None: None, **adapters}.items():
        model = base if path is None else merged(tmp_path_factory.mktemp("merged") / "model", base, path)
        with LLM(model, **OPTIONS) as llm:
            found[name] = say(llm, PROMPTS)
    assert len({str(said) for said in found.values()}) == 4  # otherwise this shows nothing
    return found


@pytest.fixture(scope="module")
def llm(base: str, adapters: dict[str, str]):
    with LLM(base, lora=adapters, max_num_batched_tokens=7, debug_checks=True, **OPTIONS) as llm:
        yield llm


def test_together_as_each_alone(llm: LLM, wanted) -> None:
    """In chunks, with prefix hits from the second round on, which are of nobody else's."""
    names = list(wanted)
    for _ in range(2):
        for prompt in range(len(PROMPTS)):
            assert say(llm, [PROMPTS[prompt]] * 4, lora=names) == [wanted[name][prompt] for name in names]
    assert say(llm, PROMPTS, lora="ranks") == wanted["ranks"]
    assert llm.engine.core.scheduler.stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_and_preemption_change_nothing(base: str, adapters, wanted, method: str) -> None:
    """The base model guesses for its adapters; whoever loses his blocks comes back with his own."""
    options = OPTIONS | {"num_kv_blocks": 20, "speculative_method": method, "num_speculative_tokens": 3, "lora": adapters}
    if method == "ngram":
        options["prompt_lookup_min"] = 1
    if method == "draft_model":
        options["speculative_model"] = base
    names = [*wanted, *wanted]
    with LLM(base, debug_checks=True, **options) as llm:
        core = llm.engine.core
        draft_always(core, 3, overlap=method == "draft_model")
        admit_greedily(core.scheduler)
        assert say(llm, [PROMPTS[3]] * 8, lora=names) == [wanted[name][3] for name in names]
        assert core.speculator.stats.num_drafts and core.scheduler.stats.num_preemptions


def test_two_ranks_say_what_one_says(base: str, adapters, wanted) -> None:
    names = list(wanted)
    with LLM(base, lora=adapters, tensor_parallel_size=2, **OPTIONS) as llm:
        for prompt in range(2):
            assert say(llm, [PROMPTS[prompt]] * 4, lora=names) == [wanted[name][prompt] for name in names]


def test_an_unknown_name_is_refused(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="lora: got 'other', allowed: one of all, ranks, some"):
        llm.generate("x", GREEDY, lora="other")
    with pytest.raises(ParameterError, match="one for each of the 1 prompts"):
        llm.generate("x", GREEDY, lora=["all", "all"])


# ---------------------------------------------------------------- over HTTP


class Supply(FakeSupply):
    """Cores in this process, which know of adapters; `steps` moves all that there are."""

    def __init__(self, model: str, **options):
        super().__init__(model, **options)
        self.cores: dict[int, FakeCore] = {}

    def new(self, number: int = 0) -> EngineCore:
        core = super().new(number)
        pool = core.runner.state.adapters
        core.adapters = CoreAdapters(self.config.max_loras, pool.read, pool.load, pool.unload)
        return core

    async def take(self, number: int) -> FakeCore:
        core = self.cores[number] = await super().take(number)
        asyncio.get_running_loop().call_soon(core.load)
        return core

    async def run(self) -> None:
        while True:
            for core in list(self.cores.values()):
                if core.ready is not None and not core.exited:
                    core.loop.turn()
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def supply(base: str, adapters: dict[str, str], tmp_path_factory) -> Supply:
    root = tmp_path_factory.mktemp("allowed")
    for name in ("all", "some"):
        shutil.copytree(adapters[name], root / name)
    (root / "link").symlink_to(adapters["ranks"])
    (root / "links").mkdir()
    for file in Path(adapters["ranks"]).iterdir():
        (root / "links" / file.name).symlink_to(file)
    return Supply(base, most=2, max_loras=3, lora={"ranks": adapters["ranks"]}, lora_dir=str(root), **SERVED)


class Server:
    """An application over a client of two cores."""

    def __init__(self, client: EngineClient):
        self.client = client
        config = ServerConfig(served_model_names=("tiny",), api_keys=("user",), admin_keys=("boss",))
        app = create_app(client, config)
        self.ctx = app.state.api
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    async def post(self, path: str, key: str = "user", **body) -> tuple[int, dict]:
        answer = await self.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        return answer.status_code, answer.json()

    async def load(self, name: str, path: str, **more) -> int:
        return (await self.post("/v1/load_lora_adapter", "boss", lora_name=name, lora_path=path, **more))[0]

    async def unload(self, name: str) -> int:
        return (await self.post("/v1/unload_lora_adapter", "boss", lora_name=name))[0]

    async def says(self, name: str, prompt: int = 0, max_tokens: int = 10) -> list[int] | None:
        """The ids of an answer; None: there is no model of this name."""
        body = {"model": name, "prompt": PROMPTS[prompt], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, answer = await self.post("/v1/completions", **body, logprobs=0, return_tokens_as_token_ids=True)
        assert status in (200, 404), answer
        return None if status == 404 else [int(t.removeprefix("token_id:")) for t in answer["choices"][0]["logprobs"]["tokens"]]


def served(supply: Supply, play: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        supply.cores.clear()
        client = supply.client(cores=2)
        turning = asyncio.create_task(supply.run())
        try:
            await client.start()
            await client.wait_settled()
            await play(Server(client))
        finally:
            await client.close(0.0)
            turning.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("member", ["tokenize", "limits.admit"])
def test_one_that_goes_while_a_request_is_prepared_is_not_there(supply: Supply, monkeypatch, member: str) -> None:
    """The model itself would answer in its name."""

    async def play(server: Server) -> None:
        *place, name = member.split(".")
        holder = getattr(server.ctx, place[0]) if place else server.ctx
        prepare = getattr(holder, name)

        async def too_late(*args, **kwargs):
            assert await server.unload("ranks") == 200
            return await prepare(*args, **kwargs)

        monkeypatch.setattr(holder, name, too_late)
        status, answer = await server.post("/v1/completions", model="ranks", prompt=PROMPTS[0], max_tokens=3)
        assert (status, answer["error"]["code"]) == (404, "model_not_found"), answer

    served(supply, play)


def test_names_with_and_without_a_tag(supply: Supply, wanted) -> None:
    """As Ollama writes and reads them: a name without one means `:latest`."""

    async def play(server: Server) -> None:
        assert await server.load("some:latest", "some") == 200
        for name in ("some", "some:latest", "ranks", "ranks:latest"):
            body = {"model": name, "prompt": PROMPTS[0], "raw": True, "stream": False}
            status, answer = await server.post("/api/generate", **body, options={"num_predict": 10, "temperature": 0, "repeat_penalty": 1})
            assert status == 200
            _, same = await server.post("/v1/completions", model=name, prompt=PROMPTS[0], max_tokens=10, temperature=0)
            assert answer["response"] == same["choices"][0]["text"]
            assert await server.says(name) == wanted[name.removesuffix(":latest")][0]
        assert await server.load("tiny:latest", "some") == 200
        assert await server.says("tiny") == wanted[None][0], "nobody else has the model's own name"
        assert await server.says("tiny:latest") == wanted["some"][0]

    served(supply, play)


def test_names_of_adapters_are_names_of_models(supply: Supply, wanted) -> None:
    async def play(server: Server) -> None:
        found = await server.http.get("/v1/models", headers={"x-api-key": "user"})
        cards = {card["id"]: card for card in found.json()["data"]}
        assert set(cards) == {"tiny", "ranks"} and "parent" not in cards["tiny"]
        assert cards["ranks"]["parent"] == "tiny" and cards["ranks"]["root"].endswith("/ranks")
        for prompt in range(2):
            assert await server.says("ranks", prompt) == wanted["ranks"][prompt]
            assert await server.says("tiny", prompt) == wanted[None][prompt]
        messages = [{"role": "user", "content": "the mill"}]
        texts: dict[str, set[str]] = {}
        for name in ("tiny", "ranks"):
            few = {"model": name, "temperature": 0}
            for path, body in {
                "/v1/chat/completions": {"messages": messages, "max_tokens": 8}, "/v1/responses": {"input": "the mill", "max_output_tokens": 8},
                "/v1/messages": {"messages": messages, "max_tokens": 8}, "/generate": {"prompt": "the mill", "max_tokens": 8},
                "/api/chat": {"messages": messages, "stream": False, "options": {"num_predict": 8, "temperature": 0}},
                "/api/generate": {"prompt": "the mill", "stream": False, "options": {"num_predict": 8, "temperature": 0}},
            }.items():  # fmt: skip
                own = {"model": name} if path.startswith("/api") else few
                status, answer = await server.post(path, **own, **body)
                assert status == 200, (path, answer)
                said = re.findall(r'"(?:content|text|response)": *"((?:[^"\\]|\\.)+)"', json.dumps(answer))
                assert texts.setdefault(path, set()).isdisjoint(said) and said, path
                texts[path] |= set(said)
        for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/rerank", {"query": "x", "documents": ["y"]}), ("/api/embed", {"input": "x"})):
            status, answer = await server.post(path, model="ranks", **body)
            assert status == 400 and "an adapter generates text" in json.dumps(answer), path
        status, answer = await server.post("/v1/completions", model="ranks", prompt="x", use_beam_search=True, n=2, max_tokens=3)
        assert status == 400 and "not with an adapter" in json.dumps(answer)

    served(supply, play)


def test_a_core_that_starts_again_does_not_miss_files_that_are_gone(base: str, adapters, tmp_path) -> None:
    """It is told which adapters there are now, and by what their requests are refused: an end of the server is not it."""
    gone = shutil.copytree(adapters["all"], tmp_path / "gone")
    shutil.rmtree(gone)
    options = {"model": base, "lora": {"gone": str(gone)}, **OPTIONS}
    build_engine(EngineConfig(**options)).close()
    with pytest.raises(CheckpointError, match=r"gone/adapter_config\.json does not exist"):
        build_engine(EngineConfig(**options), adapters=True)


def test_what_a_core_could_not_load_again_is_not_the_requests_mistake(supply: Supply) -> None:
    async def play(server: Server) -> None:
        digest = server.client.adapters()["ranks"].digest
        await soon(lambda: all(digest in core.core.adapters.state for core in supply.cores.values()))
        for core in supply.cores.values():
            core.core.adapters.state[digest] = "its files are gone"
        status, answer = await server.post("/v1/completions", model="ranks", prompt="x", max_tokens=1)
        assert status == 500 and answer["error"]["message"] == "the adapter could not be loaded again: its files are gone"
        assert await server.says("tiny") is not None

    served(supply, play)


def broken(version):
    raise CheckpointError("its files have changed")


def test_who_may_load_what(supply: Supply, adapters) -> None:
    async def play(server: Server) -> None:
        for key, status in (("user", 401), ("", 401)):
            assert (await server.post("/v1/load_lora_adapter", key, lora_name="a", lora_path="all"))[0] == status
            assert (await server.post("/v1/unload_lora_adapter", key, lora_name="ranks"))[0] == status
        assert (await server.post("/v1/completions", "boss", model="tiny", prompt="x"))[0] == 401
        for path in ("../all", adapters["ranks"], "link", "links", "", ".", "all/../..", "\0", "~", "nowhere"):
            assert await server.load("a", path) == 400, path
        assert await server.load("tiny", "all") == 400 and await server.load("", "all") == 400 and await server.load("\n", "all") == 400
        assert await server.load("ranks", "all", load_inplace=False) == 400
        assert await server.unload("a") == 400
        at_once = [server.load("e", path, load_inplace=False) for path in ("all", "some")]
        assert sorted(await asyncio.gather(*at_once)) == [200, 400] and await server.unload("e") == 200
        assert await server.load("a", "all") == await server.load("b", "some") == 200
        assert await server.load("c", "all") == 200  # of a content that is there
        shutil.copytree(Path(supply.config.lora_dir) / "all", Path(supply.config.lora_dir) / "fourth")
        config = Path(supply.config.lora_dir) / "fourth" / "adapter_config.json"
        config.write_text(config.read_text() + " ")
        assert await server.load("d", "fourth") == 400  # three are the most
        assert await server.unload("a") == 200 and await server.load("d", "fourth") == 400
        assert await server.unload("c") == 200
        second = supply.cores[1].core.adapters
        read, second._read = second._read, broken  # one core cannot: none has it, and its place is free
        assert await server.load("d", "fourth") == 400 and "d" not in server.client.adapters()
        second._read = read
        assert await server.load("d", "fourth") == 200 and await server.says("d") is not None

    served(supply, play)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1//unload_lora_adapter/"])
def test_without_a_key_of_the_operator_nothing_comes_or_goes(path: str) -> None:
    api = Api(api_keys=("user",))
    answer = api.request("POST", path, json={"lora_name": "a", "lora_path": "b"}, headers={"x-api-key": "user"})
    assert answer.status_code == 403 and error_of(answer)["code"] == "no_admin_key" and not api.engine.loras


def test_contents_come_and_go_and_streams_keep_theirs(supply: Supply, wanted) -> None:
    """A name means another content: the prefix cache has nothing of the old one, and who has begun goes on with it, also in
    another core; the last of them is waited for before its place is free."""

    async def play(server: Server) -> None:
        assert await server.says("x") is None
        assert await server.load("x", "all") == 200
        for _ in range(2):
            assert await server.says("x", 3) == wanted["all"][3]
        long = asyncio.create_task(server.says("x", 3, 200))
        await soon(lambda: any(len(s.request.output_ids) > 3 for s in server.client._streams.live.values()))
        assert await server.load("x", "some") == 200
        assert await server.says("x", 3) == wanted["some"][3] and not long.done()
        for number, core in supply.cores.items():  # both die, one after the other
            core.process.exit(-9)
            await soon(lambda number=number, core=core: supply.cores[number] is not core and supply.cores[number].ready)
        assert len(server.client._adapters.held) == 3 and not long.done()
        assert await server.says("x", 3) == wanted["some"][3] and await server.says("ranks", 3) == wanted["ranks"][3]
        said = await long
        assert said is not None and said[:10] == wanted["all"][3] and len(said) == 200
        await soon(lambda: len(server.client._adapters.held) == 2)
        assert await server.load("again", "all") == 200 and await server.says("again", 3, 200) == said
        assert await server.unload("again") == 200
        last = asyncio.create_task(server.says("x", 3, 30))
        await soon(lambda: len(server.client._streams) == 1)
        going = asyncio.create_task(server.unload("x"))
        await soon(lambda: "x" not in server.client.adapters())
        assert await server.says("x") is None and not going.done() and not last.done()
        assert await going == 200 and (await last)[:10] == wanted["some"][3]
        await soon(lambda: all(len(state) == 1 for state in server.client._slots.adapter_states()))

    served(supply, play)
