"""Promises kept: of the requests that were promised a latency (`LatencyTarget`), how many got it.

Goodput is what was served in time (Zhong et al., DistServe, 2024): the rate of ``result="met"``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from octavo.schedule.request import FinishReason, LatencyTarget, Outcome, RequestRecord
from octavo.serve.metrics.families import Families

_RESULTS = ("met", "missed", "shed", "aborted")
_CLASSES = 16  # kinds of targets with series of their own
_WINDOW = 60.0  # seconds
_MOST = 4096  # requests in the window


class _Ended(NamedTuple):
    at: float  # clock seconds
    met: bool
    tokens: int  # generated


class SloMetrics:
    """``now``: the clock of the records."""

    def __init__(self, families: Families, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._window: deque[_Ended] = deque(maxlen=_MOST)
        self._requests = families.open_counter(
            "slo_requests",
            "Requests with a latency target, by what became of it: met, missed, shed (dropped as "
            "too late), or aborted while it was still being kept.",
            "slo_class",
            "result",
            most=_CLASSES,
        )
        self._tokens = families.open_counter(
            "slo_tokens",
            "Tokens generated for requests with a latency target, likewise.",
            "slo_class",
            "result",
            most=_CLASSES,
        )
        families.gauge(
            "slo_attainment_perc",
            "Share of the requests with a latency target that met it, 0 to 1, of those that ended "
            "in the last minute; 1 if none did.",
        ).set_function(self.attainment)
        families.gauge(
            "goodput_requests_per_second",
            "Requests a second that met their latency target, over the last minute.",
        ).set_function(lambda: sum(ended.met for ended in self._recent()) / _WINDOW)
        families.gauge(
            "goodput_tokens_per_second",
            "Tokens a second of requests that met their latency target, over the last minute.",
        ).set_function(lambda: sum(ended.tokens for ended in self._recent() if ended.met) / _WINDOW)

    def on_end(self, record: RequestRecord) -> None:
        target = record.target
        if target is None or not any(target):
            return
        if record.outcome is Outcome.REJECTED and FinishReason.SHED not in record.finish_reasons:
            return  # nothing was promised
        result = _result(target, record)
        slo_class = class_of(target)
        for each in _RESULTS:  # a share is of series that are there, also where one is nought
            self._requests(slo_class, each)
        self._requests(slo_class, result).inc()
        self._tokens(slo_class, result).inc(record.completion_tokens)
        if result != "aborted" and record.finished is not None:
            met = result == "met"
            self._window.append(_Ended(record.finished, met, record.completion_tokens))

    def attainment(self) -> float:
        recent = self._recent()
        return sum(ended.met for ended in recent) / len(recent) if recent else 1.0

    def _recent(self) -> list[_Ended]:
        since = self._now() - _WINDOW
        # A copy made in one go: the engine's thread may append meanwhile.
        return [ended for ended in self._window.copy() if ended.at >= since]


def class_of(target: LatencyTarget) -> str:
    """As ``octavo bench serve --goodput`` spells it, in milliseconds: "ttft:2000 tpot:50"."""
    return " ".join(
        f"{name}:{1000 * limit:g}"
        for name, limit in zip(target._fields, target, strict=True)
        if limit is not None
    )


def _result(target: LatencyTarget, record: RequestRecord) -> str:
    if record.outcome is Outcome.REJECTED:
        return "shed"
    if record.outcome is Outcome.ABORTED and _kept_so_far(target, record):
        return "aborted"
    return "met" if target.met_by(record) else "missed"


def _kept_so_far(target: LatencyTarget, record: RequestRecord) -> bool:
    """Whether a client that left had got by then what it was promised: else it may have left for
    that very reason.
    """
    ttft = record.latency if record.first_token is None else record.first_token - record.arrival
    return all(
        limit is None or value <= limit
        for limit, value in zip(target, (ttft, record.tpot, record.latency), strict=True)
    )
