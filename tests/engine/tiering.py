"""Tiers of the prefix cache whose disk is a dictionary and whose threads run when they are told."""

from __future__ import annotations

import random
from collections import deque

from octavo.engine.clock import VirtualClock
from octavo.kv.digest import Key
from octavo.kv.disk import Bytes, Disk
from octavo.kv.host_memory import HostMemory
from octavo.kv.layout import KvLayout
from octavo.kv.tiers import Tiers
from octavo.kv.worker import Job, ThreadWorker


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

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for worker in self.workers:
            worker.run(1)

    def settle(self) -> None:
        """Let everything end that is under way."""
        for worker in self.workers:
            worker.run(len(worker.jobs))
        self.poll()


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
    disk: bool,
    clock: VirtualClock,
    seconds_per_token: float = 0.002,
) -> ToldTiers:
    block_bytes = layout.block_bytes
    workers = [ToldWorker(), ToldWorker()]
    tiers = ToldTiers(
        b"engine",
        HostMemory(host_blocks, block_bytes),
        FakeDisk(block_bytes) if disk else None,
        reader=workers[0],
        writer=workers[1],
        tokens_per_block=layout.block_size / len(layout.groups),
        computing=PerToken(seconds_per_token),
        now=clock.now,
    )
    tiers.clock, tiers.workers = clock, workers
    return tiers
