"""Whether a load is more than an engine can serve, measured by the work in the system.

Work is what requests cost a full engine, in seconds of its time (tools/plan/capacity.py). Beyond
saturation it comes faster than it is done: what is left to do grows as long as requests come,
whether they wait in the queue, run more and more slowly beside each other, or are held back by the
client. ``headroom`` is capacity ÷ offered load; below 1 the load is beyond saturation.

The offered load is that of the whole time of arrivals. If that could be done, but work in the
system grew in the second half by more than a tenth of what came in then, and more came in than can
be done, it is that half's. A burst makes work grow, too, but within what the engine can do in that
time.

Requests that all come at once have no rate. They are beyond saturation if some still wait in the
engine's queue when the first ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.tools.plan.capacity import Capacity, work_of
from octavo.tools.plan.load_replay import QUEUE_FULL
from octavo.tools.plan.series import GAUGES
from octavo.tools.plan.simulation import Simulation
from octavo.words import number

GROWN = 0.1  # of the work that came in


class Saturation(NamedTuple):
    """The verdict, and what it rests on."""

    saturated: bool
    headroom: float | None  # None: there is no rate, or the capacity is not known
    why: str  # for people, with how long the client held requests back, if it did
    offered: float | None  # requests of this mix a second; None: all come at once
    over: str  # the time that this is of: "the load", or "the load's second half"
    capacity: float | None  # requests a second of the same mix
    work_at_half: float  # seconds of work in the system, at half the time of the last arrival
    work_at_end: float  # and at that of the last arrival
    refused: int  # because the queue was full
    held: int  # back by the client, until others had ended

    @property
    def room(self) -> str:
        """The headroom, and what it is the ratio of; "" where there is none."""
        if self.headroom is None or self.capacity is None or self.offered is None:
            return ""
        return (
            f"{number(self.headroom, 3)} ×: {number(self.capacity)} requests/s of this "
            f"mix can be served, {number(self.offered)} come over {self.over}"
        )


def saturation(simulation: Simulation, capacity: Capacity | None) -> Saturation:
    """Whether a simulated load was beyond saturation, by the rules above. Without a ``capacity``
    it is told by the growth of work alone, which takes an engine that fills up, and a burst at the
    end, for saturation.
    """
    records, span = simulation.replay.records, simulation.series.span
    refused = sum(record.reason == QUEUE_FULL for record in records)
    held = [record.queue_time for record in records if record.queue_time > 0]
    work = work_of(simulation) if capacity is None else capacity.work
    served = [record for record in records if record.success]
    asked = [record for record in records if record.success or record.rejected]
    half, end = (sum(work.left(record, time) for record in served) for time in (span / 2, span))

    def verdict(
        load: float | None, saturated: bool, why: str, over: str = "the load"
    ) -> Saturation:
        if refused:
            why += f"; {refused} of {len(records)} requests were refused: the queue was full"
        if held:
            why += (
                f"; the client held back {len(held)} of {len(records)} requests, for "
                f"{np.mean(held):.1f} s on average and up to {max(held):.1f} s"
            )
        most = None if capacity is None else capacity.requests_per_second
        headroom = offered = None
        if load is not None and most is not None:
            headroom, offered = 1 / load, load * most
        return Saturation(
            saturated, headroom, why, offered, over, most, half, end, refused, len(held)
        )

    if len(asked) < 2:
        return verdict(None, False, "a single request comes")
    if not span:
        return verdict(None, *_at_once(simulation))
    came = sum(work.of(record) for record in served if record.start - record.queue_time > span / 2)
    grown = end - half > GROWN * came
    left = f"the work left goes from {number(half, 3)} to {number(end, 3)} s over the second half"
    if capacity is None:
        return verdict(None, grown, left)
    load = len(asked) / span / capacity.requests_per_second
    over = "the load"
    if load <= 1 and grown and 2 * came / span > 1 + GROWN:
        load, over = 2 * came / span, "the load's second half"
    if load > 1:
        why = f"{over} brings {number(load, 3)} times the work that can be done: {left}"
        return verdict(load, True, why, over)
    why = f"work comes at {number(100 * load, 3)} % of what can be done; {left}"
    return verdict(load, False, why)


def _at_once(simulation: Simulation) -> tuple[bool, str]:
    """The verdict on requests that all come at the start."""
    served = [record for record in simulation.replay.records if record.success]
    most = round(simulation.series.most[GAUGES.index("running")])
    first = min((record.latency for record in served), default=0.0)
    last = max((record.waited for record in served), default=0.0)
    run = "all run at once"
    if most < len(served):
        run = f"at most {most} of {len(served)} run at a time"
    elif last:
        run = f"all run beside each other once the last has left the queue, after {last:.3g} s"
    if last < first:
        return False, f"all requests come at once; {run}"
    return True, (
        f"all requests come at once; {run}, and some still wait when the first ends: the "
        "throughput is what the engine can do"
    )
