"""What something takes, as it has been measured lately."""

from __future__ import annotations

from collections.abc import Callable

_RECENT = 0.2  # weight of the newest measurement, if not said otherwise,
_MOST = 4.0  # which counts as so many times what was expected, at most
_HALF_LIFE = 30.0  # seconds after which half of what is known is forgotten


class Measured:
    """Seconds that one of its kind takes: at first ``expected``, then a mean of the last ones.

    Whatever it is used to avoid is not measured any more. So what was measured is forgotten with
    time, and the thing is tried again; and one that took very long, perhaps by accident, does not
    count for as much.
    """

    def __init__(self, expected: float, now: Callable[[], float], recent: float = _RECENT) -> None:
        """``recent``: the weight of the newest measurement; 1: only that counts."""
        self._recent = recent
        self._expected = expected
        self._now = now
        self._mean = expected
        self._at = now()

    @property
    def seconds(self) -> float:
        return self._known(self._now())

    def took(self, seconds: float) -> None:
        now = self._now()
        mean = self._known(now - seconds)
        self._mean = mean + self._recent * (min(seconds, _MOST * mean) - mean)
        self._at = now

    def _known(self, now: float) -> float:
        known: float = 0.5 ** (max(0.0, now - self._at) / _HALF_LIFE)
        return self._expected + (self._mean - self._expected) * known
