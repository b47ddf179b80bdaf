"""A fleet in a real Ray cluster: cores, nodes and a front die, cores are updated and scaled, and no client is told another token.

Tests of pytest's, that take too long for `make test`; each has a cluster of its own.

    python -m pytest real_ray.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ray_nodes import Cluster, differences, ray_cluster_of, serve, streams
from server_driver import HERE, SRC, ServerProcess, alive, until


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Cluster]:
    monkeypatch.setenv("PYTHONPATH", f"{SRC}:{HERE}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ray_cluster_of(3) as cluster:
        yield cluster


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def cores_up(server: ServerProcess) -> float:
    return sum(up for name, up in server.metrics().items() if name.startswith("headrace:core_up"))


def test_streams_survive_a_core_a_node_and_an_update(cluster, model, tmp_path):
    def kill_core() -> None:
        os.kill(next(iter(cluster.cores())), signal.SIGKILL)

    def kill_node() -> None:
        cluster.lose(next(iter(cluster.cores().values())))

    def update() -> None:
        done = headrace("ray", "update", cluster.address)
        assert done.returncode == 0 and done.stdout == "2 cores replaced\n", done.stderr

    with serve(cluster, model, tmp_path, "--data-parallel-size", "2") as server:
        until(lambda: "2 of 2 cores are ready" in server.log(), 60)
        want = streams(server)
        for disturb in (kill_core, kill_node, update):
            assert not differences(streams(server, disturb), want)
            if disturb is kill_node:
                cluster.add(1)
            until(lambda: len(cluster.cores()) == 2 and cores_up(server) == 2, 60)
        page = server.metrics()
        assert page["headrace:engine_restarts_total"] == 2 and page["headrace:engine_poisonous_requests_total"] == 0


def test_nothing_of_a_front_that_is_killed_is_left_and_the_next_finds_room_and_scales(cluster, model, tmp_path):
    with serve(cluster, model, tmp_path, "--data-parallel-size", "2") as server:
        until(lambda: len(cluster.cores()) == 2, 60)
        old = [*cluster.cores()]
        server.kill()  # it has no time for a last word
        until(lambda: not any(map(alive, old)), 30)
    scaled = ("--min-replicas", "1", "--max-replicas", "3", "--target-ongoing-requests", "2", "--upscale-delay", "0.5")
    with serve(cluster, model, tmp_path, *scaled, "--downscale-delay", "2", "--max-num-seqs", "4") as front:
        assert len(cluster.cores()) == 1
        want = streams(front)
        assert not differences(streams(front, lambda: until(lambda: len(cluster.cores()) > 1, 60)), want)
        until(lambda: len(cluster.cores()) == 1, 60)
        assert front.terminate() == 0
    until(lambda: not cluster.cores(), 10)


def test_a_cluster_without_room_is_an_error_that_names_what_is_missing(cluster, model):
    seven = ("--port", "0", "--device", "cpu", "--threads", "7", "--placement-timeout", "1")
    done = headrace("serve", model, "--ray", cluster.address, *seven)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "it needs 7 CPU of one node, and no node is large enough" in done.stderr
