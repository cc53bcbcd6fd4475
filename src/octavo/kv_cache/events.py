"""Events that say which KV blocks are stored where, for subscribers such as a router.

They mean what vLLM's ``kv_events`` of the same names mean. A subscriber that applies them in order
knows the prefix index and what every connector holds. Without subscribers nothing is built.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from octavo.kv_cache.block_hash import Key

logger = logging.getLogger(__name__)

DEVICE = "device"  # the medium of the pool's blocks


class BlockStored(NamedTuple):
    """A medium now holds the block of one layer group.

    A connector knows blocks by hash only: ``parent_block_hash`` is None and ``token_ids`` is empty
    where the medium is one.
    """

    block_hash: bytes
    group: int
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int  # tokens; 0 where they are not known
    medium: str  # "device", or the connector's name


class BlockRemoved(NamedTuple):
    """A medium no longer holds the block."""

    block_hash: bytes
    group: int
    medium: str


class AllBlocksCleared(NamedTuple):
    """A medium no longer holds any block."""

    medium: str


Event = BlockStored | BlockRemoved | AllBlocksCleared
Subscriber = Callable[[Event], None]


class EventQueue:
    """Events until they are delivered. Any thread may report what was stored or removed; the
    engine's subscribes and delivers.
    """

    def __init__(self) -> None:
        self.subscribers: list[Subscriber] = []
        self._events: deque[Event] = deque()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Deliver all later events to ``subscriber``, in the engine's thread."""
        self.subscribers.append(subscriber)

    def stored(
        self,
        key: Key,
        medium: str,
        parent: bytes | None = None,
        token_ids: tuple[int, ...] = (),
        block_size: int = 0,
    ) -> None:
        if self.subscribers:
            self._events.append(BlockStored(*key, parent, token_ids, block_size, medium))

    def removed(self, key: Key, medium: str) -> None:
        if self.subscribers:
            self._events.append(BlockRemoved(*key, medium))

    def cleared(self, medium: str) -> None:
        if self.subscribers:
            self._events.append(AllBlocksCleared(medium))

    def deliver(self) -> None:
        """Give the events to all subscribers. One that raises is not asked again."""
        while self._events:
            event = self._events.popleft()
            for subscriber in self.subscribers[:]:
                try:
                    subscriber(event)
                except Exception:
                    logger.exception("a subscriber to KV events failed; it gets no more of them")
                    self.subscribers.remove(subscriber)
