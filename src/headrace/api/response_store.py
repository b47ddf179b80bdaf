"""Responses that are kept for later requests: in memory, bounded by bytes and by count, the least recently used go first.

A response that another one continues stays as long as that one, and one that is still running stays anyway: what can go is the
end of a conversation. A restart loses them all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

MAX_RESPONSES = 4096
ITEM_BYTES = 256  # what it takes to find an item by its id
Items = list[dict[str, Any]]


class _Item(msgspec.Struct):
    id: str | None = None


class _Output(msgspec.Struct):
    """Of a response no more than is needed to find its items."""

    output: list[_Item]


class Stored:
    """One response: what went in (its own part of the conversation) and what came out, as JSON."""

    __slots__ = (
        "cancel", "children", "gone", "ids", "key", "now", "previous", "recorder", "reserve", "resource", "size", "taken",
    )  # fmt: skip

    def __init__(
        self, key: tuple[int, str], taken: bytes, previous: Stored | None, now: Callable[[], dict[str, Any]], reserve: int
    ):
        self.key, self.taken, self.previous = key, taken, previous
        self.now: Callable[[], dict[str, Any]] | None = now  # the response object, while it is running
        self.cancel: Callable[[], bytes] | None = None  # ends it where it is; what it then is
        self.resource = b""  # the same, when it has ended
        self.ids: tuple[str, ...] = ()  # of the items that came out
        self.recorder: Any = None  # of one that is made in the background: a responses_background.Recorder
        self.reserve = reserve  # bytes that its end is sure of
        self.size = len(taken) + reserve
        self.children = 0  # kept responses that continue it
        self.gone = False

    def items(self) -> Items:
        """Its input."""
        return list(msgspec.json.decode(self.taken))

    def both(self) -> Items:
        """Its input and its output."""
        return self.items() + self.came_out()

    def came_out(self) -> Items:
        """Its output."""
        return list(msgspec.json.decode(self.resource)["output"])

    def document(self) -> bytes:
        return msgspec.json.encode(self.now()) if self.now is not None else self.resource


class ResponseStore:
    """`key`: whose response it is, and its id. `max_bytes` 0: nothing is kept."""

    def __init__(self, max_bytes: int, max_count: int = MAX_RESPONSES):
        self.max_bytes, self.max_count = max_bytes, max_count
        self.num_bytes = 0
        self._kept: OrderedDict[tuple[int, str], Stored] = OrderedDict()  # the least recently used first
        self._by_item: dict[tuple[int, str], Stored] = {}  # whose item, and its id

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: tuple[int, str]) -> Stored | None:
        """It and all that it continues count as used now, the first of them most."""
        found = link = self._kept.get(key)
        while link is not None and not link.gone:
            self._kept.move_to_end(link.key)
            link = link.previous
        return found

    def having(self, owner: int, item_id: str) -> Stored | None:
        """The response that an item came out of, as find()."""
        stored = self._by_item.get((owner, item_id))
        return None if stored is None else self.find(stored.key)

    def begin(
        self, key: tuple[int, str], items: Items, previous: Stored | None, now: Callable[[], dict[str, Any]], reserve: int = 0
    ) -> Stored | None:
        """A response that is running. None: it is not kept, for there is no room beside what cannot go."""
        if not self.max_bytes:
            return None
        if (same := self._kept.get(key)) is not None:  # clients may name their requests
            if same.now is not None:
                return None
            self.remove(same)
        stored = Stored(key, msgspec.json.encode(items), previous, now, reserve)
        if previous is not None:
            previous.children += 1  # from here on it cannot go
        # it may have been removed while the prompt was made
        if (previous is not None and previous.gone) or not self._room(stored.size, 1, previous):
            self._forget_previous(stored)
            return None
        self._kept[key] = stored
        self.num_bytes += stored.size
        self.find(key)
        return stored

    def end(self, stored: Stored, resource: bytes) -> bool:
        """It has ended as `resource` says. False: with that there is no room for it, and nothing has changed."""
        if stored.gone:
            return False
        ids = tuple(item.id for item in msgspec.json.decode(resource, type=_Output).output if item.id is not None)
        size = len(resource) + ITEM_BYTES * len(ids) - stored.reserve
        if not self._room(size, 0, stored):
            return False
        stored.now, stored.resource, stored.cancel, stored.ids = None, resource, None, ids
        stored.size += size
        self.num_bytes += size
        self._by_item.update(((stored.key[0], item_id), stored) for item_id in ids)
        self.find(stored.key)
        return True

    def grow(self, stored: Stored, size: int) -> bool:
        """It takes so many bytes more, or fewer. False: there is no room for them."""
        if stored.gone:
            return False
        if not self._room(size, 0, stored):
            return False
        stored.size += size
        self.num_bytes += size
        return True

    def release(self, stored: Stored) -> None:
        """Nobody runs it any more: without an end, it has never been."""
        if stored.now is not None and not stored.gone:
            self.remove(stored)

    def remove(self, stored: Stored) -> None:
        """What continues it keeps its own part, and cannot be continued."""
        del self._kept[stored.key]
        self.num_bytes -= stored.size
        self._forget_previous(stored)
        for item_id in stored.ids:
            if self._by_item.get((stored.key[0], item_id)) is stored:
                del self._by_item[stored.key[0], item_id]
        stored.gone, stored.now, stored.cancel, stored.recorder = True, None, None, None
        stored.taken = stored.resource = b""

    def _forget_previous(self, stored: Stored) -> None:
        if stored.previous is not None:
            stored.previous.children -= 1
            stored.previous = None

    def _room(self, size: int, count: int, beside: Stored | None) -> bool:
        """Make room, if there can be enough beside that one, what runs and what these continue; else nothing goes."""
        staying: set[Stored] = set()
        for link in (beside, *(s for s in self._kept.values() if s.now is not None)):
            while link is not None and not link.gone and link not in staying:
                staying.add(link)
                link = link.previous
        if sum(s.size for s in staying) + size > self.max_bytes or len(staying) + count > self.max_count:
            return False
        while self.num_bytes + size > self.max_bytes or len(self._kept) + count > self.max_count:
            self.remove(next(s for s in self._kept.values() if not s.children and s not in staying))
        return True


def chain(stored: Stored) -> list[Stored] | None:
    """A response and all that it continues, the first one first; None where one of them has been removed or is running."""
    links: list[Stored] = []
    link: Stored | None = stored
    while link is not None:
        if link.gone or link.now is not None:
            return None
        links.append(link)
        link = link.previous
    return links[::-1]
