"""An engine's state over time, looked at now and then: queue, running sequences, cache, counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.engine.engine import Engine

_MOST = 4096  # samples kept; beyond it every other one goes
_LEAST = 1e-3  # seconds between samples

COLUMNS = (
    *("time", "running", "waiting", "kv_blocks_used", "kv_unfilled_blocks"),
    *("generation_tokens", "computed_tokens", "prefix_queries", "prefix_hits", "preemptions"),
)  # fmt: skip
_COUNTERS = COLUMNS[5:]

Float64 = npt.NDArray[np.float64]


class Series:
    """Samples of gauges and counters, and of the queue more: whether somebody waits is looked at
    after every step.

    ``span`` is the time of the last arrival, in seconds from the start.
    """

    def __init__(self, span: float) -> None:
        self.span = span
        self.peak_waiting = 0
        self.queue_since = math.inf  # when the queue was empty last, as of ``span``; inf: it is
        self._every = max(span / (_MOST / 2), _LEAST)
        self.next = 0.0  # when a sample is due
        self._last = 0.0
        self._rows: list[tuple[float, ...]] = []

    def observe(self, engine: Engine, now: float) -> None:
        """After a step that ended ``now``, in seconds from the start."""
        waiting = len(engine.scheduler.waiting)
        self.peak_waiting = max(self.peak_waiting, waiting)
        if now <= self.span:
            if not waiting:
                self.queue_since = math.inf
            elif self.queue_since == math.inf:
                self.queue_since = self._last
        self._last = now
        if now >= self.next:
            self.sample(engine, now)

    def sample(self, engine: Engine, now: float) -> None:
        stats = engine.stats()
        gauges = (stats.running, stats.waiting, stats.kv_blocks_used)
        unfilled = stats.kv_waste * stats.kv_blocks_used
        counters = (getattr(stats, name) for name in _COUNTERS)
        self._rows.append((now, *gauges, unfilled, *counters))
        if len(self._rows) >= _MOST:
            del self._rows[::2]
            self._every *= 2
        self.next = now + self._every

    def columns(self) -> dict[str, Float64]:
        """[samples] of each of `COLUMNS`."""
        table = np.array(self._rows, dtype=np.float64).reshape(-1, len(COLUMNS))
        return dict(zip(COLUMNS, table.T, strict=True))

    def waste(self) -> float:
        """Allocated but unfilled slots ÷ allocated slots, over all samples."""
        columns = self.columns()
        used = columns["kv_blocks_used"].sum()
        return float(columns["kv_unfilled_blocks"].sum() / used) if used else 0.0

    def intervals(self, count: int) -> dict[str, Any]:
        """Over ``count`` equal parts of the time: means of gauges, what counters rose by. A part
        without a sample has the state before it.
        """
        columns = self.columns()
        times = columns["time"]
        end = max(float(times[-1]), 1e-9) if len(times) else 1.0
        edges = np.linspace(0.0, end, count + 1)
        part = np.clip(np.searchsorted(edges, times, side="left") - 1, 0, count - 1)
        samples = np.bincount(part, minlength=count)
        last = np.cumsum(samples) - 1  # the last sample in or before each part
        result: dict[str, Any] = {"time": edges[1:].tolist()}
        for name in COLUMNS[1:5]:
            sums = np.bincount(part, columns[name], count)
            before = np.where(last >= 0, columns[name][np.maximum(last, 0)], 0.0)
            means = np.where(samples > 0, sums / np.maximum(samples, 1), before)
            result[name] = means.tolist()
        for name in _COUNTERS:
            counted = np.interp(edges, [0.0, *times], [0.0, *columns[name]])
            result[name] = np.diff(counted).tolist()
        return result
