"""The waiting sequences: the policy's queue, and those whose prefix is first read from disk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from octavo.kv_cache.cache import KvCache
from octavo.scheduler.policies.base import Policy
from octavo.scheduler.sequence import Sequence, Status

_READ_FOR = 8  # waiting sequences: what they need is read from disk before their turn


class WaitingQueue:
    """All sequences that wait to be admitted, new or preempted."""

    def __init__(self, policy: Policy, kv: KvCache) -> None:
        self.fetching: list[Sequence] = []  # not in the policy's queue yet: the disk is read first
        self.tokens = 0  # of all
        self._size = 0
        self._policy = policy
        self._kv = kv

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._policy
        yield from self.fetching

    def add(self, seq: Sequence, now: float) -> None:
        """Queue a sequence that is new. If this fails, nothing of it is left."""
        try:
            if len(self) < _READ_FOR:
                self._prefetch(seq, now)
            self.push(seq, seq.owner.arrival)
        except BaseException:
            others = [other for other in self._policy if other is not seq]
            self._policy.clear()
            for other in others:
                self._policy.push(other)
            self.fetching = [other for other in self.fetching if other is not seq]
            self.end_prefetch(seq)
            raise

    def push(self, seq: Sequence, now: float) -> None:
        """Queue a sequence, now or when what is read for it has arrived."""
        seq.queued = now
        if seq.prefetch is None:
            seq.status = Status.WAITING
            self._policy.push(seq)
        else:
            seq.status = Status.FETCHING
            self.fetching.append(seq)
        self.tokens += len(seq.token_ids)
        self._size += 1

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that has ended, or is admitted. What was read for it stays until
        `end_prefetch`.
        """
        if seq.status is Status.FETCHING:
            self.fetching.remove(seq)
        else:
            self._policy.remove(seq)
        self.tokens -= len(seq.token_ids)
        self._size -= 1

    def clear(self) -> None:
        self._policy.clear()
        self.fetching.clear()
        self.tokens = self._size = 0

    def poll(self, *, may_read: bool) -> None:
        """Queue the sequences for which all has been read, or for which reading takes longer than
        computing would. ``may_read``: also begin to read for those that are near their turn.
        """
        prefetcher, policy = self._kv.prefetcher, self._policy
        if prefetcher is None:
            return
        if may_read and prefetcher.capacity > 0 and policy.head() is not None:
            for seq in [*islice(policy.in_turn(), _READ_FOR)]:
                if seq.sought:
                    continue
                self._prefetch(seq, policy.now)
                if seq.prefetch is not None:
                    policy.remove(seq)
                    seq.status = Status.FETCHING
                    self.fetching.append(seq)
        prefetcher.poll()
        for seq in self.fetching[:]:
            if seq.prefetch is None or prefetcher.is_ready(seq.prefetch, policy.now):
                policy.push(seq)
                seq.status = Status.WAITING
                self.fetching.remove(seq)
                if seq.prefetch is not None:
                    prefetcher.count(seq.prefetch)

    def _prefetch(self, seq: Sequence, now: float) -> None:
        """Begin to read what is on disk of its tokens, once: when it is preempted they are in the
        pool, and go to host memory from there. What is evicted while it waits is not read again:
        others would have to be admitted before it meanwhile.
        """
        prefetcher = self._kv.prefetcher
        if prefetcher is None or seq.sought or prefetcher.capacity <= 0:
            return
        seq.sought = True
        if not seq.owner.scores_prompt:
            seq.prefetch = self._kv.prefetch(seq.token_ids, seq.owner.scheduling.cache_salt, now)

    def end_prefetch(self, seq: Sequence) -> None:
        """Let what was read for it be evicted again."""
        if seq.prefetch is not None and (prefetcher := self._kv.prefetcher) is not None:
            prefetcher.end(seq.prefetch)
            seq.prefetch = None
