"""Hits whose blocks are in another tier: who waits for which of them, to get them in pieces.

They are pinned there until then, each for every slot that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from octavo.kv_cache.digest import Key
from octavo.kv_cache.host_memory import HostMemory
from octavo.kv_cache.prefix import Node
from octavo.kv_cache.tiers import Tiers


class ToLoad(NamedTuple):
    """A block of a slot's hit, in the order of `Loading`."""

    position: int
    node: Node
    group: int


class Loading:
    def __init__(self, tiers: Tiers | None) -> None:
        """``tiers``: without them nobody ever waits."""
        self._tiers = tiers
        self._waiting: dict[int, deque[ToLoad]] = {}  # by slot

    def __len__(self) -> int:
        """Blocks that all slots wait for: as many are pinned."""
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[tuple[int, ToLoad]]:
        """With the slots that wait for them."""
        for slot, blocks in self._waiting.items():
            for each in blocks:
                yield slot, each

    def num_blocks(self, slot: int) -> int:
        return len(self._waiting.get(slot, ()))

    def begin(self, slot: int, blocks: Iterable[ToLoad]) -> None:
        """From now on the slot waits for these."""
        waiting = deque(blocks)
        for each in waiting:
            self._memory.pin(self._key(each))
        if waiting:
            self._waiting[slot] = waiting

    def take(self, slot: int, count: int) -> Iterator[tuple[ToLoad, Key]]:
        """Its next blocks and what they are called, each pinned until the next is asked for."""
        waiting = self._waiting[slot]
        for _ in range(count):
            each = waiting.popleft()
            key = self._key(each)
            yield each, key
            self._memory.unpin(key)
        if not waiting:
            del self._waiting[slot]

    def end(self, slot: int) -> None:
        """It waits for nothing any more."""
        for each in self._waiting.pop(slot, ()):
            self._memory.unpin(self._key(each))

    @property
    def _memory(self) -> HostMemory:
        assert self._tiers is not None
        return self._tiers.memory

    def _key(self, each: ToLoad) -> Key:
        assert self._tiers is not None
        return self._tiers.names.of(each.node), each.group
