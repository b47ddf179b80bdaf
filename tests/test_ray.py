"""Cores in a real Ray cluster, whose nodes are raylets of this machine: streams survive cores, nodes and updates; nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from answers import Ask, Said, ask
from headrace.errors import HeadraceError, ParameterError
from server_driver import HERE, SRC, ServerProcess, alive, until

pytest.importorskip("ray", reason="ray is not installed: pip install 'headrace[ray]'")
from headrace.distributed import ray_cluster
from ray_nodes import Cluster, ray_cluster_of

LONG = {"model": "tiny", "max_tokens": 160, "ignore_eos": True, "temperature": 0.8}
ASKS = [Ask("/v1/completions", {**LONG, "prompt": f"water {i}", "seed": i}, stream=i % 3 > 0) for i in range(4)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{SRC}:{HERE}")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ray_cluster_of(3) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def server(cluster, model, tmp_path_factory) -> Iterator[ServerProcess]:
    with serve(cluster, model, tmp_path_factory.mktemp("tmp"), "--data-parallel-size", "2") as process:
        yield process


@contextlib.contextmanager
def serve(cluster: Cluster, model: str, tmp: Path, *options: str) -> Iterator[ServerProcess]:
    always = ("--served-model-name", "tiny", "--ray", cluster.address, "--no-standby", "--stats-interval", "0")
    with ServerProcess(model, *always, *options, tmp=tmp) as process:
        until(lambda: process.process.poll() is not None or process.is_ready(), 90)
        assert process.process.poll() is None, process.log()
        yield process


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(SRC)}, check=False)


def streams(server: ServerProcess, disturb: Callable[[], None] | None = None) -> list[Said]:
    """All answers; `disturb` runs in a thread, begun in their middle, and they end after it."""
    count, began = 0, threading.Event()

    def on_event() -> None:
        nonlocal count
        count += 1
        if count == 100:
            began.set()

    async def work() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=90) as client:
            jobs = [ask(client, a, on_event=on_event) for a in ASKS]
            if disturb is not None:
                jobs.append(asyncio.to_thread(lambda: (began.wait(60), disturb())))
            return (await asyncio.wait_for(asyncio.gather(*jobs), 120))[: len(ASKS)]

    return asyncio.run(work())


def test_streams_survive_a_core_a_node_and_an_update(cluster, server):
    until(lambda: len(cluster.cores()) == 2, 60)
    until(lambda: "2 of 2 cores are ready" in server.log(), 60)
    want = streams(server)

    def kill_core() -> None:
        os.kill(next(iter(cluster.cores())), signal.SIGKILL)

    def kill_node() -> None:
        cluster.lose(next(iter(cluster.cores().values())))

    def update() -> None:
        done = headrace("ray", "update", cluster.address)
        assert done.returncode == 0 and done.stdout == "2 cores replaced\n", done.stderr

    for disturb in (kill_core, kill_node, update):
        got = streams(server, disturb)
        assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(want)
        if disturb is kill_node:
            cluster.add(1)
        until(lambda: len(cluster.cores()) == 2, 60)
    page = server.metrics()
    assert page["headrace:engine_restarts_total"] == 2 and page["headrace:engine_poisonous_requests_total"] == 0


def test_nothing_of_a_front_that_is_killed_is_left_and_the_next_finds_room(cluster, server, model, tmp_path):
    """After the test above; the front before has no time for a last word."""
    old = [*cluster.cores()]
    server.kill()
    until(lambda: not any(map(alive, old)), 30)
    scaled = ("--min-replicas", "1", "--max-replicas", "3", "--target-ongoing-requests", "2", "--upscale-delay", "0.5")
    with serve(cluster, model, tmp_path, *scaled, "--downscale-delay", "2", "--max-num-seqs", "4") as front:
        assert len(cluster.cores()) == 1
        want = streams(front)
        assert [a.differs(b) for a, b in zip(streams(front, lambda: until(lambda: len(cluster.cores()) > 1, 60)), want, strict=True)]
        until(lambda: len(cluster.cores()) == 1, 60)
        assert front.terminate() == 0
    until(lambda: not cluster.cores(), 10)


def test_a_cluster_without_room_is_an_error_that_names_what_is_missing(cluster, model):
    done = headrace(
        "serve", model, "--port", "0", "--device", "cpu", "--ray", cluster.address, "--threads", "7", "--placement-timeout", "1"
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "it needs 7 CPU of one node, and no node is large enough" in done.stderr


def test_an_address_where_no_head_is_is_an_error_in_seconds(monkeypatch):
    monkeypatch.setattr(ray_cluster, "HEALTH_SECONDS", 4.0)
    for address in ("here", "127.0.0.1:0", "ray://127.0.0.1:1", "127.0.0.1:1"):
        with pytest.raises(ParameterError, match="HOST:PORT of a Ray cluster's head"):
            ray_cluster.join(address)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(HeadraceError, match="is not the head of a Ray cluster"):
            ray_cluster.join(f"127.0.0.1:{mute.getsockname()[1]}")


def test_a_cluster_of_another_version_is_an_error_in_seconds(cluster, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '1.2.3'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(HeadraceError, match=r"cannot be joined: .*2\."):
        ray_cluster.join(cluster.address)


def test_the_application_for_serve_takes_the_options_that_there_are(model):
    from headrace.distributed.serve_app import app

    made = app({"model": model, "device": "cpu", "threads": "2", "enforce_eager": "true", "served_model_name": "tiny"})
    assert made._bound_deployment.ray_actor_options["num_cpus"] == 2
    config, name = made._bound_deployment.init_args
    assert (config.threads, config.enforce_eager, name) == (2, True, "tiny")
    for options in ({"thread": "2"}, {"threads": "two"}, {"threads": 0}, {"data_parallel_size": 2}):
        with pytest.raises(ParameterError, match=next(iter(options))):
            app(options)
