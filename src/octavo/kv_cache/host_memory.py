"""The tier of the prefix cache in host memory: blocks that the pool had no more room for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.digest import Key


class _Entry(NamedTuple):
    slot: int
    from_disk: bool  # and not used since


class HostMemory:
    """``num_slots`` slots of ``block_bytes`` in one arena, whose pages are touched as they fill.
    Least recently used blocks give way; pinned ones do not. Not thread-safe, but for the bytes of a
    slot that `take` has given out.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self.data: npt.NDArray[np.uint8] = np.empty((num_slots, block_bytes), np.uint8)
        self._free: list[int] = []
        self._never_used = 0  # all slots from here on
        self._entries: dict[Key, _Entry] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()  # not pinned, least recently used first
        self._pins: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_pins(self) -> int:
        return sum(self._pins.values())

    def __iter__(self) -> Iterator[Key]:
        return iter([*self._entries])

    @property
    def num_takeable(self) -> int:
        """Slots that `take` could give out, one after another."""
        return len(self._free) + self.num_slots - self._never_used + len(self._idle)

    def take(self) -> int | None:
        """A slot to be filled; None if all are pinned or being filled."""
        if self._free:
            return self._free.pop()
        if self._never_used < self.num_slots:
            self._never_used += 1
            return self._never_used - 1
        if not self._idle:
            return None
        key, _ = self._idle.popitem(last=False)
        return self._entries.pop(key).slot

    def give_back(self, slot: int) -> None:
        """A slot that was taken and holds nothing after all."""
        self._free.append(slot)

    def put(self, key: Key, slot: int, *, from_disk: bool = False) -> None:
        """A taken slot now holds the block of ``key``. One already there stays."""
        if key in self._entries:
            if self._entries[key].slot != slot:
                self._free.append(slot)
            return
        self._entries[key] = _Entry(slot, from_disk)
        self._idle[key] = None

    def touch(self, key: Key) -> None:
        """It was wanted just now."""
        if key in self._idle:
            self._idle.move_to_end(key)

    def slot(self, key: Key) -> int:
        return self._entries[key].slot

    def is_from_disk(self, key: Key) -> bool:
        """Whether the block was read from disk and has not been used since."""
        return self._entries[key].from_disk

    def used(self, key: Key) -> None:
        slot, _ = self._entries[key]
        self._entries[key] = _Entry(slot, False)

    def pin(self, key: Key) -> None:
        self._pins[key] = self._pins.get(key, 0) + 1
        self._idle.pop(key, None)

    def unpin(self, key: Key) -> None:
        """The last to do so makes it the most recently used."""
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self._idle[key] = None

    def reset(self, taken: set[int]) -> None:
        """After a failure anywhere in between: nothing is pinned, and of the slots that hold no
        block those in ``taken`` are being filled and all others free.
        """
        self._pins.clear()
        self._idle = OrderedDict.fromkeys(
            [key for key in self._idle if key in self._entries]
            + [key for key in self._entries if key not in self._idle]
        )
        held = taken.union(entry.slot for entry in self._entries.values())
        self._free = [slot for slot in range(self._never_used) if slot not in held]

    def check(self) -> None:
        """Every slot is free, filled, or taken; `RuntimeError` otherwise."""
        slots = [entry.slot for entry in self._entries.values()] + self._free
        if len(set(slots)) != len(slots) or max(slots, default=-1) >= self._never_used:
            raise RuntimeError("a slot of the host tier is used twice")
        if self._entries.keys() != self._idle.keys() | self._pins.keys():
            raise RuntimeError("a block of the host tier is neither idle nor pinned")
        if self._idle.keys() & self._pins.keys():
            raise RuntimeError("a pinned block of the host tier may be evicted")
