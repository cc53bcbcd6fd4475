"""The prefix cache beyond the pool: decides which blocks connectors save and load.

A block that is about to be overwritten in the pool is copied to host memory before the step that
overwrites it, and a prefix that host memory has is copied into the pool before the step that reads
it. Both happen in the engine's thread, in the order in which the cache decided them. So a preempted
sequence needs no decision to swap it: blocks of it that are overwritten while it waits are in host
memory when it returns.

All other connectors are loaded into host memory ahead of use (kv_cache/connectors/prefetch.py).
They save copies of blocks that have filled and of those that the pool overwrites, in their own
time. One that is slower than the engine holds nobody back: a block that comes while much is being
saved is not saved, or stays in the queue.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from octavo.kv_cache.block_hash import Key, digest_of
from octavo.kv_cache.connectors.base import BlockTransfer, Bytes, ConnectorStats, KvConnector
from octavo.kv_cache.connectors.host import HostMemory
from octavo.kv_cache.connectors.prefetch import Prefetch, Prefetcher
from octavo.kv_cache.prefix_index import Node, PrefixIndex
from octavo.kv_cache.transfer_cost import TransferCost

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 3.0  # for blocks that are not saved when the engine stops
_PAUSE = 60.0  # seconds in which nothing is loaded after copying into the pool has failed
_SAVING_BYTES = 64 << 20  # being saved by one connector at a time, at most
_MOST_QUEUED = 1 << 16  # filled blocks in the queue; older ones are saved when they are overwritten
_STEP_BYTES = 16 << 20  # copied out of the queue after one step, at most


class ConnectorManager:
    """The connectors of one engine, used in its thread.

    ``engine`` is the digest of all that decides what a block holds besides its tokens
    (`block_hash.root`). ``staging`` is the connector from which the pool loads, and ``others`` load
    into it; of two that have a block the first is used. ``cost``: see `TransferCost`.
    """

    def __init__(
        self,
        engine: bytes,
        staging: HostMemory,
        others: Sequence[KvConnector] = (),
        *,
        cost: TransferCost,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self.cost = cost
        self.staging = staging
        self.all = (staging, *others)
        self.prefetcher = Prefetcher(others, staging, cost, now) if others else None
        self._others = others
        # For these, (node, group, block) of blocks that have been entered into the prefix index.
        self.filled = deque[tuple[Node, int, int]](maxlen=_MOST_QUEUED if others else 0)
        self._saving = Counter[str]()  # blocks that a connector has not saved yet
        self._block_bytes: int = staging.data.shape[1]
        self._transfer: BlockTransfer  # from `register_kv_caches` on
        self._now = now
        self._paused_until = -float("inf")  # clock seconds
        # For the next step, in order: blocks to be copied to host memory, and blocks to be filled
        # with what host memory has or with another block's content.
        self._to_save: list[tuple[int, Key]] = []
        self._to_load: list[tuple[int, Key | int]] = []
        self._filling: set[int] = set()  # blocks that hold their content from the step on

    def register_kv_caches(self, transfer: BlockTransfer) -> None:
        """Read and write the pool's blocks with ``transfer``, the executor."""
        self._transfer = transfer

    @property
    def paused(self) -> bool:
        """Whether nothing is loaded now, because copying into the pool has failed lately."""
        return self._now() < self._paused_until

    # Decided by the cache while a step is planned

    def save_overwritten(
        self, block: int, node: Node, group: int, together: int = 1, tokens: int | None = None
    ) -> None:
        """Save the block, which is about to be handed out for something else than it holds.
        ``together``, ``tokens``: as of `TransferCost.worth_keeping`.
        """
        if block in self._filling:
            return
        key = digest_of(node, self.engine), group
        if self.staging.lookup(key):
            self.staging.touch(key)
        elif self.cost.worth_keeping(together, tokens):
            self._to_save.append((block, key))

    def load(self, key: Key, block: int, copies: list[tuple[int, int]]) -> None:
        """Fill ``block`` from host memory before the next step. If ``copies`` of that step, which
        are done later, touch the block, do them before.
        """
        if any(block in pair for pair in copies):
            self._to_load += [(destination, source) for source, destination in copies]
            copies.clear()
        self._to_load.append((block, key))
        self.staging.pin(key)
        self.staging.used(key)
        self._filling.add(block)

    def forget(self) -> None:
        """Drop all decisions for the next step and all prefetches: the pool has been emptied,
        perhaps after a failure at any point.
        """
        self._to_save.clear()
        self._to_load.clear()
        self._filling.clear()
        self.filled.clear()
        self.staging.reset(set() if self.prefetcher is None else self.prefetcher.forget())

    # The engine's step

    def transfer(self) -> None:
        """Do what was decided, before a step. Raise what the executor raises when blocks cannot be
        filled: then the cache must be emptied (`forget`).
        """
        if not self._to_save and not self._to_load:
            return
        started = self._now()
        to_save, self._to_save = self._to_save, []
        self._copy_out(to_save)
        began = self._now()
        try:
            for block, source in self._to_load:
                self._copy_in(block, source)
        except BaseException:
            # The request runs again, perhaps alone, and must not fail for this reason again.
            self._paused_until = self._now() + _PAUSE
            raise
        loads, seconds = self._loads(), self._now() - began
        for key in loads:
            self.staging.unpin(key)
        self._to_load.clear()
        self._filling.clear()
        if loads:
            self.staging.counters.loaded_blocks += len(loads)
            self.staging.counters.loading_seconds += seconds
        self.cost.copied(len(to_save), began - started, len(loads), seconds)

    def _loads(self) -> list[Key]:
        """Return the blocks of host memory to be loaded, which are pinned."""
        return [source for _, source in self._to_load if isinstance(source, tuple)]

    def _copy_in(self, block: int, source: Key | int) -> None:
        if isinstance(source, int):
            data = self._transfer.export_blocks(np.array([source], np.int32))
        else:
            data = self.staging.row(source)[None]
        self._transfer.import_blocks(np.array([block], np.int32), data)

    def _copy_out(self, blocks: Sequence[tuple[int, Key]]) -> None:
        """Copy blocks to host memory, and offer them to the other connectors. Each is exported
        straight into its slot: one more copy takes as long again, and far longer in new memory.
        """
        for done, (block, key) in enumerate(blocks):
            slot = self.staging.take()
            if slot is None and not self._others:
                return
            try:
                into = None if slot is None else self.staging.data[slot : slot + 1]
                data = self._transfer.export_blocks(np.array([block], np.int32), into)
            except Exception:
                if slot is not None:
                    self.staging.give_back(slot)
                count = len(blocks) - done
                logger.exception("kv offload: %d blocks could not be copied out", count)
                return
            self.staging.counters.saved_blocks += 1
            if slot is not None:
                self.staging.put(key, slot)
            self._save(key, data[0], [c for c in self._missing(key) if not self._is_behind(c)])

    def after_step(self) -> None:
        """Save some of the blocks that have filled, after a step has been committed."""
        try:
            self._save_filled()
        except Exception:  # these blocks are not saved, and no request fails
            logger.exception("kv offload: blocks could not be copied out")

    # Saves by the other connectors

    def _save_filled(self) -> None:
        """Copy out blocks of the queue, a limited number after each step, and save the copies."""
        if not self.filled:
            return
        self._count_saved()
        size, saving = self._block_bytes, max(self._saving.values(), default=0)
        chosen = self._take(min(_STEP_BYTES // size, _SAVING_BYTES // size - saving) + 1)
        if chosen:
            blocks = np.array([block for _, block in chosen], np.int32)
            for (key, _), data in zip(chosen, self._transfer.export_blocks(blocks), strict=True):
                self._save(key, data, self._missing(key))

    def _take(self, most: int) -> list[tuple[Key, int]]:
        chosen: list[tuple[Key, int]] = []
        while self.filled and len(chosen) < most:
            node, group, block = self.filled.popleft()
            if node.block(group) == block:
                key = digest_of(node, self.engine), group
                if self._missing(key):
                    chosen.append((key, block))
        return chosen

    def _missing(self, key: Key) -> list[KvConnector]:
        """Return the connectors that do not have the block."""
        return [each for each in self._others if not each.lookup(key)]

    def _is_behind(self, connector: KvConnector) -> bool:
        return self._saving[connector.name] * self._block_bytes >= _SAVING_BYTES

    def _save(self, key: Key, data: Bytes, connectors: Sequence[KvConnector]) -> None:
        if connectors:
            data = data.copy()  # a row of several blocks would keep all of them
            for connector in connectors:
                connector.start_save_kv(key, data)
                self._saving[connector.name] += 1

    def _count_saved(self) -> None:
        for connector in self._others:
            _, saved = connector.get_finished()
            while saved:
                saved.popleft()
                self._saving[connector.name] -= 1

    # The end

    def flush(self, index: PrefixIndex, seconds: float = _FLUSH_SECONDS) -> None:
        """Save what the pool and host memory hold, as far as ``seconds`` allow."""
        if not self._others:
            return
        for connector in self._others:
            connector.flush()
        until = time.monotonic() + seconds
        pool = ((digest_of(node, self.engine), group, block) for node, group, block in index.held())
        for digest, group, block in chain(pool, ((*key, None) for key in self.staging)):
            key = digest, group
            if time.monotonic() >= until:
                break
            if missing := self._missing(key):
                if block is None:
                    data = self.staging.row(key)
                else:
                    (data,) = self._transfer.export_blocks(np.array([block], np.int32))
                self._save(key, data, missing)
                self._count_saved()
                while any(map(self._is_behind, missing)) and time.monotonic() < until:
                    time.sleep(0.001)
                    self._count_saved()
        while self._saving.total() and time.monotonic() < until:
            self._count_saved()
            time.sleep(0.001)

    def shutdown(self) -> None:
        for connector in self.all:
            connector.shutdown()

    def stats(self) -> dict[str, ConnectorStats]:
        """Return the figures of each connector, by its name."""
        return {each.name: each.stats() for each in self.all}

    def check(self, prefetches: Iterable[Prefetch], to_load: int = 0) -> None:
        """Raise `RuntimeError` unless slots and pins add up. ``to_load``: blocks that are pinned
        until slots of the cache ask for them.
        """
        self.staging.check()
        pinned = sum(len(each.pinned) for each in prefetches) + len(self._loads())
        if pinned + to_load != self.staging.num_pins:
            raise RuntimeError("a block in host memory is pinned for nobody")
        if self.staging.num_filling != (self.prefetcher.num_slots if self.prefetcher else 0):
            raise RuntimeError("a slot of host memory is lost")
