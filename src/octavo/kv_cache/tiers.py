"""The prefix cache beyond the pool: what is overwritten there goes to host memory, and to disk.

A block that is about to be overwritten is copied out before the step that writes it, and a prefix
that begins like one in host memory is copied in before the step that reads it; both in the
engine's thread, in the order of what the cache has decided. Files are read ahead
(kv_cache/read_ahead.py)
and written behind (kv_cache/write_behind.py). So a preempted sequence is swapped without anybody
deciding so beforehand: what is overwritten while it waits is in host memory when it returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from octavo.kv_cache.arena import Arena
from octavo.kv_cache.digest import Key, Names
from octavo.kv_cache.disk import Disk
from octavo.kv_cache.host_memory import HostMemory
from octavo.kv_cache.prefix import PrefixIndex
from octavo.kv_cache.read_ahead import ReadAhead, ReadingAhead
from octavo.kv_cache.worker import Worker
from octavo.kv_cache.worth import Computing, Worth
from octavo.kv_cache.write_behind import WritingBehind

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 3.0  # for what is not on disk at the end
_REST = 60.0  # seconds for which nothing is loaded, when copying in has failed


class Source(Enum):
    """Where a block that the pool does not hold can be had from."""

    HOST = auto()
    DISK = auto()


class _Load(NamedTuple):
    """What is copied into a block before the step: a slot of host memory, or another block."""

    block: int
    slot: int | None
    key: Key | None
    source: int = -1


class _Spill(NamedTuple):
    block: int
    key: Key


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the start, and sizes now. Bytes and blocks are of KV."""

    host_blocks: int = 0
    host_bytes: int = 0  # of blocks held
    host_capacity: int = 0  # bytes
    disk_blocks: int = 0
    disk_bytes: int = 0  # of files, of all engines, as counted last
    disk_capacity: int = 0
    spilled_blocks: int = 0  # pool → host
    loaded_blocks: int = 0  # host → pool
    loading_seconds: float = 0.0
    disk_bytes_written: int = 0
    disk_bytes_read: int = 0
    corrupted_blocks: int = 0  # files dropped because they were not what was written
    failed_reads: int = 0
    failed_writes: int = 0
    reads_in_time: int = 0  # requests that waited for the disk and got all of it
    reads_late: int = 0  # …that did not, and computed the rest
    not_worth_loading: int = 0  # hits left alone because computing was predicted to be quicker


class Tiers:
    """The tiers of one engine, in its thread.

    ``engine`` is the digest of all that decides what a block holds beside its tokens
    (`digest.root`). With a ``disk`` there are ``reading`` and ``writing``, whose jobs ``reader``
    and ``writer`` do. ``tokens_per_block`` and ``computing``: see `Worth`.
    """

    def __init__(
        self,
        engine: bytes,
        memory: HostMemory,
        disk: Disk | None = None,
        *,
        reader: Worker | None = None,
        writer: Worker | None = None,
        tokens_per_block: float,
        computing: Computing,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._block_bytes = memory.data.shape[1]
        self.names = Names(engine)
        self.worth = Worth(self._block_bytes, tokens_per_block, computing, now)
        self.memory = memory
        self.disk = disk
        self.arena: Arena | None = None
        self.reading: ReadingAhead | None = None
        self.writing: WritingBehind | None = None
        if disk is not None:
            if reader is None or writer is None:
                raise ValueError("a disk tier needs somebody who reads and somebody who writes")
            self.reading = ReadingAhead(disk, memory, reader, self.worth, now)
            self.writing = WritingBehind(disk, writer, self.names)
        self._now = now
        self._rests_until = -float("inf")  # seconds of ``now``: copying in has failed
        self._spilled = self._loaded = 0
        self._loading_seconds = 0.0
        # For the next step, in order:
        self._spills: list[_Spill] = []
        self._loads: list[_Load] = []
        self._loading: set[int] = set()  # blocks that hold what they should from the step on

    def find(self, key: Key) -> Source | None:
        if self._now() < self._rests_until:
            return None
        if key in self.memory:
            return Source.HOST
        if self.disk is not None and self.disk.holds(key):
            return Source.DISK
        return None

    # What the cache decides while a step is made

    def spill(self, block: int, index: PrefixIndex) -> None:
        """The block is about to be handed out for something else."""
        holder = index.holder(block)
        if holder is None or block in self._loading:
            return
        node, group = holder
        key = self.names.of(node), group
        if key in self.memory:
            self.memory.touch(key)
        elif self.worth.keeping():
            self._spills.append(_Spill(block, key))

    def load(self, key: Key, block: int, copies: list[tuple[int, int]]) -> None:
        """Before the next step ``block`` gets what host memory has. ``copies`` of the same step,
        which come later, go first where they touch the block.
        """
        if any(block in pair for pair in copies):
            self._loads += [_Load(to, None, None, source) for source, to in copies]
            copies.clear()
        self._loads.append(_Load(block, self.memory.slot(key), key))
        self.memory.pin(key)
        self.memory.used(key)
        self._loading.add(block)

    def forget(self) -> None:
        """The pool has been emptied, perhaps because something failed midway: nothing that was
        decided for the next step counts, and nobody waits for the disk any more.
        """
        self._spills.clear()
        self._loads.clear()
        self._loading.clear()
        if self.writing is not None:
            self.writing.forget()
        self.memory.reset(set() if self.reading is None else self.reading.forget())

    # The engine's step

    def transfer(self) -> None:
        """Before a step: what was decided is done. Raises what the arena raises when it cannot be
        written: what was to be there is not, and the cache must be emptied (`forget`).
        """
        spilled, loaded = len(self._spills), 0
        started = self._now()
        if self._spills:
            spills, self._spills = self._spills, []
            self._copy_out(spills)
        began = ended = self._now()
        if self._loads:
            try:
                for load in self._loads:
                    self._copy_in(load)
            except BaseException:
                # Whoever wanted it runs again, perhaps alone: that is not to fail, too.
                self._rests_until = self._now() + _REST
                raise
            ended = self._now()
            loaded = sum(load.key is not None for load in self._loads)
            self._done_loading()
            self._loaded += loaded
            self._loading_seconds += ended - began
        self.worth.copied(spilled, began - started, loaded, ended - began)

    def _copy_in(self, load: _Load) -> None:
        assert self.arena is not None
        if load.slot is None:
            data = self.arena.export_blocks(np.array([load.source], np.int32))
        else:
            data = self.memory.data[load.slot : load.slot + 1]
        self.arena.import_blocks(np.array([load.block], np.int32), data)

    def _done_loading(self) -> None:
        for load in self._loads:
            if load.key is not None:
                self.memory.unpin(load.key)
        self._loads.clear()
        self._loading.clear()

    def _copy_out(self, spills: Sequence[_Spill]) -> None:
        """To host memory, and on their way to the disk as far as it keeps up. Each straight to its
        place: a copy in between costs as much again, and many times that where its memory is new.
        """
        assert self.arena is not None
        for done, (block, key) in enumerate(spills):
            slot = self.memory.take()
            if slot is None and self.writing is None:
                return
            try:
                into = None if slot is None else self.memory.data[slot : slot + 1]
                data = self.arena.export_blocks(np.array([block], np.int32), into)
            except Exception:
                if slot is not None:
                    self.memory.give_back(slot)
                count = len(spills) - done
                logger.exception("kv offload: %d blocks could not be copied out", count)
                return
            self._spilled += 1
            if slot is not None:
                self.memory.put(key, slot)
            if self.writing is not None:
                self.writing.offer(key, data[0])

    def after_step(self) -> None:
        """A step has been committed."""
        if self.writing is not None and self.arena is not None:
            try:
                self.writing.persist(self.arena)
            except Exception:  # which costs the disk some blocks, and nobody an answer
                logger.exception("kv offload: blocks could not be copied out")

    # The end

    def flush(self, index: PrefixIndex, seconds: float = _FLUSH_SECONDS) -> None:
        """Write what the pool and host memory hold and the disk does not, as far as time allows."""
        if self.writing is not None and self.arena is not None:
            self.writing.flush(index, self.arena, self.memory, seconds)

    def close(self) -> None:
        for thread in (self.reading, self.writing):
            if thread is not None:
                thread.close()

    def stats(self) -> TierStats:
        stats = TierStats(
            host_blocks=len(self.memory),
            host_bytes=len(self.memory) * self._block_bytes,
            host_capacity=self.memory.data.nbytes,
            spilled_blocks=self._spilled,
            loaded_blocks=self._loaded,
            loading_seconds=self._loading_seconds,
            not_worth_loading=self.worth.left_alone,
        )
        disk, reading = self.disk, self.reading
        if disk is None or reading is None:
            return stats
        return replace(
            stats,
            disk_blocks=len(disk),
            disk_bytes=disk.used,
            disk_capacity=disk.budget,
            disk_bytes_written=disk.bytes_written,
            disk_bytes_read=disk.bytes_read,
            corrupted_blocks=disk.corrupted,
            failed_reads=disk.failed_reads,
            failed_writes=disk.failed_writes,
            reads_in_time=reading.in_time,
            reads_late=reading.late,
        )

    def check(self, pins: Iterable[ReadAhead], to_load: int = 0) -> None:
        """Slots and pins add up; `RuntimeError` otherwise. ``to_load``: so many blocks are pinned
        until they are asked for.
        """
        self.memory.check()
        pinned = sum(len(ahead.pinned) for ahead in pins) + sum(
            load.key is not None for load in self._loads
        )
        if pinned + to_load != self.memory.num_pins:
            raise RuntimeError("a block of the host tier is pinned for nobody")
        taken = self.memory.num_slots - self.memory.num_takeable - self.memory.num_pinned
        if taken != (0 if self.reading is None else self.reading.num_slots):
            raise RuntimeError("a slot of the host tier is lost")
