"""Saves to connectors of blocks as they fill and as the pool overwrites them.

Connectors save copies, in their own time. One that is slower than the engine holds nobody back: a
block that comes while much is being saved is not saved, or stays in the queue.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain

import numpy as np

from octavo.kv_cache.block_hash import Key, digest_of
from octavo.kv_cache.connectors.base import BlockTransfer, Bytes, KvConnector
from octavo.kv_cache.connectors.host import HostMemory
from octavo.kv_cache.prefix_index import Node, PrefixIndex

_SAVING_BYTES = 64 << 20  # being saved by one connector at a time, at most
_MOST_QUEUED = 1 << 16  # blocks in the queue; older ones are saved when they are overwritten
_STEP_BYTES = 16 << 20  # copied out of the queue after one step, at most


class SaveQueue:
    """All methods run in the engine's thread."""

    def __init__(self, connectors: Sequence[KvConnector], block_bytes: int, engine: bytes) -> None:
        self._connectors = connectors
        self._block_bytes = block_bytes
        self._engine = engine
        # (node, group, block) of blocks that have been entered into the prefix index.
        self.queue = deque[tuple[Node, int, int]](maxlen=_MOST_QUEUED if connectors else 0)
        self._saving: Counter[str] = Counter()  # blocks that a connector has not saved yet

    def save_some(self, transfer: BlockTransfer) -> None:
        """Copy out blocks of the queue, a limited number after each step, and save the copies."""
        if not self.queue:
            return
        self._count_saved()
        size = self._block_bytes
        saving = max(self._saving.values(), default=0)
        chosen = self._take(min(_STEP_BYTES // size, _SAVING_BYTES // size - saving) + 1)
        if chosen:
            data = transfer.export_blocks(np.array([block for _, block in chosen], np.int32))
            for (key, _), block_data in zip(chosen, data, strict=True):
                self._save(key, block_data, self._missing(key))

    def _take(self, most: int) -> list[tuple[Key, int]]:
        chosen: list[tuple[Key, int]] = []
        while self.queue and len(chosen) < most:
            node, group, block = self.queue.popleft()
            if node.blocks[group] == block:
                key = digest_of(node, self._engine), group
                if self._missing(key):
                    chosen.append((key, block))
        return chosen

    def _missing(self, key: Key) -> list[KvConnector]:
        """Return the connectors that do not have the block."""
        return [each for each in self._connectors if not each.lookup(key)]

    def _is_behind(self, connector: KvConnector) -> bool:
        return self._saving[connector.name] * self._block_bytes >= _SAVING_BYTES

    def offer(self, key: Key, data: Bytes) -> None:
        """Save a block [block_bytes] that the pool overwrites, with connectors that keep up."""
        self._save(key, data, [c for c in self._missing(key) if not self._is_behind(c)])

    def _save(self, key: Key, data: Bytes, connectors: Sequence[KvConnector]) -> None:
        if connectors:
            data = data.copy()  # a row of several blocks would keep all of them
            for connector in connectors:
                connector.start_save_kv(key, data)
                self._saving[connector.name] += 1

    def _count_saved(self) -> None:
        for connector in self._connectors:
            _, saved = connector.get_finished()
            while saved:
                saved.popleft()
                self._saving[connector.name] -= 1

    def flush(
        self, index: PrefixIndex, transfer: BlockTransfer, staging: HostMemory, seconds: float
    ) -> None:
        """Save what the pool and host memory hold, as far as ``seconds`` allow."""
        if not self._connectors:
            return
        for connector in self._connectors:
            connector.flush()
        until = time.monotonic() + seconds
        pool = (
            (digest_of(node, self._engine), group, block) for node, group, block in index.held()
        )
        for digest, group, block in chain(pool, ((*key, None) for key in staging)):
            key = digest, group
            if time.monotonic() >= until:
                break
            if missing := self._missing(key):
                if block is None:
                    data = staging.row(key)
                else:
                    (data,) = transfer.export_blocks(np.array([block], np.int32))
                self._save(key, data, missing)
                self._count_saved()
                while any(map(self._is_behind, missing)) and time.monotonic() < until:
                    time.sleep(0.001)
                    self._count_saved()
        while self._saving.total() and time.monotonic() < until:
            self._count_saved()
            time.sleep(0.001)
