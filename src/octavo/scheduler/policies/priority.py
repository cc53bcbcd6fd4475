"""Lower numbers first, as in vLLM, and whoever stands in line long enough comes to its turn.

Those of one priority stand in a line, in order of arrival. The first of a line counts as a level
more urgent for every ``ageing`` seconds that it has stood there. So:

- Next is the first of lowest level. Under a stream of newcomers of priority h that never ends, one
  of priority l > h comes to its turn every (l - h) × ``ageing`` seconds at the latest: all of them
  in the end, but however many have gathered, they do not push aside those more urgent.
- Whoever runs keeps the level it was let in with, and gives way only to a priority below it: who
  came to its turn by standing in line is not sent away for the next newcomer.
- A priority alone displaces, without what its waiting is worth: never among equals, so that two do
  not take turns in displacing each other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import chain
from math import inf

from octavo.scheduler.policies.base import Policy, Queue
from octavo.scheduler.sequence import Sequence


class _Class(Queue):
    """Those of one priority that wait."""

    __slots__ = ("priority", "turn")

    def __init__(self, priority: int) -> None:
        super().__init__()
        self.priority = priority
        self.turn = (0.0, priority)  # the lower, the sooner


class Priority(Policy):
    def __init__(self, ageing: float) -> None:
        """``ageing``: seconds at the head of its line that are worth a level."""
        self._ageing = ageing
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []  # of the classes, sorted
        self._turns: list[tuple[float, int]] = []  # of the classes, sorted
        self._size = 0

    def push(self, seq: Sequence) -> None:
        priority = seq.owner.request.priority
        waiting = self._classes.get(priority)
        if waiting is None:
            waiting = self._classes[priority] = _Class(priority)
            insort(self._priorities, priority)
            insort(self._turns, waiting.turn)
        waiting.push(seq, self.now)
        self._size += 1
        self._update(waiting)

    def remove(self, seq: Sequence) -> None:
        waiting = self._classes[seq.owner.request.priority]
        waiting.remove(seq, self.now)
        self._size -= 1
        self._update(waiting)

    def in_turn(self) -> Iterator[Sequence]:
        # By the first of each, as `head` goes: who follows it may have stood longer before.
        heap: list[tuple[float, int, Sequence, Iterator[tuple[float, Sequence]]]] = []
        for turn, priority in chain(self._turns, [(inf, 0)]):  # a class when it comes to its turn
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
                others = self._classes[priority].turns(self.now)
                _, first = next(others)
                heappush(heap, (turn, priority, first, others))

    def _update(self, waiting: _Class) -> None:
        """Its first may be another."""
        if not waiting:
            del self._classes[waiting.priority]
            del self._priorities[bisect_left(self._priorities, waiting.priority)]
            del self._turns[bisect_left(self._turns, waiting.turn)]
            return
        # At any time t its level is priority - (t - began) / ageing.
        turn = (waiting.priority * self._ageing + waiting.began, waiting.priority)
        if turn != waiting.turn:
            del self._turns[bisect_left(self._turns, waiting.turn)]
            insort(self._turns, turn)
            waiting.turn = turn

    def clear(self) -> None:
        self._classes.clear()
        self._priorities.clear()
        self._turns.clear()
        self._size = 0

    def head(self) -> Sequence | None:
        if not self._turns:
            return None
        return self._classes[self._turns[0][1]].first

    def challenger(self) -> Sequence | None:
        if not self._priorities:
            return None
        return self._classes[self._priorities[0]].first

    def displaces(self, challenger: Sequence, running: Sequence) -> bool:
        return challenger.owner.request.priority < self.level(running)

    def level(self, seq: Sequence) -> int:
        """Of one that runs."""
        return seq.owner.request.priority - int(seq.stood / self._ageing)

    def rank(self, seq: Sequence) -> tuple[int, tuple[int, int]]:
        return self.level(seq), seq.order

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._classes.values():
            yield from waiting
