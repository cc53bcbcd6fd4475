"""The connector in host memory: blocks for which the pool had no more space.

All other connectors load into its slots, and the pool loads from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from octavo.kv_cache.block_hash import Key
from octavo.kv_cache.connectors.base import Bytes, ConnectorStats, KvConnector


class HostMemory(KvConnector):
    """``num_slots`` slots of ``block_bytes``, whose memory pages are touched as they fill. The
    least recently used block is evicted first; a pinned block is not evicted.
    """

    name = "host"
    bandwidth = 2e9

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.data: Bytes = np.empty((num_slots, block_bytes), np.uint8)
        self._free: list[int] = []
        self._never_used = 0  # all slots from here on
        self._slots: dict[Key, int] = {}
        self._origins: dict[Key, str] = {}  # of blocks not used since another connector loaded them
        self._idle: OrderedDict[Key, None] = OrderedDict()  # not pinned, least recently used first
        self._pins: dict[Key, int] = {}

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
        return len(self._pins)

    @property
    def num_pins(self) -> int:
        return sum(self._pins.values())

    @property
    def num_takeable(self) -> int:
        """How many slots `take` could return, one after another."""
        return len(self._free) + self.num_slots - self._never_used + len(self._idle)

    def take(self) -> int | None:
        """Return a slot to be filled; None if all are pinned or being filled."""
        if self._free:
            return self._free.pop()
        if self._never_used < self.num_slots:
            self._never_used += 1
            return self._never_used - 1
        if not self._idle:
            return None
        key, _ = self._idle.popitem(last=False)
        slot = self._slots.pop(key)
        self._origins.pop(key, None)
        self.events.removed(key, self.name)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a taken slot that holds nothing after all."""
        self._free.append(slot)

    def put(self, key: Key, slot: int, origin: str = name) -> None:
        """Enter the block of ``key`` that now is in a taken slot, and came from connector
        ``origin``. A block already there stays.
        """
        if key in self._slots:
            if self._slots[key] != slot:
                self._free.append(slot)
            return
        self._slots[key] = slot
        self._idle[key] = None
        self.events.stored(key, self.name)
        if origin == self.name:
            self._origins.pop(key, None)
        else:
            self._origins[key] = origin

    def touch(self, key: Key) -> None:
        """Make the block the most recently used."""
        if key in self._idle:
            self._idle.move_to_end(key)

    def slot(self, key: Key) -> int:
        return self._slots[key]

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
        self._pins[key] = self._pins.get(key, 0) + 1
        self._idle.pop(key, None)

    def unpin(self, key: Key) -> None:
        """Undo a `pin`. The last one makes the block the most recently used."""
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self._idle[key] = None

    def reset(self, taken: set[int]) -> None:
        """Repair the accounts after a failure at any point: nothing is pinned, the slots ``taken``
        are being filled, and all other slots without a block are free.
        """
        self._pins.clear()
        self._idle = OrderedDict.fromkeys(
            [key for key in self._idle if key in self._slots]
            + [key for key in self._slots if key not in self._idle]
        )
        held = taken.union(self._slots.values())
        self._free = [slot for slot in range(self._never_used) if slot not in held]

    def check(self) -> None:
        """Raise `RuntimeError` unless every slot is free, filled, or taken."""
        slots = [*self._slots.values(), *self._free]
        if len(set(slots)) != len(slots) or max(slots, default=-1) >= self._never_used:
            raise RuntimeError("a slot of host memory is used twice")
        if self._slots.keys() != self._idle.keys() | self._pins.keys():
            raise RuntimeError("a block in host memory is neither idle nor pinned")
        if not self._origins.keys() <= self._slots.keys():
            raise RuntimeError("host memory knows where a block came from that it does not hold")
        if self._idle.keys() & self._pins.keys():
            raise RuntimeError("a pinned block in host memory may be evicted")
