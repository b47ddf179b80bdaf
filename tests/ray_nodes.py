"""A Ray cluster of raylets on this machine (a head without room, and nodes with room for one core each, which can be lost), and
what is tried in it: servers whose clients ask while a core dies, or a node, or cores are updated or added."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from answers import Ask, Said, ask
from server_driver import ServerProcess, command_of, processes_of

SMALL = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


@contextlib.contextmanager
def ray_cluster_of(count: int, cores_per_node: int = 1) -> Iterator[Cluster]:
    home = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets have their place below
    Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray writes the cluster's address, whatever directory it has
    cluster = Cluster(home, cores_per_node)
    try:
        cluster.add(count)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(home, ignore_errors=True)


class Cluster:
    """`cores_per_node`: CPUs of each node, as Ray counts them."""

    def __init__(self, home: str, cores_per_node: int):
        from ray.cluster_utils import Cluster as Nodes

        self._nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": home, **SMALL})
        self.address = self._nodes.address
        self.nodes: list[Any] = []
        self._room = {"num_cpus": cores_per_node, "object_store_memory": SMALL["object_store_memory"]}

    def add(self, count: int) -> None:
        self.nodes += [self._nodes.add_node(wait=False, **self._room) for _ in range(count)]
        self._nodes.wait_for_nodes()

    def cores(self) -> dict[int, Any]:
        """The node of each core's process."""
        return {pid: node for node in self.nodes for pid in self._below(self._raylet(node)) if b"headrace.distributed.process" in command_of(pid)}

    def lose(self, node: Any) -> None:
        """All of a node at once, as when its power fails."""
        self.nodes.remove(node)
        raylet = self._raylet(node)
        for pid in [raylet, *self._below(raylet)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._nodes.remove_node(node, allow_graceful=False)

    def _raylet(self, node: Any) -> int:
        return node.all_processes["raylet"][0].process.pid

    def _below(self, pid: int) -> list[int]:
        children = list(processes_of(pid))
        return children + [below for child in children for below in self._below(child)]

    def shutdown(self) -> None:
        self._nodes.shutdown()


@contextlib.contextmanager
def serve(cluster: Cluster, model: str, tmp: Path, *options: str) -> Iterator[ServerProcess]:
    always = ("--served-model-name", "tiny", "--ray", cluster.address, "--no-standby", "--stats-interval", "0")
    with ServerProcess(model, *always, *options, tmp=tmp) as process:
        yield process.wait_ready()


LONG = {"model": "tiny", "max_tokens": 160, "ignore_eos": True, "temperature": 0.8}
ASKS = [Ask("/v1/completions", {**LONG, "prompt": f"water {i}", "seed": i}, stream=i % 3 > 0) for i in range(8)]


def streams(server: ServerProcess, disturb: Callable[[], None] | None = None) -> list[list[Said]]:
    """What each of ASKS is answered. `disturb` runs in a thread, begun in their middle; until it is over each is asked again and
    again: a tiny model is done with all of them before a process has begun."""
    count, began, over = 0, threading.Event(), threading.Event()

    def on_event() -> None:
        nonlocal count
        count += 1
        if count == 100:
            began.set()

    def thread() -> None:
        try:
            if disturb is not None:
                assert began.wait(60), "no stream began"
                disturb()
        finally:
            over.set()

    async def again(client: httpx.AsyncClient, what: Ask) -> list[Any]:
        said = [await ask(client, what, on_event=on_event)]
        while disturb is not None and not over.is_set():
            said.append(await ask(client, what, on_event=on_event))
        return said

    async def work() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=90) as client:
            jobs = [again(client, what) for what in ASKS]
            return (await asyncio.wait_for(asyncio.gather(*jobs, asyncio.to_thread(thread)), 120))[: len(ASKS)]

    return asyncio.run(work())


def differences(got: list[list[Said]], want: list[list[Said]]) -> list[str]:
    return [differs for a, b in zip(got, want, strict=True) for said in a if (differs := said.differs(b[0])) is not None]
