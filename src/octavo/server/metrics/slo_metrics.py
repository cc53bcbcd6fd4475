"""Promises kept: how many of the requests that were promised a latency (`LatencyTarget`) got it.

Goodput is the rate of what was served in time, ``result="met"`` (Zhong et al., DistServe, 2024).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

from octavo.scheduler.request import LatencyTarget, RequestRecord, Standing, standing
from octavo.server.metrics.metric_families import Families

_RESULTS: tuple[Standing, ...] = ("met", "missed", "shed", "aborted")
_CLASSES = 16  # kinds of targets that clients ask for, with series of their own
_WINDOW = 60.0  # seconds
_SLOTS = 600  # that the window has


@dataclass(slots=True)
class _Slot:
    """The requests that ended in one tenth of a second."""

    at: int  # clock time, in slots
    ended: int = 0
    met: int = 0
    tokens: int = 0  # generated for those that met their target


class SloMetrics:
    """``now``: the clock of the records."""

    def __init__(self, families: Families, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._window: deque[_Slot] = deque(maxlen=_SLOTS)
        self._requests = families.open(
            Counter,
            "slo_requests",
            "Requests with a latency target, by what became of it: met, missed, shed (dropped as "
            "too late), or aborted while it was still being kept.",
            "slo_class",
            "result",
            most=_CLASSES,
        )
        self._tokens = families.open(
            Counter,
            "slo_tokens",
            "Tokens generated for requests with a latency target, likewise.",
            "slo_class",
            "result",
            most=_CLASSES,
        )
        self.expect(LatencyTarget())  # a class without a name, for there to be one
        families.gauge(
            "slo_attainment_perc",
            "Share of the requests with a latency target that met it, 0 to 1, of those that ended "
            "in the last minute; 1 if none did.",
        ).set_function(self.attainment)
        families.gauge(
            "goodput_requests_per_second",
            "Requests a second that met their latency target, over the last minute.",
        ).set_function(lambda: sum(slot.met for slot in self._recent()) / _WINDOW)
        families.gauge(
            "goodput_tokens_per_second",
            "Tokens a second of requests that met their latency target, over the last minute.",
        ).set_function(lambda: sum(slot.tokens for slot in self._recent()) / _WINDOW)

    def expect(self, target: LatencyTarget) -> None:
        """Have all series, from the start, for a target that the server itself promises, whatever
        targets clients make up.
        """
        slo_class = class_of(target)
        for family in (self._requests, self._tokens):
            family.reserve(slo_class, *((result,) for result in _RESULTS))

    def on_end(self, record: RequestRecord) -> None:
        result = standing(record, self._now())
        if result is None or record.scheduling.target is None:
            return
        slo_class = class_of(record.scheduling.target)
        for each in _RESULTS:  # a share is of series that are there, even those at 0
            self._requests(slo_class, each)
            self._tokens(slo_class, each)
        self._requests(slo_class, result).inc()
        self._tokens(slo_class, result).inc(record.completion_tokens)
        if result != "aborted" and record.finished is not None:
            self._count(record.finished, result == "met", record.completion_tokens)

    def attainment(self) -> float:
        recent = self._recent()
        ended = sum(slot.ended for slot in recent)
        return sum(slot.met for slot in recent) / ended if ended else 1.0

    def _count(self, finished: float, met: bool, tokens: int) -> None:
        at = _slot(finished)
        if not self._window or self._window[-1].at < at:
            self._window.append(_Slot(at))
        slot = self._window[-1]
        slot.ended += 1
        if met:
            slot.met += 1
            slot.tokens += tokens

    def _recent(self) -> list[_Slot]:
        first = _slot(self._now()) - _SLOTS + 1
        # A copy made in one go: the engine's thread may append meanwhile.
        return [slot for slot in self._window.copy() if slot.at >= first]


def _slot(at: float) -> int:
    return int(at * (_SLOTS / _WINDOW))


def class_of(target: LatencyTarget) -> str:
    """Return a target as ``octavo bench serve --goodput`` spells it, in milliseconds: "ttft:2000
    tpot:50".
    """
    return " ".join(
        f"{name}:{1000 * limit:g}"
        for name, limit in zip(target._fields, target, strict=True)
        if limit is not None
    )
