"""Tiers of the prefix cache whose disk is a dictionary and whose threads run when they are told."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.engine.clock import VirtualClock
from octavo.kv_cache import disk, folders, ledger
from octavo.kv_cache.arena import Bytes
from octavo.kv_cache.digest import Key
from octavo.kv_cache.disk import HEADER_BYTES, Disk
from octavo.kv_cache.host_memory import HostMemory
from octavo.kv_cache.layout import KvLayout
from octavo.kv_cache.tiers import Tiers
from octavo.kv_cache.worker import Job, ThreadWorker


class ToldWorker:
    """Does its jobs when asked to."""

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
        self.budget = 1 << 30
        self.block_bytes = block_bytes
        self.bytes_read = self.bytes_written = 0
        self.corrupted = self.failed_reads = self.failed_writes = 0
        self.files: dict[Key, Bytes] = {}
        self._rng = random.Random(seed)

    @property
    def used(self) -> int:
        return len(self.files) * self.block_bytes

    def __len__(self) -> int:
        return len(self.files)

    def holds(self, key: Key) -> bool:
        return key in self.files

    def read(self, key: Key, into: Bytes) -> bool:
        if self._rng.random() < 0.1 or key not in self.files:
            self.files.pop(key, None)
            into[:] = 255
            self.corrupted += 1
            return False
        into[:] = self.files[key]
        self.bytes_read += self.block_bytes
        return True

    def write(self, key: Key, data: Bytes) -> None:
        if self._rng.random() < 0.9:
            self.files[key] = data.copy()
            self.bytes_written += self.block_bytes


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
    """The tier on a real disk, with a system that has faults: for one thread."""

    def __init__(self, block_bytes: int, files: int, now: Callable[[], float]) -> None:
        self._own = tempfile.TemporaryDirectory()
        budget = files * (HEADER_BYTES + block_bytes)
        super().__init__(Path(self._own.name), b"engine", block_bytes, budget, now=now)
        self._rng = random.Random(block_bytes)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        faulty = FaultyOs(self._rng)
        disk.os = folders.os = ledger.os = faulty  # type: ignore[assignment]
        try:
            yield
        finally:
            disk.os = folders.os = ledger.os = os

    def read(self, key: Key, into: Bytes) -> bool:
        into[:] = 255
        with self._faults():
            return super().read(key, into)

    def write(self, key: Key, data: Bytes) -> None:
        if self._rng.random() < 0.5:
            self._paused_until = -float("inf")
        with self._faults():
            super().write(key, data)


class PerToken:
    """Every token takes as long."""

    def __init__(self, seconds: float) -> None:
        self.per_token = seconds

    def seconds(self, start: int, tokens: int) -> float:
        return tokens * self.per_token


class ToldTiers(Tiers):
    """Whoever waits for the disk lets it work, for a while of the clock."""

    clock: VirtualClock
    workers: list[ToldWorker]

    def transfer(self) -> None:
        for worker in self.workers:
            worker.run(2)
        super().transfer()

    def let_read(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for worker in self.workers:
            worker.run(1)

    def settle(self) -> None:
        """Let everything end that is under way."""
        for worker in self.workers:
            worker.run(len(worker.jobs))
        if self.reading is not None:
            self.reading.poll()


def eager_tiers(layout: KvLayout, host_blocks: int, *, disk: bool) -> Tiers:
    """With threads of their own, and blocks that are always worth loading."""
    return Tiers(
        b"engine",
        HostMemory(host_blocks, layout.block_bytes),
        FakeDisk(layout.block_bytes) if disk else None,
        reader=ThreadWorker("read"),
        writer=ThreadWorker("write"),
        tokens_per_block=layout.block_size / len(layout.groups),
        computing=PerToken(10.0),
    )


def slow_tiers(
    layout: KvLayout,
    host_blocks: int,
    *,
    disk: Disk | None,
    clock: VirtualClock,
    engine: bytes = b"engine",
    seconds_per_token: float = 0.002,
) -> ToldTiers:
    workers = [ToldWorker(), ToldWorker()]
    tiers = ToldTiers(
        engine,
        HostMemory(host_blocks, layout.block_bytes),
        disk,
        reader=workers[0],
        writer=workers[1],
        tokens_per_block=layout.block_size / len(layout.groups),
        computing=PerToken(seconds_per_token),
        now=clock.now,
    )
    tiers.clock, tiers.workers = clock, workers
    if tiers.reading is not None:
        tiers.reading.wait = tiers.let_read  # type: ignore[method-assign]
    return tiers
