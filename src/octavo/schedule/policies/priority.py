"""Lower numbers first, as in vLLM, and whoever waits long enough comes to its turn.

A request counts as a level more urgent than its priority says for every ``ageing`` seconds that it
has stood in the queue. So:

- Next is who has the lowest level, and of one priority who came first. Behind newcomers of
  priority h, one of priority l waits (l - h) × ``ageing`` seconds at most.
- Whoever runs keeps the level it was let in with: it gives way to nobody of a priority that is not
  below it. Who came to its turn by waiting is not sent away again for the next newcomer.
- A priority alone, without what its waiting is worth, displaces: never among equals, so that two do
  not take turns in displacing each other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from octavo.schedule.policies.base import Line, Policy
from octavo.schedule.policies.fcfs import BY_ARRIVAL
from octavo.schedule.sequence import Sequence


class _Class:
    """Those of one priority that wait, in order of arrival."""

    __slots__ = ("line", "priority", "turn")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.line = Line(BY_ARRIVAL)
        self.turn = (0.0, priority)  # of its first; the lower, the sooner


class Priority(Policy):
    def __init__(self, ageing: float) -> None:
        """``ageing``: seconds of waiting that are worth a level."""
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
        waiting.line.push(seq)
        self._size += 1
        self._update(waiting)

    def remove(self, seq: Sequence) -> None:
        waiting = self._classes[seq.owner.request.priority]
        waiting.line.remove(seq)
        self._size -= 1
        self._update(waiting)

    def _update(self, waiting: _Class) -> None:
        """Its first may be another."""
        first = waiting.line.first
        if first is None:
            del self._classes[waiting.priority]
            del self._priorities[bisect_left(self._priorities, waiting.priority)]
            del self._turns[bisect_left(self._turns, waiting.turn)]
            return
        # At any time t its level is priority - (waited + t - queued) / ageing.
        turn = (waiting.priority * self._ageing + first.queued - first.waited, waiting.priority)
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
        return self._classes[self._turns[0][1]].line.first

    def challenger(self) -> Sequence | None:
        if not self._priorities:
            return None
        return self._classes[self._priorities[0]].line.first

    def displaces(self, challenger: Sequence, running: Sequence) -> bool:
        return challenger.owner.request.priority < self.level(running)

    def level(self, seq: Sequence) -> int:
        """Of one that runs."""
        return seq.owner.request.priority - int(seq.waited / self._ageing)

    def rank(self, seq: Sequence) -> tuple[int, tuple[int, int]]:
        return self.level(seq), seq.order

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._classes.values():
            yield from waiting.line
