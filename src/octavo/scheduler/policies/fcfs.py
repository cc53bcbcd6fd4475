"""First come, first served: by arrival, and whoever was preempted comes back to its place."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.scheduler.policies.base import BY_ARRIVAL, Line, Policy
from octavo.scheduler.sequence import Sequence


class FirstCome(Policy):
    """Whoever runs came before all who wait: it was let in by this order, and gives way by it."""

    displaces_any = False

    def __init__(self) -> None:
        self._line = Line(BY_ARRIVAL)

    def push(self, seq: Sequence) -> None:
        self._line.push(seq)

    def remove(self, seq: Sequence) -> None:
        self._line.remove(seq)

    def clear(self) -> None:
        self._line.clear()

    def head(self) -> Sequence | None:
        return self._line.first

    def rank(self, seq: Sequence) -> tuple[int, int]:
        return seq.order

    def displaces(self, challenger: Sequence, running: Sequence) -> bool:
        return False

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)
