"""Who is sent away rather than kept waiting: whoever stands in the queue for too long, and, when
asked, whoever can no longer be in time.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from octavo.scheduler.policies.deadline import first_due
from octavo.scheduler.sequence import RequestState

_FORGETTING = 0.999  # of the fastest rate seen, with each step
_FEW = 64  # entries that may be over


class _Entry(NamedTuple):
    at: float  # clock seconds when it is looked at again
    serial: int
    state: RequestState
    late: bool  # by its target; else by its time in the queue

    @property
    def is_over(self) -> bool:
        """Whether the request has come in time, or has ended."""
        record = self.state.record
        came = record.first_token if self.late else record.scheduled
        return came is not None or record.outcome is not None


class Shedding:
    """Looks at each request when its time may have come, and not before: log n of those that wait
    for each that comes or goes.
    """

    def __init__(
        self,
        max_queue_time: float | None,
        shed_late: bool,
        missing: Callable[[RequestState], int],
    ) -> None:
        """``max_queue_time``: seconds in the queue. ``missing``: how many tokens are still to be
        computed before a request's first, as the cache is now.
        """
        self._max_queue_time = max_queue_time
        self._shed_late = shed_late
        self._missing = missing
        self._entries: list[_Entry] = []
        self._alive = 0  # of these, when they were counted last
        self._serial = 0
        self._rate = 0.0  # the fastest of late that prompts were computed at; 0: unknown

    @property
    def is_asked(self) -> bool:
        return self._shed_late or self._max_queue_time is not None

    def add(self, state: RequestState) -> None:
        record = state.record
        if self._max_queue_time is not None:
            self._push(record.arrival + self._max_queue_time, state, late=False)
        if self._shed_late and (due := first_due(record)) is not None:
            # What the cache has of it is looked up then: it may be another by that time.
            self._push(due - self._seconds(record.prompt_tokens), state, late=True)

    def _push(self, at: float, state: RequestState, *, late: bool) -> None:
        self._serial += 1
        heappush(self._entries, _Entry(at, self._serial, state, late))
        if len(self._entries) > 2 * self._alive + _FEW:
            self._entries = [entry for entry in self._entries if not entry.is_over]
            heapify(self._entries)
            self._alive = len(self._entries)

    def clear(self) -> None:
        """There is nobody left, and nobody who has ended is kept."""
        self._entries.clear()
        self._alive = 0

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step with prompts in it."""
        if seconds > 0:
            kept = self._rate * _FORGETTING
            self._rate = max(kept, num_tokens / seconds)

    def due(self, now: float) -> list[tuple[RequestState, str]]:
        """Who is to be sent away at ``now``, each with the reason."""
        found: list[tuple[RequestState, str]] = []
        gone: set[int] = set()
        while self._entries and self._entries[0].at < now:
            entry = self._entries[0]
            state, record = entry.state, entry.state.record
            if entry.is_over or id(state) in gone:
                heappop(self._entries)
                continue
            if entry.late:
                due = first_due(record)
                assert due is not None
                missing = self._missing(state)
                at = due - self._seconds(missing)
                if at >= now:  # it has been computed in part, or is cached
                    heapreplace(self._entries, entry._replace(at=at))
                    continue
                why = (
                    f"its first token was due {due - record.arrival:.3g} s after arrival, and "
                    f"{missing} tokens are still to be computed "
                    f"{now - record.arrival:.3g} s after it"
                )
            else:
                why = (
                    f"it stood in the queue for {now - record.arrival:.3g} s, more than "
                    f"{self._max_queue_time:g} s"
                )
            heappop(self._entries)
            gone.add(id(state))
            found.append((state, f"shed: {why}"))
        return found

    def _seconds(self, num_tokens: int) -> float:
        """What it takes at least to compute so many."""
        return num_tokens / self._rate if self._rate else 0.0
