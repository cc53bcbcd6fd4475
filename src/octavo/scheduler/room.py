"""Who fits beside those who run, and who of these gives way. It looks, and others do; what it keeps
is only what need not be looked at again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from itertools import chain, takewhile
from typing import NamedTuple

from octavo.kv_cache.cache import KvCache
from octavo.kv_cache.prefix_lookup import Hit
from octavo.scheduler import admission
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.policies.base import Policy
from octavo.scheduler.sequence import Sequence


class WayIn(NamedTuple):
    """What is cached of a sequence, who gives way to it, and who more would."""

    hit: Hit
    leaving: list[Sequence]
    others: list[Sequence]


class Room:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KvCache,
        policy: Policy,
        decoding: list[Sequence],
        prefilling: list[Sequence],
    ) -> None:
        """``decoding``, ``prefilling``: who runs; the scheduler's own lists."""
        self._config = config
        self._kv = kv
        self._policy = policy
        self._decoding = decoding
        self._prefilling = prefilling
        # The order of who could not displace enough of them, and how many blocks there were then.
        self._short: tuple[tuple[int, int], int] | None = None

    def last(self, served: Collection[Sequence]) -> Sequence:
        """Who gives way: the running sequence of the highest rank, without those ``served``, that
        have their chunk of the step.
        """
        running = chain(self._decoding, self._prefilling)
        return max((seq for seq in running if seq not in served), key=self._policy.rank)

    def fits(self, seq: Sequence, hit: Hit, leaving: Items[Sequence] = ()) -> bool:
        """Whether a sequence may join those who run, without those ``leaving``. Beside its own
        blocks, those promised to prompts under way and the next block of everyone must be free:
        else it, or another, would soon be preempted again. Where each has its own reserved, nobody
        grows.
        """
        kv = self._kv
        free = kv.pool.num_free + sum(kv.held_blocks(other.slot) for other in leaving)
        if self._config.memory == "reserve":
            longest = len(seq.token_ids) + seq.num_to_come - 1
            return admission.needed_blocks(longest, self._config, kv.layout) <= free
        need = kv.peak_blocks(len(seq.token_ids)) - kv.blocks_in_use(hit)
        promised = sum(
            max(0, kv.peak_blocks(len(other.token_ids)) - kv.held_blocks(other.slot))
            for other in self._prefilling
            if other not in leaving
        )
        staying = len(self._decoding) + len(self._prefilling) - len(leaving)
        return need + promised + staying * len(kv.layout.groups) <= free

    def way_in(
        self, seq: Sequence, lookup: Callable[[Sequence], Hit], free_slots: int
    ) -> WayIn | None:
        """How one that waits can be let in, in the places and blocks of as few as will do of those
        that it displaces; None if all of them would not do. Nobody looks twice for that as long as
        no more blocks could be had: ``lookup`` is asked where it is not known.
        """
        policy, kv = self._policy, self._kv
        running = sorted(chain(self._decoding, self._prefilling), key=policy.rank, reverse=True)
        displaced = list(takewhile(lambda other: policy.displaces(seq, other), running))
        blocks = kv.pool.num_free + sum(kv.held_blocks(other.slot) for other in displaced)
        if not displaced or self._short == (seq.order, blocks):
            return None
        hit = lookup(seq)
        slots = 1 + len(seq.followers) - free_slots

        def will_do(count: int) -> bool:
            leaving = displaced[:count]
            freed = sum(1 + len(other.followers) for other in leaving)
            return freed >= slots and self.fits(seq, hit, leaving)

        count = bisect_left(range(len(displaced) + 1), True, key=will_do)
        if seq is not policy.head():  # nor does it take what is free from under the head
            count = max(count, 1)
        if count > len(displaced):
            self._short = seq.order, blocks
            return None
        return WayIn(hit, displaced[:count], displaced[count:])

    def forget(self) -> None:
        """All who ran have been sent away."""
        self._short = None
