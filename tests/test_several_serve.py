"""`headrace serve` with several models: how they are described, what is refused at the start, how memory is divided; and real ones."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import weakref
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import write_adapter
from headrace.api.config import ServerConfig
from headrace.cli import main, make_parser
from headrace.cli.serve import Server, server_config
from headrace.cli.serve_options import ServeOptions
from headrace.cli.several import check_alone, divide, several_models
from headrace.config import EngineConfig
from headrace.engine.client import EngineClient
from headrace.engine.weight_sizes import weight_bytes
from headrace.errors import CapacityError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.several_models import memory
from headrace.several_models.served import ModelSpec
from server_driver import ServerProcess, alive, until
from tiny_models import write_tiny

GIB = 1 << 30


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> str:
    return str(write_tiny("qwen2", tmp_path_factory.mktemp("other")))


@pytest.fixture
def never_serves(monkeypatch):
    def run(self):
        raise AssertionError("it would have listened")

    monkeypatch.setattr(Server, "run", run)


def read(*words: str, file: str = "", tmp: Path | None = None):
    """The models of a command line, not started."""
    if file:
        assert tmp is not None
        (tmp / "c.yaml").write_text(file)
        words = ("--config", str(tmp / "c.yaml"), *words)
    args = make_parser().parse_args(["serve", "--device", "cpu", *words])
    check_alone(args)
    return several_models(args, ServeOptions(), server_config(args), "nobody:builds", {})[0]


def closed(models):
    asyncio.run(models.close())
    return models


# ---------------------------------------------------------------- how they are described


def test_a_repeated_model_and_entries_of_a_file_are_models_with_options_of_their_own(model, other, tmp_path):
    models = closed(read("--model", model, "--model", other, "--max-num-seqs", "7"))
    assert models.names == [model, other] and [m.spec.engine.max_num_seqs for m in models.served] == [7, 7]
    file = f"""
max_num_seqs: 7
max_queued_requests: 50
models:
  - {model}
  - {{name: two, model: {other}, max_model_len: 64, max-num-seqs: 3, pinned: true, keep_alive: 5, max_queued_requests: 2}}
  - {{names: [three, "3"], model: {other}, tool_parser: none, embedding_pooling: last, override_generation_config: '{{"temperature": 0.25}}'}}
"""
    models = closed(read("--model-keep-alive", "60", "--default-model", "3", file=file, tmp=tmp_path))
    one, two, three = (m.spec for m in models.served)
    assert models.names == [model, "two", "three", "3"] and models.default == 2
    assert (one.engine.max_num_seqs, two.engine.max_num_seqs, two.engine.max_model_len) == (7, 3, 64)
    assert (one.server.max_queued_requests, two.server.max_queued_requests) == (50, 2)
    assert (one.keep_alive, two.keep_alive, one.pinned, two.pinned) == (60, 5, False, True)
    assert three.server.tool_parser is None and three.server.embedding_pooling == "last" and one.server.tool_parser == "auto"
    assert three.generation_defaults == {"temperature": 0.25} and one.generation_defaults == {}


def test_threads_of_a_cpu_are_divided_among_those_that_fit_together(model, other, monkeypatch):
    monkeypatch.setattr("headrace.cli.several.usable_cores", lambda: 8)
    monkeypatch.setattr("headrace.native.threads.most_threads", lambda: 8)
    words = ["--model", model, "--model", other]
    assert [m.spec.engine.threads for m in closed(read(*words)).served] == [4, 4]
    assert [m.spec.engine.threads for m in closed(read(*words, "--threads", "3")).served] == [3, 3]
    entries = [json.dumps({"model": m, "memory_bytes": 3 * GIB}) for m in (model, other)]
    turns = closed(read("--models", entries[0], "--models", entries[1], "--model-memory-bytes", str(5 * GIB)))
    assert [m.spec.engine.threads for m in turns.served] == [8, 8], "one at a time has all"
    assert [m.spec.engine.memory_bytes for m in turns.served] == [3 * GIB] * 2


# option words (MODEL and OTHER stand for paths) -> what the error begins with
WRONG = {
    "--default-model MODEL": "--default-model: got",
    "--pinned-model x": "--pinned-model: got ['x'], allowed: nothing without several models",
    "--model MODEL --model MODEL": "--models: got",
    "--model MODEL --model OTHER --default-model x": "--default-model: got 'x', allowed: one of MODEL, OTHER",
    "--model MODEL --model OTHER --pinned-model x": "--pinned-model: got 'x', allowed: one of MODEL, OTHER",
    "--model MODEL --model OTHER --data-parallel-size 2": "--data-parallel-size: got 2, allowed: with several models: 1",
    "--model MODEL --model OTHER --tensor-parallel-size 2": "--tensor-parallel-size: got 2",
    "--model MODEL --model OTHER --api-processes 2": "--api-processes: got 2, allowed: with several models: 1",
    "--model MODEL --model OTHER --ray local": "--ray: got 'local'",
    "--model MODEL --model OTHER --trace t": "--trace: got 't'",
    "--model MODEL --model OTHER --kv-events tcp://*:0": "--kv-events: got",
    "--model MODEL --model OTHER --allow-kill-core": "--allow-kill-core: got True",
    "--model MODEL --model OTHER --served-model-name x": "--served-model-name: got ['x'], allowed: with several models: each has names",
    "--model MODEL --model OTHER --lora a=/x": "--lora: got ['a=/x'], allowed: with several models: each model has adapters of its own",
    "--model MODEL --model OTHER --admin-key x": "--admin-key: got 'a key', allowed: none without --lora-dir",
    '--model MODEL --models {"model":"OTHER","lora_dir":"./nowhere"}': "--lora-dir: got './nowhere', allowed: a directory",
    "--model MODEL --model OTHER --lora-dir /x": "--lora-dir: got '/x', allowed: with several models: each model has",
    '--model MODEL --models {"model":"OTHER","lora":["a"]}': "models[0].lora: got 'a', allowed: NAME=PATH, with names that differ",
    '--model MODEL --models {"model":"OTHER","lora":[1]}': "models[0].lora: got",
    '--model MODEL --models {"model":"OTHER","lora":{"MODEL":"/x"}}': "--lora: got 'MODEL', allowed: a name that no model has",
    '--model MODEL --models {"model":"OTHER","lora":"a=/x"} --models {"name":"c","model":"OTHER","lora":["a=/y"]}': (
        "--lora: got 'a', allowed: a name that no model has, and no other adapter of any"
    ),
    '--model MODEL --models {"model":"OTHER","lora":"a=/no/where"}': "/no/where/adapter_config.json does not exist",
    '--model MODEL --models {"model":"OTHER","max_loras":2}': "models[0].max_loras: got 2, allowed: nothing without lora",
    "--model MODEL --model ./nowhere": "directory nowhere does not exist",
    "--model MODEL --model OTHER --model-memory-bytes 1000": "the model MODEL can never be loaded",
    "--model MODEL --model OTHER --any-model-name": "--any-model-name: got True, allowed: off without --default-model",
    "--model MODEL --model OTHER --kv-cache-bytes 9000000000000": "the model MODEL can never be loaded",
    "--model MODEL --model OTHER --min-replicas 1": "--min-replicas: got 1",
    "--model MODEL --model OTHER --model-keep-alive -1": "--model-keep-alive: got -1.0, allowed: seconds in",
    '--model MODEL --models {"model":"OTHER","max_num_seqs":0}': "models[0].max_num_seqs: got 0, allowed: an integer in [1, 65536]",
    '--model MODEL --models {"model":"OTHER","max_num_seqs":"four"}': "models[0].max_num_seqs: got 'four', allowed: an integer",
    '--model MODEL --models {"model":"OTHER","pinned":"maybe"}': "models[0].pinned: got 'maybe', allowed: true or false",
    '--model MODEL --models {"model":"OTHER","max_model_len":9999}': "--max-model-len: got 9999, allowed: at most 256",
    '--model MODEL --models {"model":"OTHER","max_num_seq":4}': "models[0].max_num_seq: a model has no such option (did you mean max_num_seqs?)",
    '--model MODEL --models {"model":"OTHER","device":"cpu"}': "models[0].device: this is for all models",
    '--model MODEL --models {"model":"OTHER","max_num_seqs":4,"max-num-seqs":5}': "models[0]: max-num-seqs: it is there twice",
    '--model MODEL --models {"model":' + "[" * 3000: 'models[0]: got \'{"model":[[[',
    '--model MODEL --models {"model":"OTHER","port":1}': "models[0].port: a model has no such option",
    '--model MODEL --models {"model":"OTHER","pinned":1}': "models[0].pinned: got 1, allowed: true or false",
    '--model MODEL --models {"model":"OTHER","keep_alive":-1}': "models[0].keep_alive: got -1, allowed: seconds",
    '--model MODEL --models {"model":"OTHER","memory_bytes":"1G"}': "models[0].memory_bytes: got '1G', allowed: an integer",
    '--model MODEL --models {"model":"OTHER","names":[]}': "models[0].names: got [], allowed: names that are not empty",
    '--model MODEL --models {"model":"OTHER","chat_template":"/no/file"}': "models[0].chat_template",
    "--model MODEL --models {": "models[0]: got '{', allowed: a model, or a JSON object",
}


@pytest.mark.parametrize("words", WRONG, ids=lambda words: words.replace("--model MODEL ", "")[:99])
def test_what_cannot_be_is_refused_before_it_listens(model, other, never_serves, capsys, words):
    def named(text: str) -> str:
        return text.replace("MODEL", model).replace("OTHER", other)

    assert main(["serve", "--device", "cpu", "--port", "0", *map(named, words.split(" "))]) == 1
    assert capsys.readouterr().err.startswith("headrace: " + named(WRONG[words]))


# ---------------------------------------------------------------- memory


@given(st.integers(1, 100), st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=8))
def test_shares_hold_the_weights_stay_in_the_budget_and_what_is_accepted_can_be_loaded(budget, models):
    weights, pinned = [w for w, _ in models], [p for _, p in models]
    sizes = memory.shares(budget, weights, [None] * len(models))
    assert all(size <= budget for size in sizes)
    try:
        memory.check_room(budget, [str(i) for i in range(len(models))], weights, sizes, pinned)
    except CapacityError:
        return
    stay = sum(size for size, stays in zip(sizes, pinned, strict=True) if stays)
    for weight, size, stays in zip(weights, sizes, pinned, strict=True):
        assert weight < size and (stay if stays else stay + size) <= budget


def test_models_whose_weights_fit_together_are_in_memory_together():
    sizes = memory.shares(30 * GIB, [GIB] * 10, [None] * 10)
    assert sizes == [3 * GIB] * 10 and memory.most_at_once(30 * GIB, sizes, [False] * 10) == 10
    sizes = memory.shares(30 * GIB, [20 * GIB, 20 * GIB], [None, None])
    assert sizes == [20 * GIB + 10 * GIB // 8] * 2 and memory.most_at_once(30 * GIB, sizes, [False] * 2) == 1


@pytest.mark.parametrize(("options", "item"), [({}, 4), ({"dtype": "bfloat16"}, 2), ({"quantization": "int8"}, 34 / 32), ({"enforce_eager": True}, 4)])
def test_what_weights_take_is_known_from_the_headers(other, options, item):
    config = EngineConfig(model=other, device="cpu", **options)
    elements = 2 * 512 * 96 + 3 * (96 * (96 + 2 * 24 + 96) + 3 * 96 * 128)  # matrices
    found = weight_bytes(config, resolve_checkpoint(config), on_card=False)
    assert elements * item <= found <= elements * item + 4 * (7 * 96 + 3 * 144) + 4 * 96
    drafted = EngineConfig(model=other, device="cpu", speculative_method="draft_model", speculative_model=other, **options)
    assert weight_bytes(drafted, resolve_checkpoint(config), on_card=False) > found


def test_models_of_a_card_share_it_and_have_threads_as_they_are(model, other, monkeypatch):
    """Here is none: nothing is loaded."""
    monkeypatch.setattr(memory, "num_cards", lambda: 2)
    monkeypatch.setattr(memory, "card_bytes", lambda: 80 * GIB)
    engines = [EngineConfig(model=path, gpu_memory_utilization=0.5) for path in (model, other)]
    specs = [ModelSpec(names=(name,), engine=engine, server=ServerConfig()) for name, engine in zip("ab", engines, strict=True)]
    placed, sizes, budget = divide(specs, None)
    assert budget == 40 * GIB == pytest.approx(sum(sizes)) and [spec.engine.threads for spec in placed] == [None, None]
    assert [spec.engine.memory_bytes for spec in placed] == sizes
    floats, narrow = (
        weight_bytes(EngineConfig(model=other, quantization=made), resolve_checkpoint(engines[1]), on_card=True)
        for made in (None, "int4")
    )
    assert 2 * 512 * 96 < narrow < floats / 2, "the embedding stays as it is"
    assert memory.budget_of(engines[0], GIB) == (GIB, True)


# ---------------------------------------------------------------- real ones


def test_a_model_that_is_loaded_again_has_left_no_tokenizer_behind(model, other, monkeypatch):
    """Megabytes of which the garbage collector sees a few objects: a day of models that take turns filled the memory. Without cores."""

    async def nothing(*_):
        return None

    for name in ("start", "wait_loaded", "close"):
        monkeypatch.setattr(EngineClient, name, nothing)
    served = read("--model", model, "--model", other).served[0]
    first = weakref.ref(served.client.tokenizer)

    async def again() -> None:
        for _ in range(2):
            await served.load()
            await served.unload()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(again())
        assert first() is None and served.client.tokenizer is not None
    finally:
        gc.enable()


def test_real_models_come_and_go_keep_their_tokens_and_a_killed_core_is_its_own_models_affair(model, other, tmp_path):
    """One is pinned; its core is killed while the other streams. That one has an adapter, is unloaded, and loaded again."""
    size, adapter = 300 * 2**20, write_adapter(tmp_path / "x", other, size=2.0)
    (tmp_path / "c.yaml").write_text(
        f"model_memory_bytes: {2 * size}\nmax_num_batched_tokens: 256\nmodels:\n"
        f"  - {{name: a, model: {model}, memory_bytes: {size}, pinned: true}}\n  - {{name: b, model: {other}, memory_bytes: {size}, lora: {{x: {adapter}}}}}\n"
    )
    body = {"prompt": "The mill", "max_tokens": 40, "temperature": 0, "ignore_eos": True}

    def text(name: str) -> str:
        answer = server.http.post("/v1/completions", json={**body, "model": name})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def states() -> dict[str, str]:
        return server.http.get("/ready").json()["models"]

    with ServerProcess(f"--config={tmp_path / 'c.yaml'}", tmp=tmp_path) as server:
        server.wait_ready()
        [core_of_a] = server.children()
        assert states() == {"a": "loaded", "b": "unloaded"}
        texts = {name: text(name) for name in "abx"}
        assert len({*texts.values()}) == 3
        [core_of_b] = set(server.children()) - {core_of_a}
        pieces: list[str] = []
        with server.http.stream("POST", "/v1/completions", json={**body, "model": "b", "max_tokens": 200, "stream": True}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
                    if len(pieces) == 1:
                        os.kill(core_of_a, signal.SIGKILL)
        assert "".join(pieces).startswith(texts["b"]), "it went on"
        assert text("a") == texts["a"], "and the other came back"
        metrics = server.http.get("/metrics").text
        for name, restarts in (("a", "1.0"), ("b", "0.0")):
            assert f'headrace:engine_restarts_total{{engine="0",model_name="{name}"}} {restarts}' in metrics
        assert server.http.post("/api/generate", json={"model": "b", "keep_alive": 0}).json()["done_reason"] == "unload"
        until(lambda: states()["b"] == "unloaded", 30)
        assert not alive(core_of_b) and len(server.children()) == 1
        assert text("x") == texts["x"] and text("b") == texts["b"], "loaded again, and its adapter"
        children = server.children()
        assert len(children) == 2 and server.terminate() == 0 and not any(map(alive, children))
