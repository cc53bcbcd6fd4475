"""How long a step takes by its number of tokens, as the steps of late have shown."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from math import exp, hypot, log

# Sizes at which a correction is kept: each one where a token more may matter, then ever fewer.
KNOTS = [
    *range(1, 21), *range(22, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16),
    *range(288, 513, 32), *range(576, 1025, 64), *range(1152, 2049, 128), *range(2304, 4097, 256),
    *range(4608, 8193, 512),
]  # fmt: skip
_LEAST_GAIN = 0.1  # how far an observation moves what is known at least
_SHARED = 0.1  # of which so much moves all sizes alike: the machine got slower or faster
_LARGEST_ERROR = 0.5  # in logarithms; what is farther off was somebody else's doing
_WARMING = 8  # steps of few tokens of which the quickest says how long reading takes
_STALE = 128  # steps after which a size must be seen again to be compared with
_HALF_LIFE = 512  # steps after which what is known of a size counts half
_HOPE = 0.1  # a size far from all seen of late is taken to be better by this, so that it is tried
_FAR = 1.25  # times as large, or as small


class StepTimes:
    """Predicts a step's seconds.

    The form is a roofline with a soft knee: √(a² + (c·n)²), where ``a`` is the time of reading the
    weights and ``c`` a token's arithmetic, as steps of few tokens and steps with prompts show them;
    times a correction by size that is learned from the decode steps and interpolated between them.
    """

    def __init__(self) -> None:
        self._reading: float | None = None
        self._token: float | None = None
        self._corrections = [0.0] * len(KNOTS)  # logarithms
        self._seen = [0] * len(KNOTS)
        self._last = [-_STALE - 1] * len(KNOTS)  # the step that a size was seen in
        self._common = 0.0
        self._steps = 0
        self._small_steps = 0

    @property
    def known(self) -> bool:
        """Whether enough has been seen to predict anything."""
        return self._reading is not None or self._token is not None

    def observe(self, num_tokens: int, seconds: float, *, prompts: bool) -> None:
        """A step has run. ``prompts``: some tokens were of prompts and wanted no logits."""
        if seconds <= 0.0:
            return
        if prompts:
            if num_tokens >= 16:
                read = min(self._reading or 0.0, 0.9 * seconds)
                token = (seconds**2 - read**2) ** 0.5 / num_tokens
                self._token = token if self._token is None else 0.8 * self._token + 0.2 * token
            return
        if num_tokens <= 4 and self._small_steps < _WARMING:
            # The first steps find cold caches.
            self._small_steps += 1
            if self._reading is None or seconds < self._reading:
                self._reading = seconds
                self._seen = [0] * len(KNOTS)
                self._common = 0.0
        if not self.known:
            self._token = seconds / num_tokens
        at = _nearest(num_tokens)
        error = log(seconds) - self._log(num_tokens)
        error = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        seen = self._seen[at]
        if seen == 0:  # it stood between its neighbours
            self._corrections[at] = self._between(num_tokens)
        self._corrections[at] += (1 - _SHARED) * error * max(_LEAST_GAIN, 1 / (seen + 1))
        self._common += _SHARED * error
        self._seen[at] = seen + 1
        self._last[at] = self._steps
        self._steps += 1
        if self._steps % _HALF_LIFE == 0:
            self._seen = [count // 2 for count in self._seen]

    def predict(self, num_tokens: int) -> float:
        """Seconds. Only where ``known``."""
        return exp(self._log(num_tokens))

    def hoped(self, num_tokens: int) -> float:
        """Seconds, better than expected for a size unlike all that were tried of late."""
        near = bisect_left(KNOTS, num_tokens / _FAR), bisect_right(KNOTS, num_tokens * _FAR)
        seconds = self.predict(num_tokens)
        return seconds if any(self._seen[slice(*near)]) else seconds * (1 - _HOPE)

    def stale(self, num_tokens: int) -> bool:
        """Whether a size has not been seen of late."""
        return self._steps - self._last[_nearest(num_tokens)] > _STALE

    def sizes(self, low: int, high: int) -> Iterator[int]:
        """The sizes in (low, high] worth comparing."""
        for at in range(bisect_left(KNOTS, low + 1), len(KNOTS)):
            if KNOTS[at] > high:
                return
            yield KNOTS[at]

    def _log(self, num_tokens: int) -> float:
        # A machine reads its weights in about the time of eight tokens' arithmetic.
        token = self._token if self._token is not None else (self._reading or 0.0) / 8
        reading = self._reading if self._reading is not None else token * 8
        return log(hypot(reading, token * num_tokens)) + self._common + self._between(num_tokens)

    def _between(self, num_tokens: int) -> float:
        """The correction there: linear between the nearest sizes seen, level beyond them."""
        at = _nearest(num_tokens)
        if self._seen[at]:
            return self._corrections[at]
        low, high = at, at
        while low >= 0 and not self._seen[low]:
            low -= 1
        while high < len(KNOTS) and not self._seen[high]:
            high += 1
        if low < 0:
            return self._corrections[high] if high < len(KNOTS) else 0.0
        if high == len(KNOTS):
            return self._corrections[low]
        share = log(num_tokens / KNOTS[low]) / log(KNOTS[high] / KNOTS[low])
        return self._corrections[low] + share * (self._corrections[high] - self._corrections[low])


def _nearest(num_tokens: int) -> int:
    """The knot nearest to a size."""
    at = bisect_left(KNOTS, num_tokens)
    if at == len(KNOTS):
        return at - 1
    return at - 1 if at and num_tokens - KNOTS[at - 1] < KNOTS[at] - num_tokens else at
