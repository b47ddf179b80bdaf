"""Cores in a real Ray cluster, whose node is a raylet of this machine: streams survive a core; and the mistakes of joining one.

Deaths of nodes and fronts, updates and scaling are judged by `make conformance` (conformance/real_ray.py).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from headrace.cli import main
from headrace.errors import HeadraceError, ParameterError
from server_driver import HERE, SRC, until

pytest.importorskip("ray", reason="ray is not installed: pip install 'headrace[ray]'")
from headrace.distributed import ray_cluster
from ray_nodes import Cluster, differences, ray_cluster_of, serve, streams


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{SRC}:{HERE}")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ray_cluster_of(1, cores_per_node=2) as cluster:
            yield cluster


def test_streams_survive_a_core(cluster, model, tmp_path):
    with serve(cluster, model, tmp_path, "--data-parallel-size", "2") as server:
        until(lambda: "2 of 2 cores are ready" in server.log(), 120)
        want = streams(server)

        def kill() -> None:
            """Until the server knows: what it sends to that core before it does goes on elsewhere, too."""
            os.kill(next(iter(cluster.cores())), signal.SIGKILL)
            until(lambda: "starting another" in server.log(), 30)

        assert not differences(streams(server, kill), want)
        assert re.search(r"died \(exit code -9.*; starting another, [1-9]\d* requests go on", server.log()), server.log()
        page = server.metrics()
        assert page["headrace:engine_restarts_total"] == 1 and page["headrace:engine_poisonous_requests_total"] == 0
        assert server.terminate(60) == 0
    until(lambda: not cluster.cores(), 30)


def test_an_address_where_no_head_is_is_an_error_in_seconds(monkeypatch, capsys):
    monkeypatch.setattr(ray_cluster, "HEALTH_SECONDS", 4.0)
    for address in ("here", "127.0.0.1:0", "ray://127.0.0.1:1", "127.0.0.1:1"):
        with pytest.raises(ParameterError, match="HOST:PORT of a Ray cluster's head"):
            ray_cluster.join(address)
    assert main(["ray", "update", "here"]) == 1 and capsys.readouterr().err.startswith("headrace: ADDRESS: got 'here', allowed: HOST:PORT")
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


def test_a_cluster_that_asks_for_a_token_is_shown_it_where_ray_would(monkeypatch):
    """Ray 2.60 starts one that does where the user has a token; to an address that was given nothing is shown unasked."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    asked = []

    def health_check(command, env=None, **_):
        asked.append(shown := env is not None and env["RAY_AUTH_MODE"] == "token")
        said = "" if shown else "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken"
        return subprocess.CompletedProcess(command, int(not shown), said, "")

    monkeypatch.setattr(ray_cluster.subprocess, "run", health_check)
    ray_cluster._check_health("auto")
    assert asked == [False, True]
    with pytest.raises(HeadraceError, match=r"10\.0\.0\.7:6379 cannot be joined: it asks for its token: RAY_AUTH_MODE=token"):
        ray_cluster._check_health("10.0.0.7:6379")
    assert asked == [False, True, False]


def test_the_application_for_serve_takes_the_options_that_there_are(model):
    from headrace.distributed.serve_app import app

    made = app({"model": model, "device": "cpu", "threads": "2", "enforce_eager": "true", "served_model_name": "tiny"})
    assert made._bound_deployment.ray_actor_options["num_cpus"] == 2
    config, name = made._bound_deployment.init_args
    assert (config.threads, config.enforce_eager, name) == (2, True, "tiny")
    for options in ({"thread": "2"}, {"threads": "two"}, {"threads": 0}, {"data_parallel_size": 2}):
        with pytest.raises(ParameterError, match=next(iter(options))):
            app(options)
