"""KV events for other fleets, in vLLM's message form: which blocks the cores' prefix caches hold, on a ZMQ PUB socket.

The form is that of vllm/distributed/kv_events.py (0.24 and later): frames [topic, number, batch], where the number is 8 bytes,
big-endian, and counts from 0, and the batch is a msgpack array [seconds since 1970, events, data_parallel_rank] of events that
are maps with a "type". A second socket (ROUTER) answers a number with all kept batches from it on and ends with number -1.

Prompts are in the events, as token ids, and neither socket asks who reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket as socketlib
import time
from array import array
from collections import deque
from collections.abc import Mapping
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from headrace.cache.events import BlockEvents
from headrace.engine.interface import Balancer
from headrace.errors import ParameterError

logger = logging.getLogger(__name__)
MEDIUM = "GPU"  # the name that consumers have for the memory in which a model's own steps find a block
HIGH_WATER = 10_000  # batches that a slow subscriber may be behind: beyond, he misses some, and sees it by the numbers
KEPT_BATCHES, KEPT_BYTES = 10_000, 64 << 20  # for who asks again
END = (2**64 - 1).to_bytes(8, "big")
AT_ONCE = 64  # batches sent again before others have their turn


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None  # a cache salt, with the first block of a prompt


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def batch_of(core: int, told: BlockEvents, now: float) -> EventBatch:
    """A core's events in the form in which they are published."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()] if told.cleared else []
    if told.evicted:
        events.append(BlockRemoved(told.evicted, MEDIUM))
    for run in told.stored:
        salted: list[tuple[str, ...] | None] | None = None
        if run.cache_salt:
            salted = [(run.cache_salt,), *[None] * (len(run.hashes) - 1)]
        events.append(BlockStored(run.hashes, run.parent, run.token_ids, told.block_size, None, MEDIUM, None, salted))
    return EventBatch(now, events, core)


def listenable(option: str, address: str) -> bool:
    """Whether an address is this machine's. Raises ParameterError if it is none, or a name that nobody knows."""
    if re.fullmatch(r"ipc://.+", address):
        return True
    found = re.fullmatch(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[^:/\s]+):(\*|\d{1,5})", address)
    if found is None or (found[2] != "*" and not 0 < int(found[2]) <= 65535):
        raise ParameterError(option, address, "tcp://HOST:PORT, where * is any address of this machine, or ipc://PATH")
    if found[1] == "*":
        return True
    try:
        infos = socketlib.getaddrinfo(found[1].strip("[]"), None, type=socketlib.SOCK_STREAM)
        with socketlib.socket(infos[0][0], socketlib.SOCK_STREAM) as probe:
            probe.bind(infos[0][4])
    except socketlib.gaierror as e:
        raise ParameterError(option, address, f"a host that can be found ({e.strerror})") from None
    except OSError:
        return False  # another machine's
    return found[1][0].isdigit() or found[1][0] == "[" or found[1] == "localhost"  # names ZMQ does not listen on


def said_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("kv_events_replay: nobody is answered any more", exc_info=error)


class Publisher:
    """The sockets; `publish` never waits. Made outside of the event loop, so that a wrong address is known at once."""

    def __init__(self, address: str, replay_address: str | None = None, topic: str = ""):
        """Raises ParameterError for an address that can be neither listened on nor connected to."""
        self._context = zmq.Context()
        self._topic = topic.encode()
        self._numbers, self._encoder = count(), msgspec.msgpack.Encoder()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._answering: asyncio.Task[None] | None = None
        try:
            self._pub = self._socket(zmq.PUB, "kv_events", address, HIGH_WATER)
            self._replay = None
            if replay_address is not None:
                self._replay = self._socket(zmq.ROUTER, "kv_events_replay", replay_address, 2 * (KEPT_BATCHES + 1))
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _socket(self, kind: int, option: str, address: str, high_water: int) -> zmq.Socket:
        """Listening on the address if it is this machine's, else connected to it; who answers always listens."""
        local = listenable(option, address)
        socket = self._context.socket(kind)
        socket.set_hwm(high_water)
        socket.ipv6 = "[" in address
        socket.linger = 0
        try:
            if kind != zmq.PUB or local:
                socket.bind(address.replace("//localhost:", "//127.0.0.1:"))
            else:
                socket.connect(address)
        except zmq.ZMQError as e:
            raise ParameterError(option, address, f"an address that can be listened on ({e.strerror})") from None
        logger.info("%s: %s %s", option, "listening on" if kind != zmq.PUB or local else "connecting to", address)
        return socket

    @property
    def addresses(self) -> list[str]:
        """What was really bound or connected, where a port was left open."""
        return [s.getsockopt_string(zmq.LAST_ENDPOINT) for s in (self._pub, self._replay) if s is not None]

    def publish(self, core: int, told: BlockEvents) -> None:
        data = self._encoder.encode(batch_of(core, told, time.time()))
        number = next(self._numbers).to_bytes(8, "big")
        with contextlib.suppress(zmq.Again):  # nobody takes it: so it is with PUB
            self._pub.send_multipart((self._topic, number, data), zmq.NOBLOCK, copy=True)
        if self._replay is not None:
            self._kept.append((number, data))
            self._kept_bytes += len(data)
            while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def start(self) -> None:
        """Answer who asks for what he has missed, from now on; in the event loop."""
        if self._replay is not None:
            self._answering = asyncio.create_task(self._answer(zmq.asyncio.Socket.shadow(self._replay)))
            self._answering.add_done_callback(said_if_failed)

    async def _answer(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("kv_events_replay: a request that is not [empty, 8 bytes] is ignored")
                continue
            client, empty, first = frames
            for sent, (number, data) in enumerate(list(self._kept)):
                if number >= first:
                    await socket.send_multipart((client, empty, number, data))
                if sent % AT_ONCE == 0:
                    await asyncio.sleep(0)
            await socket.send_multipart((client, empty, END, b""))

    def close(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        self._context.destroy(linger=100)


class Published:
    """A Balancer whose cores' events are published too."""

    def __init__(self, balancer: Balancer, publisher: Publisher):
        self.balancer, self.publisher = balancer, publisher

    def added(self, core: int) -> None:
        self.balancer.added(core)

    def removed(self, core: int) -> None:
        self.publisher.publish(core, BlockEvents(cleared=True))
        self.balancer.removed(core)

    def blocks(self, core: int, events: BlockEvents) -> None:
        self.publisher.publish(core, events)
        self.balancer.blocks(core, events)

    def choose(self, prompt_ids: array, cache_salt: str, loads: Mapping[int, int]) -> int:
        return self.balancer.choose(prompt_ids, cache_salt, loads)
