"""The engine's clock: real, or virtual, so that a simulated day takes seconds."""

from __future__ import annotations

from time import monotonic, sleep


class Clock:
    """Real time."""

    def now(self) -> float:
        """Seconds on a monotonic scale."""
        return monotonic()

    def advance(self, seconds: float) -> None:
        """Move virtual time by what a step took. Real time has passed by itself."""

    def sleep_until(self, time: float) -> None:
        """Wait until then: there is nothing to do."""
        if (seconds := time - self.now()) > 0:
            sleep(seconds)


class VirtualClock(Clock):
    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds

    def sleep_until(self, time: float) -> None:
        self._now = max(self._now, time)
