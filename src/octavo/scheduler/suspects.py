"""Who is tried after a step that failed, when nobody can see whose fault it was.

Each of its requests runs alone until it has drawn a token. One that fails alone is at fault, the
others are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octavo.scheduler.sequence import RequestState


class Suspects:
    """Those who are still to be tried. False if there are none."""

    def __init__(self) -> None:
        self._line: deque[RequestState] = deque()

    def accuse(self, states: Iterable[RequestState]) -> None:
        """These, in order of arrival, and nobody else."""
        self._line = deque(sorted(states, key=lambda state: state.sequences[0].order))

    @property
    def tried(self) -> RequestState | None:
        """Who runs alone, if anybody is to; whoever has ended is not tried any more."""
        while self._line and self._line[0].num_unfinished == 0:
            self._line.popleft()
        return self._line[0] if self._line else None

    def acquit(self) -> None:
        """Who is tried has drawn a token."""
        self._line.popleft()

    def __bool__(self) -> bool:
        return self.tried is not None
