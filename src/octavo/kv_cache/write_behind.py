"""Blocks are written to disk as they fill and as the pool forgets them, while others go on.

By a thread of its own, from copies. A disk that does not keep up holds nobody back: what comes
while much is on its way is not written, or waits in the pool.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import numpy as np

from octavo.kv_cache.arena import Arena, Bytes
from octavo.kv_cache.digest import Key, Names
from octavo.kv_cache.disk import Disk
from octavo.kv_cache.host_memory import HostMemory
from octavo.kv_cache.prefix import Node, PrefixIndex
from octavo.kv_cache.worker import Worker

_WRITING_BYTES = 64 << 20  # on their way to the disk at a time, at most
_MOST_FILLED = 1 << 16  # blocks that wait to be; the oldest are left to when they are overwritten
_FILLED_BYTES = 16 << 20  # copied out for it after a step, at most


class _Filled(NamedTuple):
    """A block that was entered into the prefix index, and belongs on disk, too."""

    node: Node
    group: int
    block: int


class WritingBehind:
    """Everything but the worker's jobs runs in the engine's thread."""

    def __init__(self, disk: Disk, worker: Worker, names: Names) -> None:
        self._disk = disk
        self._worker = worker
        self._names = names
        self._filled: deque[_Filled] = deque(maxlen=_MOST_FILLED)
        self._writing = 0  # blocks that the worker has not written yet
        self._written: deque[None] = deque()  # one for each it has; the other end is its thread's

    def filled(self, node: Node, group: int, block: int) -> None:
        """The block now holds a full node's content."""
        self._filled.append(_Filled(node, group, block))

    def forget(self) -> None:
        """The pool has been emptied."""
        self._filled.clear()

    def persist(self, arena: Arena) -> None:
        """Copy out blocks that belong on disk, some after each step, as far as it keeps up."""
        if not self._filled:
            return
        self._count_written()
        size = self._disk.block_bytes
        chosen = self._take_filled(
            min(_FILLED_BYTES // size, _WRITING_BYTES // size - self._writing) + 1
        )
        if chosen:
            data = arena.export_blocks(np.array([each.block for each in chosen], np.int32))
            for each, block in zip(chosen, data, strict=True):
                self._write((self._names.of(each.node), each.group), block)

    def _take_filled(self, most: int) -> list[_Filled]:
        chosen: list[_Filled] = []
        while self._filled and len(chosen) < most:
            each = self._filled.popleft()
            still = each.node.blocks[each.group] == each.block
            if still and not self._disk.holds((self._names.of(each.node), each.group)):
                chosen.append(each)
        return chosen

    def offer(self, key: Key, block: Bytes) -> None:
        """A block [block_bytes] that the pool forgets: written if not too much is on its way."""
        if not self._is_behind and not self._disk.holds(key):
            self._write(key, block)

    @property
    def _is_behind(self) -> bool:
        return self._writing * self._disk.block_bytes >= _WRITING_BYTES

    def _write(self, key: Key, block: Bytes) -> None:
        data = block.copy()  # a row keeps all that were copied out with it

        def job() -> None:
            try:
                self._disk.write(key, data)
            finally:
                self._written.append(None)

        self._worker.submit(job)
        self._writing += 1

    def _count_written(self) -> None:
        while self._written:
            self._written.popleft()
            self._writing -= 1

    def flush(self, index: PrefixIndex, arena: Arena, memory: HostMemory, seconds: float) -> None:
        """Write what the pool and host memory hold and the disk does not, as far as time allows."""
        self._worker.hurry()
        until = time.monotonic() + seconds
        for node, group, block in index.held():
            if time.monotonic() >= until:
                break
            key = self._names.of(node), group
            if not self._disk.holds(key):
                self._write(key, arena.export_blocks(np.array([block], np.int32))[0])
                self._wait(until)
        for key in memory:
            if time.monotonic() >= until:
                break
            if not self._disk.holds(key):
                self._write(key, memory.data[memory.slot(key)])
                self._wait(until)
        while self._writing and time.monotonic() < until:
            self._count_written()
            time.sleep(0.001)

    def _wait(self, until: float) -> None:
        self._count_written()
        while self._is_behind and time.monotonic() < until:
            time.sleep(0.001)
            self._count_written()

    def close(self) -> None:
        self._worker.close(1.0)
