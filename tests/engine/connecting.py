"""KV connectors whose disk is a dictionary and whose threads run when they are told."""

import errno
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults import patch
from octavo.engine.clock import VirtualClock
from octavo.kv_cache.block_hash import Key
from octavo.kv_cache.connectors import disk as disk_module
from octavo.kv_cache.connectors import disk_index, folders
from octavo.kv_cache.connectors.base import Bytes, KvConnector
from octavo.kv_cache.connectors.disk import HEADER_BYTES, Disk
from octavo.kv_cache.connectors.host import HostMemory
from octavo.kv_cache.connectors.manager import ConnectorManager
from octavo.kv_cache.connectors.worker import Job, ThreadWorker
from octavo.kv_cache.exchange_form import from_exchange, to_exchange
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.transfer_cost import TransferCost


class ToldWorker(ThreadWorker):
    """Does its jobs when asked to, in the thread that asks."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.jobs))):
            self.jobs.popleft()()

    def hurry(self) -> None: ...

    def close(self, timeout: float) -> None:
        self.run(len(self.jobs))


class FakeDisk(Disk):
    """Keeps blocks in a dictionary; every tenth that is asked for is gone, or was altered."""

    def __init__(self, block_bytes: int, seed: int = 0) -> None:
        KvConnector.__init__(self)
        self._reader, self._writer = ThreadWorker("read"), ThreadWorker("write")
        self._now = time.monotonic
        self.budget = 1 << 30
        self.block_bytes = block_bytes
        self.files: dict[Key, Bytes] = {}
        self._rng = random.Random(seed)

    @property
    def used(self) -> int:
        return len(self.files) * self.block_bytes

    def __len__(self) -> int:
        return len(self.files)

    def lookup(self, key: Key) -> bool:
        return key in self.files

    def read(self, key: Key, into: Bytes) -> bool:
        if self._rng.random() < 0.1 or key not in self.files:
            self.files.pop(key, None)
            into[:] = 255
            self.counters.corrupted_blocks += 1
            return False
        into[:] = self.files[key]
        self.counters.loaded_bytes += self.block_bytes
        return True

    def write(self, key: Key, data: Bytes) -> None:
        if self._rng.random() < 0.9:
            self.files[key] = data.copy()
            self.counters.saved_bytes += self.block_bytes


_MAY_FAIL = frozenset(
    ("listdir", "mkdir", "open", "rename", "rmdir", "scandir", "stat", "unlink", "utime")
)


class FaultyOs:
    """`os`, whose calls fail now and then, do less than they were asked to, or read wrong bits."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _MAY_FAIL:
            return real

        def call(*given: Any, **more: Any) -> Any:
            self._fail(errno.EMFILE, errno.ENOMEM, errno.EIO, errno.ENOENT, errno.EACCES)
            return real(*given, **more)

        return call

    def readv(self, file: int, parts: list[Any]) -> int:
        self._fail(errno.EIO, errno.ENOMEM)
        count = os.readv(file, self._some(parts))
        if count and self._rng.random() < 0.03:
            parts[0][0] ^= 1
        return count

    def writev(self, file: int, parts: list[Any]) -> int:
        self._fail(errno.ENOSPC, errno.EIO)
        return os.writev(file, self._some(parts))

    def _fail(self, *errors: int) -> None:
        if self._rng.random() < 0.03:
            raise OSError(self._rng.choice(errors), "injected")

    def _some(self, parts: list[Any]) -> list[Any]:
        return [parts[0][: 1 + len(parts[0]) // 2]] if self._rng.random() < 0.2 else parts


class FaultyDisk(Disk):
    """The connector on a real disk, with a system that has faults: for one thread."""

    def __init__(self, block_bytes: int, files: int, now: Callable[[], float]) -> None:
        self._own = tempfile.TemporaryDirectory()
        budget = files * (HEADER_BYTES + block_bytes)
        super().__init__(Path(self._own.name), b"engine", block_bytes, budget, now=now)
        self._rng = random.Random(block_bytes)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """All folders are listed once while the budget is written: it is so small that each file
        would be time to list them all again.
        """
        faulty, seen = FaultyOs(self._rng), disk_index._SEEN
        for module in (disk_module, folders, disk_index):
            patch(module, os=faulty)
        disk_index._SEEN = 1.0
        try:
            yield
        finally:
            disk_module.os = folders.os = disk_index.os = os
            disk_index._SEEN = seen

    def read(self, key: Key, into: Bytes) -> bool:
        into[:] = 255
        with self._faults():
            return super().read(key, into)

    def write(self, key: Key, data: Bytes) -> None:
        if self._rng.random() < 0.5:
            self._paused_until = -float("inf")
        with self._faults():
            super().write(key, data)


def per_token(seconds: float) -> Callable[[int, int], float]:
    """Return a cost of computing that is the same for every token."""
    return lambda start, tokens: tokens * seconds


class Remote(KvConnector):
    """Blocks on another machine: a dictionary, whose answers arrive some calls of `deliver` later,
    in another order, and sometimes not at all.
    """

    name = "remote"
    bandwidth = 1e9

    def __init__(self, seed: int = 0, delay: int = 3, losing: float = 0.1) -> None:
        super().__init__()
        self.blocks: dict[Key, Bytes] = {}
        self._delay = delay
        self._losing = losing
        self._sent: list[tuple[int, Callable[[], None]]] = []  # due at which call, and what
        self._calls = 0
        self._rng = random.Random(seed)

    def lookup(self, key: Key) -> bool:
        return key in self.blocks

    def start_load_kv(self, key: Key, into: Bytes) -> None:
        def answer() -> None:
            ok = key in self.blocks and self._rng.random() >= self._losing
            into[:] = self.blocks[key] if ok else 255
            if not ok and self.blocks.pop(key, None) is not None:
                self.events.removed(key, self.name)
            self._finish_load(key, ok, 0.0)

        self._send(answer)

    def start_save_kv(self, key: Key, data: Bytes) -> None:
        def store() -> None:
            if key not in self.blocks:
                self.events.stored(key, self.name)
            self.blocks[key] = data
            self._saved.append(key)

        self._send(store)

    def _send(self, message: Callable[[], None]) -> None:
        self._sent.append((self._calls + self._rng.randint(1, self._delay), message))

    def deliver(self, all_of_it: bool = False) -> None:
        self._calls += 1
        due = [each for each in self._sent if all_of_it or each[0] <= self._calls]
        self._sent = [each for each in self._sent if each not in due]
        for _, message in due:
            message()

    def shutdown(self) -> None:
        self.deliver(True)


class Instant(Remote):
    """Answers at once, loses nothing, and keeps blocks in the exchange form."""

    def __init__(self, layout: KvLayout) -> None:
        super().__init__(losing=0.0)
        self._layout = layout

    def start_load_kv(self, key: Key, into: Bytes) -> None:
        into[:] = from_exchange(self._layout, key[1], self.blocks[key][None])[0]
        self._finish_load(key, True, 0.0)

    def start_save_kv(self, key: Key, data: Bytes) -> None:
        super().start_save_kv(key, to_exchange(self._layout, key[1], data[None])[0])

    def _send(self, message: Callable[[], None]) -> None:
        message()


class ToldConnectors(ConnectorManager):
    """Connectors that make progress when the engine takes a step or waits for them."""

    clock: VirtualClock
    workers: list[ToldWorker]

    def transfer(self) -> None:
        self._work(2)
        super().transfer()

    def let_load(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._work(1)

    def settle(self) -> None:
        """Let everything end that has been started."""
        for worker in self.workers:
            worker.run(len(worker.jobs))
        for each in self.all:
            if isinstance(each, Remote):
                each.deliver(True)
        if self.prefetcher is not None:
            self.prefetcher.poll()

    def _work(self, jobs: int) -> None:
        for worker in self.workers:
            worker.run(jobs)
        for each in self.all:
            if isinstance(each, Remote):
                each.deliver()


def eager_connectors(
    layout: KvLayout, host_blocks: int, *, disk: bool, remote: bool = False
) -> ConnectorManager:
    """Return connectors that always load: with threads of their own, or with another machine."""
    others: list[KvConnector] = [FakeDisk(layout.block_bytes)] if disk else []
    if remote:
        others.append(Instant(layout))
    cost = TransferCost(
        layout.block_bytes,
        layout.block_size / len(layout.groups),
        per_token(10.0),
        1,
        time.perf_counter,
    )
    memory = HostMemory(host_blocks, layout.block_bytes)
    return ConnectorManager(b"engine", memory, others, cost=cost)


def told_connectors(
    layout: KvLayout,
    host_blocks: int,
    *,
    disk: Disk | None,
    remote: Remote | None = None,
    clock: VirtualClock,
    engine: bytes = b"engine",
    seconds_per_token: float = 0.002,
) -> ToldConnectors:
    workers = [ToldWorker(), ToldWorker()]
    if disk is not None:
        disk._reader, disk._writer, disk._now = workers[0], workers[1], clock.now
    cost = TransferCost(
        layout.block_bytes,
        layout.block_size / len(layout.groups),
        per_token(seconds_per_token),
        1,
        clock.now,
    )
    connectors = ToldConnectors(
        engine,
        HostMemory(host_blocks, layout.block_bytes),
        [each for each in (disk, remote) if each is not None],
        cost=cost,
        now=clock.now,
    )
    connectors.clock, connectors.workers = clock, workers
    if connectors.prefetcher is not None:
        patch(connectors.prefetcher, wait=connectors.let_load)
    return connectors
