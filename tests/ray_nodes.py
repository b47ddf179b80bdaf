"""A Ray cluster of raylets on this machine: a head without room, and nodes with room for one core each, which can be lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server_driver import processes_of

SMALL = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


@contextlib.contextmanager
def ray_cluster_of(count: int, cores_per_node: int = 1) -> Iterator[Cluster]:
    home = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets have their place below
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
        return {pid: node for node in self.nodes for pid in self._below(self._raylet(node)) if is_core(pid)}

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


def is_core(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"headrace.distributed.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
