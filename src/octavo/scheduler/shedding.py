"""Dropping waiting requests: those that have waited too long and, if asked for, those that can no
longer meet their target.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import TYPE_CHECKING

from octavo.scheduler.request import RequestRecord

if TYPE_CHECKING:
    from octavo.scheduler.scheduler import Scheduler

_FEW = 64  # entries that may be over

# Clock seconds when it is looked at, a number that orders equals, the request, and whether it is
# checked for its target; else for its time in the queue.
_Entry = tuple[float, int, RequestRecord, bool]


def _is_over(entry: _Entry) -> bool:
    """Return whether the request has come in time, or has ended."""
    _, _, record, for_target = entry
    came = record.first_token if for_target else record.scheduled
    return came is not None or record.outcome is not None


class Shedding:
    """Looks at each request when its time may have come, and not before: log n of the waiting
    requests for each that comes or goes.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._max_queue_time = scheduler.config.max_queue_time
        self._shed_late = scheduler.config.shed_late
        self._scheduler = scheduler
        self._entries: list[_Entry] = []
        self._num_alive = 0  # of these, when they were last counted
        self._serial = count()

    @property
    def is_asked(self) -> bool:
        return self._shed_late or self._max_queue_time is not None

    def add(self, record: RequestRecord) -> None:
        if self._max_queue_time is not None:
            at = record.arrival + self._max_queue_time
            heappush(self._entries, (at, next(self._serial), record, False))
        if self._shed_late and (due := record.first_token_due) is not None:
            # The cached prefix is looked up then: it may be another by that time.
            at = due - self._scheduler.rates.least_seconds(record.prompt_tokens)
            heappush(self._entries, (at, next(self._serial), record, True))
        if len(self._entries) > 2 * self._num_alive + _FEW:
            self._entries = [entry for entry in self._entries if not _is_over(entry)]
            heapify(self._entries)
            self._num_alive = len(self._entries)

    def clear(self) -> None:
        """Forget all requests, when none is left, so that no ended one is kept."""
        self._entries.clear()
        self._num_alive = 0

    def due(self, now: float) -> list[tuple[RequestRecord, str]]:
        """Return the requests to drop at ``now``, each with the reason."""
        found: dict[str, tuple[RequestRecord, str]] = {}
        while self._entries and self._entries[0][0] < now:
            _, serial, record, for_target = entry = self._entries[0]
            if not (_is_over(entry) or record.request_id in found):
                due = record.first_token_due if for_target else None
                if due is None:
                    why = (
                        f"it stood in the queue for {now - record.arrival:.3g} s, more than "
                        f"{self._max_queue_time:g} s"
                    )
                else:
                    missing = self._scheduler.missing_before_first(record)
                    at = due - self._scheduler.rates.least_seconds(missing)
                    if at >= now:  # a part of it is computed, or cached
                        heapreplace(self._entries, (at, serial, record, True))
                        continue
                    why = (
                        f"its first token was due {due - record.arrival:.3g} s after arrival, and "
                        f"{missing} tokens are still to be computed "
                        f"{now - record.arrival:.3g} s after it"
                    )
                found[record.request_id] = record, f"shed: {why}"
            heappop(self._entries)
        return list(found.values())
