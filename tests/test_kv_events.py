"""KV events on the wire, read by a subscriber who knows nothing but the published form: frames, msgpack, names of fields."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from socket import gethostname

import msgspec
import pytest
import zmq
import zmq.asyncio

from headrace.cache.block_pool import BlockPool
from headrace.cache.events import BlockEvents, Stored, block_hashes
from headrace.cache.recorded_tree import RecordedTree
from headrace.cli.options import add_options, given
from headrace.cli.parser import CommandParser
from headrace.cli.routing import Routing
from headrace.cli.serve_options import ServeOptions
from headrace.config import EngineConfig
from headrace.distributed import kv_events
from headrace.distributed.balancers import LeastLoaded, balancer_named
from headrace.distributed.kv_events import Published, Publisher
from headrace.errors import ParameterError
from test_cache_index import SIZE, put

END = (-1).to_bytes(8, "big", signed=True)
NOBODY = 99  # no core's number


class Subscriber:
    def __init__(self, address: str, topic: str = ""):
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(topic)
        self.socket.connect(address)

    async def next(self) -> tuple[str, int, list]:
        while True:
            topic, number, data = await asyncio.wait_for(self.socket.recv_multipart(), 30)
            if (found := msgspec.msgpack.decode(data))[2] != NOBODY:
                return topic.decode(), int.from_bytes(number, "big"), found

    async def joined(self, publisher: Publisher) -> None:
        """Until it is heard: a subscription takes a moment."""
        while not await self.socket.poll(20):
            publisher.publish(NOBODY, BlockEvents(cleared=True))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def publisher(tmp_path: Path):
    made = Publisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", topic="kv@pod@model")
    yield made
    made.close()


async def test_a_subscriber_reads_what_a_core_holds(publisher):
    subscriber = Subscriber(publisher.addresses[0], "kv@")
    await subscriber.joined(publisher)
    balancer = Published(balancer_named("prefix"), publisher)
    tree = RecordedTree(BlockPool(8), SIZE, with_tokens=True)
    balancer.added(3)
    balancer.blocks(3, tree.events())
    topic, first, (when, events, rank) = await subscriber.next()
    assert topic == "kv@pod@model" and when > 1.7e9 and rank == 3 and events == [{"type": "AllBlocksCleared"}]

    ids, salted = [1, 2, 3, 4, 5], [6, 7, 8, 9]
    tree.release(put(tree, ids))
    tree.release(put(tree, salted, "tenant"))
    balancer.blocks(3, tree.events())
    _, number, (_, events, rank) = await subscriber.next()
    assert number == first + 1 and rank == 3
    hashes = [block_hashes(array("i", ids), SIZE), block_hashes(array("i", salted), SIZE, "tenant")]
    common = {
        "type": "BlockStored",
        "parent_block_hash": None,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert events == [
        {**common, "block_hashes": hashes[0], "token_ids": ids[:4]},
        {**common, "block_hashes": hashes[1], "token_ids": salted, "extra_keys": [["tenant"], None]},
    ]

    tree.release(put(tree, [*ids[:4], 7, 8]))
    tree.evict(4)
    balancer.blocks(3, tree.events())
    _, _, (_, events, _) = await subscriber.next()
    assert (
        events[0]["type"] == "BlockRemoved" and events[0]["medium"] == "GPU" and set(events[0]["block_hashes"]) > set(hashes[1])
    )
    balancer.removed(3)
    assert (await subscriber.next())[2][1:] == [[{"type": "AllBlocksCleared"}], 3]
    subscriber.close()


async def test_who_has_missed_some_asks_for_them(publisher, monkeypatch):
    monkeypatch.setattr(kv_events, "KEPT_BATCHES", 6)
    publisher.start()
    for i in range(10):
        publisher.publish(i, BlockEvents([Stored([i], None, [1, 2])], [], False, 2))
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)  # a REQ takes one answer only
    socket.connect(publisher.addresses[1])
    for nonsense in ([b"", b"short"], [b"x" * 8]):
        await socket.send_multipart(nonsense)
    for first, expected in ((8, [8, 9]), (0, [4, 5, 6, 7, 8, 9]), (10, [])):
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        numbers, ranks = [], []
        while True:
            empty, number, data = await asyncio.wait_for(socket.recv_multipart(), 30)
            assert empty == b""
            if number == END:
                assert data == b""
                break
            numbers.append(int.from_bytes(number, "big"))
            ranks.append(msgspec.msgpack.decode(data)[2])
        assert numbers == ranks == expected
    context.destroy(linger=0)


def test_what_is_kept_is_bounded_in_bytes_too(publisher, monkeypatch):
    monkeypatch.setattr(kv_events, "KEPT_BYTES", 1000)
    for i in range(50):
        publisher.publish(i, BlockEvents([Stored([i], None, list(range(100)))], [], False, 2))
    assert publisher._kept_bytes == sum(len(data) for _, data in publisher._kept) <= 1000


@pytest.mark.parametrize(
    ("address", "replay", "words"),
    [
        ("5557", None, "kv_events: .*'5557', allowed: tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", None, "kv_events: .*99999.* allowed: tcp"),
        ("inproc://x", None, "kv_events: .*allowed: tcp"),
        ("tcp://no.such.host.invalid:5557", None, "kv_events: .*a host that can be found"),
        ("ipc:///nowhere/at/all", None, "kv_events: .*an address that can be listened on"),
        ("tcp://TAKEN", None, "kv_events: .*in use"),
        ("tcp://127.0.0.1:*", "tcp://192.0.2.1:1", "kv_events_replay: .*an address that can be listened on"),
    ],
)
def test_wrong_addresses_are_refused_at_once(address, replay, words):
    taken = Publisher("tcp://127.0.0.1:*")
    try:
        with pytest.raises(ParameterError, match=words):
            Publisher(address.replace("tcp://TAKEN", taken.addresses[0]), replay)
    finally:
        taken.close()


async def test_an_address_of_another_machine_is_connected_to(tmp_path):
    """As vLLM connects to a subscriber that listens for many."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe("")
    port = socket.bind_to_random_port("tcp://*")
    publisher = Publisher(f"tcp://{gethostname()}:{port}")  # a name: only addresses can be listened on
    while not await socket.poll(20):
        publisher.publish(0, BlockEvents(cleared=True))
    assert len(await socket.recv_multipart()) == 3
    publisher.close()
    context.destroy(linger=0)


def test_the_rule_beneath_decides(publisher):
    assert Published(LeastLoaded(), publisher).choose(array("i", [1]), "", {1: 5, 2: 3}) == 2


def routing(*words: str, several: bool = True, **options) -> Routing:
    parser = CommandParser()
    add_options(parser, ServeOptions)
    return Routing(ServeOptions(**given(ServeOptions, parser.parse_args(words))), EngineConfig(**options), several)


@pytest.mark.parametrize(
    ("words", "several", "events"),
    [
        ([], True, "hashes"),
        ([], False, "off"),
        (["--router", "least-loaded"], True, "off"),
        (["--router", "round-robin"], True, "off"),
        (["--kv-events", "tcp://127.0.0.1:*"], False, "tokens"),
        (
            ["--kv-events", "tcp://localhost:*", "--kv-events-replay", "tcp://127.0.0.1:*", "--router", "round-robin"],
            True,
            "tokens",
        ),
    ],
)
def test_cores_tell_of_their_blocks_only_where_somebody_listens(words, several, events):
    made = routing(*words, several=several)
    assert made.config.kv_cache_events == events and (made.publisher is not None) == ("--kv-events" in words)
    made.close()


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--kv-events-replay", "tcp://*:5558"], "kv_events_replay"),
        (["--kv-events-topic", "kv"], "kv_events_topic"),
        (["--kv-events", "tcp://127.0.0.1:*"], "kv_events"),
    ],
)
def test_options_that_come_to_nothing_are_refused(words, field):
    with pytest.raises(ParameterError, match=f"^{field}: .*nothing without"):
        routing(*words, enable_prefix_caching=False)
