"""Joins a Ray cluster, and says in seconds what is wrong where it cannot: Ray itself tries for minutes and ends the process."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
from typing import Any

import ray

from headrace.config import environment_with_ray_token, python_of_child
from headrace.errors import HeadraceError, ParameterError

NAMESPACE = "headrace"
CONNECT_SECONDS = 5.0
HEALTH_SECONDS = 20.0  # an interpreter that imports Ray, and one question
OBJECT_STORE = 80 * 2**20  # bytes, of a cluster that is started here: tokens do not travel through it
NO_TOKEN = "AuthenticationError"
WITH_TOKEN = "it asks for its token: RAY_AUTH_MODE=token shows that of RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
FORMS = "HOST:PORT of a Ray cluster's head, auto (the one this machine is part of) or local (one for this server alone)"


def join(address: str) -> None:
    """Make this process a driver. Raises ParameterError or HeadraceError within seconds if there is no cluster to join."""
    quiet: dict[str, Any] = dict(namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    logging.getLogger("ray").setLevel(logging.WARNING)
    if address == "local":
        quiet |= dict(object_store_memory=OBJECT_STORE, include_dashboard=False)
    else:
        if address != "auto":
            _check_listens(address)
        _check_health(address)
    try:
        ray.init(address=address, **quiet)
    except (Exception, SystemExit) as e:
        raise HeadraceError(f"the Ray cluster {address} cannot be joined: {_last_line(str(e))}") from None


def leave() -> None:
    """What was started for this driver ends: its actors, and the cluster if it was `local`."""
    ray.shutdown()


def _check_listens(address: str) -> None:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ParameterError("ray", address, FORMS)
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), CONNECT_SECONDS).close()
    except OSError as e:
        raise ParameterError("ray", address, f"{FORMS}; nobody answers there ({e.strerror or e})") from None


def _check_health(address: str) -> None:
    """Whether what listens there is a head of our own version of Ray, asked by a process that can be ended."""
    said = _health(address)
    if said is not None and address == "auto" and NO_TOKEN in said:  # Ray itself shows it to a cluster of this machine only
        said = _health(address, environment_with_ray_token())
    if said is None:
        return
    if address == "auto" and "Could not find any running Ray instance" in said:
        raise ParameterError("ray", address, f"{FORMS}; no Ray runs on this machine")
    why = WITH_TOKEN if NO_TOKEN in said else _last_line(said)
    raise HeadraceError(f"the Ray cluster {address} cannot be joined: {why} (here: Ray {ray.__version__})")


def _health(address: str, environment: dict[str, str] | None = None) -> str | None:
    """What was said where the cluster is not to be had; None: it is."""
    command = python_of_child("-m", "ray.scripts.scripts", "health-check", "--address", address)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HEALTH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise HeadraceError(f"what listens at {address} is not the head of a Ray cluster, or it does not answer") from None
    return done.stdout + done.stderr if done.returncode else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("Error: ") if lines else "no reason was given"


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def has_gpus() -> bool:
    return any(node["Resources"].get("GPU") for node in alive_nodes())


def cpus_of(address: str) -> float:
    """Of the node there, as Ray counts them."""
    return sum(node["Resources"].get("CPU", 0) for node in alive_nodes() if node["NodeManagerAddress"] == address) or 1.0


def what_is_missing(need: dict[str, float]) -> str:
    """Why a node that has `need` free at once is not to be had."""
    nodes = alive_nodes()
    have = "; ".join(f"{node['NodeManagerAddress']} has {_amounts(node['Resources'], need)}" for node in nodes[:8])
    more = f" and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    free = _amounts(ray.available_resources(), need)
    fits = any(all(node["Resources"].get(name, 0) >= amount for name, amount in need.items()) for node in nodes)
    why = "all that is large enough is taken" if fits else "no node is large enough"
    return f"no room for a core: it needs {_amounts(need, need)} of one node, and {why} ({have}{more}; free in all: {free})"


def _amounts(have: dict[str, float], names: dict[str, float]) -> str:
    return ", ".join(f"{have.get(name, 0):g} {name}" for name in names)
