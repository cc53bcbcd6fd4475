"""Lower numbers first, as in vLLM, and no request waits for ever.

Each priority has a queue in order of arrival. The first of a queue counts as one level more urgent
for every ``priority_ageing`` seconds that it has been the first. Consequences:

- Next is the first with the lowest level. Under an endless stream of newcomers of priority h, one
  request of priority l > h is admitted at least every (l - h) × ``priority_ageing`` seconds. So all
  of them are served in the end, but however many gather, they do not push aside more urgent
  requests.
- A running sequence keeps the level it was admitted with and is preempted only for a priority
  below that: a sequence that was admitted because of its long wait is not preempted for the next
  newcomer.
- Only the priority preempts, not the time waited, and never among equals: so two sequences do not
  preempt each other by turns.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any

from octavo.scheduler.policies.base import AgeingQueue, Policy

if TYPE_CHECKING:
    from octavo.scheduler.request import RequestRecord
    from octavo.scheduler.sequence import Sequence


class Priority(Policy):
    name = "priority"
    help = "lower numbers first"
    request_fields = frozenset({"priority"})
    preempts = True
    replaces = True

    def __init__(self, priority_ageing: float = 30.0) -> None:
        """``priority_ageing``: seconds at the head of its queue that are worth a level."""
        self._ageing = priority_ageing
        self._queues: dict[int, AgeingQueue] = {}  # by priority
        self._priorities: list[int] = []  # of the queues, sorted
        self._turns: list[tuple[float, int]] = []  # of the queues, sorted: the lower, the sooner

    def push(self, seq: Sequence) -> None:
        self._change(seq, AgeingQueue.push)

    def remove(self, seq: Sequence) -> None:
        self._change(seq, AgeingQueue.remove)

    def _change(self, seq: Sequence, change: Callable[[AgeingQueue, Sequence], None]) -> None:
        """Change the queue of a sequence's priority, whose turn may be another then."""
        priority = seq.owner.scheduling.priority
        known = self._queues.get(priority)
        queue = AgeingQueue(self) if known is None else known
        before = self._turn(priority, queue)
        change(queue, seq)
        if known is None:
            self._queues[priority] = queue
            insort(self._priorities, priority)
        else:
            del self._turns[bisect_left(self._turns, before)]
        if queue:
            insort(self._turns, self._turn(priority, queue))
        else:
            del self._queues[priority]
            del self._priorities[bisect_left(self._priorities, priority)]

    def _turn(self, priority: int, queue: AgeingQueue) -> tuple[float, int]:
        # At any time t the level of its first is priority - (t - began) / ageing.
        return priority * self._ageing + queue.began, priority

    def clear(self) -> None:
        self._queues.clear()
        self._priorities.clear()
        self._turns.clear()

    def head(self) -> Sequence | None:
        return self._queues[self._turns[0][1]].first if self._turns else None

    def in_turn(self) -> Iterator[Sequence]:
        # By the first of each queue, as `head` goes: a later one may have been the first before.
        heap: list[tuple[float, int, Sequence, Iterator[tuple[float, Sequence]]]] = []
        for turn, priority in chain(self._turns, [(inf, 0)]):  # a queue when its turn comes
            while heap and heap[0][:2] < (turn, priority):
                _, level, seq, others = heap[0]
                yield seq
                following = next(others, None)
                if following is None:
                    heappop(heap)
                else:
                    began, seq = following
                    heapreplace(heap, (level * self._ageing + began, level, seq, others))
            if turn < inf:
                others = self._queues[priority].turns()
                _, first = next(others)
                heappush(heap, (turn, priority, first, others))

    def rank(self, seq: Sequence) -> Any:
        return self._level(seq), seq.order

    def preemptor(self) -> Sequence | None:
        return self._queues[self._priorities[0]].first if self._priorities else None

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.owner.scheduling.priority < self._level(running)

    def _level(self, seq: Sequence) -> int:
        """Return the level that a running sequence was admitted with."""
        return seq.owner.scheduling.priority - int(seq.stood / self._ageing)

    def replacement_key(self, record: RequestRecord) -> float:
        """Here the whole wait counts, ``priority_ageing`` seconds of it as one level, and not only
        the time at the head of a queue: a request that has waited long enough keeps its place.
        """
        return record.scheduling.priority * self._ageing + record.arrival

    def ahead_of(self, record: RequestRecord) -> list[Sequence]:
        return [seq for seq in self if seq.owner.scheduling.priority <= record.scheduling.priority]

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue
