"""An engine's state over time: queue, running sequences, cache, counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.engine.engine import Engine

_MOST = 4096  # samples kept; beyond it every other one goes
_LEAST = 1e-3  # seconds between samples

GAUGES = ("running", "waiting", "kv_blocks_used", "kv_unfilled_blocks")
COUNTERS = ("generation_tokens", "computed_tokens", "prefix_queries", "prefix_hits", "preemptions")
COLUMNS = ("time", *GAUGES, *COUNTERS)

Float64 = npt.NDArray[np.float64]


class _State(NamedTuple):
    """`GAUGES`."""

    running: int
    waiting: int
    used: int
    unfilled: float


_IDLE = _State(0, 0, 0, 0.0)


class Series:
    """Gauges and counters as sums up to now: a gauge's is its integral over time, of every step and
    of the time between steps, so that a mean over any time is a difference of two samples. What
    runs and what waits is that of each step; of the cache it is what is held at a step's end.

    ``span`` is the time of the last arrival, in seconds from the start.
    """

    def __init__(self, span: float) -> None:
        self.span = span
        self.most = [0.0] * len(GAUGES)  # of each gauge
        self._every = max(span / (_MOST / 2), _LEAST)
        self.next = 0.0  # when a sample is due
        self._sums = [0.0] * len(GAUGES)  # up to ``_from``
        # Like steps are added up as one stretch: leaps tell of its first and last only, and the
        # same additions are made without them.
        self._from, self._first = 0.0, _IDLE
        self._last, self._state = 0.0, _IDLE
        self._idle = True  # from ``_last`` on
        self._rows: list[tuple[float, ...]] = []

    def observe(self, engine: Engine, now: float, ended: int = 0) -> None:
        """After a step, or a time without any, that ended ``now``, in seconds from the start.
        ``ended`` requests ended with the step.
        """
        state = _state(engine, ended)
        if ended and state.used < self._state.used:  # what they held was held in the step, too
            state = state._replace(used=self._state.used, unfilled=self._state.unfilled)
        self.most = [max(pair) for pair in zip(self.most, state, strict=True)]
        idle = not engine.has_work()
        if self._idle and idle and not ended and now - self._last > self._every:
            self._sample(engine, self._last)  # both edges of a long time without work
        if ended or self._idle or state[:2] != self._state[:2]:
            self._close()
            self._add(now - self._last, state)
            self._from, self._first = now, state
        self._last, self._state = now, state
        self._idle = idle
        if now >= self.next:
            self._sample(engine, now)

    def finish(self, engine: Engine) -> None:
        """After the last step."""
        self._sample(engine, self._last)

    def _close(self) -> None:
        """Add the stretch up to ``_last``; along it gauges go evenly from the first to the last."""
        width = self._last - self._from
        if width > 0:
            self._add(width / 2, self._first)
            self._add(width / 2, self._state)
        self._from, self._first = self._last, self._state

    def _add(self, seconds: float, state: _State) -> None:
        for index, value in enumerate(state):
            self._sums[index] += seconds * value

    def _sample(self, engine: Engine, now: float) -> None:
        """``now`` is ``_last``; the counters have not moved since."""
        self._close()
        if self._rows and self._rows[-1][0] == now:
            self._rows.pop()
        stats = engine.stats()
        self._rows.append((now, *self._sums, *(getattr(stats, name) for name in COUNTERS)))
        if len(self._rows) >= _MOST:
            del self._rows[::2]
            self._every *= 2
        self.next = now + self._every

    def columns(self) -> dict[str, Float64]:
        """[samples] of each of `COLUMNS`: the time, gauges as integrals over the seconds up to it,
        counters.
        """
        table = np.array(self._rows, dtype=np.float64).reshape(-1, len(COLUMNS))
        return dict(zip(COLUMNS, table.T, strict=True))

    def levels(self, gauge: str) -> list[tuple[float, float]]:
        """Times, and the gauge's mean from each to the next; at the end nothing runs."""
        columns = self.columns()
        times, sums = (np.concatenate(([0.0], columns[name])) for name in ("time", gauge))
        widths = np.diff(times)
        there = widths > 0
        values = np.diff(sums)[there] / widths[there]
        return [*zip(times[:-1][there].tolist(), values.tolist(), strict=True), (times[-1], 0.0)]

    def means(self) -> dict[str, float]:
        """Return the mean of each gauge over the whole time."""
        seconds = self._rows[-1][0] if self._rows else 0.0
        sums = self._rows[-1][1:] if self._rows else self._sums
        return {name: sums[index] / max(seconds, 1e-9) for index, name in enumerate(GAUGES)}

    def waste(self) -> float:
        """Allocated but unfilled slots ÷ allocated slots, over the whole time."""
        means = self.means()
        used = means["kv_blocks_used"]
        return means["kv_unfilled_blocks"] / used if used else 0.0

    def intervals(self, count: int) -> dict[str, Any]:
        """Over ``count`` equal parts of the time: means of gauges, what counters rose by."""
        columns = self.columns()
        times = columns["time"]
        end = max(float(times[-1]), 1e-9) if len(times) else 1.0
        edges = np.linspace(0.0, end, count + 1)
        width = end / count
        result: dict[str, Any] = {"time": edges[1:].tolist()}
        for name in COLUMNS[1:]:
            risen = np.diff(np.interp(edges, [0.0, *times], [0.0, *columns[name]]))
            result[name] = (risen / width if name in GAUGES else risen).tolist()
        return result


def _state(engine: Engine, ended: int) -> _State:
    """In the step that has been."""
    scheduler = engine.scheduler
    used = scheduler.kv.pool.num_used
    return _State(
        len(scheduler.decoding) + len(scheduler.prefilling) + ended,
        len(scheduler.waiting),
        used,
        scheduler.kv.waste() * used,
    )
