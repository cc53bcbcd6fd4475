"""The connector in host memory: blocks for which the pool had no more space.

All other connectors load into its slots, and the pool loads from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from octavo.kv_cache.block_hash import Key
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.connectors.base import Bytes, ConnectorStats, KvConnector


class HostMemory(KvConnector):
    """``num_slots`` slots of ``block_bytes``, whose memory pages are touched as they fill. They are
    a pool of their own: the least recently used block is evicted first, and a slot that is pinned
    or being filled has references.
    """

    name = "host"
    bandwidth = 2e9

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.num_filling = 0  # slots taken that hold no block yet
        self.data: Bytes = np.empty((num_slots, block_bytes), np.uint8)
        self._pool = BlockPool[Key](num_slots)
        self._slots: dict[Key, int] = {}
        self._origins: dict[Key, str] = {}  # of blocks not used since another connector loaded them

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Key]:
        return iter([*self._slots])

    # The interface of all connectors

    def lookup(self, key: Key) -> bool:
        return key in self._slots

    def start_load_kv(self, key: Key, into: Bytes) -> None:
        if ok := key in self._slots:
            into[:] = self.row(key)
        self._finish_load(key, ok, 0.0)

    def start_save_kv(self, key: Key, data: Bytes) -> None:
        if (slot := self.take()) is not None:
            self.data[slot] = data
            self.put(key, slot)
        self._saved.append(key)

    def stats(self) -> ConnectorStats:
        used = len(self) * self.data.shape[1]
        return replace(
            self.counters, blocks=len(self), used_bytes=used, capacity_bytes=self.data.nbytes
        )

    # Slots

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned."""
        return self._pool.num_used - self.num_filling

    @property
    def num_pins(self) -> int:
        return sum(self._pool.refs) - self.num_filling

    @property
    def num_takeable(self) -> int:
        """How many slots `take` could return, one after another."""
        return self._pool.num_free

    def take(self) -> int | None:
        """Return a slot to be filled; None if all are pinned or being filled."""
        if not self._pool.num_free:
            return None
        slot = self._pool.allocate()
        self.num_filling += 1
        if (key := self._pool.contents[slot]) is not None:
            self._pool.contents[slot] = None
            del self._slots[key]
            self._origins.pop(key, None)
            self.events.removed(key, self.name)
        return slot

    def give_back(self, slot: int) -> None:
        """End the filling of a taken slot: it holds what `put` says, or nothing after all."""
        self.num_filling -= 1
        self._pool.release(slot)

    def put(self, key: Key, slot: int, origin: str = name) -> None:
        """Enter the block of ``key`` that now is in a taken slot, and came from connector
        ``origin``. A block already there stays.
        """
        if key not in self._slots:
            self._slots[key] = slot
            self._pool.contents[slot] = key
            if origin != self.name:
                self._origins[key] = origin
            self.events.stored(key, self.name)
        self.give_back(slot)

    def touch(self, key: Key) -> None:
        """Make the block the most recently used."""
        self.pin(key)
        self.unpin(key)

    def row(self, key: Key) -> Bytes:
        """Return the block's bytes [block_bytes], in place."""
        row: Bytes = self.data[self._slots[key]]
        return row

    def origin(self, key: Key) -> str:
        """Return the connector that the block came from; this one once it has been used."""
        return self._origins.get(key, self.name)

    def used(self, key: Key) -> None:
        """Count the block as this connector's own from now on."""
        self._origins.pop(key, None)

    def pin(self, key: Key) -> None:
        """Do not evict the block until `unpin` has been called as often."""
        self._pool.share(self._slots[key])

    def unpin(self, key: Key) -> None:
        """Undo a `pin`. The last one makes the block the most recently used."""
        self._pool.release(self._slots[key])

    def reset(self, filling: set[int]) -> None:
        """Repair the accounts after a failure at any point: nothing is pinned, the slots
        ``filling`` are being filled, and all other slots without a block are free.
        """
        contents = self._pool.contents
        for slot in filling:
            contents[slot] = None
        self._slots = {key: slot for slot, key in enumerate(contents) if key is not None}
        self._origins = {key: name for key, name in self._origins.items() if key in self._slots}
        self.num_filling = len(filling)
        self._pool.reset(filling)

    def check(self) -> None:
        """Raise `RuntimeError` unless every slot is free, filled, or taken."""
        self._pool.check()
        held = {slot: key for slot, key in enumerate(self._pool.contents) if key is not None}
        if held != {slot: key for key, slot in self._slots.items()}:
            raise RuntimeError("a slot of host memory does not hold the block it is known for")
        if not self._origins.keys() <= self._slots.keys():
            raise RuntimeError("host memory knows where a block came from that it does not hold")
