"""Blocks are read from disk into host memory while the request they are for waits.

By a thread of its own, and no longer than computing would take the request; of host memory some is
left to what the pool overwrites.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.kv_cache.digest import Key
from octavo.kv_cache.disk import Disk
from octavo.kv_cache.host_memory import HostMemory
from octavo.kv_cache.worker import Worker
from octavo.kv_cache.worth import Worth

_AHEAD = 0.75  # of host memory is for what was read ahead and waits for its request, at most,
_AHEAD_FOR_ONE = 0.5  # and so much of it for one


@dataclass(slots=True, eq=False)
class ReadAhead:
    """What is being read from disk for a request that waits for it."""

    deadline: float  # clock seconds: by then computing would have been as quick
    remaining: int  # blocks
    num_tokens: int  # of the prompt, that will be cached when all have been read
    pinned: list[Key] = field(default_factory=list)  # read, and kept until the request is let in
    over: bool = False  # nobody waits any more


class _Reading(NamedTuple):
    slot: int
    waiting: list[ReadAhead]


class ReadingAhead:
    """Everything but the worker's jobs runs in the engine's thread."""

    def __init__(
        self,
        disk: Disk,
        memory: HostMemory,
        worker: Worker,
        worth: Worth,
        now: Callable[[], float],
    ) -> None:
        self.in_time = 0  # requests that waited for the disk and got all of it
        self.late = 0  # …that did not, and computed the rest
        self._disk = disk
        self._memory = memory
        self._worker = worker
        self._worth = worth
        self._now = now
        self._reading: dict[Key, _Reading] = {}
        self._read: deque[tuple[Key, int, bool, float]] = deque()  # by the worker's thread
        self._arrived = threading.Event()

    @property
    def num_slots(self) -> int:
        """Slots of host memory that are being filled."""
        return len(self._reading)

    @property
    def room(self) -> int:
        """Slots of host memory for what is read for those who wait."""
        most = max(1, int(self._memory.num_slots * _AHEAD))
        held = self._memory.num_pinned + len(self._reading)
        return min(most - held, self._memory.num_takeable)

    def begin(
        self, keys: Sequence[Key], start: int, num_tokens: int, now: float
    ) -> ReadAhead | None:
        """Begin to read ``keys``, in the order they are needed in and as far as there is room, for
        a request that would else compute ``num_tokens`` from ``start`` on; None if that would be
        quicker.
        """
        room = min(self.room, max(1, int(self._memory.num_slots * _AHEAD_FOR_ONE)))
        chosen: list[Key] = []
        unread = 0
        for key in keys:
            new = key not in self._reading
            if unread + new > room:
                break
            unread += new
            chosen.append(key)
        if not chosen:
            return None
        num_tokens = num_tokens * len(chosen) // len(keys)
        reading = (len(self._reading) + unread) * self._worth.reading.seconds
        patience = self._worth.saved(len(chosen), start, num_tokens)
        if reading >= patience:
            self._worth.left_alone += 1
            return None
        ahead = ReadAhead(now + patience, len(chosen), start + num_tokens)
        try:
            for key in chosen:
                if key not in self._reading:
                    slot = self._memory.take()
                    assert slot is not None
                    self._reading[key] = _Reading(slot, [])
                    try:
                        self._submit(key, slot)
                    except Exception:  # nobody fills it
                        del self._reading[key]
                        self._memory.give_back(slot)
                        raise
                self._reading[key].waiting.append(ahead)
        except BaseException:
            self.end(ahead)
            raise
        return ahead

    def _submit(self, key: Key, slot: int) -> None:
        row = self._memory.data[slot]

        def job() -> None:
            whole = False
            began = self._now()
            try:
                whole = self._disk.read(key, row)
            finally:
                self._read.append((key, slot, whole, self._now() - began))
                self._arrived.set()

        self._worker.submit(job)

    def poll(self) -> None:
        """Take over what has been read."""
        self._arrived.clear()
        while self._read:
            key, slot, whole, took = self._read[0]
            self._worth.reading.took(took)
            if whole:
                self._memory.put(key, slot, from_disk=True)
            else:
                self._memory.give_back(slot)
            for ahead in self._reading[key].waiting:
                ahead.remaining -= 1
                if whole and not ahead.over:
                    ahead.pinned.append(key)
                    self._memory.pin(key)
            # Last: a failure before leaves the slot to whoever cleans up.
            del self._reading[key]
            self._read.popleft()

    def is_ready(self, ahead: ReadAhead, now: float) -> bool:
        """Whether the request need not wait any longer."""
        return not ahead.remaining or now >= ahead.deadline

    def waited(self, ahead: ReadAhead) -> None:
        """The request has waited as long as it will."""
        if ahead.remaining:
            self.late += 1
        else:
            self.in_time += 1

    def end(self, ahead: ReadAhead) -> None:
        """The request has been let in, or is no more."""
        if not ahead.over:
            ahead.over = True
            for key in ahead.pinned:
                self._memory.unpin(key)

    def wait(self, seconds: float) -> None:
        """Until something has been read, or so long."""
        self._arrived.wait(seconds)

    def forget(self) -> set[int]:
        """After a failure, perhaps midway: nobody waits any more. The slots that are still being
        filled.
        """
        for reading in self._reading.values():
            for ahead in reading.waiting:
                ahead.over = True
        if self._read:  # the first may have been taken over when `poll` failed
            key, slot, *_ = self._read[0]
            if key in self._memory and self._memory.slot(key) == slot:
                self._reading.pop(key, None)
                self._read.popleft()
        return {reading.slot for reading in self._reading.values()}

    def close(self) -> None:
        self._worker.close(1.0)
