"""The prefix cache beyond the pool: what is overwritten there goes to host memory, and to disk.

A block that is about to be overwritten is copied out before the step that writes it, and a prefix
that begins like one in host memory is copied in before the step that reads it; both in the
engine's thread, in the order of what the cache has decided. Files are written behind, and read
ahead while the request they are for waits, by two threads of their own. So a preempted sequence is
swapped without anybody deciding so beforehand: what is overwritten while it waits is in host memory
when it returns.

Loading must beat computing, or is not done: both are predicted from what they have taken lately,
and a request waits for the disk no longer than computing would take it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.kv import digest
from octavo.kv.digest import Key
from octavo.kv.disk import Bytes, Disk
from octavo.kv.host_memory import HostMemory
from octavo.kv.measured import Measured
from octavo.kv.prefix import Node, PrefixIndex
from octavo.kv.worker import Worker

logger = logging.getLogger(__name__)

Int32 = npt.NDArray[np.int32]

_WRITING_BYTES = 64 << 20  # on their way to the disk at a time, at most
_MOST_FILLED = 1 << 16  # blocks that wait to be; the oldest are left to when they are overwritten
_FILLED_BYTES = 16 << 20  # copied out for it after a step, at most
_SLICE_BYTES = 16 << 20  # copied out in one piece
_FLUSH_SECONDS = 3.0  # for what is not on disk at the end
_HOST_BANDWIDTH = 2e9  # bytes a second, until it has been measured
_DISK_BANDWIDTH = 200e6
_AHEAD = 0.75  # of host memory is for what was read ahead and waits for its request, at most,
_AHEAD_FOR_ONE = 0.5  # and so much of it for one
_REST = 60.0  # seconds for which nothing is loaded, when copying in has failed


class Source(Enum):
    """Where a block that the pool does not hold can be had from."""

    HOST = auto()
    DISK = auto()


class Arena(Protocol):
    """The blocks' bytes: of an executor."""

    def export_blocks(self, blocks: Int32) -> Bytes: ...

    def import_blocks(self, blocks: Int32, data: Bytes) -> None: ...


class Computing(Protocol):
    """What it takes to compute instead, in seconds."""

    @property
    def per_token(self) -> float:
        """Of a prompt, in large steps."""
        ...

    def seconds(self, start: int, tokens: int) -> float:
        """Of so many tokens of a prompt from position ``start`` on."""
        ...


class _Load(NamedTuple):
    """What is copied into a block before the step: a slot of host memory, or another block."""

    block: int
    slot: int | None
    key: Key | None
    source: int = -1


class _Spill(NamedTuple):
    block: int
    key: Key


class _Filled(NamedTuple):
    """A block that was entered into the prefix index, and belongs on disk, too."""

    node: Node
    group: int
    block: int


@dataclass(slots=True, eq=False)
class ReadAhead:
    """What is being read from disk for a request that waits for it."""

    deadline: float  # clock seconds: by then computing would have been as quick
    remaining: int  # blocks
    num_tokens: int  # of the prompt, that will be cached when all have been read
    pinned: list[Key] = field(default_factory=list)  # read, and kept until the request is let in
    over: bool = False  # nobody waits any more


@dataclass(slots=True)
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


class _Reading(NamedTuple):
    slot: int
    waiting: list[ReadAhead]


class Tiers:
    """The tiers of one engine. Everything but the workers' jobs runs in its thread.

    ``engine`` is the digest of all that decides what a block holds beside its tokens
    (`digest.root`). ``tokens_per_block``: how many tokens need not be computed for one block of one
    group, where all groups are loaded.
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
        if disk is not None and (reader is None or writer is None):
            raise ValueError("a disk tier needs somebody who reads and somebody who writes")
        self.engine = engine
        self.memory = memory
        self.disk = disk
        self.arena: Arena | None = None
        self._reader = reader
        self._writer = writer
        self._now = now
        self._stats = TierStats(
            host_capacity=memory.data.nbytes, disk_capacity=0 if disk is None else disk.budget
        )
        self._block_bytes = memory.data.shape[1]
        self._roots: dict[bytes, bytes] = {}
        # For the next step, in order:
        self._spills: list[_Spill] = []
        self._loads: list[_Load] = []
        self._loading: set[int] = set()  # blocks that hold what they should from the step on
        # To the disk:
        self._filled: deque[_Filled] = deque(maxlen=_MOST_FILLED)
        self._writing = 0  # blocks that the writer has not written yet
        self._written: deque[None] = deque()  # one for each it has; the other end is its thread's
        # From the disk:
        self._reading: dict[Key, _Reading] = {}
        self._read: deque[tuple[Key, int, bool, float]] = deque()  # by the reader's thread
        self._arrived = threading.Event()
        self._loading_takes = Measured(self._block_bytes / _HOST_BANDWIDTH, now)  # a block
        self._reading_takes = Measured(self._block_bytes / _DISK_BANDWIDTH, now)
        self._tokens_per_block = tokens_per_block
        self._computing = computing
        self._rests_until = -float("inf")  # seconds of ``now``: copying in has failed

    # Names

    def root(self, salt: bytes) -> bytes:
        known = self._roots.get(salt)
        if known is None:
            if len(self._roots) > 1000:
                self._roots.clear()
            known = self._roots[salt] = digest.root(self.engine, salt)
        return known

    def digest(self, node: Node) -> bytes:
        """Of all tokens up to the node's end."""
        chain = []
        at: Node | None = node
        while at is not None and at.digest is None:
            chain.append(at)
            at = at.parent
        for each in reversed(chain):
            if each.parent is None:
                each.digest = self.root(each.tokens)
            else:
                assert each.parent.digest is not None
                each.digest = digest.after(each.parent.digest, each.tokens)
        assert node.digest is not None
        return node.digest

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
        key = self.digest(node), group
        if key in self.memory:
            self.memory.touch(key)
        elif self._loading_takes.seconds < self._tokens_per_block * self._computing.per_token:
            self._spills.append(_Spill(block, key))

    def load(self, key: Key, block: int, copies: list[tuple[int, int]]) -> bool:
        """Before the next step ``block`` gets what host memory has. ``copies`` of the same step,
        which come later, go first where they touch the block. Returns whether it was read from
        disk.
        """
        if any(block in pair for pair in copies):
            self._loads += [_Load(to, None, None, source) for source, to in copies]
            copies.clear()
        from_disk = self.memory.is_from_disk(key)
        self._loads.append(_Load(block, self.memory.slot(key), key))
        self.memory.pin(key)
        self.memory.used(key)
        self._loading.add(block)
        return from_disk

    def filled(self, node: Node, group: int, block: int) -> None:
        """The block now holds a full node's content."""
        if self.disk is not None:
            self._filled.append(_Filled(node, group, block))

    def forget(self) -> None:
        """The pool has been emptied, perhaps because something failed midway: nothing that was
        decided for the next step counts, and nobody waits for the disk any more.
        """
        self._spills.clear()
        self._loads.clear()
        self._loading.clear()
        self._filled.clear()
        for reading in self._reading.values():
            for ahead in reading.waiting:
                ahead.over = True
        if self._read:  # the first may have been taken over when `poll` failed
            key, slot, *_ = self._read[0]
            if key in self.memory and self.memory.slot(key) == slot:
                self._reading.pop(key, None)
                self._read.popleft()
        self.memory.reset({reading.slot for reading in self._reading.values()})

    # The engine's step

    def transfer(self) -> None:
        """Before a step: what was decided is done. Raises what the arena raises when it cannot be
        written: what was to be there is not, and the cache must be emptied (`forget`).
        """
        if self._spills:
            spills, self._spills = self._spills, []
            size = max(1, _SLICE_BYTES // self._block_bytes)
            for first in range(0, len(spills), size):
                self._copy_out(spills[first : first + size])
        if self._loads:
            began = self._now()
            try:
                for load in self._loads:
                    self._copy_in(load)
            except BaseException:
                # Whoever wanted it runs again, perhaps alone: that is not to fail, too.
                self._rests_until = began + _REST
                raise
            took, count = self._now() - began, sum(load.key is not None for load in self._loads)
            self._done_loading()
            self._stats.loaded_blocks += count
            self._stats.loading_seconds += took
            if count:
                self._loading_takes.took(took / count)

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
        """To host memory, and on their way to the disk as far as it keeps up."""
        assert self.arena is not None
        try:
            blocks = np.array([spill.block for spill in spills], np.int32)
            data = self.arena.export_blocks(blocks)
        except Exception:
            logger.exception("kv offload: %d blocks could not be copied out", len(spills))
            return
        self._stats.spilled_blocks += len(spills)
        for spill, block in zip(spills, data, strict=True):
            slot = self.memory.take()
            if slot is not None:
                self.memory.data[slot] = block
                self.memory.put(spill.key, slot)
            if self._writing * self._block_bytes < _WRITING_BYTES:
                self._write(spill.key, block)

    def after_step(self) -> None:
        """A step has been committed."""
        try:
            if self._filled:
                self._persist(_FILLED_BYTES // self._block_bytes + 1)
        except Exception:  # which costs the disk some blocks, and nobody an answer
            logger.exception("kv offload: blocks could not be copied out")

    def _persist(self, most: int) -> None:
        """Copy out blocks that belong on disk, as far as it keeps up."""
        self._count_written()
        room = min(most, _WRITING_BYTES // self._block_bytes + 1 - self._writing)
        chosen = self._take_filled(room)
        if not chosen:
            return
        assert self.arena is not None
        data = self.arena.export_blocks(np.array([each.block for each in chosen], np.int32))
        for each, block in zip(chosen, data, strict=True):
            self._write((self.digest(each.node), each.group), block)

    def _take_filled(self, most: int) -> list[_Filled]:
        assert self.disk is not None
        chosen: list[_Filled] = []
        while self._filled and len(chosen) < most:
            each = self._filled.popleft()
            still = each.node.blocks[each.group] == each.block
            if still and not self.disk.holds((self.digest(each.node), each.group)):
                chosen.append(each)
        return chosen

    def _write(self, key: Key, block: Bytes) -> None:
        disk = self.disk
        if disk is None or self._writer is None or disk.holds(key):
            return
        data = block.copy()  # a row keeps all that were copied out with it

        def job() -> None:
            try:
                disk.write(key, data)
            finally:
                self._written.append(None)

        self._writer.submit(job)
        self._writing += 1

    def _count_written(self) -> None:
        while self._written:
            self._written.popleft()
            self._writing -= 1

    # What is worth it

    def is_worth_loading(self, num_blocks: int, start: int, num_tokens: int) -> bool:
        """Whether so many blocks from host memory are had sooner than the tokens from ``start`` on
        are computed.
        """
        return bool(
            num_blocks * self._loading_takes.seconds < self._computing.seconds(start, num_tokens)
        )

    def left_alone(self) -> None:
        self._stats.not_worth_loading += 1

    # Reading ahead

    @property
    def may_read_ahead(self) -> bool:
        """Whether host memory has room for what is read for those who wait."""
        return self.disk is not None and self._room_ahead > 0

    @property
    def _room_ahead(self) -> int:
        """Slots: some are left to what is spilled."""
        most = max(1, int(self.memory.num_slots * _AHEAD))
        held = self.memory.num_pinned + len(self._reading)
        return min(most - held, self.memory.num_takeable)

    def read_ahead(
        self, keys: Sequence[Key], start: int, num_tokens: int, now: float
    ) -> ReadAhead | None:
        """Begin to read ``keys``, in the order they are needed in and as far as there is room, for
        a request that would else compute ``num_tokens`` from ``start`` on; None if that would be
        quicker.
        """
        assert self._reader is not None
        room = min(self._room_ahead, max(1, int(self.memory.num_slots * _AHEAD_FOR_ONE)))
        chosen: list[Key] = []
        unread = 0
        for key in keys:
            unread += key not in self._reading
            if unread > room:
                unread = room
                break
            chosen.append(key)
        if not chosen:
            return None
        num_tokens = num_tokens * len(chosen) // len(keys)
        keys = chosen
        blocks = len(self._reading) + unread
        loading = len(keys) * self._loading_takes.seconds
        computing = self._computing.seconds(start, num_tokens)
        if blocks * self._reading_takes.seconds + loading >= computing:
            self._stats.not_worth_loading += 1
            return None
        ahead = ReadAhead(now + computing - loading, len(keys), start + num_tokens)
        try:
            for key in keys:
                if key not in self._reading:
                    slot = self.memory.take()
                    assert slot is not None
                    self._reading[key] = _Reading(slot, [])
                    self._submit_read(key, slot)
                self._reading[key].waiting.append(ahead)
        except BaseException:
            self.end(ahead)
            raise
        return ahead

    def _submit_read(self, key: Key, slot: int) -> None:
        disk, row = self.disk, self.memory.data[slot]
        assert disk is not None
        assert self._reader is not None

        def job() -> None:
            whole = False
            began = self._now()
            try:
                whole = disk.read(key, row)
            finally:
                self._read.append((key, slot, whole, self._now() - began))
                self._arrived.set()

        self._reader.submit(job)

    def poll(self) -> None:
        """Take over what has been read."""
        self._arrived.clear()
        while self._read:
            key, slot, whole, took = self._read[0]
            self._reading_takes.took(took)
            if whole:
                self.memory.put(key, slot, from_disk=True)
            else:
                self.memory.give_back(slot)
            for ahead in self._reading[key].waiting:
                ahead.remaining -= 1
                if whole and not ahead.over:
                    ahead.pinned.append(key)
                    self.memory.pin(key)
            # Last: a failure before leaves the slot to whoever cleans up.
            del self._reading[key]
            self._read.popleft()

    def is_ready(self, ahead: ReadAhead, now: float) -> bool:
        """Whether the request need not wait any longer."""
        return not ahead.remaining or now >= ahead.deadline

    def waited(self, ahead: ReadAhead) -> None:
        """The request has waited as long as it will."""
        if ahead.remaining:
            self._stats.reads_late += 1
        else:
            self._stats.reads_in_time += 1

    def end(self, ahead: ReadAhead) -> None:
        """The request has been let in, or is no more."""
        if not ahead.over:
            ahead.over = True
            for key in ahead.pinned:
                self.memory.unpin(key)

    def wait(self, seconds: float) -> None:
        """Until something has been read, or so long."""
        self._arrived.wait(seconds)

    # The end

    def flush(self, index: PrefixIndex, seconds: float = _FLUSH_SECONDS) -> None:
        """Write what the pool and host memory hold and the disk does not, as far as time allows."""
        if self.disk is None or self.arena is None:
            return
        assert self._writer is not None
        self._writer.hurry()
        until = time.monotonic() + seconds
        for node, group, block in index.held():
            if time.monotonic() >= until:
                break
            key = self.digest(node), group
            if not self.disk.holds(key):
                self._write(key, self.arena.export_blocks(np.array([block], np.int32))[0])
                self._wait_for_writer(until)
        for key in self.memory:
            if time.monotonic() >= until:
                break
            if not self.disk.holds(key):
                self._write(key, self.memory.data[self.memory.slot(key)])
                self._wait_for_writer(until)
        while self._writing and time.monotonic() < until:
            self._count_written()
            time.sleep(0.001)

    def _wait_for_writer(self, until: float) -> None:
        self._count_written()
        while self._writing * self._block_bytes >= _WRITING_BYTES and time.monotonic() < until:
            time.sleep(0.001)
            self._count_written()

    def close(self) -> None:
        for worker in (self._reader, self._writer):
            if worker is not None:
                worker.close(1.0)

    def stats(self) -> TierStats:
        stats, disk = replace(self._stats), self.disk
        stats.host_blocks = len(self.memory)
        stats.host_bytes = len(self.memory) * self._block_bytes
        if disk is not None:
            stats.disk_blocks = len(disk)
            stats.disk_bytes = disk.used
            stats.disk_bytes_read = disk.bytes_read
            stats.disk_bytes_written = disk.bytes_written
            stats.corrupted_blocks = disk.corrupted
            stats.failed_reads = disk.failed_reads
            stats.failed_writes = disk.failed_writes
        return stats

    def check(self, pins: Iterable[ReadAhead]) -> None:
        """Slots and pins add up; `RuntimeError` otherwise."""
        self.memory.check()
        pinned = sum(len(ahead.pinned) for ahead in pins) + sum(
            load.key is not None for load in self._loads
        )
        if pinned != self.memory.num_pins:
            raise RuntimeError("a block of the host tier is pinned for nobody")
        taken = self.memory.num_slots - self.memory.num_takeable - self.memory.num_pinned
        if taken != len(self._reading):
            raise RuntimeError("a slot of the host tier is lost")
