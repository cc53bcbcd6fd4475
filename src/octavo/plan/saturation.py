"""Whether a load is more than an engine can serve.

Beyond saturation work comes faster than it is done: the queue grows as long as requests come, and
every latency is a matter of how long the load lasts. A burst makes a queue, too, but it goes away.
So a load is called beyond saturation if

- somebody has been waiting without a break through the last quarter of the arrivals' time, and
- after the last arrival the queue takes more than a twentieth of that time to empty: the load came
  5 % or more too fast;
- or more than a twentieth of the requests were refused because the queue was full.

With --max-concurrency a client holds requests back, and the queue is there; it is looked at in the
same way. Requests that all come at once have no rate; they are beyond saturation if some still wait
in the engine's queue when the first has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.plan.replay import QUEUE_FULL
from octavo.plan.series import Series
from octavo.workload.metrics import Record

TOO_MUCH = 0.05  # of the arrivals' time, or of the requests
LAST = 0.25  # of the arrivals' time


class Saturation(NamedTuple):
    """The verdict, and what it rests on; times in seconds."""

    saturated: bool
    why: str  # for people, with how long the client held requests back, if it did
    queue_seconds: float  # up to the last arrival, that somebody had been waiting without a break
    clearing_seconds: float  # from the last arrival to the end of the queue
    refused: int  # because the queue was full
    held: int  # back by the client, until others had ended
    holding_seconds: float  # up to the last arrival, that the client had held some without a break


def saturation(records: Sequence[Record], series: Series) -> Saturation:
    """Whether a load was beyond saturation, by the rules above. ``records`` are all of its requests
    in order of arrival; ``series`` watched the same run.
    """
    span = series.span
    served = [record for record in records if record.success]
    refused = sum(record.reason == QUEUE_FULL for record in records)
    queued = max(0.0, span - series.queue_since)
    clearing = max((record.start + record.waited - span for record in served), default=0.0)
    clearing = max(0.0, clearing)
    held = [record.queue_time for record in records if record.queue_time > 0]
    holding = max(0.0, span - _held_since(records, span))

    def verdict(saturated: bool, why: str) -> Saturation:
        if held:
            why += (
                f"; the client held back {len(held)} of {len(records)} requests, for "
                f"{sum(held) / len(held):.1f} s on average and up to {max(held):.1f} s"
            )
        return Saturation(saturated, why, queued, clearing, refused, len(held), holding)

    if refused > TOO_MUCH * len(records):
        return verdict(
            True, f"{refused} of {len(records)} requests were refused because the queue was full"
        )
    if span == 0:
        first = min((record.latency for record in served), default=0.0)
        if max((record.waited for record in served), default=0.0) > first:
            return verdict(
                True,
                "all requests come at once, and some still wait when the first has ended: the "
                "throughput is what the engine can do",
            )
        at_once = "as many run as are sent" if held else "and run at once"
        return verdict(False, f"all requests come at once, {at_once}")
    if queued >= LAST * span and clearing > TOO_MUCH * span:
        return verdict(
            True,
            f"the queue was never empty in the last {queued:.0f} of {span:.0f} s, and takes "
            f"{clearing:.0f} s more to empty: latencies grow as long as the load goes on",
        )
    if holding >= LAST * span and clearing > TOO_MUCH * span:
        return verdict(
            True,
            f"with so many at a time requests waited to be sent throughout the last {holding:.0f} "
            f"of {span:.0f} s, and it takes {clearing:.0f} s more to send all",
        )
    if queued < LAST * span:
        return verdict(False, "the queue empties again and again")
    return verdict(False, f"the queue is empty {clearing:.1f} s after the last arrival")


def _held_since(records: Sequence[Record], span: float) -> float:
    """Since when, as of ``span``, the client has been holding back requests without a break."""
    since = span
    for record in reversed(records):  # they are sent in order of arrival
        if record.queue_time > 0:
            if record.start < since:
                break
            since = min(since, record.start - record.queue_time)
    return since
