"""Whether a load is more than an engine can serve.

Beyond saturation work comes faster than it is done: the queue grows as long as requests come, and
every latency is a matter of how long the load lasts. A burst makes a queue, too, but it goes away.
So a load is called beyond saturation if

- somebody has been waiting without a break through the last quarter of the arrivals' time, and
- after the last arrival the queue takes more than a twentieth of that time to empty: the load came
  5 % or more too fast;
- or more than a twentieth of the requests were refused because the queue was full.

Requests that all come at once have no rate; they are beyond saturation if some still wait when the
first has ended. Where they wait to be sent (--max-concurrency) they cannot outrun the engine.
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
    saturated: bool
    why: str
    queue_seconds: float  # up to the last arrival, that somebody had been waiting without a break
    clearing_seconds: float  # from the last arrival to the end of the queue
    refused: int  # because the queue was full


def saturation(records: Sequence[Record], series: Series) -> Saturation:
    span = series.span
    served = [record for record in records if record.success]
    refused = sum(record.reason == QUEUE_FULL for record in records)
    queued = max(0.0, span - series.queue_since)
    clearing = max((record.start + record.waited - span for record in served), default=0.0)
    clearing = max(0.0, clearing)

    def verdict(saturated: bool, why: str) -> Saturation:
        return Saturation(saturated, why, queued, clearing, refused)

    if refused > TOO_MUCH * len(records):
        return verdict(
            True, f"{refused} of {len(records)} requests were refused because the queue was full"
        )
    if any(record.queue_time > 0 for record in served):
        return verdict(False, "requests wait to be sent until others have ended")
    if span == 0:
        first = min((record.latency for record in served), default=0.0)
        if clearing > first:
            return verdict(
                True,
                "all requests come at once, and some still wait when the first has ended: the "
                "throughput is what the engine can do",
            )
        return verdict(False, "all requests come at once and run at once")
    if queued >= LAST * span and clearing > TOO_MUCH * span:
        return verdict(
            True,
            f"the queue was never empty in the last {queued:.0f} of {span:.0f} s, and takes "
            f"{clearing:.0f} s more to empty: latencies grow as long as the load goes on",
        )
    if queued < LAST * span:
        return verdict(False, "the queue empties again and again")
    return verdict(False, f"the queue is empty {clearing:.1f} s after the last arrival")
