"""How `headrace ray update` reaches a server: an actor with the server's name takes what is asked, and hands it on.

When that is lost, with its node, there is another with the next number: a name stays taken until Ray is sure of the death.
Whoever may join the cluster may ask: he could run any code in it anyway.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.distributed.ray_cluster import NAMESPACE
from headrace.errors import HeadraceError, ParameterError

logger = logging.getLogger("headrace.server.fleet")
MOST_ASKED = 16  # that wait: more are refused
AGAIN_SECONDS = 1.0
SEPARATOR = "#"


class Mailbox:
    """The actor. It lives as long as its server."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[tuple[int, dict[str, Any]]] = asyncio.Queue(MOST_ASKED)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()

    async def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        try:
            self._asked.put_nowait((number, what))
        except asyncio.QueueFull:
            return {"error": f"{MOST_ASKED} others wait for this server"}
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        return await answer

    async def next(self) -> tuple[int, dict[str, Any]]:
        return await self._asked.get()

    async def answer(self, number: int, answer: dict[str, Any]) -> None:
        self._answers.pop(number).set_result(answer)


async def answer_asked(name: str, update: Callable[[float], Awaitable[int]]) -> None:
    """For ever: do what is asked of the server of this name."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    for incarnation in itertools.count():
        try:
            actor: Any = ray.remote(Mailbox)
            full = f"{name}{SEPARATOR}{incarnation}"
            box = actor.options(name=full, namespace=NAMESPACE, num_cpus=0, scheduling_strategy=here).remote()
            while True:
                number, what = await _of(box.next.remote())
                try:
                    answer: dict[str, Any] = {"replaced": await update(float(what["drain_timeout"]))}
                except HeadraceError as e:
                    answer = {"error": str(e)}
                await _of(box.answer.remote(number, answer))
        except (RayError, ValueError) as e:  # ValueError: the name is taken, by a server that has just ended
            logger.warning("headrace ray update has to find another way to this server: %s", str(e).splitlines()[0])
            await asyncio.sleep(AGAIN_SECONDS)


async def _of(ref: ray.ObjectRef) -> Any:
    return await asyncio.wrap_future(ref.future())


def servers() -> dict[str, int]:
    """The servers of the cluster, with the number of the actor that each has now."""
    found: dict[str, int] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name, separator, number = actor["name"].rpartition(SEPARATOR)
        if actor["namespace"] == NAMESPACE and separator and number.isdecimal():
            found[name] = max(found.get(name, 0), int(number))
    return found


def ask(server: str | None, what: dict[str, Any]) -> dict[str, Any]:
    """Ask a server of the cluster and wait for its answer; None: the only one that there is."""
    names = servers()
    if server is None and len(names) == 1:
        server = next(iter(names))
    if server is None or server not in names:
        allowed = f"one of {', '.join(names)}" if names else "nothing: no `headrace serve --ray` runs in this cluster"
        raise ParameterError("server", server, allowed)
    try:
        actor = ray.get_actor(f"{server}{SEPARATOR}{names[server]}", namespace=NAMESPACE)
        answer: Any = ray.get(actor.ask.remote(what))
        return answer
    except (RayActorError, ValueError):
        raise HeadraceError(f"the server {server} has ended") from None
